"""Quantizes the weights of a model that is saved or sent: each rank what it has of them.

The result is a model with other tensors: fp8 in place of what is quantized, and a tensor with the scales that this rank needs of
each weight. Its manifest and places are those of any other model.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from epload.checkpoint.manifest import Manifest
from epload.checkpoint.quantization import quantized_with
from epload.core.attempt import Attempt
from epload.core.placement import box_slices
from epload.core.views import Shape, View
from epload.errors import ModelMismatch
from epload.mapping import scales
from epload.mapping.fp8 import FP8
from epload.mapping.mapping import apply_renames
from epload.mapping.place import Place
from epload.mapping.precision import kept_in_fp32
from epload.mapping.quantize import Quantize, linear_targets
from epload.mapping.scales import ScaleBoxes, Scaling
from epload.mapping.wrappers import unwrap
from epload.model.targets import Targets
from epload.ranks.maxima import as_integers

CONFIG = "config.json"
Exchange = Callable[[Attempt[Tensor]], Tensor]
"""Returns the elementwise maximum over all ranks of integers (int32 on CPU), as many on each; raises if any rank has none."""


class QuantizedModel:
    """The weights of a model as they are quantized, on one rank. Equal on all ranks but for the targets and the scalings."""

    manifest: Manifest
    """The tensors of the checkpoint: scales follow their weights."""
    placed: list[tuple[Place, ...]]
    """Their places."""
    targets: Targets
    """The model's, with their dtypes, followed by a tensor for the scales that this rank needs of each weight."""

    def __init__(
        self,
        model: nn.Module,
        targets: Targets,
        manifest: Manifest,
        placed: Sequence[tuple[Place, ...]],
        rule: Quantize,
    ) -> None:
        """
        Args:
            manifest, placed: of the model as it is, without padding.

        Raises:
            ModelMismatch: a part of a tensor is excluded, or a mapping reshapes weights across their rows.
            ValueError: there is nothing to quantize, or a weight cannot be.
        """
        self._format, self._count = rule.declaration.format, len(targets.names)
        weights = select_weights(model, targets, manifest, placed, rule)
        boxes, self._scalings = ScaleBoxes(targets), list[Scaling]()
        names, sizes, dtypes = list[str](), list[Shape](), list(targets.dtypes)
        rows: list[tuple[str, Shape, torch.dtype, tuple[Place, ...]]] = []
        shared_of: dict[tuple[object, ...], Tensor] = {}
        self._shared: dict[int, Tensor] = {}
        """The blocks that ranks compare, of the weights that have any, by the index of the scales."""
        for i, row in enumerate(zip(manifest.names, manifest.shapes, manifest.dtypes, placed, strict=True)):
            if i not in weights:
                rows.append(row)
                continue
            name, shape, _, places = row
            blocks, scale = self._format.blocks(shape), f"{name}{self._format.suffix}"
            first, view = boxes.find(name, weights[i], shape, blocks)
            number = self._count + len(names)
            scalings = [Scaling(target, region, shape, number, first, blocks) for target, region in weights[i]]
            key = shape, *((targets.layout[target], id(region)) for target, region in weights[i])
            if key not in shared_of:
                shared_of[key] = scales.shared_blocks(scalings, targets)
            if shared_of[key].any():
                self._shared[number] = shared_of[key]
            self._scalings += scalings
            for scaling in scalings:
                dtypes[scaling.target] = FP8
            names.append(f"scales of {name}")
            sizes.append(view.size)
            rows.append((name, shape, FP8, places))
            rows.append((scale, self._format.scale_shape(shape), self._format.scale_dtype, ((names[-1], view),)))
        all_names, shapes, all_dtypes, self.placed = map(list, zip(*rows, strict=True))
        self.manifest = replace(manifest, names=tuple(all_names), shapes=tuple(shapes), dtypes=tuple(all_dtypes))
        scale_dtypes = [self._format.scale_dtype] * len(names)
        self._first = {scaling.scale: scaling.first for scaling in self._scalings}
        self.targets = replace(targets, dtypes=dtypes).with_extra(names, sizes, scale_dtypes)
        self._tensors: list[Tensor] = []

    def quantize(self, local: Attempt[list[Tensor]], exchange: Exchange, on_host: bool = False) -> list[Tensor]:
        """Returns the local tensors of :attr:`targets`. Collective.

        Args:
            local: of the model; those that are not quantized are in the result.
            exchange: called once.
            on_host: whether the others are in host memory, instead of where the model's are. They are used again the next time.
        """
        maxima = Attempt(lambda: scales.block_maxima(self._scalings, self.targets, local.value))
        reduced = exchange(Attempt(lambda: self._shared_maxima(maxima.value)))
        self._take(maxima.value, reduced)
        tensors = self._allocate(local.value, on_host)
        factors: dict[int, Tensor] = {}
        for number, of_blocks in maxima.value.items():
            factors[number], stored = self._format.scales(of_blocks)
            tensors[number].copy_(stored)
        scales.quantize(self._scalings, self.targets, local.value, factors, self._format, tensors)
        return tensors

    def _shared_maxima(self, maxima: dict[int, Tensor]) -> Tensor:
        """Returns those of the blocks that ranks share, as integers; 0 for one of which this rank has nothing."""
        parts = [torch.empty(0, dtype=torch.int32)]
        for number, shared in self._shared.items():
            grid = torch.zeros(shared.shape)
            grid[self._box(number)] = maxima[number].cpu()
            parts.append(as_integers(grid[shared]))
        return torch.cat(parts)

    def _take(self, maxima: dict[int, Tensor], reduced: Tensor) -> None:
        """Replaces the maxima of the blocks that ranks share by those of all ranks."""
        counts = [int(shared.sum()) for shared in self._shared.values()]
        for (number, shared), values in zip(self._shared.items(), torch.split(reduced, counts), strict=True):
            grid = torch.zeros(shared.shape)
            grid[shared] = values.view(torch.float32)
            box = self._box(number)
            of_all = grid[box].to(maxima[number].device)
            maxima[number][:] = torch.where(shared[box].to(of_all.device), of_all, maxima[number])

    def _box(self, number: int) -> tuple[slice, ...]:
        """Returns the box of all scales of a weight that this rank needs."""
        return box_slices(self._first[number], self.targets.layouts[self.targets.layout[number]].shape)

    def _allocate(self, local: Sequence[Tensor], on_host: bool) -> list[Tensor]:
        """Returns the tensors to write: the model's, but for those that are quantized and their scales."""
        device_of = {scaling.scale: local[scaling.target].device for scaling in self._scalings}
        device_of |= {scaling.target: local[scaling.target].device for scaling in self._scalings}
        tensors = list(local) + [torch.empty(0)] * (len(self.targets.names) - self._count)
        for number, device in device_of.items():
            shape = (
                local[number].shape if number < self._count else self.targets.layouts[self.targets.layout[number]].shape
            )
            device = torch.device("cpu") if on_host else device
            old = self._tensors[number] if self._tensors else None
            if old is None or (old.shape, old.device) != (shape, device):
                old = torch.empty(shape, dtype=self.targets.dtypes[number], device=device)
            tensors[number] = old
        self._tensors = tensors
        return tensors


