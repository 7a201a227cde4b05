"""The operations of a conversion: stack, concatenate, split, unstack, transpose, reshape. Symbolic: see ``core.views``.

An operation maps a list of inputs to a list of outputs. Each is a list of tensors: one tensor, or one for each index (an
expert's number).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from epload.core import views
from epload.core.views import Assembly, Shape

TensorLists = list[list[Assembly]]
TargetShapes = Mapping[str, Shape | None]
"""Shape of each target of a conversion in the model, by its pattern; None if the model lacks it, or has a list for it."""


@dataclass(frozen=True, repr=False)
class Operation:
    """A step of a conversion; a plain value. Functions of the same name make those that mappings of your own may use."""

    name: str
    """Key of the function that computes it."""
    arguments: tuple[Any, ...] = ()
    function: Callable[[TensorLists, TargetShapes], TensorLists] | None = field(default=None, compare=False)
    """Computes it in place of that function; None for the operations of mappings of your own."""

    def __call__(self, inputs: TensorLists, targets: TargetShapes) -> TensorLists:
        """Raises ValueError if the operation cannot be applied to these inputs."""
        if self.function is not None:
            return self.function(inputs, targets)
        return _FUNCTIONS[self.name](inputs, targets, *self.arguments)

    def __repr__(self) -> str:
        return f"{self.name}({', '.join(map(repr, self.arguments))})"


def Stack(dim: int = 0) -> Operation:
    """Stacks the tensors of each input along a new dim, as torch.stack does."""
    return Operation("Stack", (dim,))


def Concatenate(dim: int = 0) -> Operation:
    """Concatenates the tensors of all inputs, in order, as torch.cat does."""
    return Operation("Concatenate", (dim,))


def Split(dim: int = 0, sizes: str | Sequence[int] = "equal") -> Operation:
    """Splits one tensor along ``dim``, one piece for each target.

    ``sizes``: ``"targets"`` for the sizes of the targets in the model, ``"equal"`` for those of torch.chunk, or a tuple. Raises
    ValueError for another str.
    """
    if isinstance(sizes, str) and sizes not in ("targets", "equal"):
        raise ValueError(f"expected sizes to be 'targets', 'equal' or a tuple of sizes, got {sizes!r}")
    return Operation("Split", (dim, tuple(sizes) if isinstance(sizes, list) else sizes))


def Unstack(dim: int = 0) -> Operation:
    """Makes each input a list with a tensor for each index of ``dim``, as torch.unbind does."""
    return Operation("Unstack", (dim,))


def Transpose(dim0: int = 0, dim1: int = 1) -> Operation:
    """Transposes two dims of every tensor."""
    return Operation("Transpose", (dim0, dim1))


def Reshape(shape: Sequence[int]) -> Operation:
    """Reshapes every tensor, as torch.reshape does; one entry may be -1."""
    return Operation("Reshape", (tuple(shape),))


# ---- the functions ----


def _split(inputs: TensorLists, targets: TargetShapes, dim: int, sizes: str | tuple[int, ...]) -> TensorLists:
    tensors = list(chain(*inputs))
    if len(tensors) != 1:
        raise ValueError(f"Split takes one tensor, got {len(tensors)}")
    dim = views.normalize_dim(dim, len(tensors[0].shape))
    if sizes == "targets":
        shapes = [shape for shape in targets.values() if shape is not None]
        if len(shapes) < len(targets):
            raise ValueError(f"Split needs the shapes of all of {', '.join(targets)}, but the model lacks some of them")
        sizes = tuple(shape[dim] for shape in shapes)
    elif isinstance(sizes, str):
        length = tensors[0].shape[dim]
        chunk = -(-length // len(targets))
        sizes = tuple(min(chunk, max(length - i * chunk, 0)) for i in range(len(targets)))
    return [[piece] for piece in views.split(tensors[0], dim, sizes)]


_FUNCTIONS: dict[str, Callable[..., TensorLists]] = {
    "Stack": lambda inputs, _, dim: [[views.stack(tensors, dim)] for tensors in inputs],
    "Concatenate": lambda inputs, _, dim: [[views.concatenate(list(chain(*inputs)), dim)]],
    "Split": _split,
    "Unstack": lambda inputs, _, dim: [list(chain(*(views.unstack(t, dim) for t in tensors))) for tensors in inputs],
    "Transpose": lambda inputs, _, *dims: [[views.transpose(t, *dims) for t in tensors] for tensors in inputs],
    "Reshape": lambda inputs, _, shape: [[views.reshape(t, shape) for t in tensors] for tensors in inputs],
}
"""Functions of inputs, targets and an operation's arguments."""
