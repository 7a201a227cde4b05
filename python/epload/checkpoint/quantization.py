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
    r"scale|SCB|absmax|quant_map|quant_state|zero|codebook|centroid|lookup_table|tables|_?biases$|qbiases$|^s[uv]h$"
)
"""Leaf of the name of a tensor that a quantized weight next to it is decoded with."""


def declared_quantization(config: Mapping[str, Any]) -> Quantization:
    """Reads a ``quantization_config`` of ``config.json``, or the ``quantization`` of ModelOpt's ``hf_quant_config.json``."""
    method = config.get("quant_method")
    method = str(getattr(method, "value", method) or "").lower()
    blocks, texts = list[Block](), [method]
    for section, of_weights in _sections(config, False):
        if (algorithm := str(section.get("quant_algo")).upper()) in _ALGORITHMS:
            blocks.append(_ALGORITHMS[algorithm])
        for key in ("weight_block_size", "block_structure"):
            if section.get(key):
                blocks.append(parse_block(key, section[key]))
        per_block = section.get("strategy") not in ("tensor", "channel", "token") and not section.get("block_structure")
        if of_weights and per_block and (size := section.get("group_size")) not in (None, -1, 0):
            blocks.append(parse_block("group_size", [1, size]))
        keys = ("format", "scale_fmt", "quant_algo", "scale_dtype", "scale_format")
        texts += [str(section.get(key)).lower() for key in keys]
    if not blocks and any("mxfp8" in text for text in texts):
        blocks.append(_MX_GROUP)
    # In a group, scales are of dtype uint8 only if they are exponents.
    exponents = any(re.search(r"mxfp8|e8m0|uint8", text) for text in texts)
    return Quantization(method, tuple(dict.fromkeys(blocks)), exponents)


def _sections(config: Mapping[str, Any], of_weights: bool) -> Iterator[tuple[Mapping[str, Any], bool]]:
    """Yields a configuration and those in it, but for activations and caches, each with True if it is of weights: libraries
    declare them by layer, by group of layers or for all."""
    yield config, of_weights
    for key, value in config.items():
        if not re.search("activation|input|output|cache", str(key)):
            for inner in value if isinstance(value, list) else [value]:
                if isinstance(inner, Mapping):
                    yield from _sections(inner, of_weights or key in ("weights", "weight"))


def quantization_of(config: Any) -> Quantization | None:
    """Reads the content of a ``config.json`` or ``hf_quant_config.json``; None if it declares no quantization."""
    if not isinstance(config, Mapping):
        raise ValueError(f"expected a JSON object, got {type(config).__name__}")
    section = quantization_section(config)
    return declared_quantization(section) if section is not None else None


_SECTIONS = "quantization_config", "compression_config", "quantization"
"""Keys of a configuration that declare a quantization."""


def quantization_section(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Returns the part of a ``config.json`` or ``hf_quant_config.json`` that declares a quantization; None if there is none."""
    for section in (config, config.get("text_config")):
        for key in _SECTIONS:
            if isinstance(section, Mapping) and isinstance(declared := section.get(key), Mapping):
                return declared
    return None


def without_quantization(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a ``config.json`` that declares none."""
    config = {key: value for key, value in config.items() if key not in _SECTIONS}
    return config | ({"text_config": without_quantization(text)} if isinstance(text := config.get("text_config"), dict) else {})


def quantized_with(names: Sequence[str], dtypes: Sequence[torch.dtype], shapes: Sequence[tuple[int, ...]]) -> dict[str, str]:
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
    scopes = {name: name.rpartition(".")[0] for name in filter(_is_companion, names)}
    return {name: weights[scope] for name, scope in scopes.items() if scope in weights}


def _is_companion(name: str) -> bool:
    return _COMPANION.search(name.rpartition(".")[2]) is not None


def parse_block(key: str, value: Any) -> Block:
    """Reads the rows and columns of a block. Raises ValueError unless they are positive integers."""
    sizes = list(value) if isinstance(value, list | tuple) else []
    if isinstance(value, str) and re.fullmatch(r"[0-9]{1,9}x[0-9]{1,9}", value):  # as compressed-tensors wrote it once
        sizes = [int(size) for size in value.split("x")]
    if len(sizes) != 2 or not all(type(size) is int and size > 0 for size in sizes):
        raise ValueError(f"expected {key} of positive integers for rows and columns, got {value!r}")
    return sizes[0], sizes[1]
