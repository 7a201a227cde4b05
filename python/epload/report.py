"""What a load did, and showing how far it is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter, thread_time
from typing import Any

from tqdm import tqdm
from tqdm.std import TqdmDefaultWriteLock  # type: ignore[attr-defined]

PHASES = ("plan", "materialize", "read", "host_to_device", "inter_node", "intra_node", "unpack", "verify")


@dataclass
class Phase:
    """Seconds this rank spent in a phase and the bytes it handled there. Phases of different buckets overlap.

    Of work on a device, seconds are the host's: queueing it, and waiting for it where that cannot be avoided.
    """

    seconds: float = 0.0
    nbytes: int = 0
    cpu_seconds: float = 0.0
    """On a processor, of the threads of epload alone: not those of gloo, nor those that read for a reader."""


@dataclass
class LoadReport:
    """The result of a load, as seen by one rank."""

    missing_keys: list[str] = field(default_factory=list)
    """Names of the model that the checkpoint does not fill, except those in ``ignored_keys``."""
    unexpected_keys: list[str] = field(default_factory=list)
    """Names of the checkpoint that the model has no place for, except those in ``ignored_keys``."""
    mismatched_keys: list[str] = field(default_factory=list)
    """Names of the model that the checkpoint has in another shape, and that were not filled."""
    tied_keys: list[str] = field(default_factory=list)
    """Names of the checkpoint that were left out because another name of the same parameter was loaded."""
    ignored_keys: list[str] = field(default_factory=list)
    """Keys that are no error in a strict load: missing names of the model and unexpected names of the checkpoint that the
    mapping says to ignore, and entries of a torch file or a state dict that hold no tensor, such as ``_extra_state``. Missing
    tensors among them are initialized like any others."""
    initialized: list[str] = field(default_factory=list)
    """Names that no checkpoint tensor filled and a hook initialized, e.g. rotary ``inv_freq`` buffers."""
    phases: dict[str, Phase] = field(default_factory=lambda: {name: Phase() for name in PHASES})
    seconds: float = 0.0
    """Wall time of the whole load."""
    nbytes: int = 0
    """Bytes of the checkpoint tensors that were loaded."""
    tensors: int = 0
    buckets: int = 0
    transport_steps: int = 0
    """Messages this rank sent and received (broadcasts it took part in, for "flat"), the manifest's among them; there are no
    others."""
    casts: int = 0
    """Checkpoint tensors whose dtype was converted."""
    peak_staging: int = 0
    """Bytes of bucket buffers on this rank, on the host and on the device."""
    readers: str = ""
    chosen: str = ""
    """Why these readers and this algorithm, where they were left to the loader or could not be had."""
    algorithm: str = ""
    verify: str = "off"
    topology: str = ""
    warnings: list[str] = field(default_factory=list)
    """What is likely not as it was meant to be; each was also given as a Python warning."""
    stream: str = ""
    """The stream that all device work but the copies to the device was on; ``""`` for a model on CPU."""

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        began, began_cpu = perf_counter(), thread_time()
        try:
            yield
        finally:
            self.phases[phase].seconds += perf_counter() - began
            self.phases[phase].cpu_seconds += thread_time() - began_cpu

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return {
            **{k: v for k, v in vars(self).items() if k != "phases"},
            "phases": {name: vars(phase) for name, phase in self.phases.items()},
        }

    def __str__(self) -> str:
        rate = self.nbytes / self.seconds / 1e9 if self.seconds else 0.0
        lines = [
            f"loaded {self.tensors} tensors, {self.nbytes / 1e6:.1f} MB in {self.buckets} buckets, "
            f"{self.seconds:.3f} s ({rate:.2f} GB/s); {self.topology}, readers={self.readers}, algorithm={self.algorithm}"
        ]
        if self.chosen:
            lines.append(f"  {self.chosen}")
        for name, phase in self.phases.items():
            moved = f"  {phase.nbytes / 1e6:10.1f} MB" if phase.nbytes else ""
            lines.append(f"  {name:<12}{phase.seconds:8.3f} s{moved}")
        for title, keys in (
            ("missing", self.missing_keys),
            ("unexpected", self.unexpected_keys),
            ("ignored", self.ignored_keys),
            ("mismatched", self.mismatched_keys),
            ("tied", self.tied_keys),
            ("ignored", self.ignored_keys),
            ("initialized", self.initialized),
        ):
            if keys:
                lines.append(f"  {title}: {', '.join(keys[:5])}{f' and {len(keys) - 5} more' if len(keys) > 5 else ''}")
        lines += [f"  warning: {warning}" for warning in self.warnings]
        return "\n".join(lines)


class _Bar(tqdm):  # type: ignore[type-arg]
    """With a lock for threads, which other bars take too. tqdm's own is also for processes, and making it would settle how
    ``multiprocessing`` starts them: a caller that chooses afterwards would fail."""

    _lock = TqdmDefaultWriteLock.th_lock


def progress_bar(total: int, shown: bool) -> tqdm[Any]:
    """A bar over bytes; silent unless ``shown`` and standard error is a terminal."""
    return _Bar(total=total, unit="B", unit_scale=True, desc="epload", disable=None if shown else True, leave=False)
