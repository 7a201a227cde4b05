"""The safetensors format: parsing of headers, which are not trusted.

Format: https://huggingface.co/docs/safetensors. A little-endian uint64 N, N bytes of JSON, then the tensors' bytes without
holes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from math import prod
from operator import itemgetter
from typing import Any

from epload.checkpoint import unsupported
from epload.checkpoint.byte_store import StoredFile
from epload.checkpoint.chunked import of_shards
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
    layouts = [read_layout(file) for file in opened.files]
    is_sharded = any(tensor.start is not None for layout in layouts for tensor in layout)
    return of_shards(opened, layouts) if opened.index is None and is_sharded else opened.checkpoint(layouts)


FORMAT = Format((".safetensors",), file_facts, read)


def read_layout(file: StoredFile) -> list[StoredTensor]:
    """Reads and checks the header; reads no tensor. Returns the tensors, ordered as their bytes are.

    Raises:
        CheckpointError: the header violates the format, or describes bytes that the file does not have.
        OSError: the file cannot be read.
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
    layout = _parse_entries(file, entries, 8 + length)
    return _with_starts(file, layout, metadata)


def _with_starts(file: StoredFile, layout: list[StoredTensor], metadata: Any) -> list[StoredTensor]:
    """Adds what ``__metadata__`` says of the tensors, if they are one rank's parts of larger ones (DCP)."""
    sharding = metadata.get("DCP_SHARDING_INFO") if isinstance(metadata, dict) else None
    if not isinstance(sharding, str):
        return layout
    try:
        saved = json.loads(sharding)
        starts = [tuple(saved[tensor.name]["saved_offsets"]) for tensor in layout]
        if not all(type(n) is int and 0 <= n < 1 << 62 for start in starts for n in start):
            raise ValueError("an offset is no integer in range")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(
            f"{file}: DCP_SHARDING_INFO does not give an offset for each tensor ({_show(error)})"
        ) from error
    # A job of one rank saves whole tensors with this key too.
    if not _SHARD_FILE.match(file.name) and not any(map(any, starts)):
        return layout
    return [tensor._replace(start=start) for tensor, start in zip(layout, starts, strict=True)]


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries = dict(pairs)
    if len(entries) != len(pairs):
        seen: set[str] = set()
        raise ValueError(f"duplicate key {next(k for k, _ in pairs if k in seen or seen.add(k))!r}")  # type: ignore[func-returns-value]
    return entries


def _parse_entries(file: StoredFile, entries: dict[str, Any], data: int) -> list[StoredTensor]:
    """Returns the tensors, which fill the file from ``data`` to its end, ordered as their bytes are."""
    tensors: list[tuple[int, int, StoredTensor]] = []
    nbytes_of: dict[tuple[str, tuple[int, ...]], int] = {}
    for name, entry in entries.items():
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
        shape = tuple(shape)
        if (nbytes := nbytes_of.get((dtype_name, shape))) is None:
            nbytes = nbytes_of[dtype_name, shape] = prod(shape) * dtype.itemsize
            # With a dim of 0 the tensor has no bytes, but the strides of the other dims must not overflow.
            too_large = len(shape) > _MAX_DIMS or prod(max(n, 1) for n in shape) * dtype.itemsize >= 1 << 63
            if too_large and end - begin == nbytes:
                raise _invalid(file, name, f"has shape {_show(list(shape))}, more than a tensor can have")
        if end - begin != nbytes:
            what = f"has {end - begin} bytes, but {dtype_name} {_show(list(shape))} takes {_show(nbytes)}"
            raise _invalid(file, name, what)
        tensors.append((begin, end, StoredTensor(name, dtype, shape, data + begin)))
    tensors.sort(key=itemgetter(0, 1))
    _check_no_holes(file, tensors, data)
    return [tensor for _, _, tensor in tensors]


def _check_no_holes(file: StoredFile, tensors: Sequence[tuple[int, int, StoredTensor]], data: int) -> None:
    """Checks that the tensors fill the file from ``data`` to its end, without holes or overlaps."""
    position, previous = 0, "the header"
    for begin, end, tensor in tensors:
        if begin != position:
            what = "overlaps" if begin < position else "leaves a hole after"
            raise _invalid(file, tensor.name, f"{what} {previous[:200]}")
        position, previous = end, tensor.name
    if (described := data + position) != file.nbytes:
        what = "is truncated" if described > file.nbytes else "has bytes that belong to no tensor"
        raise CheckpointError(
            f"{file}: {what}: the header describes {described} bytes, the last of them {previous[:200]}, and the file has "
            f"{file.nbytes}"
        )


def _invalid(file: StoredFile, name: str, what: str) -> CheckpointError:
    return CheckpointError(f"{file}: {name if len(name) <= 300 else name[:300] + '...'} {what}")


def _show(value: object) -> str:
    try:
        return repr(value)[:200]
    except ValueError:  # Python refuses to print integers of thousands of digits
        return "an integer of thousands of digits"
