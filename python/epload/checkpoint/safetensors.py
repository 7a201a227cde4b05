"""The safetensors format: parsing of headers, which are not trusted.

Format: https://huggingface.co/docs/safetensors. A little-endian uint64 N, N bytes of JSON, then the tensors' bytes without
holes.
"""

from __future__ import annotations

import json
import re
from itertools import chain
from math import prod
from operator import itemgetter
from typing import Any

import torch

from epload.checkpoint import unsupported
from epload.checkpoint.byte_store import StoredFile
from epload.checkpoint.file_checkpoint import FileCheckpoint, Format, OpenFiles
from epload.checkpoint.manifest import FileFacts, StoredTensor
from epload.core.dtypes import SAFETENSORS
from epload.errors import CheckpointError

MAX_HEADER_BYTES = 100_000_000
"""The limit of the safetensors library."""
_SHARD_FILE = re.compile(r"^shard-\d+-model-\d+-of-\d+\.safetensors$")
_MAX_DIMS = 64
"""The limit of torch."""
_MAX_INTEGER = 10**30
"""Maximum value of a dim or an offset: larger than any file, and short enough to print."""


def file_facts(file: StoredFile) -> FileFacts:
    """Raises CheckpointError if the file has changed, OSError if it cannot be read."""
    prefix = file.read(0, 8)
    length = min(int.from_bytes(prefix, "little"), MAX_HEADER_BYTES)
    return FileFacts.of(file, prefix + file.read(8, length), 8 + length)


def read(opened: OpenFiles) -> FileCheckpoint:
    """Reads the headers of files. Raises as :func:`read_layout`."""
    layouts = [read_layout(file, number) for number, file in enumerate(opened.store.files)]
    tensors = list(chain.from_iterable(layouts))
    if any(tensor.start is not None for tensor in tensors):
        if opened.index is None:  # some files have one rank's parts
            tensors = [tensor._replace(start=tensor.start or (0,) * len(tensor.shape)) for tensor in tensors]
        else:
            tensors = [tensor._replace(start=None) for tensor in tensors]
    return opened.checkpoint(tensors)


FORMAT = Format((".safetensors",), file_facts, read)


def read_layout(file: StoredFile, number: int = 0) -> list[StoredTensor]:
    """Reads and checks the header; reads no tensor. Returns the tensors, ordered as their bytes are.

    Args:
        number: of the file in its store.
    """
    size = file.nbytes
    prefix = file.read(0, 8)
    if len(prefix) < 8:
        raise CheckpointError(
            f"{file}: expected a safetensors file, got {size} bytes, which is less than its shortest header"
        )
    length = int.from_bytes(prefix, "little")
    if reason := unsupported.lfs_pointer(file, prefix + file.read(8, 56)):
        raise CheckpointError(reason)
    if length > min(size - 8, MAX_HEADER_BYTES):
        raise CheckpointError(
            f"{file}: claims a header of {length} bytes, but the file has {size} and a header at most {MAX_HEADER_BYTES}"
        )
    try:
        entries = json.loads(file.read(8, length), object_pairs_hook=_no_duplicates)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file}: the header is not JSON with distinct keys ({error})") from error
    if not isinstance(entries, dict):
        raise CheckpointError(f"{file}: expected the header to be a JSON object, got a {type(entries).__name__}")
    metadata = entries.pop("__metadata__", None)
    data = 8 + length
    tensors = []
    nbytes_of: dict[tuple[torch.dtype, tuple[int, ...]], int] = {}
    for name, entry in entries.items():
        dtype, shape, begin, end = _parse(file, name, entry)
        if (nbytes := nbytes_of.get((dtype, shape))) is None:
            nbytes = nbytes_of[dtype, shape] = _checked_size(file, name, dtype, shape)
        if end - begin != nbytes:
            takes = f"{entry['dtype']} {_show(list(shape))} takes {_show(nbytes)}"
            raise _invalid(file, name, f"has {end - begin} bytes, but {takes}")
        tensors.append((begin, end, StoredTensor(name, dtype, shape, data + begin, None, number)))
    tensors.sort(key=itemgetter(0, 1))
    position, previous = 0, "the header"
    for begin, end, tensor in tensors:
        if begin != position:
            what = "overlaps" if begin < position else "leaves a hole after"
            raise _invalid(file, tensor.name, f"{what} {previous[:200]}")
        position, previous = end, tensor.name
    if (described := data + position) != size:
        what = "is truncated" if described > size else "has bytes that belong to no tensor"
        raise CheckpointError(
            f"{file}: {what}: the header describes {described} bytes, the last of them {previous[:200]}, and the file has "
            f"{size}"
        )
    return _with_starts(file, [tensor for _, _, tensor in tensors], metadata)


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries: dict[str, Any] = {}
    for key, value in pairs:
        if key in entries:
            raise ValueError(f"duplicate key {key!r}")
        entries[key] = value
    return entries


