"""Files written by ``torch.save``: where their tensors lie, so that they are read like those of a safetensors file.

Such a file is a zip archive whose members are stored uncompressed: a pickle of the structure, and one member for each storage.
``torch.load`` runs the pickle, with ``weights_only``, so that no code in it is executed.
"""

from __future__ import annotations

import hashlib
import os
import struct
import zipfile
from collections.abc import Mapping
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor

from epload.checkpoint.safetensors import MAX_HEADER_BYTES, FileFacts, digest_of_samples
from epload.checkpoint.source_file import SourceFile
from epload.core import dtypes
from epload.errors import CheckpointError

WRAPPERS = ("state_dict", "model")
"""Under which a file may keep the state dict beside an optimizer's state, a step count and the like."""
_ZIP = b"PK\x03\x04"
_SHOWN = 10


class TorchLayout(NamedTuple):
    """Columns, one entry a tensor. ``order`` sorts them as their bytes lie in the file."""

    names: list[str]
    dtypes: list[torch.dtype]
    shapes: list[tuple[int, ...]]
    offsets: list[int]
    """From the start of the file, bytes."""
    order: list[int]
    ignored: list[str]
    """Names of entries that hold no tensor."""


def tensors_of(state: Mapping[Any, Any], source: str) -> tuple[dict[str, Tensor], list[str]]:
    """The tensors of a state dict, and the names of what else is in it. A dict without any entry is a state dict of no tensors.

    Raises:
        CheckpointError: there are entries, but none is a tensor, or one is no name.
    """
    tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
    if state and not tensors:
        raise CheckpointError(f"{source}: no tensors found; top-level keys: {_listed(state)}")
    if (odd := next((name for name in tensors if not isinstance(name, str)), None)) is not None:
        raise CheckpointError(f"{source}: expected a state dict with names for keys, got the key {odd!r}")
    return tensors, [str(name) for name in state if name not in tensors]


def read_layout(file: SourceFile) -> TorchLayout | None:
    """Where the tensors lie, without reading them. None if some cannot be read as one range of bytes: views that are not
    contiguous, another byte order, the format before torch 1.6, or a torch that does not tell.

    Raises:
        CheckpointError: the file is not one of tensors.
        OSError: it cannot be read.
    """
    if _directory(file) is None:
        return None
    try:
        members = _members(file)
        with _stream(file) as stream:
            state = torch.load(stream, map_location="meta", weights_only=True)
    except OSError:
        raise
    except Exception:
        return None  # loading it for real says what is wrong
    tensors, ignored = _unwrapped(state, file)
    layout = TorchLayout(list(tensors), [], [], [], [], ignored)
    for tensor in tensors.values():
        plain = type(tensor) in (Tensor, torch.nn.Parameter) and tensor.layout == torch.strided
        if not plain or tensor.is_quantized or tensor.dtype not in dtypes.SAFETENSORS.values():
            return None
        if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
            return None
        begin = getattr(tensor.untyped_storage(), "_checkpoint_offset", None)
        at = tensor.storage_offset() * tensor.dtype.itemsize
        # Asked of the archive too: where a member lies is torch's to know, but a wrong byte would be ours.
        if begin is None or members.get(begin, -1) < at + tensor.nbytes:
            return None
        layout.dtypes.append(tensor.dtype)
        layout.shapes.append(tuple(tensor.shape))
        layout.offsets.append(begin + at)
    layout.order.extend(sorted(range(len(tensors)), key=layout.offsets.__getitem__))
    return layout


