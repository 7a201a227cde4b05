"""Reads of the store that do not wait."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest
from torch import distributed as dist
from torch.distributed.distributed_c10d import Store

from epload.ranks.messages import read_if_set


@pytest.fixture(params=["file", "hash", "tcp"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    """A store in which a wait fails soon."""
    made = {
        "file": lambda: dist.FileStore(str(tmp_path / "store"), 1),
        "hash": dist.HashStore,
        "tcp": lambda: dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False),
    }[request.param]()
    made.set_timeout(timedelta(seconds=2))
    return dist.PrefixStore("job", made)


def test_a_read_does_not_wait_and_sets_nothing(store: Store) -> None:
    assert read_if_set(store, "key") is None
    assert not store.check(["key"])
    for value in (b"x", b"", b"\xff\x00", b"?" * 3):
        store.set("key", value)  # type: ignore[arg-type]
        assert read_if_set(store, "key") == value == store.get("key")
    store.delete_key("key")
    assert read_if_set(store, "key") is None
    assert not store.check(["key"])
