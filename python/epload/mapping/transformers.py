"""Translates the checkpoint conversions that the transformers library (5.x) declares for a model into epload's rules.

The library renames keys with regular expressions and converts collected lists of tensors with operations, in its
``core_model_loading``. An operation that computes values has no equivalent here, and is an error when a tensor needs it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from collections.abc import Mapping as MappingType
from typing import Any

import torch

from epload.mapping import operations
from epload.mapping.mapping import Mapping
from epload.mapping.rules import Convert, Rename
from epload.model.skeleton import class_before_fsdp


def from_transformers(model: Any) -> Mapping:
    """The conversion that the library declares for a transformers model without wrappers, whatever its architecture."""
    from transformers import PreTrainedModel
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter

    if not isinstance(model, PreTrainedModel):  # a single layer, for which nothing is declared
        return Mapping()
    renames: list[Rename] = []
    converts: list[Convert] = []
    modules = list(model.named_modules())
    for transform in get_model_conversion_mapping(_without_fsdp(modules)):
        if isinstance(transform, WeightConverter):
            converts.append(_convert(transform, model.config))
        else:
            renames += _renames(transform)
    ties = tuple((getattr(model, "all_tied_weights_keys", None) or {}).items())
    unexpected, missing = _ignored_patterns(model, modules)
    return Mapping(
        tuple(renames),
        tuple(converts),
        model.base_model_prefix,
        ties,
        required=False,
        ignore_unexpected=unexpected,
        ignore_missing=missing,
    )


def checkpoint_form(
    model: Any, tensors: MappingType[str, tuple[torch.dtype, tuple[int, ...]]]
) -> tuple[list[str], list[tuple[int, ...]]]:
    """Names and shapes of the tensors in the checkpoints that the library saves of a model.

    Args:
        model: a transformers model without wrappers.
        tensors: dtype and shape of each of its tensors, by their names without wrappers.
    """
    from transformers.core_model_loading import revert_weight_conversion

    state = {name: torch.empty(shape, dtype=dtype, device="meta") for name, (dtype, shape) in tensors.items()}
    stand_in = _without_fsdp(model.named_modules())
    vars(stand_in)["get_parameter"] = state.__getitem__  # some conversions depend on the shape of the model's tensor
    saved = revert_weight_conversion(stand_in, state)
    return list(saved), [tuple(tensor.shape) for tensor in saved.values()]


def _ignored_patterns(model: Any, modules: Iterable[tuple[str, Any]]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Patterns of unexpected and of missing keys that the library does not report, as in its
    ``_adjust_missing_and_unexpected_keys``. Sorted, because ranks compare mappings by their text."""
    unexpected = set(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())
    missing = set(getattr(model, "_keys_to_ignore_on_load_missing", None) or ())
    for name, module in modules:
        buffers = module._buffers
        if "inv_freq" in buffers and name.endswith("rotary_emb"):
            unexpected.add(r"rotary_emb\.inv_freq")  # one per layer in old checkpoints, one per model now
        if any(buffer.endswith("position_ids") for buffer in buffers):
            unexpected.add(r"(^|\.)position_ids$")  # persistent in old checkpoints
    return tuple(sorted(unexpected)), tuple(sorted(missing))


def _without_fsdp(modules: Iterable[tuple[str, Any]]) -> Any:
    """A stand-in for a model, given by its ``named_modules()``, with the original classes: the library looks up declarations by
    class, and ``fully_shard`` replaces the classes."""
    from transformers import PreTrainedModel

    stand_ins = []
    for name, module in modules:
        if not isinstance(module, PreTrainedModel):
            continue
        original: Any = class_before_fsdp(type(module))
        stand_in = original.__new__(original)
        vars(stand_in).update(config=getattr(module, "config", None), _modules={}, _parameters={}, _buffers={})
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
        first = _as_regex(pairs[0][0])
        return [Rename(_as_regex(a), _template(b), scopes, when=first) for a, b in reversed(pairs)]
    pattern = transform.compiled_sources

    def reference(number: int) -> str:
        # The library wraps each pattern in a group of its own; only groups of the pattern that matched are not empty.
        return "".join(rf"\g<{index + number}>" for index in pattern.groupindex.values())

    shift = getattr(transform, "offset", 0)
    if shift:
        return [Rename(_as_regex(transform.source_patterns[0]), transform.target_patterns[0], scopes, shift=shift)]
    return [Rename(pattern.pattern, _template(transform.target_patterns[0], reference), scopes)]


def _template(target: str, reference: Callable[[int], str] = r"\g<{}>".format) -> str:
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
    targets = tuple(_template(pattern).replace("*", "{index}") for pattern in transform.target_patterns)
    steps = [ours for theirs in transform.operations for ours in _operations(theirs, transform, config)]
    return Convert(sources, targets, tuple(steps), _scopes(transform))


_TRANSLATIONS: dict[str, Callable[[Any, Callable[[Any], operations.Operation]], list[operations.Operation]]] = {
    "MergeModulelist": lambda op, rope: [operations.Stack(op.dim)],
    "SplitModulelist": lambda op, rope: [operations.Unstack(op.dim)],
    "Concatenate": lambda op, rope: [operations.Concatenate(op.dim)],
    "Chunk": lambda op, rope: [
        operations.Split(op.dim) if op.num_shards_attribute is None else operations.UnsupportedOperation("Chunk")
    ],
    "Split": lambda op, rope: [operations.Split(op.dim, "targets")],
    "Transpose": lambda op, rope: [operations.Transpose(op.dim0, op.dim1, unless_fits=op.check_dims)],
    "Interleave": lambda op, rope: [operations.Interleave(op.dim, op.inverse)],
    "Conv3dToLinear": lambda op, rope: [operations.Flatten()],
    "LinearToConv3d": lambda op, rope: [operations.Reshape((-1, op.in_channels, *op.kernel_size))],
    "PermuteForRope": lambda op, rope: [rope(op)],
    "VisionFuseAndPermuteForRope": lambda op, rope: [rope(op.permute_op), operations.Concatenate(op.dim)],
    "VisionUnfuseAndPermuteForRope": lambda op, rope: [operations.Split(op.dim), rope(op.permute_op)],
    "ErnieFuseAndSplitTextVisionExperts": lambda op, rope: [
        operations.FuseAndSplitExperts(op.stack_dim, op.concat_dim)
    ],
    "_IdentityOp": lambda op, rope: [],
}
"""epload's operations for one of the library, by the name of its class. The second argument translates a PermuteForRope."""


def _operations(operation: Any, transform: Any, config: Any) -> list[operations.Operation]:
    name = type(operation).__name__
    if name not in _TRANSLATIONS:
        return [operations.UnsupportedOperation(name)]
    return _TRANSLATIONS[name](operation, lambda rope: _rope(rope, transform, config))


def _rope(operation: Any, transform: Any, config: Any) -> operations.Operation:
    if operation.subconfig_key is not None:
        config = getattr(config, operation.subconfig_key, config)
    patterns = transform.source_patterns if len(transform.source_patterns) > 1 else transform.target_patterns
    layers = operation.permute_layer_names
    return operations.PermuteForRope(
        getattr(config, "num_attention_heads", 1),
        operation.inverse,
        tuple(layers is None or any(name in pattern for name in layers) for pattern in patterns),
    )
