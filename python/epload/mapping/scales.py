"""One table of the parts of weights that a rank has and of their scales, read in two directions: fp8 weights are multiplied by
the scales once all data has arrived; wider weights give the largest values of blocks, which give the scales, and fp8 weights.

A weight stored in fp8 with scales fills a wider parameter as ``(weight.float() * scale).to(dtype)``. Scales are sent like any
tensor; each rank keeps those of the blocks that it owns, in extra tensors that live as long as the load. If the model keeps fp8,
the scales are among its own tensors, and nothing here applies.

A scale is used only if its dtype and the blocks that it is for are certain: the checkpoint's configuration declares them, or the
shapes leave no other choice.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence, Set
from functools import lru_cache
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from epload.core import dtypes
from epload.core.pieces import Metadata
from epload.core.placement import (
    Box,
    Layout,
    OwnedRegion,
    box_slices,
    owned_parts,
    owned_regions,
    row_major_strides,
    shard_boundaries,
)
from epload.core.views import Shape, View
from epload.errors import ModelMismatch
from epload.mapping.fp8 import Fp8Format, grid, rounded
from epload.mapping.place import Place
from epload.model.targets import Targets

SUFFIXES = ("_scale_inv", "_scale")
"""Appended to a weight's name, the name of its scale. Both multiply; the first is DeepSeek's, the second llm-compressor's."""
_SCALE = ".weight_scale"
"""End of the name of a scale; other parameters end in ``_scale``, too."""
_REFINEMENTS = ("_zero_point", "_scale_2", "_global_scale", "_g_idx")
"""Appended to a weight's name, the names of tensors with which a product of weight and scale is not yet the value."""
_USUAL_BLOCKS = (16, 32, 64, 128, 256)
"""Lengths of blocks in which a dim may be divided even if it is no multiple."""
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e8m0fnu, torch.uint8)
"""Dtypes of scales. uint8 holds E8M0 exponents (the byte b stands for 2^(b - 127), 255 for NaN), and is refused where the
configuration does not declare them."""
_PIECE_ELEMENTS, _PIECE_ELEMENTS_ON_CPU = 8 << 20, 128 << 10
"""Elements that are computed with at once: the memory for it is bounded, and on CPU stays in the cache. Two threads quantized
0.8 GB/s of bfloat16 in pieces of 128 Ki there, and 0.1 to 0.3 in pieces of 8 Mi."""
_WAY_OUT = (
    "pass the folder with the checkpoint's config.json, whose quantization_config declares it, or set "
    "model.config.quantization_config"
)


class Scaling(NamedTuple):
    """A part of a weight that this rank has in a local tensor, and its scales."""

    target: int
    view: View
    """The box of the local tensor, and the region of the weight in the checkpoint that it has. Empty if this rank has nothing."""
    shape: Shape
    """Shape of that weight."""
    blocks: Shape
    """Shape of a block of the weight that shares a scale."""
    scale: int
    """Index among the targets of the tensor with the scales that this rank needs: a box of all scales."""
    first: Shape
    """Start of that box among the scales, one entry per dim of the weight."""
    counts: Shape
    """Size of that box."""


TargetViews = Sequence[tuple[int, View]]
"""The targets that a weight fills, each with the view of the weight that fills it."""


