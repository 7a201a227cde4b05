"""Judges each class of transformers that an engine serves: what epload fills, and what the engine's own loader fills."""

from __future__ import annotations

import gc
import json
import resource
import shutil
import signal
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from campaigns.census import judge
from campaigns.census.classes import auto_classes

_PATIENCE = 120
"""Seconds for one class."""
_MEMORY = 8 << 30
"""Bytes that a rank may take: some engine's models are large, however small the configuration."""


def served(architectures: Iterable[str]) -> list[str]:
    """Returns the classes of an engine that transformers has too, first one with experts: the first one decides on groups."""
    first = "Qwen3MoeForCausalLM"
    return [first, *sorted({*architectures} & auto_classes().keys() - {first})]


def judge_all(rank: int, names: list[str], folder: Path, compare: Callable[[Path], list[str]]) -> dict[str, str]:
    """Judges classes one after the other.

    Args:
        compare: builds the engine's model from a folder, fills it in both ways, and returns the names of tensors that differ.
            Raises AssertionError if epload fails, anything else if the class cannot be judged.

    Returns:
        By class "right", or what is wrong; nothing for those that do not build, here or in the engine.
    """
    signal.signal(signal.SIGALRM, _give_up)
    resource.setrlimit(resource.RLIMIT_DATA, (_MEMORY, _MEMORY))
    verdicts = {}
    for name in names:
        path = folder / name
        if rank == 0:
            _write(name, path)
        dist.barrier()
        if (path / "config.json").exists():
            signal.alarm(_PATIENCE)
            try:
                verdicts[name] = ", ".join(compare(path)) or "right"
            except AssertionError as error:
                if error.args and str(error).startswith("epload"):
                    verdicts[name] = str(error)
            except Exception:
                pass
            signal.alarm(0)
        gc.collect()
        dist.barrier()
        if rank == 0:
            shutil.rmtree(path, ignore_errors=True)
    return verdicts


def fails(error: Exception, unwritten: list[str]) -> None:
    """Raises AssertionError for an error of epload, unless it names a parameter that the engine's own loader leaves unwritten."""
    if not any(name in str(error) for name in unwritten):
        raise AssertionError(f"epload: {type(error).__name__}: {error}") from error


def unwritten(tensors: dict[str, Tensor]) -> list[str]:
    """Returns what a loader has left poisoned."""
    return [name for name, tensor in tensors.items() if tensor.is_floating_point() and tensor.isnan().any()]


def _give_up(*_: Any) -> None:
    raise TimeoutError(f"took more than {_PATIENCE} s")


def _write(name: str, path: Path) -> None:
    """Writes a small checkpoint of a class; nothing if it does not build."""
    try:
        _, _, model = judge._build(name, auto_classes()[name])
        torch.manual_seed(0)
        with torch.no_grad():
            for tensor in model.state_dict().values():
                if tensor.is_floating_point():
                    tensor.copy_(torch.randn(tensor.shape))
        model.save_pretrained(path)  # type: ignore[operator]
    except Exception:
        shutil.rmtree(path, ignore_errors=True)
        return
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "architectures": [name]}))
