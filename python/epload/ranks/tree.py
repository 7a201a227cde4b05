"""The nodes of a control as a tree: each rank hands its view to the leader of its node, each leader its node's to its parent.

A node here is a set of ranks that can reach one another inside their machine. A rank alone leads a node of its own.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

FAN_OUT = 32
"""Children of a leader in the tree of nodes. The views of so many are one call to the store."""
Bundle = dict[str, list[int]]
"""Each distinct view with the ranks that have it."""


@dataclass(frozen=True)
class Tree:
    """The place of one rank."""

    nodes: tuple[tuple[int, ...], ...]
    """The ranks of each node, ascending, as are their first ranks. The first rank of each leads it."""
    rank: int

    @classmethod
    def of(cls, nodes: Iterable[Iterable[int]], rank: int) -> Tree:
        return cls(tuple(sorted(tuple(sorted(node)) for node in nodes)), rank)

    @cached_property
    def node_of(self) -> dict[int, tuple[int, ...]]:
        """The node of each rank."""
        return {rank: node for node in self.nodes for rank in node}

    @property
    def node(self) -> tuple[int, ...]:
        return self.node_of[self.rank]

    @property
    def leader(self) -> int:
        return self.node[0]

    @property
    def leads(self) -> bool:
        return self.rank == self.leader

    @property
    def members(self) -> tuple[int, ...]:
        """The other ranks of the node that this rank leads."""
        return self.node[1:] if self.leads else ()

    @property
    def root(self) -> int:
        return self.nodes[0][0]

    @cached_property
    def children(self) -> tuple[int, ...]:
        """The leaders that hand the views of their nodes to this rank."""
        if not self.leads:
            return ()
        first = FAN_OUT * self.nodes.index(self.node) + 1
        return tuple(node[0] for node in self.nodes[first : first + FAN_OUT])


def merge(bundles: Iterable[Bundle]) -> Bundle:
    merged: Bundle = {}
    for bundle in bundles:
        for view, ranks in bundle.items():
            merged.setdefault(view, []).extend(ranks)
    return merged


def encode(bundle: Bundle) -> bytes:
    return json.dumps([*bundle.items()]).encode()


def decode(data: bytes) -> Bundle:
    return dict(json.loads(data))


def by_rank(bundle: Bundle) -> dict[int, str]:
    """Returns the view of each rank, in the order of the ranks."""
    return dict(sorted((rank, view) for view, ranks in bundle.items() for rank in ranks))
