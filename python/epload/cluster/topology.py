"""Who shares a machine with whom, which rank leads each node, and the process groups that follow from it."""

from __future__ import annotations

import os
import platform
import threading
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from epload.cluster import groups
from epload.cluster.groups import Group, Making
from epload.cluster.meeting import meet
from epload.control.control import DEFAULT_TIMEOUT, Control
from epload.errors import LoadError, ManifestMismatch, RemoteFailure, message_of

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
        self, nodes: Sequence[Sequence[int]], group: dist.ProcessGroup | None, rank: int, control: Control
    ) -> None:
        """Use :meth:`discover` or :meth:`from_nodes`."""
        self.nodes = tuple(tuple(node) for node in nodes)
        self.rank = rank
        self.group = group
        self.ranks = tuple(sorted(r for node in self.nodes for r in node))
        self.node = next(node for node in self.nodes if rank in node)
        self.control = control
        self.made_by = threading.current_thread()
        """The thread in whose order this topology was made among those of its ranks."""
        self._groups: dict[tuple[timedelta, tuple[int, ...]], Group] = {}
        """The groups that this rank is in, by their timeout, which is given when they are made, and their ranks."""
        self._made: set[tuple[timedelta, tuple[tuple[int, ...], ...]]] = set()
        """Timeouts and families of groups that all ranks of the topology have made."""
        self._count = 0
        """Of groups that all ranks together have begun to make."""
        self._loaders = 0
        self.stale = False
        """Whether a load has failed, of which this rank heard while another load may have used the groups."""

    @classmethod
    def discover(cls, group: dist.ProcessGroup | None = None, timeout: timedelta | float | None = None) -> Topology:
        """Groups ranks by the machine they run on (its boot id). Collective over ``group``, by default the whole job.

        Without a process group: one node of one rank.

        Args:
            timeout: seconds (or timedelta) within which all ranks have to call this; 30 minutes if None.

        Raises:
            LoadError: a rank did not come in time, or ended; the same on every rank that came.
        """
        group, rank, ranks = _membership(group)
        if group is None:
            return cls([[rank]], None, rank, Control(None, ranks, rank))

        def by_machine(views: Mapping[int, str]) -> list[list[int]]:
            nodes: dict[str, list[int]] = {}
            for member, machine in sorted(views.items()):
                nodes.setdefault(machine, []).append(member)
            return list(nodes.values())

        store, limit = group.get_group_store(), _as_timedelta(timeout)
        control, nodes = meet(store, ranks, rank, limit, None, machine_identity(), by_machine)
        return cls(nodes, group, rank, control)

    @classmethod
    def default(cls, timeout: timedelta | float | None = None) -> Topology:
        """The whole job, discovered once for each ``init_process_group``, so that its groups are made once.

        ``timeout``: as for :meth:`discover`.
        """
        global _default
        with _default_lock:
            group, _, _ = _membership(None)
            if _default is None or _default.group is not group:
                _default = cls.discover(timeout=timeout)
            return _default

    @classmethod
    def from_nodes(
        cls,
        nodes: Sequence[Sequence[int]],
        group: dist.ProcessGroup | None = None,
        timeout: timedelta | float | None = None,
    ) -> Topology:
        """An explicit topology. ``nodes`` lists global ranks and must cover ``group``, by default the whole job. Collective
        over the group.

        Args:
            timeout: as for :meth:`discover`.

        Raises:
            ValueError: a rank is in no node, in two, or not in the group; on every rank alike.
            ManifestMismatch: the ranks' nodes differ.
            LoadError: as for :meth:`discover`.
        """
        group, rank, ranks = _membership(group)
        nodes = [list(node) for node in nodes]
        failure: ValueError | None = None
        try:
            _check_partition(nodes, ranks)
        except ValueError as error:
            failure = error
        if group is None:
            if failure is not None:
                raise failure
            return cls(nodes, None, rank, Control(None, ranks, rank))

        def same(views: Mapping[int, list[list[int]]]) -> None:
            for other, theirs in views.items():
                if theirs != views[ranks[0]]:
                    raise ManifestMismatch(
                        f"the ranks' topologies differ, nothing was moved: rank {ranks[0]} has nodes {views[ranks[0]]}, "
                        f"rank {other} has {theirs}"
                    )

        control, _ = meet(group.get_group_store(), ranks, rank, _as_timedelta(timeout), failure, nodes, same)
        return cls(nodes, group, rank, control)

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
        """Gives all groups back, as after a failed transfer: the next route makes new ones. On all ranks alike."""
        groups.dispose(list(self._groups.values()))
        self._groups.clear()
        self._made.clear()

    def freshen(self) -> None:
        """Before each load."""
        if self.stale:
            self.stale = False
            self.retire()

    def number_loader(self) -> int:
        """The number of a new loader. All ranks make their loaders in one order."""
        self._loaders += 1
        return self._loaders

    def _name(self, ranks: tuple[int, ...]) -> str:
        """Of their group; ``""`` if this rank is not in it, or they are one."""
        group = self._groups.get((self.control.timeout, ranks))
        return group.name if group is not None else ""

    def _make_groups(self, what: str, *families: tuple[tuple[int, ...], ...]) -> None:
        """Makes the groups of each family in turn. The groups of one family share no rank."""
        timeout = self.control.timeout
        families = tuple(family for family in families if (timeout, family) not in self._made)
        if self.group is None or not families:
            return
        with self.control.guard():
            # All ranks are here, and will make their groups. A rank may have failed to make its last ones, and count fewer.
            number = self.control.settle(what, None, self._count, lambda views: max(views.values()))
            self._count = number + len(families)
            made: list[Group] = []
            try:
                for family in families:
                    mine = next((ranks for ranks in family if self.rank in ranks and len(ranks) > 1), None)
                    if mine is not None:
                        made.append(self._make_group(f"{what} {number}", sorted(mine), timeout))
                        self._groups[timeout, mine] = made[-1]
                    number += 1
                # All have made theirs, or all fail: a rank that lacks a group would make it alone later.
                self.control.settle(what, None)
            except BaseException:
                self._groups = {key: group for key, group in self._groups.items() if group not in made}
                groups.dispose(made)
                raise
        self._made.update((timeout, family) for family in families)

    def _make_group(self, name: str, ranks: Sequence[int], timeout: timedelta) -> Group:
        """Raises LoadError if a rank fails or ends meanwhile, or the group cannot be made."""
        assert self.group is not None
        control = self.control
        assert control.store is not None
        control.doing = f"makes the process group of ranks {ranks}"
        group = Group(f"epload/{control.name}/{name}/{ranks[0]}", ranks)
        store = PrefixStore(f"group/{name}/{ranks[0]}", control.store)
        stopping = _Stopping()
        with control.watch.guards(stopping):
            making = Making(group, store, self.rank, timeout, self.group)
            ended = making.wait(stopping.asked, 1.25 * timeout.total_seconds() + 2)
        control.keep([f"group/{name}/{ranks[0]}/{key}" for key in group.keys])
        if not ended or making.error is not None:
            groups.dispose([group] if ended else [])
            if stopping.asked():
                raise RemoteFailure("another rank failed")
            why = message_of(making.error) if making.error is not None else f"not done within {timeout}"
            raise LoadError(
                f"rank {self.rank} could not make the process group of ranks {ranks}: {why}"
            ) from making.error
        group.register()
        return group


