"""The safetensors format: parsing of headers, which are not trusted.

Format: https://huggingface.co/docs/safetensors. A little-endian uint64 N, N bytes of JSON, then the tensors' bytes without
holes.
"""

from __future__ import annotations

import hashlib
import json
import re
import struct
from dataclasses import replace
from math import prod
from typing import Any

import torch

from epload.checkpoint import unsupported
from epload.checkpoint.byte_store import StoredFile
from epload.checkpoint.manifest import FileFacts, FileLayout
from epload.core.columns import column, from_raw
from epload.core.dtypes import SAFETENSORS
from epload.errors import CheckpointError
from epload.native.extension import _C

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
    # Processors have instructions for SHA-256, and a header can have megabytes that every reader hashes in every load.
    header = hashlib.sha256(prefix)
    header.update(file.read(8, length))
    return FileFacts.of(file, header.hexdigest()[:32], 8 + length)


def read_layout(file: StoredFile) -> FileLayout:
    """Reads and checks the header; reads no tensor.

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
    (length,) = struct.unpack("<Q", prefix)
    if reason := unsupported.lfs_pointer(file, prefix + file.read(8, 56)):
        raise CheckpointError(reason)
    if length > min(size - 8, MAX_HEADER_BYTES):
        raise CheckpointError(
            f"{file}: claims a header of {length} bytes, but the file has {size} and a header at most {MAX_HEADER_BYTES}"
        )
    header = file.read(8, length)
    layout = _plain_layout(file, header)
    if layout is not None:
        return layout
    try:
        entries = json.loads(header, object_pairs_hook=_no_duplicates)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file}: the header is not JSON with distinct keys ({error})") from error
    if not isinstance(entries, dict):
        raise CheckpointError(f"{file}: expected the header to be a JSON object, got a {type(entries).__name__}")
    metadata = entries.pop("__metadata__", None)
    layout, ends = _parse_entries(file, entries, 8 + length)
    _check_no_holes(file, layout, ends, 8 + length)
    return _with_parts(file, layout, metadata)


def _plain_layout(file: StoredFile, header: bytes) -> FileLayout | None:
    """The layout of a header in the form that writers give it, for a tenth of the work of the rest. None for every other, and for
    what is wrong, so that the rest finds out what."""
    found = _C.safetensors_entries(header)
    if found is None:
        return None
    names, kinds, *columns, metadata = found
    if not names or len(set(names)) != len(names):
        return None
    about = None
    if metadata is not None:
        try:
            about = json.loads(header[slice(*metadata)], object_pairs_hook=_no_duplicates)
        except (ValueError, RecursionError):
            return None
    sizes = []
    for dtype_name, shape in kinds:
        dtype = SAFETENSORS.get(dtype_name)
        if dtype is None or len(shape) > _MAX_DIMS or prod(max(n, 1) for n in shape) * dtype.itemsize >= 1 << 63:
            return None
        sizes.append(prod(shape) * dtype.itemsize)
    kind, begin, end = (from_raw(raw) for raw in columns)
    dtypes, shapes = [SAFETENSORS[name] for name, _ in kinds], [shape for _, shape in kinds]
    data, kind_of = 8 + len(header), kind.tolist()
    layout = FileLayout(
        names,
        [dtypes[i] for i in kind_of],
        [shapes[i] for i in kind_of],
        (begin + data).tolist(),
        range(len(names)),
    )
    if not torch.equal(begin[1:], end[:-1]):
        order = sorted(layout.order, key=list(zip(begin.tolist(), end.tolist(), strict=True)).__getitem__)
        layout, place = replace(layout, order=order), column(order)
        kind, begin, end = (values.index_select(0, place) for values in (kind, begin, end))
    no_holes = int(begin[0]) == 0 and torch.equal(begin[1:], end[:-1]) and data + int(end[-1]) == file.nbytes
    if not no_holes or not torch.equal(end - begin, column(sizes)[kind]):
        return None
    return _with_parts(file, layout, about)


def _with_parts(file: StoredFile, layout: FileLayout, metadata: Any) -> FileLayout:
    """The layout with what ``__metadata__`` says of the tensors, if they are one rank's parts of larger ones (DCP)."""
    sharding = metadata.get("DCP_SHARDING_INFO") if isinstance(metadata, dict) else None
    if not isinstance(sharding, str):
        return layout
    try:
        starts = {name: tuple(entry["saved_offsets"]) for name, entry in json.loads(sharding).items()}
        parts = [starts[name] for name in layout.names]
        if not all(type(n) is int and 0 <= n < 1 << 62 for start in parts for n in start):
            raise ValueError("an offset is no integer in range")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"{file}: DCP_SHARDING_INFO does not give an offset for each tensor ({_show(error)})"
        ) from error
    # A job of one rank saves whole tensors with this key too.
    if not _SHARD_FILE.match(file.name) and not any(map(any, parts)):
        return layout
    return replace(layout, parts=parts)


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries = dict(pairs)
    if len(entries) != len(pairs):
        seen: set[str] = set()
        raise ValueError(f"duplicate key {next(k for k, _ in pairs if k in seen or seen.add(k))!r}")  # type: ignore[func-returns-value]
    return entries