def _parse(file: StoredFile, name: str, entry: Any) -> tuple[torch.dtype, tuple[int, ...], int, int]:
    """Returns the dtype and the shape of a tensor, and where its bytes begin and end."""
    try:
        dtype_name, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
        dtype = SAFETENSORS.get(dtype_name)
        numbers = [*shape, begin, end]
        valid = (
            type(shape) is list
            and {*map(type, numbers)} == {int}
            and min(numbers) >= 0
            and max(numbers) <= _MAX_INTEGER
        )
    except (TypeError, KeyError, ValueError) as error:
        raise _invalid(file, name, f"lacks a dtype, a shape or two data_offsets: {_show(entry)}") from error
    if dtype is None:
        raise _invalid(file, name, f"has dtype {_show(dtype_name)}, expected one of {', '.join(SAFETENSORS)}")
    if not valid:
        what = f"has shape {_show(shape)} and offsets {_show([begin, end])}, expected non-negative integers"
        raise _invalid(file, name, what)
    return dtype, tuple(shape), begin, end


def _checked_size(file: StoredFile, name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    """Returns the number of bytes of a tensor, which the file may have, as the dims are limited."""
    # With a dim of 0 the tensor has no bytes, but the strides of the other dims must not overflow.
    if len(shape) > _MAX_DIMS or prod(max(n, 1) for n in shape) * dtype.itemsize >= 1 << 63:
        raise _invalid(file, name, f"has shape {_show(list(shape))}, more than a tensor can have")
    return prod(shape) * dtype.itemsize


def _with_starts(file: StoredFile, tensors: list[StoredTensor], metadata: Any) -> list[StoredTensor]:
    """Adds what ``__metadata__`` says of the tensors, if they are one rank's parts of larger ones (DCP)."""
    sharding = metadata.get("DCP_SHARDING_INFO") if isinstance(metadata, dict) else None
    if not isinstance(sharding, str):
        return tensors
    try:
        saved = json.loads(sharding)
        starts = [tuple(saved[tensor.name]["saved_offsets"]) for tensor in tensors]
        if not all(type(n) is int and 0 <= n < 1 << 62 for start in starts for n in start):
            raise ValueError("an offset is no integer in range")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(
            f"{file}: DCP_SHARDING_INFO does not give an offset for each tensor ({_show(error)})"
        ) from error
    # A job of one rank saves whole tensors with this key too.
    if not _SHARD_FILE.match(file.name) and not any(map(any, starts)):
        return tensors
    return [tensor._replace(start=start) for tensor, start in zip(tensors, starts, strict=True)]


def _invalid(file: StoredFile, name: str, what: str) -> CheckpointError:
    return CheckpointError(f"{file}: {name if len(name) <= 300 else name[:300] + '...'} {what}")


def _show(value: object) -> str:
    try:
        return repr(value)[:200]
    except ValueError:  # Python refuses to print integers of thousands of digits
        return "an integer of thousands of digits"
