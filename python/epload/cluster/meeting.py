"""How the ranks of a topology find each other: they meet under a number that the store gives out.

A number that each process counted for itself would not do: a rank that was replaced would begin to count anew, and wait for the
others where they never come.
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

_OVER = "!"
"""Ends the number of a meeting that nobody can join any more."""
_one_at_a_time: defaultdict[tuple[int, ...], threading.Lock] = defaultdict(threading.Lock)


def meet(
    store: Store,
    ranks: tuple[int, ...],
    rank: int,
    timeout: timedelta,
    failure: BaseException | None,
    view: Any,
    decide: Callable[[dict[int, Any]], Any],
) -> tuple[Control, Any]:
    """A control for ``ranks``, all of which call this, and what the first of them decided; see :meth:`Control.settle`.

    Raises:
        LoadError: a rank did not come within ``timeout``, ended, or had a ``failure``; the same on every rank that came.
    """
    lock = _one_at_a_time[ranks]
    if not lock.acquire(timeout=timeout.total_seconds()):
        raise LoadError(f"another thread has been discovering the topology of ranks {list(ranks)} for {timeout}")
    try:
        name = hashlib.blake2b(repr(ranks).encode(), digest_size=8).hexdigest()
        place = PrefixStore(f"epload/{name}", store)
        try:
            number = _join(place)
            control = Control(PrefixStore(number, place), ranks, rank, f"{name}/{number}")
        except DistNetworkError as error:
            raise LoadError(f"topology: the store is lost: {message_of(error)} (seen by rank {rank})") from error

        def decide_all_here(views: dict[int, Any]) -> Any:
            _close(place, number)
            return decide(views)

        try:
            with control.guard():
                control.timeout = timeout
                control.doing = "topology"
                registry = control.enter_registry()
                verdict = control.settle("topology", failure, view, decide_all_here)
                control.leave_registry(registry)
        except BaseException:
            _close(place, number)
            raise
        control.end()
        return control, verdict
    finally:
        lock.release()


def _join(place: Store) -> str:
    """The number of the meeting that is open; opens one if none is."""
    state = place.compare_set("meeting", "", "1").decode()
    while state.endswith(_OVER):
        state = place.compare_set("meeting", state, str(int(state[: -len(_OVER)]) + 1)).decode()
    return state


def _close(place: Store, number: str) -> None:
    """Nobody joins it any more; whoever comes opens the next. A meeting that failed must not be met in again."""
    try:
        place.compare_set("meeting", number, number + _OVER)
    except RuntimeError:  # the store is lost, and all meetings with it
        return
