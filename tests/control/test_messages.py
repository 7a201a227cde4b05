"""Reads of the store that do not wait, whatever other threads and ranks delete meanwhile."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest
from torch import distributed as dist
from torch.distributed.distributed_c10d import Store

from epload.control.failure import DECISION, Failure, Outcomes
from epload.control.messages import read_if_set


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


def test_the_first_failure_is_found_behind_decisions(store: Store) -> None:
    outcomes = Outcomes(lambda: store, "1.0/")
    assert outcomes.first(1) is None
    assert outcomes.decide(1, b"decision", last=False) == DECISION + b"decision"
    outcomes.publish(1, Failure("LoadError", "no", 3))
    found = outcomes.first(1)
    assert found is not None
    assert (found[0].text, found[1]) == ("no", True)
