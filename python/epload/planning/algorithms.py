"""The algorithms by which a bucket gets to the ranks of all nodes. Pure. csrc/schedule.cpp has the steps that each takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from epload.native.extension import _C

Ranks = tuple[int, ...]
STRIPE_ALIGNMENT = 64
"""Bytes; every stripe but the last is a multiple."""


class Algorithm(Protocol):
    """Determines which ranks pass a bucket on between nodes. Inside a node it is passed on over the node's own group."""

    @property
    def name(self) -> str: ...
    @property
    def striped(self) -> bool:
        """True if each rank of a node sends its part of a bucket, so that all nodes need equally many."""
        ...

    def groups(self, nodes: Sequence[Ranks], src: int) -> tuple[Ranks, ...]:
        """Returns the groups of ranks between nodes for what comes from ``src``."""
        ...

    def leader(self, nodes: Sequence[Ranks], src: int, rank: int) -> int:
        """Returns the rank from which ``rank``, or its node, gets what comes from ``src``."""
        ...

    def relays(self, node: Ranks, leader: int) -> Ranks:
        """Returns the ranks of a node through which bytes come to it. ``leader``: the node's rank on the rail of the source."""
        ...


class TwoLevel:
    """Sends each bucket along one rank of each node, on the rail of the source, and from there inside each node."""

    name = "two_level"
    striped = False

    def groups(self, nodes: Sequence[Ranks], src: int) -> tuple[Ranks, ...]:
        return (tuple(_C.leaders(nodes, src)),)

    def leader(self, nodes: Sequence[Ranks], src: int, rank: int) -> int:
        here = next(number for number, node in enumerate(nodes) if rank in node)
        return _C.leaders(nodes, src)[here]

    def relays(self, node: Ranks, leader: int) -> Ranks:
        return (leader,)


class Striped:
    """Cuts each bucket into a stripe for each rank of a node, which sends it along its rail. A node then gathers its stripes."""

    name = "striped"
    striped = True

    def groups(self, nodes: Sequence[Ranks], src: int) -> tuple[Ranks, ...]:
        return tuple(map(tuple, _C.rails(nodes)))

    def leader(self, nodes: Sequence[Ranks], src: int, rank: int) -> int:
        there = next(number for number, node in enumerate(nodes) if src in node)
        return next(rail for rail in self.groups(nodes, src) if rank in rail)[there]

    def relays(self, node: Ranks, leader: int) -> Ranks:
        return node


ALGORITHMS: dict[str, Algorithm] = {algorithm.name: algorithm for algorithm in (TwoLevel(), Striped())}
