"""Multiplies fp8 weights that were loaded into wider parameters by their scales, once all data has arrived. See ``scales``."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from epload.core.placement import OwnedRegion, box_slices, owned_parts, owned_regions
from epload.core.views import Shape
from epload.mapping.scales import Scaling, factors, indices_in_weight
from epload.model.targets import Targets


def scale_tensors(targets: Targets, count: int, device: torch.device) -> list[Tensor]:
    """Uninitialized tensors for the scales: the targets from index ``count`` on."""
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
        view = scaling.view
        for start, size, local_start in owned_parts((view.start, view.size), owned[layout]):
            part = local[scaling.target][box_slices(local_start, size)]
            in_view = tuple(map(int.__sub__, start, view.start))
            part.copy_(part.float() * _expand(scaling, local[scaling.scale].to(part.device), in_view, size))


def _expand(scaling: Scaling, scale: Tensor, begin: Shape, size: Shape) -> Tensor:
    """The scale of each element of the box of this size that starts at ``begin`` in the view."""
    if scale.numel() == 1:
        return factors(scale).reshape(())
    indices = [index.to(scale.device) for index in indices_in_weight(scaling.view, scaling.shape, begin, size)]
    blocks = zip(indices, scaling.blocks, scaling.first, strict=True)
    return factors(scale)[tuple(index // block - first for index, block, first in blocks)].expand(size)
