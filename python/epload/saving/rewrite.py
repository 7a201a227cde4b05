"""Casts or quantizes the tensors of a checkpoint that is converted."""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from epload.checkpoint.base import Checkpoint, read_in_chunks
from epload.checkpoint.file_sets import CONFIG
from epload.checkpoint.manifest import Manifest
from epload.checkpoint.opening import config_next_to
from epload.core import dtypes as dtype_names
from epload.core.buffers import as_memoryview
from epload.core.dtypes import DType, requested
from epload.mapping.precision import left_in_fp32, model_by_config
from epload.mapping.quantize import Quantize
from epload.mapping.quantized_targets import quantize_blocks
from epload.model.targets import collect
from epload.saving.quantized import check_not_quantized, declare, module_of, quantized_manifest, select_weights

_CHUNK_ELEMENTS = 2 << 20
"""Read at once."""


class Rewrite:
    """The tensors of a checkpoint and those that are written."""

    new: Manifest
    """The tensors that are written: scales follow their weights."""
    config: dict[str, bytes]
    """A ``config.json`` that declares how weights are quantized, by its name; empty if none are."""

    def __init__(self, checkpoint: Checkpoint, new: Manifest, rule: Quantize | None, dtype: DType | None) -> None:
        """
        Args:
            new: of the tensors that are written, one for each of the checkpoint's, if none was quantized.
            dtype: the dtype that those have which are not quantized; None for those of the checkpoint.

        Raises:
            CheckpointError: the configuration next to the checkpoint cannot be read.
            ValueError: there is nothing to quantize, or it is unknown what is to be.
        """
        self.new, self.config, self._weights = new, {}, list[int]()
        if rule is not None:
            config = config_next_to(checkpoint)
            self._weights, section = _weights(checkpoint.manifest, new, rule, config)
            self._format, weights = rule.format, set(self._weights)
            self.new = quantized_manifest(new, weights, rule.format)
            if dtype is not None:
                config = {key: value for key, value in config.items() if key != "torch_dtype"}
                config["dtype"] = dtype_names.name(requested("dtype", dtype))
            self.config = {CONFIG: json.dumps(config | {"quantization_config": section}, indent=2).encode()}

    def read(self, checkpoint: Checkpoint, tensor: int) -> Iterator[tuple[int, int, memoryview, int]]:
        """Yields what is written of one tensor of the checkpoint, on CPU: the number in :attr:`new`, where it begins there in
        bytes, the bytes, and how many of the checkpoint they took."""
        before = bisect_left(self._weights, tensor)
        number, offset = tensor + before, 0  # each weight before it is followed by its scales
        if tensor in self._weights[before : before + 1]:
            yield from self._quantize(checkpoint, tensor, number)
            return
        for values in read_in_chunks(checkpoint, tensor, _CHUNK_ELEMENTS):
            data = values.to(self.new.dtypes[number])
            yield number, offset, as_memoryview(data), values.nbytes
            offset += data.nbytes

    def _quantize(self, checkpoint: Checkpoint, tensor: int, number: int) -> Iterator[tuple[int, int, memoryview, int]]:
        """Reads whole rows of blocks."""
        *_, rows, columns = shape = checkpoint.manifest.shapes[tensor]
        row = self._format.blocks(shape)[-2] * columns
        elements, offset, scale_offset = row * max(1, _CHUNK_ELEMENTS // row), 0, 0
        for values in read_in_chunks(checkpoint, tensor, elements, within=rows * columns):
            narrow, scales = quantize_blocks(values.view(-1, columns), self._format)
            yield number, offset, as_memoryview(narrow.contiguous()), values.nbytes
            yield number + 1, scale_offset, as_memoryview(scales.contiguous()), 0
            offset, scale_offset = offset + narrow.nbytes, scale_offset + scales.nbytes


def _weights(old: Manifest, new: Manifest, rule: Quantize, config: Mapping[str, Any]) -> tuple[list[int], dict[str, Any]]:
    """Returns the numbers of the tensors that are quantized, ascending, and the configuration that declares them by their new
    names."""
    if rule.weights:
        check_not_quantized(old)
        rule.check_used(old.names)
        rows = [*enumerate(zip(old.names, old.shapes, old.dtypes, strict=True))]
        if numbers := [i for i, row in rows if rule.selects(*row)]:
            modules = {i: {module_of(new.names[i])} for i, (_, shape, _) in rows if len(shape) > 1}
            return numbers, declare(rule, modules, set(numbers))
        raise ValueError(
            f"no tensor of {old.source} is a matrix in bfloat16, float16 or float32 with a name as in {rule.weights}"
        )
    try:
        model, placed = model_by_config(config, old, torch.bfloat16)
    except ValueError as error:
        raise ValueError(
            f"cannot tell which weights of {old.source} to quantize: no config.json next to it names a model that can be built "
            f"({error}); pass weights=, regular expressions of their names, to Quantize"
        ) from error
    renamed = replace(old, names=new.names)
    regions, section = select_weights(model, collect(model), renamed, placed, rule)
    return list(regions), section


def kept_in_converted(checkpoint: Checkpoint, dtype: torch.dtype) -> set[str]:
    """Returns the names of the tensors that the model, which the configuration next to the checkpoint names, keeps in float32.

    Raises:
        CheckpointError: the configuration cannot be read.
        ValueError: it names a model that is unknown, or that the checkpoint does not fit.
    """
    if dtype not in (torch.float16, torch.bfloat16):
        return set()
    config = config_next_to(checkpoint)
    if not (config.get("architectures") or config.get("_class_name")):
        return set()
    names = checkpoint.manifest.names
    try:
        model, placed = model_by_config(config, checkpoint.manifest, dtype)
        # Of layers that the model does not have, such as those for the prediction of more tokens, other libraries keep the same.
        unplaced = {name for name, places in zip(names, placed, strict=True) if not places}
        in_fp32 = left_in_fp32(model, [*model.state_dict(), *unplaced], dtype)
        kept = {n for n, places in zip(names, placed, strict=True) if any(target in in_fp32 for target, _ in places)}
        return kept | (in_fp32 & unplaced)
    except ValueError as error:
        raise ValueError(
            f"cannot tell which tensors from_pretrained(dtype={dtype_names.name(dtype)}) keeps in float32: the config.json next "
            f"to {checkpoint.manifest.source} names a model that cannot be built ({error}); install what it needs, or move the "
            "configuration away to cast all tensors"
        ) from error
