"""The safetensors files of a checkpoint: which tensor is where in which of them, their headers and their index. Pure.

Format: https://huggingface.co/docs/safetensors. File names and index are those of ``save_pretrained`` of transformers.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from epload.core.dtypes import SAFETENSORS
from epload.core.views import Shape

INDEX = "model.safetensors.index.json"
_NAMES = {dtype: name for name, dtype in SAFETENSORS.items()}
_HEADER_ALIGNMENT = 8
"""Bytes; a header is padded to a multiple of it, so that tensors are aligned."""


@dataclass(frozen=True)
class NewFile:
    """A file before any tensor is written."""

    name: str
    header: bytes
    """All that precedes the tensors."""
    nbytes: int
    """Size of the whole file."""


@dataclass(frozen=True, eq=False)
class FilesLayout:
    files: tuple[NewFile, ...]
    file: Tensor
    """int64 [t], for each tensor an index into ``files``."""
    offset: Tensor
    """int64 [t], bytes from the start of the file."""
    index: bytes | None
    """Content of :data:`INDEX`; None for a single file, which needs none."""

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(file.nbytes for file in self.files)


def lay_out(
    names: Sequence[str], shapes: Sequence[Shape], dtypes: Sequence[torch.dtype], max_shard_bytes: int
) -> FilesLayout:
    """Distributes tensors over files, in their order.

    Args:
        max_shard_bytes: of the tensors of a file, unless it has only one.

    Raises:
        ValueError: a tensor's name or dtype is none that the format has.
    """
    sizes = []
    for name, shape, dtype in zip(names, shapes, dtypes, strict=True):
        if dtype not in _NAMES:
            raise ValueError(
                f"{name} is {dtype}, which safetensors files do not have; pass dtype=, or convert the tensor"
            )
        if name == "__metadata__":
            raise ValueError("a tensor is called __metadata__, which safetensors files reserve; rename it")
        sizes.append(prod(shape) * dtype.itemsize)
    shards = _divide(sizes, max_shard_bytes)
    # The widest elements first, so that each tensor starts at a multiple of its element size.
    shards = [sorted(shard, key=lambda i: -dtypes[i].itemsize) for shard in shards]
    file, offset = torch.zeros(len(names), dtype=torch.int64), torch.zeros(len(names), dtype=torch.int64)
    files = []
    for number, shard in enumerate(shards):
        name = "model.safetensors" if len(shards) == 1 else f"model-{number + 1:05}-of-{len(shards):05}.safetensors"
        ends = torch.tensor([sizes[i] for i in shard], dtype=torch.int64).cumsum(0).tolist()
        begins = [0, *ends[:-1]]
        entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
        for i, begin, end in zip(shard, begins, ends, strict=False):
            entries[names[i]] = {
                "dtype": _NAMES[dtypes[i]],
                "shape": list(shapes[i]),
                "data_offsets": [begin, end],
            }
        header = _framed(json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode())
        which = torch.tensor(shard, dtype=torch.int64)
        file[which] = number
        offset[which] = len(header) + torch.tensor(begins[: len(shard)], dtype=torch.int64)
        files.append(NewFile(name, header, len(header) + (ends[-1] if ends else 0)))
    index = None
    if len(files) > 1:
        weights = {name: files[number].name for name, number in zip(names, file.tolist(), strict=True)}
        elements = sum(map(prod, shapes))
        content = {"metadata": {"total_parameters": elements, "total_size": sum(sizes)}, "weight_map": weights}
        index = json.dumps(content, indent=2).encode()
    return FilesLayout(tuple(files), file, offset, index)


def _divide(sizes: Sequence[int], limit: int) -> list[list[int]]:
    """Numbers of the tensors of each file; one file at least."""
    shards: list[list[int]] = [[]]
    total = 0
    for i, size in enumerate(sizes):
        if shards[-1] and total + size > limit:
            shards.append([])
            total = 0
        shards[-1].append(i)
        total += size
    return shards


def _framed(header: bytes) -> bytes:
    padded = header + b" " * (-len(header) % _HEADER_ALIGNMENT)
    return len(padded).to_bytes(8, "little") + padded
