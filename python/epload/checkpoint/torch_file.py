"""Files written by ``torch.save``: where their tensors are stored, so that they are read like those of a safetensors file.

Such a file is a zip archive whose members are stored uncompressed: a pickle of the structure, and one member per storage.
``torch.load`` runs the pickle, with ``weights_only``, so that no code in it is executed.
"""

from __future__ import annotations

import hashlib
import os
import struct
import zipfile
from collections.abc import Mapping, Sequence
from typing import Any, BinaryIO

import torch
from torch import Tensor

from epload.checkpoint.byte_store import ByteStore, StoredFile
from epload.checkpoint.index import Index
from epload.checkpoint.manifest import FileFacts, FileLayout
from epload.checkpoint.pickles import Suspicious, check_pickle
from epload.checkpoint.state_dict import StateDictCheckpoint, split_entries
from epload.core import dtypes
from epload.errors import CheckpointError

WRAPPERS = ("state_dict", "model")
"""Keys under which a file may store the state dict, next to an optimizer's state, a step count and the like."""
_ZIP = b"PK\x03\x04"
_MAX_DIRECTORY_BYTES = 100_000_000
"""Limit of the archive's directory, and of the pickle. Larger ones are loaded by torch as a whole."""
_MAX_PICKLE_BYTES = 1_000_000_000
"""Limit of a pickle that torch loads: one that is compressed may claim any size."""
_LEGACY_PICKLES = 5
"""Number of pickles that a file of the format before torch 1.6 begins with."""


def check_pickles(stream: BinaryIO) -> None:
    """Checks the pickles in a file, before ``torch.load`` runs them. ``stream``: at the beginning, where it is again afterwards.

    Raises:
        Suspicious: the file must not be loaded.
        RuntimeError: it is an archive that torch cannot read.
    """
    is_archive = stream.read(4) == _ZIP
    stream.seek(0)
    if is_archive:
        nbytes = _pickle_bytes(stream)
        reader = torch._C.PyTorchFileReader(stream)  # which finds the same pickle as torch.load
        if hasattr(reader, "get_record_size"):  # since torch 2.12
            nbytes = reader.get_record_size("data.pkl")
        if nbytes > _MAX_PICKLE_BYTES:
            raise Suspicious(f"its pickle has {nbytes} bytes, expected at most {_MAX_PICKLE_BYTES}")
        check_pickle(reader.get_record("data.pkl"))
    else:
        raw, end = stream.read(_MAX_DIRECTORY_BYTES), 0
        for _ in range(_LEGACY_PICKLES):
            end = check_pickle(raw, end)
    stream.seek(0)


def _pickle_bytes(stream: BinaryIO) -> int:
    """Returns the size of the largest pickle of an archive, by the archive's directory."""
    with zipfile.ZipFile(stream) as archive:
        sizes = [entry.file_size for entry in archive.infolist() if entry.filename.endswith("data.pkl")]
    stream.seek(0)
    return max(sizes, default=0)


def read_layout(file: StoredFile) -> FileLayout | None:
    """Locates the tensors without reading them. Returns None if some are not one byte range each: views that are not contiguous,
    another byte order, the format before torch 1.6, or a torch that does not report offsets.

    Raises:
        CheckpointError: the file is no state dict.
        OSError: it cannot be read.
    """
    if _directory(file) is None:
        return None
    try:
        members = _members(file)
        with file.stream() as stream:
            check_pickles(stream)
            state = torch.load(stream, map_location="meta", weights_only=True)
    except OSError:
        raise
    except Exception:
        return None  # load_tensors() reports what is wrong
    tensors, ignored = _unwrapped(state, file)
    offsets = []
    for tensor in tensors.values():
        if (begin := _byte_range(tensor, members)) is None:
            return None
        offsets.append(begin)
    dtypes, shapes = [t.dtype for t in tensors.values()], [tuple(t.shape) for t in tensors.values()]
    order = sorted(range(len(tensors)), key=offsets.__getitem__)
    return FileLayout(list(tensors), dtypes, shapes, offsets, order, ignored)


