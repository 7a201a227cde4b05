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

_LAYOUTS = (
    (r"\.(dqweight|forward_hadamard_matrix)$", "packed weights of FP-Quant"),
    (r"\.qweight$", "packed int4 weights of GPTQ or AWQ"),
    (r"\.(weight_packed|bitmask)$", "packed weights of compressed-tensors"),
    (r"_blocks$", "packed mxfp4 weights"),
    (r"\.weight\.(quant_state\.bitsandbytes__(nf4|fp4)|quant_map|absmax)$", "packed 4-bit weights of bitsandbytes"),
    (r"\.SCB$", "8-bit weights of bitsandbytes"),
    (r"\.W_q$", "packed weights of HQQ or SINQ"),
    (r"\.weight\._(data|scale)$", "packed weights of quanto"),
    (r"\.(codes|codebooks)$", "packed weights of AQLM"),
    (r"\.dense_weights$", "packed weights of SpQR"),
    (r"\.(res_)?centroids\.weight$", "packed weights of VPTQ"),
    (r"\.weight_scales$", "packed weights of EETQ"),
    (r"\.tables2$", "packed weights of HIGGS"),
    (r"\.(trellis|q_weight)$", "packed weights of ExLlama"),
    (r"\.Qidxs$", "packed weights of QuIP#"),
    (r"qdata$", "packed weights of torchao"),
    (r"\.(weight_scale_2|weight_global_scale|weight_sf|weight_sf_rowmajor)$", "packed NVFP4 weights"),
)
"""Ends of the names that tensors of packed weights have, and what such weights are. They need not be integers."""
_ANY_LAYOUT = re.compile("|".join(pattern for pattern, _ in _LAYOUTS))
_WAY_OUT = (
    "pass the checkpoint that was quantized, or unpack it once, with transformers (model.dequantize(), or a config such as "
    "Mxfp4Config(dequantize=True)) or the library that quantized it, and pass the folder that save_pretrained writes"
)


def find_packed(
    manifest: Metadata, mapping: Mapping, targets: Targets, unfilled: Iterable[str], unexpected: Collection[str]
) -> tuple[str, str] | None:
    """Returns the name of a floating-point tensor of the model that nothing fills because its weight is packed in the checkpoint,
    and what the weight is there; None if there is no such tensor.

    ``unfilled``: first names of targets that nothing fills, or that have another shape in the checkpoint."""
    names = {*unfilled}
    wide = {i for i, name in enumerate(targets.names) if name in names and dtypes.is_wide(targets.dtypes[i])}
    if not wide:
        return None
    candidates = {tensor: _weight_names(tensor) for tensor in _packed_tensors(manifest, {*unexpected})}
    places = destinations(mapping, [key for keys in candidates.values() for key in keys], targets.shapes)
    for tensor, weights in candidates.items():
        own = {targets.index[name] for name in places[tensor]}
        if own and own.isdisjoint(wide):  # a tensor that the model has
            continue
        for name in chain.from_iterable(map(places.__getitem__, weights)):
            if targets.index[name] in wide:
                return name, _describe(manifest, tensor)
    return None


def _packed_tensors(manifest: Metadata, unexpected: set[str]) -> list[str]:
    """Returns the names of tensors that may be parts of packed weights, by dtype, by name, or by the configuration."""
    declared = manifest.quantization is not None and not manifest.quantization.is_fp8
    packed = {*dtypes.INTEGERS} - {torch.int64, torch.uint64}  # indices
    columns = zip(manifest.names, manifest.dtypes, manifest.shapes, strict=True)
    return [
        name
        for name, dtype, shape in columns
        if (dtype in packed and shape) or (name in unexpected and (declared or _ANY_LAYOUT.search(name)))
    ]


def _weight_names(name: str) -> list[str]:
    """Returns the names that a weight may have as a whole if this tensor is all of it (the first name) or a part of it."""
    parent, _, leaf = name.rpartition(".")
    names = [name, f"{parent}.weight" if parent else "weight", parent]
    names.append(re.sub(r"\.weight[.:].*", ".weight", name))  # what bitsandbytes, quanto and torchao add
    names.append(f"{parent.rpartition('.')[0]}.weight" if leaf == "weight" else "")
    names.append(name.rpartition("_")[0] if "_" in leaf else "")
    return list(dict.fromkeys(filter(None, names)))


def _describe(manifest: Metadata, name: str) -> str:
    """Returns what a packed weight is, by the names of the tensors next to it, or else by its dtype."""
    parent = name.rpartition(".")[0]
    siblings = [name, *(other for other in manifest.names if other.startswith(f"{parent}."))]
    what = next((text for pattern, text in _LAYOUTS if any(map(re.compile(pattern).search, siblings))), "")
    if not what:
        dtype = manifest.dtypes[manifest.names.index(name)]
        method = manifest.quantization.method if manifest.quantization is not None else ""
        what = f"a packed weight{f' of {method}' if method else ''} ({name}, {dtypes.name(dtype)})"
    return f"{what}: {_WAY_OUT}"
