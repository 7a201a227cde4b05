"""Judges each class of transformers that an engine serves: what epload fills, and what the engine's own loader fills."""

from __future__ import annotations

import gc
import json
import resource
import shutil
import signal
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import epload
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


def judge_all(rank: int, names: list[str], folder: Path, compare: Callable[[Path], str]) -> dict[str, str]:
    """Judges classes one after the other.

    Args:
        compare: builds the engine's model from a folder, fills it in both ways, and returns the verdict. Raises an error if the
            class cannot be judged.

    Returns:
        The verdict by class: "equal", "refused" as by :func:`verdict_on`, or what is wrong; nothing for those that do not build,
        here or in the engine.
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
            with suppress(Exception):
                verdicts[name] = compare(path)
            signal.alarm(0)
        gc.collect()
        dist.barrier()
        if rank == 0:
            shutil.rmtree(path, ignore_errors=True)
    return verdicts


def verdict_on(error: Exception, unwritten: list[str]) -> str:
    """Returns "refused" for an error of epload that lists only parameters which the engine's own loader leaves unwritten."""
    missing = error.missing_keys if isinstance(error, epload.ModelMismatch) else []
    return "refused" if missing and {*missing} <= {*unwritten} else f"{type(error).__name__}: {error}"


def check(verdicts: dict[str, str], equal: int) -> None:
    """Raises AssertionError if something is wrong, or fewer classes are equal."""
    assert {name: text for name, text in verdicts.items() if text not in ("equal", "refused")} == {}
    counts = Counter(verdicts.values())
    print(dict(counts))
    assert counts["equal"] >= equal


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
