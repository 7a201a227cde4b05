"""Reading regions of files straight into tensors, through the page cache or past it, against plain torch on the files' bytes."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from epload.core.copy_table import CopyTable
from epload.native import ops
from page_cache import cached, drop
from support.checkpoints import make_cold, tensor
from support.failures import must_raise
from support.region_copies import packed
from support.region_reads import BF16, F32, Files, Row, Shape, filled, table_of

SCRATCH = 4 << 20
"""Bytes that go through a thread's buffer at once; what is more is read in parts."""


def test_contiguous_rows_are_one_request_each_byte_once(files: Files) -> None:
    number = files.add(1 << 20)
    rows = [Row(number, 4000 * i, (1000,), F32, (0,), (1000,), i, (0,)) for i in range(200)]
    assert files.check(rows, [filled((1000,)) for _ in rows]) == 200 * 4000
    assert files.check(rows[::-1], [filled((1000,)) for _ in rows]) == 200 * 4000, "in any order"


@pytest.mark.parametrize("gap", [0, 1, 4096, 4097, 100_000])
@pytest.mark.parametrize("length", [1000, 30_000])
def test_gaps(files: Files, length: int, gap: int) -> None:
    """The bytes between are read where that is cheaper than a request of their own, and go nowhere."""
    step = length + gap
    number = files.add(40 * step)
    rows = [Row(number, step * i, (length,), torch.uint8, (0,), (length,), 0, (length * i,)) for i in range(40)]
    nbytes = files.check(rows, [filled((40 * length,), torch.uint8)])
    assert nbytes == 40 * length if gap > 4096 else 0 <= 40 * length + 39 * gap - nbytes <= 2 * gap


def test_lengths_and_places_of_no_alignment(files: Files) -> None:
    number = files.add(12 << 20)
    rows = []
    offset, place = 3, 5
    for around in (1, 64, 4096, 256 << 10):
        for length in (around, around + 1, around + 65, around + 1027):
            rows.append(Row(number, offset, (length,), torch.uint8, (0,), (length,), 0, (place,)))
            offset += length + 5001
            place += length + 7
    files.check(rows, [filled((place + 100,), torch.uint8)])


