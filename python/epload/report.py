"""The reports of a load, a save and a sync: what was moved, how, and how long each part took."""

from __future__ import annotations

import html
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, fields
from os import PathLike
from time import monotonic_ns, thread_time
from typing import Any

import torch

from epload.observe.plot import plot
from epload.observe.render import count, list_keys, show_bytes, show_rate
from epload.observe.trace import Events, save_trace

Facts = Sequence[tuple[str, str]]
"""Titles and texts."""
_UNRATED = "unpack"
"""This phase counts the bytes of whole buckets. A rank may keep only few of them, so their rate has no meaning."""
_MIN_SECONDS = 0.0005
"""Phases that took less, and handled no bytes, are not shown."""
PHASES = ("plan", "materialize", "read", "inter_node", "intra_node", "unpack", "verify", "wait")
"""The phases of a load or a sync."""
SAVE_PHASES = ("plan", "pack", "write", "sync")


@dataclass
class Phase:
    """Time and bytes of one phase on this rank. Phases of different buckets overlap."""

    seconds: float = 0.0
    """Wall time on the host. For device work, this is the time to queue it and to wait for it where that is unavoidable."""
    nbytes: int = 0
    """Bytes handled in this phase."""
    cpu_seconds: float = 0.0
    """CPU time of epload's Python threads, without gloo's threads and the native threads that read files."""


