"""Strided regions from a store on which a request takes long whatever its size: requests are counted, not timed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import torch
from torch import Tensor

import slow_store
from epload.native import ops
from support.checks import as_bytes
from support.region_reads import BF16, F32, Files, Row, box, table_of

SLOW = 2e-3
SCRATCH = 4 << 20
PROBES = 8
"""Requests by which the reader finds out; their bytes are read again."""
PARTS, PART, OTHERS = 64, 3072, 8
"""Rows of a tensor, elements of each that are wanted, and how many times as many a row has."""
WHOLE = 4 * PARTS * PART * OTHERS
STRIDED = Row(0, 64, (PARTS, OTHERS * PART), F32, (0, 3 * PART), (PARTS, PART), 0, (0, 0))


def cases() -> dict[str, tuple[list[Row], list[Tensor]]]:
    """Some regions of "mixed" overlap in the file; some are converted, some turned, some contiguous."""
    small = [Row(0, 64 + WHOLE + 30_000 * i, (1000,), F32, (0,), (1000,), 3, (1000 * i,)) for i in range(50)]
    cast = Row(0, 67, (PARTS, 2 * OTHERS * PART), BF16, (0, PART), (PARTS, PART), 1, (0, 0))
    dense = [Row(0, 64 + 9999 * 4 * i, (300, 20), F32, (0, 3), (300, 11), 2, (0, 11 * i)) for i in range(40)]
    targets = [torch.zeros(PART, PARTS).T, torch.zeros(PARTS, PART), torch.zeros(440, 300).T, torch.zeros(50_000)]
    return {
        "strided": ([STRIDED], [torch.zeros(PARTS, PART)]),
        "mixed": ([STRIDED, cast, *dense, *small], targets),
        "ends early": ([STRIDED], [torch.zeros(PARTS, PART)]),
    }


def ends_at(row: int) -> int:
    return 64 + 4 * PART * (OTHERS * row + 3) + 5555


def main(folder: Path, log: Path) -> None:
    """Prints of each case which targets are wrong, the failure, and the bytes of its requests."""
    outcomes = {}
    for name, (rows, targets) in cases().items():
        files = Files(folder)
        files.add(64 + WHOLE + 30_000 * 50)
        expected = [target.clone() for target in targets]
        for row in rows:
            box(expected[row.target], row.at, row.size).copy_(box(files.tensor(row), row.start, row.size))
        if name == "ends early":
            os.truncate(files.paths[0], ends_at(PARTS - 1))
        before = len(slow_store.requests(log)) if log.exists() else 0
        *where, table = table_of(rows)
        _, *failure = ops.read_regions(files.descriptors, *where, targets, table, 2)
        pairs = enumerate(zip(targets, expected, strict=True))
        wrong = [i for i, (a, b) in pairs if not torch.equal(as_bytes(a), as_bytes(b))]
        outcomes[name] = wrong, failure, slow_store.requests(log)[before:]
    print(json.dumps(outcomes))


def read(folder: Path, seconds: float) -> dict[str, tuple[list[int], list[int], list[int]]]:
    store, log = folder / "store", folder / "log"
    store.mkdir(exist_ok=True)
    environment = os.environ | slow_store.environment(store, log, seconds)
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    command = [sys.executable, "-m", __name__, store, log]
    ran = subprocess.run(command, env=environment, check=True, timeout=120, stdout=subprocess.PIPE)
    log.unlink()
    return dict(json.loads(ran.stdout))


def test_what_lies_between_is_read_along_only_if_requests_are_slow(tmp_path: Path) -> None:
    slow = read(tmp_path, SLOW)
    for _ in range(20):  # on a busy machine requests may take as long by chance, and are joined
        fast = read(tmp_path, 0.0)
        if len(fast["strided"][2]) >= PARTS and len(fast["mixed"][2]) > 4 * len(slow["mixed"][2]):
            break
    for outcomes in (slow, fast):
        assert [outcomes[case][:2] for case in ("strided", "mixed")] == [[[], [-1, 0, 0]]] * 2
        assert outcomes["ends early"][1] == [0, ends_at(PARTS - 1), 0]
    assert fast["strided"][2] == [4 * PART] * (PROBES + PARTS)
    requests = slow["strided"][2]
    assert len(requests) <= PROBES + 2 * WHOLE / SCRATCH
    assert max(requests) <= SCRATCH
    assert sum(requests) <= WHOLE + PROBES * 4 * PART, "no other byte is read twice"
    assert len(slow["mixed"][2]) < len(fast["mixed"][2]) / 4


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
