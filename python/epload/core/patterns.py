"""Checks the regular expressions that callers pass."""

from __future__ import annotations

import re
from collections.abc import Iterable


def check_expressions(what: str, passed: Iterable[object]) -> None:
    """Checks regular expressions.

    Args:
        what: what is expected, for the message.

    Raises:
        TypeError: one is no str.
        ValueError: one is malformed.
    """
    for expression in passed:
        if not isinstance(expression, str):
            raise TypeError(f"expected {what} as regular expressions, got {expression!r}")
        try:
            re.compile(expression)
        except re.error as error:
            raise ValueError(f"expected {what} as regular expressions, got {expression!r}: {error}") from error
