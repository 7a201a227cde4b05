"""The rule by which ``readers="auto"`` chooses."""

from __future__ import annotations

import pytest

from epload.planning.choose import MAX_FILE_READS, SMALL_BYTES, choose_readers

GB = 10**9


def sharded(nodes: int, ranks: int, replicas: int = 1) -> list[list[int]]:
    """Bytes that each rank keeps of 64 GB; ``replicas``: ranks that keep the same."""
    return [[64 * GB * replicas // (nodes * ranks)] * ranks for _ in range(nodes)]


@pytest.mark.parametrize(
    ("kept", "objects", "expected"),
    [
        (sharded(8, 8), True, "every"),
        (sharded(1, 8, replicas=8), False, "every"),  # the node has each byte in its page cache
        (sharded(1, 8, replicas=8), True, "partitioned"),  # nothing is cached
        (sharded(4, 8, replicas=32), False, "every"),  # each node reads each byte once
        (sharded(5, 8, replicas=5), False, "partitioned"),
        ([[32 * GB, 32 * GB], [16 * GB]], True, "every"),  # 1.25 times
        ([[32 * GB, 32 * GB], [17 * GB]], True, "partitioned"),
        ([[0, 64 * GB], [0, 0]], True, "every"),
    ],
)
def test_storage_is_not_read_too_often(kept: list[list[int]], objects: bool, expected: str) -> None:
    readers, reason = choose_readers(64 * GB, kept, all_read=True, objects=objects, src=0)
    assert readers == expected, reason
    assert reason.startswith(f"auto -> {expected}: ")


@pytest.mark.parametrize("objects", [False, True])
def test_small_shards_are_read_by_every_rank(objects: bool) -> None:
    many = 4 * int(MAX_FILE_READS)
    assert choose_readers(SMALL_BYTES, [[SMALL_BYTES]] * many, all_read=True, objects=objects, src=0) == (
        "every", "auto -> every: per-rank data is small, so each rank reads its own shards",
    )  # fmt: skip
    assert choose_readers(0, [[0]], all_read=True, objects=objects, src=0)[0] == "every"


def test_one_reads_what_others_may_not_see() -> None:
    readers, reason = choose_readers(64 * GB, sharded(2, 2), all_read=False, objects=False, src=3)
    assert (readers, reason) == ("one", "auto -> one: only rank 3 is known to have the checkpoint")
