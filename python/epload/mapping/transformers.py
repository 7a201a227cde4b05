"""The checkpoint conversions that the transformers library (5.x) declares for a model, as rules of a mapping.

The library's own code renames keys. Its operations run on tensors on meta, each with an :class:`Assembly` as its attribute
``assembly``, which says where each element comes from. An operation that computes values is an error when a tensor needs it.
"""

from __future__ import annotations

import copy
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from collections.abc import Mapping as MappingType
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import chain, count, takewhile
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.utils._python_dispatch import TorchDispatchMode

from epload.core import views
from epload.core.views import Assembly
from epload.errors import ModelMismatch
from epload.mapping.mapping import Convert, Mapping, Rename, apply_renames
from epload.mapping.operations import Operation, TargetShapes, TensorLists
from epload.mapping.wrappers import TRAINED_COPY, strip_wrappers, unwrap
from epload.model.initialization import class_before_fsdp, is_pretrained

_SCALES = "_scale_inv"
"""Appended to a weight's name, the name of its scales in the library's fp8."""
_ROTARY = re.compile("rotary_emb(eddings)?$")
_WHOLE_WORD = r"(?!\w)"
SUPPORTED = ("5.19", "5.24")
"""The oldest and the newest version of transformers that epload is tested with."""
_aten = torch.ops.aten
_KEEP_ORDER = {
    _aten.alias.default, _aten.clone.default, _aten.detach.default, _aten.squeeze.default, _aten.squeeze.dim,
    _aten.squeeze.dims, _aten.unsqueeze.default, _aten.view.default, _aten._unsafe_view.default,
    _aten._reshape_alias.default,
}  # fmt: skip
"""Operations whose results have the same elements in the same order, perhaps in another shape."""
_SYMBOLIC: dict[Any, Callable[..., Any]] = {
    _aten.cat.default: views.concatenate,
    _aten.stack.default: views.stack,
    _aten.transpose.int: views.transpose,
    _aten.t.default: lambda source, _: views.transpose(source, 0, -1),
    _aten.permute.default: views.permute,
    _aten.select.int: lambda source, dim, index: views.unstack(source, dim)[index],
    _aten.unbind.int: views.unstack,
}
_SPLITS = {_aten.split.Tensor, _aten.split_with_sizes.default}


@contextmanager
def declarations() -> Iterator[None]:
    """A context that asks the library for what it declares of a model. Raises ModelMismatch if this version of it lacks that."""
    try:
        yield
    except (ImportError, AttributeError) as error:
        import transformers

        raise ModelMismatch(
            f"transformers {transformers.__version__} does not declare the conversions of its models as versions {SUPPORTED[0]} "
            f"to {SUPPORTED[1]} do ({error}); install one of these, or try a mapping, such as mapping=epload.Mapping() for a "
            "checkpoint with the model's own names"
        ) from error


@declarations()
def from_transformers(model: Any) -> Mapping:
    """Returns the conversion that the library declares for a transformers model without wrappers, whatever its architecture.

    Raises:
        ModelMismatch: the placement of a parameter is not where the library puts its elements; or a version of the library that
            declares no conversions.
    """
    from transformers import PreTrainedModel
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter

    if not isinstance(model, PreTrainedModel):  # a single layer, for which nothing is declared
        return Mapping()
    if any((kind.__module__, kind.__name__) == ("transformers.modeling_layers", "MtpModel") for kind in type(model).__mro__):
        raise ModelMismatch(
            "an MtpModel has those of a checkpoint's layers that come after the main model's, which only the library selects and "
            "renumbers, in MtpModel.from_pretrained(main_model); pass a mapping that does so, or names_from="
        )
    modules = list(model.named_modules())
    transforms = get_model_conversion_mapping(_stand_in_for(model))
    converters = [transform for transform in transforms if isinstance(transform, WeightConverter)]
    _check_tensor_parallel(model, converters)
    unexpected, missing = _ignored_patterns(model, modules)
    names = "\n".join(name for name, _ in model.named_parameters())
    return Mapping(
        tuple(rename_of(transform) for transform in transforms if transform not in converters),
        tuple(chain.from_iterable(_with_scales(converter, model, names) for converter in converters)),
        model.base_model_prefix,
        tuple((source, copy) for copy, source in (getattr(model, "all_tied_weights_keys", None) or {}).items()),
        required=False,
        ignore_unexpected=unexpected,
        ignore_missing=missing,
    )


