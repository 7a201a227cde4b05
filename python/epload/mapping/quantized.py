"""Weights stored in fp8 with scales, loaded into wider parameters: ``(weight.float() * scale).to(dtype)``.

Scales travel like any tensor; each rank keeps those of the blocks that it owns, in side tensors that live as long as the load.
Unpacking widens fp8 exactly; once all data is there, each rank multiplies what it owns. A model that keeps fp8 has the scales
among its own tensors, and nothing here applies.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import prod

import torch
from torch import Tensor

from epload.core import dtypes
from epload.core.pieces import Metadata
from epload.core.placement import Box, Layout, OwnedRegion, intersect, owned_regions, row_major_strides
from epload.core.views import Shape, View
from epload.errors import ModelMismatch
from epload.mapping.place import Place
from epload.model.targets import Targets

SUFFIXES = ("_scale_inv", "_scale")
"""What the name of a scale has after that of its weight. Both multiply; the first is DeepSeek's, the second llm-compressor's."""
BLOCK = 128
"""Length of a block where a scale's shape allows it; else the dim is divided evenly."""
_NARROW = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)


@dataclass(frozen=True)
class Scaling:
    """A region of a target to be multiplied, and by what."""

    target: int
    view: View
    """From the weight as it is in the checkpoint."""
    shape: Shape
    """Of that weight."""
    scale: int
    """Position of the scale's side tensor among the targets: the box of the scales that this rank needs."""
    first: Shape
    """Where in the scales that box starts, one entry a dim of the weight."""
    blocks: Shape
    """Elements of the weight that share a scale, one entry a dim."""


def with_scales(
    manifest: Metadata, targets: Targets, placed: list[tuple[Place, ...]]
) -> tuple[Targets, tuple[Scaling, ...]]:
    """Targets with the scales that fp8 weights need for wider targets as further ones, placed; and what to multiply.

    Raises:
        ModelMismatch: a weight without its scale, a scale without its weight or of a shape that does not fit; names them.
    """
    if not any(dtype in _NARROW for dtype in manifest.dtypes) and not any(
        n.endswith(SUFFIXES[0]) for n in manifest.names
    ):
        return targets, ()
    number = {name: i for i, name in enumerate(manifest.names)}
    _check_scales(manifest, targets, number)
    targets = replace(
        targets, names=[*targets.names], layout=[*targets.layout], dtypes=[*targets.dtypes], layouts=[*targets.layouts],
        coordinates=[*targets.coordinates], index={**targets.index}, local_only={*targets.local_only},
    )  # fmt: skip
    scalings: list[Scaling] = []
    needs = _Needs(targets)
    for i, (name, dtype) in enumerate(zip(manifest.names, manifest.dtypes, strict=True)):
        if dtype not in _NARROW:
            continue
        wide = [(targets.index[target], view) for target, view in placed[i]]
        wide = [(target, view) for target, view in wide if targets.dtypes[target] is not dtype]
        if not wide:
            continue
        scale = next((number[name + suffix] for suffix in SUFFIXES if name + suffix in number), None)
        if scale is None:
            raise ModelMismatch(
                f"{name} is {dtypes.name(dtype)} in the checkpoint and {dtypes.name(targets.dtypes[wide[0][0]])} in the model, "
                f"but its scale {name}{SUFFIXES[0]} is not in the checkpoint"
            )
        blocks = _blocks(manifest, i, scale)
        for target, view in wide:
            if not dtypes.is_wide(targets.dtypes[target]):
                raise ModelMismatch(
                    f"{name} cannot be dequantized to {dtypes.name(targets.dtypes[target])} of the model"
                )
            if prod(blocks) != prod(manifest.shapes[i]) and not _runs_within_rows(view, manifest.shapes[i]):
                raise ModelMismatch(
                    f"{name} is viewed across its rows on its way into {targets.names[target]}, which its scales cannot be"
                )
        start, size = needs.box(wide, manifest.shapes[i], blocks)
        side = _add(targets, manifest, scale, size)
        grid = row_major_strides(_grid(manifest.shapes[i], blocks))
        offset = sum(map(int.__mul__, start, grid))
        placed[scale] = ((targets.names[side], View((0,) * len(size), size, offset, grid)),)
        scalings += [Scaling(target, view, manifest.shapes[i], side, start, blocks) for target, view in wide]
    return targets, tuple(scalings)


