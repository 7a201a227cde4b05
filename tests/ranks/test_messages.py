"""Reads of the store that do not wait, whatever other threads and ranks delete meanwhile."""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from pathlib import Path
from unittest import mock

import pytest
from torch import distributed as dist
from torch.distributed.distributed_c10d import Store

from epload.ranks.control import Control
from epload.ranks.failure import DECISION, Failure, Outcomes
from epload.ranks.messages import read_if_set
from support import ranks


def make(kind: str, folder: Path) -> Store:
    if kind == "file":
        return dist.FileStore(str(folder / "store"), 1)
    if kind == "hash":
        return dist.HashStore()
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


@pytest.fixture(params=["file", "hash", "tcp"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    """One in which a wait fails soon."""
    store = make(request.param, tmp_path)
    store.set_timeout(timedelta(seconds=2))
    return dist.PrefixStore("job", store)


def test_a_read_does_not_wait_and_sets_nothing(store: Store) -> None:
    assert read_if_set(store, "key") is None
    assert not store.check(["key"])
    for value in (b"x", b"", b"\xff\x00", b"?" * 3):
        store.set("key", value)  # type: ignore[arg-type]
        assert read_if_set(store, "key") == value == store.get("key")
    store.delete_key("key")
    assert read_if_set(store, "key") is None
    assert not store.check(["key"])


def keeps_reading(rank: int) -> list[str]:
    """Rounds on one rank, which deletes the outcome of each in the next, while another thread looks for failures all the time."""
    store = dist.distributed_c10d._get_default_store()
    control = Control(dist.PrefixStore("control", store), (0,), 0)
    over, errors = threading.Event(), []

    def look() -> None:
        while not over.is_set():
            control.find_failure()

    get = dist.PrefixStore.get

    def late(store: dist.PrefixStore, key: str) -> bytes:
        time.sleep(0.005)
        return get(store, key)

    looking = threading.Thread(target=look, daemon=True)
    with mock.patch.object(dist.PrefixStore, "get", late):
        looking.start()
        for _ in range(5):
            control.begin(timedelta(minutes=1))
            for number in range(10):
                if control.agree(f"round {number}", "view", lambda views: views[0]) != "view":
                    errors.append(f"round {number}")
        over.set()
        looking.join(20)
    return errors + ["the other thread waits for a key that was deleted"] * looking.is_alive()


def test_an_outcome_is_not_deleted_while_another_thread_looks_at_it() -> None:
    """Looking is two operations of the store, the second of which waits."""
    assert ranks.run(1, keeps_reading) == [[]]
    assert ranks.run(1, keeps_reading, tcp=True) == [[]]


def test_the_first_failure_is_found_behind_decisions(store: Store) -> None:
    outcomes = Outcomes(lambda: store, "1.0/")
    assert outcomes.first(1) is None
    assert outcomes.decide(1, b"decision", last=False) == DECISION + b"decision"
    outcomes.publish(1, Failure("LoadError", "no", 3))
    found = outcomes.first(1)
    assert found is not None
    assert (found[0].text, found[1]) == ("no", True)
