"""What conversions do to whole tensors: stack, concatenate, split, unstack, transpose, reshape. Pure; see ``views``.

An operation takes parts to parts. A part is a list of tensors: one, or one for each index (an expert's number).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from epload.core import views
from epload.core.views import Assembly, Shape

Parts = list[list[Assembly]]


class Wanted(NamedTuple):
    """What a conversion is to end in."""

    shapes: Sequence[Shape | None]
    """Of each target; None where the model does not have it, or has a list of them."""
    targets: tuple[str, ...]
    """As the rule spells them."""


class Operation(ABC):
    """A step of a conversion. Values are equal by class and fields."""

    @abstractmethod
    def __call__(self, parts: Parts, wanted: Wanted) -> Parts:
        """Raises ValueError when the parts are not what it can work on."""


@dataclass(frozen=True)
class Stack(Operation):
    """Each part's tensors become one, along a new dim (torch.stack)."""

    dim: int = 0

    def __call__(self, parts: Parts, wanted: Wanted) -> Parts:
        return [[views.stack(part, self.dim)] for part in parts]


@dataclass(frozen=True)
class Concatenate(Operation):
    """All parts become one, in order (torch.cat)."""

    dim: int = 0

    def __call__(self, parts: Parts, wanted: Wanted) -> Parts:
        return [[views.concatenate([tensor for part in parts for tensor in part], self.dim)]]


@dataclass(frozen=True)
class Split(Operation):
    """One tensor becomes a part for each target. ``sizes`` along ``dim`` are those of the ``"targets"``, ``"equal"`` (as
    torch.chunk makes them), or given."""

    dim: int = 0
    sizes: str | tuple[int, ...] = "equal"

    def __call__(self, parts: Parts, wanted: Wanted) -> Parts:
        tensor = _only(self, parts)
        dim = views.dim_of(self.dim, len(tensor.shape))
        if self.sizes == "targets":
            if None in wanted.shapes:
                raise ValueError(
                    f"{self} needs the sizes of all of {', '.join(wanted.targets)}, some of which it lacks"
                )
            sizes = [shape[dim] for shape in wanted.shapes if shape is not None]
        elif isinstance(self.sizes, str):
            length, count = tensor.shape[dim], len(wanted.targets)
            each = -(-length // count)
            sizes = [min(each, max(length - i * each, 0)) for i in range(count)]
        else:
            sizes = list(self.sizes)
        return [[piece] for piece in views.split(tensor, dim, sizes)]


@dataclass(frozen=True)
class Unstack(Operation):
    """Each part becomes a list, a tensor for each index of ``dim``, which goes (torch.unbind)."""

    dim: int = 0

    def __call__(self, parts: Parts, wanted: Wanted) -> Parts:
        return [[piece for tensor in part for piece in views.unstack(tensor, self.dim)] for part in parts]


@dataclass(frozen=True)
class Transpose(Operation):
    """Every tensor with two dims exchanged; with ``unless_fits`` those left alone that have the target's shape already."""

    dim0: int = 0
    dim1: int = 1
    unless_fits: bool = False

    def __call__(self, parts: Parts, wanted: Wanted) -> Parts:
        def turned(tensor: Assembly) -> Assembly:
            fits = self.unless_fits and tensor.shape == wanted.shapes[0]
            return tensor if fits else views.transpose(tensor, self.dim0, self.dim1)

        return [[turned(tensor) for tensor in part] for part in parts]


@dataclass(frozen=True)
class Reshape(Operation):
    """Every tensor viewed in another shape, with -1 for what is left (torch.reshape)."""

    shape: tuple[int, ...]

    def __call__(self, parts: Parts, wanted: Wanted) -> Parts:
        return [[views.reshape(tensor, self.shape) for tensor in part] for part in parts]


def _only(operation: Operation, parts: Parts) -> Assembly:
    if len(parts) != 1 or len(parts[0]) != 1:
        raise ValueError(f"{operation} works on one tensor, got {sum(map(len, parts))}")
    return parts[0][0]
