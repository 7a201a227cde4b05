"""Times the planning of a sync for one sender and one receiver of many, in one process: pure computation, as nothing moves.

The trainer shards its weights in bfloat16 by FSDP2 over 64 ranks, of which there are replicas (HSDP) where it has more.
An engine has 8 ranks, which share the weights by tensor parallelism, so that its node takes all bytes; or it has 64 ranks on 8
nodes, which have 4 of each layer's experts each, and everything else by tensor parallelism inside each node.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from time import perf_counter
from typing import NamedTuple

import torch
from torch import Tensor

from clusters import MODELS, Model
from epload.core.pieces import Kinds, distinct_values
from epload.core.placement import Layout, Sharded, owned_regions, row_major_strides
from epload.core.views import Shape, View
from epload.planning.exchange import plan_exchange
from epload.planning.holdings import NO_PART, Holdings, Share, local_views
from epload.planning.schedule import SYNC_WAVE_BYTES
from epload.planning.streams import Members
from summary import Row
from tables import Table, seconds

SHARDED = 64
"""Ranks of the trainer that share the weights."""
NODE = 8
WORLDS = ((64, 64), (256, 1024), (1024, 4096))
NAMES = ("Qwen3-235B-A22B", "DeepSeek-V3")
"""Models that are planned."""
ENGINES = (1, 8)
"""Nodes of an engine."""


class Tensors(NamedTuple):
    """The trainer's tensors; see :class:`epload.core.pieces.Metadata`."""

    names: tuple[str, ...]
    shapes: tuple[Shape, ...]
    dtypes: tuple[torch.dtype, ...]
    source: str = "the trainer"
    digest: bytes = bytes(16)

    @property
    def kinds(self) -> Kinds:
        return distinct_values(list(zip(self.shapes, self.dtypes, strict=True)))


class Weight(NamedTuple):
    shape: Shape
    expert: int | None
    """Number of the expert in its layer, if it is one's."""


def weights(model: Model) -> Iterator[Weight]:
    """In the order of the checkpoint."""
    h, size, of_experts = model.hidden, model.expert_size, 0
    for rows, columns in model.weights():
        expert = None
        if (rows, columns) in ((size, h), (h, size)):
            of_experts += 1
            number = (of_experts - 1) // 3 % (model.experts + model.shared_experts)
            expert = number if number < model.experts else None
        yield Weight((columns,) if rows == 1 else (rows, columns), expert)


@cache
def trained(weight: Weight) -> Layout:
    return Layout(weight.shape, (SHARDED,), (Sharded(0),))


@cache
def served(weight: Weight, nodes: int, rank: int, experts: int) -> Layout | None:
    """On a rank of an engine; None for another rank's expert."""
    shape = weight.shape
    if nodes > 1 and weight.expert is not None:
        mine = weight.expert * nodes * NODE // experts == rank
        return Layout(shape, (NODE,), (None,)) if mine else None
    if len(shape) == 1:
        return Layout(shape, (NODE,), (None,))
    return Layout(shape, (NODE,), (Sharded(0 if shape[0] >= shape[1] else 1),))


def holdings(layouts: list[Layout | None], rank: int) -> Holdings:
    """Of a rank of a one-dimensional mesh."""
    numbers = {layout: i for i, layout in enumerate(dict.fromkeys(layout for layout in layouts if layout is not None))}
    class_of = [numbers[layout] if layout is not None else NO_PART for layout in layouts]
    shares = tuple(_share(layout, rank) for layout in numbers)
    return Holdings(torch.tensor(class_of), shares, [(i,) for i in range(len(layouts))])


def _share(layout: Layout, rank: int) -> Share:
    view = View((0,) * len(layout.shape), layout.shape, 0, row_major_strides(layout.shape))
    return Share(layout.shape, tuple(local_views(view, owned_regions(layout, (rank,)))), torch.bfloat16)


def measure(name: str, worlds: tuple[tuple[int, int], ...] = WORLDS, repeat: int = 5) -> list[Row]:
    """Seconds of one sender and one receiver, for each number of ranks and each kind of engine."""
    torch.set_num_threads(1)  # as torchrun gives each rank
    model = next(each for each in MODELS if each.name == name)
    found = list(weights(model))
    shapes = tuple(weight.shape for weight in found)
    tensors = Tensors(tuple(f"w{i}" for i in range(len(found))), shapes, (torch.bfloat16,) * len(found))
    theirs = [holdings([trained(weight) for weight in found], rank) for rank in range(SHARDED)]
    rows = []
    for nodes in ENGINES:
        ours = [
            holdings([served(weight, nodes, rank, model.experts) for weight in found], rank % NODE)
            for rank in range(nodes * NODE)
        ]
        for trainers, rollouts in worlds:
            row: Row = {
                "model": name, "trainers": trainers, "rollouts": rollouts, "engine": nodes, "tensors": len(found),
                "total": 2 * sum(math.prod(shape) for shape in shapes),
            }  # fmt: skip
            for side, rank, own in (("sender", 0, theirs[0]), ("receiver", trainers, ours[0])):
                taken = [_plan(tensors, theirs, ours, trainers, rollouts, rank, own) for _ in range(repeat)]
                row[side] = {"seconds": statistics.median(each for each, *_ in taken)}
                row[side]["buckets"], row[side]["waves"], row[side]["nbytes"] = taken[0][1:]
            rows.append(row)
    return rows


def _plan(
    tensors: Tensors,
    theirs: list[Holdings],
    ours: list[Holdings],
    trainers: int,
    rollouts: int,
    rank: int,
    own: Holdings,
) -> tuple[float, int, int, int]:
    """Seconds, buckets, waves and bytes of a rank's plan. What is equal in holdings is one object, as epload has it."""
    members = Members(_nodes(0, trainers), _nodes(trainers, trainers + rollouts))
    columns: dict[bytes, Tensor] = {}
    from_trainer, from_engine = ([_sharing(each, columns) for each in shares] for shares in (theirs, ours))
    of_ranks = {i: from_trainer[i % len(theirs)] for i in range(trainers)}
    of_ranks |= {trainers + i: from_engine[i % len(ours)] for i in range(rollouts)}
    began = perf_counter()
    plan = plan_exchange(tensors, members, of_ranks, rank, own, SYNC_WAVE_BYTES)
    return perf_counter() - began, len(plan.buckets), len(plan.waves), plan.nbytes


def _sharing(holdings: Holdings, columns: dict[bytes, Tensor]) -> Holdings:
    """Returns what other ranks know of a rank's holdings."""
    return replace(holdings, class_of=columns.setdefault(holdings.encode()[0], holdings.class_of), targets=())


def _nodes(first: int, end: int) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(range(begin, min(begin + NODE, end))) for begin in range(first, end, NODE))


def table(rows: list[Row]) -> Table:
    lines = []
    for row in rows:
        line = [
            row["model"],
            f"{row['tensors']:,}",
            f"{row['trainers']:,} + {row['rollouts']:,}",
            f"{row['engine'] * NODE} ranks",
        ]
        for side in ("sender", "receiver"):
            planned = row[side]
            line += [seconds(planned["seconds"]), f"{planned['buckets']:,}", f"{planned['nbytes'] / 1e9:.1f}"]
        lines.append(line)
    columns = ["model", "tensors", "ranks", "an engine", "sender s", "buckets", "GB", "receiver s", "buckets", "GB"]
    return Table("Planning at scale: one sender, one receiver", columns, lines)
