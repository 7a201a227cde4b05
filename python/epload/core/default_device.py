"""Calls that do not depend on the caller's default device."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

_Arguments = ParamSpec("_Arguments")
_Value = TypeVar("_Value")


def on_cpu(function: Callable[_Arguments, _Value]) -> Callable[_Arguments, _Value]:
    """Returns a function that runs with CPU as the default device.

    The tables of a plan are made by ``torch.tensor`` and the like and belong on CPU, whatever ``torch.set_default_device`` was
    called with. Not for generators, whose callers would run with that default, too.
    """

    @wraps(function)
    def call(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Value:
        if torch.get_default_device().type == "cpu":
            return function(*args, **kwargs)
        with torch.device("cpu"):
            return function(*args, **kwargs)

    return call
