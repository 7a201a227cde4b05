"""Finds the scales that a rank needs for fp8 weights that it widens, and multiplies by them once all data has arrived. The same
table backwards: the largest values of blocks, and fp8 weights.

A weight stored in fp8 with scales fills a wider parameter as ``(weight.float() * scale).to(dtype)``. Scales are sent like any
tensor; each rank keeps those of the blocks that it owns, in extra tensors that live as long as the load. If the model keeps fp8,
the scales are among its own tensors, and nothing here applies.

A scale is used only if its dtype and the blocks that it is for are certain: the checkpoint's configuration declares them, or the
shapes leave no other choice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from epload.core import dtypes
from epload.core.pieces import Metadata
from epload.core.placement import (
    Box,
    OwnedRegion,
    box_slices,
    owned_parts,
    owned_regions,
    row_major_strides,
    shard_boundaries,
)
from epload.core.views import Shape, View
from epload.errors import ModelMismatch
from epload.mapping.fp8 import Fp8Format, rounded
from epload.mapping.place import Place
from epload.model.targets import Targets

SUFFIXES = ("_scale_inv", "_scale")
"""Appended to a weight's name, the name of its scale. Both multiply; the first is DeepSeek's, the second llm-compressor's."""
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
    """A region of a target to be multiplied, and its scales."""

    target: int
    view: View
    """View of the weight in the checkpoint."""
    shape: Shape
    """Shape of that weight."""
    scale: int
    """Index among the targets of the tensor with the scales that this rank needs: a box of all scales."""
    first: Shape
    """Start of that box among the scales, one entry per dim of the weight."""
    blocks: Shape
    """Shape of a block of the weight that shares a scale."""


def with_scales(
    manifest: Metadata, targets: Targets, placed: list[tuple[Place, ...]]
) -> tuple[Targets, tuple[Scaling, ...]]:
    """Returns the targets, followed by one for each scale that fp8 weights need for wider targets, and what to multiply. Adds the
    places of the scales to ``placed``.

    Raises ModelMismatch for a weight without its scale, a scale without its weight, of another dtype or of the wrong shape."""
    if set(dtypes.FP8).isdisjoint(manifest.kinds.dtypes) and not any(n.endswith(SUFFIXES[0]) for n in manifest.names):
        return targets, ()
    number = {name: i for i, name in enumerate(manifest.names)}
    _check_orphans(manifest, placed, number)
    boxes = ScaleBoxes(targets)
    scalings: list[Scaling] = []
    needed: dict[int, Shape] = {}
    """The shape of the box of each scale, by the scale's number in the checkpoint."""
    for i, dtype in enumerate(manifest.dtypes):
        regions = [(targets.index[name], view) for name, view in placed[i]] if dtype in dtypes.FP8 else []
        regions = [region for region in regions if targets.dtypes[region[0]] is not dtype]
        if not regions:
            continue
        shape = manifest.shapes[i]
        scale = _scale_of(manifest, number, i, [targets.dtypes[target] for target, _ in regions])
        blocks = _block_shape(manifest, i, scale)
        first, view = boxes.find(manifest.names[i], regions, shape, blocks)
        placed[scale] = ((f"scale {manifest.names[scale]}", view),)
        index = len(targets.names) + len(needed)
        scalings += [Scaling(target, region, shape, index, first, blocks) for target, region in regions]
        needed[scale] = view.size
    names = [f"scale {manifest.names[scale]}" for scale in needed]
    return targets.with_extra(names, list(needed.values()), [manifest.dtypes[n] for n in needed]), tuple(scalings)


class ScaleBoxes:
    """Finds the scales that a rank needs for what it owns of weights."""

    def __init__(self, targets: Targets) -> None:
        self._targets = targets
        self._owned = [owned_regions(*layout) for layout in zip(targets.layouts, targets.coordinates, strict=True)]
        self._boxes: dict[tuple[object, ...], list[Box]] = {}
        """Boxes of a weight that this rank owns of a region, by what they depend on."""
        self._views: dict[tuple[Shape, Shape, Shape], View] = {}
        """Views of scales; those of weights that are divided alike are one object."""

    def find(self, name: str, regions: Sequence[tuple[int, View]], shape: Shape, blocks: Shape) -> tuple[Shape, View]:
        """Returns the start of the box of all scales that this rank needs, one entry per dim of the weight, and the view of the
        scales that fills a tensor with this box alone.

        Args:
            name: of the weight, for messages.
            regions: targets and the views of the weight that fill them.
            shape, blocks: of the weight and of its blocks.

        Raises:
            ModelMismatch: blocks of the weight are no blocks of a target.
        """
        boxes: list[Box] = []
        for target, view in regions:
            layout = self._targets.layout[target]
            key = (layout, view, shape, blocks)
            if key not in self._boxes:
                if blocks != _whole(shape) and not _keeps_blocks(view, shape):
                    raise ModelMismatch(
                        f"cannot quantize or dequantize {name}, of which a part is {self._targets.names[target]}: the mapping "
                        "reshapes it across its rows, so that its blocks of scales are no longer blocks"
                    )
                parts = owned_parts((view.start, view.size), self._owned[layout])
                self._boxes[key] = [_span(view.crop(part.start, part.size), shape)[0] for part in parts]
            boxes += self._boxes[key]
        first, size = _box_of_scales(boxes, blocks)
        grid = _grid(shape, blocks)
        if (first, size, grid) not in self._views:
            strides = row_major_strides(grid)
            view = View((0,) * len(size), size, sum(map(int.__mul__, first, strides)), strides)
            self._views[first, size, grid] = view
        return first, self._views[first, size, grid]


