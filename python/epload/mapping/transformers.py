"""Reads what the transformers library (5.x) declares about a model's checkpoints, and says it in epload's rules.

The library renames keys with regular expressions and converts tensors with operations on collected lists of them. Everything
here follows its ``core_model_loading``; an operation that changes values has no regions and becomes an error when it is needed.
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
from epload.mapping.operations import Concatenate, Operation, Parts, Reshape, Split, Stack, Transpose, Unstack, Wanted
from epload.mapping.rules import Convert, Rename


def declared(model: Any) -> Mapping:
    """The mapping of a transformers model; see :meth:`epload.Mapping.from_transformers`."""
    from transformers import PreTrainedModel
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter

    if not isinstance(model, PreTrainedModel):  # a layer by itself, of which nothing is declared
        return Mapping.identity()
    renames: list[Rename] = []
    converts: list[Convert] = []
    for transform in get_model_conversion_mapping(_unwrapped(model)):
        if isinstance(transform, WeightConverter):
            converts.append(_convert(transform, model.config))
        else:
            renames += _renames(transform)
    ties = tuple((a, b) for a, b in (getattr(model, "all_tied_weights_keys", None) or {}).items())
    unexpected, missing = _ignored(model)
    return Mapping(
        tuple(renames),
        tuple(converts),
        model.base_model_prefix,
        ties,
        required=False,
        ignore_unexpected=unexpected,
        ignore_missing=missing,
    )


def _ignored(model: Any) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Patterns of unexpected and of missing keys that the library does not report, as in its
    ``_adjust_missing_and_unexpected_keys``. Sorted: it keeps them in sets, and ranks compare mappings by their text."""
    unexpected = set(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())
    missing = set(getattr(model, "_keys_to_ignore_on_load_missing", None) or ())
    for name, module in model.named_modules():
        buffers = module._buffers
        if "inv_freq" in buffers and name.endswith("rotary_emb"):
            unexpected.add(r"rotary_emb\.inv_freq")  # each layer of old checkpoints has one, models have one in all
        if any(buffer.endswith("position_ids") for buffer in buffers):
            unexpected.add(r"(^|\.)position_ids$")  # persistent in old checkpoints
    return tuple(sorted(unexpected)), tuple(sorted(missing))


def _unwrapped(model: Any) -> Any:
    """A stand-in that the library looks its declarations up with: by class, which ``fully_shard`` replaces by one of its own."""
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
    """One rename for a transform, whatever the number of its patterns; a group has one for each pair of its patterns."""
    from transformers.core_model_loading import GroupWeightRename

    scopes = _scopes(transform)
    if isinstance(transform, GroupWeightRename):
        # Applied last to first, so that what one makes is not taken up by the next; all or none, as the first is found.
        pairs = list(zip(transform.source_patterns, transform.target_patterns, strict=True))
        return [
            Rename(_ended(source), _template(target, lambda n: rf"\g<{n}>"), scopes, when=_ended(pairs[0][0]))
            for source, target in reversed(pairs)
        ]
    pattern = transform.compiled_sources

    def reference(number: int) -> str:
        # The library's own groups, one round each pattern, come first; only those of the pattern that matched are not empty.
        return "".join(rf"\g<{index + number}>" for index in pattern.groupindex.values())

    shift = getattr(transform, "offset", 0)
    if shift:
        return [Rename(_ended(transform.source_patterns[0]), transform.target_patterns[0], scopes, shift=shift)]
    return [Rename(pattern.pattern, _template(transform.target_patterns[0], reference), scopes)]


def _template(target: str, reference: Callable[[int], str]) -> str:
    r"""A target for re.sub: the library knows only ``\1`` and the like, all else stands for itself."""
    return "".join(
        reference(int(piece[1:])) if re.fullmatch(r"\\\d", piece) else piece.replace("\\", r"\\")
        for piece in re.split(r"(\\\d)", target)
    )


def _scopes(transform: Any) -> tuple[str, ...]:
    if transform.scope_prefix is None:
        return ()
    base, scope = (f"{prefix}." if prefix else "" for prefix in (transform.base_model_prefix, transform.scope_prefix))
    return (base + scope, scope)


def _ended(pattern: str) -> str:
    """As the library compiles a pattern: a star is any text up to a dot, and a word at the end must be a whole one."""
    pattern = pattern.replace("*.", r".*\.")
    return pattern + (r"(?!\w)" if re.search(r"[a-zA-Z0-9]$", pattern) else "")


