"""Progress of a transfer: a bar in a terminal or a notebook, else a log line every few seconds."""

from __future__ import annotations

import logging
import sys
from time import monotonic

from tqdm.auto import tqdm
from tqdm.std import TqdmDefaultWriteLock  # type: ignore[attr-defined]

_LOG_SECONDS = 5.0
"""Between two lines."""
_IN_NOTEBOOK = hasattr(tqdm, "status_printer") and tqdm.__mro__[1].__module__ == "tqdm.notebook"
_logger = logging.getLogger("epload")


def _in_terminal() -> bool:
    try:
        return sys.stderr.isatty()
    except (AttributeError, ValueError, OSError):  # it is None, closed, or an object of the caller's
        return False


class Progress(tqdm):  # type: ignore[type-arg]
    """Counts bytes. A context manager, used by one thread.

    It uses tqdm's lock for threads only. tqdm's default lock is also for processes. Creating it fixes the start method of
    ``multiprocessing``, so a caller that sets the method later would fail.
    """

    _lock = TqdmDefaultWriteLock.th_lock
    monitor_interval = 0  # no thread that looks after bars: they are drawn at updates

    def __init__(self, total: int, shown: bool) -> None:
        """``shown``: as a bar where standard error is a terminal or in a notebook, else as log records at INFO."""
        is_bar = shown and (_IN_NOTEBOOK or _in_terminal())
        super().__init__(total=total, unit="B", unit_scale=True, desc="epload", leave=False, disable=not is_bar, miniters=1)
        self._nbytes, self._logs, self._done = total, shown and not is_bar, 0
        self._began = self._logged = monotonic()

    def update(self, nbytes: int) -> None:  # type: ignore[override]
        """Adds to the number of bytes that are done."""
        super().update(nbytes)
        self._done += nbytes
        if self._logs and (now := monotonic()) - self._logged >= _LOG_SECONDS:
            self._logged = now
            _logger.info(
                "%.0f%% of %.1f MB, %.2f GB/s",
                100 * self._done / max(self._nbytes, 1), self._nbytes / 1e6, self._done / (now - self._began) / 1e9,
            )  # fmt: skip
