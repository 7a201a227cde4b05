"""The topology of a job: its nodes, the rank that leads each node, and the routes of a broadcast."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from operator import index

import torch.distributed as dist
from torch.distributed.nn import functional

from epload.core.attempt import Attempt
from epload.errors import ManifestMismatch, call_order_error
from epload.model.devices import backends_of
from epload.native.extension import _C
from epload.planning.schedule import groups_between
from epload.ranks.connection import DEFAULT_TIMEOUT
from epload.ranks.control import DESTROYED, Control
from epload.ranks.group_cache import GroupCache
from epload.ranks.membership import check_partition, first_difference, group_equal, machine_identity, membership
from epload.ranks.rendezvous import rendezvous
from epload.ranks.rounds import FAILURE_SECONDS, OUTCOME_SECONDS


@dataclass(frozen=True)
class Route:
    """This rank's part in a broadcast from ``src``: arguments of the native op."""

    src: int
    leader: int
    """Global rank of this node's leader."""
    inter_group: str
    """Name of the leaders' group; ``""`` if this rank leads no node or there is only one node."""
    intra_group: str
    """Name of this node's group; ``""`` if the node has one rank."""


class Topology:
    """The nodes of a job, or of a part of it: for each node, the global ranks that run on it.

    Rail k has local rank ``k mod size`` of each node, so that on equal nodes every rank is in one rail and one node. Process
    groups are made when first needed, by all ranks of the topology in the same order.
    """

    def __init__(self, nodes: Sequence[Sequence[int]], group: dist.ProcessGroup | None, rank: int, control: Control) -> None:
        """Use :meth:`discover` or :meth:`from_nodes`."""
        self.nodes = tuple(tuple(node) for node in nodes)
        self.rank = rank
        self._group = weakref.ref(group) if group is not None else None
        self.ranks = tuple(sorted(r for node in self.nodes for r in node))
        self.node = next(node for node in self.nodes if rank in node)
        self.control = control
        self.made_by = threading.current_thread()
        """The thread that made this topology."""
        backends = backends_of(group) if group is not None else None
        self.groups = GroupCache(backends, control)
        self.host_groups = GroupCache({"cpu": "gloo"} if group is not None else None, control)
        """Groups over host memory, whatever the job's backend."""
        has_watchdog = backends is not None and not {"nccl", "hccl"}.isdisjoint(backends.values())
        self.watched_groups = GroupCache(backends, control, watched=True) if has_watchdog else self.groups
        """Groups for operations that outlive the call that queues them."""
        if group is not None:
            _forget_defaults()
            weakref.finalize(group, _let_go, weakref.ref(control)).atexit = False
        self._loaders = 0
        self.stale = False
        """True if a load has failed of which this rank learned while another load may have used the groups."""

    @classmethod
    def discover(cls, group: dist.ProcessGroup | None = None, timeout: timedelta | float | None = None) -> Topology:
        """Groups ranks by the machine they run on (its boot id). Collective over the group.

        Args:
            group: by default the whole job; without ``torch.distributed`` one node of one rank.
            timeout: seconds (or timedelta) within which all ranks have to call this; 30 minutes if None.

        Raises:
            LoadError: a rank did not come in time, or ended; the same on every rank that came.
        """
        group, rank, ranks = membership(group)
        store = group.get_group_store() if group is not None else None
        control, nodes = rendezvous(store, ranks, rank, as_timedelta(timeout), None, machine_identity(), group_equal)
        return cls(nodes, group, rank, control)

    @classmethod
    def default(cls, timeout: timedelta | float | None = None) -> Topology:
        """Returns the topology of the whole job, discovered once per ``init_process_group`` so that its groups are reused.

        ``timeout``: as for :meth:`discover`.
        """
        global _default, _is_discovering
        with _default_lock:
            group, _, _ = membership(None)
            if _default is None or not _default._is_of(group):
                if _is_discovering:  # in this thread, which a signal has interrupted
                    raise call_order_error()
                _is_discovering = True
                try:
                    _default = cls.discover(timeout=timeout)
                finally:
                    _is_discovering = False
            return _default

    @classmethod
    def is_discovered(cls) -> bool:
        """Returns True if :meth:`default` does not have to find the ranks any more."""
        return _default is not None and _default._is_of(membership(None)[0])

    @classmethod
    def from_nodes(
        cls,
        nodes: Sequence[Sequence[int]],
        group: dist.ProcessGroup | None = None,
        timeout: timedelta | float | None = None,
    ) -> Topology:
        """Returns an explicit topology. Collective over the group.

        Args:
            nodes: global ranks of each node, which together are those of the group.
            group: by default the whole job.
            timeout: as for :meth:`discover`.

        Raises:
            ValueError: a rank is in no node, in two nodes, or not in the group; the same on every rank.
            ManifestMismatch: the ranks' nodes differ.
            LoadError: as for :meth:`discover`.
        """
        group, rank, ranks = membership(group)
        lists = [list(map(index, node)) for node in nodes]
        failure = Attempt(lambda: check_partition(lists, ranks)).failure

        def check_equal(views: Mapping[int, list[list[int]]]) -> None:
            if differ := first_difference(views):
                first, other = differ
                raise ManifestMismatch(
                    f"the ranks' topologies differ, nothing was moved: rank {first} has nodes {views[first]}, rank {other} has "
                    f"{views[other]}"
                )

        # Emulated nodes of one machine are nodes for their control as well.
        within = str(next((number for number, node in enumerate(lists) if rank in node), ""))
        store = group.get_group_store() if group is not None else None
        control, _ = rendezvous(store, ranks, rank, as_timedelta(timeout), failure, lists, check_equal, within)
        return cls(lists, group, rank, control)

    def __repr__(self) -> str:
        noun = "rank" if len(self.ranks) == 1 else "ranks"
        return f"Topology({'+'.join(str(len(node)) for node in self.nodes)} {noun}, rank {self.rank})"

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The process group; None without ``torch.distributed``, and once it is destroyed."""
        return self._group() if self._group is not None else None

    @property
    def even(self) -> bool:
        """True if all nodes have equally many ranks."""
        return len({len(node) for node in self.nodes}) == 1

    def _is_of(self, group: dist.ProcessGroup | None) -> bool:
        return self.group is group and (self._group is None) == (group is None)

    def check_group(self) -> None:
        """Raises ValueError if the process group has been destroyed since."""
        if self._group is not None and self._group() not in dist.distributed_c10d._world.pg_map:
            raise ValueError(DESTROYED)

    def check_source(self, src: int | None) -> int:
        """Returns ``src``; the first rank for None. Raises ValueError if it is not a rank of this topology."""
        if src is None:
            return self.ranks[0]
        if src not in self.ranks:
            raise ValueError(f"expected src among the topology's ranks {list(self.ranks)}, got {src}")
        return src

    def leaders(self, src: int) -> tuple[int, ...]:
        """Returns one rank per node: those on the rail of ``src``, in the order of the nodes."""
        self.check_source(src)
        return tuple(_C.leaders(self.nodes, src))

    def route(self, src: int, algorithm: str = "two_level", watched: bool = False) -> Route:
        """Returns the route of a broadcast from ``src``. Collective: makes its groups if they do not exist.

        Args:
            watched: whether :attr:`watched_groups` are used.

        Raises:
            ValueError: ``src`` is in no node.
        """
        self.check_source(src)
        between, leader = groups_between(self.nodes, src, self.rank, algorithm)
        groups = self.watched_groups if watched else self.groups
        groups.make("watched route" if groups is not self.groups else "route", between, self.nodes)
        inter = next((ranks for ranks in between if self.rank in ranks), (self.rank,))
        return Route(src, leader, groups.name(inter), groups.name(self.node))

    def number_loader(self) -> int:
        """Returns the number of a new loader. All ranks make their loaders in the same order."""
        self._loaders += 1
        return self._loaders


_default: Topology | None = None
_default_lock = threading.RLock()
_is_discovering = False


def _forget_defaults() -> None:
    """Has functions of torch take the job's group when they are called. Those of this module keep that of when it is imported, as
    by FSDP, for as long as the process runs."""
    for function in vars(functional).values():
        if defaults := getattr(function, "__defaults__", None):
            function.__defaults__ = tuple(None if isinstance(value, dist.ProcessGroup) else value for value in defaults)


def _let_go(reference: weakref.ref[Control]) -> None:
    """Lets go of the store of a group that was destroyed: as long as anything has it, torch serves the next job of this process
    from it, at the same address, where ranks then find keys of the last one."""
    if (control := reference()) is not None:
        if control.rank == control.coordinator and len(control.tree.nodes) > 1:
            seconds = OUTCOME_SECONDS if control.failure is None else FAILURE_SECONDS
            time.sleep(max(0.0, control.ended + seconds - time.monotonic()))  # others may not have read the outcome
        control.close()


def as_topology(topology: Topology | None, timeout: timedelta | float | None = None) -> Topology:
    """Returns a topology as callers pass it; :meth:`Topology.default` for None. Raises TypeError if it is of another type."""
    if topology is None:
        return Topology.default(timeout=timeout)
    if not isinstance(topology, Topology):
        raise TypeError(
            f"expected topology to be an epload.Topology, got a {type(topology).__name__}; make one with "
            "Topology.discover(group) or Topology.from_nodes(nodes)"
        )
    return topology


def as_timedelta(timeout: timedelta | float | None) -> timedelta:
    """Returns a timeout as callers pass it; 30 minutes for None.

    Raises TypeError if it is of another type, ValueError if it is not above 0 or no timedelta can be as long.
    """
    if timeout is None:
        return DEFAULT_TIMEOUT
    if not isinstance(timeout, int | float | timedelta) or isinstance(timeout, bool):
        raise TypeError(f"expected timeout to be a number of seconds or a timedelta, got {timeout!r}")
    try:
        duration = timeout if isinstance(timeout, timedelta) else timedelta(seconds=timeout)
    except (OverflowError, ValueError) as error:  # ValueError: NaN
        raise ValueError(f"expected timeout to be a number of seconds that a timedelta can have, got {timeout}") from error
    if duration <= timedelta():
        raise ValueError(f"expected timeout to be above 0, got {timeout}")
    return duration
