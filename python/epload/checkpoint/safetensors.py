"""The safetensors format: parsing of headers, which are not trusted.

Format: https://huggingface.co/docs/safetensors. A little-endian uint64 N, N bytes of JSON, then the tensors' bytes without
holes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from itertools import chain
from math import prod
from typing import Any

from epload.checkpoint.byte_store import StoredFile, in_threads
from epload.checkpoint.file_checkpoint import FileCheckpoint
from epload.checkpoint.file_sets import lfs_pointer
from epload.checkpoint.index import without_duplicates
from epload.checkpoint.manifest import FileFacts, OpenFiles, StoredTensor
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
    """Reads the headers of files. Raises CheckpointError, OSError."""
    layouts = in_threads(lambda numbered: read_layout(*numbered), [(file, i) for i, file in enumerate(opened.store.files)])
    tensors = list(chain.from_iterable(layouts))
    # Some files have one rank's parts, unless an index names them.
    if any(tensor.start is not None for tensor in tensors):
        starts = [None if opened.index else tensor.start or (0,) * len(tensor.shape) for tensor in tensors]
        tensors = [tensor._replace(start=start) for tensor, start in zip(tensors, starts, strict=True)]
    return FileCheckpoint.of(opened, tensors)


def read_layout(file: StoredFile, number: int = 0) -> list[StoredTensor]:
    """Reads and checks the header; reads no tensor. Returns the tensors, ordered as their bytes are. ``number``: of the file in
    its store."""
    prefix, size = file.read(0, 8), file.nbytes
    if len(prefix) < 8:
        raise CheckpointError(f"{file}: expected a safetensors file, got {size} bytes, which is less than its shortest header")
    if reason := lfs_pointer(file, prefix + file.read(8, 56)):
        raise CheckpointError(reason)
    length = int.from_bytes(prefix, "little")
    if length > min(size - 8, MAX_HEADER_BYTES):
        raise CheckpointError(
            f"{file}: claims a header of {length} bytes, but the file has {size} and a header at most {MAX_HEADER_BYTES}"
        )
    try:
        entries = json.loads(file.read(8, length), object_pairs_hook=without_duplicates)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file}: the header is not JSON with distinct keys ({error})") from error
    if not isinstance(entries, dict):
        raise CheckpointError(f"{file}: expected the header to be a JSON object, got a {type(entries).__name__}")
    metadata = entries.pop("__metadata__", None)
    tensors = [_parse(file, name, entry, 8 + length, number) for name, entry in entries.items()]
    tensors.sort(key=lambda tensor: (tensor.offset, prod(tensor.shape)))
    position, previous = 8 + length, "the header"
    for tensor in tensors:
        if tensor.offset != position:
            what = "overlaps" if tensor.offset < position else "leaves a hole after"
            raise _invalid(file, tensor.name, f"{what} {previous[:200]}")
        position, previous = position + prod(tensor.shape) * tensor.dtype.itemsize, tensor.name
    if position != size:
        what = "is truncated" if position > size else "has bytes that belong to no tensor"
        raise CheckpointError(
            f"{file}: {what}: the header describes {position} bytes, the last of them {previous[:200]}, and the file has {size}"
        )
    return _with_starts(file, tensors, metadata)


def metadata_of(files: Iterable[StoredFile]) -> dict[str, str]:
    """Returns the ``__metadata__`` of safetensors files among these, except what describes the division into files, and what two
    files contradict each other about."""
    values: dict[str, set[str]] = {}
    for file in files:
        if file.name.endswith(".safetensors"):
            header = json.loads(file.read(8, int.from_bytes(file.read(0, 8), "little")))
            metadata = header.get("__metadata__")
            for key, value in metadata.items() if isinstance(metadata, dict) else ():
                if isinstance(value, str) and not key.startswith("DCP_"):
                    values.setdefault(key, set()).add(value)
    return {key: value for key, (value, *others) in values.items() if not others}


def _parse(file: StoredFile, name: str, entry: Any, data: int, number: int) -> StoredTensor:
    """``data``: where the bytes of the tensors begin. ``number``: of the file."""
    try:
        dtype, shape, (begin, end) = SAFETENSORS.get(entry["dtype"]), entry["shape"], entry["data_offsets"]
        numbers = [*shape, begin, end]
    except (TypeError, KeyError, ValueError) as error:
        raise _invalid(file, name, f"lacks a dtype, a shape or two data_offsets: {_show(entry)}") from error
    if dtype is None:
        raise _invalid(file, name, f"has dtype {_show(entry['dtype'])}, expected one of {', '.join(SAFETENSORS)}")
    if type(shape) is not list or not all(type(n) is int and 0 <= n <= _MAX_INTEGER for n in numbers):
        raise _invalid(file, name, f"has shape {_show(shape)} and offsets {_show([begin, end])}, expected non-negative integers")
    # With a dim of 0 the tensor has no bytes, but the strides of the other dims must not overflow.
    if len(shape) > _MAX_DIMS or prod(max(n, 1) for n in shape) * dtype.itemsize >= 1 << 63:
        raise _invalid(file, name, f"has shape {_show(shape)}, more than a tensor can have")
    if end - begin != (nbytes := prod(shape) * dtype.itemsize):
        takes = f"{entry['dtype']} {_show(shape)} takes {nbytes}"
        raise _invalid(file, name, f"has {end - begin} bytes, but {takes}")
    return StoredTensor(name, dtype, tuple(shape), data + begin, None, number)


def _with_starts(file: StoredFile, tensors: list[StoredTensor], metadata: Any) -> list[StoredTensor]:
    """Adds what ``__metadata__`` says of the tensors, if they are one rank's parts of larger ones (DCP)."""
    sharding = metadata.get("DCP_SHARDING_INFO") if isinstance(metadata, dict) else None
    if not isinstance(sharding, str):
        return tensors
    try:
        saved = json.loads(sharding)
        starts = [tuple(saved[tensor.name]["saved_offsets"]) for tensor in tensors]
        if not all(type(n) is int and 0 <= n < 1 << 62 for n in chain.from_iterable(starts)):
            raise ValueError("an offset is no integer in range")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{file}: DCP_SHARDING_INFO does not give an offset for each tensor ({_show(error)})") from error
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
