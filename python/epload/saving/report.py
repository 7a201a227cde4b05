"""The report of a save."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

PHASES = ("plan", "pack", "write", "sync")


@dataclass
class SaveReport:
    """The result of a save on one rank."""

    path: str = ""
    """The folder."""
    files: int = 0
    """Number of its safetensors files."""
    tensors: int = 0
    """Number of the tensors that all ranks together have saved."""
    nbytes: int = 0
    """Bytes of these tensors."""
    written: int = 0
    """Bytes of them that this rank has written."""
    seconds: float = 0.0
    """Wall time of the whole save; with :func:`epload.save_async` from its call on."""
    phases: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    """Seconds that this rank spent in ``plan`` (names, files and who writes what), ``pack``, ``write`` and ``sync`` (waiting for
    the disk). Packing and writing overlap."""
    peak_staging: int = 0
    """Bytes of this rank's buffers."""

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Adds the time of the block to a phase."""
        began = perf_counter()
        try:
            yield
        finally:
            self.phases[phase] += perf_counter() - began

    def to_dict(self) -> dict[str, Any]:
        """The report as a dict of JSON values."""
        return dict(vars(self))

    def __str__(self) -> str:
        rate = self.nbytes / self.seconds / 1e9 if self.seconds else 0.0
        files = "1 file" if self.files == 1 else f"{self.files} files"
        lines = [
            f"saved {self.tensors} tensors, {self.nbytes / 1e6:.1f} MB in {files}, {self.seconds:.3f} s ({rate:.2f} GB/s), to "
            f"{self.path}"
        ]
        lines += [f"  {name:<6}{seconds:8.3f} s" for name, seconds in self.phases.items()]
        return "\n".join(lines)
