"""Files written by ``torch.save``: where their tensors are stored, so that they are read like those of a safetensors file.

Such a file is a zip archive whose members are stored uncompressed: a pickle of the structure, and one member per storage.
``torch.load`` runs the pickle, with ``weights_only``, so that no code in it is executed.
"""

from __future__ import annotations

import os
import re
import struct
import zipfile
from collections.abc import Mapping
from operator import attrgetter
from typing import Any, BinaryIO

import torch
from torch import Tensor

from epload.checkpoint.byte_store import StoredFile, in_threads
from epload.checkpoint.file_checkpoint import FileCheckpoint
from epload.checkpoint.manifest import FileFacts, OpenFiles, StoredTensor
from epload.checkpoint.state_dict import StateDictCheckpoint, split_entries
from epload.core import dtypes
from epload.errors import CheckpointError
from epload.native.extension import _C

WRAPPERS = ("state_dict", "model")
"""Keys under which a file may store the state dict, next to an optimizer's state, a step count and the like."""
_AVERAGE = re.compile(r"(^|_)ema(_|$)")
"""Matches the keys of averaged weights, which some programs load in place of the model's."""
ZIP = b"PK\x03\x04"
_MAX_LEGACY_BYTES = 100_000_000
"""Limit of the pickles at the beginning of a file of the format before torch 1.6."""
_MAX_PICKLE_BYTES = 1_000_000_000
"""Limit of a pickle that torch loads: one that is compressed may claim any size."""
_MAX_RATIO = 16
"""Limit of the bytes that a compressed archive takes, above a pickle, over those of the file."""
_LEGACY_PICKLES = 5
"""Number of pickles that a file of the format before torch 1.6 begins with."""


def check_pickles(stream: BinaryIO) -> None:
    """Checks the pickles in a file, before ``torch.load`` runs them. ``stream``: at the beginning, where it is again afterwards.
    Raises ValueError, or RuntimeError if torch cannot read the archive."""
    is_archive = stream.read(4) == ZIP
    stream.seek(0)
    if is_archive:
        with zipfile.ZipFile(stream) as archive:
            nbytes = max((e.file_size for e in archive.infolist() if e.filename.endswith("data.pkl")), default=0)
            unpacked = sum(e.file_size for e in archive.infolist() if not _is_stored(e))
        if nbytes > _MAX_PICKLE_BYTES:
            raise ValueError(f"its pickle has {nbytes} bytes, expected at most {_MAX_PICKLE_BYTES}")
        if unpacked > (most := _MAX_PICKLE_BYTES + _MAX_RATIO * stream.seek(0, os.SEEK_END)):
            raise ValueError(f"it unpacks to {unpacked} bytes, expected at most {most}")
        stream.seek(0)
        pickled = torch._C.PyTorchFileReader(stream).get_record("data.pkl")  # the same as torch.load finds
        _C.check_pickle(pickled, 0, None)
    else:
        raw, end = stream.read(_MAX_LEGACY_BYTES), 0
        for _ in range(_LEGACY_PICKLES):
            end = _C.check_pickle(raw, end, None)
    stream.seek(0)


def read(opened: OpenFiles) -> FileCheckpoint | StateDictCheckpoint:
    """Locates the tensors without reading them, or, if some are not one byte range each, loads the files: views that are not
    contiguous, another byte order, the format before torch 1.6, or a torch that does not report offsets.
    Raises CheckpointError, OSError."""
    located = []
    ignored: dict[str, None] = {}
    try:
        members_of = in_threads(_members, opened.store.files)
        for number, (file, facts, members) in enumerate(zip(opened.store.files, opened.facts, members_of, strict=True)):
            if not facts.header:
                raise ValueError("without a digest of its header, another file could not be told from this one")
            tensors, others = _unwrapped(_load_on_meta(file), file)
            ignored |= dict.fromkeys(others)
            ranges = [_byte_range(tensor, members)._replace(name=name, file=number) for name, tensor in tensors.items()]
            located += sorted(ranges, key=attrgetter("offset"))
    except OSError:
        raise
    except Exception:
        return _load_files(opened)  # which reports what is wrong
    return FileCheckpoint.of(opened, located, list(ignored))


def locate_tensor(file: StoredFile) -> StoredTensor:
    """Locates the tensor that is all of a file, as ``torch.save(tensor)`` writes it. Raises CheckpointError, OSError."""
    try:
        return _byte_range(_load_on_meta(file), _members(file))
    except (CheckpointError, OSError):
        raise
    except Exception as error:
        raise CheckpointError(
            f"{file}: expected a tensor as torch.save writes it, to load with weights_only=True "
            f"({type(error).__name__}: {str(error)[:200]})"
        ) from error


def _load_on_meta(file: StoredFile) -> Any:
    with file.stream() as stream:
        check_pickles(stream)
        return torch.load(stream, map_location="meta", weights_only=True)


def _byte_range(tensor: Any, members: Mapping[int, int]) -> StoredTensor:
    """Returns where a tensor loaded on meta is in its file. Raises ValueError if its bytes are not one range. ``members``: of the
    archive."""
    plain = type(tensor) in (Tensor, torch.nn.Parameter) and tensor.layout == torch.strided and not tensor.is_quantized
    if plain and tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg()):
        begin = getattr(tensor.untyped_storage(), "_checkpoint_offset", -1)
        offset = int(tensor.storage_offset()) * tensor.dtype.itemsize
        # Checked against the archive: torch's private offset must never lead to a wrong byte.
        if tensor.dtype in dtypes.SAFETENSORS.values() and members.get(begin, -1) >= offset + tensor.nbytes:
            return StoredTensor("", tensor.dtype, tuple(tensor.shape), begin + offset)
    if plain and not tensor.is_contiguous():
        raise ValueError(
            "its elements are not in row-major order, as those of a transposed or channels_last tensor: save it contiguous()"
        )
    raise ValueError("its bytes are not one range of an uncompressed zip archive")


