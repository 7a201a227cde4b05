"""The nodes of a control as a tree: each rank hands its view to the leader of its node, each leader its node's to its parent.

A node here is a set of ranks that can reach one another inside their machine. A rank alone leads a node of its own.
"""

from __future__ import annotations

from collections.abc import Iterable

FAN_OUT = 32
"""Children of a leader in the tree of nodes. The views of so many are one call to the store."""


class Tree:
    """The nodes, as seen by one rank."""

    def __init__(self, nodes: Iterable[Iterable[int]], rank: int) -> None:
        self.rank = rank
        self.nodes = sorted(tuple(sorted(node)) for node in nodes)
        """The ranks of each node, ascending, as are their first ranks. The first rank of each leads it."""
        self.node_of = {member: node for node in self.nodes for member in node}
        """The node of each rank."""
        self.node = self.node_of[rank]
        self.leader = self.node[0]
        self.leads = rank == self.leader
        self.members = self.node[1:] if self.leads else ()
        """The other ranks of the node that this rank leads."""
        first = FAN_OUT * self.nodes.index(self.node) + 1
        self.children = [node[0] for node in self.nodes[first : first + FAN_OUT]]
        """The leaders that hand the views of their nodes to the leader of this rank's node."""
