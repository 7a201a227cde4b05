"""The safetensors files of a checkpoint: which tensor is where in which of them, their headers and their index. Pure.

Format: https://huggingface.co/docs/safetensors. File names and index are those of ``save_pretrained`` of transformers, or of
diffusers for its models.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from types import MappingProxyType

import torch
from torch import Tensor

from epload.checkpoint.manifest import Manifest
from epload.core.dtypes import SAFETENSORS_NAMES

MODEL, DIFFUSION_MODEL, ADAPTER_MODEL = "model", "diffusion_pytorch_model", "adapter_model"
"""The first part of file names in transformers, and in diffusers."""
_MOST_TENSORS = 400_000
"""Tensors of a file, of whose header libraries read 100 MB."""
_DATA_ALIGNMENT = 4096
"""Bytes; the first tensor begins at a multiple of it, so that no page has a part of the header and what other ranks write."""


@dataclass(frozen=True, eq=False)
class FilesLayout:
    names: list[str]
    """File names."""
    headers: list[bytes]
    """All that precedes the tensors, of each file."""
    sizes: list[int]
    """Bytes of each whole file."""
    file: Tensor
    """int64 [t], the file of each tensor."""
    offset: Tensor
    """int64 [t], bytes from the start of the file."""
    nbytes: int
    """Bytes of all tensors."""
    index: dict[str, bytes]
    """Content of the index by its name; empty for a single file, which needs none."""


def lay_out(
    manifest: Manifest, max_shard_bytes: int, metadata: Mapping[str, str] = MappingProxyType({}), stem: str = MODEL
) -> FilesLayout:
    """Distributes tensors over files of up to ``max_shard_bytes``, in their order.

    Args:
        metadata: of each file's header, besides its format.
        stem: the first part of the names of the files.

    Raises:
        ValueError: a tensor's name or dtype is none that the format has.
    """
    names, dtypes, sizes = manifest.names, manifest.dtypes, manifest.nbytes_of()
    shards = _divide(sizes, max_shard_bytes)
    files = [f"{stem}.safetensors"]
    if len(shards) > 1:
        files = [f"{stem}-{number:05}-of-{len(shards):05}.safetensors" for number in range(1, len(shards) + 1)]
    file, offset = torch.zeros(2, len(names), dtype=torch.int64)
    layout = FilesLayout(files, [], [], file, offset, sum(sizes), {})
    weight_map = {}
    for number, shard in enumerate(shards):
        entries: dict[str, object] = {"__metadata__": {**metadata, "format": "pt"}}
        end = 0
        # The widest elements first, so that each tensor starts at a multiple of its element size.
        for i in sorted(shard, key=lambda i: -dtypes[i].itemsize):
            name, shape = names[i], list(manifest.shapes[i])
            if dtypes[i] not in SAFETENSORS_NAMES:
                raise ValueError(f"{name} is {dtypes[i]}, which safetensors files do not have; convert the tensor first")
            if name == "__metadata__":
                raise ValueError("a tensor is called __metadata__, which safetensors files reserve; rename it")
            file[i], offset[i] = number, end
            weight_map[name] = files[number]
            end += sizes[i]
            entries[name] = {"dtype": SAFETENSORS_NAMES[dtypes[i]], "shape": shape, "data_offsets": [end - sizes[i], end]}
        text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-(8 + len(text)) % _DATA_ALIGNMENT)
        layout.headers.append(len(text).to_bytes(8, "little") + text)
        layout.sizes.append(8 + len(text) + end)
        offset[shard] += 8 + len(text)
    if len(files) > 1:
        totals = {"total_parameters": sum(map(prod, manifest.shapes)), "total_size": layout.nbytes}
        content = {"metadata": totals, "weight_map": {name: weight_map[name] for name in names}}
        layout.index[f"{stem}.safetensors.index.json"] = json.dumps(content, indent=2).encode()
    return layout


def _divide(sizes: Sequence[int], limit: int) -> list[list[int]]:
    """Returns the numbers of the tensors of each file; one file at least."""
    shards: list[list[int]] = [[]]
    total = 0
    for i, size in enumerate(sizes):
        if shards[-1] and (total + size > limit or len(shards[-1]) == _MOST_TENSORS):
            shards.append([])
            total = 0
        shards[-1].append(i)
        total += size
    return shards