def scale_tensors(targets: Targets, scalings: Sequence[Scaling], device: torch.device) -> list[Tensor]:
    """Returns uninitialized tensors for the scales, in the order of the targets."""
    numbers = sorted({scaling.scale for scaling in scalings})
    shapes = [targets.layouts[targets.layout[number]].shape for number in numbers]
    return [torch.empty(s, dtype=targets.dtypes[n], device=device) for n, s in zip(numbers, shapes, strict=True)]


def multiply(scalings: Sequence[Scaling], targets: Targets, local: Sequence[Tensor]) -> None:
    """Multiplies what this rank owns of each region, in place. ``local`` are the local tensors of ``targets``."""
    for scaling, view, where in _owned_pieces(scalings, targets, local):
        part = local[scaling.target][where]
        scale = local[scaling.scale].to(part.device)
        factors = (scale.view(torch.float8_e8m0fnu) if scale.dtype is torch.uint8 else scale).float()
        part.copy_(part.float() * _expand(factors, scaling, view))


# ---- the same backwards ----


def block_maxima(scalings: Sequence[Scaling], targets: Targets, local: Sequence[Tensor]) -> dict[int, Tensor]:
    """Returns the largest absolute value of each block among the elements that this rank owns, float32, by the index of the
    tensor with the block's scale: the same box of all blocks. 0 for a block of which this rank has nothing; NaN counts as the
    largest. ``local``: the local tensors of ``targets``."""
    boxes = {scaling.scale: targets.layouts[targets.layout[scaling.scale]].shape for scaling in scalings}
    device = {scaling.scale: local[scaling.target].device for scaling in scalings}
    maxima = {scale: torch.zeros(box, device=device[scale]) for scale, box in boxes.items()}
    for scaling, view, where in _owned_pieces(scalings, targets, local):
        (start, size), runs = _span(view, scaling.shape)
        low = tuple(map(int.__floordiv__, start, scaling.blocks))
        counts = tuple(
            -(-(a + n) // block) - at for a, n, block, at in zip(start, size, scaling.blocks, low, strict=True)
        )
        # Padded with zeros to whole blocks, unless a dim has one block only.
        lengths = [n if count == 1 else block for n, block, count in zip(size, scaling.blocks, counts, strict=True)]
        first = [0 if count == 1 else a % block for a, block, count in zip(start, scaling.blocks, counts, strict=True)]
        part = rounded(local[scaling.target][where].detach()).abs()
        padded = part.new_zeros(list(map(int.__mul__, counts, lengths)))
        inside = padded[box_slices(first, size)]
        strides = [step * inside.stride(dim) for dim, step in runs]
        inside.as_strided(view.size, strides, inside.storage_offset()).copy_(part)
        grouped = padded.reshape([n for pair in zip(counts, lengths, strict=True) for n in pair])
        largest = grouped.amax(dim=list(range(1, grouped.ndim, 2))).float()
        box = maxima[scaling.scale][box_slices(tuple(map(int.__sub__, low, scaling.first)), counts)]
        box.copy_(torch.maximum(box, largest.to(box.device)))
    return maxima


def shared_blocks(scalings: Sequence[Scaling], targets: Targets) -> Tensor:
    """Returns which blocks of one weight have to be compared: some rank has a part of it, or only its scale in the box of scales
    that it needs. bool, one entry per block. Equal on all ranks.

    ``scalings``: all of the weight."""
    shape, blocks = scalings[0].shape, scalings[0].blocks
    shared = torch.zeros(_grid(shape, blocks), dtype=torch.bool)
    for scaling in scalings:
        view, layout = scaling.view, targets.layouts[targets.layout[scaling.target]]
        (begin, _), runs = _span(view, shape)
        cuts = [shard_boundaries(layout, i) for i in range(len(layout.shape))]
        along = Counter(dim for (dim, _), n in zip(runs, view.size, strict=True) if n > 1)
        for i, ((dim, step), (boundaries, is_interleaved)) in enumerate(zip(runs, cuts, strict=True)):
            if not boundaries:
                continue
            if is_interleaved or len(scalings) > 1 or (view.size[i] > 1 and (step != 1 or along[dim] > 1)):
                shared[:] = True
            for boundary in boundaries if view.size[i] > 1 else ():
                at = begin[dim] + min(max(boundary - view.start[i], 0), view.size[i])
                if at % blocks[dim] and at < shape[dim]:
                    shared.select(dim, at // blocks[dim])[:] = True
    return shared


def quantize(
    scalings: Sequence[Scaling],
    targets: Targets,
    local: Sequence[Tensor],
    factors: Mapping[int, Tensor],
    format: Fp8Format,
    into: Sequence[Tensor],
) -> None:
    """Writes what this rank owns of each region as fp8.

    Args:
        local: the local tensors of ``targets``.
        factors: for each block whose maximum :func:`block_maxima` returns, the first result of :meth:`Fp8Format.scales`.
        into: tensors of the same shapes, of which those of the regions are fp8.
    """
    for scaling, view, where in _owned_pieces(scalings, targets, local):
        part = rounded(local[scaling.target][where].detach())
        expanded = _expand(factors[scaling.scale].to(part.device), scaling, view)
        into[scaling.target][where].copy_(format.narrow(part, expanded))


# ---- which scales ----


def _check_orphans(manifest: Metadata, placed: Sequence[tuple[Place, ...]], number: dict[str, int]) -> None:
    """Raises ModelMismatch for a scale whose weight is not in the checkpoint, or is not quantized there."""
    for name, places in zip(manifest.names, placed, strict=True):
        weight = name.removesuffix(SUFFIXES[0])
        if weight == name or places:
            continue
        if weight not in number:
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
    others = scales[1:] + [name + suffix for suffix in _REFINEMENTS if name + suffix in number]
    if not scales:
        raise ModelMismatch(
            f"{name} is {dtypes.name(manifest.dtypes[weight])} in the checkpoint and {dtypes.name(into[0])} in the model, but "
            f"its scale {name}{SUFFIXES[0]} is not in the checkpoint"
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
    declared = manifest.quantization.blocks if manifest.quantization is not None else ()
    of_all_dims = {(1,) * (len(shape) - 2) + block for block in declared if len(shape) >= 2}
    blocks = {block for block in of_all_dims if _grid(shape, block) == counts}
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


def _grid(shape: Shape, blocks: Shape) -> Shape:
    """Returns the number of scales along each dim of a weight."""
    return tuple(-(-n // block) for n, block in zip(shape, blocks, strict=True))


# ---- geometry ----


def _owned_pieces(
    scalings: Sequence[Scaling], targets: Targets, local: Sequence[Tensor]
) -> Iterator[tuple[Scaling, View, tuple[slice, ...]]]:
    """Yields what this rank owns of each region, in pieces of bounded size: the view of the weight, and the index of the same
    elements in the local tensor."""
    owned: dict[int, list[OwnedRegion]] = {}
    for scaling in scalings:
        layout, whole = targets.layout[scaling.target], scaling.view
        if layout not in owned:
            owned[layout] = owned_regions(targets.layouts[layout], targets.coordinates[layout])
        for start, size, local_start in owned_parts((whole.start, whole.size), owned[layout]):
            if not size:
                yield scaling, whole, ()
                continue
            limit = _PIECE_ELEMENTS_ON_CPU if local[scaling.target].is_cpu else _PIECE_ELEMENTS
            rows = max(1, limit * size[0] // prod(size))
            for row in range(0, size[0], rows):
                n, steps = (min(rows, size[0] - row), *size[1:]), (row, *(0,) * (len(size) - 1))
                at = tuple(map(int.__add__, local_start, steps))
                yield scaling, whole.crop(tuple(map(int.__add__, start, steps)), n), box_slices(at, n)


def _expand(factors: Tensor, scaling: Scaling, view: View) -> Tensor:
    """Returns the factor of each element of a view, in its shape, or the only one, out of the factors that this rank has."""
    if factors.numel() == 1:
        return factors.reshape(())
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


def _box_of_scales(boxes: Sequence[Box], blocks: Shape) -> tuple[Shape, Shape]:
    """Returns the start and the size of the box of all scales for some boxes of a weight."""
    if not boxes:
        return (0,) * len(blocks), (0,) * len(blocks)
    starts = zip(*(start for start, _ in boxes), strict=True)
    ends = zip(*(map(int.__add__, start, size) for start, size in boxes), strict=True)
    first = tuple(min(along) // n for along, n in zip(starts, blocks, strict=True))
    return first, tuple(-(-max(along) // n) - at for along, n, at in zip(ends, blocks, first, strict=True))
