"""The reports of a load and of a sync: what was moved, how, and how long each part took."""

from __future__ import annotations

import html
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, fields
from os import PathLike
from time import monotonic_ns, thread_time
from typing import Any, ClassVar

import torch

from epload.observe.events import Events
from epload.observe.plot import plot
from epload.observe.trace import Trace

PHASES = ("plan", "materialize", "read", "inter_node", "intra_node", "unpack", "verify", "wait")
UNRATED = "unpack"
"""Its bytes are those of whole buckets, of which a rank may keep little or nothing, so that their rate says nothing."""
_SHOWN_KEYS = 5
_LEAST_SECONDS = 0.0005
"""Phases that took less, and handled no bytes, are not shown."""
_UNITS = {"GB": 1e9, "MB": 1e6, "kB": 1e3}
_COLUMNS = 3
"""Number of columns in the table of phases, besides their names."""


@dataclass
class Phase:
    """Time and bytes of one phase of a load on this rank. Phases of different buckets overlap."""

    seconds: float = 0.0
    """Wall time on the host. For device work, this is the time to queue it and to wait for it where that is unavoidable."""
    nbytes: int = 0
    """Bytes handled in this phase."""
    cpu_seconds: float = 0.0
    """CPU time of epload's Python threads, without gloo's threads and the native threads that read files."""


class Span:
    """One span of a phase, while it lasts."""

    __slots__ = ("nbytes",)

    def __init__(self) -> None:
        self.nbytes = 0
        """Bytes handled in it."""


