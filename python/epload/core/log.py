"""``EPLOAD_LOG=info`` (or ``debug``, ``warning``): what epload has to say while it works, on standard error."""

from __future__ import annotations

import logging
import os

logger = logging.getLogger("epload")


def configure() -> None:
    """Does as the environment says, once; a program that has set up logging of its own needs nothing of this.

    Raises:
        ValueError: ``EPLOAD_LOG`` is not a level.
    """
    wanted = os.environ.get("EPLOAD_LOG")
    if not wanted or logger.handlers:
        return
    levels = ("DEBUG", "INFO", "WARNING", "ERROR")
    if wanted.upper() not in levels:
        raise ValueError(f"expected EPLOAD_LOG to be one of {', '.join(levels).lower()}, got {wanted!r}")
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s epload %(message)s"))
    logger.addHandler(handler)
    logger.setLevel(wanted.upper())
