"""A part of the GPU check: how fast a file in the page cache comes to a device, step by step."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from epload.core.copy_table import CopyTable
from epload.native import ops
from epload.transfer import affinity
from epload.transfer.device_pipe import PINNED_BYTES, DevicePipe
from gpu_parts.common import Clock, Row, checkpoint_of, device_of, finished
from workload import FILE

BUFFER = 64 << 20
"""Bytes of a large buffer, for comparison."""
THREADS = (8, 16, 12, 4, 2, 1)
"""The first are worth most."""
PIECES = (4 << 20, 2 << 20, 1 << 20, 256 << 10)
"""Bytes; each thread has two."""


def page_cache(options: argparse.Namespace) -> Iterator[Row]:
    """A file into a tensor on the device by way of small pieces, by threads and size of a piece, and by way of large buffers,
    over the rate of copies from pinned memory alone. What came through pieces is compared with the file."""
    device = device_of(options)
    if device.type == "cpu":  # a device whose copies are memcpy, in a thread
        from support import fakedev

        fakedev.setup()
        device = torch.device(f"{fakedev.NAME}:0")
    yield from pinning(device)
    cpus = len(os.sched_getaffinity(0))
    with affinity.near(device):
        buffers = [torch.empty(BUFFER, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    there = torch.empty(BUFFER, dtype=torch.uint8, device=device)
    seconds, _ = Clock(device).best(finished(device, lambda: there.copy_(buffers[0], non_blocking=True)))
    floor = BUFFER / seconds
    yield {"what": "pinned memory to device", "GB_s": floor / 1e9, "threads_of_a_loader": affinity.read_threads(1)}
    file = checkpoint_of(options) / FILE
    expected = torch.from_file(str(file), size=file.stat().st_size, dtype=torch.uint8).to(device)
    for n in (n for n in THREADS if n <= cpus):
        for piece in PIECES:
            rate = pipe_rate(file, ops.device_pipe(device, n, piece), expected)
            what = f"pieces, {n} threads x 2 x {piece >> 10} KiB"
            yield {"what": what, "GB_s": rate / 1e9, "over_pinned": rate / floor}
    rate = upload_rate(file, buffers, min(cpus, max(THREADS)), device)
    yield {"what": "large buffers", "GB_s": rate / 1e9, "over_pinned": rate / floor}


def pipe_rate(file: Path, pipe: ops.Pipe, expected: Tensor) -> float:
    """Bytes/s of reading the file into a tensor on the device, the better of two."""
    target = torch.empty_like(expected)
    rows = CopyTable.of_bytes(torch.tensor([0]), torch.tensor([target.nbytes])).rows
    zero, origin, seconds = torch.zeros(1, dtype=torch.int64), torch.zeros(1, 2, dtype=torch.int64), []
    with open(file, "rb") as opened:
        for _ in range(2):
            target.zero_()
            torch.accelerator.synchronize()
            began = time.perf_counter()
            ops.read_regions([opened.fileno()], zero, zero, origin, [target], rows, 1, False, pipe)
            torch.accelerator.synchronize()
            seconds.append(time.perf_counter() - began)
            if not torch.equal(target, expected):
                raise RuntimeError("what is on the device is not what is in the file")
    return target.nbytes / min(seconds)


def pinning(device: torch.device) -> list[Row]:
    """Milliseconds to make the pinned memory of a pipe, which a process does once: in huge pages that are registered, and by
    torch."""
    torch.empty(1, device=device)  # the device itself takes longer to get ready
    rows = []
    for what, make in (
        ("the pinned memory of a pipe", lambda: DevicePipe(device, 8)),
        ("as much by torch", lambda: torch.empty(PINNED_BYTES, dtype=torch.uint8, pin_memory=True)),
    ):
        began = time.perf_counter()
        made = make()
        rows.append({"what": what, "ms": (time.perf_counter() - began) * 1e3})
        del made
    return rows


def chunks(file: Path) -> list[tuple[int, int]]:
    """Offsets and sizes in bytes of parts of the file, each a buffer's."""
    nbytes = file.stat().st_size
    return [(at, min(BUFFER, nbytes - at)) for at in range(0, nbytes, BUFFER)]


def upload_rate(file: Path, pinned: list[Tensor], threads: int, device: torch.device) -> float:
    """Bytes/s of reading the file into large buffers, each copied to the device while the next is read; the best of three."""
    there = [torch.empty_like(buffer, device=device) for buffer in pinned]
    seconds, zero = [], torch.zeros(1, dtype=torch.int64)
    with open(file, "rb") as opened, affinity.near(device):
        for _ in range(3):
            copied = [torch.Event(device) for _ in pinned]
            began = time.perf_counter()
            for i, (begin, nbytes) in enumerate(chunks(file)):
                turn = i % len(pinned)
                if i >= len(pinned):
                    copied[turn].synchronize()
                origins, rows = torch.tensor([[0, begin]]), CopyTable.of_bytes(zero, zero + nbytes).rows
                ops.read_regions([opened.fileno()], zero, zero, origins, [pinned[turn]], rows, threads, False)
                there[turn].copy_(pinned[turn], non_blocking=True)
                copied[turn].record()
            torch.accelerator.synchronize(device)
            seconds.append(time.perf_counter() - began)
    return file.stat().st_size / min(seconds)
