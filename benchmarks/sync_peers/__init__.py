"""The ways to sync a trainer's weights that are compared. Each file in this folder is a peer; there is no other registration.

A peer defines ``send(job)``, called on every rank of the trainer, and ``receive(job)``, on every rank of the rollout job, and

    TITLE = "title in tables"            # defaults to the file name
    MODES = {"mode": {keyword: value}}   # several peers in one file: send(job, keyword=value), receive(job, keyword=value)
    CHANGES = {"mode": "2 %"}            # what a version changes (see sync_worker.Values); else every element
    FILLS = False                        # receive() fills no model, but returns what is wrong in what came: the floor

``commit(job)``, if there is one, is called on every rank of the rollout job after a version has come, and timed apart;
``prepare(job)`` on every rank of both jobs before, not timed.
``job.keep`` is a dict that persists between versions, ``job.exit`` closes what is in it at the end.
"""

from __future__ import annotations

import importlib
import pickle
import pkgutil
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

import epload

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Start and size, in elements."""


class Span:
    """What joins the two jobs: a store, and gloo groups over ranks of both, the trainer's first. Touches no default group."""

    def __init__(self, store: dist.Store, rank: int, world: int, limit: float) -> None:
        self.store, self.rank, self.world = store, rank, world
        self._limit = timedelta(seconds=limit)
        self._exchanges = 0
        self.group = self.make_group("span", range(world))

    def make_group(self, name: str, ranks: Sequence[int]) -> Any:
        """Collective over ``ranks``, which are numbered in this order in the group."""
        own = list(ranks).index(self.rank)
        return dist.ProcessGroupGloo(dist.PrefixStore(name, self.store), own, len(ranks), self._limit)

    def barrier(self) -> None:
        self.group.barrier().wait()

    def exchange(self, value: Any) -> list[Any]:
        """Everyone's value. Collective."""
        self._exchanges += 1
        store = dist.PrefixStore(f"exchange/{self._exchanges}", self.store)
        store.set(str(self.rank), pickle.dumps(value))
        values = [pickle.loads(store.get(str(rank))) for rank in range(self.world)]
        self.barrier()
        store.delete_key(str(self.rank))
        return values


@dataclass
class SyncJob:
    """One version, as passed to a peer."""

    model: nn.Module
    """The trainer's, sharded by FSDP2 over its ranks; or the rollout job's, sharded by tensor parallelism inside each node and
    replicated over nodes. Both have storage."""
    version: int
    peer: str
    span: Span
    senders: int
    """Ranks of the trainer; the rollout job's come after them in ``span``."""
    topology: epload.Topology
    """Of this rank's own job."""
    host: str
    """At which ranks of the other job reach the trainer's first rank."""
    nodes: tuple[tuple[int, ...], ...]
    """The rollout job's, in ranks of ``span``."""
    keep: dict[str, Any]
    exit: ExitStack
    phases: dict[str, float] = field(default_factory=dict)
    """Seconds."""

    @property
    def rank(self) -> int:
        """In ``span``."""
        return self.span.rank

    @property
    def receivers(self) -> int:
        return self.span.world - self.senders


@dataclass(frozen=True)
class SyncPeer:
    name: str
    title: str
    send: Callable[[SyncJob], Any]
    receive: Callable[[SyncJob], Any]
    commit: Callable[[SyncJob], Any] | None
    prepare: Callable[[SyncJob], Any] | None
    fills: bool
    changes: str


def names() -> list[str]:
    """The names of all files in this folder."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def find(name: str) -> list[SyncPeer]:
    """The peers in one file. Raises ImportError if the library it uses is not installed."""
    module = importlib.import_module(f"{__name__}.{name}")
    title = getattr(module, "TITLE", name)
    modes: dict[str, dict[str, Any]] = getattr(module, "MODES", {"": {}})
    return [
        SyncPeer(
            f"{name}:{mode}" if mode else name,
            f"{title}, {mode}" if mode else title,
            partial(module.send, **options),
            partial(module.receive, **options),
            getattr(module, "commit", None),
            getattr(module, "prepare", None),
            getattr(module, "FILLS", True),
            getattr(module, "CHANGES", {}).get(mode, "all"),
        )
        for mode, options in modes.items()
    ]


def local(parameter: Tensor) -> Tensor:
    """This rank's part of a parameter; shares its memory."""
    with torch.no_grad():
        return parameter.to_local() if isinstance(parameter, DTensor) else parameter.detach()


def box_of(parameter: Tensor, rank: int | None = None) -> Box:
    """The box of a parameter that this rank has, or the rank ``rank`` of a mesh with one dim."""
    start, size = [0] * parameter.dim(), list(parameter.shape)
    if isinstance(parameter, DTensor):
        mesh = parameter.device_mesh
        for dim_of_mesh, placement in enumerate(parameter.placements):
            if isinstance(placement, Shard):
                own = mesh.get_local_rank(dim_of_mesh) if rank is None else rank
                each = -(-size[placement.dim] // mesh.size(dim_of_mesh))
                first = min(own * each, size[placement.dim])
                start[placement.dim] += first
                size[placement.dim] = min(each, size[placement.dim] - first)
    return tuple(start), tuple(size)


def cut(tensor: Tensor, start: Sequence[int], size: Sequence[int]) -> Tensor:
    """A box of a tensor, as a view."""
    for dim, (first, length) in enumerate(zip(start, size, strict=True)):
        tensor = tensor.narrow(dim, first, length)
    return tensor
