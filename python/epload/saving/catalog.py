"""The checkpoint tensors that a model is saved or sent as: their names, and where each is in the model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from functools import reduce
from itertools import chain
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from epload.checkpoint.base import Checkpoint
from epload.checkpoint.manifest import Manifest
from epload.core.dtypes import FP8, is_wide
from epload.core.dtypes import name as dtype_name
from epload.core.placement import row_major_strides
from epload.core.views import Shape, View
from epload.errors import ModelMismatch
from epload.mapping.mapping import AnyMapping, Mapping, apply_renames, ignored_keys
from epload.mapping.place import Place, match_conversions, place
from epload.mapping.resolve import resolve_mapping
from epload.mapping.transformers import checkpoint_form
from epload.mapping.wrappers import TRAINED_COPY, is_from_package, names_added_by_adapters, unwrap
from epload.model.flat_state import FlatState
from epload.model.initialization import is_diffusers, is_pretrained, new_on_meta
from epload.model.megatron import MegatronChunks
from epload.model.targets import Targets
from epload.observe.render import list_keys
from epload.saving.megatron import megatron_catalog

_Region = tuple[int, View]
"""The number of a target, and a view that fills a box of it."""


def check_names(model: nn.Module, mapping: AnyMapping, names_from: Any) -> None:
    """Raises ValueError if the names cannot be derived from the mapping."""
    inner: Any = unwrap(model, ())[0]
    wrapped: Any = getattr(inner, "module", None)
    if is_from_package(wrapped, "transformers") and not isinstance(mapping, Mapping) and names_from is None:
        tensors = ({*map(id, chain(part.parameters(), part.buffers()))} for part in (inner, wrapped))
        if next(tensors) == next(tensors):
            raise ValueError(
                f"a {type(inner).__name__} has a {type(wrapped).__name__} as its module, whose names and configuration a "
                "checkpoint needs; pass this module, or mapping=epload.Mapping() for the names of what is around it"
            )
    if isinstance(mapping, Mapping) and mapping.only:
        raise ValueError(
            "expected a mapping without only=, which is for loads: a save has all tensors, a WeightSender its own only="
        )
    own_rules = isinstance(mapping, Mapping) and (mapping.renames or mapping.converts)
    if own_rules and names_from is None and not isinstance(model, MegatronChunks):
        raise ValueError(
            "the checkpoint names of the model's tensors cannot be derived from a mapping of your own: pass names_from=, "
            "the path of a checkpoint that has them, or mapping='auto'"
        )


def catalog(
    model: nn.Module, targets: Targets, mapping: AnyMapping, names_from: Any
) -> tuple[Manifest, list[tuple[Place, ...]], list[Shape], str]:
    """Returns the manifest of a model's tensors as its checkpoints have them without padding, the places of each in the model,
    the shapes of the checkpoint's tensors with their padding, which is rows of zeros at the end, and the rules by which all this
    follows, as a text that is equal on ranks that write or send the same.

    Args:
        targets: of the model.
        mapping: how checkpoint names become regions of the model's tensors; read here in reverse.
        names_from: a checkpoint whose names and shapes are taken; None to derive them from the mapping.

    Raises:
        ModelMismatch: a tensor of the model, or a part of one, is in no checkpoint tensor; or only transformers knows how a
            quantized model is saved.
        ValueError: the names cannot be derived from the mapping.
    """
    check_names(model, mapping, names_from)
    if isinstance(model, MegatronChunks):
        return *megatron_catalog(model, mapping, names_from), ""
    _check_quantizer(unwrap(model, ())[0])
    if isinstance(model, FlatState):
        _check_gathered(targets)
    dtypes = {name: targets.dtypes[number] for name, number in targets.index.items()}
    added = names_added_by_adapters(model, targets.index)
    shapes = {name: shape for name, shape in targets.shapes.items() if name not in added}
    if names_from is not None:
        like = Checkpoint.open(names_from).manifest
        names, sizes = list(like.names), list(like.shapes)
        rules = _without_copies(resolve_mapping(mapping, model, targets.index, names))
    else:
        rules = _without_copies(resolve_mapping(mapping, model, targets.index))
        own, names = _bare_names(rules, targets, shapes)
        sizes = [shapes[name] for name in own]
        inner = unwrap(model, targets.index)[0]
        _check_stacks(inner, dict(zip(names, sizes, strict=True)))
        if (rules.renames or rules.converts) and not is_diffusers(type(inner)):  # whose renames are for old checkpoints
            kinds = [(dtypes[name], shapes[name]) for name in own]
            names, sizes = checkpoint_form(inner, dict(zip(names, kinds, strict=True)))
    placed = place(rules, names, sizes, shapes)
    regions = _distinct_regions(placed, targets, rules)
    _check_covered(regions, targets)
    if names_from is not None or not {*FP8}.isdisjoint(targets.dtypes):
        _check_complete(rules, names, regions, targets, added)
    truncated = _truncated(rules, names)
    used = [i for i, of_tensor in enumerate(regions) if of_tensor]
    unpadded = [_without_padding(sizes[i], placed[i]) if i in truncated else sizes[i] for i in used]
    for i, shape in zip(used, unpadded, strict=True):
        _check_whole(names[i], shape, regions[i], targets)
    of_tensors = tuple(_common_dtype(names[i], {dtypes[target] for target, _ in placed[i]}) for i in used)
    manifest = Manifest(tuple(names[i] for i in used), tuple(unpadded), of_tensors, "the model")
    text = repr(replace(rules, ties=(), aliases=()))  # ranks may have some of the tied tensors, and other wrappers
    return manifest, [placed[i] for i in used], [sizes[i] for i in used], text


def _check_gathered(targets: Targets) -> None:
    """Raises ModelMismatch for the state dict of a model that DeepSpeed's ZeRO-3 partitions, whose weights have no elements."""
    for name, shape in targets.shapes.items():
        if shape == (0,) and name.endswith("weight"):
            raise ModelMismatch(
                f"{name} has no elements, as in the state dict of a model that DeepSpeed's ZeRO-3 has partitioned; pass the "
                "model, under deepspeed.zero.GatheredParameters(model.parameters())"
            )


