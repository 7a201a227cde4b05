"""Logging to standard error, enabled by ``EPLOAD_LOG=info`` (or ``debug``, ``warning``, ``error``)."""

from __future__ import annotations

import logging
import os

from epload.errors import redact

logger = logging.getLogger("epload")
"""All of epload's log records. A program that configures logging itself does not need ``EPLOAD_LOG``."""


def _redact(record: logging.LogRecord) -> bool:
    """Removes credentials from a record, for all handlers."""
    message = record.getMessage()
    if (shown := redact(message)) != message:
        record.msg, record.args = shown, ()
    return True


logger.addFilter(_redact)


def configure() -> None:
    """Adds a handler for standard error at the level that ``EPLOAD_LOG`` names. Does nothing if the logger has a handler.

    Raises:
        ValueError: ``EPLOAD_LOG`` is not the name of a level.
    """
    level = os.environ.get("EPLOAD_LOG")
    if not level or logger.handlers:
        return
    levels = ("DEBUG", "INFO", "WARNING", "ERROR")
    if level.upper() not in levels:
        raise ValueError(f"expected EPLOAD_LOG to be one of {', '.join(levels).lower()}, got {level!r}")
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s epload %(message)s"))
    logger.addHandler(handler)
    logger.setLevel(level.upper())


def check_progress(progress: object) -> None:
    """Raises TypeError unless the option is a bool."""
    if not isinstance(progress, bool):
        raise TypeError(f"expected progress to be a bool, got {progress!r}; pass progress=True to show it, False not to")