@pytest.mark.parametrize(
    ("shape", "start", "size"),
    [
        ((300, 1000), (0, 250), (300, 250)),  # Shard(1): most of a span is not wanted
        ((40, 30, 20), (3, 5, 7), (30, 20, 10)),
        ((2000, 4096), (0, 1), (2000, 1)),  # one element in 16 kB
        ((3, 2, 1 << 20), (0, 1, 5), (3, 1, (1 << 20) - 9)),  # rows larger than a quarter of the scratch buffer
        ((1 << 18, 9), (0, 2), (1 << 18, 7)),  # a span of 9 MB
    ],
)
@pytest.mark.parametrize("turned", [False, True])
def test_strided_in_the_file(files: Files, shape: Shape, start: Shape, size: Shape, turned: bool) -> None:
    number = files.add(64 + 4 * torch.Size(shape).numel())
    dims = tuple(reversed(range(len(size))))
    target = filled(tuple(size[d] for d in dims)).permute(dims) if turned else filled(size)
    nbytes = files.check([Row(number, 64, shape, F32, start, size, 0, (0,) * len(size))], [target])
    span = 1 + sum((n - 1) * stride for n, stride in zip(size, packed(list(shape)), strict=True))
    assert target.nbytes <= nbytes <= 4 * span, "no byte is read twice"


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize(
    ("shape", "dims"),
    [
        ((2048, 512), (1, 0)),  # bytes between the elements of a column are few
        ((300, 3000), (1, 0)),  # and here too many to read
        ((5, 700, 600), (0, 2, 1)),  # experts, each transposed
        ((70, 60, 50), (2, 0, 1)),
        ((70, 60, 50), (2, 1, 0)),
    ],
)
def test_transposed(files: Files, shape: Shape, dims: Shape, dtype: torch.dtype) -> None:
    """A tensor whose dims are in another order than in the file is read as it lies there: in few requests, each byte once."""
    number = files.add(8 + 4 * torch.Size(shape).numel())
    whole, part = (0,) * len(shape), tuple(n - n // 3 for n in shape)
    for start, size in ((whole, shape), (tuple(n // 3 for n in shape), part)):
        row = Row(number, 8, shape, dtype, start, size, 0, whole, dims)
        target = filled(tuple(row.turned(size)), dtype)
        nbytes = files.check([row], [target])
        span = 1 + sum((n - 1) * stride for n, stride in zip(size, packed(list(shape)), strict=True))
        assert target.nbytes <= nbytes <= dtype.itemsize * span


def test_sparse_large_and_cast_rows(files: Files) -> None:
    """A quarter of a percent of a 16 MB span: not all of it is read. Others go through the scratch buffer."""
    row = Row(files.add(16 << 20), 0, (256, 16384), F32, (0, 5), (256, 40), 0, (0, 0))
    assert files.check([row], [filled((256, 40))]) < 2 << 20
    count = 5 * SCRATCH // 4 + 3
    number = files.add(4 * count + 2)
    files.check([Row(number, 2, (count,), F32, (0,), (count,), 0, (0,))], [filled((count,))])
    files.check([Row(number, 2, (2 * count,), BF16, (1,), (2 * count - 1,), 0, (0,))], [filled((2 * count - 1,))])


def test_many_tiny_rows_of_several_files_and_empty_ones(files: Files) -> None:
    for _ in range(3):
        number = files.add(9_001)
    rows = [Row(i % 3, 3 * (i // 3), (3,), torch.uint8, (0,), (3,), i % 5, (3 * (i // 5),)) for i in range(9_000)]
    assert files.check(rows, [filled((5_400,), torch.uint8) for _ in range(5)]) == 27_000
    rows = [
        Row(number, 0, (0,), F32, (0,), (0,), 0, (0,)),
        Row(number, 1 << 50, (3, 0), F32, (0, 0), (3, 0), 1, (0, 0)),
    ]
    assert files.check(rows, [filled((5,)), filled((3, 2))]) == 0
    empty = torch.zeros(0, dtype=torch.int64)
    nothing = empty, empty, empty.view(0, 2), [], empty.view(0, 7)
    assert ops.read_regions([], *nothing, 2) == (0, -1, 0, 0)


@pytest.mark.parametrize("strided", [False, True])
def test_a_file_that_is_too_short(files: Files, strided: bool) -> None:
    files.add(100_000)
    number = files.add(100_000)
    os.truncate(files.paths[number], 50_001)
    size = (25, 500) if strided else (25, 1000)
    *where, table = table_of([Row(file, 0, (25, 1000), F32, (0, 0), size, file, (0, 0)) for file in (0, number)])
    targets = [filled(size), filled(size)]
    _, bad, offset, error = ops.read_regions(files.descriptors, *where, targets, table, 2)
    assert (bad, offset, error) == (number, 50_001, 0)


def test_descriptors_that_cannot_be_read(files: Files, tmp_path: Path) -> None:
    files.add(1000)
    *where, table = table_of([Row(i, 0, (10,), F32, (0,), (10,), i, (0,)) for i in range(2)])
    write_only = os.open(tmp_path / "w", os.O_WRONLY | os.O_CREAT)
    folder = os.open(tmp_path, os.O_RDONLY)
    read_end, write_end = os.pipe()
    try:
        errors = {-1: errno.EBADF, write_only: errno.EBADF, folder: errno.EISDIR, read_end: errno.ESPIPE}
        for descriptor, expected in errors.items():
            targets = [filled((10,)), filled((10,))]
            descriptors = [files.descriptors[0], descriptor]
            _, bad, offset, error = ops.read_regions(descriptors, *where, targets, table, 2)
            assert (bad, offset, error) == (1, 0, expected)
    finally:
        for descriptor in (write_only, folder, read_end, write_end):
            os.close(descriptor)


def test_wrong_arguments_read_nothing(files: Files) -> None:
    number = files.add(10_000)
    good = Row(number, 0, (10, 10), F32, (0, 0), (10, 10), 0, (0, 0))
    targets = [filled((10, 10)), filled((10, 10))]
    before = [target.clone().view(torch.uint8) for target in targets]

    def refused(text: str, column: int = 0, value: int = 1, file: int = number, offset: int = 0, **others: Any) -> None:
        """Changes a column of the second row, which is that of its tensor unless told."""
        files_of, offsets, origins, table = table_of([good, Row(**{**vars(good), "target": 1})])
        table[1, column] = value
        files_of[1], offsets[1], origins[1] = file, offset, torch.tensor(others.pop("origin", (1, 0)))
        made = {
            "files": files_of,
            "offsets": offsets,
            "origins": origins,
            "targets": targets,
            "copies": table,
            **others,
        }
        must_raise(ValueError, text, ops.read_regions, files.descriptors, *made.values(), 2)
        equal = [torch.equal(t.view(torch.uint8), b) for t, b in zip(targets, before, strict=True)]
        assert all(equal), "nothing was read"

    for column, value in ((4, 1), (7, 11), (4, -1)):
        refused("outside tensor 1", column, value)
    for column, value in ((0, 2), (0, -1), (2, 9999), (3, 1), (8, 2**62)):
        refused("row 1", column, value)
    refused("row 1 has a negative size or stride in dim 0", 8, -10)
    for offset in (-4, 2**63 - 1):
        refused("row 1", offset=offset)
    for file in (1, -1):
        refused(f"row 1 names file {file}", file=file)
    refused("row 1", origin=(1, -1))
    for target in (2, -1):
        refused(f"row 1 starts at byte 8 of tensor {target} of 2", origin=(target, 8))
    refused("row 1 starts at byte 9223372036854775807 of tensor 1", offset=1, origin=(1, 2**63 - 1))
    refused("1 files and 2 offsets", files=torch.zeros(1, dtype=torch.int64))
    two_by_two = torch.zeros(2, 2, dtype=torch.int64)
    refused("got origins of shape .1, 2. for rows of shape .2, ", origins=two_by_two[:1])
    refused("origins.* of shape .2, 3.", origins=torch.zeros(2, 3, dtype=torch.int64))
    refused("origins .* got Float", origins=two_by_two.float())
    refused("origins .* contiguous", origins=two_by_two.T)
    refused("origins .* for rows of shape .14.", copies=torch.zeros(14, dtype=torch.int64))
    for name in ("files", "offsets"):
        for wrong in (torch.zeros(2), torch.zeros(2, 1, dtype=torch.int64)):
            refused(f"expected {name} as a contiguous 1-D int64", **{name: wrong})
    refused("meta", targets=[targets[0], targets[1].to("meta")])


Job = tuple[list[int], list[tuple[Shape, list[int]]], list[Row], torch.dtype]


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    """Returns sizes of files; shapes and orders of dims of targets; rows whose places in the targets do not overlap."""
    sizes = draw(st.lists(st.integers(9000, 30_000), min_size=1, max_size=3))
    wanted = draw(st.sampled_from((F32, BF16, torch.int64, torch.float64)))
    targets: list[tuple[Shape, list[int]]] = []
    rows = []
    for i in range(draw(st.integers(1, 4))):
        dims = draw(st.integers(0, 4))
        shape = tuple(draw(st.lists(st.integers(1, 7), min_size=dims, max_size=dims)))
        targets.append((shape, draw(st.permutations(range(dims)))))
        cut = draw(st.integers(0, shape[0])) if dims else 0
        for low, high in {(0, cut), (cut, shape[0])} if dims else {(0, 0)}:
            stored = draw(st.sampled_from((wanted, F32, BF16, torch.int16, torch.uint8)))
            place = (high - low, *shape[1:]) if dims else ()
            turned = tuple(draw(st.permutations(range(dims))))
            size = tuple(place[turned.index(dim)] for dim in range(dims))
            start = tuple(draw(st.integers(0, 2)) for _ in size)
            around = tuple(a + n + draw(st.integers(0, 2)) for a, n in zip(start, size, strict=True))
            offset = draw(st.integers(0, 300))
            at = (low, *(0,) * (dims - 1)) if dims else ()
            rows.append(Row(draw(st.integers(0, len(sizes) - 1)), offset, around, stored, start, size, i, at, turned))
    return sizes, targets, rows, wanted


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(jobs(), st.integers(-1, 7))
def test_any_boxes(tmp_path: Path, job: Job, threads: int) -> None:
    sizes, shapes, rows, wanted = job
    with closing(Files(tmp_path)) as files:
        for row in rows:  # large enough for every row's tensor
            need = row.offset + torch.Size(row.shape).numel() * row.dtype.itemsize
            sizes[row.file] = max(sizes[row.file], need)
        for size in sizes:
            files.add(size)
        targets = []
        for shape, order in shapes:
            lying = filled(tuple(shape[d] + 1 for d in order), wanted)  # one more in each dim, so that views have gaps
            back = [order.index(d) for d in range(len(shape))]
            targets.append(lying.permute(back)[tuple(slice(0, n) for n in shape)])
        files.check(rows, targets, threads)


MIB = 1 << 20
NBYTES = 9 * MIB + 123
"""The file has more than two requests, and its last block is not whole."""
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


def read(descriptor: int, offset: int, nbytes: int, target: Tensor, direct: bool = True) -> tuple[int, int, int, int]:
    zero = torch.zeros(1, dtype=torch.int64)
    rows = CopyTable.of_bytes(zero, zero + nbytes).rows
    return ops.read_regions([descriptor], zero, zero, torch.tensor([[0, offset]]), [target], rows, 2, direct)


@pytest.mark.parametrize(("offset", "nbytes"), RANGES)
def test_any_range_of_a_cold_file(offset: int, nbytes: int, path: Path, descriptor: int, content: Tensor) -> None:
    """It is not in the cache afterwards."""
    buffer = torch.full((nbytes + 100,), 255, dtype=torch.uint8)
    expected = buffer.clone()
    expected[33 : 33 + nbytes] = content[offset : offset + nbytes]
    assert read(descriptor, offset, nbytes, buffer[33:]) == (nbytes, -1, 0, 0)
    assert torch.equal(buffer, expected)
    assert cached(path) < 0.1


def test_what_is_in_the_cache_is_read_there(path: Path, descriptor: int, content: Tensor) -> None:
    """Among it what another program has just written, and the disk does not have yet."""
    buffer = torch.zeros(NBYTES, dtype=torch.uint8)
    read(descriptor, 0, NBYTES, buffer, direct=False)
    assert cached(path) > 0.9
    changed = content.flip(0)
    with open(path, "r+b") as file:
        file.write(changed.numpy().tobytes())
    read(descriptor, 0, NBYTES, buffer)
    assert torch.equal(buffer, changed)


def test_a_cold_file_that_is_too_short(path: Path, descriptor: int) -> None:
    os.truncate(path, 5 * MIB + 17)
    drop(path)
    buffer = torch.zeros(NBYTES, dtype=torch.uint8)
    _, failed, offset, error = read(descriptor, 0, NBYTES, buffer)
    assert (failed, offset, error) == (0, 5 * MIB + 17, 0)
