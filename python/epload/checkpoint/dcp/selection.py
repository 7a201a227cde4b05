"""Selects the model's entries of a DCP checkpoint: jobs save an optimizer's state and the like with the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from epload.checkpoint.torch_file import WRAPPERS
from epload.errors import CheckpointError

ROOT = "."
"""The prefix of a whole state dict."""


class Selected(NamedTuple):
    """The model's part of a state dict."""

    names: dict[str, str]
    """The name in the model, by the name in the checkpoint."""
    others: list[str]
    """Keys of what is beside it."""


def select(names: Sequence[str], paths: Mapping[str, tuple[str, ...]], prefix: str, source: str) -> Selected:
    """Selects what is under ``prefix``; without one, under a top-level key "model" or "state_dict", or under the only key. For
    ``ROOT`` everything, under its name in the checkpoint.

    Args:
        names: of the checkpoint's tensors.
        paths: for each name the keys under which it was in the nested state dict. Only they tell ``{"model": {"w": ...}}`` from
            ``{"model.w": ...}``, which has no such key.

    Raises:
        CheckpointError: there is nothing under ``prefix``, or without one, there are both "model" and "state_dict".
    """
    if prefix == ROOT:
        return Selected({name: name for name in names}, [])
    if prefix:
        start = prefix.rstrip(".") + "."
        if found := {name: name[len(start) :] for name in names if name.startswith(start)}:
            return Selected(found, [])
        raise CheckpointError(f"{source}: no tensor is under prefix={prefix!r}; there are {_listed(names)}")
    path_of = {name: paths.get(name, (name,)) for name in names}
    at: tuple[str, ...] = ()
    others: list[str] = []
    while True:
        depth = len(at)
        keys = dict.fromkeys(path[depth] for path in path_of.values())
        nested = dict.fromkeys(path[depth] for path in path_of.values() if len(path) > depth + 1)
        wrappers = [key for key in WRAPPERS if key in nested]
        if len(wrappers) > 1:
            choices = " or ".join(f"prefix={'.'.join((*at, key))!r}" for key in wrappers)
            raise CheckpointError(f"{source} has a state dict under each of {' and '.join(wrappers)}: pass {choices}")
        inner = wrappers[0] if wrappers else None
        if inner is None and len(keys) == len(nested) == 1:
            inner = next(iter(nested))
        if inner is None:
            return Selected({name: ".".join(path[depth:]) for name, path in path_of.items()}, others)
        at = (*at, inner)
        beside = dict.fromkeys(path[depth] for path in paths.values() if path[:depth] == at[:-1] and len(path) > depth)
        others += [key for key in (beside or keys) if key != inner]
        path_of = {name: path for name, path in path_of.items() if path[: depth + 1] == at and len(path) > depth + 1}


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (f", ... ({len(names) - 5} more)" if len(names) > 5 else "") or "none"
