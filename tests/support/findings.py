"""Lists what tests find wrong: tensors that are not the same, and errors that do not come."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from support.checks import full_tensor, local_of, same_bits
from support.failures import error_of


def differing(found: nn.Module | Mapping[str, Any], expected: nn.Module | Mapping[str, Any]) -> list[str]:
    """Returns the names of tensors that differ in dtype, shape or bits, shards gathered, and of those that one side lacks."""
    ours, theirs = _tensors(found), _tensors(expected)
    both = [name for name in theirs if name in ours]
    return [*sorted(ours.keys() ^ theirs.keys()), *(name for name in both if not same_bits(ours[name], theirs[name]))]


def differing_values(found: Any, expected: Any, name: str = "") -> list[str]:
    """Returns what differs on this rank in two nested state dicts."""
    if isinstance(expected, dict):
        if list(found) != list(expected):
            return [f"{name}: {list(found)}, not {list(expected)}"]
        return [text for key in expected for text in differing_values(found[key], expected[key], f"{name}.{key}")]
    a, b = local_of(found), local_of(expected)
    same = same_bits(a, b) if isinstance(b, Tensor) else a == b
    return [] if same else [f"{name}: {a!r}, not {b!r}"]


def _tensors(side: nn.Module | Mapping[str, Any]) -> dict[str, Tensor]:
    state = side.state_dict() if isinstance(side, nn.Module) else side
    return {name: full_tensor(value.detach()) for name, value in state.items() if isinstance(value, Tensor)}


def not_refused(action: Callable[[], Any], *parts: str) -> list[str]:
    """Returns nothing if an action raises an error whose class and text have all the parts; else what came instead."""
    error = error_of(action)
    return [] if error and all(part in error for part in parts) else [error or f"no error with {parts}"]


def not_refused_by_all(action: Callable[[], Any], *parts: str) -> list[str]:
    """Returns what ranks raise, unless that is one error on all of them, whose class and text have all the parts."""
    errors: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(errors, error_of(action))
    return [] if len({*errors}) == 1 and errors[0] and all(part in errors[0] for part in parts) else [str(errors)]


def must_be_refused(action: Callable[[], Any], *parts: str) -> None:
    """Fails unless an action raises an error whose class and text have all the parts."""
    problems = not_refused(action, *parts)
    assert not problems, problems


def must_be_refused_by_all(action: Callable[[], Any], *parts: str) -> None:
    """Fails unless all ranks raise one error, whose class and text have all the parts."""
    problems = not_refused_by_all(action, *parts)
    assert not problems, problems
