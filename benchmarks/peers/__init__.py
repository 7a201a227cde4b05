"""The loaders that are compared. A file in this folder is a peer; nothing else has to be told of it.

A peer defines ``load(job)``, which fills ``job.model`` from the checkpoint ``job.file`` (or ``job.folder``) on every rank, and

    TITLE = "what tables call it"        # the file's name by default
    CASES = ("meta", "reload")           # the default; "library" is a transformers model, which load then makes and returns
    MODES = {"mode": {keyword: value}}   # if one file is several peers: load(job, keyword=value)
    MODE_CASES = {"mode": ("reload",)}   # of a mode that is not for all of CASES

``with job.phase("read"):`` and ``with job.phase("slice"):`` tell phases apart where the peer can. ``job.keep`` is a dict that
lasts from one load to the next. What raises, hangs or cannot be imported is shown as such and stops nothing else.
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
    """One load, as a peer sees it. Collective over all ranks."""

    model: nn.Module
    """Sharded by FSDP2, one group a layer: on meta, or filled with zeros (``case`` is "reload")."""
    case: str
    folder: Path
    """Of the checkpoint: model.safetensors and config.json."""
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
        """As most loaders do."""
        if next(self.model.parameters()).is_meta:
            with self.phase("materialize"):
                self.model.to_empty(device="cpu")


@dataclass(frozen=True)
class Peer:
    name: str
    title: str
    cases: tuple[str, ...]
    load: Callable[[Job], nn.Module | None]

    @property
    def ours(self) -> bool:
        return self.name.startswith("epload")


def names() -> list[str]:
    """Of all files of this folder."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def find(name: str) -> list[Peer]:
    """The peers of one file. Raises ImportError if what it compares with is not installed."""
    module = importlib.import_module(f"{__name__}.{name}")
    title, cases = getattr(module, "TITLE", name), getattr(module, "CASES", ("meta", "reload"))
    modes = getattr(module, "MODES", None)
    if modes is None:
        return [Peer(name, title, cases, module.load)]
    return [
        Peer(
            f"{name}:{mode}",
            f"{title} {mode}",
            getattr(module, "MODE_CASES", {}).get(mode, cases),
            lambda job, options=options: module.load(job, **options),
        )
        for mode, options in modes.items()
    ]


def local_slice(parameter: Any, full: Any) -> torch.Tensor:
    """This rank's rows of a full tensor, for a parameter that FSDP2 shards along dim 0 over all ranks."""
    each = -(-parameter.shape[0] // parameter.device_mesh.size())
    begin = parameter.device_mesh.get_local_rank() * each
    return full[begin : begin + parameter.to_local().shape[0]]
