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
