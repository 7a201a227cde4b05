"""The report of a load, and its progress bar."""

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
    """What this rank spent in one phase of a load. Phases of different buckets overlap."""

    seconds: float = 0.0
    """Wall time on the host. For device work, this is the time to queue it and to wait for it where that is unavoidable."""
    nbytes: int = 0
    """Bytes handled in this phase."""
    cpu_seconds: float = 0.0
    """CPU time of epload's Python threads, without gloo's threads and the native threads that read files."""


@dataclass
class TransferReport:
    """What this rank has moved, and how long that took."""

    phases: dict[str, Phase] = field(default_factory=lambda: {name: Phase() for name in PHASES})
    """By name, see ``PHASES``."""
    seconds: float = 0.0
    """Wall time of the whole operation."""
    nbytes: int = 0
    """Bytes of the tensors that were moved, on all ranks together."""
    tensors: int = 0
    """Number of the tensors that were moved."""
    buckets: int = 0
    """Number of buckets that they were packed into."""
    transport_steps: int = 0
    """Number of messages that this rank sent and received, including the manifest's. With ``algorithm="flat"``, number of
    broadcasts that it took part in."""
    peak_staging: int = 0
    """Bytes of this rank's staging buffers, on the host and on the device together."""
    verify: str = "off"
    """The ``verify`` option."""
    warnings: list[str] = field(default_factory=list)
    """Likely mistakes. Each was also issued as a Python warning."""

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Adds the time that the calling thread spends in the block to a phase."""
        began, began_cpu = perf_counter(), thread_time()
        try:
            yield
        finally:
            self.phases[phase].seconds += perf_counter() - began
            self.phases[phase].cpu_seconds += thread_time() - began_cpu

    def to_dict(self) -> dict[str, Any]:
        """The report as a dict of JSON values."""
        return {
            **{k: v for k, v in vars(self).items() if k != "phases"},
            "phases": {name: vars(phase) for name, phase in self.phases.items()},
        }


@dataclass
class LoadReport(TransferReport):
    """The result of a load on one rank."""

    missing_keys: list[str] = field(default_factory=list)
    """Names of the model's tensors that the checkpoint does not fill, except those in ``ignored_keys``."""
    unexpected_keys: list[str] = field(default_factory=list)
    """Names of the checkpoint's tensors that the model lacks, except those in ``ignored_keys``."""
    mismatched_keys: list[str] = field(default_factory=list)
    """Names of the model's tensors that were not filled because their shape differs in the checkpoint."""
    tied_keys: list[str] = field(default_factory=list)
    """Names of the checkpoint's tensors that were skipped because another name of the same parameter was loaded."""
    ignored_keys: list[str] = field(default_factory=list)
    """Keys that are not an error in a strict load: missing and unexpected keys that the mapping ignores, and entries of a torch
    file or a state dict that are not tensors, such as ``_extra_state``. Missing tensors among them are initialized."""
    initialized: list[str] = field(default_factory=list)
    """Names of the model's tensors that were initialized instead of loaded, e.g. rotary ``inv_freq`` buffers."""
    casts: int = 0
    """Number of the checkpoint's tensors whose dtype was converted."""
    readers: str = ""
    """Which ranks read the checkpoint: ``"one"``, ``"per_node"``, ``"partitioned"`` or ``"every"``."""
    reason: str = ""
    """Why these readers and this algorithm were used, if they were chosen by ``"auto"`` or differ from those asked for."""
    algorithm: str = ""
    """How buckets were broadcast: ``"two_level"``, ``"striped"`` or ``"flat"``."""
    topology: str = ""
    """The topology that the load used, e.g. ``"Topology(4+4 ranks, rank 0)"``: ranks of each node, and this rank."""
    stream: str = ""
    """The stream of all device work except host-to-device copies; ``""`` for a model on CPU."""

    def __str__(self) -> str:
        rate = self.nbytes / self.seconds / 1e9 if self.seconds else 0.0
        lines = [
            f"loaded {self.tensors} tensors, {self.nbytes / 1e6:.1f} MB in {self.buckets} buckets, "
            f"{self.seconds:.3f} s ({rate:.2f} GB/s); {self.topology}, readers={self.readers}, algorithm={self.algorithm}"
        ]
        if self.reason:
            lines.append(f"  {self.reason}")
        for name, phase in self.phases.items():
            moved = f"  {phase.nbytes / 1e6:10.1f} MB" if phase.nbytes else ""
            lines.append(f"  {name:<12}{phase.seconds:8.3f} s{moved}")
        for title, keys in (
            ("missing", self.missing_keys),
            ("unexpected", self.unexpected_keys),
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
    """A bar that uses tqdm's lock for threads only.

    tqdm's default lock is also for processes. Creating it fixes the start method of ``multiprocessing``, so a caller that
    sets the method later would fail.
    """

    _lock = TqdmDefaultWriteLock.th_lock


def progress_bar(total: int, shown: bool) -> tqdm[Any]:
    """A progress bar that counts ``total`` bytes. Prints nothing unless ``shown`` and standard error is a terminal."""
    return _Bar(total=total, unit="B", unit_scale=True, desc="epload", disable=None if shown else True, leave=False)
