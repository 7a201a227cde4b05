"""The process groups of one topology: made when first needed, by all ranks in the same order, and reused."""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from datetime import timedelta

import torch
from torch.distributed.distributed_c10d import PrefixStore

from epload.core import threads
from epload.core.log import logger
from epload.errors import LoadError, RemoteFailure, message_of
from epload.ranks.connection import keeping_alive
from epload.ranks.control import Control
from epload.ranks.groups import Backends, Group, GroupStore, abort, dispose

_POLL_SECONDS = 0.02
_LATE_SECONDS = 10.0
"""Seconds without connections after which a warning says that a firewall may block them."""
_GRACE_SECONDS = 0.5
"""Seconds that a canceled group has to end by itself."""
Ranks = tuple[int, ...]


class GroupCache:
    """The groups of a topology that this rank is in."""

    def __init__(
        self, backends: Backends | None, control: Control, device: torch.device | None = None, watched: bool = False
    ) -> None:
        """
        Args:
            backends: of the groups; None if there are none, as without ``torch.distributed``.
            control: of all ranks of the topology.
            device: on which groups have their communicators as soon as they are made, for ranks that outlive each other.
            watched: see :meth:`Group.make`.
        """
        self._backends = backends
        self._rank = control.rank
        self._control = control
        self._device = device
        self._watched = watched
        self._groups: dict[tuple[timedelta, Ranks], Group] = {}
        """Groups that this rank is in, by timeout, which a group is given when it is made, and ranks."""
        self._made: set[tuple[timedelta, tuple[Ranks, ...]]] = set()
        """Timeouts and sets of disjoint groups that all ranks of the topology have made."""
        self._rejoined = 0
        """``control.rejoined`` when the groups were made."""
        self.count = 0
        """Number of groups that this rank has begun to make; part of the name of the next."""
        self._agreed: tuple[int, int] | None = None
        """The attempt of a load for which all ranks have the same count."""

    def name(self, ranks: Ranks) -> str:
        """Returns the name of the group of ``ranks``; ``""`` if this rank is not in it, or is alone in it."""
        group = self._groups.get((self._control.timeout, ranks))
        if group is None:
            return ""
        with suppress(RuntimeError):  # it is registered, unless destroy_process_group() has removed the names of all groups
            group.register()
        return str(group.name)

    def group(self, ranks: Ranks) -> Group:
        """Returns the group of several ranks, of which this is one, once it is made."""
        return self._groups[self._control.timeout, ranks]

    def agree(self, count: int) -> None:
        """All ranks have agreed on a count, the largest of theirs, in a round of the present load. Until it ends, groups need no
        rounds of their own: if a rank cannot make one, the load fails on all, which clears the groups."""
        self.count = count
        self._agreed = self._control.position[:2]

    def end_load(self) -> None:
        """Groups that are made outside of a load need rounds."""
        self._agreed = None

    def make(self, what: str, *disjoint_groups: tuple[Ranks, ...]) -> None:
        """Makes sets of groups in turn, unless they exist. The groups of one set share no rank. Collective.

        ``what``: name of the round, for error messages.
        """
        control, timeout = self._control, self._control.timeout
        if self._rejoined != control.rejoined:
            self.clear()
            self._rejoined = control.rejoined
        sets = [groups for groups in disjoint_groups if (timeout, groups) not in self._made]
        if self._backends is None or not sets:
            return
        with control.guard():
            alone = self._agreed != control.position[:2]
            if alone:  # a rank that failed to make its last ones may have a lower count
                self.count = control.agree(what, None, self.count, lambda views: max(views.values()))
            existing = dict(self._groups)
            first, self.count = self.count, self.count + len(sets)
            try:
                for number, groups in enumerate(sets, first):
                    for ranks in groups:
                        # Two sets may have a group in common. A second one of the same ranks would end the first.
                        if self._rank in ranks and len(ranks) > 1 and (timeout, ranks) not in self._groups:
                            self._groups[timeout, ranks] = self._make_group(f"{what} {number}", ranks, self._backends)
                if alone:  # all have made theirs, or all fail: a rank that lacks one would later wait for the others to make it
                    control.agree(what, None)
            except BaseException:
                new_groups = [group for key, group in self._groups.items() if key not in existing]
                self._groups = existing
                dispose(new_groups)
                raise
        self._made.update((timeout, groups) for groups in sets)

    def _make_group(self, name: str, ranks: Ranks, backends: Backends) -> Group:
        """Raises LoadError if the group cannot be made, RemoteFailure if another rank fails meanwhile."""
        control, timeout, members = self._control, self._control.timeout, sorted(ranks)
        assert control.store is not None
        control.doing = f"makes the process group of ranks {members}"
        prefix, stop = f"group/{name}/{members[0]}", threading.Event()
        store = GroupStore(PrefixStore(prefix, control.store), timeout)
        device = self._device.index if self._device is not None else _current_device(backends)
        group = Group(f"epload/{control.name}/{name}/{members[0]}", self._rank, members, device)
        ended, errors = threading.Event(), list[BaseException]()

        def make() -> None:  # in a thread, as a wait for connections between members cannot be canceled
            try:
                with keeping_alive():
                    group.make(store, self._rank, timeout, backends, self._device, self._watched)
            except BaseException as error:
                errors.append(error)
            ended.set()

        with control.stopping(stop.set):
            try:
                threads.start("epload-group", make)
                began = time.monotonic()
                until, is_late = began + 1.25 * timeout.total_seconds() + 2, False
                while not ended.wait(_POLL_SECONDS):
                    if not is_late and time.monotonic() >= began + _LATE_SECONDS:
                        is_late = True
                        logger.warning(
                            "rank %d has waited %.0f s for the connections of the process group of ranks %s; can their machines "
                            "connect to one another? GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME choose the interface",
                            self._rank, _LATE_SECONDS, members,
                        )  # fmt: skip
                    if stop.is_set() or time.monotonic() >= until:
                        store.canceled = True
                        ended.wait(_GRACE_SECONDS)  # then the thread is left alone with the group
                        break
            except BaseException:  # such as an interrupt: the thread's waits end
                store.canceled = True
                raise
        control.delete_later(f"{prefix}/{key}" for key in store.keys)
        if ended.is_set() and not errors:
            return group
        dispose([group] if ended.is_set() else [])
        if stop.is_set():
            raise RemoteFailure("another rank failed")
        cause = message_of(errors[0]) if errors else f"not done within {timeout}"
        raise LoadError(f"rank {self._rank} could not make the process group of ranks {members}: {cause}") from (
            errors[0] if errors else None
        )

    def fail(self) -> None:
        """Ends what the groups do on devices, as another rank has failed. Thread-safe."""
        abort(list(self._groups.values()))

    def clear(self) -> None:
        """Disposes of all groups, as after a failed transfer: new ones are made. On all ranks alike."""
        dispose(self._groups.values())
        self._groups.clear()
        self._made.clear()


def _current_device(backends: Backends) -> int | None:
    """Returns the index of the calling thread's device if there is a backend for it, else None."""
    if set(backends.values()) == {"gloo"}:  # to ask for an accelerator may initialize its library
        return None
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return torch.accelerator.current_device_index() if accelerator is not None and accelerator.type in backends else None
