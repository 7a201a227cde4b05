"""Recognizes weights that a checkpoint holds quantized and packed, as integers or in other parts, and a model as a whole."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from itertools import chain

import torch

from epload.core import dtypes
from epload.core.pieces import Metadata
from epload.mapping.mapping import Mapping
from epload.mapping.place import destinations
from epload.model.targets import Targets

_UNPACK = "unpack it with transformers, {}, and save_pretrained, then pass the folder that this writes"
_ORIGINAL = "pass the checkpoint that was quantized, or unpack it with {}"
_LAYOUTS = (
    (r"\.(dqweight|forward_hadamard_matrix)$", f"packed weights of FP-Quant: {_ORIGINAL.format('fp_quant')}"),
    (r"\.qweight$", f"packed int4 weights of GPTQ or AWQ: {_ORIGINAL.format('GPTQModel')}"),
    (
        r"\.(weight_packed|bitmask)$",
        f"packed weights of compressed-tensors: {_UNPACK.format('CompressedTensorsConfig(dequantize=True)')}",
    ),
    (r"_blocks$", f"packed mxfp4 weights: {_UNPACK.format('Mxfp4Config(dequantize=True)')}"),
    (
        r"\.weight\.(quant_state\.bitsandbytes__(nf4|fp4)|quant_map|absmax)$",
        f"packed 4-bit weights of bitsandbytes: {_UNPACK.format('model.dequantize()')}",
    ),
    (r"\.SCB$", f"8-bit weights of bitsandbytes: {_UNPACK.format('model.dequantize()')}"),
    (r"\.W_q$", f"packed weights of HQQ or SINQ: {_ORIGINAL.format('the library that quantized it')}"),
    (r"\.weight\._(data|scale)$", f"packed weights of quanto: {_ORIGINAL.format('optimum-quanto')}"),
    (r"\.(codes|codebooks)$", f"packed weights of AQLM: {_ORIGINAL.format('aqlm')}"),
    (r"\.dense_weights$", f"packed weights of SpQR: {_ORIGINAL.format('spqr_quant')}"),
    (r"\.(res_)?centroids\.weight$", f"packed weights of VPTQ: {_ORIGINAL.format('vptq')}"),
    (r"\.weight_scales$", f"packed weights of EETQ: {_ORIGINAL.format('eetq')}"),
    (r"\.tables2$", f"packed weights of HIGGS: {_UNPACK.format('model.dequantize()')}"),
    (r"\.(trellis|q_weight)$", f"packed weights of ExLlama: {_ORIGINAL.format('exllamav3')}"),
    (r"\.Qidxs$", f"packed weights of QuIP#: {_ORIGINAL.format('its own code')}"),
    (r"qdata$", f"packed weights of torchao: {_UNPACK.format('model.dequantize()')}"),
    (
        r"\.(weight_scale_2|weight_global_scale|weight_sf|weight_sf_rowmajor)$",
        f"packed NVFP4 weights: {_ORIGINAL.format('the library that quantized it')}",
    ),
)  # fmt: skip
"""Ends of the names that tensors of packed weights have, and what such weights are. They need not be integers."""
_KNOWN = re.compile("|".join(pattern for pattern, _ in _LAYOUTS))


def find_packed(
    manifest: Metadata, mapping: Mapping, targets: Targets, unfilled: Iterable[str], unexpected: Collection[str]
) -> tuple[str, str] | None:
    """Returns the name of a floating-point tensor of the model that nothing fills because its weight is packed in the
    checkpoint, and what the weight is there; None if there is no such tensor.

    Args:
        unfilled: first names of targets that nothing fills, or that have another shape in the checkpoint.
        unexpected: names of the checkpoint that the model has no place for.
    """
    names = {*unfilled}
    wide = {i for i, name in enumerate(targets.names) if name in names and dtypes.is_wide(targets.dtypes[i])}
    if not wide:
        return None
    tensors = _packed_tensors(manifest, {*unexpected})
    candidates = {tensor: _weight_names(tensor) for tensor in tensors}
    keys = list(chain.from_iterable(candidates.values()))
    places = dict(zip(keys, destinations(mapping, keys, targets.shapes), strict=True))
    for tensor, weights in candidates.items():
        own = {targets.index[name] for name in places[tensor]}
        if own and own.isdisjoint(wide):  # a tensor that the model has
            continue
        for name in chain.from_iterable(map(places.__getitem__, weights)):
            if targets.index[name] in wide:
                return name, _describe(manifest, tensor)
    return None


def _packed_tensors(manifest: Metadata, unexpected: set[str]) -> list[str]:
    """Returns the names of tensors that may be parts of packed weights: integers, and what the model lacks if its name or the
    configuration says so."""
    declared = manifest.quantization is not None and not manifest.quantization.is_fp8
    if set(dtypes.INTEGERS).isdisjoint(manifest.kinds.dtypes) and not unexpected:
        return []
    packed = {*dtypes.INTEGERS} - {torch.int64, torch.uint64}  # indices
    columns = zip(manifest.names, manifest.dtypes, manifest.shapes, strict=True)
    return [
        name
        for name, dtype, shape in columns
        if (dtype in packed and shape) or (name in unexpected and (declared or _KNOWN.search(name)))
    ]


def _weight_names(name: str) -> list[str]:
    """Returns the names that a weight may have as a whole if this tensor is all of it (the first name) or a part of it."""
    parent, _, leaf = name.rpartition(".")
    names = [name, f"{parent}.weight" if parent else "weight", parent]
    names.append(
        re.sub(r"\.weight[.:].*", ".weight", name)
    )  # bitsandbytes, quanto and torchao add to the weight's own name
    if leaf == "weight":
        names.append(f"{parent.rpartition('.')[0]}.weight")
    if "_" in leaf:
        names.append(name.rpartition("_")[0])
    return list(dict.fromkeys(filter(None, names)))


def _describe(manifest: Metadata, name: str) -> str:
    """Returns what a packed weight is, by the names of the tensors next to it, or else by its dtype."""
    parent = name.rpartition(".")[0]
    siblings = [name, *(other for other in manifest.names if other.startswith(f"{parent}."))]
    for pattern, text in _LAYOUTS:
        if any(map(re.compile(pattern).search, siblings)):
            return text
    dtype = manifest.dtypes[manifest.names.index(name)]
    declared = manifest.quantization.method if manifest.quantization is not None else ""
    by = f" of {declared}" if declared else ""
    return f"a packed weight{by} ({name}, {dtypes.name(dtype)}): {_ORIGINAL.format('the library that quantized it')}"
