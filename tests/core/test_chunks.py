"""Tensors in chunks, against the tensors themselves: any division into boxes, any region, read natively or by way of a buffer."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest
import torch
from torch import Tensor

from epload.checkpoint import byte_store
from epload.checkpoint.byte_store import ByteStore
from epload.checkpoint.local_store import LocalFolder
from epload.checkpoint.object_clients import Address
from epload.checkpoint.object_store import ObjectFolder
from epload.core import dtypes
from epload.core.chunks import Chunks
from epload.core.copy_table import CopyTable
from epload.core.placement import Box, box_slices
from epload.core.regions import Regions
from support.checkpoints import raw_bytes, tensor

SHAPES = ((7, 5), (9,), (), (3, 4, 5), (1, 6, 1, 2), (2, 1, 8))
KINDS = (torch.float32, torch.bfloat16, torch.uint8, torch.float64)


@pytest.fixture(autouse=True)
def small_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(byte_store, "SPAN_BYTES", 100)


def _divided(random: Random, start: tuple[int, ...], size: tuple[int, ...], depth: int) -> list[Box]:
    """Boxes that need not form a grid."""
    dims = [dim for dim, length in enumerate(size) if length > 1]
    if not dims or not depth or random.random() < 0.2:
        return [(start, size)]
    dim = random.choice(dims)
    cut = random.randint(1, size[dim] - 1)
    upper = tuple(a + cut if d == dim else a for d, a in enumerate(start))
    return [
        *_divided(random, start, tuple(cut if d == dim else n for d, n in enumerate(size)), depth - 1),
        *_divided(random, upper, tuple(n - cut if d == dim else n for d, n in enumerate(size)), depth - 1),
    ]


def _stored(random: Random, folder: Path) -> tuple[list[Tensor], Chunks, ByteStore, Tensor, Tensor]:
    values = [tensor(i, shape, KINDS[i % len(KINDS)]) for i, shape in enumerate(SHAPES)]
    boxes = [_divided(random, (0,) * value.ndim, tuple(value.shape), 3) for value in values]
    parts = [(i, box) for i, each in enumerate(boxes) for box in each]
    offset, file = [0] * len(parts), torch.tensor([random.randrange(2) for _ in parts])
    raw = [bytearray(b"x" * 5), bytearray()]
    for number in random.sample(range(len(parts)), len(parts)):
        i, box = parts[number]
        where = raw[int(file[number])]
        offset[number] = len(where)
        where += raw_bytes(values[i][box_slices(*box)]) + b"y" * random.randrange(3)
    for number, content in enumerate(raw):
        (folder / str(number)).write_bytes(content)
    chunks = Chunks.of([tuple(v.shape) for v in values], [v.dtype.itemsize for v in values], boxes)
    where = ObjectFolder(Address(f"file://{folder}")) if random.random() < 0.5 else LocalFolder(folder)
    return values, chunks, where.store(where.open(["0", "1"])), file, torch.tensor(offset)


def test_regions_of_tensors_in_chunks(tmp_path: Path) -> None:
    """Boxes with their dims in any order, into boxes of other tensors."""
    for seed in range(30):
        random = Random(seed)
        (tmp_path / str(seed)).mkdir()
        values, chunks, store, file, offset = _stored(random, tmp_path / str(seed))
        targets, rows, origins, expected = [], [], [], []
        for i, value in enumerate(values):
            start = tuple(random.randrange(n) for n in value.shape)
            size = tuple(random.randint(1, n - a) for a, n in zip(start, value.shape, strict=True))
            order = random.sample(range(value.ndim), value.ndim)
            margin = [random.randrange(3) for _ in order]
            wanted = value[box_slices(start, size)].permute(order)
            target = torch.zeros([n + m for n, m in zip(wanted.shape, margin, strict=True)], dtype=value.dtype)
            full = target.clone()
            full[box_slices(margin, wanted.shape)] = wanted
            steps = [value.stride(d) for d in order]
            pad = [0] * (4 - value.ndim)
            row = [i, 0, dtypes.code(value.dtype), value.ndim, *margin, *pad, *wanted.shape, *pad, *steps, *pad]
            first = sum(a * s for a, s in zip(start, value.stride(), strict=True)) * value.dtype.itemsize
            targets.append(target)
            rows.append(row)
            origins.append([i, first])
            expected.append(full)
        regions = Regions(targets, CopyTable(torch.tensor(rows)), torch.tensor(origins)).split(chunks)
        assert regions is not None
        assert store.read_regions(file, offset, regions) > 0
        for target, want in zip(targets, expected, strict=True):
            assert raw_bytes(target) == raw_bytes(want), seed


def test_pieces_of_tensors_in_chunks(tmp_path: Path) -> None:
    """Byte ranges, which may begin and end inside elements."""
    for seed in range(30):
        random = Random(seed)
        (tmp_path / str(seed)).mkdir()
        values, chunks, store, file, offset = _stored(random, tmp_path / str(seed))
        pieces, expected = [], bytearray()
        for i in random.sample(range(len(values)), len(values)):
            begin = random.randrange(values[i].nbytes)
            end = random.randint(begin + 1, values[i].nbytes)
            pieces.append([i, begin, len(expected), end - begin])
            expected += raw_bytes(values[i])[begin:end]
        bucket = torch.empty(len(expected), dtype=torch.uint8)
        store.read_regions(file, offset, Regions(*chunks.fill(bucket, torch.tensor(pieces))))
        assert bytes(bucket.tolist()) == bytes(expected), seed
