"""Progress of a transfer: a bar in a terminal or a notebook, else a log line every few seconds."""

from __future__ import annotations

import logging
import sys
from time import monotonic
from typing import Any

from tqdm.auto import tqdm
from tqdm.std import TqdmDefaultWriteLock  # type: ignore[attr-defined]

_LOG_SECONDS = 5.0
"""Between two lines."""
_IN_NOTEBOOK = hasattr(tqdm, "status_printer") and tqdm.__mro__[1].__module__ == "tqdm.notebook"
_logger = logging.getLogger("epload")


class _Bar(tqdm):  # type: ignore[type-arg]
    """A bar that uses tqdm's lock for threads only.

    tqdm's default lock is also for processes. Creating it fixes the start method of ``multiprocessing``, so a caller that
    sets the method later would fail.
    """

    _lock = TqdmDefaultWriteLock.th_lock


class Progress:
    """Counts bytes. A context manager, used by one thread."""

    def __init__(self, total: int, shown: bool) -> None:
        """``shown``: as a bar where standard error is a terminal or in a notebook, else as log records at INFO."""
        self._total = total
        self._bar: tqdm[Any] | None = None
        if shown and (_IN_NOTEBOOK or sys.stderr.isatty()):
            self._bar = _Bar(total=total, unit="B", unit_scale=True, desc="epload", leave=False, disable=False)
        self._logs = shown and self._bar is None
        self._done = 0
        self._began = self._logged = monotonic()

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def update(self, nbytes: int) -> None:
        """Adds to the number of bytes that are done."""
        self._done += nbytes
        if self._bar is not None:
            self._bar.update(nbytes)
        elif self._logs and (now := monotonic()) - self._logged >= _LOG_SECONDS:
            self._logged = now
            _logger.info(
                "%.0f%% of %.1f MB, %.2f GB/s",
                100 * self._done / max(self._total, 1), self._total / 1e6, self._done / (now - self._began) / 1e9,
            )  # fmt: skip
