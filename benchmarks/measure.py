"""Instruments: memory of a process, bytes over a network interface, seconds inside collectives."""

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
    """The most anonymous + shared memory of this process while it runs, sampled every 20 ms; bytes above the start."""

    def __enter__(self) -> PeakMemory:
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # else memory that earlier runs freed would count as there already
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
    """Bytes that have come in and gone out over it, headers included."""
    into, out = (int(Path(STATISTICS.format(interface, way)).read_text()) for way in ("rx", "tx"))
    return into, out


class TransferClock:
    """Seconds that this process spends inside c10d's collectives, whoever calls them: in the call and in waiting for it.

    Python callers only; epload's ops call c10d natively and time themselves.
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