def _check_scales(manifest: Metadata, targets: Targets, number: dict[str, int]) -> None:
    for name in manifest.names:
        weight = name.removesuffix(SUFFIXES[0])
        if weight != name and weight not in number and name not in targets.index:
            raise ModelMismatch(f"{name} is a scale without its weight: {weight} is not in the checkpoint")


class _Needs:
    """Which scales this rank needs: those of the blocks that share elements with what it owns."""

    def __init__(self, targets: Targets) -> None:
        self.layouts = targets.layout
        self.owned = [owned_regions(*of) for of in zip(targets.layouts, targets.coordinates, strict=True)]
        self.known: dict[tuple[object, ...], Box | None] = {}

    def box(self, places: Sequence[tuple[int, View]], shape: Shape, blocks: Shape) -> Box:
        """The smallest box of the scales that has all for these places of a weight; an empty one if there are none."""
        boxes = []
        for target, view in places:
            key = (self.layouts[target], view, shape, blocks)
            if key not in self.known:
                self.known[key] = self._of_view(view, self.owned[key[0]], shape, blocks)
            if (box := self.known[key]) is not None:
                boxes.append(box)
        return _around(boxes) or ((0,) * len(shape), (0,) * len(shape))

    def _of_view(self, view: View, owned: Sequence[OwnedRegion], shape: Shape, blocks: Shape) -> Box | None:
        boxes = []
        for region in owned:
            if (shared := intersect((view.start, view.size), (region.start, region.size))) is None:
                continue
            if prod(_grid(shape, blocks)) == 1:
                return (0,) * len(shape), (1,) * len(shape)
            low, size = shared
            ends = [
                (first, first + sum((n - 1) * step for _, n, step in runs))
                for first, runs in _runs(view, shape, tuple(map(int.__sub__, low, view.start)), size)
            ]
            first = tuple(low // block for (low, _), block in zip(ends, blocks, strict=True))
            boxes.append(
                (first, tuple(h // block + 1 - f for (_, h), block, f in zip(ends, blocks, first, strict=True)))
            )
        return _around(boxes)


def _around(boxes: Sequence[Box]) -> Box | None:
    if len(boxes) < 2:
        return boxes[0] if boxes else None
    low = tuple(map(min, zip(*(start for start, _ in boxes), strict=True)))
    high = map(max, zip(*(map(int.__add__, start, size) for start, size in boxes), strict=True))
    return low, tuple(map(int.__sub__, high, low))


def _grid(shape: Shape, blocks: Shape) -> Shape:
    """How many scales there are along each dim of a weight."""
    return tuple(-(-n // block) for n, block in zip(shape, blocks, strict=True))


def _add(targets: Targets, manifest: Metadata, scale: int, shape: Shape) -> int:
    """A side target of this shape for a scale."""
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


def _blocks(manifest: Metadata, weight: int, scale: int) -> Shape:
    shape, counts = manifest.shapes[weight], manifest.shapes[scale]
    if prod(counts) == 1:
        return shape
    padded = counts + (1,) * (len(shape) - len(counts))  # one a row, without the dims that follow
    blocks = []
    for length, count in zip(shape, padded, strict=False):
        if -(-length // BLOCK) == count:
            blocks.append(BLOCK)
        elif count and length % count == 0:
            blocks.append(length // count)
    if len(blocks) != len(shape) or len(padded) != len(shape):
        raise ModelMismatch(
            f"{manifest.names[scale]} has shape {list(counts)}, which is no scale for blocks of {manifest.names[weight]} of "
            f"shape {list(shape)}"
        )
    return tuple(blocks)


def side_tensors(targets: Targets, count: int, device: torch.device) -> list[Tensor]:
    """Storage for the targets from number ``count`` on."""
    return [
        torch.empty(targets.layouts[layout].shape, dtype=dtype, device=device)
        for layout, dtype in zip(targets.layout[count:], targets.dtypes[count:], strict=True)
    ]


def multiply(scalings: Sequence[Scaling], targets: Targets, local: Sequence[Tensor]) -> None:
    """Multiplies what this rank owns of each region, in place. ``local`` are the local tensors of ``targets``."""
    owned: dict[int, list[OwnedRegion]] = {}
    for scaling in scalings:
        layout = targets.layout[scaling.target]
        if layout not in owned:
            owned[layout] = owned_regions(targets.layouts[layout], targets.coordinates[layout])
        for region in owned[layout]:
            shared = intersect((scaling.view.start, scaling.view.size), (region.start, region.size))
            if shared is None:
                continue
            low, size = shared
            at = [here + a - b for here, a, b in zip(region.local_start, low, region.start, strict=True)]
            part = local[scaling.target][tuple(slice(a, a + n) for a, n in zip(at, size, strict=True))]
            within = tuple(map(int.__sub__, low, scaling.view.start))
            part.copy_(part.float() * _expanded(scaling, local[scaling.scale].to(part.device), within, size))


def _expanded(scaling: Scaling, scale: Tensor, begin: Shape, size: Shape) -> Tensor:
    """The scale of each element of the box of this size that begins ``begin`` into the view."""
    if scale.numel() == 1:
        return scale.float().reshape(())
    indices = [index.to(scale.device) for index in _indices(scaling.view, scaling.shape, begin, size)]
    at = zip(indices, scaling.blocks, scaling.first, strict=True)
    return scale.float()[tuple(i // block - first for i, block, first in at)].expand(size)


def _indices(view: View, shape: Shape, begin: Shape, size: Shape) -> list[Tensor]:
    """For each dim of a weight of this shape, where along it lie the elements of the box that begins ``begin`` into the view.
    They broadcast to its size."""
    indices = []
    for first, runs in _runs(view, shape, begin, size):
        index = torch.full((1,) * len(size), first)
        for dim, n, step in runs:
            index = index + (torch.arange(n) * step).reshape([-1 if d == dim else 1 for d in range(len(size))])
        indices.append(index)
    return indices


def _runs(view: View, shape: Shape, begin: Shape, size: Shape) -> Iterator[tuple[int, list[tuple[int, int, int]]]]:
    """For each dim of a weight of this shape: the index at which the box that begins ``begin`` into the view starts, and the
    dims of the box that run along it, each with its length and its step in indices."""
    left = view.offset + sum(map(int.__mul__, begin, view.strides))
    for dim_of_weight, stride in enumerate(row_major_strides(shape)):
        first, left = divmod(left, stride)
        yield (
            first,
            [
                (dim, n, step // stride)
                for dim, (n, step) in enumerate(zip(size, view.strides, strict=True))
                if n > 1 and _runs_along(shape, step) == dim_of_weight
            ],
        )


def _runs_along(shape: Shape, step: int) -> int:
    """The outermost dim of a weight in which a step is a whole number of indices."""
    return next(dim for dim, stride in enumerate(row_major_strides(shape)) if step >= stride)


@cache
def _runs_within_rows(view: View, shape: Shape) -> bool:
    """Whether every dim of a view runs along one dim of the weight, so that blocks stay blocks."""
    strides = row_major_strides(shape)
    if any(n > 1 and step % strides[_runs_along(shape, step)] for n, step in zip(view.size, view.strides, strict=True)):
        return False
    indices = _indices(view, shape, (0,) * len(view.size), view.size)
    return all(int(index.max()) < length for index, length in zip(indices, shape, strict=True))