@dataclass(repr=False)
class TransferReport:
    """Reports what this rank has moved, and how long that took."""

    phases: dict[str, Phase] = field(default_factory=lambda: {name: Phase() for name in PHASES})
    """The phases by name, see ``PHASES``."""
    seconds: float = 0.0
    """Wall time of the whole operation."""
    nbytes: int = 0
    """Bytes of the tensors that were moved, on all ranks together."""
    tensors: int = 0
    """Number of the tensors that were moved."""
    buckets: int = 0
    """Number of buckets that they were packed into."""
    transport_steps: int = 0
    """Number of messages that this rank sent and received; on a device, of broadcasts that it took part in."""
    peak_staging: int = 0
    """Bytes of this rank's staging buffers, on the host and on the device together."""
    verify: bool = False
    """The ``verify`` option."""
    warnings: list[str] = field(default_factory=list)
    """Likely mistakes. Each was also issued as a Python warning."""

    def __post_init__(self) -> None:
        self.events: Events | None = None
        """Records spans of time, too, if the operation is traced; else None."""
        self.merged: Trace | None = None
        """The events of all ranks of a load that was traced, on the first rank; else None."""

    @contextmanager
    def timed(self, phase: str, detail: str = "", ranks: Sequence[int] = ()) -> Iterator[Span]:
        """Adds the time that the calling thread spends in the block to a phase, and the bytes that the block sets.

        Args:
            detail: what of the phase it is, for a trace.
            ranks: those that are waited for.
        """
        span = Span()
        began, began_cpu = monotonic_ns(), thread_time()
        try:
            with torch.profiler.record_function(f"epload::{phase}") if _is_profiled() else nullcontext():
                yield span
        finally:
            of_phase = self.phases[phase]
            of_phase.seconds += (monotonic_ns() - began) / 1e9
            of_phase.cpu_seconds += thread_time() - began_cpu
            of_phase.nbytes += span.nbytes
            if self.events is not None:
                self.events.add(phase, began, span.nbytes, detail, tuple(ranks))

    def trace(self, path: str | PathLike[str]) -> None:
        """Writes what all ranks did, on one clock, in the Trace Event Format, which https://ui.perfetto.dev opens. The first rank
        writes; on others this does nothing. Not collective.

        Raises:
            ValueError: the load was not traced.
        """
        if (trace := self._traced()) is not None:
            trace.save(path)

    def plot(self, path: str | PathLike[str]) -> None:
        """Draws what each rank did over time, and the rate of each phase, as an image such as ``load.png``. The first rank draws;
        on others this does nothing. Not collective.

        Raises:
            ValueError: the load was not traced.
            ImportError: matplotlib is not installed.
        """
        if (trace := self._traced()) is not None:
            plot(trace, path)

    def _traced(self) -> Trace | None:
        if self.events is None:
            raise ValueError(
                "expected the report of a load that was traced, got one of a load that was not: pass trace=True to the load "
                "(options=epload.LoadOptions(trace=True) to epload.load), or set EPLOAD_TRACE to a folder"
            )
        return self.merged

    def to_dict(self) -> dict[str, Any]:
        """The report as a dict of JSON values."""
        return {
            **{name: getattr(self, name) for name in (each.name for each in fields(self)) if name != "phases"},
            "phases": {name: vars(phase) for name, phase in self.phases.items()},
        }

    def scalars(self, prefix: str = "epload/") -> dict[str, float]:
        """The report's numbers under flat names such as ``"epload/read/seconds"``, for W&B, TensorBoard or MLflow. Phases that
        were not used are left out."""
        found: dict[str, float] = {}
        for name in (each.name for each in fields(self)):
            value = getattr(self, name)
            if isinstance(value, int | float) and not isinstance(value, bool):
                found[name] = value
            elif isinstance(value, list):
                found[name] = len(value)
        found["bytes_per_second"] = self._rate
        for name, phase in self.phases.items():
            if not phase.seconds and not phase.nbytes:
                continue
            found |= {f"{name}/seconds": phase.seconds, f"{name}/cpu_seconds": phase.cpu_seconds}
            if phase.nbytes:
                found[f"{name}/nbytes"] = phase.nbytes
        return {f"{prefix}{name}": value for name, value in found.items()}

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self._headline()}>"

    def __str__(self) -> str:
        facts = self._facts()
        width = max((len(title) for title, _ in facts), default=0)
        lines = [self._headline(), *(f"  {title:<{width}}  {text}" for title, text in facts)]
        rows = self._phase_rows()
        if rows:
            width = max(width, *(len(row[0]) for row in rows))
            lines += [f"  {name:<{width}}  {s:>9}  {b:>12}  {rate:>10}".rstrip() for name, s, b, rate in rows]
        lines += [f"  warning: {warning}" for warning in self.warnings]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        """Returns the report as HTML, for notebooks."""
        rows = [[title, text] for title, text in self._facts()] + [list(row) for row in self._phase_rows()]
        rows += [["warning", warning] for warning in self.warnings]
        lines = []
        for title, *texts in rows:
            span, align = (f" colspan={_COLUMNS}", "left") if len(texts) == 1 else ("", "right")
            cells = "".join(f"<td{span} style='text-align:{align}'>{html.escape(text)}</td>" for text in texts)
            lines.append(f"<tr><th style='text-align:left'>{html.escape(title)}</th>{cells}</tr>")
        return f"<b>{html.escape(self._headline())}</b><table>{''.join(lines)}</table>"

    @property
    def summary(self) -> str:
        """The report in one line."""
        return self._headline()

    # ---- what subclasses say of themselves ----

    _phase_titles: ClassVar[Mapping[str, str]] = {name: name for name in PHASES}
    """Titles of the phases that are shown, by name."""

    def _headline(self) -> str:
        return f"{count(self.tensors, 'tensor')}, {show_bytes(self.nbytes)} in {self.seconds:.3f} s"

    def _facts(self) -> list[tuple[str, str]]:
        """Titles and texts, in order."""
        return []

    @property
    def _moved_bytes(self) -> int:
        """Bytes from which the overall rate is computed."""
        return self.nbytes

    # ---- parts ----

    @property
    def _rate(self) -> float:
        """Bytes per second."""
        return self._moved_bytes / self.seconds if self.seconds else 0.0

    def _phase_rows(self) -> list[tuple[str, str, str, str]]:
        """Title, seconds, bytes and rate of each phase that was used."""
        rows = []
        for name, title in self._phase_titles.items():
            phase = self.phases[name]
            if phase.seconds >= _LEAST_SECONDS or (phase.nbytes and name != UNRATED):
                moved = show_bytes(phase.nbytes) if phase.nbytes else ""
                rate = show_rate(phase.nbytes / phase.seconds) if moved and phase.seconds and name != UNRATED else ""
                rows.append((title, f"{phase.seconds:.3f} s", moved, rate))
        return rows


