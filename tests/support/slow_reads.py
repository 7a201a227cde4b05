"""Regions that another process reads from a store that takes a while for each request."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

import slow_store
from epload.native import ops
from support.region_reads import BF16, F32, Files, Row, box, table_of

PARTS, PART, OTHERS = 256, 3072, 8
"""Rows of a tensor, elements of each that are wanted, and how many times as many a row has."""


class Outcome(NamedTuple):
    wrong: list[int]
    """Targets that are not what slicing and ``copy_`` make."""
    failure: list[int]
    """File, offset and errno: see ``ops.read_regions``."""
    kept: int
    """Bytes of the regions."""
    requests: list[int]
    """The bytes of each."""


def read(case: str, folder: Path, seconds: float, ends_at: int = -1) -> Outcome:
    """``seconds``: that each request takes longer. ``ends_at``: byte at which the file ends; -1 for all of it."""
    with tempfile.TemporaryDirectory(prefix="epload-slow-") as other:
        log = Path(other) / "log"
        environment = os.environ | slow_store.environment(folder, log, seconds)
        environment |= {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        ran = subprocess.run(
            [sys.executable, "-m", __name__, case, folder, str(ends_at)], env=environment, check=True, timeout=120,
            stdout=subprocess.PIPE,
        )  # fmt: skip
        return Outcome(*json.loads(ran.stdout), slow_store.requests(log))


def _rows(case: str) -> tuple[list[Row], list[Tensor]]:
    """All of file 0."""
    whole = (PARTS, OTHERS * PART)
    nbytes = 4 * PARTS * OTHERS * PART
    strided = Row(0, 64, whole, F32, (0, 3 * PART), (PARTS, PART), 0, (0, 0))
    if case == "strided":
        return [strided], [torch.zeros(PARTS, PART)]
    small = [Row(0, 64 + nbytes + 30_000 * i, (1000,), F32, (0,), (1000,), 3, (1000 * i,)) for i in range(50)]
    cast = Row(0, 67, (PARTS, 2 * OTHERS * PART), BF16, (0, PART), (PARTS, PART), 1, (0, 0))
    dense = [Row(0, 64 + 9999 * 4 * i, (300, 20), F32, (0, 3), (300, 11), 2, (0, 11 * i)) for i in range(40)]
    targets = [
        torch.zeros(PART, PARTS).T, torch.zeros(PARTS, PART), torch.zeros(440, 300).T, torch.zeros(50_000),
    ]  # fmt: skip
    return [strided, cast, *dense, *small], targets


def _main(case: str, folder: str, ends_at: str) -> None:
    rows, targets = _rows(case)
    files = Files(Path(folder))
    files.add(64 + 4 * PARTS * OTHERS * PART + 30_000 * 50)
    if int(ends_at) >= 0:
        os.truncate(files.paths[0], int(ends_at))
    expected = [target.clone() for target in targets]
    for row in rows:
        box(expected[row.target], row.at, row.size).copy_(box(files.tensor(row), row.start, row.size))
    *where, table = table_of(rows)
    _, *failure = ops.read_regions(files.descriptors, *where, targets, table, 2)
    wrong = [i for i, (got, want) in enumerate(zip(targets, expected, strict=True)) if not same(got, want)]
    kept = sum(torch.Size(row.size).numel() * row.dtype.itemsize for row in rows)
    print(json.dumps([wrong, failure, kept]))


def same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.int32), b.contiguous().view(torch.int32))


if __name__ == "__main__":
    _main(*sys.argv[1:])
