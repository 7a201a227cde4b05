"""What the parts of the GPU check share: their options, a clock, and profiler traces."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from workload import FILE, Size, write_checkpoint

REPEATS = 5
Row = dict[str, Any]
"""``what`` was measured, and numbers by name."""


def device_of(options: argparse.Namespace) -> torch.device:
    return torch.device(options.device, 0) if options.device != "cpu" else torch.device("cpu")


def size_of(options: argparse.Namespace) -> Size:
    """Of a Mixture of Experts of about ``--checkpoint-gb``, with 128 experts a layer if there is more than one."""
    experts = max(1, round(options.checkpoint_gb * 1e9 / (3 * 960 * 512 * 2)))
    return Size(layers=max(1, experts // 128), experts=min(experts, 128), hidden=960, intermediate=512)


def checkpoint_of(options: argparse.Namespace) -> Path:
    """The folder of a checkpoint of :func:`size_of`, written once for all parts, and in the page cache."""
    folder = Path(options.work) / f"checkpoint-{options.checkpoint_gb:g}"
    if not (folder / "config.json").exists():  # written last
        write_checkpoint(folder, size_of(options), seed=1, varied=True)
    with open(folder / FILE, "rb") as file:
        while file.read(64 << 20):
            pass
    return folder


def finished(device: torch.device, run: Callable[[], object]) -> Callable[[], None]:
    """``run``, and the device has done all of it."""

    def whole() -> None:
        run()
        if device.type != "cpu":
            torch.accelerator.synchronize(device)

    return whole


def trace_of(run: Callable[[], object], path: Path) -> list[dict[str, Any]]:
    """The device's work in a run, from a profiler trace, which is kept at ``path``."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiled:
        run()
        torch.cuda.synchronize()
    profiled.export_chrome_trace(str(path))
    events = json.loads(path.read_text())["traceEvents"]
    return [event for event in events if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]


class Clock:
    """Seconds of work on a device, measured with events; host time on CPU."""

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"

    def best(self, run: Callable[[], object]) -> tuple[float, float]:
        """Returns (seconds until done, seconds until queued by the host), the best of REPEATS after one warm-up."""
        run()
        results = []
        for _ in range(REPEATS):
            if self.cuda:
                begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                torch.cuda.synchronize()
                begin.record()
            start = time.perf_counter()
            run()
            queued = time.perf_counter() - start
            if self.cuda:
                end.record()
                end.synchronize()
            results.append((begin.elapsed_time(end) / 1e3 if self.cuda else queued, queued))
        return min(r[0] for r in results), min(r[1] for r in results)
