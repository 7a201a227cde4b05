"""A part of the GPU check: how fast a file in the page cache comes to a device, step by step."""

from __future__ import annotations

import argparse
import os
import statistics
import time
from pathlib import Path

import torch
from torch import Tensor

from epload.native import ops
from epload.staging import affinity
from epload.staging.device import wait_for
from gpu_parts.common import Clock, Row, checkpoint_of, device_of, finished
from workload import FILE

BUFFER = 64 << 20
"""Bytes of a bucket."""
SWEPT = (1, 2, 4, 8, 16)


def page_cache(options: argparse.Namespace) -> list[Row]:
    """Each step alone, then reading and copying at once, over the rate of copies from pinned memory alone."""
    device = device_of(options)
    rows = pinning(device)
    with affinity.near(device):
        pinned = [torch.empty(BUFFER, dtype=torch.uint8, pin_memory=device.type != "cpu") for _ in range(2)]
    there = torch.empty(BUFFER, dtype=torch.uint8, device=device)
    seconds, _ = Clock(device).best(finished(device, lambda: there.copy_(pinned[0], non_blocking=True)))
    floor = BUFFER / seconds
    rows.append({"what": "pinned memory to device", "GB_s": floor / 1e9})
    file = checkpoint_of(options) / FILE
    swept = {n: read_rate(file, pinned[0], n, device) for n in SWEPT if n <= len(os.sched_getaffinity(0))}
    rows += [
        {"what": f"page cache to pinned memory, {threads} threads", "GB_s": rate / 1e9, "over_pinned": rate / floor}
        for threads, rate in swept.items()
    ]
    best = max(swept, key=lambda threads: swept[threads])
    rate = upload_rate(file, pinned, best, device)
    row: Row = {"what": f"page cache to device, {best} threads", "GB_s": rate / 1e9, "over_pinned": rate / floor}
    rows.append(row | {"threads_of_a_loader": affinity.read_threads(1)})
    return rows + ([header_round_trip(device)] if device.type != "cpu" else [])


def pinning(device: torch.device) -> list[Row]:
    """Seconds to allocate pinned memory, which a loader does once."""
    if device.type == "cpu":
        return []
    rows = []
    for megabytes in (64, 1024):
        began = time.perf_counter()
        buffer = torch.empty(megabytes << 20, dtype=torch.uint8, pin_memory=True)
        rows.append({"what": f"allocate {megabytes} MiB of pinned memory", "ms": (time.perf_counter() - began) * 1e3})
        del buffer
    return rows


def chunks(file: Path) -> list[Tensor]:
    """The file in ranges for ``ops.read_ranges``, each a buffer's."""
    nbytes = file.stat().st_size
    return [torch.tensor([[0, at, 0, min(BUFFER, nbytes - at)]]) for at in range(0, nbytes, BUFFER)]


def read_rate(file: Path, buffer: Tensor, threads: int, device: torch.device) -> float:
    """Bytes/s of reading the file into one buffer, the best of three."""
    ranges, seconds = chunks(file), []
    with open(file, "rb") as opened, affinity.near(device):
        for _ in range(3):
            began = time.perf_counter()
            for part in ranges:
                ops.read_ranges([opened.fileno()], part, buffer, threads, False)
            seconds.append(time.perf_counter() - began)
    return file.stat().st_size / min(seconds)


def upload_rate(file: Path, pinned: list[Tensor], threads: int, device: torch.device) -> float:
    """The same, but each buffer is copied to the device while the next is read."""
    there = [torch.empty_like(buffer, device=device) for buffer in pinned]
    seconds = []
    with open(file, "rb") as opened, affinity.near(device):
        for _ in range(3):
            copied = [torch.Event(device) for _ in pinned] if device.type != "cpu" else []
            began = time.perf_counter()
            for i, part in enumerate(chunks(file)):
                turn = i % len(pinned)
                if copied and i >= len(pinned):
                    copied[turn].synchronize()
                ops.read_ranges([opened.fileno()], part, pinned[turn], threads, False)
                there[turn].copy_(pinned[turn], non_blocking=True)
                if copied:
                    copied[turn].record()
            if copied:
                torch.accelerator.synchronize(device)
            seconds.append(time.perf_counter() - began)
    return file.stat().st_size / min(seconds)


def header_round_trip(device: torch.device) -> Row:
    """What a load waits for each bucket that comes over a group: 64 bytes from the device, and an event that is polled."""
    here = torch.empty(64, dtype=torch.uint8, pin_memory=True)
    there = torch.zeros(64, dtype=torch.uint8, device=device)
    event, seconds = torch.Event(device), []
    for _ in range(200):
        began = time.perf_counter()
        here.copy_(there, non_blocking=True)
        event.record()
        wait_for(event, lambda: None)
        seconds.append(time.perf_counter() - began)
    return {
        "what": "a bucket's header to the host",
        "us_median": statistics.median(seconds) * 1e6,
        "us_max": max(seconds) * 1e6,
    }
