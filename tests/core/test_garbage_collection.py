"""The collector is paused, and does not make up for it at once."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from epload.core import garbage_collection


class Cyclic:
    freed = 0

    def __init__(self) -> None:
        self.itself = self

    def __del__(self) -> None:
        Cyclic.freed += 1


@pytest.fixture
def collections() -> Iterator[list[int]]:
    """The number of objects that each collection looks at."""
    found: list[int] = []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            found.append(sum(len(gc.get_objects(generation)) for generation in range(info["generation"] + 1)))

    gc.collect()
    gc.callbacks.append(note)
    yield found
    gc.callbacks.remove(note)
    gc.unfreeze()


def make_lists(count: int) -> list[list[int]]:
    return [[] for _ in range(count)]


def test_what_was_allocated_meanwhile_is_not_traversed(collections: list[int]) -> None:
    with garbage_collection.paused():
        kept = make_lists(100_000)
        assert collections == []
    more = make_lists(5_000)
    assert collections, "the collector works again"
    assert max(collections) < 20_000
    assert len(kept) > len(more)


def test_garbage_is_found_although_the_collector_is_paused_again_and_again() -> None:
    """As in a loop of reloads, with work in between that makes garbage."""
    Cyclic.freed = 0
    for _ in range(200):
        for _ in range(300):
            Cyclic()
        with garbage_collection.paused():
            make_lists(100)
    assert Cyclic.freed > 50_000


def test_what_the_caller_has_frozen_stays_frozen(collections: list[int]) -> None:
    kept = make_lists(100_000)
    gc.freeze()
    count = gc.get_freeze_count()
    with garbage_collection.paused():
        pass
    assert gc.get_freeze_count() == count >= len(kept)
