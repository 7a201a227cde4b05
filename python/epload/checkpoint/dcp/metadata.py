"""The ``.metadata`` file of a DCP checkpoint, a pickle. It is not trusted: nothing that it names is imported or called.

The few classes of DCP that it may name are replaced by records, which keep what the pickle gives them.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from epload.checkpoint.byte_store import StoredFile
from epload.checkpoint.pickles import check_pickle
from epload.core import dtypes
from epload.core.placement import Box
from epload.errors import CheckpointError

FILE = ".metadata"
MAX_BYTES = 2_000_000_000
"""Limit of this file. That of 100,000 tensors in 64 chunks each has about 1 GB."""
SUFFIX = ".distcp"
"""Suffix of the files that hold the data."""
_DCP = "torch.distributed.checkpoint.metadata"
_RECORDS = {
    (_DCP, "Metadata"), (_DCP, "TensorStorageMetadata"), (_DCP, "BytesStorageMetadata"), (_DCP, "TensorProperties"),
    (_DCP, "ChunkStorageMetadata"), (_DCP, "MetadataIndex"), (_DCP, "_MEM_FORMAT_ENCODING"), (_DCP, "StorageMeta"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"), ("pathlib", "PosixPath"), ("pathlib", "PurePosixPath"),
    ("pathlib._local", "PosixPath"), ("pathlib", "WindowsPath"), ("pathlib", "Path"),
}  # fmt: skip
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in dtypes.SAFETENSORS.values()}


class SavedTensor(NamedTuple):
    """One tensor of the checkpoint, and the boxes in which it was saved."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    boxes: list[Box]


class StoredItem(NamedTuple):
    """Bytes of a file that are one saved item."""

    file: str
    """A plain file name, in the checkpoint's folder."""
    offset: int
    length: int


class DcpMetadata(NamedTuple):
    """The checked content of a ``.metadata`` file."""

    tensors: list[SavedTensor]
    others: list[str]
    """Names of the entries that are no tensors."""
    paths: dict[str, tuple[str, ...]]
    """Keys of each entry in the nested state dict, by the entry's name; empty if they were not recorded."""
    items: dict[tuple[str, tuple[int, ...]], StoredItem]
    """Location of each box, by the tensor's name and the start of the box."""
    objects: dict[str, StoredItem]
    """Location of each entry that is not a tensor, by name."""


def read_metadata(file: StoredFile) -> DcpMetadata:
    """Raises CheckpointError, if the file is malformed or names what no such file has to; OSError."""
    raw = file.read_whole(MAX_BYTES)
    try:
        check_pickle(raw, records=True)
        return _checked(_Unpickler(io.BytesIO(raw)).load())
    except _Refused as refused:
        raise CheckpointError(
            f"{file}: refused to load: the pickle names {refused}, which no metadata of a DCP checkpoint needs, and loading "
            "it could execute code; take the checkpoint from a source that you trust and save it again"
        ) from None
    except Exception as error:
        raise CheckpointError(
            f"{file}: not the metadata of a DCP checkpoint ({type(error).__name__}: {str(error)[:200]}); save it again"
        ) from error


class _Refused(Exception):
    """The pickle names something that is not allowed; the text is its name."""


class _Unpickler(pickle.Unpickler):
    """Makes its own classes, so that a pickle that sets their attributes changes nothing of this process."""

    def __init__(self, stream: io.BytesIO) -> None:
        super().__init__(stream)
        self._made: dict[tuple[str, str], type] = {}

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch", "Size"):
            return torch.Size
        if module == "torch" and name in _DTYPES:
            return _DTYPES[name]
        if (module, name) not in _RECORDS:
            raise _Refused(f"{module}.{name}"[:200])
        if (module, name) not in self._made:
            self._made[module, name] = type(name, (_Tuple if name == "TensorProperties" else _Record,), {})
        return self._made[module, name]

    def persistent_load(self, pid: Any) -> Any:
        raise _Refused(f"a persistent object ({_show(pid)})")


class _Record:
    def __init__(self, *args: Any) -> None:
        pass


class _Tuple(_Record):
    """One whose state is a tuple."""

    def __setstate__(self, state: Any) -> None:
        self.state = state


def _checked(root: Any) -> DcpMetadata:
    """Raises any exception."""
    tensors, others = [], []
    for name, entry in _entries(root.state_dict_metadata):
        if not hasattr(entry, "chunks"):
            others.append(name)
            continue
        properties = entry.properties
        dtype = properties.state[0] if isinstance(properties, _Tuple) else properties.dtype
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"{name} has no dtype that epload knows")
        boxes = [(_sizes(chunk.offsets), _sizes(chunk.sizes)) for chunk in entry.chunks]
        tensors.append(SavedTensor(name, _sizes(entry.size), dtype, boxes))
    items, objects = {}, {}
    for index, info in (root.storage_data or {}).items():
        offset = getattr(index, "offset", None)
        if isinstance(index.fqn, str):
            if getattr(info, "transform_descriptors", None):
                raise ValueError(
                    f"{index.fqn} was saved through an extension ({_show(info.transform_descriptors)}), such as compression"
                )
            item = StoredItem(_file_name(info.relative_path), *_integers((info.offset, info.length)))
            if offset is None:
                objects[index.fqn] = item
            else:
                items[index.fqn, _sizes(offset)] = item
    planned = root.planner_data
    paths = {}
    if isinstance(planned, Mapping):
        paths = {str(name): tuple(map(str, path)) for name, path in planned.items() if isinstance(path, tuple)}
    return DcpMetadata(tensors, others, paths, items, objects)


def _entries(found: Any) -> Iterator[tuple[str, Any]]:
    for name, entry in found.items():
        if not isinstance(name, str):
            raise TypeError(f"expected names to be strings, got {_show(name)}")
        yield name, entry


def _sizes(values: Any) -> tuple[int, ...]:
    return _cached(values) if type(values) is torch.Size else _integers(values)


@lru_cache(maxsize=4096)  # shapes and offsets repeat
def _cached(values: torch.Size) -> tuple[int, ...]:
    return _integers(values)


def _integers(values: Any) -> tuple[int, ...]:
    if not all(type(n) is int and 0 <= n < 1 << 62 for n in values):
        raise ValueError(f"expected non-negative integers, got {_show(values)}")
    return tuple(values)


def _file_name(text: Any) -> str:
    if not isinstance(text, str) or "/" in text or "\\" in text or "\0" in text or text in ("", ".", ".."):
        raise ValueError(f"expected a plain file name in the checkpoint's own folder, got {_show(text)}")
    return text


def _show(value: Any) -> str:
    """Formats a value for messages, without the text of a nested object, which a small pickle can make as long as it likes."""
    if isinstance(value, tuple | list) and len(value) <= 8 and all(isinstance(each, str | int) for each in value):
        return f"[{', '.join(map(_show, value))}]"
    if isinstance(value, str):
        return repr(value[:80])
    small = isinstance(value, int) and abs(value) < 1 << 80
    return str(value) if small else f"a {type(value).__name__}"
