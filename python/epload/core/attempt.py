"""Runs a step whose failure is to be reported in a round of agreement."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Attempt(Generic[T]):
    """Runs a step now; holds its value, or the exception that it raised."""

    def __init__(self, step: Callable[[], T]) -> None:
        self.failure: Exception | None = None
        try:
            self._value = step()
        except Exception as error:
            self.failure = error

    @property
    def value(self) -> T:
        """Returns what the step returned, or raises what it raised."""
        if self.failure is not None:
            raise self.failure
        return self._value

    @property
    def result(self) -> T | None:
        """Value that the step returned; None if it failed."""
        return None if self.failure is not None else self._value
