"""Loaders that people call today, with the same signatures: switch the import, or :func:`epload.patch` the original.

Each gives what the original gives where that is right, with these differences: a mistake is raised on every rank and before
anything moves; parameters keep the dtype of the model and their ties; nothing goes through ``distribute_tensor``.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager

from epload.compat import accelerate, torch

_PLACES = {
    "torch": ("torch.distributed.checkpoint.state_dict", "set_model_state_dict", torch.set_model_state_dict),
    "accelerate": (
        "accelerate.utils.fsdp_utils",
        "fsdp2_load_full_state_dict",
        accelerate.fsdp2_load_full_state_dict,
    ),
}
"""Module, name of the original, and what stands in for it."""


@contextmanager
def patch(*frameworks: str) -> Iterator[None]:
    """Within it, calls of the frameworks' own loading functions come here; for a framework that offers no hook.

    A function that was imported by name before (``from module import function``) stays the original where it was imported to.

    Args:
        frameworks: ``"torch"``, ``"accelerate"``; all of these that are installed if none is given.

    Raises:
        ValueError: another name.
        ImportError: a framework that is named is not installed.
    """
    for name in frameworks:
        if name not in _PLACES:
            raise ValueError(f"expected frameworks among {', '.join(_PLACES)}, got {name!r}")
    replaced = []
    for name in frameworks or _PLACES:
        module_name, function, ours = _PLACES[name]
        try:
            module = importlib.import_module(module_name)
        except ImportError:
            if frameworks:
                raise
            continue
        replaced.append((module, function, getattr(module, function), ours))
    for module, function, _, ours in replaced:
        setattr(module, function, ours)
    try:
        yield
    finally:
        for module, function, original, _ in replaced:
            setattr(module, function, original)
