"""Measures peak memory of a process, bytes over a network interface, and seconds inside collectives."""

from __future__ import annotations

import ctypes
import gc
import threading
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import torch.distributed as dist

STATISTICS = "/sys/class/net/{}/statistics/{}_bytes"


class PeakMemory:
    """Peak anonymous and shared memory of this process, sampled every 20 ms, in bytes above the start."""

    def __enter__(self) -> PeakMemory:
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # otherwise memory freed by earlier runs would count as in use
        self.start = self.peak = self._now()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()
        return self

    def _sample(self) -> None:
        while not self._stop.wait(0.02):
            self.peak = max(self.peak, self._now())

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self.peak = max(self.peak, self._now())
        self.above = self.peak - self.start

    @staticmethod
    def _now() -> int:
        with open("/proc/self/status") as status:
            return sum(int(line.split()[1]) << 10 for line in status if line.startswith(("RssAnon", "RssShmem")))


def link_bytes(interface: str) -> tuple[int, int]:
    """Bytes received and sent over the interface, headers included."""
    into, out = (int(Path(STATISTICS.format(interface, name)).read_text()) for name in ("rx", "tx"))
    return into, out


class TransferClock:
    """Seconds this process spends in c10d collectives, in the call and in waiting for it.

    Counts calls from Python only; epload's ops call c10d natively and report their own times.
    """

    _COLLECTIVES = (
        "broadcast",
        "scatter",
        "allgather",
        "_allgather_base",
        "allreduce",
        "gather",
        "send",
        "recv",
        "barrier",
    )

    def __init__(self) -> None:
        self.seconds = 0.0
        self._inside = False
        for name in self._COLLECTIVES:
            setattr(dist.ProcessGroup, name, self._timed(getattr(dist.ProcessGroup, name)))
        dist.Work.wait = self._timed(dist.Work.wait)
        dist._broadcast_coalesced = self._timed(dist._broadcast_coalesced)

    def _timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **options: Any) -> Any:
            if self._inside:
                return call(*args, **options)
            self._inside = True
            began = perf_counter()
            try:
                return call(*args, **options)
            finally:
                self.seconds += perf_counter() - began
                self._inside = False

        return timed
