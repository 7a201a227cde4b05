"""The checkpoint tensors that Megatron-Core's modules are saved or sent as. Each rank knows those of all ranks."""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any

import torch

from epload.checkpoint.base import Checkpoint
from epload.checkpoint.file_sets import CONFIG
from epload.checkpoint.finding import read_config
from epload.checkpoint.manifest import Manifest
from epload.checkpoint.quantization import quantized_with, without_quantization
from epload.core import dtypes as dtype_names
from epload.core.views import Shape
from epload.errors import ModelMismatch
from epload.mapping.mapping import AnyMapping
from epload.mapping.megatron import HEAD, check_is_auto, prediction_copies, unknown_names
from epload.mapping.megatron.names import FLOAT32, LAYER, pattern_of
from epload.mapping.megatron.regions import place_shards
from epload.mapping.megatron.shards import read_shards
from epload.mapping.place import Place
from epload.model.megatron import MegatronChunks
from epload.observe.render import list_keys

_IN_FLOAT32 = {name for key in FLOAT32 for names in LAYER[key] for name in names}


def megatron_catalog(
    model: MegatronChunks, mapping: AnyMapping, names_from: Any
) -> tuple[Manifest, list[tuple[Place, ...]], list[Shape]]:
    """Returns the same as :func:`epload.saving.catalog.catalog`, which is equal on all ranks but for the places.

    Tensors have the dtype of the model's first parameter, those that Megatron keeps in float32 that one. Left out are tensors of
    ``names_from`` that models compute, a head that is the embedding, scales of quantized weights, and layers for multi-token
    prediction if the model has none.
    The copies of the embedding and of the head in such a layer are those of Megatron's model.

    Raises:
        ModelMismatch: ``names_from`` does not have the names and shapes of the model's tensors, or has others; or a tensor of the
            model has another dtype.
        ValueError: there is no ``names_from``, or there is a mapping.
    """
    check_is_auto(mapping)
    if names_from is None:
        raise ValueError(
            "Megatron-Core has other names and shapes than checkpoints: pass names_from=, a Hugging Face checkpoint of this model"
        )
    like = Checkpoint.open(names_from).manifest
    scales = quantized_with(like.names, like.dtypes, like.shapes)
    left_out, unknown = unknown_names(like.names, model.config)
    if unknown := [name for name in unknown if name not in scales]:
        raise ModelMismatch(
            f"Megatron-Core has no name for {list_keys(unknown)} of names_from=; add them to the tables in "
            "epload.mapping.megatron.names, or pass a checkpoint of the language model alone"
        )
    shape_of = dict(zip(like.names, like.shapes, strict=True))
    copies = prediction_copies(like.names) if model.config.mtp_num_layers else {}
    excluded = {*scales, *left_out} - copies.keys() | ({HEAD} if model.ties_embeddings else set())
    names = tuple(name for name in like.names if name not in excluded)
    shapes = tuple(shape_of[name] for name in names)
    shards, tensors = read_shards(model)
    places, missing = place_shards(shards, tensors, model.config, names, shapes)
    if missing:
        options = next(iter(missing.values()))
        raise ModelMismatch(
            f"names_from= lacks {list_keys(list(missing))}; the first would be {options} in a checkpoint of this model",
            missing_keys=list(missing),
        )
    placed = dict(zip(names, places, strict=True))
    for name, original in copies.items():
        if shape_of[name] != shape_of.get(original):
            raise ModelMismatch(f"names_from= has {name}, which is no copy of {original}: expected both in one shape")
        placed[name] = placed[original]
    dtype = next(model.parameters()).dtype
    dtypes = tuple(torch.float32 if pattern_of(name) in _IN_FLOAT32 else dtype for name in names)
    for name, expected in zip(names, dtypes, strict=True):
        for target, _ in placed[name]:
            _check_dtype(target, tensors[target].dtype, name, expected)
    return Manifest(names, shapes, dtypes, "the model"), list(placed.values()), [*shapes]


def _check_dtype(target: str, actual: torch.dtype, name: str, expected: torch.dtype) -> None:
    """Raises ModelMismatch if a parameter would be rounded."""
    if torch.promote_types(actual, expected) != expected:
        raise ModelMismatch(
            f"{target} is {dtype_names.name(actual)}, and {name} would be rounded to {dtype_names.name(expected)}, the dtype of "
            "the first parameter; expected one dtype for all parameters"
        )


def megatron_config(names_from: Any, dtype: torch.dtype) -> dict[str, bytes]:
    """Returns the ``config.json`` of a checkpoint in this dtype, by its name; empty if ``names_from`` has none."""
    config = read_config(names_from)
    if not config:
        return {}
    left_out = "torch_dtype", "transformers_weights"
    config = {key: value for key, value in without_quantization(config).items() if key not in left_out}
    return {CONFIG: json.dumps(config | {"dtype": dtype_names.name(dtype)}, indent=2).encode()}


def in_float32(names: Collection[str]) -> set[str]:
    """Returns which tensors of a checkpoint stay in float32."""
    return {name for name in names if pattern_of(name) in _IN_FLOAT32}