def check_declared_ties(model: Any, index: MappingType[str, int]) -> None:
    """Raises ModelMismatch if a model of the library has one parameter under two names, and its classes do not tie these: of a
    checkpoint that has it once, ``from_pretrained`` initializes the other anew.

    Args:
        index: the parameters' numbers by their names.
    """
    inner, aliases, _ = unwrap(model, index)
    aliases = (*aliases, TRAINED_COPY)
    if len({*index.values()}) == len(index) or not is_pretrained(type(inner)):
        return
    declared = [
        f"{path}.{pattern}" if path else pattern
        for path, module in inner.named_modules()
        if getattr(getattr(module, "config", None), "tie_word_embeddings", False)  # else the library ties nothing
        for pattern in getattr(module, "_tied_weights_keys", None) or ()
    ]
    names: dict[int, list[str]] = defaultdict(list)
    for name, number in zip(apply_renames(aliases, [*index]), index.values(), strict=True):
        if not any(re.search(pattern, name) for pattern in declared):
            names[number].append(name)
    for undeclared in names.values():
        if len(undeclared) > 1:
            raise ModelMismatch(
                f"{undeclared[0]} and {undeclared[1]} are one parameter, which {type(inner).__name__} does not declare, so that "
                "from_pretrained would initialize the second anew; give it a copy, or declare it in _tied_weights_keys"
            )


def checkpoint_form(
    model: Any, tensors: MappingType[str, tuple[torch.dtype, tuple[int, ...]]]
) -> tuple[list[str], list[tuple[int, ...]]]:
    """Returns names and shapes of the tensors in the checkpoints that the library saves of a model, whose tensors have these
    dtypes and shapes by their names without wrappers.

    Raises:
        ModelMismatch: the blocks of fp8 weights reach across what are separate tensors in a checkpoint.
    """
    from transformers.core_model_loading import revert_weight_conversion

    stand_in = _stand_in_for(model)

    def saved_of(state: dict[str, Tensor]) -> dict[str, tuple[int, ...]]:
        # Some conversions depend on the shape of the model's tensor.
        vars(stand_in)["get_parameter"] = state.__getitem__
        return {name: tuple(tensor.shape) for name, tensor in revert_weight_conversion(stand_in, state).items()}

    state = {name: torch.empty(shape, dtype=dtype, device="meta") for name, (dtype, shape) in tensors.items()}
    scales = {name: state.pop(name + _SCALES) for name in tensors if name + _SCALES in tensors}
    saved = saved_of(state)
    for weight in {(name.rpartition(".")[2], state[name].shape): name for name in scales}.values():
        _check_blocks(model, weight, state[weight].shape, scales[weight].shape, saved_of({weight: state[weight]}))
    saved |= {name + _SCALES: shape for name, shape in saved_of(scales).items()}  # which are divided as their weights
    return list(saved), list(saved.values())


def _check_blocks(
    model: Any, weight: str, shape: tuple[int, ...], scales: tuple[int, ...], parts: MappingType[str, tuple[int, ...]]
) -> None:
    """Raises ModelMismatch if a weight is divided inside of a block; parts smaller than a block may have a scale each."""
    declared = getattr(model.config, "quantization_config", None) or {}
    declared = declared.to_dict() if hasattr(declared, "to_dict") else declared
    block = tuple(declared.get("weight_block_size") or shape[-2:])
    dims = list(zip(shape[-2:], block, (1, 1, *scales)[-2:], strict=True))
    for part in parts.values():
        divided = [(own, *dim) for own, dim in zip(part[-2:], dims, strict=True) if own != dim[0]]
        if any(own % size and own * count != whole for own, whole, size, count in divided):
            raise ModelMismatch(
                f"{weight} of shape {list(shape)} has fp8 blocks of {' x '.join(map(str, block))}, which reach across the "
                f"parts of shape {list(part)} that a checkpoint has of it; save or send the weights before they are quantized"
            )


def _check_tensor_parallel(model: Any, converters: Iterable[Any]) -> None:
    """Raises ModelMismatch for a fused matrix whose plan is "colwise". The library divides what is stored, where gate and up
    alternate, and then takes them apart on each rank, which then has both of some rows. Its placement says that a rank has
    consecutive rows of the matrix, such as the whole gate."""
    fused = [
        (converter.target_patterns[0], converter.operations[-1].dim)
        for converter in converters
        if type(converter.operations[-1]).__name__ == "Interleave"
    ]
    for name, parameter in model.named_parameters() if fused else ():
        for target, dim in fused:
            if name.endswith(target) and isinstance(parameter, DTensor):
                mesh = parameter.device_mesh
                axes = zip(mesh.mesh_dim_names or (), mesh.shape, parameter.placements, strict=False)
                if any(axis == "tp" and size > 1 and placement == Shard(dim) for axis, size, placement in axes):
                    raise ModelMismatch(
                        f"{name} is divided by {Shard(dim)!r}, which gives a rank consecutive rows, but its module expects gate "
                        'and up of the same rows on each rank: change "colwise" to "packed_colwise" in the tp_plan of '
                        "DistributedConfig, or divide experts by ep_size"
                    )


