"""Reads of the store that do not wait."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest
from torch import distributed as dist

from epload.ranks.messages import read_if_set


@pytest.mark.parametrize("kind", ["file", "hash", "tcp"])
def test_a_read_does_not_wait_and_sets_nothing(kind: str, tmp_path: Path) -> None:
    made = {
        "file": lambda: dist.FileStore(str(tmp_path / "store"), 1),
        "hash": dist.HashStore,
        "tcp": lambda: dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False),
    }[kind]()
    made.set_timeout(timedelta(seconds=2))
    store = dist.PrefixStore("job", made)
    assert read_if_set(store, "key") is None
    assert not store.check(["key"])
    for value in (b"x", b"", b"\xff\x00", b"?" * 3):
        store.set("key", value)  # type: ignore[arg-type]
        assert read_if_set(store, "key") == value == store.get("key")
