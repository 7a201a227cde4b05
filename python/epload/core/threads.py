"""Starts threads, and says what to do where none can be started."""

from __future__ import annotations

import threading
from collections.abc import Callable

from epload.errors import LoadError


def start(name: str, work: Callable[[], None]) -> threading.Thread:
    """A daemon thread that runs ``work``. It starts on device 0, whatever its caller's device is.

    Raises:
        LoadError: the process may not have more threads.
    """
    thread = threading.Thread(target=work, name=name, daemon=True)
    try:
        thread.start()
    except RuntimeError as error:
        raise LoadError(
            f"cannot start thread {name} ({error}): raise the limit on threads and processes (ulimit -u, or pids.max of the "
            "container)"
        ) from error
    return thread