def _check_quantizer(model: Any) -> None:
    """Raises ModelMismatch for a model of transformers whose quantized weights are not what its checkpoints have: they may be in
    the layout of a kernel, or no tensors."""
    quantizer = getattr(model, "hf_quantizer", None)
    if quantizer is None or not getattr(model, "is_quantized", False):
        return
    conversions = getattr(quantizer, "get_weight_conversions", list)  # which those of diffusers lack
    serializable = quantizer.is_serializable if isinstance(quantizer.is_serializable, bool) else quantizer.is_serializable()
    if not serializable or "get_state_dict_and_metadata" in vars(type(quantizer)) or conversions():
        raise ModelMismatch(
            f"{type(model).__name__} keeps its weights as {type(quantizer).__name__} has packed them, which only transformers "
            "unpacks; save it with save_pretrained(), or dequantize it first (model.dequantize())"
        )


def _check_stacks(inner: Any, shapes: dict[str, Shape]) -> None:
    """Raises ModelMismatch if a rank has some of the experts that a class of transformers stacks in one tensor, and nothing says
    which: all ranks would be taken to have the same ones.

    ``shapes``: of the model's tensors, by name."""
    stacks = {name: shape for name, shape in shapes.items() if len(shape) == 3}
    alone = not dist.is_initialized() or dist.get_world_size() == 1
    whole = None if alone or not stacks or not is_pretrained(type(inner)) else new_on_meta(inner)
    for name, parameter in whole.named_parameters() if whole is not None else ():
        shape, expected = stacks.get(name, parameter.shape), tuple(parameter.shape)
        if shape != expected and shape[1:] == expected[1:] and shape[0] and expected[0] % shape[0] == 0:
            raise ModelMismatch(
                f"{name} has shape {list(shape)}, and {list(expected)} by the model's configuration: it seems to be one rank's "
                "part, of which nothing says where it belongs, and would be taken for a replica. Load the model with "
                "LoadOptions.outer_shards, which saves and senders remember, or divide it by DTensor; if it has no more experts, "
                "say so in its configuration"
            )


def _common_dtype(name: str, of_parts: set[torch.dtype]) -> torch.dtype:
    """Returns the dtype of a checkpoint tensor that is made of tensors of these, as ``torch.cat`` does. Raises ModelMismatch if
    none has all their values."""
    if len(of_parts) > 1 and not all(map(is_wide, of_parts)):
        kinds = " and ".join(sorted(map(dtype_name, of_parts)))
        raise ModelMismatch(f"{name} would be made of tensors of {kinds}, which have no dtype in common")
    return reduce(torch.promote_types, of_parts)


def _truncated(rules: Mapping, names: Sequence[str]) -> set[int]:
    """Returns the checkpoint tensors that a conversion truncates, which may have padding."""
    truncating = [rule for rule in rules.converts if any("UnpadVocab" in step.name for step in rule.operations)]
    if not truncating:
        return set()
    groups, _ = match_conversions(rules.converts, apply_renames(rules.renames, names))
    return {number for group in groups if group.convert in truncating for number in group.sources}