def locate_tensor(file: StoredFile) -> tuple[torch.dtype, tuple[int, ...], int]:
    """The dtype, the shape and the first byte of the tensor that is all of a file, as ``torch.save(tensor)`` writes it.

    Raises:
        CheckpointError: the file has something else, or not as one byte range.
        OSError: it cannot be read.
    """
    reason = "its bytes are not one range of an uncompressed zip archive"
    try:
        members = _members(file)
        with file.stream() as stream:
            check_pickles(stream)
            tensor = torch.load(stream, map_location="meta", weights_only=True)
        if isinstance(tensor, Tensor) and (begin := _byte_range(tensor, members)) is not None:
            return tensor.dtype, tuple(tensor.shape), begin
    except (CheckpointError, OSError):
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {str(error)[:200]}"
    raise CheckpointError(
        f"{file}: expected a tensor as torch.save writes it, to load with weights_only=True ({reason})"
    )


def _byte_range(tensor: Tensor, members: Mapping[int, int]) -> int | None:
    """Returns the offset of a meta tensor's bytes in its file; None if they are not one range. ``members``: of the archive."""
    plain = type(tensor) in (Tensor, torch.nn.Parameter) and tensor.layout == torch.strided
    if not plain or tensor.is_quantized or tensor.dtype not in dtypes.SAFETENSORS.values():
        return None
    if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        return None
    begin = getattr(tensor.untyped_storage(), "_checkpoint_offset", None)
    offset = tensor.storage_offset() * tensor.dtype.itemsize
    # Checked against the archive: torch's private offset must never lead to a wrong byte.
    if begin is None or members.get(begin, -1) < offset + tensor.nbytes:
        return None
    return int(begin) + int(offset)


def load_files(files: Sequence[StoredFile], store: ByteStore, source: str, index: Index | None) -> StateDictCheckpoint:
    """A checkpoint of files whose tensors are not all byte ranges. ``index``: names the file of each tensor, if there is one.

    Raises:
        CheckpointError: a file is no state dict, a tensor is in two files, or the index names one that is in none.
        OSError: a file cannot be read.
    """
    tensors: dict[str, Tensor] = {}
    file_of: dict[str, StoredFile] = {}
    ignored: dict[str, None] = {}
    for file in files:
        found, others = _load(file)
        ignored |= dict.fromkeys(others)
        for name, tensor in found.items():
            if index is not None and not index.places(name, file.name):
                continue
            if name in file_of:
                raise CheckpointError(f"{name} is both in {file_of[name]} and in {file}")
            tensors[name], file_of[name] = tensor, file
    if index is not None:
        index.check_complete({*tensors, *ignored})
    return StateDictCheckpoint(tensors, source, ignored=tuple(ignored), store=store)


def _load(file: StoredFile) -> tuple[dict[str, Tensor], list[str]]:
    """The tensors, memory-mapped if the format allows it, and the names of the other entries.

    Raises:
        CheckpointError: the file is no state dict.
        OSError: it cannot be read.
    """
    try:
        is_archive = file.read(0, 4) == _ZIP
        path = (
            file.mapping_path if is_archive and _is_uncompressed(file) else None
        )  # before: streams share their position
        # From a stream with a descriptor torch would load files of a third format, a tar archive.
        with file.stream() if is_archive else StoredFile.stream(file) as stream:
            check_pickles(stream)
            if path is not None:
                state = torch.load(os.fspath(path), map_location="cpu", mmap=True, weights_only=True)
            else:
                state = torch.load(stream, map_location="cpu", weights_only=True)
    except (CheckpointError, OSError):
        raise
    except Exception as error:
        raise CheckpointError(
            f"{file}: not a torch file of tensors that loads with weights_only=True "
            f"({type(error).__name__}: {str(error)[:200]}); save its tensors again with torch.save, or as safetensors"
        ) from error
    return _unwrapped(state, file)


def _unwrapped(state: Any, file: StoredFile) -> tuple[dict[str, Tensor], list[str]]:
    """The tensors of a state dict that may be wrapped, and the names of all other entries."""
    others: list[str] = []
    path = ""
    for wrapper in WRAPPERS:
        nested = [key for key in WRAPPERS if isinstance(state, Mapping) and _has_tensors(state.get(key))]
        if len(nested) > 1:
            raise CheckpointError(
                f"{file} has a state dict under each of {' and '.join(map(repr, nested))}; pass the one that is meant, e.g. "
                f"torch.load(FILE){path}[{nested[-1]!r}]"
            )
        inner = state.get(wrapper) if isinstance(state, Mapping) else None
        # A model may have a submodule of this name, but no file has its tensors both under it and in a nested dict.
        if isinstance(inner, Mapping) and (not inner or _has_tensors(inner)):
            others += [str(name) for name in state if name != wrapper]
            state, path = inner, f"[{wrapper!r}]"
    if not isinstance(state, Mapping):
        raise CheckpointError(f"{file}: expected a dict of tensors, got a {type(state).__name__}")
    tensors, ignored = split_entries(state, str(file))
    return tensors, ignored + others