def with_scales(manifest: Metadata, targets: Targets, placed: list[tuple[Place, ...]]) -> tuple[Targets, tuple[Scaling, ...]]:
    """Returns the targets, followed by one for each scale that fp8 weights need for wider targets, and what to multiply. Adds the
    places of the scales to ``placed``.

    Raises ModelMismatch for a weight without its scale, a scale without its weight, of another dtype or of the wrong shape, and
    for two tensors under two names of a weight, of which one has a scale."""
    if set(dtypes.FP8).isdisjoint(manifest.dtypes) and not any(n.endswith((SUFFIXES[0], _SCALE)) for n in manifest.names):
        return targets, ()
    number = {name: i for i, name in enumerate(manifest.names)}
    _check_orphans(manifest, placed, number)
    weights, scales = list[tuple[str, TargetViews, Shape, Shape]](), list[int]()
    for i, dtype in enumerate(manifest.dtypes):
        # A weight may have several names, under each of which it is placed.
        named = dict.fromkeys((targets.index[name], view) for name, view in placed[i] if dtype in dtypes.FP8)
        regions = [region for region in named if targets.dtypes[region[0]] is not dtype]
        if regions:
            scales.append(_scale_of(manifest, number, i, [targets.dtypes[target] for target, _ in regions]))
            weights.append((manifest.names[i], regions, manifest.shapes[i], _block_shape(manifest, i, scales[-1])))
    scaled = {target for _, regions, *_ in weights for target, _ in regions}
    check_ties(manifest, targets, placed, scaled, "tied weights with scales cannot be compared")
    scalings, views = divide_weights(targets, weights)
    names = [f"scale {manifest.names[scale]}" for scale in scales]
    for scale, name, view in zip(scales, names, views, strict=True):
        placed[scale] = ((name, view),)
    return targets.with_extra(names, [view.size for view in views], [manifest.dtypes[n] for n in scales]), scalings


def check_ties(manifest: Metadata, targets: Targets, placed: Sequence[tuple[Place, ...]], numbers: Set[int], reason: str) -> None:
    """Raises ModelMismatch if two tensors are for two names of one of some targets, by number: only one of them is loaded, and
    their values or scales may differ."""
    first_of: dict[int, tuple[str, int]] = {}
    for i, places in enumerate(placed):
        for name, view in places:
            if (target := targets.index[name]) in numbers:
                first, source = first_of.setdefault(target, (name, i))
                if name != first and (first, view) not in places:
                    raise ModelMismatch(
                        f"{manifest.names[i]} is for {name}, which the model ties to {first}, and the checkpoint has another "
                        f"tensor for that, {manifest.names[source]}; {reason}: leave one of them out of the checkpoint"
                    )


# ---- the table ----


def divide_weights(
    targets: Targets, weights: Iterable[tuple[str, TargetViews, Shape, Shape]]
) -> tuple[tuple[Scaling, ...], list[View]]:
    """Returns the parts of weights that this rank has, at least one of each region, and for each weight the view of all its
    scales that fills a tensor with those that this rank needs. These tensors follow the targets.

    Args:
        weights: the name of each, for messages, its regions, its shape, and the shape of its blocks.

    Raises:
        ModelMismatch: blocks of a weight are no blocks of a target.
    """
    owned = [owned_regions(*layout) for layout in zip(targets.layouts, targets.coordinates, strict=True)]
    scalings, views = list[Scaling](), list[View]()
    # Weights that are divided alike share what follows, and equal views are one object.
    parts_of: dict[tuple[object, ...], tuple[list[list[View]], Shape, View]] = {}
    distinct: dict[View, View] = {}
    for scale, (name, regions, shape, blocks) in enumerate(weights, len(targets.names)):
        key = shape, blocks, *((targets.layout[target], view) for target, view in regions)
        if key not in parts_of:
            for target, view in regions:
                if blocks != _whole(shape) and not _keeps_blocks(view, shape):
                    raise ModelMismatch(
                        f"cannot quantize or dequantize {name}, of which a part is {targets.names[target]}: the mapping reshapes "
                        "it across its rows, so that its blocks of scales are no longer blocks"
                    )
            parts = [owned_views(view, owned[targets.layout[target]]) for target, view in regions]
            first, box = _scales_of_parts([part for own in parts for part in own], shape, blocks)
            parts_of[key] = parts, first, distinct.setdefault(box, box)
        parts, first, box = parts_of[key]
        views.append(box)
        for (target, _), own in zip(regions, parts, strict=True):
            scalings += [Scaling(target, part, shape, blocks, scale, first, box.size) for part in own]
    return tuple(scalings), views


