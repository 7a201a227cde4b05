"""Lets the ranks of a topology find one another, under a number that the store gives out.

A number counted by each process would not do: a process that replaces a rank would start counting anew, and wait for the others
under a number that they never use again.
"""

from __future__ import annotations

import hashlib
import secrets
import threading
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

from torch.distributed import DistNetworkError
from torch.distributed.distributed_c10d import PrefixStore, Store

from epload.errors import LoadError, call_order_error, message_of
from epload.native.extension import _C
from epload.observe.render import list_first
from epload.ranks.control import Control
from epload.ranks.membership import group_equal, local_network

_CLOSED = "!"
"""Follows the number of a rendezvous that no rank can join any more."""
_locks: defaultdict[tuple[tuple[int, ...], int], Any] = defaultdict(threading.RLock)
"""One rendezvous of a rank with the same others, through the job's store, at a time."""


def rendezvous(
    store: Store | None,
    ranks: tuple[int, ...],
    rank: int,
    timeout: timedelta,
    failure: BaseException | None,
    view: Any,
    reduce: Callable[[dict[int, Any]], Any],
    within: str = "",
    name_of_store: str = "",
    check: Callable[[], None] = lambda: None,
) -> tuple[Control, Any]:
    """Makes a control for ``ranks``, all of which call this.

    Args:
        store: the job's; None for a single rank.
        ranks: global ranks.
        rank: this process's.
        timeout: within which all ranks have to come.
        failure, view, reduce: those of :meth:`Control.agree`.
        within: ranks of one machine with different texts are in different nodes of the control.
        name_of_store: tells it from others in which the same numbers are ranks; "" for the job's.
        check: called now and then while this rank waits for others; raises LoadError if one will not come.

    Returns:
        The control, and the first rank's decision.

    Raises:
        LoadError: a rank did not come within ``timeout``, ended, or had a ``failure``; the same on every rank that came.
    """
    if store is None:
        control = Control(None, ranks, rank)
        return control, control.agree("topology", failure, view, reduce)
    # Ranks of another store are others: two threads may each come to those of one at a time.
    lock: Any = threading.RLock() if name_of_store else _locks[ranks, rank]
    if lock._is_owned():  # by this thread, which a signal has interrupted
        raise call_order_error()
    if not lock.acquire(timeout=timeout.total_seconds()):
        raise LoadError(f"another thread has been discovering the topology of ranks {list(ranks)} for {timeout}")
    try:
        name = hashlib.blake2b(repr(ranks).encode(), digest_size=8).hexdigest()
        shared = PrefixStore(f"epload/{name}", store)
        try:
            number = _join(shared)
        except DistNetworkError as error:
            raise LoadError(f"topology: the store is lost: {message_of(error)} (seen by rank {rank})") from error
        if name_of_store and number != "1":  # ranks of another store meet in it once
            raise LoadError("the other ranks have given up what this rank comes to, as one of them has failed; call again")
        control = Control(PrefixStore(number, shared), ranks, rank, f"{name}/{number}")
        control.timeout, control.check_others = timeout, check

        def close_and_decide(views: dict[int, Any]) -> Any:
            _close(shared, number)
            _check_versions({rank: (*message, "an older one")[2] for rank, message in views.items()})
            nodes = group_equal({rank: node for rank, (node, _, _) in views.items()})
            return reduce({rank: view for rank, (_, view, _) in views.items()}), nodes, secrets.token_hex(16)

        try:
            with control.guard():
                control.doing = "topology"
                control.processes.register(control.connection(), rank)
                node = f"{local_network()} {within}"
                decision, nodes, token = control.agree("topology", failure, [node, view, _C.version], close_and_decide)
                control.delete_later(control.processes.close_registry())
                # Another group of the same ranks has a store of its own, which gives out the same numbers.
                control.name += f"/{hashlib.blake2b(token.encode(), digest_size=4).hexdigest()}"
                control.join_nodes(nodes, token)
                control.agree("topology", None)  # all have joined their nodes, or all fail
        except BaseException:
            _close(shared, number)
            raise
        control.end()
        control.check_others = lambda: None
        return control, decision
    finally:
        lock.release()


def _check_versions(versions: dict[int, str]) -> None:
    """Raises LoadError if ranks have other versions of epload, whose messages may differ."""
    of_version = defaultdict[str, list[int]](list)
    for rank, version in versions.items():
        of_version[version].append(rank)
    if len(of_version) > 1:
        which = " and ".join(f"{version} on rank {list_first([*map(str, ranks)])}" for version, ranks in of_version.items())
        raise LoadError(f"expected one version of epload on all ranks, got {which}; install the same one everywhere")


def _join(store: Store) -> str:
    """Returns the number of the open rendezvous; opens one if there is none."""
    state = store.compare_set("rendezvous", "", "1").decode()
    while state.endswith(_CLOSED):
        state = store.compare_set("rendezvous", state, str(int(state[: -len(_CLOSED)]) + 1)).decode()
    return state


def _close(store: Store, number: str) -> None:
    """No rank joins this rendezvous any more: the next one opens another, also after a failure."""
    with suppress(RuntimeError):  # the store is lost
        store.compare_set("rendezvous", number, number + _CLOSED)
