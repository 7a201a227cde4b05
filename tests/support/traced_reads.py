"""Reads of a checkpoint's file as the system sees them: which requests are made, and what happens if they are short or fail."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from epload import Checkpoint, CheckpointError
from epload.core.pieces import Piece

HERE = Path(__file__).parent


class Request(NamedTuple):
    """One call of pread or preadv."""

    offset: int
    nbytes: int
    vectors: int
    """Buffers that it fills."""


class Traced(NamedTuple):
    buffer: Tensor
    """uint8, what was read."""
    error: str
    """Of :class:`CheckpointError`; empty if there was none."""
    requests: list[Request]


@cache
def _library() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="epload-traced-reads-"))
    library = folder / "traced_reads.so"
    subprocess.run(
        ["cc", "-shared", "-fPIC", "-O1", "-Wall", "-Werror", "-o", library, HERE / "traced_reads.c", "-ldl"],
        check=True,
    )
    return library


@cache
def _process() -> subprocess.Popen[str]:
    """Fills one buffer after another, for all tests of this process, and ends with it."""
    environment = os.environ | {"LD_PRELOAD": str(_library()), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, "-m", __name__], env=environment, stdin=pipe, stdout=pipe, text=True)


def fill(
    path: Path, pieces: list[Piece], nbytes: int, *, most: int = 0, error: int = 0, direct_error: int | None = None,
) -> Traced:  # fmt: skip
    """Has another process fill a buffer of ``nbytes`` from the checkpoint at ``path``, which is one file.

    Args:
        most: bytes that a request returns; 0 for no limit.
        error: errno with which requests fail; 0 for none.
        direct_error: the same of those that go past the page cache; None if none does.
    """
    with tempfile.TemporaryDirectory(prefix="epload-traced-") as folder:
        task, result, log = (Path(folder) / name for name in ("task", "result", "log"))
        traced = {
            "READS_OF": str(path.resolve()), "READS_LOG": str(log), "READS_MOST": str(most), "READS_ERROR": str(error),
            "READS_DIRECT_ERROR": str(direct_error or 0),
        }  # fmt: skip
        direct = direct_error is not None
        torch.save(
            {"path": path, "direct": direct, "pieces": list(map(list, pieces)), "nbytes": nbytes, "traced": traced},
            task,
        )
        process = _process()
        assert process.stdin is not None
        assert process.stdout is not None
        print(task, result, sep="\t", file=process.stdin, flush=True)
        assert select.select([process.stdout], [], [], 120)[0], "no answer within 120 s"
        assert process.stdout.readline() == "done\n", f"the process ended: {process.wait()}"
        found = torch.load(result)
        lines = log.read_text().splitlines() if log.exists() else []
    return Traced(found["buffer"], found["error"], [Request(*map(int, line.split())) for line in lines])


def _fill(task: str, result: str) -> None:
    wanted = torch.load(task, weights_only=False)
    checkpoint, error = Checkpoint.open(wanted["path"]), ""
    checkpoint.configure_reads(wanted["direct"])
    buffer = torch.zeros(wanted["nbytes"], dtype=torch.uint8)
    os.environ |= wanted["traced"]  # the requests for the header do not count
    try:
        checkpoint.fill(buffer, [Piece(*piece) for piece in wanted["pieces"]])
    except CheckpointError as raised:
        error = str(raised)
    for name in wanted["traced"]:
        del os.environ[name]
    torch.save({"buffer": buffer, "error": error}, result)


if __name__ == "__main__":
    for line in sys.stdin:
        _fill(*line.rstrip("\n").split("\t"))
        print("done", flush=True)
