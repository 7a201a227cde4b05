"""Starting threads, with a helpful error where the process has reached its limit."""

from __future__ import annotations

import threading
from collections.abc import Callable

from epload.errors import LoadError


def start(name: str, target: Callable[[], None]) -> threading.Thread:
    """Starts a daemon thread that runs ``target``. Its current device is 0, not its caller's.

    Raises:
        LoadError: the process cannot start another thread.
    """
    thread = threading.Thread(target=target, name=name, daemon=True)
    try:
        thread.start()
    except RuntimeError as error:
        raise LoadError(
            f"cannot start thread {name} ({error}): raise the limit on threads and processes (ulimit -u, or pids.max of the "
            "container)"
        ) from error
    return thread
