"""Translates the checkpoint conversions that the transformers library (5.x) declares for a model into epload's rules.

The library renames keys with regular expressions and converts collected lists of tensors with operations, in its
``core_model_loading``. An operation that computes values has no equivalent here, and is an error when a tensor needs it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

from torch.distributed.fsdp import FSDPModule

from epload.core import views
from epload.core.views import Assembly
from epload.mapping.mapping import Mapping
from epload.mapping.operations import (
    Concatenate,
    ConversionTargets,
    Operation,
    Reshape,
    Split,
    Stack,
    TensorLists,
    Transpose,
    Unstack,
)
from epload.mapping.rules import Convert, Rename


def from_transformers(model: Any) -> Mapping:
    """The conversion that the library declares for a transformers model without wrappers, whatever its architecture."""
    from transformers import PreTrainedModel
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter

    if not isinstance(model, PreTrainedModel):  # a single layer, for which nothing is declared
        return Mapping()
    renames: list[Rename] = []
    converts: list[Convert] = []
    for transform in get_model_conversion_mapping(_without_fsdp(model)):
        if isinstance(transform, WeightConverter):
            converts.append(_convert(transform, model.config))
        else:
            renames += _renames(transform)
    ties = tuple((a, b) for a, b in (getattr(model, "all_tied_weights_keys", None) or {}).items())
    unexpected, missing = _ignored_patterns(model)
    return Mapping(
        tuple(renames),
        tuple(converts),
        model.base_model_prefix,
        ties,
        required=False,
        ignore_unexpected=unexpected,
        ignore_missing=missing,
    )


def _ignored_patterns(model: Any) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Patterns of unexpected and of missing keys that the library does not report, as in its
    ``_adjust_missing_and_unexpected_keys``. Sorted, because ranks compare mappings by their text."""
    unexpected = set(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())
    missing = set(getattr(model, "_keys_to_ignore_on_load_missing", None) or ())
    for name, module in model.named_modules():
        buffers = module._buffers
        if "inv_freq" in buffers and name.endswith("rotary_emb"):
            unexpected.add(r"rotary_emb\.inv_freq")  # one per layer in old checkpoints, one per model now
        if any(buffer.endswith("position_ids") for buffer in buffers):
            unexpected.add(r"(^|\.)position_ids$")  # persistent in old checkpoints
    return tuple(sorted(unexpected)), tuple(sorted(missing))


def _without_fsdp(model: Any) -> Any:
    """A stand-in with the model's original classes: the library looks up declarations by class, and ``fully_shard`` replaces
    the classes."""
    from transformers import PreTrainedModel

    stand_ins = []
    for name, module in model.named_modules():
        if not isinstance(module, PreTrainedModel):
            continue
        original = next(cls for cls in type(module).__mro__ if not issubclass(cls, FSDPModule))
        stand_in = original.__new__(original)
        stand_in.__dict__.update(
            {"config": getattr(module, "config", None), "_modules": {}, "_parameters": {}, "_buffers": {}}
        )
        stand_ins.append((name, stand_in))
    stand_ins[0][1].__dict__["named_modules"] = lambda: iter(stand_ins)
    return stand_ins[0][1]


def _renames(transform: Any) -> list[Rename]:
    """One rename for a transform with any number of patterns; for a group, one for each pair of patterns."""
    from transformers.core_model_loading import GroupWeightRename

    scopes = _scopes(transform)
    if isinstance(transform, GroupWeightRename):
        # Last to first, so that no rename applies to the result of another; all or none, by the first pattern.
        pairs = list(zip(transform.source_patterns, transform.target_patterns, strict=True))
        return [
            Rename(
                _as_regex(source),
                _template(target, lambda n: rf"\g<{n}>"),
                scopes,
                when=_as_regex(pairs[0][0]),
            )
            for source, target in reversed(pairs)
        ]
    pattern = transform.compiled_sources

    def reference(number: int) -> str:
        # The library wraps each pattern in a group of its own; only groups of the pattern that matched are not empty.
        return "".join(rf"\g<{index + number}>" for index in pattern.groupindex.values())

    shift = getattr(transform, "offset", 0)
    if shift:
        return [Rename(_as_regex(transform.source_patterns[0]), transform.target_patterns[0], scopes, shift=shift)]
    return [Rename(pattern.pattern, _template(transform.target_patterns[0], reference), scopes)]