def _convert(transform: Any, config: Any) -> Convert:
    sources = tuple(
        _ended(re.sub(r"\*(?=\.|$)", "\0", pattern)).replace("\0", r"(?P<index>\d+)", 1)
        for pattern in transform.source_patterns
    )
    targets = tuple(
        _template(pattern, lambda n: rf"\g<{n}>").replace("*", "{index}") for pattern in transform.target_patterns
    )
    operations = [made for operation in transform.operations for made in _operations(operation, transform, config)]
    return Convert(sources, targets, tuple(operations), _scopes(transform))


def _operations(operation: Any, transform: Any, config: Any) -> list[Operation]:
    """epload's operations for one of the library's."""
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
        return [FuseAndDeal(operation.stack_dim, operation.concat_dim)]
    if name == "_IdentityOp":
        return []
    return [Inexpressible(name)]


def _rope(operation: Any, transform: Any, config: Any) -> Operation:
    if operation.subconfig_key is not None:
        config = getattr(config, operation.subconfig_key, config)
    parts = transform.source_patterns if len(transform.source_patterns) > 1 else transform.target_patterns
    chosen = operation.permute_layer_names
    return PermuteForRope(
        getattr(config, "num_attention_heads", 1),
        operation.inverse,
        tuple(chosen is None or any(name in part for name in chosen) for part in parts),
    )


@dataclass(frozen=True)
class Inexpressible(Operation):
    """An operation of the library that computes values, such as (de)quantizing."""

    name: str

    def __call__(self, parts: Parts, wanted: Wanted) -> Parts:
        raise ValueError(
            f"need the transformers operation {self.name}, which does more than move elements; "
            "save the model in the form it has once loaded, and load that"
        )


@dataclass(frozen=True)
class Interleave(Operation):
    """The even indices of ``dim``, then the odd ones; ``inverse`` undoes that."""

    dim: int
    inverse: bool

    def __call__(self, parts: Parts, wanted: Wanted) -> Parts:
        return [[self._turned(tensor) for tensor in part] for part in parts]

    def _turned(self, tensor: Assembly) -> Assembly:
        dim = views.dim_of(self.dim, len(tensor.shape))
        half = tensor.shape[dim] // 2
        pairs = (2, half) if self.inverse else (half, 2)
        return _swap_within(tensor, dim, pairs)


@dataclass(frozen=True)
class PermuteForRope(Operation):
    """Rows of each head, stored in pairs of real and imaginary parts, to all real ones and then all imaginary ones."""

    heads: int
    inverse: bool
    parts: tuple[bool, ...]
    """Which parts it is for."""

    def __call__(self, parts: Parts, wanted: Wanted) -> Parts:
        chosen = self.parts if len(self.parts) == len(parts) else (True,) * len(parts)
        return [
            [self._turned(tensor) if here else tensor for tensor in part]
            for part, here in zip(parts, chosen, strict=True)
        ]

    def _turned(self, tensor: Assembly) -> Assembly:
        if len(tensor.shape) not in (1, 2):
            return tensor
        half = tensor.shape[0] // self.heads // 2
        pairs = (2, half) if self.inverse else (half, 2)
        by_head = views.reshape(tensor, (self.heads, prod(pairs), *tensor.shape[1:]))
        return views.reshape(_swap_within(by_head, 1, pairs), tensor.shape)


@dataclass(frozen=True)
class Flatten(Operation):
    """A convolution's weight as a linear one; one that is so already stays."""

    def __call__(self, parts: Parts, wanted: Wanted) -> Parts:
        return [[views.reshape(tensor, (tensor.shape[0], -1)) for tensor in part] for part in parts]


@dataclass(frozen=True)
class FuseAndDeal(Operation):
    """Each part's list is dealt out to the targets in equal runs; each target stacks its runs and concatenates them."""

    stack_dim: int
    concat_dim: int

    def __call__(self, parts: Parts, wanted: Wanted) -> Parts:
        count = len(wanted.targets)
        runs = []
        for part in parts:
            each = -(-len(part) // count)
            runs.append([part[i * each : (i + 1) * each] for i in range(count)])
        if any(not run for part in runs for run in part):
            raise ValueError(f"cannot be dealt out to {count} targets")
        return [
            [views.concatenate([views.stack(part[i], self.stack_dim) for part in runs], self.concat_dim)]
            for i in range(count)
        ]


def _swap_within(tensor: Assembly, dim: int, pairs: tuple[int, int]) -> Assembly:
    """``dim`` seen as a matrix of this shape, transposed."""
    shape = tensor.shape
    split = views.reshape(tensor, (*shape[:dim], *pairs, *shape[dim + 1 :]))
    return views.reshape(views.transpose(split, dim, dim + 1), shape)
