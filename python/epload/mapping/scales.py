"""Finds the scales that a rank needs for fp8 weights that it widens, and multiplies by them once all data has arrived.

A weight stored in fp8 with scales fills a wider parameter as ``(weight.float() * scale).to(dtype)``. Scales are sent like any
tensor; each rank keeps those of the blocks that it owns, in extra tensors that live as long as the load. If the model keeps fp8,
the scales are among its own tensors, and nothing here applies.

A scale is used only if its dtype and the blocks that it is for are certain: the checkpoint's configuration declares them, or the
shapes leave no other choice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import prod

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
_FACTORS: dict[torch.dtype, Callable[[Tensor], Tensor]] = {
    torch.float32: Tensor.float,
    torch.bfloat16: Tensor.float,
    torch.float16: Tensor.float,
    torch.float8_e8m0fnu: Tensor.float,
    torch.uint8: lambda scale: scale.view(torch.float8_e8m0fnu).float(),
}
"""Makes factors of scales, by the dtype in which they are stored; others are refused. uint8 holds E8M0 exponents (the byte b
stands for 2^(b - 127), 255 for NaN), and is refused where the configuration does not declare them."""
_WAY_OUT = (
    "pass the folder with the checkpoint's config.json, whose quantization_config declares it, or set "
    "model.config.quantization_config"
)


@dataclass(frozen=True)
class Scaling:
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
    scalings: list[Scaling] = []
    needed = _NeededScales(targets)
    for i, (name, dtype) in enumerate(zip(manifest.names, manifest.dtypes, strict=True)):
        if dtype not in dtypes.FP8:
            continue
        wide = [(targets.index[target], view) for target, view in placed[i]]
        wide = [(target, view) for target, view in wide if targets.dtypes[target] is not dtype]
        if not wide:
            continue
        scale = _scale_of(manifest, targets, number, i, wide[0][0])
        for target, _ in wide:
            if not dtypes.is_wide(targets.dtypes[target]):
                raise ModelMismatch(
                    f"cannot dequantize {name} to {dtypes.name(targets.dtypes[target])}, its dtype in the model"
                )
        blocks, shape = _block_shape(manifest, i, scale), manifest.shapes[i]
        for target, view in wide:
            if prod(blocks) != prod(shape) and not _runs_within_rows(view, shape):
                raise ModelMismatch(
                    f"cannot dequantize {name} into {targets.names[target]}: the mapping reshapes it across its rows, so that "
                    "its blocks of scales are no longer blocks"
                )
        start, size = needed.box(wide, shape, blocks)
        extra = _add_target(targets, manifest, scale, size)
        strides = row_major_strides(_grid(shape, blocks))
        offset = sum(map(int.__mul__, start, strides))
        placed[scale] = ((targets.names[extra], View((0,) * len(size), size, offset, strides)),)
        scalings += [Scaling(target, view, shape, extra, start, blocks) for target, view in wide]
    return targets, tuple(scalings)


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


def _scale_of(manifest: Metadata, targets: Targets, number: dict[str, int], weight: int, target: int) -> int:
    """Returns the number of a weight's scale. Raises ModelMismatch if there is not one, or its dtype means nothing."""
    name = manifest.names[weight]
    scales = [number[name + suffix] for suffix in SUFFIXES if name + suffix in number]
    if not scales:
        raise ModelMismatch(
            f"{name} is {dtypes.name(manifest.dtypes[weight])} in the checkpoint and {dtypes.name(targets.dtypes[target])} in "
            f"the model, but its scale {name}{SUFFIXES[0]} is not in the checkpoint"
        )
    if len(scales) > 1:
        both = " and ".join(manifest.names[scale] for scale in scales)
        raise ModelMismatch(
            f"{name} has two scales in the checkpoint, {both}; leave the one that it is not multiplied by out of the checkpoint"
        )
    if (other := next((name + suffix for suffix in _REFINEMENTS if name + suffix in number), None)) is not None:
        raise ModelMismatch(f"cannot dequantize {name}: it has {other} besides its scale, which epload does not apply")
    scale, dtype = scales[0], manifest.dtypes[scales[0]]
    if dtype not in _FACTORS:
        supported = ", ".join(map(dtypes.name, _FACTORS))
        raise ModelMismatch(
            f"{manifest.names[scale]} is {dtypes.name(dtype)}, expected a scale of one of the dtypes {supported}"
        )
    if dtype is torch.uint8 and not (manifest.quantization is not None and manifest.quantization.exponents):
        raise ModelMismatch(
            f"{manifest.names[scale]} is uint8, which may hold exponents or factors, and no configuration declares an MX format "
            f'(quant_method "mxfp8", or scale_fmt "ue8m0"); {_WAY_OUT}'
        )
    return scale


class _NeededScales:
    """The scales that this rank needs: those of the blocks that overlap with what it owns."""

    def __init__(self, targets: Targets) -> None:
        self._layouts = targets.layout
        self._owned = [owned_regions(*of) for of in zip(targets.layouts, targets.coordinates, strict=True)]
        self._boxes: dict[tuple[object, ...], list[Box]] = {}

    def box(self, places: Sequence[tuple[int, View]], shape: Shape, blocks: Shape) -> Box:
        """Returns the smallest box of scales that covers these places of a weight; an empty box if there are none."""
        boxes: list[Box] = []
        for target, view in places:
            key = (self._layouts[target], view, shape, blocks)
            if key not in self._boxes:
                owned = owned_parts((view.start, view.size), self._owned[key[0]])
                self._boxes[key] = [_scales_of(view, start, size, shape, blocks) for start, size, _ in owned]
            boxes += self._boxes[key]
        if not boxes:
            return (0,) * len(shape), (0,) * len(shape)
        low = tuple(map(min, zip(*(start for start, _ in boxes), strict=True)))
        high = map(max, zip(*(map(int.__add__, start, size) for start, size in boxes), strict=True))
        return low, tuple(map(int.__sub__, high, low))


