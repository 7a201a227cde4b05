"""The requests with which a checkpoint's files are read, as the system sees them; and those that come back short or fail."""

from __future__ import annotations

import errno
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor

from epload import Checkpoint
from epload.core.pieces import Piece
from page_cache import cached
from support.checkpoint_kinds import one_file
from support.checkpoints import make_cold, tensor
from support.traced_reads import Traced, fill

MOST_BYTES = 16 << 20
"""Of one request."""
MOST_VECTORS = 1024
"""IOV_MAX of Linux."""


def read_in_order(path: Path, state: Mapping[str, Tensor], most: int = 0) -> Traced:
    """All tensors, one behind the other and 64 bytes apart; checks that they are the state's."""
    names, pieces, at = Checkpoint.open(path).manifest.names, [], 64
    for number, name in enumerate(names):
        pieces.append(Piece(number, 0, at, state[name].nbytes))
        at += state[name].nbytes + 64
    traced = fill(path, pieces, at, most=most)
    assert not traced.error
    for piece in pieces:
        got = traced.buffer[piece.bucket_offset :][: piece.nbytes]
        assert torch.equal(got, state[names[piece.tensor]].reshape(-1).view(torch.uint8))
    return traced


@pytest.mark.parametrize(("size", "count", "requests"), [(64, 40, 1), (13, 40, 1), (13, 1100, 5)])
def test_adjacent_tensors_are_one_request(size: int, count: int, requests: int, tmp_path: Path) -> None:
    state = {f"t{i:04}": tensor(i, (size,), torch.uint8) for i in range(count)}
    seen = read_in_order(one_file(tmp_path, state), state).requests
    assert len(seen) <= requests
    assert max(request.vectors for request in seen) <= MOST_VECTORS
    assert sum(request.nbytes for request in seen) == size * count


def test_tensors_that_are_far_apart_are_requests_of_their_own(tmp_path: Path) -> None:
    state = {f"t{i}": tensor(i, (size,), torch.uint8) for i, size in enumerate((64, 100_000, 64, 64, 100_000))}
    path = one_file(tmp_path, state)
    number = Checkpoint.open(path).manifest.names.index
    wanted = [Piece(number(f"t{i}"), 0, 64 * at, 64) for at, i in enumerate((0, 2, 3))]
    traced = fill(path, wanted, 192)
    assert sorted(request.nbytes for request in traced.requests) == [64, 128]
    expected = torch.cat([state[f"t{i}"] for i in (0, 2, 3)])
    assert torch.equal(traced.buffer, expected)


def test_requests_are_bounded(tmp_path: Path) -> None:
    state = {"small": tensor(1, (100,), torch.uint8), "large": tensor(2, ((2 * MOST_BYTES + 999) // 4,), torch.int32)}
    seen = read_in_order(one_file(tmp_path, state), state).requests
    assert len(seen) <= 4
    assert max(request.nbytes for request in seen) <= MOST_BYTES


@pytest.mark.parametrize("most", [1, 13, 100])
def test_short_reads_are_continued(most: int, tmp_path: Path) -> None:
    state = {f"t{i}": tensor(i, (17 + i,), torch.uint8) for i in range(6)}
    seen = read_in_order(one_file(tmp_path, state), state, most).requests
    assert len(seen) >= sum(value.nbytes for value in state.values()) / most


def test_a_read_error_names_the_file(tmp_path: Path) -> None:
    path = one_file(tmp_path, {"a": tensor(1, (100,))})
    traced = fill(path, [Piece(0, 0, 0, 400)], 400, error=errno.EIO)
    assert str(path) in traced.error
    assert "Input/output error" in traced.error


@pytest.fixture
def large_file(tmp_path: Path) -> Path:
    """A cold file of one tensor of 1 MiB."""
    path = one_file(tmp_path, {"a": tensor(1, (1 << 20,), torch.uint8)})
    make_cold(path)
    return path


@pytest.mark.parametrize("refused", [0, errno.EINVAL], ids=["read", "refused"])
def test_a_cold_file_is_read_past_the_cache_unless_its_file_system_refuses(refused: int, large_file: Path) -> None:
    traced = fill(large_file, [Piece(0, 0, 0, 1 << 20)], 1 << 20, direct_error=refused)
    assert traced.error == ""
    assert torch.equal(traced.buffer, tensor(1, (1 << 20,), torch.uint8))
    assert (cached(large_file) > 0.9) == bool(refused)


def test_what_is_in_the_cache_is_not_read_past_it(large_file: Path) -> None:
    large_file.read_bytes()
    traced = fill(large_file, [Piece(0, 0, 0, 1 << 20)], 1 << 20, direct_error=errno.EIO)
    assert traced.error == ""
    assert len(traced.requests) == 1


def test_a_read_error_past_the_cache_names_the_file(large_file: Path) -> None:
    traced = fill(large_file, [Piece(0, 0, 0, 1 << 20)], 1 << 20, direct_error=errno.EIO, error=errno.EIO)
    assert str(large_file) in traced.error
    assert "Input/output error" in traced.error
