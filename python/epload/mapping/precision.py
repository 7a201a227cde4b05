"""The dtypes that transformers and diffusers give the tensors of their models.

``from_pretrained`` of transformers keeps in float32 what a class lists in ``_keep_in_fp32_modules`` (for float16) and
``_keep_in_fp32_modules_strict`` (for bfloat16 too), such as the routers and correction biases of Mixture-of-Experts models, and
leaves alone the tensors to which a class gives a dtype of its own. That of diffusers keeps in float32 all tensors with a name
from ``_keep_in_fp32_modules`` in their path, and gives all others the dtype, buffers too.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import nn

from epload.checkpoint.quantization import quantized_with
from epload.core import dtypes
from epload.core.patterns import check_expressions
from epload.core.pieces import Metadata
from epload.errors import ModelMismatch
from epload.mapping.mapping import apply_renames
from epload.mapping.place import Place, place
from epload.mapping.resolve import from_model
from epload.mapping.transformers import declarations
from epload.mapping.wrappers import strip_wrappers, unwrap
from epload.model.initialization import (
    diffusers_class,
    is_diffusers,
    is_pretrained,
    new_on_meta,
    preserve_generators,
)
from epload.model.modules import Modules
from epload.model.targets import Targets
from epload.observe.render import list_keys

DTypes = torch.dtype | Mapping[str, torch.dtype] | None
"""Dtypes of parameters, as :data:`AnyDTypes`, without names of dtypes."""
AnyDTypes = dtypes.DType | Mapping[str, dtypes.DType] | None
"""A dtype for all floating-point parameters, or dtypes by regular expression, searched for in the names; the first match counts.
A dtype for a transformers model means what ``from_pretrained(dtype=)`` makes of it; what a dict names gets that dtype exactly."""


def requested_dtypes(passed: AnyDTypes) -> DTypes:
    """Returns the dtypes that a caller has passed as ``dtype``. Raises ValueError or TypeError if one is none."""
    if not isinstance(passed, Mapping):
        return None if passed is None else dtypes.requested("dtype", passed)
    check_expressions("the keys of dtype", passed)
    return {pattern: dtypes.requested(f"dtype[{pattern!r}]", dtype) for pattern, dtype in passed.items()}


def set_dtypes(model: nn.Module, modules: Modules, targets: Targets, requested: DTypes, as_pretrained: bool = True) -> None:
    """Sets in ``targets`` the dtypes that tensors on meta get and, in a model that has some, the buffers with storage of a class
    whose ``from_pretrained`` gives them a dtype. Notes which tensors that keeps in float32, and which of them have storage in a
    narrower dtype.

    Raises:
        ValueError: a parameter has storage in another dtype than the requested one.
        ModelMismatch: FSDP2 would refuse the resulting mix of dtypes in the first forward.
    """
    assigned, in_fp32 = _pretrained_dtypes(model, modules, targets, requested) if as_pretrained else ({}, set())
    if requested is not None:
        shapes = [targets.layouts[layout].shape for layout in targets.layout]
        scales = quantized_with(targets.names, targets.dtypes, shapes)  # to round them would change the weights
        for number, (name, tensor) in enumerate(zip(targets.names, targets.tensors, strict=True)):
            if name in scales:
                assigned.pop(number, None)
            elif number not in in_fp32 and isinstance(tensor, nn.Parameter) and dtypes.is_wide(tensor.dtype):
                dtype = assigned.setdefault(number, _requested_dtype(name, requested) or tensor.dtype)
                if not tensor.is_meta and tensor.dtype != dtype:
                    raise ValueError(
                        f"dtype={dtype} applies to parameters on meta, but {name} already has storage of {tensor.dtype}; "
                        "convert the model first"
                    )
    buffers = _own_buffers(modules) if targets.has_meta and not targets.has_aliases else set()
    for number, dtype in assigned.items():
        if (tensor := targets.tensors[number]).is_meta or id(tensor) in buffers:
            targets.dtypes[number] = dtype
    in_fp32 &= assigned.keys()
    for number in sorted(in_fp32):
        is_kept = targets.dtypes[number] == torch.float32
        (targets.kept_in_fp32 if is_kept else targets.below_fp32).append(targets.names[number])
    _check_fsdp_groups(modules, targets, {number for number in in_fp32 if targets.tensors[number].is_meta})


def check_patterns(requested: DTypes, targets: Targets) -> None:
    """Raises ValueError if a pattern of ``dtype=`` matches no parameter."""
    if not isinstance(requested, Mapping):
        return
    named = zip(targets.names, targets.tensors, strict=True)
    names = [name for name, tensor in named if isinstance(tensor, nn.Parameter) and dtypes.is_wide(tensor.dtype)]
    for pattern in requested:
        if not any(re.search(pattern, name) for name in names):
            raise ValueError(
                f"dtype: the pattern {pattern!r} matches no floating-point parameter of the model; buffers keep their dtype, "
                "and a tied weight has the name under which the model has it first"
            )


def left_in_fp32(model: nn.Module, names: Collection[str], dtype: torch.dtype, by_class: bool = True) -> set[str]:
    """Returns which of a model's tensors ``from_pretrained`` does not round to this dtype: those that it keeps in float32, and if
    ``by_class`` those that their class makes in float32 by itself, as with ``nn.Linear(..., dtype=torch.float32)``."""
    in_fp32: set[str] = set()
    makes = by_class and dtype.itemsize < 4
    for module, pairs in _pretrained_models(model, Modules(model), names):
        is_kept = _kept_names(module, dtype)
        in_fp32 |= {name for inner, name in pairs if is_kept(inner)}
        if makes and is_pretrained(type(module)) and (new := new_on_meta(module, dtype=dtype)) is not None:
            made = {name for name, tensor in new.state_dict().items() if tensor.dtype == torch.float32}
            in_fp32 |= {name for inner, name in pairs if inner in made}
    return in_fp32


def model_by_config(
    config: Mapping[str, Any], manifest: Metadata, dtype: torch.dtype
) -> tuple[nn.Module, list[tuple[Place, ...]]]:
    """Returns the model on meta that a checkpoint's ``config.json`` names, a class of transformers or diffusers, and the places
    of the checkpoint's tensors in it. Code next to the configuration is not run.

    Raises ValueError if the class is unknown, or the checkpoint does not fit it."""
    try:
        with torch.device("meta"), preserve_generators():
            model = _from_config(config, dtype)
        kind = type(model)
        shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
        placed = place(from_model(model), manifest.names, manifest.shapes, shapes, mismatches=[])
        if not any(placed):
            raise ValueError(f"no tensor of the checkpoint fits {kind.__name__}")
    except Exception as error:
        raise ValueError(f"{type(error).__name__}: {str(error)[:200]}") from error
    return model, placed


def _from_config(config: Mapping[str, Any], dtype: torch.dtype) -> nn.Module:
    if (kind := diffusers_class(config)) is not None:
        made: nn.Module = kind.from_config(dict(config))
        return made
    import transformers

    kind = getattr(transformers, config["architectures"][0])
    decoded = kind.config_class._decode_special_floats(dict(config))  # such as {"__float__": "Infinity"}
    # The file may name a kernel, which would be downloaded.
    made = kind._from_config(kind.config_class.from_dict(decoded), dtype=dtype, attn_implementation="eager")
    return made


def below_fp32_warning(targets: Targets) -> str:
    """Returns a warning that names what has storage narrower than the float32 that ``from_pretrained`` keeps it in, if any."""
    if not (names := targets.below_fp32):
        return ""
    narrow = dtypes.name(targets.dtypes[targets.index[names[0]]])
    return (
        f"from_pretrained keeps {list_keys(names)} in torch.float32, but this model has storage in {narrow} for them, so that "
        "their values are rounded; load into a model on meta, or convert them first"
    )


def _own_buffers(modules: Modules) -> set[int]:
    """Returns the ids of the plain buffers with storage, which ``init_empty_weights`` leaves beside parameters on meta."""
    buffers = (buffer for module in modules.unique for buffer in module._buffers.values())
    return {id(buffer) for buffer in buffers if type(buffer) is torch.Tensor and not buffer.is_meta}


def _requested_dtype(name: str, requested: DTypes) -> torch.dtype | None:
    if isinstance(requested, Mapping):
        return next((dtype for pattern, dtype in requested.items() if re.search(pattern, name)), None)
    return requested


def _kept_names(pretrained: Any, dtype: torch.dtype) -> Callable[[str], object]:
    """Returns a search in names for what a model keeps in float32 if it has this dtype."""
    if is_diffusers(type(pretrained)):
        kept = pretrained._keep_in_fp32_modules or ()
        in_fp32 = {kept} if isinstance(kept, str) else {*kept}
        return lambda name: not in_fp32.isdisjoint(name.split("."))
    patterns = [pattern.replace("*", ".*") for pattern in sorted(pretrained._get_dtype_plan(dtype))]
    return re.compile("|".join(patterns) or r"(?!)").search


def _pretrained_dtypes(
    model: nn.Module, modules: Modules, targets: Targets, requested: DTypes
) -> tuple[dict[int, torch.dtype], set[int]]:
    """Returns the dtypes that ``from_pretrained`` gives targets of models of the two libraries, and the targets that it keeps in
    float32; not those that a dict of dtypes names."""
    assigned: dict[int, torch.dtype] = {}
    in_fp32: set[int] = set()
    for module, pairs in _pretrained_models(model, modules, targets.index):
        in_diffusers = is_diffusers(type(module))
        # What bfloat16 keeps in float32, float16 keeps too. A model of diffusers has no dtype but the requested one.
        with declarations():
            if requested is None and (in_diffusers or not module._get_dtype_plan(torch.float16)):
                continue
        members = [(inner, name, targets.index[name]) for inner, name in pairs]
        members = [member for member in members if dtypes.is_wide(targets.tensors[member[2]].dtype)]
        sizes: Counter[torch.dtype] = Counter()
        for *_, number in members:
            if isinstance(tensor := targets.tensors[number], nn.Parameter):
                sizes[tensor.dtype] += tensor.numel()
        if not sizes:
            continue
        own = sizes.most_common(1)[0][0]
        dtype = requested if isinstance(requested, torch.dtype) else own
        new = new_on_meta(module, dtype=dtype) if dtype != own and not in_diffusers else None
        new_dtypes = {name: tensor.dtype for name, tensor in new.state_dict().items()} if new is not None else {}
        is_kept = _kept_names(module, dtype)
        for inner, name, number in members:
            own_dtype = targets.tensors[number].dtype
            if isinstance(requested, Mapping) and _requested_dtype(name, requested):
                continue
            if is_kept(inner):
                assigned[number] = torch.float32
                in_fp32.add(number)
            elif in_diffusers and dtype == requested:
                assigned[number] = dtype
            elif inner in new_dtypes or own_dtype != own:
                assigned[number] = new_dtypes.get(inner, own_dtype)
    return assigned, in_fp32


def _pretrained_models(model: nn.Module, modules: Modules, names: Collection[str]) -> list[tuple[Any, list[tuple[str, str]]]]:
    """Returns the models of transformers and diffusers that are not inside another one, each with its tensors' names inside it
    and in the whole model: of tied ones the name that the library loads, and for copies that PEFT trains inside the name of the
    original."""
    if not any(map(_is_from_library, modules.classes)):
        return []
    inner, aliases, copies = unwrap(model, names)
    originals = {copied: original for original, copied in copies}
    inside = [originals.get(name, name) for name in apply_renames(aliases, names)]
    parts: list[tuple[Any, list[tuple[str, str]]]] = []
    outermost: list[str] = []
    for path, module in Modules(inner).named:
        if not _is_from_library(type(module)) or path.startswith(tuple(outermost)):
            continue
        outermost.append(path)
        prefix = strip_wrappers(path, aliases)
        tied = getattr(module, "all_tied_weights_keys", None) or {}
        pairs = [(n.removeprefix(prefix), name) for n, name in zip(inside, names, strict=True) if n.startswith(prefix)]
        parts.append((module, [pair for pair in pairs if pair[0] not in tied]))
    return parts


def _is_from_library(kind: type[nn.Module]) -> bool:
    return is_pretrained(kind) or is_diffusers(kind)


def _check_fsdp_groups(modules: Modules, targets: Targets, in_fp32: Collection[int]) -> None:
    """Raises ModelMismatch for a group of FSDP parameters that has one of these targets and trainable ones of another dtype."""
    number_of = {id(tensor): number for number, tensor in enumerate(targets.tensors)} if in_fp32 else {}
    for group in modules.fsdp_groups if in_fp32 else ():
        numbers = [number_of.get(id(p.sharded_param)) for p in group.fsdp_params if p.sharded_param.requires_grad]
        members = [number for number in numbers if number is not None]
        odd = next((number for number in members if number in in_fp32), None)
        other = next((number for number in members if targets.dtypes[number] != torch.float32), None)
        if odd is None or other is None:
            continue
        name, narrow = targets.names[odd], targets.dtypes[other]
        pattern = re.escape(".".join(name.split(".")[-2:])) + "$"
        raise ModelMismatch(
            f"from_pretrained keeps {name} in torch.float32, but fully_shard has grouped it with {targets.names[other]}, which "
            f"is {narrow}, and FSDP2 needs one dtype for all trainable parameters of a group. Call fully_shard on "
            f"{name.rpartition('.')[0] or 'its module'} before the module around it, so that it is a group of its own, freeze "
            f"it, or round it: dtype={{{pattern!r}: {narrow}}}"
        )