def _scales_of(view: View, start: Shape, size: Shape, shape: Shape, blocks: Shape) -> Box:
    """Returns the scales for the box of this start and size in a target that a view of a weight fills."""
    if prod(_grid(shape, blocks)) == 1:
        return (0,) * len(shape), (1,) * len(shape)
    indices = _indices_in_weight(view, shape, tuple(map(int.__sub__, start, view.start)), size)
    first = tuple(int(index.min()) // block for index, block in zip(indices, blocks, strict=True))
    last = (int(index.max()) // block for index, block in zip(indices, blocks, strict=True))
    return first, tuple(b + 1 - a for a, b in zip(first, last, strict=True))


def _grid(shape: Shape, blocks: Shape) -> Shape:
    """Returns the number of scales along each dim of a weight."""
    return tuple(-(-n // block) for n, block in zip(shape, blocks, strict=True))


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


def _block_shape(manifest: Metadata, weight: int, scale: int) -> Shape:
    """Returns the shape of the blocks that share a scale. Raises ModelMismatch if the shapes of weight and scale leave a choice
    of blocks that the configuration does not make, or do not go together."""
    shape, counts = manifest.shapes[weight], manifest.shapes[scale]
    if prod(counts) == 1:
        return shape
    declared = manifest.quantization.blocks if manifest.quantization is not None else ()
    of_all_dims = {(1,) * (len(shape) - 2) + block for block in declared if len(shape) >= 2}
    blocks = {block for block in of_all_dims if _grid(shape, block) == counts}
    padded = counts + (1,) * (len(shape) - len(counts))  # per-row scales lack the dims that follow
    if not blocks and len(padded) == len(shape):
        if all(count in (1, length) for length, count in zip(shape, padded, strict=True)):
            blocks = {tuple(map(_even_length, shape, padded))}
        elif not declared and len(counts) == len(shape):
            blocks = _inferred_blocks(shape, counts)
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


def _even_length(length: int, count: int) -> int:
    """Returns the length of a block if a dim is divided as evenly as possible; 1 in an empty dim."""
    return -(-length // max(count, 1)) or 1


def _inferred_blocks(shape: Shape, counts: Shape) -> set[Shape]:
    """Returns the blocks of equal size that scales of this shape are for; nothing if another division has as many: blocks of the
    usual sizes may end in a smaller one, and scales that vary along the rows alone may be for unequal parts of a fused weight."""
    if len(shape) < 2 or counts[-1] == 1:
        return set()
    inferred = []
    for length, count in zip(shape, counts, strict=True):
        even = _even_length(length, count)
        uneven = count == 0 or length % count
        others = any(even != block and -(-length // block) == count for block in _USUAL_BLOCKS)
        if count not in (1, length) and (uneven or others):
            return set()
        inferred.append(even)
    return {tuple(inferred)}


def _indices_in_weight(view: View, shape: Shape, begin: Shape, size: Shape) -> list[Tensor]:
    """Returns, for each dim of a weight of this shape, the index along it of each element of the box of ``size`` that starts at
    ``begin`` in a view of the weight. The tensors broadcast to ``size``."""
    indices = []
    offset = view.offset + sum(map(int.__mul__, begin, view.strides))
    for dim_of_weight, stride in enumerate(row_major_strides(shape)):
        first, offset = divmod(offset, stride)
        index = torch.full((1,) * len(size), first)
        for dim, (n, step) in enumerate(zip(size, view.strides, strict=True)):
            if n > 1 and _runs_along(shape, step) == dim_of_weight:
                along = torch.arange(n) * (step // stride)
                index = index + along.reshape([-1 if d == dim else 1 for d in range(len(size))])
        indices.append(index)
    return indices


def _runs_along(shape: Shape, step: int) -> int:
    """Returns the outermost dim of a weight whose stride is at most ``step`` elements."""
    return next(dim for dim, stride in enumerate(row_major_strides(shape)) if step >= stride)


@cache
def _runs_within_rows(view: View, shape: Shape) -> bool:
    """Returns True if every dim of a view runs along one dim of the weight, so that blocks stay blocks."""
    if 0 in view.size:
        return True
    strides = row_major_strides(shape)
    if any(n > 1 and step % strides[_runs_along(shape, step)] for n, step in zip(view.size, view.strides, strict=True)):
        return False
    indices = _indices_in_weight(view, shape, (0,) * len(view.size), view.size)
    return all(int(index.max()) < length for index, length in zip(indices, shape, strict=True))


def scale_tensors(targets: Targets, count: int, device: torch.device) -> list[Tensor]:
    """Returns uninitialized tensors for the scales: the targets from index ``count`` on."""
    return [
        torch.empty(targets.layouts[layout].shape, dtype=dtype, device=device)
        for layout, dtype in zip(targets.layout[count:], targets.dtypes[count:], strict=True)
    ]


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
            factors = _FACTORS[scale.dtype](scale)
            if scale.numel() == 1:
                factors = factors.reshape(())
            else:
                indices = _indices_in_weight(view, scaling.shape, tuple(map(int.__sub__, start, view.start)), size)
                blocks = zip(indices, scaling.blocks, scaling.first, strict=True)
                factors = factors[tuple(index.to(part.device) // block - first for index, block, first in blocks)]
            part.copy_(part.float() * factors)
