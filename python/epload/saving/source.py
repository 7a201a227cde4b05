"""Reads a model to be saved: its tensors, the names and dtypes under which they are saved, and its configuration."""

from __future__ import annotations

import copy
import json
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn

from epload.checkpoint.file_sets import CONFIG
from epload.checkpoint.manifest import Manifest
from epload.checkpoint.quantization import quantized_with, without_quantization
from epload.core import dtypes as dtype_names
from epload.mapping.mapping import AnyMapping, Mapping, quantize_rule
from epload.mapping.precision import left_in_fp32
from epload.mapping.transformers import check_declared_ties
from epload.mapping.wrappers import names_added_by_adapters, unwrap
from epload.model.initialization import class_before_fsdp, is_diffusers, is_pretrained
from epload.model.megatron import MegatronChunks
from epload.planning.holdings import Holdings, holdings_of_targets
from epload.saving.catalog import catalog
from epload.saving.layout import DIFFUSION_MODEL, MODEL
from epload.saving.megatron import in_float32, megatron_config
from epload.saving.model_reader import ModelReader
from epload.saving.quantized import QuantizedModel


@dataclass
class SavedModel:
    """The tensors that one rank sees of a model that is saved."""

    tensors: list[Tensor]
    """The model's local tensors, or copies of them."""
    manifest: Manifest
    """The checkpoint's manifest without padding, equal on all ranks."""
    padded: Manifest
    """The same with the shapes in the files. Padding is rows of zeros at the end, which are not written."""
    holdings: Holdings
    """This rank's."""
    rules: str
    """A text of the rules that the manifest and the holdings follow from, equal on all ranks."""
    config: dict[str, bytes]
    """Small files that belong to the model, by name."""
    stem: str
    """The first part of the names of the files with tensors."""
    quantized: QuantizedModel | None
    """The model whose tensors are saved, if that is another one."""


def read_model(model: nn.Module, mapping: AnyMapping, names_from: Any, dtype: torch.dtype | None) -> SavedModel:
    """Reads a model. Reshards FSDP2 modules.

    Args:
        dtype: of floating-point tensors in the files, except those that ``from_pretrained`` keeps in float32 in a model of this
            dtype; None for the model's.

    Raises:
        ModelMismatch, ValueError: see :func:`epload.saving.catalog.catalog`, :func:`epload.saving.model_reader.ModelReader`,
            :func:`with_dtype` and :class:`epload.saving.quantized.QuantizedModel`.
    """
    reader = ModelReader(model, own_names=isinstance(mapping, Mapping))
    targets = reader.read()
    has_ties = len(targets.index) > len(targets.names) and not isinstance(model, MegatronChunks)
    if has_ties and not isinstance(mapping, Mapping) and names_from is None:
        added = names_added_by_adapters(model, targets.index)
        check_declared_ties(model, {name: number for name, number in targets.index.items() if name not in added})
    manifest, placed, shapes, rules = catalog(model, targets, mapping, names_from)
    is_megatron, stem = isinstance(model, MegatronChunks), MODEL
    if dtype is not None and is_megatron:
        manifest = with_dtype(manifest, dtype, in_float32(manifest.names))
    elif dtype is not None:
        in_fp32 = left_in_fp32(model, targets.index, dtype)
        pairs = zip(manifest.names, placed, strict=True)
        exempt = {name for name, places in pairs if any(target in in_fp32 for target, _ in places)}
        manifest = with_dtype(manifest, dtype, exempt)
    rule = quantize_rule(mapping)
    quantized = QuantizedModel(model, targets, manifest, placed, rule) if rule is not None else None
    if is_megatron:
        config = megatron_config(names_from, dtype or next(model.parameters()).dtype)
    else:
        inner = unwrap(model, targets.index)[0]
        config = _config_files(inner, manifest, dtype, quantized)
        stem = DIFFUSION_MODEL if is_diffusers(type(inner)) else MODEL
    written = targets
    if quantized is not None:
        in_files = dict(zip(manifest.names, shapes, strict=True))
        manifest, placed, written = quantized.manifest, quantized.placed, quantized.targets
        shapes = [in_files.get(name, shape) for name, shape in zip(manifest.names, manifest.shapes, strict=True)]
    holdings = holdings_of_targets(manifest.shapes, written, placed)
    padded = replace(manifest, shapes=tuple(shapes))
    return SavedModel(targets.local(), manifest, padded, holdings, rules, config, stem, quantized)


