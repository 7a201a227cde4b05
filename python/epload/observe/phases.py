"""Records the time and the bytes of each phase of an operation on one rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from time import monotonic_ns, thread_time

import torch

from epload.observe.events import Events

PHASES = ("plan", "materialize", "read", "inter_node", "intra_node", "unpack", "verify", "wait")
"""The phases of a load or a sync."""


@dataclass
class Phase:
    """Time and bytes of one phase on this rank. Phases of different buckets overlap."""

    seconds: float = 0.0
    """Wall time on the host. For device work, this is the time to queue it and to wait for it where that is unavoidable."""
    nbytes: int = 0
    """Bytes handled in this phase."""
    cpu_seconds: float = 0.0
    """CPU time of epload's Python threads, without gloo's threads and the native threads that read files."""


class PhaseRecorder:
    """Adds up phases. Any thread may use it."""

    def __init__(self, phases: dict[str, Phase]) -> None:
        self.phases = phases
        self.events: Events | None = None
        """Records spans of time, too, if the operation is traced; else None."""

    @contextmanager
    def timed(self, phase: str, detail: str = "", ranks: Sequence[int] = ()) -> Iterator[Phase]:
        """Adds the time that the calling thread spends in the block to a phase, and the bytes that the block sets.

        Args:
            detail: what of the phase it is, for a trace.
            ranks: those that are waited for.
        """
        block = Phase()
        began, began_cpu = monotonic_ns(), thread_time()
        # Its native state does not say that torch.profiler records where all threads are profiled.
        profiled = bool(torch.autograd.profiler._is_profiler_enabled)
        try:
            with torch.profiler.record_function(f"epload::{phase}") if profiled else nullcontext():
                yield block
        finally:
            total = self.phases[phase]
            total.seconds += (monotonic_ns() - began) / 1e9
            total.cpu_seconds += thread_time() - began_cpu
            total.nbytes += block.nbytes
            if self.events is not None:
                self.events.add(phase, began, block.nbytes, detail, tuple(ranks))