def quantized_config(config: dict[str, Any], rule: Quantize) -> bytes:
    """Returns a ``config.json`` that declares how weights are quantized."""
    return json.dumps(config | {"quantization_config": rule.quantization_config}, indent=2).encode()


def select_weights(
    model: nn.Module, targets: Targets, manifest: Manifest, placed: Sequence[tuple[Place, ...]], rule: Quantize
) -> dict[int, list[tuple[int, View]]]:
    """Returns the regions of the checkpoint tensors that are quantized, by the number of the tensor.

    Raises ModelMismatch, ValueError: see :class:`QuantizedModel`."""
    if quantized := quantized_with(manifest.names, manifest.dtypes, manifest.shapes):
        scale, weight = next(iter(quantized.items()))
        raise ValueError(
            f"expected weights that are not quantized, but {weight} is, with {scale}; load them into a wider model"
        )
    chosen = set(range(len(targets.names)))
    if not rule.weights:
        aliases = unwrap(model, targets.index)[1]
        bare = dict(zip(targets.index, apply_renames(aliases, targets.index), strict=True))
        chosen = linear_targets(model, targets, bare, rule, kept_in_fp32(model, targets.index, torch.float16))
    regions = [list(dict.fromkeys((targets.index[name], view) for name, view in places)) for places in placed]
    weights = {
        i: regions[i]
        for i, (name, shape, dtype) in enumerate(zip(manifest.names, manifest.shapes, manifest.dtypes, strict=True))
        if {target for target, _ in regions[i]} <= chosen and rule.selects(name, shape, dtype)
    }
    if not weights:
        raise ValueError(
            "found no weights to quantize: expected Linear layers, or stacks of experts, in bfloat16, float16 or float32; pass "
            "weights=, regular expressions of their names, to Quantize"
        )
    owners = {target: i for i in weights for target, _ in regions[i]}
    for i, of_tensor in enumerate(regions):
        for target in {target for target, _ in of_tensor} & owners.keys() if i not in weights else ():
            raise ModelMismatch(
                f"{manifest.names[i]} is not quantized but {manifest.names[owners[target]]} is, and both are part of "
                f"{targets.names[target]} in the model; exclude both or none in the quantization_config"
            )
    return weights