def _template(target: str, reference: Callable[[int], str]) -> str:
    r"""A target for re.sub: the library expands only ``\1`` and the like, all else is literal."""
    return "".join(
        reference(int(piece[1:])) if re.fullmatch(r"\\\d", piece) else piece.replace("\\", r"\\")
        for piece in re.split(r"(\\\d)", target)
    )


def _scopes(transform: Any) -> tuple[str, ...]:
    if transform.scope_prefix is None:
        return ()
    base, scope = (f"{prefix}." if prefix else "" for prefix in (transform.base_model_prefix, transform.scope_prefix))
    return (base + scope, scope)


def _as_regex(pattern: str) -> str:
    """As the library compiles a pattern: a star matches any text up to a dot, and a final word must match whole."""
    pattern = pattern.replace("*.", r".*\.")
    return pattern + (r"(?!\w)" if re.search(r"[a-zA-Z0-9]$", pattern) else "")


def _convert(transform: Any, config: Any) -> Convert:
    sources = tuple(
        _as_regex(re.sub(r"\*(?=\.|$)", "\0", pattern)).replace("\0", r"(?P<index>\d+)", 1)
        for pattern in transform.source_patterns
    )
    targets = tuple(
        _template(pattern, lambda n: rf"\g<{n}>").replace("*", "{index}") for pattern in transform.target_patterns
    )
    operations = [ours for theirs in transform.operations for ours in _operations(theirs, transform, config)]
    return Convert(sources, targets, tuple(operations), _scopes(transform))


def _operations(operation: Any, transform: Any, config: Any) -> list[Operation]:
    """epload's operations for one of the library."""
    name = type(operation).__name__
    if name == "MergeModulelist":
        return [Stack(operation.dim)]
    if name == "SplitModulelist":
        return [Unstack(operation.dim)]
    if name == "Concatenate":
        return [Concatenate(operation.dim)]
    if name == "Chunk" and operation.num_shards_attribute is None:
        return [Split(operation.dim)]
    if name == "Split":
        return [Split(operation.dim, "targets")]
    if name == "Transpose":
        return [Transpose(operation.dim0, operation.dim1, unless_fits=operation.check_dims)]
    if name == "Interleave":
        return [Interleave(operation.dim, operation.inverse)]
    if name == "Conv3dToLinear":
        return [Flatten()]
    if name == "LinearToConv3d":
        return [Reshape((-1, operation.in_channels, *operation.kernel_size))]
    if name == "PermuteForRope":
        return [_rope(operation, transform, config)]
    if name == "VisionFuseAndPermuteForRope":
        return [_rope(operation.permute_op, transform, config), Concatenate(operation.dim)]
    if name == "VisionUnfuseAndPermuteForRope":
        return [Split(operation.dim), _rope(operation.permute_op, transform, config)]
    if name == "ErnieFuseAndSplitTextVisionExperts":
        return [FuseAndSplitExperts(operation.stack_dim, operation.concat_dim)]
    if name == "_IdentityOp":
        return []
    return [UnsupportedOperation(name)]


def _rope(operation: Any, transform: Any, config: Any) -> Operation:
    if operation.subconfig_key is not None:
        config = getattr(config, operation.subconfig_key, config)
    patterns = transform.source_patterns if len(transform.source_patterns) > 1 else transform.target_patterns
    layers = operation.permute_layer_names
    return PermuteForRope(
        getattr(config, "num_attention_heads", 1),
        operation.inverse,
        tuple(layers is None or any(name in pattern for name in layers) for pattern in patterns),
    )


