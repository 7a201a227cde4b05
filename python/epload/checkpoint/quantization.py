"""Quantized weights of a checkpoint: what its configuration declares of them, and which tensors belong to them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from epload.core.dtypes import FP8, INTEGERS
from epload.core.pieces import Block, Quantization

_MX_GROUP = (1, 32)
"""Block of the microscaling (MX) formats (https://www.opencompute.org, OCP Microscaling Formats 1.0)."""
_SQUARE = (128, 128)
_ALGORITHMS = {"MXFP8": _MX_GROUP, "FP8_PB_WO": _SQUARE, "FP8_BLOCK_SCALES": _SQUARE}
"""ModelOpt's names of algorithms with blocks."""
_COMPANION = re.compile(
    r"scale|SCB|absmax|quant_map|quant_state|zero|codebook|centroid|lookup_table|tables|_?biases$|qbiases$"
)
"""Leaf of the name of a tensor that a quantized weight next to it is decoded with."""


def declared_quantization(config: Mapping[str, Any]) -> Quantization:
    """Reads a ``quantization_config`` of ``config.json``, or the ``quantization`` of ModelOpt's ``hf_quant_config.json``.

    Raises:
        ValueError: a block size is malformed.
    """
    method = config.get("quant_method")
    method = str(getattr(method, "value", method) or "").lower()
    texts = [method, config.get("format"), config.get("scale_fmt"), config.get("quant_algo")]
    blocks = [_block("weight_block_size", config["weight_block_size"])] if config.get("weight_block_size") else []
    blocks += _algorithm_blocks(config)
    for layer in _mappings(config.get("quantized_layers")):
        blocks += _algorithm_blocks(layer)
        texts.append(layer.get("quant_algo"))
    for group in _groups(config):
        weights = group.get("weights", group.get("weight"))
        for each in weights if isinstance(weights, list) else [weights]:
            if isinstance(each, Mapping):
                blocks += _group_blocks(each)
                texts += [group.get("format"), each.get("scale_dtype"), each.get("scale_format")]
    if not blocks and any("mxfp8" in str(text).lower() for text in texts):
        blocks.append(_MX_GROUP)
    # In a group, scales are of dtype uint8 only if they are exponents.
    exponents = any(re.search(r"mxfp8|e8m0|uint8", str(text).lower()) for text in texts)
    return Quantization(method, tuple(dict.fromkeys(blocks)), exponents)


def quantization_of(config: Any) -> Quantization | None:
    """Reads the content of a ``config.json`` or ``hf_quant_config.json``; None if it declares no quantization.

    Raises:
        ValueError: it is no JSON object, or declares a malformed block size.
    """
    if not isinstance(config, Mapping):
        raise ValueError(f"expected a JSON object, got {type(config).__name__}")
    for section in (config, *_mappings({"text": config.get("text_config")})):
        for key in ("quantization_config", "compression_config", "quantization"):
            if isinstance(declared := section.get(key), Mapping):
                return declared_quantization(declared)
    return None


def quantized_with(
    names: Sequence[str], dtypes: Sequence[torch.dtype], shapes: Sequence[tuple[int, ...]]
) -> dict[str, str]:
    """Returns the tensors that quantized weights are decoded with, such as scales, each with one of these weights.

    A weight is quantized if it is stored as fp8, or as a matrix of integers, and has such tensors next to it.
    """
    stored = {*FP8, *INTEGERS} - {torch.int64, torch.uint64}  # indices
    if stored.isdisjoint(dtypes):
        return {}
    weights: dict[str, str] = {}
    for name, dtype, shape in zip(names, dtypes, shapes, strict=True):
        if dtype in stored and (dtype in FP8 or len(shape) > 1) and not _is_companion(name):
            weights.setdefault(name.rpartition(".")[0], name)
            weights.setdefault(name, name)  # bitsandbytes adds to the weight's own name
    companions = {}
    for name in filter(_is_companion, names):
        weight = weights.get(name.rpartition(".")[0])
        if weight is not None:
            companions[name] = weight
    return companions


def _is_companion(name: str) -> bool:
    return _COMPANION.search(name.rpartition(".")[2]) is not None


def _groups(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yields the groups of weights of compressed-tensors and ModelOpt (``config_groups``) and of Quark."""
    for key in ("config_groups", "layer_quant_config", "layer_type_quant_config"):
        yield from _mappings(config.get(key))
    yield from _mappings({"all": config.get("global_quant_config")})


def _mappings(values: Any) -> Iterator[Mapping[str, Any]]:
    """Yields the values of a dict that are dicts."""
    if isinstance(values, Mapping):
        yield from (value for value in values.values() if isinstance(value, Mapping))


def _algorithm_blocks(config: Mapping[str, Any]) -> list[Block]:
    block = _ALGORITHMS.get(str(config.get("quant_algo")).upper())
    return [block] if block is not None else []


def _group_blocks(weights: Mapping[str, Any]) -> list[Block]:
    """Returns the block of a group of weights, if scales are not per tensor or per row."""
    if weights.get("block_structure"):
        return [_block("block_structure", weights["block_structure"])]
    size = weights.get("group_size")
    if size in (None, -1, 0) or weights.get("strategy") in ("tensor", "channel", "token"):
        return []
    return [_block("group_size", [1, size])]


def _block(key: str, value: Any) -> Block:
    sizes = list(value) if isinstance(value, list | tuple) else []
    if isinstance(value, str) and re.fullmatch(r"[0-9]{1,9}x[0-9]{1,9}", value):  # as compressed-tensors wrote it once
        sizes = [int(size) for size in value.split("x")]
    if len(sizes) != 2 or not all(type(size) is int and size > 0 for size in sizes):
        raise ValueError(f"expected {key} of positive integers for rows and columns, got {value!r}")
    return sizes[0], sizes[1]
