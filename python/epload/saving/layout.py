"""The safetensors files of a checkpoint: which tensor is where in which of them, their headers and their index. Pure.

Format: https://huggingface.co/docs/safetensors. File names and index are those of ``save_pretrained`` of transformers.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod

import torch
from torch import Tensor

from epload.checkpoint.manifest import Manifest
from epload.core.dtypes import SAFETENSORS

INDEX = "model.safetensors.index.json"
_NAMES = {dtype: name for name, dtype in SAFETENSORS.items()}
_HEADER_ALIGNMENT = 8
"""Bytes; a header is padded to a multiple of it, so that tensors are aligned."""


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
    index: bytes | None
    """Content of :data:`INDEX`; None for a single file, which needs none."""


def lay_out(manifest: Manifest, max_shard_bytes: int) -> FilesLayout:
    """Distributes tensors over files of up to ``max_shard_bytes``, in their order.

    Raises:
        ValueError: a tensor's name or dtype is none that the format has.
    """
    names, dtypes, sizes = manifest.names, manifest.dtypes, manifest.nbytes_of()
    for name, dtype in zip(names, dtypes, strict=True):
        if dtype not in _NAMES:
            raise ValueError(
                f"{name} is {dtype}, which safetensors files do not have; pass dtype=, or convert the tensor"
            )
        if name == "__metadata__":
            raise ValueError("a tensor is called __metadata__, which safetensors files reserve; rename it")
    shards = _divide(sizes, max_shard_bytes)
    files = [f"model-{number + 1:05}-of-{len(shards):05}.safetensors" for number in range(len(shards))]
    if len(files) == 1:
        files = ["model.safetensors"]
    headers, file_sizes = [], []
    file, offset = torch.zeros(2, len(names), dtype=torch.int64)
    for number, shard in enumerate(shards):
        # The widest elements first, so that each tensor starts at a multiple of its element size.
        shard.sort(key=lambda i: -dtypes[i].itemsize)
        ends = list(accumulate((sizes[i] for i in shard), initial=0))
        entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
        for i, begin, end in zip(shard, ends, ends[1:], strict=False):
            shape = list(manifest.shapes[i])
            entries[names[i]] = {"dtype": _NAMES[dtypes[i]], "shape": shape, "data_offsets": [begin, end]}
        text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % _HEADER_ALIGNMENT)
        headers.append(len(text).to_bytes(8, "little") + text)
        file_sizes.append(8 + len(text) + ends[-1])
        file[shard] = number
        offset[shard] = 8 + len(text) + torch.tensor(ends[:-1], dtype=torch.int64)
    index = None
    if len(files) > 1:
        metadata = {"total_parameters": sum(map(prod, manifest.shapes)), "total_size": sum(sizes)}
        weights = {name: files[number] for name, number in zip(names, file.tolist(), strict=True)}
        index = json.dumps({"metadata": metadata, "weight_map": weights}, indent=2).encode()
    return FilesLayout(files, headers, file_sizes, file, offset, index)


def _divide(sizes: Sequence[int], limit: int) -> list[list[int]]:
    """Returns the numbers of the tensors of each file; one file at least."""
    shards: list[list[int]] = [[]]
    total = 0
    for i, size in enumerate(sizes):
        if shards[-1] and total + size > limit:
            shards.append([])
            total = 0
        shards[-1].append(i)
        total += size
    return shards