def owned_views(view: View, owned: Sequence[OwnedRegion]) -> list[View]:
    """Returns the parts of a view of a weight that this rank owns, which fill boxes of the local tensor; or an empty one."""
    parts = owned_parts((view.start, view.size), owned)
    local = [view.crop(start, size)._replace(start=local_start) for start, size, local_start in parts]
    zeros = (0,) * len(view.size)
    return local or [View(zeros, zeros, 0, view.strides)]


def _scales_of_parts(parts: Sequence[View], shape: Shape, blocks: Shape) -> tuple[Shape, View]:
    """Returns where the box of the scales for some parts of a weight starts, and the view that fills a tensor with this box."""
    boxes = [_span(part, shape)[0] for part in parts if 0 not in part.size]
    first = size = (0,) * len(blocks)
    if boxes and blocks == _whole(shape):
        size = (1,) * len(blocks)
    elif boxes:
        starts = zip(*(start for start, _ in boxes), strict=True)
        ends = zip(*(map(int.__add__, start, size) for start, size in boxes), strict=True)
        first = tuple(min(along) // n for along, n in zip(starts, blocks, strict=True))
        size = tuple(-(-max(along) // n) - at for along, n, at in zip(ends, blocks, first, strict=True))
    return first, View.of_box(first, size, grid(shape, blocks))


def stack_alike(scalings: Iterable[tuple[Scaling, torch.dtype]]) -> list[list[Scaling]]:
    """Groups scalings whose weights are divided alike, and whose local tensors have one dtype: what a rank has of these weights
    can be stacked, and is quantized at once, which for small weights takes half as long. One that shares its scales with another
    scaling is alone."""
    rows = list(scalings)
    uses, groups = Counter(scaling.scale for scaling, _ in rows), defaultdict[object, list[Scaling]](list)
    for scaling, dtype in rows:
        _, view, shape, blocks, _, first, counts = scaling
        alike = uses[scaling.scale] == 1 and 0 not in view.size and _keeps_blocks(view, shape)
        groups[(view[1:], shape, blocks, first, counts, dtype) if alike else object()].append(scaling)
    batches = []
    for group in groups.values():
        count = max(1, _PIECE_ELEMENTS // max(1, prod(group[0].view.size)))
        batches += [group[i : i + count] for i in range(0, len(group), count)]
    return batches


def stacked(scaling: Scaling, count: int) -> Scaling:
    """Returns the scaling of so many weights that are divided like one, of what a rank has of each, stacked along a new dim."""
    _, view, shape, blocks, _, first, counts = scaling
    zeros = (0,) * (1 + len(view.size))
    stack = View(zeros, (count, *view.size), view.offset, (prod(shape), *view.strides))
    return Scaling(0, stack, (count, *shape), (1, *blocks), 1, (0, *first), (count, *counts))


def scaling_of_box(manifest: Metadata, number: dict[str, int], weight: int, box: Box, dtype: torch.dtype) -> tuple[int, Scaling]:
    """Returns the number of an fp8 weight's scale, and how a box of the weight, in a tensor of its own, is multiplied by it.

    Args:
        number: of each tensor of the manifest, by name.
        weight: its number.
        dtype: of the tensor with the box.

    Raises:
        ModelMismatch: as :func:`with_scales`.
    """
    scale, shape = _scale_of(manifest, number, weight, [dtype]), manifest.shapes[weight]
    blocks = _block_shape(manifest, weight, scale)
    return scale, Scaling(0, View.of_box(*box, shape), shape, blocks, 1, (0,) * len(shape), grid(shape, blocks))


@lru_cache(maxsize=1024)
def is_shared(regions: tuple[tuple[Layout, View], ...], shape: Shape, blocks: Shape) -> bool:
    """Returns True if ranks may have parts of one block of a weight, or need the scale of a block of which they have nothing.
    Equal on all ranks.

    ``regions``: the layouts of the targets, each with the view of the weight that fills it."""
    for layout, view in regions:
        (begin, _), runs = _span(view, shape)
        along = Counter(dim for (dim, _), n in zip(runs, view.size, strict=True) if n > 1)
        for i, (dim, step) in enumerate(runs):
            boundaries, is_interleaved = shard_boundaries(layout, i)
            is_crossed = view.size[i] > 1 and (step != 1 or along[dim] > 1)
            if boundaries and (is_interleaved or len(regions) > 1 or is_crossed):
                return True
            for boundary in boundaries if view.size[i] > 1 else ():
                cut = min(max(boundary - view.start[i], 0), view.size[i])
                if blocks == _whole(shape) and 0 < cut < view.size[i]:  # any view is in one block
                    return True
                if (begin[dim] + cut) % blocks[dim] and begin[dim] + cut < shape[dim]:
                    return True
    return False


# ---- both directions ----


def dequantize(scaling: Scaling, local: Tensor, scales: Tensor) -> None:
    """Multiplies what a local tensor has of a weight by its scales, in place."""
    scales = scales.to(local.device)
    factors = (scales.view(torch.float8_e8m0fnu) if scales.dtype is torch.uint8 else scales).float()
    with torch.inference_mode(torch.is_inference_mode_enabled() or local.is_inference()):
        for view in _pieces(scaling, local):
            part = local[box_slices(view.start, view.size)]
            part.copy_(part.float() * _expand(factors, scaling, view))


def quantize(scaling: Scaling, local: Tensor, factors: Tensor, format: Fp8Format, into: Tensor) -> None:
    """Writes what a local tensor has of a weight as fp8 to a tensor of the same shape. ``factors``: the first result of
    :meth:`Fp8Format.scales`, of the maxima of the blocks."""
    for view in _pieces(scaling, local):
        where = box_slices(view.start, view.size)
        into[where].copy_(format.narrow(rounded(local[where].detach()), _expand(factors, scaling, view)))


def add_maxima(scaling: Scaling, local: Tensor, maxima: Tensor) -> None:
    """Raises the largest absolute values of blocks, float32, to those of the elements that a local tensor has of a weight. NaN
    counts as the largest. ``maxima`` has the box of the scales; 0 for a block without elements."""
    for view in _pieces(scaling, local):
        part = rounded(local[box_slices(view.start, view.size)].detach()).abs()
        if maxima.numel() == 1:
            maxima.copy_(torch.maximum(maxima, part.amax().float()))
            continue
        (start, size), runs = _span(view, scaling.shape)
        low = tuple(map(int.__floordiv__, start, scaling.blocks))
        ends = zip(map(int.__add__, start, size), scaling.blocks, low, strict=True)
        counts = tuple(-(-end // block) - at for end, block, at in ends)
        # Padded with zeros to whole blocks, unless a dim has one block only.
        lengths = [n if count == 1 else block for n, block, count in zip(size, scaling.blocks, counts, strict=True)]
        first = [0 if count == 1 else a % block for a, block, count in zip(start, scaling.blocks, counts, strict=True)]
        padded = part.new_zeros(list(map(int.__mul__, counts, lengths)))
        inside = padded[box_slices(first, size)]
        strides = [step * inside.stride(dim) for dim, step in runs]
        inside.as_strided(view.size, strides, inside.storage_offset()).copy_(part)
        grouped = padded.reshape([n for pair in zip(counts, lengths, strict=True) for n in pair])
        largest = grouped.amax(dim=list(range(1, grouped.ndim, 2))).float()
        box = maxima[box_slices(tuple(map(int.__sub__, low, scaling.first)), counts)]
        box.copy_(torch.maximum(box, largest))


# ---- which scales ----


def _check_orphans(manifest: Metadata, placed: Sequence[tuple[Place, ...]], number: dict[str, int]) -> None:
    """Raises ModelMismatch for a scale whose weight is not in the checkpoint, or is not quantized there."""
    for name, places in zip(manifest.names, placed, strict=True):
        inverse, direct = map(name.removesuffix, SUFFIXES)
        weight = direct if name.endswith(_SCALE) else inverse
        if weight == name or places:
            continue
        if weight not in number:
            if weight is direct:  # that of a packed weight, which has another name
                continue
            raise ModelMismatch(f"{name} is a scale without a weight: {weight} is not in the checkpoint")
        if dtypes.is_wide(dtype := manifest.dtypes[number[weight]]):
            raise ModelMismatch(
                f"{name} is a scale, but {weight} is {dtypes.name(dtype)} in the checkpoint, so that it is unknown whether the "
                "weight is already multiplied by it; leave the scale out of the checkpoint if it is"
            )


def _scale_of(manifest: Metadata, number: dict[str, int], weight: int, into: Sequence[torch.dtype]) -> int:
    """Returns the number of a weight's scale. Raises ModelMismatch if there is not one, or its dtype means nothing.

    ``into``: dtypes of the weight's targets."""
    name = manifest.names[weight]
    scales = [name + suffix for suffix in SUFFIXES if name + suffix in number]
    siblings = [name + suffix for suffix in _REFINEMENTS] + [name.removesuffix("weight") + "pre_quant_scale"]
    others = scales[1:] + [sibling for sibling in siblings if sibling in number]
    if not scales:
        raise ModelMismatch(
            f"{name} is {dtypes.name(manifest.dtypes[weight])} in the checkpoint and {dtypes.name(into[0])} in the model, but "
            f"its scale {name}{SUFFIXES[0]} is not in the checkpoint; epload.convert(renames=) gives scales other names"
        )
    if (narrow := next((dtype for dtype in into if not dtypes.is_wide(dtype)), None)) is not None:
        raise ModelMismatch(f"cannot dequantize {name} to {dtypes.name(narrow)}, its dtype in the model")
    if others:
        raise ModelMismatch(
            f"cannot dequantize {name}: it has {others[0]} besides its scale {scales[0]}, and epload applies one scale"
        )
    scale = scales[0]
    stored = manifest.dtypes[number[scale]]
    if stored not in _DTYPES:
        supported = ", ".join(map(dtypes.name, _DTYPES))
        raise ModelMismatch(f"{scale} is {dtypes.name(stored)}, expected a scale of one of the dtypes {supported}")
    if stored is torch.uint8 and not (manifest.quantization is not None and manifest.quantization.exponents):
        raise ModelMismatch(
            f"{scale} is uint8, which may hold exponents or factors, and no configuration declares an MX format "
            f'(quant_method "mxfp8", or scale_fmt "ue8m0"); {_WAY_OUT}'
        )
    return number[scale]


# ---- which blocks ----


def _block_shape(manifest: Metadata, weight: int, scale: int) -> Shape:
    """Returns the shape of the blocks that share a scale. Raises ModelMismatch if the shapes of weight and scale leave a choice
    of blocks that the configuration does not make, or do not go together."""
    shape, counts = manifest.shapes[weight], manifest.shapes[scale]
    if prod(counts) == 1:
        return _whole(shape)
    if len(counts) == 2 * len(shape) and {*counts[1::2]} == {1}:  # as ModelOpt writes those of blocks
        counts = counts[::2]
    declared = manifest.quantization.blocks if manifest.quantization is not None else ()
    of_all_dims = [(1,) * (len(shape) - 2) + block for block in declared if len(shape) >= 2]
    of_all_dims = [tuple(map(min, block, _whole(shape))) for block in of_all_dims]  # where some may be the same
    blocks = {block for block in of_all_dims if grid(shape, block) == counts}
    padded = counts + (1,) * (len(shape) - len(counts))  # per-row scales lack the dims that follow
    if not blocks and len(padded) == len(shape):
        even = tuple(-(-n // max(count, 1)) or 1 for n, count in zip(shape, padded, strict=True))
        along_dims = all(count in (1, length) for length, count in zip(shape, padded, strict=True))
        if along_dims or (not declared and _is_unambiguous(shape, counts, even)):
            return even
    if len(blocks) == 1:
        return blocks.pop()
    text = (
        f"{manifest.names[scale]} has shape {list(counts)}, which does not divide {manifest.names[weight]} of shape "
        f"{list(shape)} into blocks "
    )
    if declared:
        listed = " or ".join(str(list(block)) for block in declared)
        raise ModelMismatch(f"{text}of {listed}, as the checkpoint's configuration declares")
    raise ModelMismatch(f"{text}in exactly one way, and no configuration declares a weight_block_size; {_WAY_OUT}")


def _is_unambiguous(shape: Shape, counts: Shape, even: Shape) -> bool:
    """Returns True if no other division of a weight has as many scales as one into these ``even`` blocks: blocks of the usual
    sizes may end in a smaller one, and scales that vary along the rows alone may be for unequal parts of a fused weight."""
    if len(counts) != len(shape) or len(shape) < 2 or counts[-1] == 1:
        return False
    for n, count, block in zip(shape, counts, even, strict=True):
        others = [other for other in _USUAL_BLOCKS if other != block and -(-n // other) == count]
        if count not in (1, n) and (not count or n % count or others):
            return False
    return True


def _whole(shape: Shape) -> Shape:
    """Returns the shape of the only block of a weight."""
    return tuple(max(n, 1) for n in shape)


# ---- geometry ----


def _pieces(scaling: Scaling, local: Tensor) -> Iterator[View]:
    """Yields the view of a part of a weight in pieces of bounded size."""
    view = scaling.view
    if not view.size:
        yield view
    elif count := prod(view.size):
        limit = _PIECE_ELEMENTS_ON_CPU if local.is_cpu else _PIECE_ELEMENTS
        rows = max(1, limit * view.size[0] // count)
        for row in range(0, view.size[0], rows):
            yield view.narrow(0, row, min(rows, view.size[0] - row))


def _expand(factors: Tensor, scaling: Scaling, view: View) -> Tensor:
    """Returns the factor of each element of a view, in its shape, or the only one, in as many dims, out of those that this rank
    has."""
    if factors.numel() == 1:
        return factors.reshape((1,) * len(view.size))  # no dims would not count in the dtype of a product
    box, runs = _span(view, scaling.shape)
    for dim, (begin, n, block, first) in enumerate(zip(*box, scaling.blocks, scaling.first, strict=True)):
        index = torch.arange(begin, begin + n, device=factors.device) // block - first
        factors = factors.index_select(dim, index)
    return factors.as_strided(view.size, [step * factors.stride(dim) for dim, step in runs])


def _span(view: View, shape: Shape) -> tuple[Box, list[tuple[int, int]]]:
    """Returns the box of a weight that a view of it spans, and for each dim of the view the dim of the weight that it runs along,
    and its step there."""
    strides = row_major_strides(shape)
    along = [next((dim for dim, stride in enumerate(strides) if step >= stride), 0) for step in view.strides]
    runs = [(dim, step // strides[dim]) for dim, step in zip(along, view.strides, strict=True)]
    start = tuple(view.offset // stride % length for stride, length in zip(strides, shape, strict=True))
    size = [1] * len(shape)
    for n, (dim, step) in zip(view.size, runs, strict=True):
        size[dim] += (n - 1) * step
    return (start, tuple(size)), runs


def _keeps_blocks(view: View, shape: Shape) -> bool:
    """Returns True if every dim of a view runs along one dim of the weight, so that blocks stay blocks."""
    if 0 in view.size:
        return True
    (start, size), runs = _span(view, shape)
    strides = row_major_strides(shape)
    steps = zip(view.size, view.strides, runs, strict=True)
    is_exact = all(n == 1 or step == strides[dim] * count for n, step, (dim, count) in steps)
    return is_exact and all(a + n <= length for a, n, length in zip(start, size, shape, strict=True))
