"""Shared parts of the model loaders of engines: their options, what they cannot load, and where checkpoints are."""

from __future__ import annotations

import json
import os
from contextlib import closing
from pathlib import Path
from typing import Any

from torch import nn

from epload.checkpoint.base import Checkpoint
from epload.checkpoint.file_sets import INDEX, SINGLE
from epload.core.log import logger
from epload.errors import CheckpointError
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


def open_weights(source: str) -> Checkpoint:
    """Opens a checkpoint. Raises CheckpointError, also if a folder has a set of weights that engines load in place of it."""
    checkpoint = Checkpoint.open(source)
    store = checkpoint._store
    if store is None or checkpoint.manifest.source != store.path_of(SINGLE) or INDEX not in store.names([SINGLE, INDEX]):
        return checkpoint
    if f'"{SINGLE}"'.encode() not in store.peek(INDEX):
        checkpoint.close()
        raise CheckpointError(f"{store} has {SINGLE} and an index of other files: delete that of the two which is out of date")
    return checkpoint


def fill(engine: EngineModel, source: str, quantized: bool, options: dict[str, Any]) -> None:
    """Fills an engine's model from a checkpoint. Strict by default, unless the model is quantized: it may have parameters that
    its checkpoint lacks."""
    strict = not quantized if options.get("strict") is None else options["strict"]
    with closing(open_weights(source)) as checkpoint:
        logger.info("%s", load_engine(engine, checkpoint, strict=strict, verify=options.get("verify", False)))


def unsupported_weights(model: nn.Module) -> str:
    """Returns what keeps epload from finding a model's weights; empty if nothing does."""
    if getattr(model, "secondary_weights", ()):
        return "has weights in a second checkpoint, which epload does not read"
    if getattr(model, "allow_patterns_overrides", None):
        return "selects files of the checkpoint, which epload does not"
    return ""


def source_of(place: str, revision: str | None, modelscope: str) -> str:
    """Returns the checkpoint that an engine's configuration names: a path, a URL or a model on the Hub. Raises ValueError if the
    environment variable ``modelscope`` has the engine read from ModelScope instead."""
    if "://" in place or Path(place).exists():
        return place
    if os.environ.get(modelscope, "").strip().lower() in ("1", "true"):
        raise ValueError(f"epload does not read from ModelScope ({modelscope}); pass a local folder")
    return f"hf://{place}@{revision}" if revision else f"hf://{place}"
