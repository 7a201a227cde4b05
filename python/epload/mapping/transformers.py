"""Translates the checkpoint conversions that the transformers library (5.x) declares for a model into epload's rules.

An operation that computes values, or that a later version of the library adds, is an error when a tensor needs it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from collections.abc import Mapping as MappingType
from typing import Any

import torch

from epload.errors import ModelMismatch
from epload.mapping.mapping import Convert, Mapping, Rename
from epload.mapping.operations import (
    COMPUTES_VALUES,
    Concatenate,
    Operation,
    Reshape,
    Split,
    Stack,
    Transpose,
    Unstack,
)
from epload.model.initialization import class_before_fsdp

SUPPORTED = ("5.19", "5.24")
"""The oldest and the newest version of transformers whose renames and operations are known."""
_WHOLE_WORD = r"(?!\w)"


def from_transformers(model: Any) -> Mapping:
    """Returns the conversion that the library declares for a transformers model without wrappers, whatever its architecture."""
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
    """Returns names and shapes of the tensors in the checkpoints that the library saves of a model, whose tensors have these
    dtypes and shapes by their names without wrappers."""
    from transformers.core_model_loading import revert_weight_conversion

    state = {name: torch.empty(shape, dtype=dtype, device="meta") for name, (dtype, shape) in tensors.items()}
    stand_in = _without_fsdp(model.named_modules())
    vars(stand_in)["get_parameter"] = state.__getitem__  # some conversions depend on the shape of the model's tensor
    saved = revert_weight_conversion(stand_in, state)
    return list(saved), [tuple(tensor.shape) for tensor in saved.values()]


def _ignored_patterns(model: Any, modules: Iterable[tuple[str, Any]]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Returns patterns of unexpected and of missing keys that the library does not report, as in its
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
    """Returns a stand-in for a model, given by its ``named_modules()``, with the original classes, by which the library looks up
    declarations, and which ``fully_shard`` replaces."""
    from transformers import PreTrainedModel

    stand_ins = []
    for name, module in modules:
        if isinstance(module, PreTrainedModel):
            original: Any = class_before_fsdp(type(module))
            stand_ins.append((name, original.__new__(original)))
            vars(stand_ins[-1][1]).update(config=module.config, _modules={}, _parameters={}, _buffers={})
    model = stand_ins[0][1]
    vars(model)["named_modules"] = lambda: iter(stand_ins)
    return model


def _renames(transform: Any) -> list[Rename]:
    """Returns one rename for a transform with any number of patterns; for a group, one for each pair of patterns.

    Raises ModelMismatch: the class of the transform renames keys in a way that epload does not know."""
    scopes = _scopes(transform)
    own = next(cls.__name__ for cls in type(transform).__mro__ if "rename_source_key" in vars(cls))
    if own == "GroupWeightRename":
        # Last to first, so that no rename applies to the result of another; all or none, by the first pattern.
        pairs = list(zip(transform.source_patterns, transform.target_patterns, strict=True))
        first = _as_regex(pairs[0][0], transform)
        return [Rename(_as_regex(a, transform), _template(b), scopes, when=first) for a, b in reversed(pairs)]
    if own == "Inkling2IndexOffsetWeightRename":
        source, target = _as_regex(transform.source_patterns[0], transform), transform.target_patterns[0]
        return [Rename(source, target, scopes, shift=transform.offset)]
    if own == "LayerPairCollapse":  # which has no scopes
        return [Rename(rf"layers\.({a})\.{b}(?=\.|$)", rf"layers.\1.{c}", divide=2) for a, b, c in _LAYER_PAIRS]
    if own != "WeightTransform":
        raise ModelMismatch(
            f"the transformers rename {type(transform).__name__} {_unknown()}; pass mapping=, "
            "with the names and layouts of this checkpoint"
        )
    # The library wraps each pattern in a group of its own; only groups of the pattern that matched are not empty.
    groups = transform.compiled_sources.groupindex.values()
    target = _template(transform.target_patterns[0], lambda n: "".join(rf"\g<{index + n}>" for index in groups))
    return [Rename(transform.compiled_sources.pattern, target, scopes)]


_LAYER_PAIRS = (
    (r"\d*[02468]", "mixer", "self_attn"),
    (r"\d*[13579]", "mixer", "mlp"),
    (r"\d+", "attn_alpha", "lambda_1"),
    (r"\d+", "mlp_alpha", "lambda_2"),
)
"""Index and name of a layer's part where a checkpoint has two layers for one of the model, and its name in the model."""


def _template(target: str, reference: Callable[[int], str] = r"\g<{}>".format) -> str:
    r"""Returns a target for re.sub: the library expands only ``\1`` and the like, all else is literal."""
    return "".join(
        reference(int(piece[1:])) if re.fullmatch(r"\\\d", piece) else piece.replace("\\", r"\\")
        for piece in re.split(r"(\\\d)", target)
    )