def load_tensors(file: SourceFile) -> tuple[dict[str, Tensor], list[str]]:
    """The tensors and the names of what else is in the file. Memory-mapped, but for the format before torch 1.6, which is read
    whole.

    Raises:
        CheckpointError: the file is not one of tensors.
        OSError: it cannot be read.
    """
    try:
        if file.read(0, 4) == _ZIP:
            # The file that is open, whatever lies at its path by now.
            path = f"/proc/self/fd/{file.fd}"
            state = torch.load(
                path if os.path.exists(path) else file.path, map_location="cpu", mmap=True, weights_only=True
            )
        else:
            with _stream(file) as stream:
                state = torch.load(stream, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception as error:
        raise CheckpointError(
            f"{file.path}: not a torch file of tensors that loads with weights_only=True "
            f"({type(error).__name__}: {str(error)[:200]}); save its tensors again with torch.save, or as safetensors"
        ) from error
    return _unwrapped(state, file)


def _unwrapped(state: Any, file: SourceFile) -> tuple[dict[str, Tensor], list[str]]:
    beside: list[str] = []
    for wrapper in WRAPPERS:
        inner = state.get(wrapper) if isinstance(state, Mapping) else None
        # A model may have a part of this name, but no file has its tensors both there and in a dict of their own.
        if isinstance(inner, Mapping) and (not inner or any(isinstance(value, Tensor) for value in _leaves(inner))):
            beside += [str(name) for name in state if name != wrapper]
            state = inner
    if not isinstance(state, Mapping):
        raise CheckpointError(f"{file.path}: expected a dict of tensors, got a {type(state).__name__}")
    tensors, ignored = tensors_of(state, str(file.path))
    return tensors, ignored + beside


def _leaves(state: Mapping[Any, Any]) -> list[Any]:
    """The values of a dict, and of a wrapped one in it."""
    found = list(state.values())
    for wrapper in WRAPPERS:
        if isinstance(state.get(wrapper), Mapping):
            found += state[wrapper].values()
    return found


def _listed(state: Mapping[Any, Any]) -> str:
    return ", ".join(str(name)[:100] for name in list(state)[:_SHOWN]) + (", ..." if len(state) > _SHOWN else "")


# ---- the archive ----


def torch_facts(file: SourceFile) -> FileFacts:
    """By which two ranks know that they see the same torch file. The header is the archive's directory, which says where
    each storage lies, and the pickle, which says what is in them; empty where there is none. Raises OSError."""
    found = _directory(file)
    header = hashlib.sha256(b"".join(found)).hexdigest()[:32] if found is not None else ""
    return FileFacts(file.path.name, file.nbytes, header, digest_of_samples(file, 0))


def _directory(file: SourceFile) -> tuple[bytes, bytes] | None:
    """The archive's central directory, but for checksums, and its first member, the pickle; None if it is not laid out as
    torch does."""
    end = file.read(max(file.nbytes - 22, 0), 22)  # torch writes no comment behind it
    if file.read(0, 4) != _ZIP or len(end) < 22 or end[:4] != b"PK\x05\x06":
        return None
    nbytes, begin = struct.unpack_from("<II", end, 12)
    locator = file.read(max(file.nbytes - 42, 0), 20)
    if locator[:4] == b"PK\x06\x07":
        (at,) = struct.unpack_from("<Q", locator, 8)
        end64 = file.read(at, 56)
        if len(end64) < 56 or end64[:4] != b"PK\x06\x06":
            return None
        nbytes, begin = struct.unpack_from("<QQ", end64, 40)
    if nbytes > MAX_HEADER_BYTES:
        return None
    directory = file.read(begin, nbytes)
    if len(directory) < max(nbytes, 46) or directory[:4] != b"PK\x01\x02":
        return None
    packed, _, name_length = struct.unpack_from("<IIH", directory, 20)
    (offset,) = struct.unpack_from("<I", directory, 42)
    if not directory[46 : 46 + name_length].endswith(b"/data.pkl") or packed > MAX_HEADER_BYTES or offset != 0:
        return None
    return _without_checksums(directory), file.read(0, _data_begin(file, 0) + packed)


def _without_checksums(directory: bytes) -> bytes:
    """A central directory that is the same for other values in the same places."""
    blank, at = bytearray(directory), 0
    while directory[at : at + 4] == b"PK\x01\x02" and at + 46 <= len(directory):
        blank[at + 16 : at + 20] = bytes(4)
        at += 46 + sum(struct.unpack_from("<HHH", directory, at + 28))
    return bytes(blank)


def _members(file: SourceFile) -> dict[int, int]:
    """Where the bytes of each uncompressed member begin, and how many there are."""
    with _stream(file) as stream, zipfile.ZipFile(stream) as archive:
        found = archive.infolist()
        byte_order = next((each for each in found if each.filename.endswith("/byteorder")), None)
        if byte_order is not None and archive.read(byte_order) != b"little":
            return {}
    stored = [each for each in found if each.compress_type == zipfile.ZIP_STORED]
    return {_data_begin(file, each.header_offset): each.file_size for each in stored}


def _stream(file: SourceFile) -> BinaryIO:
    """The open file, from its beginning on."""
    stream = open(os.dup(file.fd), "rb")  # noqa: SIM115  (the caller closes it)
    stream.seek(0)  # where it stands is shared with the descriptor that was duplicated
    return stream


def _data_begin(file: SourceFile, header: int) -> int:
    """Of a member, whose own header begins at ``header``: its name and padding lie before its bytes."""
    local = file.read(header, 30)
    if len(local) < 30 or local[:4] != _ZIP:
        raise CheckpointError(f"{file.path}: its directory places a member at byte {header}, where there is none")
    name_length, extra_length = struct.unpack_from("<HH", local, 26)
    return int(header + 30 + name_length + extra_length)
