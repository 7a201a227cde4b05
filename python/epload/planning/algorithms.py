"""The algorithms by which a bucket gets to the ranks of all nodes. Pure. csrc/schedule.cpp has the steps that each takes.

``two_level`` sends each bucket along one rank of each node, on the rail of the source. ``striped`` cuts it into a stripe for each
rank of a node, which sends it along its rail, so that all nodes need equally many ranks. Inside a node a bucket is passed on, or
gathered, over the node's own group.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

from epload.native.extension import _C

Ranks = tuple[int, ...]
Algorithm = Literal["two_level", "striped"]
ALGORITHMS: tuple[str, ...] = get_args(Algorithm)
STRIPE_ALIGNMENT = 64
"""Bytes; every stripe but the last is a multiple."""


def groups_between(nodes: Sequence[Ranks], src: int, rank: int, algorithm: str) -> tuple[tuple[Ranks, ...], int]:
    """Returns the groups of ranks between nodes for what comes from ``src``, and from which of their ranks ``rank`` gets it."""
    node, own = (next(i for i, ranks in enumerate(nodes) if member in ranks) for member in (src, rank))
    if algorithm == "striped":
        rails = tuple(map(tuple, _C.rails(nodes)))
        return rails, next(rail for rail in rails if rank in rail)[node]
    leaders = tuple(_C.leaders(nodes, src))
    return (leaders,), leaders[own]
