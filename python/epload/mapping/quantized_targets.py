"""Finds the fp8 weights of a model that wider tensors of a checkpoint fill, and quantizes what has arrived for them.

A rank takes all of each block that it owns elements or the scale of, in extra tensors that live until they are quantized. So it
needs no other rank for the largest values, and every layout gives the same bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from epload.core import dtypes
from epload.core.pieces import Metadata
from epload.core.placement import Box, OwnedRegion, box_slices, intersect, owned_parts, owned_regions
from epload.core.views import Shape, View
from epload.errors import ModelMismatch
from epload.mapping.fp8 import FP8, Fp8Format
from epload.mapping.place import Place
from epload.mapping.quantize import Quantize
from epload.mapping.scales import Scaling, add_maxima, check_ties, owned_views, quantize
from epload.model.targets import Targets


class QuantizedTarget(NamedTuple):
    """An fp8 weight of the model that is quantized in a load."""

    weight: int
    """Index among the targets, as are the next one and those in ``boxes``."""
    scale: int
    boxes: tuple[tuple[int, Box], ...]
    """Extra tensors, and the box of the weight that each of them has: whole blocks."""
    format: Fp8Format


def with_quantized(
    manifest: Metadata, targets: Targets, placed: list[tuple[Place, ...]], rule: Quantize | None
) -> tuple[Targets, tuple[QuantizedTarget, ...]]:
    """Returns the targets, followed by extra ones for what is to be quantized, and what is. Changes places in ``placed`` to those
    in the extra targets.

    Raises ModelMismatch for an fp8 weight without scales in the model, or whose scales the rule does not make."""
    if rule is None:
        return targets, ()
    sources: dict[int, list[int]] = {}
    """Checkpoint tensors that fill each target."""
    for i, places in enumerate(placed):
        for number in dict.fromkeys(targets.index[name] for name, _ in places):
            sources.setdefault(number, []).append(i)
    quantized, names, sizes, kinds = list[QuantizedTarget](), list[str](), list[Shape](), list[torch.dtype]()
    name_of = {number: name for name, number in reversed(targets.index.items())}  # those that all ranks know
    boxes_of: dict[tuple[int, int], list[Box]] = {}
    weights = {
        weight: numbers
        for weight, numbers in sources.items()
        if targets.dtypes[weight] in dtypes.FP8 and any(dtypes.is_wide(manifest.dtypes[i]) for i in numbers)
    }
    check_ties(manifest, targets, placed, weights.keys(), "tied weights are not quantized")
    for weight, numbers in weights.items():
        scale = _scale_of(manifest, targets, sources, weight, name_of[weight], rule.format)
        layouts = targets.layout[weight], targets.layout[scale]
        if layouts not in boxes_of:
            boxes_of[layouts] = _needed_boxes(targets, weight, scale, rule.format.blocks(targets.shape(weight)))
        boxes = boxes_of[layouts]
        quantized.append(QuantizedTarget(weight, scale, tuple(enumerate(boxes, len(targets.names) + len(names))), rule.format))
        of_sources = {manifest.dtypes[i] for i in numbers}
        own = {f"{name_of[weight]} before it is quantized, {i}": box for i, box in enumerate(boxes)}
        names += own
        sizes += [size for _, size in boxes]
        kinds += [of_sources.pop() if of_sources == {torch.float16} else torch.bfloat16] * len(boxes)
        _replace_places(targets, placed, numbers, weight, own)
    return targets.with_extra(names, sizes, kinds), tuple(quantized)


def _replace_places(
    targets: Targets, placed: list[tuple[Place, ...]], numbers: Sequence[int], weight: int, boxes: Mapping[str, Box]
) -> None:
    """Changes the places of some checkpoint tensors in a weight to those in its boxes, given by name."""
    first = next(name for name, _ in placed[numbers[0]] if targets.index.get(name) == weight)
    for i in numbers:
        new_places = list[Place]()
        for name, view in placed[i]:
            if targets.index.get(name) != weight:
                new_places.append((name, view))
            elif name == first:
                new_places += [(own, _within(view, box)) for own, box in boxes.items()]
        placed[i] = tuple(new_places)


def quantize_target(target: QuantizedTarget, targets: Targets, local: Sequence[Tensor]) -> None:
    """Quantizes what has arrived of a weight into what this rank has of it and of its scales. ``local``: all local tensors."""
    weight, scale = local[target.weight].detach(), local[target.scale].detach()
    shape = targets.shape(target.weight)
    with torch.inference_mode(torch.is_inference_mode_enabled() or weight.is_inference()):
        for number, (start, size) in target.boxes:
            if 0 in size:
                continue
            narrow, stored = quantize_blocks(local[number], target.format)
            _copy_owned(narrow, start, targets, target.weight, weight)
            stored = stored.view(torch.uint8) if scale.dtype is torch.uint8 else stored
            if prod(targets.shape(target.scale)) == 1:
                scale.copy_(stored.flatten()[: scale.numel()].reshape(scale.shape))
            else:
                first = tuple(map(int.__floordiv__, start, target.format.blocks(shape)))
                _copy_owned(stored, first, targets, target.scale, scale)


def _copy_owned(values: Tensor, start: Shape, targets: Targets, number: int, local: Tensor) -> None:
    """Copies what this rank owns of a box of a target, which begins at ``start``, to the local tensor."""
    for region in owned_parts((start, tuple(values.shape)), _owned(targets, number)):
        inside = tuple(map(int.__sub__, region.start, start))
        local[box_slices(region.local_start, region.size)].copy_(values[box_slices(inside, region.size)])


def quantize_blocks(values: Tensor, format: Fp8Format) -> tuple[Tensor, Tensor]:
    """Returns a weight, or a box of whole blocks of one, as fp8, and the scales of its blocks."""
    shape = tuple(values.shape)
    first = (0,) * len(shape)
    scaling = Scaling(0, View.whole(shape), shape, format.blocks(shape), 1, first, format.grid(shape))
    maxima = torch.zeros(scaling.counts, dtype=torch.float32, device=values.device)
    add_maxima(scaling, values, maxima)
    factors, stored = format.scales(maxima)
    narrow = torch.empty(values.shape, dtype=FP8, device=values.device)
    quantize(scaling, values, factors, format, narrow)
    return narrow, stored


def _scale_of(
    manifest: Metadata,
    targets: Targets,
    sources: Mapping[int, Sequence[int]],
    weight: int,
    name: str,
    format: Fp8Format,
) -> int:
    """Returns the target that has the scales of a weight. Raises ModelMismatch if none fits.

    ``sources``: the checkpoint tensors that fill each target."""
    dtype, shape = targets.dtypes[weight], targets.shape(weight)
    scale = targets.index.get(f"{name}{format.suffix}")
    if scale is None or len(shape) < 2 or dtype is not FP8:
        raise ModelMismatch(
            f"cannot quantize {name}, {dtypes.name(dtype)} of shape {list(shape)} in the model: expected a matrix of "
            f"float8_e4m3fn, and its scales next to it as {name}{format.suffix}; pass Quantize() the quantization_config of the "
            "model"
        )
    stored, expected, actual = targets.dtypes[scale], format.scale_shape(shape), targets.shape(scale)
    same_bits = {torch.uint8, torch.float8_e8m0fnu}
    exact = stored is format.scale_dtype or (stored is torch.float32 and format.scale_dtype is torch.bfloat16)
    if not (exact or {stored, format.scale_dtype} == same_bits) or (actual != expected and {*actual, *expected} != {1}):
        raise ModelMismatch(
            f"{name}{format.suffix} is {dtypes.name(stored)} of shape {list(actual)} in the model, expected "
            f"{dtypes.name(format.scale_dtype)} of shape {list(expected)}, as the quantization_config of Quantize() says"
        )
    if (others := sources.get(scale)) is not None:
        raise ModelMismatch(
            f"{manifest.names[others[0]]} has scales for {name}, which is not quantized in the checkpoint; leave it out of the "
            "checkpoint"
        )
    for i in sources[weight]:
        if not dtypes.is_wide(manifest.dtypes[i]):
            raise ModelMismatch(f"{manifest.names[i]} is {dtypes.name(manifest.dtypes[i])}, but the rest of {name} is not")
    return scale


def _needed_boxes(targets: Targets, weight: int, scale: int, blocks: Shape) -> list[Box]:
    """Returns the boxes of whole blocks that have all that this rank owns of a weight and of its scales; or an empty one."""
    shape = targets.shape(weight)
    boxes = [(region.start, tuple(map(int.__add__, region.start, region.size))) for region in _owned(targets, weight)]
    for region in _owned(targets, scale):
        if prod(targets.shape(scale)) == 1:
            boxes.append(((0,) * len(shape), shape))
            continue
        ends = map(int.__add__, region.start, region.size)
        boxes.append((tuple(map(int.__mul__, region.start, blocks)), tuple(map(int.__mul__, ends, blocks))))
    whole = []
    for start, end in boxes:
        low = tuple(a // block * block for a, block in zip(start, blocks, strict=True))
        high = tuple(min(-(-b // block) * block, n) for b, block, n in zip(end, blocks, shape, strict=True))
        whole.append((low, tuple(map(int.__sub__, high, low))))
    distinct = list(dict.fromkeys(whole))
    largest = [box for box in distinct if not any(intersect(box, other) == box for other in distinct if other != box)]
    return largest or [((0,) * len(shape), (0,) * len(shape))]


@lru_cache(maxsize=1024)
def _within(view: View, box: Box) -> View:
    """Returns the part of a view that fills a box of its target, for a tensor with the box alone. Equal ones are one object."""
    return owned_views(view, [OwnedRegion(*box, (0,) * len(box[0]))])[0]


def _owned(targets: Targets, number: int) -> list[OwnedRegion]:
    layout = targets.layout[number]
    return owned_regions(targets.layouts[layout], targets.coordinates[layout])
