"""The collector is paused, and does not make up for it at once."""

from __future__ import annotations

import gc

from epload.core import garbage_collection


class Cyclic:
    freed = 0

    def __init__(self) -> None:
        self.itself = self

    def __del__(self) -> None:
        Cyclic.freed += 1


def test_garbage_is_found_although_the_collector_is_paused_again_and_again() -> None:
    """Reloads in a loop, with work in between that makes garbage. Objects that the caller has frozen stay frozen."""
    Cyclic.freed = 0
    for _ in range(200):
        for _ in range(300):
            Cyclic()
        with garbage_collection.paused():
            [[] for _ in range(100)]
    assert Cyclic.freed > 50_000
    gc.freeze()
    count = gc.get_freeze_count()
    try:
        with garbage_collection.paused():
            pass
        assert gc.get_freeze_count() == count
    finally:
        gc.unfreeze()