def _has_tensors(state: Any) -> bool:
    """True for a dict of tensors, and for one that wraps such a dict."""
    if not isinstance(state, Mapping):
        return False
    wrapped = [state[wrapper] for wrapper in WRAPPERS if isinstance(state.get(wrapper), Mapping)]
    return any(isinstance(value, Tensor) for each in [state, *wrapped] for value in each.values())


# ---- the archive ----


def file_facts(file: StoredFile) -> FileFacts:
    """The header is the archive's directory, which says where each storage is, and the pickle, which says what is in them.

    Raises:
        CheckpointError: the file has changed.
        OSError: it cannot be read.
    """
    directory = _directory(file)
    header = hashlib.sha256(b"".join(directory)).hexdigest()[:32] if directory is not None else ""
    return FileFacts.of(file, header, 0)


def _directory(file: StoredFile) -> tuple[bytes, bytes] | None:
    """The archive's central directory without checksums, and the file up to the end of its first member, the pickle; None if
    the archive is not laid out as torch does it."""
    end = file.read(max(file.nbytes - 22, 0), 22)  # torch writes no comment after it
    if file.read(0, 4) != _ZIP or len(end) < 22 or end[:4] != b"PK\x05\x06":
        return None
    nbytes, begin = struct.unpack_from("<II", end, 12)
    locator = file.read(max(file.nbytes - 42, 0), 20)
    if locator[:4] == b"PK\x06\x07":
        (offset,) = struct.unpack_from("<Q", locator, 8)
        end64 = file.read(offset, 56)
        if len(end64) < 56 or end64[:4] != b"PK\x06\x06":
            return None
        nbytes, begin = struct.unpack_from("<QQ", end64, 40)
    if nbytes > _MAX_DIRECTORY_BYTES:
        return None
    directory = file.read(begin, nbytes)
    if len(directory) < max(nbytes, 46) or directory[:4] != b"PK\x01\x02":
        return None
    packed, _, name_length = struct.unpack_from("<IIH", directory, 20)
    (offset,) = struct.unpack_from("<I", directory, 42)
    is_pickle = directory[46 : 46 + name_length].endswith(b"/data.pkl")
    if not is_pickle or packed > _MAX_DIRECTORY_BYTES or offset != 0:
        return None
    return _without_checksums(directory), file.read(0, _data_begin(file, 0) + packed)


def _without_checksums(directory: bytes) -> bytes:
    """A central directory that does not depend on the values of the tensors."""
    blank, position = bytearray(directory), 0
    while directory[position : position + 4] == b"PK\x01\x02" and position + 46 <= len(directory):
        blank[position + 16 : position + 20] = bytes(4)
        position += 46 + sum(struct.unpack_from("<HHH", directory, position + 28))
    return bytes(blank)


def _members(file: StoredFile) -> dict[int, int]:
    """The size of each uncompressed member, by where its bytes begin; empty if the tensors are not little-endian."""
    with file.stream() as stream, zipfile.ZipFile(stream) as archive:
        entries = archive.infolist()
        byte_order = next((entry for entry in entries if entry.filename.endswith("/byteorder")), None)
        if byte_order is not None and archive.read(byte_order) != b"little":
            return {}
    stored = [entry for entry in entries if entry.compress_type == zipfile.ZIP_STORED]
    return {_data_begin(file, entry.header_offset): entry.file_size for entry in stored}


def _is_uncompressed(file: StoredFile) -> bool:
    """True if an archive can be mapped: torch would take compressed bytes as they are."""
    with file.stream() as stream, zipfile.ZipFile(stream) as archive:
        return all(entry.compress_type == zipfile.ZIP_STORED for entry in archive.infolist())


def _data_begin(file: StoredFile, header: int) -> int:
    """Returns the offset of the bytes of the member whose local header is at ``header``; a name and padding come before them."""
    local = file.read(header, 30)
    if len(local) < 30 or local[:4] != _ZIP:
        raise CheckpointError(
            f"{file}: expected a zip member at byte {header}, where the archive's directory places one"
        )
    name_length, extra_length = struct.unpack_from("<HH", local, 26)
    return int(header + 30 + name_length + extra_length)
