"""Pausing Python's garbage collector."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_MANY = 5_000
"""Objects allocated and not freed; a model of 19,000 parameters has some 200,000."""


@contextmanager
def paused() -> Iterator[None]:
    """Disables garbage collection within the block.

    For code that allocates many small objects and little garbage: each collection would traverse the whole model. If the block
    has allocated very many, all objects count as old afterwards, or the next collection would traverse those. Not otherwise, as
    garbage among old objects is found late.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            # The first count goes on while collections are disabled. Objects that the caller has frozen would be no longer.
            if gc.get_count()[0] > _MANY and not gc.get_freeze_count():
                gc.freeze()
                gc.unfreeze()
            gc.enable()
