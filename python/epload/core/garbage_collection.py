"""Pausing Python's garbage collector."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def paused() -> Iterator[None]:
    """Disables garbage collection within the block.

    For code that allocates many small objects and little garbage: each collection would traverse the whole model. What the block
    has allocated counts as old afterwards, or the first collection would traverse that.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            if not gc.get_freeze_count():  # else the caller's frozen objects would no longer be
                gc.freeze()
                gc.unfreeze()
            gc.enable()
