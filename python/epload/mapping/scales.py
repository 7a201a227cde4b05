"""Finds the scales that a rank needs for fp8 weights that it widens, and multiplies by them once all data has arrived.

A weight stored in fp8 with scales fills a wider parameter as ``(weight.float() * scale).to(dtype)``. Scales are sent like any
tensor; each rank keeps those of the blocks that it owns, in extra tensors that live as long as the load. If the model keeps fp8,
the scales are among its own tensors, and nothing here applies.

A scale is used only if its dtype and the blocks that it is for are certain: the checkpoint's configuration declares them, or the
shapes leave no other choice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from epload.core import dtypes
from epload.core.pieces import Metadata
from epload.core.placement import Box, Layout, OwnedRegion, box_slices, owned_parts, owned_regions, row_major_strides
from epload.core.views import Shape, View
from epload.errors import ModelMismatch
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
    scaled = f"{SUFFIXES[0]}\n" in "\n".join((*manifest.names, ""))  # at once takes a fifth of the time
    if not scaled and set(dtypes.FP8).isdisjoint(manifest.kinds.dtypes):
        return targets, ()
    number = {name: i for i, name in enumerate(manifest.names)}
    _check_orphans(manifest, placed, number)
    targets = replace(
        targets, names=[*targets.names], layout=[*targets.layout], dtypes=[*targets.dtypes], layouts=[*targets.layouts],
        coordinates=[*targets.coordinates], index={**targets.index}, local_only={*targets.local_only},
    )  # fmt: skip
    owned = [owned_regions(*of) for of in zip(targets.layouts, targets.coordinates, strict=True)]
    ranges_of: dict[tuple[object, ...], list[tuple[Shape, Shape]]] = {}
    scalings: list[Scaling] = []
    for i, dtype in enumerate(manifest.dtypes):
        wide = [(targets.index[target], view) for target, view in placed[i]] if dtype in dtypes.FP8 else []
        wide = [(target, view) for target, view in wide if targets.dtypes[target] is not dtype]
        if not wide:
            continue
        shape = manifest.shapes[i]
        scale = _scale_of(manifest, number, i, [targets.dtypes[target] for target, _ in wide])
        blocks = _block_shape(manifest, i, scale)
        ranges: list[tuple[Shape, Shape]] = []
        for target, view in wide:
            key = (targets.layout[target], view, shape, blocks)
            if key not in ranges_of:
                if blocks != _whole(shape) and not _keeps_blocks(view, shape):
                    raise ModelMismatch(
                        f"cannot dequantize {manifest.names[i]} into {targets.names[target]}: the mapping reshapes it across its "
                        "rows, so that its blocks of scales are no longer blocks"
                    )
                ranges_of[key] = _ranges_of_scales(view, shape, blocks, owned[targets.layout[target]])
            ranges += ranges_of[key]
        start = tuple(map(min, zip(*(first for first, _ in ranges), strict=True))) if ranges else (0,) * len(shape)
        end = tuple(map(max, zip(*(end for _, end in ranges), strict=True))) if ranges else start
        size = tuple(map(int.__sub__, end, start))
        extra = _add_target(targets, manifest, scale, size)
        strides = row_major_strides(_grid(shape, blocks))
        offset = sum(map(int.__mul__, start, strides))
        placed[scale] = ((targets.names[extra], View((0,) * len(size), size, offset, strides)),)
        scalings += [Scaling(target, view, shape, extra, start, blocks) for target, view in wide]
    return targets, tuple(scalings)


def scale_tensors(targets: Targets, count: int, device: torch.device) -> list[Tensor]:
    """Returns uninitialized tensors for the scales: the targets from index ``count`` on."""
    kinds = zip(targets.layout[count:], targets.dtypes[count:], strict=True)
    return [torch.empty(targets.layouts[layout].shape, dtype=dtype, device=device) for layout, dtype in kinds]


def multiply(scalings: Sequence[Scaling], targets: Targets, local: Sequence[Tensor]) -> None:
    """Multiplies what this rank owns of each region, in place. ``local`` are the local tensors of ``targets``."""
    owned: dict[int, list[OwnedRegion]] = {}
    for scaling in scalings:
        layout, view = targets.layout[scaling.target], scaling.view
        if layout not in owned:
            owned[layout] = owned_regions(targets.layouts[layout], targets.coordinates[layout])
        for start, size, local_start in owned_parts((view.start, view.size), owned[layout]):
            part = local[scaling.target][box_slices(local_start, size)]
            scale = local[scaling.scale].to(part.device)
            factors = (scale.view(torch.float8_e8m0fnu) if scale.dtype is torch.uint8 else scale).float()
            if scale.numel() == 1:
                factors = factors.reshape(())
            else:
                box, runs = _span(view.crop(start, size), scaling.shape)
                for dim, (begin, n, block, first) in enumerate(zip(*box, scaling.blocks, scaling.first, strict=True)):
                    index = torch.arange(begin, begin + n, device=part.device) // block - first
                    factors = factors.index_select(dim, index)
                factors = factors.as_strided(size, [step * factors.stride(dim) for dim, step in runs])
            part.copy_(part.float() * factors)


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


def _add_target(targets: Targets, manifest: Metadata, scale: int, shape: Shape) -> int:
    """Adds a target of this shape for a scale; returns its index."""
    name = f"scale {manifest.names[scale]}"
    if name not in targets.index:
        targets.index[name] = len(targets.names)
        targets.local_only.add(len(targets.names))
        targets.names.append(name)
        targets.dtypes.append(manifest.dtypes[scale])
        targets.layout.append(len(targets.layouts))
        targets.layouts.append(Layout(shape, (), ()))
        targets.coordinates.append(())
    return targets.index[name]


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
        if all(count in (1, length) for length, count in zip(shape, padded, strict=True)):
            return even
        if not declared and len(counts) == len(shape) and _is_unambiguous(shape, counts, even):
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
    return (
        len(shape) >= 2
        and counts[-1] != 1
        and all(
            count in (1, n)
            or (
                count
                and not n % count
                and not any(other != block and -(-n // other) == count for other in _USUAL_BLOCKS)
            )
            for n, count, block in zip(shape, counts, even, strict=True)
        )
    )


def _whole(shape: Shape) -> Shape:
    """Returns the shape of the only block of a weight."""
    return tuple(max(n, 1) for n in shape)


def _grid(shape: Shape, blocks: Shape) -> Shape:
    """Returns the number of scales along each dim of a weight."""
    return tuple(-(-n // block) for n, block in zip(shape, blocks, strict=True))


# ---- geometry ----


def _span(view: View, shape: Shape) -> tuple[Box, list[tuple[int, int]]]:
    """Returns the box of a weight that a view of it spans, and for each dim of the view the dim of the weight that it runs along,
    and its step there."""
    strides = row_major_strides(shape)
    along = [next((dim for dim, stride in enumerate(strides) if step >= stride), 0) for step in view.strides]
    runs = [(dim, step // strides[dim]) for dim, step in zip(along, view.strides, strict=True)]
    start, offset = [], view.offset
    for stride in strides:
        first, offset = divmod(offset, stride)
        start.append(first)
    size = [1] * len(shape)
    for n, (dim, step) in zip(view.size, runs, strict=True):
        size[dim] += (n - 1) * step
    return (tuple(start), tuple(size)), runs


def _keeps_blocks(view: View, shape: Shape) -> bool:
    """Returns True if every dim of a view runs along one dim of the weight, so that blocks stay blocks."""
    (start, size), runs = _span(view, shape)
    strides = row_major_strides(shape)
    exact = all(
        n == 1 or step == strides[dim] * count
        for n, step, (dim, count) in zip(view.size, view.strides, runs, strict=True)
    )
    return 0 in view.size or (exact and all(a + n <= length for a, n, length in zip(start, size, shape, strict=True)))


def _ranges_of_scales(
    view: View, shape: Shape, blocks: Shape, owned: Sequence[OwnedRegion]
) -> list[tuple[Shape, Shape]]:
    """Returns the first scales and the ends of the scales, along each dim, of each part of a view that is owned."""
    parts = [view.crop(start, size) for start, size, _ in owned_parts((view.start, view.size), owned)]
    if blocks == _whole(shape):
        return [((0,) * len(shape), (1,) * len(shape)) for _ in parts]
    boxes = [_span(part, shape)[0] for part in parts]
    return [
        (
            tuple(map(int.__floordiv__, begin, blocks)),
            tuple(-(-(a + n) // block) for a, n, block in zip(begin, size, blocks, strict=True)),
        )
        for begin, size in boxes
    ]
