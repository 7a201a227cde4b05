"""The operations of a conversion: stack, concatenate, split, unstack, transpose, reshape. Symbolic: see ``core.views``.

An operation maps a list of inputs to a list of outputs. Each is a list of tensors: one tensor, or one for each index (an
expert's number).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from epload.core import views
from epload.core.views import Assembly, Shape

TensorLists = list[list[Assembly]]


class ConversionTargets(NamedTuple):
    """The targets of a conversion."""

    shapes: Sequence[Shape | None]
    """Shape of each target in the model; None if the model lacks it, or has a list of tensors for it."""
    patterns: tuple[str, ...]
    """The targets as the rule gives them."""


class Operation:
    """A step of a conversion. Operations are equal if their class and fields are."""

    optional_inputs = False
    """True for a first step that does without any input but the first."""

    def __call__(self, inputs: TensorLists, targets: ConversionTargets) -> TensorLists:
        """Raises ValueError if the operation cannot be applied to these inputs."""
        return [[self.convert(tensor, targets) for tensor in tensors] for tensors in inputs]

    def convert(self, tensor: Assembly, targets: ConversionTargets) -> Assembly:
        """Applies an operation that works on one tensor at a time."""
        raise NotImplementedError


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
        if len(inputs) != 1 or len(inputs[0]) != 1:
            raise ValueError(f"{self} takes one tensor, got {sum(map(len, inputs))}")
        ((tensor,),) = inputs
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

    def convert(self, tensor: Assembly, targets: ConversionTargets) -> Assembly:
        fits = self.unless_fits and tensor.shape == targets.shapes[0]
        return tensor if fits else views.transpose(tensor, self.dim0, self.dim1)


@dataclass(frozen=True)
class Reshape(Operation):
    """Reshapes every tensor, as torch.reshape does; one entry may be -1."""

    shape: tuple[int, ...]

    def convert(self, tensor: Assembly, targets: ConversionTargets) -> Assembly:
        return views.reshape(tensor, self.shape)


# ---- operations that only transformers declares ----


@dataclass(frozen=True)
class UnsupportedOperation(Operation):
    """An operation of the library that computes values, such as quantizing or dequantizing, or that epload does not know."""

    name: str
    reason: str = "computes values, which a mapping cannot do"

    def __call__(self, inputs: TensorLists, targets: ConversionTargets) -> TensorLists:
        raise ValueError(
            f"the transformers operation {self.name} {self.reason}; load the model once with from_pretrained, save its state "
            "dict, and load that"
        )


@dataclass(frozen=True)
class Dequantize(UnsupportedOperation):
    """Keeps a tensor without scales; those with scales compute values. The scales are all inputs but the first."""

    optional_inputs = True

    def __call__(self, inputs: TensorLists, targets: ConversionTargets) -> TensorLists:
        return super().__call__(inputs, targets) if any(inputs[1:]) else inputs[:1]


@dataclass(frozen=True)
class Truncate(Operation):
    """Keeps the first ``count`` rows of every tensor; the others are padding."""

    count: int

    def convert(self, tensor: Assembly, targets: ConversionTargets) -> Assembly:
        rows = min(self.count, tensor.shape[0])
        return views.split(tensor, 0, [rows, tensor.shape[0] - rows])[0]


@dataclass(frozen=True)
class LibraryOperation(Operation):
    """An operation of the library by its name in ``_LIBRARY``, with the arguments for the function there."""

    name: str
    arguments: tuple[Any, ...] = ()

    def __call__(self, inputs: TensorLists, targets: ConversionTargets) -> TensorLists:
        return _LIBRARY[self.name](inputs, targets, *self.arguments)


def _interleave(tensor: Assembly, dim: int, inverse: bool) -> Assembly:
    """Reorders ``dim`` to the even indices, then the odd ones; ``inverse`` reverses that."""
    dim = views.normalize_dim(dim, len(tensor.shape))
    half = tensor.shape[dim] // 2
    pairs = (2, half) if inverse else (half, 2)
    matrix = views.reshape(tensor, (*tensor.shape[:dim], *pairs, *tensor.shape[dim + 1 :]))
    return views.reshape(views.transpose(matrix, dim, dim + 1), tensor.shape)


def _permute_for_rope(
    inputs: TensorLists, _: ConversionTargets, heads: int, inverse: bool, applies: tuple[bool, ...]
) -> TensorLists:
    """Reorders the rows of each head from (real, imaginary) pairs to all real rows, then all imaginary rows.

    ``applies``: True for each input that the operation applies to.
    """
    if len(applies) != len(inputs) and not all(applies):
        raise ValueError(f"PermuteForRope takes {len(applies)} inputs, got {len(inputs)}")

    def permute(tensor: Assembly) -> Assembly:
        if len(tensor.shape) not in (1, 2):
            return tensor
        by_head = views.reshape(tensor, (heads, tensor.shape[0] // heads, *tensor.shape[1:]))
        return views.reshape(_interleave(by_head, 1, inverse), tensor.shape)

    permuted = [len(applies) != len(inputs) or applies[i] for i in range(len(inputs))]
    return [[*map(permute, tensors)] if does else tensors for tensors, does in zip(inputs, permuted, strict=True)]


def _merge_message_queries(inputs: TensorLists, _: ConversionTargets) -> TensorLists:
    """Merges pairs of [query, mlp] rows and pairs of [key, value] rows to [query, key, value, mlp], stacked along a new dim."""
    outer, inner = (views.reshape(tensor, (-1, 2, *tensor.shape[1:])) for (tensor,) in inputs)
    query, mlp = views.split(outer, 1, [1, 1])
    return [[views.concatenate([query, inner, mlp], 1)]]


def _fuse_and_split_experts(
    inputs: TensorLists, targets: ConversionTargets, stack_dim: int, concat_dim: int
) -> TensorLists:
    """Divides each input's list evenly among the targets; each target stacks its part of each input and concatenates those."""
    count = len(targets.patterns)
    sizes = [-(-len(tensors) // count) for tensors in inputs]
    parts = [
        [tensors[i * size : (i + 1) * size] for tensors, size in zip(inputs, sizes, strict=True)] for i in range(count)
    ]
    if not all(part for of_target in parts for part in of_target):
        raise ValueError(f"cannot divide {max(map(len, inputs))} experts among {count} targets")
    return [
        [views.concatenate([views.stack(part, stack_dim) for part in of_target], concat_dim)] for of_target in parts
    ]


_LIBRARY: dict[str, Callable[..., TensorLists]] = {
    "Conv3dToLinear": lambda inputs, _: [[views.reshape(t, (t.shape[0], -1)) for t in tensors] for tensors in inputs],
    "ErnieFuseAndSplitTextVisionExperts": _fuse_and_split_experts,
    "Inkling2LoopMergeMessageQueries": _merge_message_queries,
    "Interleave": lambda inputs, _, dim, inverse: [[_interleave(t, dim, inverse) for t in ts] for ts in inputs],
    "PermuteForRope": _permute_for_rope,
}
"""Functions of inputs, targets and arguments, by the names of classes of transformers."""
