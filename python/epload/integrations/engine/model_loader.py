"""Shared parts of the model loaders of engines: their options, what they cannot load, and where checkpoints are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torch import nn

from epload.core.log import logger
from epload.integrations.engine.loading import load_engine
from epload.integrations.engine.model import EngineModel


def read_options(load_config: Any, load_format: str) -> dict[str, Any]:
    """Returns ``verify`` and ``strict``, as far as they are in an engine's ``--model-loader-extra-config``. Raises ValueError for
    other options."""
    extra = load_config.model_loader_extra_config or {}
    options: dict[str, Any] = json.loads(extra) if isinstance(extra, str) else dict(extra)
    if others := options.keys() - {"verify", "strict"}:
        raise ValueError(f"expected model_loader_extra_config to have verify and strict only, got {', '.join(sorted(others))}")
    if load_config.download_dir:
        raise ValueError(f"--load-format {load_format} has no --download-dir with epload: set HF_HUB_CACHE instead")
    return options


def fill(engine: EngineModel, source: str, quantized: bool, options: dict[str, Any]) -> None:
    """Fills an engine's model from a checkpoint. Strict by default, unless the model is quantized: it may have parameters that
    its checkpoint lacks."""
    strict = not quantized if options.get("strict") is None else options["strict"]
    logger.info("%s", load_engine(engine, source, strict=strict, verify=options.get("verify", False)))


def unsupported_weights(model: nn.Module) -> str:
    """Returns what keeps epload from finding a model's weights; empty if nothing does."""
    if getattr(model, "secondary_weights", ()):
        return "has weights in a second checkpoint, which epload does not read"
    if getattr(model, "allow_patterns_overrides", None):
        return "selects files of the checkpoint, which epload does not"
    return ""


def source_of(place: str, revision: str | None) -> str:
    """Returns the checkpoint that an engine's configuration names: a path, a URL or a model on the Hub."""
    if "://" in place or Path(place).exists():
        return place
    return f"hf://{place}@{revision}" if revision else f"hf://{place}"
