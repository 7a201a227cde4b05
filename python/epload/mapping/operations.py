"""The operations of a conversion: stack, concatenate, split, unstack, transpose, reshape. Symbolic: see ``core.views``.

An operation maps a list of inputs to a list of outputs. Each is a list of tensors: one tensor, or one for each index (an
expert's number).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
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

    def __call__(self, inputs: TensorLists, targets: TargetShapes) -> TensorLists:
        """Raises ValueError if the operation cannot be applied to these inputs."""
        return _FUNCTIONS[self.name](inputs, targets, *self.arguments)

    def __repr__(self) -> str:
        return f"{self.name}({', '.join(map(repr, self.arguments))})"


def Stack(dim: int = 0) -> Operation:
    """Stacks the tensors of each input along a new dim, as torch.stack does."""
    return Operation("Stack", (dim,))


def Concatenate(dim: int = 0) -> Operation:
    """Concatenates the tensors of all inputs, in order, as torch.cat does."""
    return Operation("Concatenate", (dim,))


def Split(dim: int = 0, sizes: str | tuple[int, ...] = "equal") -> Operation:
    """Splits one tensor along ``dim``, one piece for each target.

    ``sizes``: ``"targets"`` for the sizes of the targets in the model, ``"equal"`` for those of torch.chunk, or a tuple.
    """
    return Operation("Split", (dim, sizes))


def Unstack(dim: int = 0) -> Operation:
    """Makes each input a list with a tensor for each index of ``dim``, as torch.unbind does."""
    return Operation("Unstack", (dim,))


def Transpose(dim0: int = 0, dim1: int = 1, unless_fits: bool = False) -> Operation:
    """Transposes two dims of every tensor. With ``unless_fits``, tensors that already have the target's shape are kept."""
    return Operation("Transpose", (dim0, dim1, unless_fits))


def Reshape(shape: tuple[int, ...]) -> Operation:
    """Reshapes every tensor, as torch.reshape does; one entry may be -1."""
    return Operation("Reshape", (shape,))


# ---- the functions ----


def _each(function: Callable[..., Assembly]) -> Callable[..., TensorLists]:
    """Makes a function of one tensor a function of all inputs."""
    return lambda inputs, _, *arguments: [[function(t, *arguments) for t in tensors] for tensors in inputs]


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


def _transpose(inputs: TensorLists, targets: TargetShapes, dim0: int, dim1: int, unless_fits: bool) -> TensorLists:
    fitting = next(iter(targets.values())) if unless_fits else None
    return [[t if t.shape == fitting else views.transpose(t, dim0, dim1) for t in tensors] for tensors in inputs]


def _truncate(tensor: Assembly, count: int) -> Assembly:
    """Keeps the first rows; the others are padding."""
    rows = min(count, tensor.shape[0])
    return views.split(tensor, 0, [rows, tensor.shape[0] - rows])[0]


def _unsupported(_: TensorLists, __: TargetShapes, name: str, reason: str) -> TensorLists:
    raise ValueError(
        f"the transformers operation {name} {reason}; load the model once with from_pretrained, save its state dict, and load "
        "that"
    )


COMPUTES_VALUES = "computes values, which a mapping cannot do"


def _dequantize(inputs: TensorLists, targets: TargetShapes, name: str) -> TensorLists:
    """Keeps a tensor without scales, which are all inputs but the first; multiplying by scales would compute values."""
    return _unsupported(inputs, targets, name, COMPUTES_VALUES) if any(inputs[1:]) else inputs[:1]


def _interleave(tensor: Assembly, dim: int, inverse: bool) -> Assembly:
    """Reorders ``dim`` to the even indices, then the odd ones; ``inverse`` reverses that."""
    dim = views.normalize_dim(dim, len(tensor.shape))
    half = tensor.shape[dim] // 2
    pairs = (2, half) if inverse else (half, 2)
    matrix = views.reshape(tensor, (*tensor.shape[:dim], *pairs, *tensor.shape[dim + 1 :]))
    return views.reshape(views.transpose(matrix, dim, dim + 1), tensor.shape)


def _permute_for_rope(
    inputs: TensorLists, _: TargetShapes, heads: int, inverse: bool, applies: tuple[bool, ...]
) -> TensorLists:
    """Reorders the rows of each head from (real, imaginary) pairs to all real rows, then all imaginary rows.

    ``applies``: True for each input that the operation applies to.
    """
    if len(applies) != len(inputs):
        if not all(applies):
            raise ValueError(f"PermuteForRope takes {len(applies)} inputs, got {len(inputs)}")
        applies = (True,) * len(inputs)

    def permute(tensor: Assembly) -> Assembly:
        if len(tensor.shape) not in (1, 2):
            return tensor
        by_head = views.reshape(tensor, (heads, tensor.shape[0] // heads, *tensor.shape[1:]))
        return views.reshape(_interleave(by_head, 1, inverse), tensor.shape)

    return [[*map(permute, tensors)] if does else tensors for tensors, does in zip(inputs, applies, strict=True)]


def _merge_message_queries(inputs: TensorLists, _: TargetShapes) -> TensorLists:
    """Merges pairs of [query, mlp] rows and pairs of [key, value] rows to [query, key, value, mlp], stacked along a new dim."""
    outer, inner = (views.reshape(tensor, (-1, 2, *tensor.shape[1:])) for (tensor,) in inputs)
    query, mlp = views.split(outer, 1, [1, 1])
    return [[views.concatenate([query, inner, mlp], 1)]]


def _fuse_and_split_experts(inputs: TensorLists, targets: TargetShapes, stack_dim: int, concat_dim: int) -> TensorLists:
    """Divides each input's list evenly among the targets; each target stacks its part of each input and concatenates those."""
    outputs = []
    for i in range(len(targets)):
        sizes = [-(-len(tensors) // len(targets)) for tensors in inputs]
        parts = [tensors[i * size : (i + 1) * size] for tensors, size in zip(inputs, sizes, strict=True)]
        if not all(parts):
            raise ValueError(f"cannot divide {max(map(len, inputs))} experts among {len(targets)} targets")
        outputs.append([views.concatenate([views.stack(part, stack_dim) for part in parts], concat_dim)])
    return outputs


_FUNCTIONS: dict[str, Callable[..., TensorLists]] = {
    "Stack": lambda inputs, _, dim: [[views.stack(tensors, dim)] for tensors in inputs],
    "Concatenate": lambda inputs, _, dim: [[views.concatenate(list(chain(*inputs)), dim)]],
    "Split": _split,
    "Unstack": lambda inputs, _, dim: [list(chain(*(views.unstack(t, dim) for t in tensors))) for tensors in inputs],
    "Transpose": _transpose,
    "Reshape": _each(views.reshape),
    # Operations that only transformers declares, by its names for them.
    "Conv3dToLinear": _each(lambda tensor: views.reshape(tensor, (tensor.shape[0], -1))),
    "Dequantize": _dequantize,
    "ErnieFuseAndSplitTextVisionExperts": _fuse_and_split_experts,
    "Inkling2LoopMergeMessageQueries": _merge_message_queries,
    "Interleave": _each(_interleave),
    "PermuteForRope": _permute_for_rope,
    "Truncate": _each(_truncate),
    "Unsupported": _unsupported,
}
"""Functions of inputs, targets and an operation's arguments."""
