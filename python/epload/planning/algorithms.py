"""The algorithms by which a bucket gets to the ranks of all nodes. Pure. csrc/schedule.cpp has the steps that each takes.

An algorithm determines which ranks pass a bucket on between nodes. Inside a node it is passed on over the node's own group.
"""

from __future__ import annotations

from collections.abc import Sequence

from epload.native.extension import _C

Ranks = tuple[int, ...]
STRIPE_ALIGNMENT = 64
"""Bytes; every stripe but the last is a multiple."""


class TwoLevel:
    """Sends each bucket along one rank of each node, on the rail of the source, and from there inside each node. Other algorithms
    override what they do in another way."""

    striped = False
    """True if each rank of a node sends its part of a bucket, so that all nodes need equally many."""

    def groups(self, nodes: Sequence[Ranks], src: int) -> tuple[Ranks, ...]:
        """Returns the groups of ranks between nodes for what comes from ``src``."""
        return (tuple(_C.leaders(nodes, src)),)

    def leader(self, nodes: Sequence[Ranks], src: int, rank: int) -> int:
        """Returns the rank from which ``rank``, or its node, gets what comes from ``src``."""
        return _C.leaders(nodes, src)[_node_of(nodes, rank)]

    def relays(self, node: Ranks, leader: int) -> Ranks:
        """Returns the ranks of a node through which bytes come to it. ``leader``: the node's rank on the rail of the source."""
        return (leader,)


class Striped(TwoLevel):
    """Cuts each bucket into a stripe for each rank of a node, which sends it along its rail. A node then gathers its stripes."""

    striped = True

    def groups(self, nodes: Sequence[Ranks], src: int) -> tuple[Ranks, ...]:
        return tuple(map(tuple, _C.rails(nodes)))

    def leader(self, nodes: Sequence[Ranks], src: int, rank: int) -> int:
        return next(rail for rail in self.groups(nodes, src) if rank in rail)[_node_of(nodes, src)]

    def relays(self, node: Ranks, leader: int) -> Ranks:
        return node


ALGORITHMS = {"two_level": TwoLevel(), "striped": Striped()}


def _node_of(nodes: Sequence[Ranks], rank: int) -> int:
    return next(number for number, node in enumerate(nodes) if rank in node)
