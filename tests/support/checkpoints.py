"""Checkpoints, for tests: tensors to fill them, files spelled byte by byte, and what epload reads out of any source."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from epload import Checkpoint, Manifest
from epload.core.pieces import Piece
from page_cache import cached, drop

State = dict[str, Tensor]


def tensor(number: int, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
    """Bytes that differ by index and by ``number``; for bool only zeros and ones are values."""
    count = prod(shape) * dtype.itemsize
    data = (torch.arange(count) * 7 + torch.arange(count) // 251 + number * 31) % (2 if dtype == torch.bool else 251)
    return data.to(torch.uint8).view(dtype).reshape(shape) if count else torch.empty(*shape, dtype=dtype)


def framed(header: str | bytes) -> bytes:
    raw = header.encode() if isinstance(header, str) else header
    return struct.pack("<Q", len(raw)) + raw


def entry(shape: Any = (4,), offsets: Any = (0, 16), dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def header(data: int = 16, **entries: Any) -> bytes:
    return framed(json.dumps(entries)) + bytes(data)


def index(folder: Path, content: Any) -> Path:
    path = folder / "model.safetensors.index.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def read_folder(folder: Path) -> State:
    """Returns what the safetensors library finds in a folder's files."""
    return {name: value for file in sorted(folder.glob("*.safetensors")) for name, value in load_file(file).items()}


def raw_bytes(value: Tensor) -> bytes:
    return bytes(value.contiguous().reshape(-1).view(torch.uint8).tolist())


def layout(manifest: Manifest, alignment: int = 16) -> tuple[list[Piece], int]:
    """Pieces that put every tensor whole behind the one before it, as a bucket does."""
    pieces, at = [], 64
    for i, (shape, dtype) in enumerate(zip(manifest.shapes, manifest.dtypes, strict=True)):
        nbytes = prod(shape) * dtype.itemsize
        if nbytes:
            pieces.append(Piece(i, 0, at, nbytes))
            at += -(-nbytes // alignment) * alignment
    return pieces, at


def read_all(checkpoint: Checkpoint) -> State:
    pieces, size = layout(checkpoint.manifest)
    bucket = torch.full((size,), 255, dtype=torch.uint8)
    checkpoint.fill(bucket, pieces)
    names, shapes, kinds = checkpoint.manifest.names, checkpoint.manifest.shapes, checkpoint.manifest.dtypes
    at = {piece.tensor: piece for piece in pieces}
    made = {}
    for i, (name, shape, kind) in enumerate(zip(names, shapes, kinds, strict=True)):
        part = bucket[at[i].bucket_offset :][: at[i].nbytes] if i in at else bucket[:0]
        made[name] = part.clone().view(kind).reshape(shape)
    return made


def make_cold(path: Path) -> None:
    """Takes a file out of the page cache. Skips the test where it has no other place."""
    drop(path)
    if cached(path) > 0:
        pytest.skip(f"{path.parent} is on a file system that is its own cache")


def assert_same(got: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert set(got) == set(expected)
    for name, want in expected.items():
        assert (got[name].dtype, got[name].shape) == (want.dtype, want.shape), name
        assert raw_bytes(got[name]) == raw_bytes(want), name
