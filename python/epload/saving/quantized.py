"""Quantizes the weights of a model that is saved or sent: each rank what it has of them.

The result is a model with other tensors: fp8 in place of what is quantized, and a tensor with the scales that this rank needs of
each weight. Its manifest and places are those of any other model.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from epload.checkpoint.manifest import Manifest
from epload.checkpoint.quantization import quantized_with
from epload.core.attempt import Attempt
from epload.core.placement import box_slices
from epload.core.views import Shape
from epload.errors import ModelMismatch
from epload.mapping import scales
from epload.mapping.fp8 import FP8, Fp8Format
from epload.mapping.mapping import apply_renames
from epload.mapping.place import Place
from epload.mapping.precision import left_in_fp32
from epload.mapping.quantize import Quantize
from epload.mapping.scales import Scaling, TargetViews
from epload.mapping.wrappers import TRAINED_COPY, unwrap
from epload.model.initialization import class_before_fsdp
from epload.model.targets import Targets
from epload.ranks.maxima import as_integers, reduce_maxima
from epload.ranks.topology import Topology

_NOT_QUANTIZED = re.compile(r"(^|[._])(lm_head|gate|router)$")
"""Linear layers that stay as they are: heads, and routers of Mixture-of-Experts models. ``gate_proj`` is none."""
_EXPERT = re.compile(r"(experts)\.\d+\..*")
"""Path of a layer of one expert; libraries make one module of all experts."""


class QuantizedModel:
    """The weights of a model as they are quantized, on one rank. Equal on all ranks but for the targets and the scalings."""

    manifest: Manifest
    """The tensors of the checkpoint: scales follow their weights."""
    placed: list[tuple[Place, ...]]
    """Their places."""
    targets: Targets
    """The model's, with their dtypes, followed by a tensor for the scales that this rank needs of each weight; all without their
    tensors."""

    def __init__(
        self,
        model: nn.Module,
        targets: Targets,
        manifest: Manifest,
        placed: Sequence[tuple[Place, ...]],
        rule: Quantize,
        is_part: bool = False,
    ) -> None:
        """
        Args:
            manifest, placed: of the model as it is, without padding.
            is_part: whether they are only some of its tensors, of which none may be quantized.

        Raises:
            ModelMismatch: a part of a tensor is excluded, or a mapping reshapes weights across their rows.
            ValueError: there is nothing to quantize, or a weight cannot be.
        """
        self._format, names, shapes = rule.format, manifest.names, manifest.shapes
        regions, self.quantization_config = select_weights(model, targets, manifest, placed, rule, is_part)
        """The configuration that declares the weights that are quantized."""
        weights = [(names[i], regions[i], shapes[i], self._format.blocks(shapes[i])) for i in regions]
        self._scalings, views = scales.divide_weights(targets, weights)
        self._shared = {
            number: self._format.grid(shape)
            for number, (_, own, shape, blocks) in enumerate(weights, len(targets.names))
            if scales.is_shared(tuple((targets.layouts[targets.layout[i]], view) for i, view in own), shape, blocks)
        }
        """The shape of the scales of each weight whose blocks ranks compare, by the index of the scales."""
        self.manifest = quantized_manifest(manifest, regions, self._format)
        scale_places = {i: (f"scales of {names[i]}", view) for i, view in zip(regions, views, strict=True)}
        self.placed = []
        for i, places in enumerate(placed):
            self.placed += [places, (scale_places[i],)] if i in scale_places else [places]
        dtypes = list(targets.dtypes)
        for scaling in self._scalings:
            dtypes[scaling.target] = FP8
        self.targets = replace(targets, tensors=[], dtypes=dtypes).with_extra(
            [name for name, _ in scale_places.values()],
            [view.size for view in views],
            [self._format.scale_dtype] * len(views),
        )
        self._batches = scales.stack_alike((row, targets.dtypes[row.target]) for row in self._scalings)
        self._boxes = {row.scale: box_slices(row.first, row.counts) for row in self._scalings}
        self._written: dict[int, Tensor] = {}
        """The tensors that were written last, by index."""

    def quantize(self, local: Attempt[list[Tensor]], topology: Topology, on_host: bool = False) -> list[Tensor]:
        """Returns the local tensors of :attr:`targets`. Collective.

        Args:
            local: of the model; those that are not quantized are in the result.
            topology: the ranks, which compare the maxima of blocks that they share.
            on_host: whether the others are in host memory, instead of where the model's are. They are used again the next time.
        """
        own = Attempt(lambda: self._maxima(local.value))
        reduced = reduce_maxima(topology, Attempt(lambda: self._shared_maxima(own.value)))
        maxima, tensors = own.value, local.value + [torch.empty(0)] * (len(self.targets.names) - len(local.value))
        counts = list(map(prod, self._shared.values()))
        for (number, grid), values in zip(self._shared.items(), torch.split(reduced, counts), strict=True):
            maxima[number].copy_(values.view(torch.float32).reshape(grid)[self._boxes[number]])
        for batch, scaling, stack in self._stacks(local.value):
            device = torch.device("cpu") if on_host else stack.device
            largest = torch.stack([maxima[part.scale] for part in batch]).view(scaling.counts)
            (factors, stored), into = self._format.scales(largest), list[Tensor]()
            for part, of_part in zip(batch, _unstack(stored, batch), strict=True):
                tensors[part.scale] = self._reuse(part.scale, part.counts, device).copy_(of_part)
                tensors[part.target] = self._reuse(part.target, local.value[part.target].shape, device)
                into.append(tensors[part.target][box_slices(part.view.start, part.view.size)])
            narrow = torch.empty_like(stack, dtype=FP8) if len(batch) > 1 else into[0]
            scales.quantize(scaling, stack, factors, self._format, narrow)
            if len(batch) > 1:
                torch._foreach_copy_(into, list(narrow.unbind()))
        return tensors

    def _stacks(self, local: Sequence[Tensor]) -> Iterator[tuple[list[Scaling], Scaling, Tensor]]:
        """Yields scalings of weights that are divided alike, and what this rank has of all of them, with one scaling for it."""
        for alike in self._batches:
            for device in {local[part.target].device for part in alike}:
                batch = [part for part in alike if local[part.target].device == device]
                parts = [local[part.target].detach()[box_slices(part.view.start, part.view.size)] for part in batch]
                if len(batch) > 1:
                    yield batch, scales.stacked(batch[0], len(batch)), torch.stack(parts)
                else:
                    zeros = (0,) * len(batch[0].view.start)
                    yield batch, batch[0]._replace(view=batch[0].view._replace(start=zeros)), parts[0]

    def _maxima(self, local: Sequence[Tensor]) -> dict[int, Tensor]:
        """Returns the largest absolute value of each block among the elements that this rank has, by the index of the scales."""
        maxima: dict[int, Tensor] = {}
        for batch, scaling, stack in self._stacks(local):
            if len(batch) > 1 or batch[0].scale not in maxima:
                of_batch = torch.zeros(scaling.counts, dtype=torch.float32, device=stack.device)
                maxima |= zip((part.scale for part in batch), _unstack(of_batch, batch), strict=True)
            else:
                of_batch = maxima[batch[0].scale]
            scales.add_maxima(scaling, stack, of_batch)
        return maxima

    def _shared_maxima(self, maxima: dict[int, Tensor]) -> Tensor:
        """Returns those of the weights that ranks share, as integers; 0 for a block of which this rank has nothing."""
        parts = [torch.empty(0, dtype=torch.int32)]
        for number, grid in self._shared.items():
            of_weight = torch.zeros(grid, dtype=torch.float32)
            of_weight[self._boxes[number]] = maxima[number].cpu()
            parts.append(as_integers(of_weight).flatten())
        return torch.cat(parts)

    @torch.inference_mode(False)  # a later version, in no such mode, is written to it, too
    def _reuse(self, number: int, shape: Shape, device: torch.device) -> Tensor:
        """Returns the tensor that was written last, or a new one."""
        tensor = self._written.get(number)
        if tensor is None or (tensor.shape, tensor.device) != (shape, device):
            tensor = torch.empty(shape, dtype=self.targets.dtypes[number], device=device)
        self._written[number] = tensor
        return tensor


def _unstack(stack: Tensor, batch: Sequence[Scaling]) -> Sequence[Tensor]:
    """Returns the part of each scaling of a stack, or the only part."""
    return stack.unbind() if len(batch) > 1 else [stack]


def quantized_manifest(manifest: Manifest, weights: Collection[int], format: Fp8Format) -> Manifest:
    """Returns the tensors that are written if some of a manifest, by number, are quantized: scales follow their weights."""
    rows = list[tuple[str, Shape, torch.dtype]]()
    for i, (name, shape, dtype) in enumerate(zip(manifest.names, manifest.shapes, manifest.dtypes, strict=True)):
        if i in weights:
            # Transformers concatenates and stacks the scales of experts.
            is_expert = format.suffix == "_scale_inv" and _EXPERT.search(name) is not None
            of_scale = format.grid(shape) if is_expert else format.scale_shape(shape)
            rows += (name, shape, FP8), (f"{name}{format.suffix}", of_scale, format.scale_dtype)
        else:
            rows.append((name, shape, dtype))
    names, shapes, dtypes = zip(*rows, strict=True)
    if taken := [name for name, count in Counter(names).items() if count > 1]:
        raise ValueError(
            f"expected no tensor with the name of the scales of a weight that is quantized, but there is {taken[0]}; is the "
            "weight quantized already, and stored in a wider dtype?"
        )
    return replace(manifest, names=names, shapes=shapes, dtypes=dtypes)


def declare(rule: Quantize, modules: Mapping[int, Collection[str]], weights: Collection[int]) -> dict[str, Any]:
    """Returns the configuration of a rule, which excludes what else is not quantized, too: libraries have rules of their own for
    modules that are not listed.

    Args:
        modules: by the number of a tensor, the modules of weights that might be quantized: of Linear layers, of stacks of
            experts, and of routers, which are such layers in other libraries; in the model, and as the checkpoint has them.
        weights: the numbers of those that are.
    """
    config = rule.quantization_config
    key = "ignore" if rule.format.suffix == "_scale" else "modules_to_not_convert"
    wide = {module for i, paths in modules.items() for module in paths if i not in weights}
    wide.difference_update(*(modules.get(i, ()) for i in weights))
    listed = list(config.get(key) or config.get("ignored_layers") or ())
    added = sorted(module for module in wide if not rule.format.skips(module))
    skips = rule.format._replace(skip=tuple(added)).skips
    if excluded := sorted({module for i in weights for module in modules.get(i, ()) if skips(module)}):
        raise ValueError(
            f"{excluded[0]} would be quantized, but {key} also has to list {', '.join(added)}, which excludes it by the end of "
            "its name, too; list it there, so that it is not quantized"
        )
    return config | {key: listed + added}


def module_of(name: str) -> str:
    """Returns the module of a weight in a checkpoint."""
    return _EXPERT.sub(r"\1", name.removesuffix(".weight"))


def check_not_quantized(manifest: Manifest) -> None:
    """Raises ValueError if there are quantized weights, which another configuration would no longer declare."""
    if quantized := quantized_with(manifest.names, manifest.dtypes, manifest.shapes):
        scale, weight = next(iter(quantized.items()))
        raise ValueError(f"expected weights that are not quantized, but {weight} is, with {scale}; load them into a wider model")


def select_weights(
    model: nn.Module,
    targets: Targets,
    manifest: Manifest,
    placed: Sequence[tuple[Place, ...]],
    rule: Quantize,
    is_part: bool = False,
) -> tuple[dict[int, TargetViews], dict[str, Any]]:
    """Returns the regions of the checkpoint tensors that are quantized, by the number of the tensor, and the configuration that
    declares them.

    Raises ModelMismatch, ValueError: see :class:`QuantizedModel`."""
    check_not_quantized(manifest)
    if not is_part:
        rule.check_used(manifest.names)
    layers = _layers(model, targets)
    chosen = set(range(len(targets.names))) if rule.weights else _linear_targets(model, targets, rule, layers)
    regions = [list(dict.fromkeys((targets.index[name], view) for name, view in places)) for places in placed]
    weights: dict[int, TargetViews] = {
        i: regions[i]
        for i, (name, shape, dtype) in enumerate(zip(manifest.names, manifest.shapes, manifest.dtypes, strict=True))
        if (regions[i] or rule.weights) and {target for target, _ in regions[i]} <= chosen and rule.selects(name, shape, dtype)
    }
    if not weights and not is_part:
        raise ValueError(
            "found no weights to quantize: expected Linear layers, or stacks of experts, in bfloat16, float16 or float32; pass "
            "weights=, regular expressions of their names, to Quantize"
        )
    _check_not_transposed(model, targets, manifest, weights, rule)
    owners = {target: i for i in weights for target, _ in regions[i]}
    for i, of_tensor in enumerate(regions):
        for target in {target for target, _ in of_tensor} & owners.keys() if i not in weights else ():
            raise ModelMismatch(
                f"{manifest.names[i]} is not quantized but {manifest.names[owners[target]]} is, and both are part of "
                f"{targets.names[target]} in the model; exclude both or none in the quantization_config"
            )
    modules = {
        i: {module_of(name)}.union(*(layers[number] for number in layers.keys() & {target for target, _ in regions[i]}))
        for i, name in enumerate(manifest.names)
        if _NOT_QUANTIZED.search(module_of(name))
        or any(target in layers for target, _ in regions[i])
        # The model has no place for it; another library may.
        or (not regions[i] and len(manifest.shapes[i]) > 1)
    }
    return weights, declare(rule, modules, weights)


def _check_not_transposed(
    model: nn.Module, targets: Targets, manifest: Manifest, weights: Mapping[int, TargetViews], rule: Quantize
) -> None:
    """Raises ValueError if blocks would be of columns of stacks of experts that the model stores as [experts, in, out]."""
    stacks = (m.parameters(recurse=False) for m in model.modules() if getattr(m, "is_transposed", False))
    transposed = {id(parameter) for parameters in stacks for parameter in parameters}
    for i, regions in weights.items():
        rows, columns = rule.format.blocks(manifest.shapes[i])[-2:]
        is_whole = (rows, columns) == tuple(manifest.shapes[i][-2:])
        if rows != columns and not is_whole and any(id(targets.tensors[target]) in transposed for target, _ in regions):
            raise ValueError(
                f"{manifest.names[i]} has its inputs in rows, so that blocks of {rows} x {columns} would divide it along its "
                "outputs; use blocks of 128 x 128, or list its module among those that are not converted"
            )


def _linear_targets(model: nn.Module, targets: Targets, rule: Quantize, layers: Mapping[int, Collection[str]]) -> set[int]:
    """Returns the targets that are weights of Linear layers or stacks of experts, without heads, routers, tied weights, what the
    configuration excludes, what transformers keeps in float32, and layers of other classes than those that it replaces."""
    kept = {id(m.weight) for m in model.modules() if isinstance(m, nn.Linear) and not _is_replaced(type(m), rule)}
    in_fp32 = left_in_fp32(model, targets.index, torch.float16, by_class=False)
    getters = (getattr(module, "get_output_embeddings", None) for module in model.modules())
    head = getattr(next((get() for get in getters if callable(get)), None), "weight", None)
    return {
        number
        for number, paths in layers.items()
        if len(paths) == 1 and targets.tensors[number] is not head and targets.names[number] not in in_fp32
        if id(targets.tensors[number]) not in kept
        for path in paths
        if not _NOT_QUANTIZED.search(path) and not rule.format.skips(path)
    }


def _is_replaced(cls: type, rule: Quantize) -> bool:
    """Returns True if the library of the configuration computes with quantized weights in place of a subclass of Linear: for
    transformers, see ``replace_with_fp8_linear``."""
    before = class_before_fsdp(cls)
    return rule.format.suffix != "_scale_inv" or before is nn.Linear or "GroupedLinear" in before.__name__


def _layers(model: nn.Module, targets: Targets) -> dict[int, set[str]]:
    """Returns the targets that are weights of Linear layers or stacks of experts, each with the paths of its modules, without
    wrappers; a tied weight has several."""
    number_of = {id(tensor): number for number, tensor in enumerate(targets.tensors)}  # hooks may change names
    linear = {number_of.get(id(module.weight)) for module in model.modules() if isinstance(module, nn.Linear)}
    aliases, layers = (*unwrap(model, targets.index)[1], TRAINED_COPY), dict[int, set[str]]()
    for name, bare in zip(targets.index, apply_renames(aliases, targets.index), strict=True):
        number, path = targets.index[name], bare.rpartition(".")[0]
        is_stack = path.endswith("experts") and targets.tensors[number].ndim == 3
        if number in linear or is_stack:
            layers.setdefault(number, set()).add(path)
    return layers