def _load_files(opened: OpenFiles) -> StateDictCheckpoint:
    """Raises as :func:`read`."""
    tensors = {}
    file_of: dict[str, StoredFile] = {}
    ignored: dict[str, None] = {}
    for file in opened.store.files:
        state, others = _unwrapped(_load(file), file)
        ignored |= dict.fromkeys(others)
        for name, tensor in state.items():
            if opened.index is None or opened.index.places(name, file.name):
                if name in file_of:
                    raise CheckpointError(f"{name} is both in {file_of[name]} and in {file}")
                tensors[name], file_of[name] = tensor, file
    if opened.index is not None:
        opened.index.check_complete({*tensors, *ignored})
    return StateDictCheckpoint(tensors, opened.source, tuple(ignored), store=opened.store)


def _load(file: StoredFile) -> Any:
    """Loads a file; tensors are memory-mapped if the format allows it."""
    try:
        # torch would take the bytes of compressed members as they are.
        path = file.mapping_path if (entries := _entries(file)) and all(map(_is_stored, entries)) else None
        with file.stream() as stream:
            check_pickles(stream)
            source = os.fspath(path) if path is not None else stream
            return torch.load(source, map_location="cpu", mmap=path is not None, weights_only=True)
    except (CheckpointError, OSError):
        raise
    except Exception as error:
        raise CheckpointError(
            f"{file}: not a torch file of tensors that loads with weights_only=True "
            f"({type(error).__name__}: {str(error)[:200]}); save its tensors again with torch.save, or as safetensors"
        ) from error


def _unwrapped(state: Any, file: StoredFile, path: str = "torch.load(FILE)") -> tuple[dict[str, Tensor], list[str]]:
    """Returns the tensors of a state dict that may be wrapped, and the names of all other entries."""
    if not isinstance(state, Mapping):
        raise CheckpointError(f"{file}: expected a dict of tensors, got a {type(state).__name__}")
    # A model may have a submodule of this name, but no file has its tensors both under it and in a nested dict.
    nested = [key for key in WRAPPERS if _has_tensors(state.get(key))]
    for key in state if nested else ():
        if _AVERAGE.search(str(key)) and _has_tensors(state[key]) and len(state[key]) >= len(state[nested[0]]):
            nested.insert(0, key)
    if len(nested) > 1:
        raise CheckpointError(
            f"{file} has a state dict under each of {' and '.join(map(repr, nested))}; pass the one that is meant, e.g. "
            f"{path}[{nested[-1]!r}]"
        )
    if not nested:
        return split_entries(state, str(file))
    tensors, others = _unwrapped(state[nested[0]], file, f"{path}[{nested[0]!r}]")
    return tensors, others + [str(name) for name in state if name != nested[0]]


def _has_tensors(state: Any) -> bool:
    """Returns True for a dict of tensors, and for one that wraps such a dict."""
    return isinstance(state, Mapping) and (
        any(isinstance(value, Tensor) for value in state.values())
        or any(_has_tensors(state.get(wrapper)) for wrapper in WRAPPERS)
    )


# ---- the archive ----


def file_facts(file: StoredFile) -> FileFacts:
    """Returns facts whose header is the archive's directory, which says where each storage is, and the pickle, which says what
    is in them. Raises CheckpointError, OSError."""
    header = b""
    try:
        entries = _entries(file)
        (pickled,) = [entry for entry in entries if entry.filename.endswith("/data.pkl")]
        if _is_stored(pickled) and pickled.file_size <= _MAX_PICKLE_BYTES:
            where = [(entry.filename, entry.header_offset, entry.file_size, entry.compress_type) for entry in entries]
            header = repr(where).encode() + file.read(_data_begin(file, pickled), pickled.file_size)
    except (CheckpointError, OSError):
        raise
    except Exception:
        pass  # reading the file reports what is wrong
    return FileFacts.of(file, header)


def _entries(file: StoredFile) -> list[zipfile.ZipInfo]:
    """Returns the archive's directory; empty for a file of the format before torch 1.6."""
    if file.read(0, 4) != ZIP:
        return []
    with file.stream() as stream, zipfile.ZipFile(stream) as archive:
        return archive.infolist()


def _members(file: StoredFile) -> dict[int, int]:
    """Returns the size of each uncompressed member, by where its bytes begin; empty if the tensors are not little-endian."""
    members = {}
    for entry in filter(_is_stored, _entries(file)):
        begin = _data_begin(file, entry)
        members[begin] = entry.file_size
        if entry.filename.endswith("/byteorder") and file.read(begin, 6) != b"little":
            return {}
    return members


def _is_stored(entry: zipfile.ZipInfo) -> bool:
    return entry.compress_type == zipfile.ZIP_STORED


def _data_begin(file: StoredFile, entry: zipfile.ZipInfo) -> int:
    """Returns the offset of a member's bytes, before which come its name and padding."""
    local = file.read(entry.header_offset, 30)
    if len(local) < 30 or local[:4] != ZIP:
        raise CheckpointError(
            f"{file}: expected a zip member at byte {entry.header_offset}, where the archive's directory places one"
        )
    name_length, extra_length = struct.unpack_from("<HH", local, 26)
    return int(entry.header_offset + 30 + name_length + extra_length)
