"""Strided regions from a store on which a request takes long whatever its size: requests are counted, not timed."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.slow_reads import OTHERS, PART, PARTS, Outcome, read

SLOW = 2e-3
SCRATCH = 4 << 20
PROBES = 8
"""Requests by which the reader finds out; their bytes are read again."""


def read_fast(case: str, folder: Path, least: int) -> Outcome:
    """Without a delay. On a busy machine requests may take as long by chance, and are joined: then again, until there are at
    least so many."""
    for _ in range(20):
        found = read(case, folder, 0.0)
        if len(found.requests) >= least:
            break
    return found


def test_parts_that_are_apart_are_requests_of_their_own(tmp_path: Path) -> None:
    found = read_fast("strided", tmp_path, PARTS)
    assert not found.wrong
    assert found.requests == [4 * PART] * (PROBES + PARTS)


def test_what_lies_between_is_read_along_if_requests_are_slow(tmp_path: Path) -> None:
    found = read("strided", tmp_path, SLOW)
    assert not found.wrong
    whole = 4 * PART * PARTS * OTHERS
    assert len(found.requests) <= PROBES + 2 * whole / SCRATCH
    assert max(found.requests) <= SCRATCH
    assert sum(found.requests) <= whole + PROBES * 4 * PART, "no other byte is read twice"


def test_all_kinds_of_regions_are_read_together(tmp_path: Path) -> None:
    """Some overlap in the file; some are converted, some turned, some contiguous."""
    slow = read("mixed", tmp_path, SLOW)
    fast = read_fast("mixed", tmp_path, 4 * len(slow.requests) + 1)
    assert fast.wrong == slow.wrong == []
    assert fast.failure == slow.failure == [-1, 0, 0]
    assert len(slow.requests) < len(fast.requests) / 4
    assert sum(fast.requests) < 2 * fast.kept


@pytest.mark.parametrize("row", [1, PARTS - 1])
def test_a_file_that_ends_too_early(row: int, tmp_path: Path) -> None:
    """While the reader finds out, and after."""
    ends_at = 64 + 4 * PART * (OTHERS * row + 3) + 5555
    assert read("strided", tmp_path, SLOW, ends_at).failure == [0, ends_at, 0]