def with_dtype(manifest: Manifest, dtype: torch.dtype, exempt: Collection[str] = ()) -> Manifest:
    """Returns the manifest with this dtype for all floating-point tensors of at least 16 bits, except those named in ``exempt``.
    Raises ValueError: the dtype has less; or weights are quantized: they would stay as they are, and what they are decoded with
    would be rounded."""
    if not dtype_names.is_wide(dtype):
        raise ValueError(
            f"expected dtype to have at least 16 bits, got {dtype_names.name(dtype)}, for which weights need scales; quantize "
            "them (epload.mapping.Quantize, or epload.convert(quantize=))"
        )
    if quantized := quantized_with(manifest.names, manifest.dtypes, manifest.shapes):
        scale, weight = next(iter(quantized.items()))
        stored = dtype_names.name(manifest.dtypes[manifest.names.index(weight)])
        raise ValueError(
            f"{weight} is quantized ({stored}, with {scale}), and dtype={dtype_names.name(dtype)} would leave it so and round "
            "its scales: leave out the dtype, or load the weights into a model of that dtype, which dequantizes fp8, and save it"
        )
    pairs = zip(manifest.names, manifest.dtypes, strict=True)
    dtypes = (dtype if dtype_names.is_wide(own) and name not in exempt else own for name, own in pairs)
    return replace(manifest, dtypes=tuple(dtypes))


def _config_files(
    inner: Any, manifest: Manifest, dtype: torch.dtype | None, quantized: QuantizedModel | None
) -> dict[str, bytes]:
    """Returns ``config.json`` and ``generation_config.json`` of a model of transformers or diffusers, as ``save_pretrained``
    writes them, with code that is not the library's; of another one that is quantized a ``config.json`` that declares it.
    ``manifest``: of the tensors before they are quantized."""
    declared = {} if quantized is None else {"quantization_config": quantized.quantization_config}
    if is_diffusers(type(inner)):
        if not hasattr(inner, "to_json_string"):
            raise ValueError(f"{type(inner).__name__} is several models, each with a folder of its own; save them one by one")
        described = {**json.loads(inner.to_json_string()), "_class_name": class_before_fsdp(type(inner)).__name__}
        return {CONFIG: (json.dumps(described | declared, indent=2, sort_keys=True) + "\n").encode()}
    if not is_pretrained(type(inner)) or not hasattr(inner, "config"):
        return {CONFIG: json.dumps(declared, indent=2).encode()} if declared else {}
    config = copy.deepcopy(inner.config)
    matrices = [own for own, shape in zip(manifest.dtypes, manifest.shapes, strict=True) if len(shape) > 1]
    dequantized = quantized is None and not getattr(inner, "is_quantized", False) and all(map(dtype_names.is_wide, matrices))
    if quantized is not None:
        config.quantization_config = quantized.quantization_config
    vars(config).pop("transformers_weights", None)  # the name of the file that it was loaded from
    config.architectures = [class_before_fsdp(type(inner)).__name__]
    floats = Counter[torch.dtype]()
    for saved, shape in zip(manifest.dtypes, manifest.shapes, strict=True):
        if dtype_names.is_wide(saved):
            floats[saved] += prod(shape)
    if floats:  # that of the model, as save_pretrained has it, and not of what is kept in float32
        config.dtype = dtype_names.name(dtype or floats.most_common(1)[0][0])
    files = _code_files(inner, config)
    described = json.loads(config.to_json_string(use_diff=True))
    described = without_quantization(described) if dequantized else described
    files[CONFIG] = (json.dumps(described, indent=2, sort_keys=True) + "\n").encode()
    generation = getattr(inner, "generation_config", None)
    if generation is not None and inner.can_generate():
        files["generation_config.json"] = generation.to_json_string(use_diff=True, keys_to_pop=["compile_config"]).encode()
    return files


def _code_files(inner: Any, config: Any) -> dict[str, bytes]:
    """Returns the files of the code that defines a model, or its configuration, and is not the library's. Notes it in the
    configuration."""
    from transformers.dynamic_module_utils import custom_object_save

    cls = class_before_fsdp(type(inner))
    customs = [custom for custom in (cls.__new__(cls), config) if getattr(custom, "_auto_class", None) is not None]
    if not customs:
        return {}
    with TemporaryDirectory() as folder:
        for custom in customs:
            custom_object_save(custom, folder, config=config)
        return {path.name: path.read_bytes() for path in Path(folder).iterdir()}
