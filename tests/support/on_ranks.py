"""Tests that are one function of a rank."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from support import fakedev, ranks
from support.checks import all_fine


def on_ranks(world: int, prepare: Callable[..., Any] | None = None, **options: Any) -> Callable[..., Any]:
    """Makes a test of a function, which takes the rank and then fixtures or parameters, and returns what is wrong on that rank.

    ``prepare`` is called first, in the process of the test, with the latter. ``options`` are those of ``ranks.run``. A parameter
    ``semantics`` is that of the fake device, which each rank sets up.
    """

    def test_of(function: Callable[..., Any]) -> Callable[..., None]:
        parameters = list(inspect.signature(function).parameters.values())[1:]

        def test(**values: Any) -> None:
            given = [values[parameter.name] for parameter in parameters]
            if prepare is not None:
                prepare(*given)
            setup = {"setup": functools.partial(fakedev.setup, values["semantics"])} if "semantics" in values else {}
            found = ranks.run(world, functools.partial(_call, test), *given, **options, **setup)
            all_fine([problems or () for problems in found])

        functools.update_wrapper(test, function)
        # Under another name, as pytest looks for fixtures of what is wrapped.
        test.on_rank = test.__dict__.pop("__wrapped__")
        test.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return test

    return test_of


def _call(test: Any, rank: int, *given: Any) -> Any:
    """Finds a test's function by its name, as ranks unpickle what they call."""
    return test.on_rank(rank, *given)
