"""Determines what operations write, and guards what an engine writes by itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from epload.core.placement import Box, intersect
from epload.errors import LoadError
from epload.recording.targets import EngineTargets, storage_of


def written_tensors(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """The arguments that an operation changes."""
    found = [args[i] if i < len(args) else kwargs.get(name) for i, name in _write_arguments(func)]
    return [leaf for leaf in tree_leaves(found) if isinstance(leaf, Tensor)]


def read_tensors(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """The arguments whose values an operation that changes others may read."""
    writes = _write_arguments(func)
    places, names = {i for i, _ in writes}, {name for _, name in writes}
    found = [argument for i, argument in enumerate(args) if i not in places]
    found += [argument for name, argument in kwargs.items() if name not in names]
    return [leaf for leaf in tree_leaves(found) if isinstance(leaf, Tensor)]


@cache
def _write_arguments(func: Any) -> tuple[tuple[int, str], ...]:
    return tuple(
        (i, argument.name)
        for i, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )


class WriteGuard(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While active, an operation that would write to certain boxes of the targets raises LoadError instead, and what others write
    to the targets is noted.

    For an engine's own ``load_weights`` beside recorded regions: of some tensors a recording does not know what they write.
    """

    def __init__(self, targets: EngineTargets, boxes: Mapping[str, Sequence[Box]]) -> None:
        """``boxes``: by target, those that nothing may write."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._targets = targets
        self._boxes = boxes
        self.written: dict[str, list[Box]] = {}
        """Boxes that were written, by target. Writes from other threads are not seen."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func._schema.is_mutable:
            for tensor in written_tensors(func, args, kwargs):
                self._check(tensor)
        return func(*args, **kwargs)

    def _check(self, tensor: Tensor) -> None:
        if storage_of(tensor) not in self._targets:
            return
        if (place := self._targets.find(tensor)) is None:
            return
        for box in self._boxes.get(place.name, ()):
            if any(intersect(box, other) is not None for other in place.boxes):
                raise LoadError(
                    f"load_weights was to write other tensors alone, but it writes {place.name} at {list(box[0])}, where a "
                    "recorded tensor goes; do not record this engine"
                )
        self.written.setdefault(place.name, []).extend(place.boxes)