@dataclass(frozen=True)
class UnsupportedOperation(Operation):
    """An operation of the library that computes values, such as quantizing or dequantizing."""

    name: str

    def __call__(self, inputs: TensorLists, targets: ConversionTargets) -> TensorLists:
        raise ValueError(
            f"the transformers operation {self.name} computes values, which a mapping cannot do; load the model once with "
            "from_pretrained, save its state dict, and load that"
        )


@dataclass(frozen=True)
class Interleave(Operation):
    """Reorders ``dim`` to the even indices, then the odd ones; ``inverse`` reverses that."""

    dim: int
    inverse: bool

    def __call__(self, inputs: TensorLists, targets: ConversionTargets) -> TensorLists:
        return [[self._permute(tensor) for tensor in tensors] for tensors in inputs]

    def _permute(self, tensor: Assembly) -> Assembly:
        dim = views.normalize_dim(self.dim, len(tensor.shape))
        half = tensor.shape[dim] // 2
        pairs = (2, half) if self.inverse else (half, 2)
        return _swap_within(tensor, dim, pairs)


@dataclass(frozen=True)
class PermuteForRope(Operation):
    """Reorders the rows of each head from (real, imaginary) pairs to all real rows, then all imaginary rows."""

    heads: int
    inverse: bool
    inputs: tuple[bool, ...]
    """Which inputs it applies to."""

    def __call__(self, inputs: TensorLists, targets: ConversionTargets) -> TensorLists:
        applies = self.inputs if len(self.inputs) == len(inputs) else (True,) * len(inputs)
        return [
            [self._permute(tensor) if permuted else tensor for tensor in tensors]
            for tensors, permuted in zip(inputs, applies, strict=True)
        ]

    def _permute(self, tensor: Assembly) -> Assembly:
        if len(tensor.shape) not in (1, 2):
            return tensor
        half = tensor.shape[0] // self.heads // 2
        pairs = (2, half) if self.inverse else (half, 2)
        by_head = views.reshape(tensor, (self.heads, prod(pairs), *tensor.shape[1:]))
        return views.reshape(_swap_within(by_head, 1, pairs), tensor.shape)


@dataclass(frozen=True)
class Flatten(Operation):
    """Flattens a convolution's weight to that of a linear layer; keeps one that is flat already."""

    def __call__(self, inputs: TensorLists, targets: ConversionTargets) -> TensorLists:
        return [[views.reshape(tensor, (tensor.shape[0], -1)) for tensor in tensors] for tensors in inputs]


@dataclass(frozen=True)
class FuseAndSplitExperts(Operation):
    """Divides each input's list evenly among the targets; each target stacks its share of each input and concatenates those."""

    stack_dim: int
    concat_dim: int

    def __call__(self, inputs: TensorLists, targets: ConversionTargets) -> TensorLists:
        count = len(targets.patterns)
        shares = []
        for tensors in inputs:
            size = -(-len(tensors) // count)
            shares.append([tensors[i * size : (i + 1) * size] for i in range(count)])
        if not all(share for of_input in shares for share in of_input):
            raise ValueError(f"{self} cannot divide {max(map(len, inputs))} tensors among {count} targets")
        return [
            [views.concatenate([views.stack(of_input[i], self.stack_dim) for of_input in shares], self.concat_dim)]
            for i in range(count)
        ]


def _swap_within(tensor: Assembly, dim: int, pairs: tuple[int, int]) -> Assembly:
    """Views ``dim`` as a matrix of shape ``pairs``, and transposes it."""
    shape = tensor.shape
    split = views.reshape(tensor, (*shape[:dim], *pairs, *shape[dim + 1 :]))
    return views.reshape(views.transpose(split, dim, dim + 1), shape)
