"""A part of the GPU check: what memory costs that thousands of tensors have, in one process and in two."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from epload.native import ops
from gpu_parts.common import Row, device_of, finished
from support.jobs import Job, Meeting, run

CASES = ((4000, 983040, 0), (1200, 3 << 20, 0), (1200, 3 << 20, 1 << 30))
"""Numbers of tensors, their bytes, and the bytes of the blocks that are asked for at first and let go of, so that torch's
allocator has them when the tensors are made; 0 for none."""


def memory(options: argparse.Namespace) -> Iterator[Row]:
    """Making the tensors of a model; and sharing them with another process, which opens and closes each allocation."""
    device = device_of(options)
    for count, nbytes, block in CASES:
        reserved, _ = timed(device, partial(reserve, device, count * nbytes, block))
        seconds, tensors = timed(device, partial(make, device, count, nbytes))
        what = f"{count} tensors of {nbytes >> 10} KiB" + (f" out of blocks of {block >> 20} MiB" if block else "")
        yield {"what": f"make {what}", "ms": seconds * 1e3, "reserve_ms": reserved * 1e3}
        del tensors
        torch.cuda.empty_cache()
        (shared,), (opened,) = run([Job(1, share, (options.device, count, nbytes, block)), Job(1, open_all, (options.device,))])
        yield {"what": f"share {what}", **shared, **opened}


def timed(device: torch.device, step: Callable[[], list[Tensor]]) -> tuple[float, list[Tensor]]:
    made: list[Tensor] = []
    whole = finished(device, lambda: made.extend(step()))
    began = time.perf_counter()
    whole()
    return time.perf_counter() - began, made


def reserve(device: torch.device, nbytes: int, block: int) -> list[Tensor]:
    blocks = [torch.empty(block, dtype=torch.uint8, device=device) for _ in range(-(-nbytes // block) if block else 0)]
    return blocks[:0]


def make(device: torch.device, count: int, nbytes: int) -> list[Tensor]:
    like = [torch.empty(nbytes // 2, dtype=torch.bfloat16, device="meta")] * count
    return ops.allocate_like(like, torch.bfloat16, device, 1)


def share(rank: int, meeting: Meeting, device: str, count: int, nbytes: int, block: int) -> Row:
    """Shares tensors until the other process has closed them."""
    where = torch.device(device, 0)
    reserve(where, count * nbytes, block)
    tensors = make(where, count, nbytes)
    torch.accelerator.synchronize()
    began = time.perf_counter()
    _, handles, sizes = ops.share_memory(tensors)
    seconds = time.perf_counter() - began
    meeting.say("allocations", "\n".join(f"{handle} {size}" for handle, size in zip(handles, sizes, strict=True)))
    meeting.hear("closed")
    return {"allocations": len(handles), "share_ms": seconds * 1e3}


def open_all(rank: int, meeting: Meeting, device: str) -> Row:
    where = torch.device(device, 0)
    torch.empty(1, device=where)
    allocations = [line.split() for line in meeting.hear("allocations").splitlines()]
    began = time.perf_counter()
    opened = [ops.open_memory(handle, int(size), where) for handle, size in allocations]
    middle = time.perf_counter()
    for tensor in opened:
        ops.close_memory(tensor)
    ended = time.perf_counter()
    meeting.say("closed")
    return {"open_ms": (middle - began) * 1e3, "close_ms": (ended - middle) * 1e3}
