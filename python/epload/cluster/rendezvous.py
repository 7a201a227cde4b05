"""How the ranks of a topology find one another: under a number that the store gives out.

A number counted by each process would not do: a process that replaces a rank would start counting anew, and wait for the others
under a number that they never use again.
"""

from __future__ import annotations

import hashlib
import threading
from collections import defaultdict
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from torch.distributed import DistNetworkError
from torch.distributed.distributed_c10d import PrefixStore, Store

from epload.control.control import Control
from epload.errors import LoadError, message_of

_CLOSED = "!"
"""Follows the number of a rendezvous that no rank can join any more."""
_locks: defaultdict[tuple[int, ...], threading.Lock] = defaultdict(threading.Lock)
"""One rendezvous of the same ranks at a time."""


def rendezvous(
    store: Store,
    ranks: tuple[int, ...],
    rank: int,
    timeout: timedelta,
    failure: BaseException | None,
    view: Any,
    decide: Callable[[dict[int, Any]], Any],
) -> tuple[Control, Any]:
    """Makes a control for ``ranks``, all of which call this. The last three arguments are those of :meth:`Control.settle`.

    Returns:
        The control, and the first rank's decision.

    Raises:
        LoadError: a rank did not come within ``timeout``, ended, or had a ``failure``; the same on every rank that came.
    """
    lock = _locks[ranks]
    if not lock.acquire(timeout=timeout.total_seconds()):
        raise LoadError(f"another thread has been discovering the topology of ranks {list(ranks)} for {timeout}")
    try:
        name = hashlib.blake2b(repr(ranks).encode(), digest_size=8).hexdigest()
        shared = PrefixStore(f"epload/{name}", store)
        try:
            number = _join(shared)
            control = Control(PrefixStore(number, shared), ranks, rank, f"{name}/{number}")
        except DistNetworkError as error:
            raise LoadError(f"topology: the store is lost: {message_of(error)} (seen by rank {rank})") from error

        def close_and_decide(views: dict[int, Any]) -> Any:
            _close(shared, number)
            return decide(views)

        try:
            with control.guard():
                control.timeout = timeout
                control.doing = "topology"
                control.open_registry()
                decision = control.settle("topology", failure, view, close_and_decide)
                control.close_registry()
        except BaseException:
            _close(shared, number)
            raise
        control.end()
        return control, decision
    finally:
        lock.release()


def _join(store: Store) -> str:
    """The number of the open rendezvous; opens one if there is none."""
    state = store.compare_set("rendezvous", "", "1").decode()
    while state.endswith(_CLOSED):
        state = store.compare_set("rendezvous", state, str(int(state[: -len(_CLOSED)]) + 1)).decode()
    return state


def _close(store: Store, number: str) -> None:
    """No rank joins this rendezvous any more: the next one opens another, also after a failure."""
    try:
        store.compare_set("rendezvous", number, number + _CLOSED)
    except RuntimeError:  # the store is lost
        return