def _ignored_patterns(model: Any, modules: Iterable[tuple[str, Any]]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Returns patterns of unexpected and of missing keys that are no error: those that the library does not report, as in its
    ``_adjust_missing_and_unexpected_keys``, and scales of activations, without which it loads a checkpoint, too. Sorted, because
    ranks compare mappings by their text."""
    unexpected = set(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())
    # Of fp8 checkpoints, for engines that quantize activations, or what they keep of them, by these.
    unexpected.add(r"\.(activation|input|[kqv])_scale$")
    missing = set(getattr(model, "_keys_to_ignore_on_load_missing", None) or ())
    for name, module in modules:
        buffers = module._buffers
        if "inv_freq" in buffers and (match := _ROTARY.search(name)):
            unexpected.add(rf"{match[0]}\.inv_freq")  # one per layer in old checkpoints, one per model now
        if any(buffer.endswith("position_ids") for buffer in buffers):
            unexpected.add(r"(^|\.)position_ids$")  # persistent in old checkpoints
    return tuple(sorted(unexpected)), tuple(sorted(missing))


def _stand_in_for(model: nn.Module) -> Any:
    """Returns a stand-in for a model, with the original classes, by which the library looks up declarations, and which
    ``fully_shard`` replaces; its modules have their paths without wrappers."""
    from transformers import PreTrainedModel

    modules = list(model.named_modules())
    aliases = (*unwrap(model, [f"{name}." for name, _ in modules])[1], TRAINED_COPY, Rename(r"\.original_module\.", "."))
    stand_ins = dict[str, Any]()
    for name, module in modules:
        if not isinstance(module, PreTrainedModel):
            continue
        original: Any = class_before_fsdp(type(module))
        stand_in = original.__new__(original)
        vars(stand_in).update(config=module.config, _modules={}, _parameters={}, _buffers={})
        stand_ins.setdefault(strip_wrappers(f"{name}.", aliases).removesuffix("."), stand_in)
    whole = stand_ins[""]
    vars(whole)["named_modules"] = lambda: iter(stand_ins.items())
    return whole


def rename_of(transform: Any) -> Rename:
    """Returns the rule for a ``WeightRenaming``, which the library's own code applies."""
    offset = getattr(transform, "offset", 0)
    identity = type(transform).__name__, transform.target_patterns, offset, _scopes(transform)
    return Rename(transform.compiled_sources.pattern, repr(identity), function=partial(_rename, transform))


def _rename(transform: Any, names: Sequence[str]) -> list[str]:
    transform = copy.copy(transform)  # it may note what it has matched
    renamed = {name: transform.rename_source_key(name)[0] for name in sorted(names)}
    frequencies = {new: name for name, new in reversed(renamed.items()) if new != name and new.endswith(".inv_freq")}
    # One per layer in old checkpoints of ESM, of which the library takes the first.
    return [name if frequencies.get(renamed[name], name) != name else renamed[name] for name in names]


def track(assembly: Assembly) -> Any:
    """Returns a tensor on meta that stands for an assembly."""
    tensor: Any = torch.empty(assembly.shape, device="meta")
    tensor.assembly = assembly
    return tensor


class ElementTracker(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Gives the results of operations their assemblies. Raises ValueError for operations that compute values."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in _KEEP_ORDER | _SYMBOLIC.keys() | _SPLITS | {_aten.slice.Tensor}:
            raise ValueError(f"it computes values ({func}), which a mapping cannot do")
        result: Any = func(*args, **(kwargs or {}))
        first, *options = args
        source: Any = [tensor.assembly for tensor in first] if isinstance(first, list) else first.assembly
        if func in _KEEP_ORDER:
            result.assembly = views.reshape(source, result.shape)
        elif func is _aten.slice.Tensor:
            result.assembly = _slice(result, source, *options)
        elif func in _SPLITS:
            dim = options[1] if len(options) > 1 else 0
            _set_assemblies(result, views.split(source, dim, [part.shape[dim] for part in result]))
        else:
            _set_assemblies(result, _SYMBOLIC[func](source, *(options or [0])))
        return result


def _set_assemblies(results: Any, assemblies: Any) -> None:
    pairs = [(results, assemblies)] if isinstance(assemblies, Assembly) else zip(results, assemblies, strict=True)
    for tensor, assembly in pairs:
        tensor.assembly = assembly


def _slice(
    result: Tensor, source: Assembly, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Assembly:
    if step != 1:
        raise ValueError(f"it takes every {step}th element, which a mapping cannot do")
    first, length = slice(start, end).indices(source.shape[dim])[0], result.shape[dim]
    return views.split(source, dim, [first, length, source.shape[dim] - first - length])[1]


@torch.inference_mode(False)  # where composite operations arrive in one piece
def _run_converter(converter: Any, config: Any, inputs: TensorLists, targets: TargetShapes) -> TensorLists:
    """Runs the operations of a ``WeightConverter``. Raises ValueError if one computes values, or cannot be applied."""
    sources, patterns = converter.source_patterns, converter.target_patterns
    parameters = {
        pattern: torch.empty(shape, device="meta")
        for pattern, shape in zip(patterns, targets.values(), strict=True)
        if shape is not None
    }

    def get_parameter(name: str) -> Tensor:
        if name not in parameters:
            raise ValueError(f"it needs the shapes of all of {', '.join(targets)}, but the model lacks some of them")
        return parameters[name]

    tracked = zip(sources, ([track(tensor) for tensor in tensors] for tensors in inputs), strict=True)
    tensors: dict[str, Any] = {pattern: tensors for pattern, tensors in tracked if tensors}
    for operation in converter.operations:
        try:
            with ElementTracker():
                tensors = operation.convert(
                    tensors, source_patterns=sources, target_patterns=patterns, full_layer_name=patterns[0],
                    model=SimpleNamespace(get_parameter=get_parameter), config=config, missing_keys=None,
                )  # fmt: skip
        except Exception as error:
            raise ValueError(
                f"the transformers operation {type(operation).__name__} is not supported: {error}; load the model once with "
                "from_pretrained, save its state dict, and load that"
            ) from error
    return [[tensor.assembly for tensor in _output(tensors, pattern)] for pattern in patterns]


def _output(tensors: dict[str, Any], pattern: str) -> Any:
    """Returns the list of tensors that operations have made for a target."""
    if pattern in tensors:
        tensor = tensors[pattern]
        return tensor if isinstance(tensor, list) else [tensor]
    names = (pattern.replace("*", str(i)) for i in count())
    return [tensors[name] for name in takewhile(tensors.__contains__, names)]


def _scopes(transform: Any) -> tuple[str, ...]:
    if getattr(transform, "scope_prefix", None) is None:  # which is new in transformers 5.12
        return ()
    base, scope = (f"{prefix}." if prefix else "" for prefix in (transform.base_model_prefix, transform.scope_prefix))
    return (base + scope, scope)


def _with_scales(converter: Any, model: Any, names: str) -> Iterator[Convert]:
    """Yields the rule for a ``WeightConverter``, and a copy for the scales, if the model keeps fp8 and has them as parameters: as
    the library's ``HfQuantizer.update_weight_conversions``."""
    rule = convert_of(converter, model.config)
    yield rule
    first, *_ = converter.target_patterns
    are_weights = all(pattern.endswith(".weight") for pattern in converter.source_patterns)
    if are_weights and re.search(rf"{first}{_SCALES}$", names, re.MULTILINE):
        sources = tuple(f"{source.removesuffix(_WHOLE_WORD)}{_SCALES}{_WHOLE_WORD}" for source in rule.sources)
        yield replace(rule, sources=sources, targets=tuple(target + _SCALES for target in rule.targets))


def convert_of(converter: Any, config: Any) -> Convert:
    """Returns the rule for a ``WeightConverter`` of a model with this configuration."""
    sources = []
    for pattern in converter.source_patterns:
        # The library adds to a pattern that ends in a word that the word must match whole (not before transformers 5.20).
        whole_word = pattern.replace("*.", r".*\.") + _WHOLE_WORD in converter.compiled_sources.pattern
        sources.append(re.sub(r"\*(?=\.|$)", r"(?P<index>\\d+)", pattern, count=1) + _WHOLE_WORD * whole_word)
    # It expands only \1 and the like; all else is literal.
    literal = (re.sub(r"\\(?!\d)", r"\\\\", pattern.replace("*", "{index}")) for pattern in converter.target_patterns)
    targets = tuple(re.sub(r"\\(\d)", r"\\g<\1>", pattern) for pattern in literal)
    names = [type(operation).__name__ for operation in converter.operations]
    # What permutations depend on besides shapes; the rest of the configuration shows in the shapes of the model.
    heads = [_number_of_heads(part) for part in (config, *vars(config).values())]
    settings = [str(sorted(vars(operation).items(), key=str)) for operation in converter.operations]
    arguments = (*settings, str([*filter(None, heads)]))
    operation = Operation(" + ".join(names), arguments, partial(_run_converter, converter, config))
    return Convert(tuple(sources), targets, (operation,), _scopes(converter))


def _number_of_heads(config: Any) -> Any:
    """Returns that of a configuration or of each of its layers; 0 if it has none."""
    try:
        return getattr(config, "num_attention_heads", 0)
    except RuntimeError:  # as transformers raises if it differs between layers
        return [getattr(layer, "num_attention_heads", 0) for layer in config.per_layer_config]