def _scopes(transform: Any) -> tuple[str, ...]:
    if transform.scope_prefix is None:
        return ()
    base, scope = (f"{prefix}." if prefix else "" for prefix in (transform.base_model_prefix, transform.scope_prefix))
    return (base + scope, scope)


def _as_regex(pattern: str, transform: Any) -> str:
    """Compiles a pattern of a transform as the library does: a star matches any text up to a dot, and a final word must match
    whole (not before transformers 5.20)."""
    pattern = pattern.replace("*.", r".*\.")
    return pattern + _WHOLE_WORD * (pattern + _WHOLE_WORD in transform.compiled_sources.pattern)


def _convert(transform: Any, config: Any) -> Convert:
    sources = []
    for pattern in transform.source_patterns:
        whole_word = _WHOLE_WORD * _as_regex(pattern, transform).endswith(_WHOLE_WORD)
        sources.append(re.sub(r"\*(?=\.|$)", r"(?P<index>\\d+)", pattern, count=1) + whole_word)
    targets = tuple(_template(pattern).replace("*", "{index}") for pattern in transform.target_patterns)
    steps = [step for operation in transform.operations for step in _operations(operation, transform, config)]
    return Convert(tuple(sources), targets, tuple(steps), _scopes(transform))


_TRANSLATIONS: dict[str, Callable[[Any, Callable[[Any], Operation]], list[Operation]]] = {
    "MergeModulelist": lambda op, _: [Stack(op.dim)],
    "SplitModulelist": lambda op, _: [Unstack(op.dim)],
    "Concatenate": lambda op, _: [Concatenate(op.dim)],
    "Chunk": lambda op, _: [Split(op.dim)],
    "Split": lambda op, _: [Split(op.dim, "targets")],
    "Transpose": lambda op, _: [Transpose(op.dim0, op.dim1, unless_fits=op.check_dims)],
    "LinearToConv3d": lambda op, _: [Reshape((-1, op.in_channels, *op.kernel_size))],
    "Conv3dToLinear": lambda op, _: [Operation("Conv3dToLinear")],
    "Interleave": lambda op, _: [Operation("Interleave", (op.dim, op.inverse))],
    "PermuteForRope": lambda op, rope: [rope(op)],
    "VisionFuseAndPermuteForRope": lambda op, rope: [rope(op.permute_op), Concatenate(op.dim)],
    "VisionUnfuseAndPermuteForRope": lambda op, rope: [Split(op.dim), rope(op.permute_op)],
    "ErnieFuseAndSplitTextVisionExperts": lambda op, _: [
        Operation("ErnieFuseAndSplitTextVisionExperts", (op.stack_dim, op.concat_dim))
    ],
    "Inkling2LoopDequantizeExperts": lambda op, _: [Operation("Dequantize", ("Inkling2LoopDequantizeExperts",))],
    "Inkling2LoopMergeMessageQueries": lambda op, _: [Operation("Inkling2LoopMergeMessageQueries")],
    "_IdentityOp": lambda op, _: [],
}
"""epload's operations for one of the library, by the name of its class. The second argument translates a PermuteForRope."""


def _operations(operation: Any, transform: Any, config: Any) -> list[Operation]:
    from transformers import core_model_loading as library

    name = type(operation).__name__
    if getattr(library, name, None) is type(operation):
        if name.startswith("Inkling2") and getattr(operation, "inverse", False):
            return [_unsupported(name, "is supported only as it loads, not in reverse")]
        if name == "Inkling2UnpadVocab":
            return [Operation("Truncate", (config.get_text_config().unpadded_vocab_size,))]
        divides_by_config = name == "Chunk" and operation.num_shards_attribute is not None
        if name in _TRANSLATIONS and not divides_by_config:
            return _TRANSLATIONS[name](operation, lambda rope: _rope(rope, transform, config))
    is_known = type(operation).__module__.startswith("transformers.") and _minor(_installed()) <= _minor(SUPPORTED[1])
    return [_unsupported(name, COMPUTES_VALUES if is_known else _unknown())]


def _unsupported(name: str, reason: str) -> Operation:
    return Operation("Unsupported", (name, reason))


def _installed() -> str:
    import transformers

    return str(transformers.__version__)


def _minor(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")[:2]))


def _unknown() -> str:
    return f"is unknown: epload knows those of transformers {' to '.join(SUPPORTED)}, and {_installed()} is installed"


def _rope(operation: Any, transform: Any, config: Any) -> Operation:
    if operation.subconfig_key is not None:
        config = getattr(config, operation.subconfig_key, config)
    undivided = operation is transform.operations[0] or len(transform.source_patterns) > 1
    patterns = transform.source_patterns if undivided else transform.target_patterns
    layers = operation.permute_layer_names
    applies = tuple(layers is None or any(name in pattern for name in layers) for pattern in patterns)
    heads = getattr(config, "num_attention_heads", 1)
    return Operation("PermuteForRope", (heads, operation.inverse, applies))
