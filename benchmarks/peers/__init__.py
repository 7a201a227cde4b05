"""The loaders under comparison. Each file in this folder is a peer; there is no other registration.

A peer defines ``load(job)``, which fills ``job.model`` from the checkpoint ``job.file`` (or ``job.folder``) on every rank, and

    TITLE = "title in tables"            # defaults to the file name
    CASES = ("meta", "reload")           # the default; in "library", load builds and returns a transformers model
    MODES = {"mode": {keyword: value}}   # several peers in one file: load(job, keyword=value)
    MODE_CASES = {"mode": ("reload",)}   # for a mode that supports only some of CASES
    prepare(job)                         # is called before each load and not timed

``with job.phase("read"):`` and ``with job.phase("slice"):`` time phases, where a peer can separate them. ``job.keep`` is a dict
that persists between loads. A peer that raises, hangs or cannot be imported is reported and does not affect the others.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import nn

import epload


@dataclass
class Job:
    """One load, as passed to a peer. Collective over all ranks."""

    model: nn.Module
    """Sharded by FSDP2, one group per layer; on meta, or filled with zeros if ``case`` is "reload"."""
    case: str
    folder: Path
    """The checkpoint: model.safetensors and config.json."""
    rank: int
    topology: epload.Topology
    keep: dict[str, Any]
    phases: dict[str, float] = field(default_factory=dict)
    """Seconds."""

    @property
    def file(self) -> Path:
        return self.folder / "model.safetensors"

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        began = perf_counter()
        yield
        self.phases[name] = self.phases.get(name, 0.0) + perf_counter() - began

    def materialize(self) -> None:
        """Calls ``to_empty``, as most loaders do."""
        if next(self.model.parameters()).is_meta:
            with self.phase("materialize"):
                self.model.to_empty(device="cpu")


@dataclass(frozen=True)
class Peer:
    name: str
    title: str
    cases: tuple[str, ...]
    load: Callable[[Job], nn.Module | None]
    prepare: Callable[[Job], None]

    @property
    def ours(self) -> bool:
        return self.name.startswith("epload")


def names() -> list[str]:
    """The names of all files in this folder."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def find(name: str) -> list[Peer]:
    """The peers in one file. Raises ImportError if the library it uses is not installed."""
    module = importlib.import_module(f"{__name__}.{name}")
    title, cases = getattr(module, "TITLE", name), getattr(module, "CASES", ("meta", "reload"))
    modes, prepare = getattr(module, "MODES", None), getattr(module, "prepare", lambda job: None)
    if modes is None:
        return [Peer(name, title, cases, module.load, prepare)]
    return [
        Peer(
            f"{name}:{mode}",
            f"{title} {mode}",
            getattr(module, "MODE_CASES", {}).get(mode, cases),
            lambda job, options=options: module.load(job, **options),
            prepare,
        )
        for mode, options in modes.items()
    ]


def local_slice(parameter: Any, full: Any) -> torch.Tensor:
    """This rank's rows of a full tensor, for a parameter that FSDP2 shards along dim 0 over all ranks."""
    each = -(-parameter.shape[0] // parameter.device_mesh.size())
    begin = parameter.device_mesh.get_local_rank() * each
    return full[begin : begin + parameter.to_local().shape[0]]