class _Stopping:
    """Whether a rank has failed meanwhile."""

    def __init__(self) -> None:
        self._asked = threading.Event()

    def fail(self) -> None:
        self._asked.set()

    def asked(self) -> bool:
        return self._asked.is_set()


_default: Topology | None = None
_default_lock = threading.Lock()


def machine_identity() -> str:
    """A text that is equal on two processes exactly if they run on one machine: the kernel's boot id."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return f"{platform.node()}-{uuid.getnode():x}"


def alone_under_a_launcher() -> str:
    """What to warn of if a launcher has started several ranks but ``torch.distributed`` knows of none; else empty."""
    size = os.environ.get("WORLD_SIZE", "")
    if "RANK" not in os.environ or not size.isdecimal() or int(size) < 2:
        return ""
    if dist.is_available() and dist.is_initialized():
        return ""
    return (
        f"WORLD_SIZE is {size}, but torch.distributed is not initialized, so rank {os.environ['RANK']} loads by itself, as do "
        "all others: each reads the whole checkpoint. Call torch.distributed.init_process_group() before epload"
    )


def _as_timedelta(timeout: timedelta | float | None) -> timedelta:
    if timeout is None:
        return DEFAULT_TIMEOUT
    return timeout if isinstance(timeout, timedelta) else timedelta(seconds=timeout)


def _check_partition(nodes: Sequence[Sequence[int]], ranks: Sequence[int]) -> None:
    """Raises ValueError if ``nodes`` is not a partition of ``ranks``."""
    listed = [r for node in nodes for r in node]
    if any(not node for node in nodes) or len(set(listed)) != len(listed):
        raise ValueError(f"expected nodes that are not empty and share no rank, got {list(map(list, nodes))}")
    if strangers := sorted(set(listed) - set(ranks)):
        raise ValueError(f"nodes name ranks {strangers}, which are not among the group's ranks {list(ranks)}")
    if missing := sorted(set(ranks) - set(listed)):
        raise ValueError(
            f"ranks {missing} are in no node of {list(map(list, nodes))}; list every rank of the group, "
            "or pass group= with the ranks that load together"
        )


def _membership(group: dist.ProcessGroup | None) -> tuple[dist.ProcessGroup | None, int, tuple[int, ...]]:
    if not (dist.is_available() and dist.is_initialized()):
        if group is not None:
            raise ValueError("got a process group, but torch.distributed is not initialized")
        return None, 0, (0,)
    group = group if group is not None else dist.group.WORLD
    assert group is not None
    ranks = tuple(sorted(dist.get_process_group_ranks(group)))
    rank = dist.get_rank()
    if rank not in ranks:
        raise ValueError(f"rank {rank} is not in the group of ranks {list(ranks)}")
    return group, rank, ranks