def _without_padding(shape: Shape, places: Sequence[Place]) -> Shape:
    """Returns the shape without the rows at the end that have no place, if all others are a target as they are."""
    view = places[0][1]
    fits = len(places) == 1 and view.offset == 0 and view.strides == row_major_strides(shape)
    return view.size if fits and view.size[1:] == shape[1:] else shape


def _without_copies(rules: Mapping) -> Mapping:
    """Returns rules by which the copy that an adapter has trained of a module is under the name of the module."""
    ties = tuple(pair for pair in rules.ties if ".modules_to_save." not in pair[1])
    return replace(rules, ties=ties, aliases=(*rules.aliases, TRAINED_COPY)) if ties != rules.ties else rules


def _bare_names(rules: Mapping, targets: Targets, names: Collection[str]) -> tuple[list[str], list[str]]:
    """Returns a name of each target that has one among ``names``, and the name without wrappers; of tied ones the name that
    others are tied to, under which libraries save it."""
    own_names = [name for name in targets.index if name in names]
    copies = {name for _, name in rules.ties}
    chosen: dict[int, tuple[str, str]] = {}
    for own, bare in zip(own_names, apply_renames(rules.aliases, own_names), strict=True):
        number = targets.index[own]
        if number not in chosen or (chosen[number][1] in copies and bare not in copies):
            chosen[number] = own, bare
    ordered = [chosen[number] for number in sorted(chosen)]
    return [own for own, _ in ordered], [bare for _, bare in ordered]


def _distinct_regions(placed: Sequence[tuple[Place, ...]], targets: Targets, rules: Mapping) -> list[dict[_Region, None]]:
    """Returns the regions of each checkpoint tensor, in order; none of a tensor whose regions another one has, as where the
    model's weights are tied: of these the first under a name that others are tied to, as libraries save them. A tensor that
    shares only some of its elements keeps all, and is an error later."""
    regions = [dict.fromkeys((targets.index[name], view) for name, view in places) for places in placed]
    copies, first = {name for _, name in rules.ties}, [places[0][0] if places else "" for places in placed]
    is_copy = [name in copies for name in apply_renames(rules.aliases, first)]
    taken: set[_Region] = set()
    for i in sorted(range(len(placed)), key=is_copy.__getitem__):
        of_tensor, regions[i] = regions[i], regions[i] if regions[i].keys() - taken else {}
        taken.update(of_tensor)
    return regions


def _check_covered(regions: Iterable[Iterable[_Region]], targets: Targets) -> None:
    """Raises ModelMismatch unless each tensor of the model has a place as a whole or not at all."""
    counts = Counter[int]()
    for number, view in set(chain.from_iterable(regions)):
        counts[number] += prod(view.size)
    for number, count in counts.items():
        if count != (expected := prod(targets.shape(number))):
            raise ModelMismatch(
                f"{count} of the {expected} elements of {targets.names[number]} have a place in the checkpoint's tensors; pass "
                "names_from=, a checkpoint of this model, or another mapping"
            )


def _check_complete(
    rules: Mapping, names: Sequence[str], regions: Iterable[Iterable[_Region]], targets: Targets, added: Collection[str]
) -> None:
    """Raises ModelMismatch if a tensor of the model has no place, and is neither ``added`` by an adapter nor ignored by the
    mapping."""
    placed = {number for number, _ in chain.from_iterable(regions)}
    missing = [name for name in targets.missing(rules.only, placed) if name not in added]
    ignored = set(ignored_keys(rules, names, missing, ()))
    if missing := [name for name in missing if name not in ignored]:
        raise ModelMismatch(
            f"tensors of the model have no place in the checkpoint and would be left out: {list_keys(missing)}; pass as "
            "names_from= a checkpoint of this model, or a mapping that has them, or names them in ignore_missing",
            missing_keys=missing,
        )


def _check_whole(name: str, shape: Sequence[int], regions: Collection[_Region], targets: Targets) -> None:
    """Raises ModelMismatch unless the model has each element of a checkpoint tensor, and has it once."""
    if (count := sum(prod(view.size) for _, view in regions)) != prod(shape):
        owners = ", ".join(dict.fromkeys(targets.names[number] for number, _ in regions))
        raise ModelMismatch(
            f"{name} has {prod(shape)} elements, and the model has {count} for it, in {owners}; pass a names_from= checkpoint "
            "that has a tensor for each, or tie them in the model"
        )