_READS = {
    "one": "one rank reads",
    "per_node": "one rank of each node reads",
    "partitioned": "ranks take turns, and each byte is read once",
    "every": "each rank reads its own shards",
}


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
    """Names of the model's tensors that are float32, in a model of a narrower dtype, as ``from_pretrained`` keeps them."""
    casts: int = 0
    """Number of the checkpoint's tensors whose dtype was converted."""
    source: str = ""
    """The checkpoint: its path or URL, or what it is instead."""
    readers: str = ""
    """The ranks that read the checkpoint: ``"one"``, ``"per_node"``, ``"partitioned"`` or ``"every"``."""
    reason: str = ""
    """Why these readers and this algorithm were used, if they were chosen by ``"auto"`` or differ from those asked for."""
    algorithm: str = ""
    """The algorithm that sent buckets from rank to rank: ``"two_level"`` or ``"striped"``. Empty where none was sent: each rank
    read its own shards, or the ranks of a node took theirs out of memory that they share."""
    topology: str = ""
    """The topology that the load used, e.g. ``"Topology(4+4 ranks, rank 0)"``: ranks of each node, and this rank."""
    stream: str = ""
    """The stream of all device work except host-to-device copies; ``""`` for a model on CPU."""

    def _headline(self) -> str:
        return f"loaded {super()._headline()} ({show_rate(self._rate)})"

    @property
    def _mode(self) -> str:
        return f"readers={self.readers}" + (f", algorithm={self.algorithm}" if self.algorithm else "")

    @property
    def summary(self) -> str:
        return f"{self._headline()}; {self._mode}"

    def _facts(self) -> list[tuple[str, str]]:
        how = f"{self._mode}: {_READS[self.readers]}" if self.readers in _READS else self._mode
        facts = [("checkpoint", self.source), ("topology", self.topology), ("mode", how), ("why", self.reason)]
        facts += [("buckets", f"{self.buckets:,}"), ("stream", self.stream)]
        facts.append(("casts", f"the dtype of {count(self.casts, 'tensor')} was converted" if self.casts else ""))
        for title in ("missing", "unexpected", "mismatched", "tied", "ignored"):
            facts.append((title, list_keys(getattr(self, f"{title}_keys"))))
        facts += [("initialized", list_keys(self.initialized)), ("kept in fp32", list_keys(self.kept_in_fp32))]
        return [(title, text) for title, text in facts if text]


def count(number: int, what: str) -> str:
    """E.g. "1 tensor", "18,867 tensors"."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def list_keys(keys: Sequence[str]) -> str:
    """Returns the number of keys and the first of them, as text. Empty if there are none."""
    if not keys:
        return ""
    more = f" and {len(keys) - _SHOWN_KEYS:,} more" if len(keys) > _SHOWN_KEYS else ""
    return f"{count(len(keys), 'tensor')}: {', '.join(keys[:_SHOWN_KEYS])}{more}"


def show_bytes(nbytes: float) -> str:
    """E.g. "927.4 MB"; units are powers of 1000."""
    for unit, size in (("GB", 1e10), ("MB", 1e5), ("kB", 1e3)):
        if nbytes >= size:
            return f"{nbytes / _UNITS[unit]:,.1f} {unit}"
    return f"{nbytes:.0f} B"


def show_rate(rate: float) -> str:
    """``rate``: bytes per second."""
    return f"{rate / 1e9:.2f} GB/s" if rate >= 1e8 else f"{show_bytes(rate)}/s"


def _is_profiled() -> bool:
    """Returns True if ``torch.profiler`` records. Its native state does not say so where all threads are profiled."""
    return bool(torch.autograd.profiler._is_profiler_enabled)
