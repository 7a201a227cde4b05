"""Calls that do not depend on the caller's default device."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

_Arguments = ParamSpec("_Arguments")
_Value = TypeVar("_Value")
_callers: ContextVar[torch.device | None] = ContextVar("callers", default=None)
"""The default device of the caller of the function that runs, if it is another than CPU."""


def on_cpu(function: Callable[_Arguments, _Value]) -> Callable[_Arguments, _Value]:
    """Returns a function that runs with CPU as the default device.

    The tables of a plan are made by ``torch.tensor`` and the like and belong on CPU, whatever ``torch.set_default_device`` was
    called with. Not for generators, whose callers would run with that default, too.
    """

    @wraps(function)
    def call(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Value:
        default = torch.get_default_device()
        if default.type == "cpu":
            return function(*args, **kwargs)
        token = _callers.set(default)
        try:
            with torch.device("cpu"):
                return function(*args, **kwargs)
        finally:
            _callers.reset(token)

    return call


def callers_default_device() -> AbstractContextManager[object]:
    """A context with the default device of whoever called epload, for functions of theirs that it calls."""
    return _callers.get() or nullcontext()