def _parse_entries(file: StoredFile, entries: dict[str, Any], data: int) -> tuple[FileLayout, list[int]]:
    """The layout, and where each tensor ends. ``data``: where the tensors' bytes begin."""
    dtypes, shapes, offsets, ends = [], [], [], []
    nbytes_of: dict[tuple[str, tuple[int, ...]], int] = {}
    for name, entry in entries.items():
        try:
            dtype_name, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
            dtype = SAFETENSORS.get(dtype_name)
            valid = type(shape) is list and all(type(n) is int and 0 <= n <= _MAX_INTEGER for n in (*shape, begin, end))
        except (TypeError, KeyError, ValueError) as error:
            raise _invalid(file, name, f"lacks a dtype, a shape or two data_offsets: {_show(entry)}") from error
        if dtype is None:
            raise _invalid(file, name, f"has dtype {_show(dtype_name)}, expected one of {', '.join(SAFETENSORS)}")
        if not valid:
            what = f"has shape {_show(shape)} and offsets {_show([begin, end])}, expected non-negative integers"
            raise _invalid(file, name, what)
        shape = tuple(shape)
        nbytes = nbytes_of.get((dtype_name, shape))
        too_large = False
        if nbytes is None:
            nbytes = nbytes_of[dtype_name, shape] = prod(shape) * dtype.itemsize
            # With a dim of 0 the tensor has no bytes, but the strides of the other dims must not overflow.
            too_large = len(shape) > _MAX_DIMS or prod(max(n, 1) for n in shape) * dtype.itemsize >= 1 << 63
        if end - begin != nbytes:
            what = f"has {end - begin} bytes, but {dtype_name} {_show(list(shape))} takes {_show(nbytes)}"
            raise _invalid(file, name, what)
        if too_large:
            raise _invalid(file, name, f"has shape {_show(list(shape))}, more than a tensor can have")
        dtypes.append(dtype)
        shapes.append(shape)
        offsets.append(data + begin)
        ends.append(data + end)
    order = sorted(range(len(ends)), key=lambda i: (offsets[i], ends[i]))
    return FileLayout(list(entries), dtypes, shapes, offsets, order), ends


def _check_no_holes(file: StoredFile, layout: FileLayout, ends: list[int], data: int) -> None:
    """Checks that the tensors fill the file from ``data`` to its end, without holes or overlaps."""
    position, previous = data, "the header"
    for i in layout.order:
        if layout.offsets[i] != position:
            what = "overlaps" if layout.offsets[i] < position else "leaves a hole after"
            raise _invalid(file, layout.names[i], f"{what} {previous[:200]}")
        position, previous = ends[i], layout.names[i]
    if position != file.nbytes:
        what = "is truncated" if position > file.nbytes else "has bytes that belong to no tensor"
        raise CheckpointError(
            f"{file}: {what}: the header describes {position} bytes, the last of them {previous[:200]}, and the file has "
            f"{file.nbytes}"
        )


def _invalid(file: StoredFile, name: str, what: str) -> CheckpointError:
    return CheckpointError(f"{file}: {name if len(name) <= 300 else name[:300] + '...'} {what}")


def _show(value: object) -> str:
    try:
        return repr(value)[:200]
    except ValueError:  # Python refuses to print integers of thousands of digits
        return "an integer of thousands of digits"
