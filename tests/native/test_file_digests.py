"""Digests of regions of files, read in pieces, against checksums of what plain torch makes of the files' bytes.

That they are right for the rows of every read is seen there, in test_region_read.py.
"""

from __future__ import annotations

import os

import pytest
import torch

from epload.core import dtypes
from epload.native import ops
from support.region_reads import BF16, F32, Files, Row, table_of


def test_digests_read_each_byte_once(files: Files) -> None:
    """Of what is contiguous, of the columns of one matrix, of the same region many times, and of regions that overlap."""
    number = files.add(3 << 20)
    shards = [Row(number, 8 + 1000 * i, (250,), F32, (0,), (250,), 0, (0,)) for i in range(2000)]
    assert files.check_digests(shards, [F32] * 2000) == 2_000_000
    assert files.check_digests(shards[::-1] + shards, [F32] * 4000) == 2_000_000, "two ranks hold the same"
    columns = [Row(number, 8, (1000, 500), F32, (0, 125 * i), (1000, 125), 0, (0, 0)) for i in range(4)]
    assert files.check_digests(columns, [F32] * 4) == 2_000_000
    whole = Row(number, 0, (3 << 18,), F32, (0,), (3 << 18,), 0, (0,))
    assert files.check_digests([whole] * 3, [F32] * 3) == 3 << 20
    assert files.check_digests([whole, *shards, *columns, whole], [F32] * 2006) == 3 << 20
    assert files.check_digests([whole, whole], [F32, BF16]) == 3 << 20, "the same bytes for shards of two dtypes"


def test_digests_of_elements_in_another_order_than_in_the_file(files: Files) -> None:
    number = files.add(4 * 700 * 900 + 12)
    whole = files.tensor(Row(number, 12, (700, 900), F32, (0, 0), (700, 900), 0, (0, 0)))
    table = torch.tensor([[dtypes.code(F32), -1, dtypes.code(F32), 2, 0, 0, 900, 500, 1, 900]])  # columns, of 500 rows
    where = torch.tensor([number]), torch.tensor([12]), torch.tensor([[0, 0]])
    digests, (nbytes, *bad) = ops.digest_files(files.descriptors, *where, table, 2)
    assert bad == [-1, 0, 0]
    assert nbytes == 4 * 500 * 900
    assert digests.tolist() == [signed(ops.checksum(whole[:500].T.contiguous()))]


def signed(digest: int) -> int:
    return digest - (1 << 64) if digest >> 63 else digest


@pytest.mark.parametrize("nbytes", [256 << 10, 512 << 10])
@pytest.mark.parametrize("more", [-1, 0, 1])
def test_digests_of_runs_around_a_piece(files: Files, nbytes: int, more: int) -> None:
    number = files.add(2 << 20)
    rows = [Row(number, at, (nbytes + more,), torch.uint8, (0,), (nbytes + more,), 0, (0,)) for at in (3, 1 << 20)]
    assert files.check_digests(rows, [torch.uint8] * 2) == 2 * (nbytes + more)


@pytest.mark.parametrize("threads", [1, 2])
def test_a_file_that_is_too_short_for_a_long_run(files: Files, threads: int) -> None:
    number = files.add(3 << 20)
    os.truncate(files.paths[number], 1_500_000)
    *where, table = table_of([Row(number, 8, (700_000,), F32, (0,), (700_000,), 0, (0,))])
    table[:, 0] = dtypes.code(F32)
    _, (_, *where_it_ended) = ops.digest_files(files.descriptors, *where, table, threads)
    assert where_it_ended == [number, 1_500_000, 0]


@pytest.mark.parametrize(
    ("row", "file", "message"),
    [({0: 999}, 0, "dtype code"), ({2: 999}, 0, "dtype code"), ({3: 2}, 0, "dims"), ({5: -1}, 0, "negative"),
     ({5: 1 << 62}, 0, "outside"), ({}, 1, "row 0 names file 1 of 1"), ({}, -1, "row 0 names file -1 of 1")],
)  # fmt: skip
def test_wrong_arguments_digest_nothing(files: Files, row: dict[int, int], file: int, message: str) -> None:
    files.add(1000)
    offsets, origins = torch.zeros(1, dtype=torch.int64), torch.zeros(1, 2, dtype=torch.int64)
    table = torch.tensor([[dtypes.code(F32), 0, dtypes.code(F32), 1, 0, 16, 1]])
    ops.digest_files(files.descriptors, torch.tensor([0]), offsets, origins, table, 1)
    for column, value in row.items():
        table[0, column] = value
    with pytest.raises(ValueError, match=message):
        ops.digest_files(files.descriptors, torch.tensor([file]), offsets, origins, table, 1)
    with pytest.raises(ValueError, match="digest_files: row 0 starts at byte 0 of tensor 1 of 1"):
        ops.digest_files(files.descriptors, torch.tensor([0]), offsets, torch.tensor([[1, 0]]), table, 1)
