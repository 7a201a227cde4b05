"""The operations of a conversion: stack, concatenate, split, unstack, transpose, reshape. Symbolic: see ``core.views``.

An operation maps a list of inputs to a list of outputs. Each is a list of tensors: one tensor, or one for each index (an
expert's number).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from epload.core import views
from epload.core.views import Assembly, Shape

TensorLists = list[list[Assembly]]


class ConversionTargets(NamedTuple):
    """The targets of a conversion."""

    shapes: Sequence[Shape | None]
    """Shape of each target in the model; None if the model lacks it, or has a list of tensors for it."""
    patterns: tuple[str, ...]
    """The targets as the rule gives them."""


class Operation(ABC):
    """A step of a conversion. Operations are equal if their class and fields are."""

    @abstractmethod
    def __call__(self, inputs: TensorLists, targets: ConversionTargets) -> TensorLists:
        """Raises ValueError if the operation cannot be applied to these inputs."""


@dataclass(frozen=True)
class Stack(Operation):
    """Stacks the tensors of each input along a new dim, as torch.stack does."""

    dim: int = 0

    def __call__(self, inputs: TensorLists, targets: ConversionTargets) -> TensorLists:
        return [[views.stack(tensors, self.dim)] for tensors in inputs]


@dataclass(frozen=True)
class Concatenate(Operation):
    """Concatenates the tensors of all inputs, in order, as torch.cat does."""

    dim: int = 0

    def __call__(self, inputs: TensorLists, targets: ConversionTargets) -> TensorLists:
        return [[views.concatenate([tensor for tensors in inputs for tensor in tensors], self.dim)]]


@dataclass(frozen=True)
class Split(Operation):
    """Splits one tensor along ``dim``, one piece for each target.

    ``sizes``: ``"targets"`` for the sizes of the targets in the model, ``"equal"`` for those of torch.chunk, or a tuple.
    """

    dim: int = 0
    sizes: str | tuple[int, ...] = "equal"

    def __call__(self, inputs: TensorLists, targets: ConversionTargets) -> TensorLists:
        tensor = _single(self, inputs)
        dim = views.normalize_dim(self.dim, len(tensor.shape))
        if self.sizes == "targets":
            if None in targets.shapes:
                raise ValueError(
                    f"{self} needs the shapes of all of {', '.join(targets.patterns)}, but the model lacks some of them"
                )
            sizes = [shape[dim] for shape in targets.shapes if shape is not None]
        elif isinstance(self.sizes, str):
            length, count = tensor.shape[dim], len(targets.patterns)
            chunk = -(-length // count)
            sizes = [min(chunk, max(length - i * chunk, 0)) for i in range(count)]
        else:
            sizes = list(self.sizes)
        return [[piece] for piece in views.split(tensor, dim, sizes)]


@dataclass(frozen=True)
class Unstack(Operation):
    """Makes each input a list with a tensor for each index of ``dim``, as torch.unbind does."""

    dim: int = 0

    def __call__(self, inputs: TensorLists, targets: ConversionTargets) -> TensorLists:
        return [[piece for tensor in tensors for piece in views.unstack(tensor, self.dim)] for tensors in inputs]


@dataclass(frozen=True)
class Transpose(Operation):
    """Transposes two dims of every tensor. With ``unless_fits``, tensors that already have the target's shape are kept."""

    dim0: int = 0
    dim1: int = 1
    unless_fits: bool = False

    def __call__(self, inputs: TensorLists, targets: ConversionTargets) -> TensorLists:
        def transpose(tensor: Assembly) -> Assembly:
            fits = self.unless_fits and tensor.shape == targets.shapes[0]
            return tensor if fits else views.transpose(tensor, self.dim0, self.dim1)

        return [[transpose(tensor) for tensor in tensors] for tensors in inputs]


@dataclass(frozen=True)
class Reshape(Operation):
    """Reshapes every tensor, as torch.reshape does; one entry may be -1."""

    shape: tuple[int, ...]

    def __call__(self, inputs: TensorLists, targets: ConversionTargets) -> TensorLists:
        return [[views.reshape(tensor, self.shape) for tensor in tensors] for tensors in inputs]


def _single(operation: Operation, inputs: TensorLists) -> Assembly:
    if len(inputs) != 1 or len(inputs[0]) != 1:
        raise ValueError(f"{operation} takes one tensor, got {sum(map(len, inputs))}")
    return inputs[0][0]
