"""Reads past the page cache: the same bytes, where the file is cold, and nothing left in the cache."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from epload.native import ops
from page_cache import cached, drop
from support.checkpoints import make_cold, tensor

MIB = 1 << 20
NBYTES = 9 * MIB + 123
"""Of the file: more than two requests, and its last block is not whole."""
RANGES = [
    (0, NBYTES), (1, NBYTES - 1), (4095, 2), (4096, 4 * MIB), (5 * MIB - 7, 4 * MIB + 100), (NBYTES - 300_000, 300_000),
    (NBYTES - 5, 5), (123_457, 300_001), (0, 0),
]  # fmt: skip
"""Offset in the file and bytes."""


@pytest.fixture
def content() -> Tensor:
    return tensor(1, (NBYTES,), torch.uint8)


@pytest.fixture
def path(tmp_path: Path, content: Tensor) -> Path:
    path = tmp_path / "file"
    path.write_bytes(content.numpy().tobytes())
    make_cold(path)
    return path


@pytest.fixture
def descriptor(path: Path) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDONLY)
    yield descriptor
    os.close(descriptor)


@pytest.mark.parametrize(("offset", "nbytes"), RANGES)
def test_any_range_of_a_cold_file(offset: int, nbytes: int, path: Path, descriptor: int, content: Tensor) -> None:
    buffer = torch.full((nbytes + 100,), 255, dtype=torch.uint8)
    outcome = ops.read_ranges([descriptor], torch.tensor([[0, offset, 33, nbytes]]), buffer, 2, direct=True)
    assert outcome == (nbytes, -1, 0, 0)
    assert torch.equal(buffer[33 : 33 + nbytes], content[offset : offset + nbytes])
    assert buffer[:33].eq(255).all()
    assert buffer[33 + nbytes :].eq(255).all()


def test_what_is_read_directly_is_not_in_the_cache_afterwards(path: Path, descriptor: int) -> None:
    buffer = torch.zeros(NBYTES, dtype=torch.uint8)
    whole = torch.tensor([[0, 0, 0, NBYTES]])
    ops.read_ranges([descriptor], whole, buffer, 2, direct=True)
    assert cached(path) < 0.1
    ops.read_ranges([descriptor], whole, buffer, 2, direct=False)
    assert cached(path) > 0.9


def test_what_is_in_the_cache_is_read_there(path: Path, descriptor: int, content: Tensor) -> None:
    """Among it what another program has just written, and the disk does not have yet."""
    changed = content.flip(0)
    with open(path, "r+b") as file:
        file.write(changed.numpy().tobytes())
    buffer = torch.zeros(NBYTES, dtype=torch.uint8)
    ops.read_ranges([descriptor], torch.tensor([[0, 0, 0, NBYTES]]), buffer, 2, direct=True)
    assert torch.equal(buffer, changed)


def test_a_file_that_is_too_short(path: Path, descriptor: int) -> None:
    os.truncate(path, 5 * MIB + 17)
    drop(path)
    buffer = torch.zeros(NBYTES, dtype=torch.uint8)
    _, failed, offset, error = ops.read_ranges([descriptor], torch.tensor([[0, 0, 0, NBYTES]]), buffer, 1, direct=True)
    assert (failed, offset, error) == (0, 5 * MIB + 17, 0)
