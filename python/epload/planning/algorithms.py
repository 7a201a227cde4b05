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


def groups_between(nodes: Sequence[Ranks], src: int, algorithm: str) -> tuple[Ranks, ...]:
    """Returns the groups of ranks between nodes for what comes from ``src``."""
    return tuple(map(tuple, _C.rails(nodes))) if algorithm == "striped" else (tuple(_C.leaders(nodes, src)),)


def leader_of(nodes: Sequence[Ranks], src: int, rank: int, algorithm: str) -> int:
    """Returns the rank from which ``rank``, or its node, gets what comes from ``src``."""
    groups = groups_between(nodes, src, algorithm)
    if algorithm == "striped":
        return next(rail for rail in groups if rank in rail)[_node_of(nodes, src)]
    return groups[0][_node_of(nodes, rank)]


def _node_of(nodes: Sequence[Ranks], rank: int) -> int:
    return next(number for number, node in enumerate(nodes) if rank in node)