@dataclass(repr=False)
class Report:
    """Reports what one rank has done, and how long that took."""

    phases: dict[str, Phase] = field(default_factory=lambda: {name: Phase() for name in PHASES})
    """The phases by name."""
    seconds: float = 0.0
    """Wall time of the whole operation."""
    nbytes: int = 0
    """Bytes of the tensors that were moved, on all ranks together."""
    tensors: int = 0
    """Number of the tensors that were moved."""
    peak_staging: int = 0
    """Bytes of this rank's buffers and copies, on the host and on the device in total."""
    warnings: list[str] = field(default_factory=list)
    """Likely mistakes, each of which was also logged."""

    def __post_init__(self) -> None:
        self.events: Events | None = None
        """Records spans of time, too, if the operation is traced; else None."""

    @contextmanager
    def timed(self, phase: str, detail: str = "", ranks: Sequence[int] = ()) -> Iterator[Phase]:
        """Adds the time that the calling thread spends in the block to a phase, and the bytes that the block sets. Any thread may
        call it.

        Args:
            detail: the part of the phase, for a trace.
            ranks: the ranks that are waited for.
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

    def to_dict(self) -> dict[str, Any]:
        """Returns the report as a dict of JSON values."""
        phases = {name: vars(phase) for name, phase in self.phases.items()}
        return {own.name: getattr(self, own.name) for own in fields(self)} | {"phases": phases}

    def scalars(self, prefix: str = "epload/") -> dict[str, float]:
        """Returns the report's numbers under flat names such as ``"epload/read/seconds"``, for W&B, TensorBoard or MLflow. Unused
        phases are left out."""
        numbers: dict[str, float] = {"bytes_per_second": self._rate}
        for own in fields(self):
            value = getattr(self, own.name)
            if isinstance(value, list):
                value = len(value)
            if isinstance(value, int | float) and not isinstance(value, bool):
                numbers[own.name] = value
        for name, phase in self.phases.items():
            if phase.seconds or phase.nbytes:
                numbers |= {f"{name}/{key}": value for key, value in vars(phase).items()}
        return {f"{prefix}{name}": value for name, value in numbers.items()}

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self._headline()}>"

    def __str__(self) -> str:
        facts = self._facts()
        shown = {
            name: phase
            for name, phase in self.phases.items()
            if phase.seconds >= _MIN_SECONDS or (phase.nbytes and name != _UNRATED)
        }
        width = max((len(title) for title, _ in facts), default=0)
        lines = [self._headline(), *(f"  {title:<{width}}  {text}" for title, text in facts)]
        width = max([width, *map(len, shown)])
        for name, phase in shown.items():
            nbytes = show_bytes(phase.nbytes) if phase.nbytes else ""
            rate = show_rate(phase.nbytes / phase.seconds) if phase.nbytes and phase.seconds and name != _UNRATED else ""
            lines.append(f"  {name:<{width}}  {f'{phase.seconds:.3f} s':>9}  {nbytes:>12}  {rate:>10}".rstrip())
        return "\n".join([*lines, *(f"  warning: {warning}" for warning in self.warnings)])

    def _repr_html_(self) -> str:
        """Returns the report for notebooks."""
        return f"<pre>{html.escape(str(self))}</pre>"

    @property
    def summary(self) -> str:
        """The report in one line."""
        return self._headline()

    # ---- what subclasses say of themselves ----

    def _headline(self) -> str:
        return f"{count(self.tensors, 'tensor')}, {show_bytes(self.nbytes)} in {self.seconds:.3f} s"

    def _facts(self) -> Facts:
        return []

    @property
    def _moved_bytes(self) -> int:
        """Bytes from which the overall rate is computed."""
        return self.nbytes

    @property
    def _rate(self) -> float:
        """Bytes per second."""
        return self._moved_bytes / self.seconds if self.seconds else 0.0


@dataclass(repr=False)
class TransferReport(Report):
    """Reports what this rank has moved between ranks."""

    buckets: int = 0
    """Number of buckets that the tensors were packed into."""
    transport_steps: int = 0
    """Number of messages that this rank sent and received; on a device, number of broadcasts that it took part in."""
    verify: bool = False
    """The ``verify`` option."""


@dataclass(repr=False)
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
    kept_in_fp32: list[str] = field(default_factory=list)
    """Names of the tensors that are kept in float32 in a model of a narrower dtype, as by ``from_pretrained``."""
    casts: int = 0
    """Number of the checkpoint's tensors whose dtype was converted."""
    verified: bool = False
    """True if ``verify=True`` has compared the shards with the checkpoint, and they are equal. A load from ``epload://`` is
    verified by the two jobs of the sync, and not said here to be."""
    epload_version: str = ""
    """The version of epload that loaded."""
    source: str = ""
    """The checkpoint: its path or URL, or a description if it has none."""
    readers: str = ""
    """The ranks that read the checkpoint: ``"one"``, ``"per_node"``, ``"partitioned"`` or ``"every"``."""
    reason: str = ""
    """Why these readers and this algorithm were used, if they were chosen by ``"auto"`` or differ from those asked for."""
    algorithm: str = ""
    """The algorithm that sent buckets from rank to rank: ``"two_level"`` or ``"striped"``. Empty if none was sent: each rank read
    its own shards, or the ranks of a node copied theirs out of shared memory."""
    topology: str = ""
    """The topology that the load used, e.g. ``"Topology(4+4 ranks, rank 0)"``: ranks of each node, and this rank."""
    stream: str = ""
    """The stream of all device work except host-to-device copies; ``""`` for a model on CPU."""
    checksums: str = ""
    """The published checksums that the files were compared with and match; empty if they were not compared with any."""
    hashed: int = 0
    """Bytes that this rank has read to compare checksums, in addition to those that it has loaded."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.merged: list[Events] | None = None
        """The events of all ranks of a load that was traced, on the first rank; else None."""

    def trace(self, path: str | PathLike[str]) -> None:
        """Writes a trace of all ranks, on one clock, in the Trace Event Format, which https://ui.perfetto.dev opens. Only the
        first rank writes; on others this does nothing. Not collective.

        Raises:
            ValueError: the load was not traced.
        """
        if (ranks := self._traced()) is not None:
            facts = {"epload": self.epload_version, "checkpoint": self.source, "mode": self._mode}
            save_trace(ranks, path, facts)

    def plot(self, path: str | PathLike[str]) -> None:
        """Draws what each rank did over time, and the rate of each phase, as an image such as ``load.png``. Only the first rank
        draws; on others this does nothing. Not collective.

        Raises:
            ValueError: the load was not traced.
            ImportError: matplotlib is not installed.
        """
        if (ranks := self._traced()) is not None:
            plot(ranks, path, PHASES)

    def _traced(self) -> list[Events] | None:
        if self.events is None:
            raise ValueError(
                "expected the report of a load that was traced, got one of a load that was not: pass trace=True to the load "
                "(options=epload.LoadOptions(trace=True) to epload.load), or set EPLOAD_TRACE to a folder"
            )
        return self.merged

    def _headline(self) -> str:
        return f"loaded {super()._headline()} ({show_rate(self._rate)})"

    @property
    def _mode(self) -> str:
        return f"readers={self.readers}" + (f", algorithm={self.algorithm}" if self.algorithm else "")

    @property
    def summary(self) -> str:
        return f"{self._headline()}; {self._mode}" + (", verified" if self.verified else "")

    def _facts(self) -> Facts:
        who = {
            "one": ": one rank reads",
            "per_node": ": one rank of each node reads",
            "partitioned": ": ranks take turns, and each byte is read once",
            "every": ": each rank reads its own shards",
        }.get(self.readers, "")
        keys = {name: getattr(self, f"{name}_keys") for name in ("missing", "unexpected", "mismatched", "tied", "ignored")}
        keys |= {"initialized": self.initialized, "kept in fp32": self.kept_in_fp32}
        facts = [
            ("checkpoint", self.source),
            ("topology", self.topology),
            ("mode", self._mode + who),
            ("why", self.reason),
            ("checksums", self.checksums + (f"; this rank hashed {show_bytes(self.hashed)}" if self.hashed else "")),
            ("buckets", f"{self.buckets:,}"),
            ("stream", self.stream),
            ("verified", "shards equal the checkpoint, which was read once more" if self.verified else ""),
            ("casts", f"the dtype of {count(self.casts, 'tensor')} was converted" if self.casts else ""),
            *((title, list_keys(names)) for title, names in keys.items()),
        ]
        return [(title, text) for title, text in facts if text]


@dataclass(repr=False)
class SaveReport(Report):
    """The result of a save on one rank. With :func:`epload.save_async`, its time starts with the call.

    The phases are ``plan`` (names, files and who writes what), ``pack``, ``write`` and ``sync`` (waiting for the disk).
    """

    phases: dict[str, Phase] = field(default_factory=lambda: {name: Phase() for name in SAVE_PHASES})
    """The phases by name."""
    path: str = ""
    """The folder."""
    files: int = 0
    """Number of its files with tensors."""
    written: int = 0
    """Bytes of the tensors that this rank has written; with ``base=``, bytes of the encoded changes."""
    checksums: str = ""
    """The digest of the written ``checksums.json``, as :func:`epload.load` takes it; empty if none was written."""

    base: str = ""
    """The checkpoint without which the folder cannot be read, as its index names it; empty if all was saved."""

    def _headline(self) -> str:
        moved = f"{count(self.tensors, 'tensor')}, {show_bytes(self.nbytes)} in {count(self.files, 'file')}"
        if self.base:
            moved = f"what has changed of {moved}, {show_bytes(self.written)} by this rank"
        return f"saved {moved}, {self.seconds:.3f} s ({show_rate(self._rate)}), to {self.path}"
