"""Runs a step whose failure is to be reported in a round of agreement."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def attempt(step: Callable[[], T]) -> tuple[T | None, Exception | None]:
    """Runs a step; returns its result, or the exception that it raised."""
    try:
        return step(), None
    except Exception as error:
        return None, error
