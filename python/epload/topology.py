"""Who shares a machine with whom, which rank leads each node, and the process groups that follow from it."""

from __future__ import annotations

import json
import platform
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from epload import groups
from epload.control import Control
from epload.errors import ManifestMismatch

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class Route:
    """How this rank takes part in a broadcast from ``src``: the arguments of the native op."""

    src: int
    leader: int
    """Global rank of this node's leader."""
    inter_group: str
    """Name of the leaders' group; ``""`` if this rank leads no node or there is one node."""
    intra_group: str
    """Name of this node's group; ``""`` if the node has one rank."""


class Topology:
    """The nodes of a job, or of a part of it: for each, the global ranks that share the machine.

    Rail k holds local rank ``k mod size`` of each node, so that on equal nodes every rank is in one rail and one node.
    Groups are made when first needed, by all ranks of the topology in one order.
    """

    def __init__(
        self, nodes: Sequence[Sequence[int]], group: dist.ProcessGroup | None, rank: int, ranks: Sequence[int]
    ):
        """Use :meth:`discover` or :meth:`from_nodes`. Raises ValueError if ``nodes`` is not a partition of ``ranks``."""
        self.nodes = tuple(tuple(node) for node in nodes)
        self.rank = rank
        self.group = group
        listed = [r for node in self.nodes for r in node]
        if any(not node for node in self.nodes) or len(set(listed)) != len(listed):
            raise ValueError(f"expected nodes that are not empty and share no rank, got {list(map(list, self.nodes))}")
        if strangers := sorted(set(listed) - set(ranks)):
            raise ValueError(f"nodes name ranks {strangers}, which are not among the group's ranks {list(ranks)}")
        if missing := sorted(set(ranks) - set(listed)):
            raise ValueError(
                f"ranks {missing} are in no node of {list(map(list, self.nodes))}; list every rank of the group, "
                "or pass group= with the ranks that load together"
            )
        self.ranks = tuple(sorted(listed))
        self.node = next(node for node in self.nodes if rank in node)
        self.control = Control(group.get_group_store() if group is not None else None, self.ranks, rank)
        self._names: dict[tuple[timedelta, tuple[int, ...]], str] = {}
        """Name of each group that this rank is in, by its timeout, which is given when it is made, and its ranks."""
        self._made: set[tuple[timedelta, tuple[tuple[int, ...], ...]]] = set()
        """Timeouts and families of groups that all ranks of the topology have made."""

    @classmethod
    def discover(cls, group: dist.ProcessGroup | None = None) -> Topology:
        """Groups ranks by the machine they run on (its boot id). Collective over ``group``, by default the whole job.

        Without a process group: one node of one rank.
        """
        group, rank, ranks = _membership(group)
        if group is None:
            return cls([[rank]], None, rank, ranks)
        control = Control(group.get_group_store(), ranks, rank)

        def by_machine(views: Mapping[int, str]) -> str:
            nodes: dict[str, list[int]] = {}
            for member, machine in sorted(views.items()):
                nodes.setdefault(machine, []).append(member)
            return json.dumps(list(nodes.values()))

        nodes = json.loads(control.agree("topology", machine_identity(), by_machine))
        return cls(nodes, group, rank, ranks)

    @classmethod
    def default(cls) -> Topology:
        """The whole job, discovered once for each ``init_process_group``, so that its groups are made once."""
        global _default
        group, _, _ = _membership(None)
        if _default is None or _default.group is not group:
            _default = cls.discover()
        return _default

    @classmethod
    def from_nodes(cls, nodes: Sequence[Sequence[int]], group: dist.ProcessGroup | None = None) -> Topology:
        """An explicit topology. ``nodes`` lists global ranks and must cover ``group``, by default the whole job.

        Raises:
            ValueError: a rank is in no node, in two, or not in the group; on every rank alike.
        """
        group, rank, ranks = _membership(group)
        return cls(nodes, group, rank, ranks)

    def __repr__(self) -> str:
        return f"Topology({'+'.join(str(len(node)) for node in self.nodes)} ranks, rank {self.rank})"

    @property
    def even(self) -> bool:
        """Whether all nodes have the same number of ranks."""
        return len({len(node) for node in self.nodes}) == 1

    def check_source(self, src: int) -> None:
        """Raises ValueError if ``src`` is not a rank of this topology."""
        if src not in self.ranks:
            raise ValueError(f"expected src among the topology's ranks {list(self.ranks)}, got {src}")

    def leaders(self, src: int) -> tuple[int, ...]:
        """One rank a node: those on the rail of ``src``, in the order of the nodes."""
        self.check_source(src)
        rail = next(node.index(src) for node in self.nodes if src in node)
        return tuple(node[rail % len(node)] for node in self.nodes)

    def route(self, src: int) -> Route:
        """Collective: makes the groups for a two-level broadcast from ``src`` if they are not there yet."""
        leaders = self.leaders(src)
        self._make_groups("route", (leaders,), self.nodes)
        leader = leaders[self.nodes.index(self.node)]
        return Route(src, leader, self._name(leaders), self._name(self.node))

    def striped_route(self, src: int) -> Route:
        """Collective: makes a group for every rail, and returns this rank's. ``leader`` is its rank on the source's node.

        Raises:
            ValueError: node sizes differ, so that the rails would not be of equal length.
        """
        self.check_source(src)
        if not self.even:
            raise ValueError(f"algorithm 'striped' takes nodes of equal size, got {list(map(list, self.nodes))}")
        rails = tuple(zip(*(sorted(node) for node in self.nodes), strict=True))
        self._make_groups("striped route", rails, self.nodes)
        mine = next(rail for rail in rails if self.rank in rail)
        source = next(i for i, node in enumerate(self.nodes) if src in node)
        return Route(src, mine[source], self._name(mine), self._name(self.node))

    def flat_route(self, src: int) -> Route:
        """Collective: the same for a broadcast in one group of all ranks."""
        self.check_source(src)
        self._make_groups("flat route", (self.ranks,))
        return Route(src, src, self._name(self.ranks), "")

    def retire(self) -> None:
        """Forgets all groups, as after a failed transfer: the next route makes new ones. On all ranks alike."""
        self._names.clear()
        self._made.clear()

    def _name(self, ranks: tuple[int, ...]) -> str:
        """Of their group; ``""`` if this rank is not in it, or they are one."""
        return self._names.get((self.control.deadline, ranks), "")

    def _make_groups(self, what: str, *families: tuple[tuple[int, ...], ...]) -> None:
        """Makes the groups of each family in turn. The groups of one family share no rank."""
        timeout = self.control.deadline
        families = tuple(family for family in families if (timeout, family) not in self._made)
        if self.group is None or not families:
            return

        def agree(views: dict[int, tuple[int, Any]]) -> int:
            for rank, (_, nodes) in views.items():
                if nodes != views[self.control.coordinator][1]:
                    raise ManifestMismatch(
                        f"the ranks' topologies differ, nothing was moved: rank {self.control.coordinator} has nodes "
                        f"{views[self.control.coordinator][1]}, rank {rank} has {nodes}"
                    )
            return max(count for count, _ in views.values())

        level = self.control.settle(what, None, [groups.count(), self.nodes], agree)
        for family in families:
            groups.level(level)
            mine = next((ranks for ranks in family if self.rank in ranks and len(ranks) > 1), None)
            if mine is not None:
                self._names[timeout, mine] = groups.make(mine, timeout, self.group)
            self._made.add((timeout, family))
            level += 1


_default: Topology | None = None


def machine_identity() -> str:
    """A text that is equal on two processes exactly if they run on one machine: the kernel's boot id."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return f"{platform.node()}-{uuid.getnode():x}"


def _membership(group: dist.ProcessGroup | None) -> tuple[dist.ProcessGroup | None, int, tuple[int, ...]]:
    if not (dist.is_available() and dist.is_initialized()):
        if group is not None:
            raise ValueError("got a process group, but torch.distributed is not initialised")
        return None, 0, (0,)
    group = group if group is not None else dist.group.WORLD
    assert group is not None
    ranks = tuple(dist.get_process_group_ranks(group))
    rank = dist.get_rank()
    if rank not in ranks:
        raise ValueError(f"rank {rank} is not in the group of ranks {list(ranks)}")
    return group, rank, ranks
