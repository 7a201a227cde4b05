"""Checkpoints of torch.distributed.checkpoint (DCP): tensors in parts, which the ranks of the saving job wrote.

The ``.metadata`` file is a pickle. It is not trusted: nothing that it names is imported or called. The few classes of DCP that it
may name are replaced by records, which keep what the pickle gives them.
"""

from __future__ import annotations

import io
import pickle
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import cached_property
from math import prod
from typing import Any, NamedTuple

import torch

from epload.checkpoint import safetensors, torch_file
from epload.checkpoint.byte_store import ByteStore, StoredFile
from epload.checkpoint.chunked import ChunkedTensor, check_covered, checkpoint_of
from epload.checkpoint.file_checkpoint import FileCheckpoint, Format, OpenFiles
from epload.checkpoint.index import Index, is_plain
from epload.checkpoint.manifest import FileFacts, StoredTensor
from epload.checkpoint.pickles import check_pickle
from epload.core import dtypes
from epload.errors import CheckpointError

FILE = ".metadata"
ROOT = "."
"""The prefix of a whole state dict."""
_MAX_BYTES = 2_000_000_000
"""Limit of the metadata. Those of 100,000 tensors in 64 chunks each have about 1 GB."""
_DCP = "torch.distributed.checkpoint.metadata"
_RECORDS = {
    (_DCP, "Metadata"), (_DCP, "TensorStorageMetadata"), (_DCP, "BytesStorageMetadata"), (_DCP, "TensorProperties"),
    (_DCP, "ChunkStorageMetadata"), (_DCP, "MetadataIndex"), (_DCP, "_MEM_FORMAT_ENCODING"), (_DCP, "StorageMeta"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"), ("pathlib", "PosixPath"), ("pathlib", "PurePosixPath"),
    ("pathlib._local", "PosixPath"), ("pathlib", "WindowsPath"), ("pathlib", "Path"),
}  # fmt: skip
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in dtypes.SAFETENSORS.values()}
_BATCH_BYTES = 32 << 20
_BLOCK_BYTES = 64 << 10
_ZIP = b"PK\x03\x04"


class StoredItem(NamedTuple):
    """Bytes of a file that are one saved item."""

    file: str
    """A plain file name, in the checkpoint's folder."""
    offset: int
    length: int


class DcpMetadata(NamedTuple):
    """The checked content of a ``.metadata`` file."""

    tensors: dict[str, ChunkedTensor]
    """Tensors by name, without the places of their chunks."""
    others: list[str]
    """Names of the entries that are no tensors."""
    paths: dict[str, tuple[str, ...]]
    """Keys of each entry in the nested state dict, by the entry's name; empty if they were not recorded."""
    items: dict[tuple[str, tuple[int, ...] | None], StoredItem]
    """Location of each chunk, by the tensor's name and the start of the chunk; of other entries, with None for the start."""


class DcpIndex(Index):
    """The ``.metadata`` file of a folder."""

    def __init__(self, file: StoredFile, prefix: str) -> None:
        """Raises as :class:`Index`. ``prefix``: see :func:`_select`."""
        super().__init__(file, _MAX_BYTES, b"\0" + prefix.encode())
        self.prefix = prefix

    @cached_property
    def metadata(self) -> DcpMetadata:
        """Raises CheckpointError, if the file is malformed or names what no such file has to."""
        try:
            check_pickle(self.raw, records=True)
            return _checked(_Unpickler(io.BytesIO(self.raw)).load())
        except _ForbiddenName as error:
            raise CheckpointError(
                f"{self.file}: refused to load: the pickle names {error}, which no metadata of a DCP checkpoint needs, and "
                "loading it could execute code; take the checkpoint from a source that you trust and save it again"
            ) from None
        except Exception as error:
            raise CheckpointError(
                f"{self.file}: not the metadata of a DCP checkpoint ({type(error).__name__}: {str(error)[:200]}); save it again"
            ) from error

    @property
    def file_names(self) -> list[str]:
        return sorted({item.file for (_, start), item in self.metadata.items.items() if start is not None})

    def absent(self, file_name: str) -> CheckpointError:
        return CheckpointError(
            f"cannot read {file_name}, which {self.file} names: there is no such file; copy it again"
        )


def read(opened: OpenFiles) -> FileCheckpoint:
    """Returns the checkpoint of the model in a folder with ``.metadata``.

    Raises:
        CheckpointError: chunks are missing, or overlap, or are not in their files.
        OSError: a file cannot be read.
    """
    index, source = opened.index, opened.source
    if not isinstance(index, DcpIndex):
        raise CheckpointError(
            f"{source} has files of a DCP checkpoint without their {FILE}: pass the folder that has it"
        )
    metadata = index.metadata
    names, siblings = _select(list(metadata.tensors), metadata.paths, index.prefix, source)
    number_of = {file.name: i for i, file in enumerate(opened.files)}
    items: list[_Item] = []
    tensors: dict[str, ChunkedTensor] = {}
    for saved_name, name in names.items():
        saved = metadata.tensors[saved_name]
        tensor = tensors[name] = ChunkedTensor(saved.shape, saved.dtype)
        for start, size in dict.fromkeys(saved.boxes):
            if len(start) != len(saved.shape) or len(size) != len(saved.shape):
                raise CheckpointError(f"{source}: {saved_name} of shape {list(saved.shape)} has a chunk of other dims")
            if 0 in size:
                continue
            if (item := metadata.items.get((saved_name, start))) is None:
                raise CheckpointError(
                    f"{source}: no file has the chunk of {saved_name} at {list(start)}; save it again"
                )
            tensor.boxes.append((start, size))
            items.append(_Item(saved_name, size, saved.dtype, number_of[item.file], item.offset, item.length))
    check_covered(tensors, source)
    places = zip([item.file for item in items], _locate(items, opened.store), strict=True)
    for tensor in tensors.values():
        tensor.places += [next(places) for _ in tensor.boxes]
    # Entries in the model that are no tensors, such as _extra_state.
    inside = {name.rpartition(".")[0] for name in names}
    others = [name for name in metadata.others if name not in siblings and name.rpartition(".")[0] in inside]
    return checkpoint_of(tensors, opened, [*siblings, *others])


FORMAT = Format((".distcp",), FileFacts.of, read)


# ---- the metadata ----


class _ForbiddenName(Exception):
    """The pickle names something that is not allowed; the text is its name."""


class _Unpickler(pickle.Unpickler):
    """Makes its own classes, so that a pickle that sets their attributes changes nothing of this process."""

    def __init__(self, stream: io.BytesIO) -> None:
        super().__init__(stream)
        self._classes: dict[tuple[str, str], type] = {}

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch", "Size"):
            return torch.Size
        if module == "torch" and name in _DTYPES:
            return _DTYPES[name]
        if (module, name) not in _RECORDS:
            raise _ForbiddenName(f"{module}.{name}"[:200])
        base = _TupleRecord if name == "TensorProperties" else _Record
        return self._classes.setdefault((module, name), type(name, (base,), {}))

    def persistent_load(self, pid: Any) -> Any:
        raise _ForbiddenName(f"a persistent object ({_show(pid)})")


class _Record:
    def __init__(self, *args: Any) -> None:
        pass


class _TupleRecord(_Record):
    """A record whose state is a tuple."""

    def __setstate__(self, state: Any) -> None:
        self.state = state


def _checked(root: Any) -> DcpMetadata:
    """Raises any exception."""
    tensors, others = {}, []
    for name, entry in root.state_dict_metadata.items():
        if not isinstance(name, str):
            raise TypeError(f"expected names to be strings, got {_show(name)}")
        if not hasattr(entry, "chunks"):
            others.append(name)
            continue
        properties = entry.properties
        dtype = properties.state[0] if isinstance(properties, _TupleRecord) else properties.dtype
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"{name} has no dtype that epload knows")
        boxes = [(_integers(chunk.offsets), _integers(chunk.sizes)) for chunk in entry.chunks]
        tensors[name] = ChunkedTensor(_integers(entry.size), dtype, boxes)
    items = {}
    for index, info in (root.storage_data or {}).items():
        offset = getattr(index, "offset", None)
        if isinstance(index.fqn, str):
            if transforms := getattr(info, "transform_descriptors", None):
                raise ValueError(
                    f"{index.fqn} was saved through an extension ({_show(transforms)}), such as compression"
                )
            item = StoredItem(_file_name(info.relative_path), *_integers((info.offset, info.length)))
            items[index.fqn, None if offset is None else _integers(offset)] = item
    planned = root.planner_data if isinstance(root.planner_data, Mapping) else {}
    paths = {str(name): tuple(map(str, path)) for name, path in planned.items() if isinstance(path, tuple)}
    return DcpMetadata(tensors, others, paths, items)


def _integers(values: Any) -> tuple[int, ...]:
    if not all(type(n) is int and 0 <= n < 1 << 62 for n in values):
        raise ValueError(f"expected non-negative integers, got {_show(values)}")
    return tuple(values)


def _file_name(text: Any) -> str:
    if not isinstance(text, str) or not is_plain(text):
        raise ValueError(f"expected a plain file name in the checkpoint's own folder, got {_show(text)}")
    return text


def _show(value: Any) -> str:
    """Formats a value for messages, without the text of a nested object, which a small pickle can make as long as it likes."""
    if isinstance(value, tuple | list) and len(value) <= 8 and all(isinstance(part, str | int) for part in value):
        return f"[{', '.join(map(_show, value))}]"
    if isinstance(value, str):
        return repr(value[:80])
    small = isinstance(value, int) and abs(value) < 1 << 80
    return str(value) if small else f"a {type(value).__name__}"


# ---- the model's entries: jobs save an optimizer's state and the like with the model ----


def _select(
    names: Sequence[str], paths: Mapping[str, tuple[str, ...]], prefix: str, source: str
) -> tuple[dict[str, str], list[str]]:
    """Selects what is under ``prefix``; without one, under a top-level key "model" or "state_dict", or under the only key. For
    ``ROOT`` everything, under its name in the checkpoint.

    Args:
        names: of the checkpoint's tensors.
        paths: for each name the keys under which it was in the nested state dict. Only they tell ``{"model": {"w": ...}}`` from
            ``{"model.w": ...}``, which has no such key.

    Returns:
        The name in the model by the name in the checkpoint, and the keys of what is next to the model.

    Raises:
        CheckpointError: there is nothing under ``prefix``, or without one, there are both "model" and "state_dict".
    """
    if prefix:
        start = "" if prefix == ROOT else prefix.rstrip(".") + "."
        inner = {name: name.removeprefix(start) for name in names if name.startswith(start)}
        if not inner and prefix != ROOT:
            listed = ", ".join(names[:5]) + (f", ... ({len(names) - 5} more)" if len(names) > 5 else "") or "none"
            raise CheckpointError(f"{source}: no tensor is under prefix={prefix!r}; there are {listed}")
        return inner, []
    path_of = {name: paths.get(name, (name,)) for name in names}
    others: list[str] = []
    at: tuple[str, ...] = ()
    while True:
        depth = len(at)
        keys = dict.fromkeys(path[depth] for path in path_of.values())
        nested = dict.fromkeys(path[depth] for path in path_of.values() if len(path) > depth + 1)
        wrappers = [key for key in torch_file.WRAPPERS if key in nested]
        if len(wrappers) > 1:
            choices = " or ".join(f"prefix={'.'.join((*at, key))!r}" for key in wrappers)
            raise CheckpointError(f"{source} has a state dict under each of {' and '.join(wrappers)}: pass {choices}")
        if not wrappers and not len(keys) == len(nested) == 1:
            return {name: ".".join(path[depth:]) for name, path in path_of.items()}, others
        key = wrappers[0] if wrappers else next(iter(nested))
        siblings = dict.fromkeys(path[depth] for path in paths.values() if path[:depth] == at and len(path) > depth)
        others += [sibling for sibling in siblings if sibling != key]
        at = (*at, key)
        path_of = {name: path for name, path in path_of.items() if path[: depth + 1] == at and len(path) > depth + 1}


# ---- the elements of saved items ----


class _Item(NamedTuple):
    """A saved chunk."""

    name: str
    """Name of the item's tensor."""
    shape: tuple[int, ...]
    dtype: torch.dtype
    file: int
    """Index into the files of the store."""
    offset: int
    """Offset of the item in its file, in bytes."""
    length: int


def _locate(items: Sequence[_Item], store: ByteStore) -> list[int]:
    """Returns the offset of each item's first element in its file, in bytes.

    An item of ``torch.save`` is a zip archive of its own: a pickle of a few hundred bytes, then the tensor. Items of one shape
    have equal archives but for the tensor's bytes and what follows them. So the pickle is loaded once for each shape, and the
    beginnings of all other items are compared with that one's.

    Raises:
        CheckpointError: an item is not in its file, or is not what the metadata says.
        OSError: a file cannot be read.
    """
    offsets = [-1] * len(items)
    classes: dict[tuple[object, ...], list[int]] = defaultdict(list)
    for i, item in enumerate(items):
        file = store.files[item.file]
        if item.offset + item.length > file.nbytes:
            raise CheckpointError(
                f"{file} has {file.nbytes} bytes, but {item.name} is to end at byte {item.offset + item.length}: the file is "
                "truncated or of another checkpoint; copy it again"
            )
        classes[item.length, item.shape, item.dtype].append(i)
    headers: dict[tuple[int, int], dict[str, StoredTensor]] = {}
    for members in classes.values():
        first = items[members[0]]
        nbytes = prod(first.shape) * first.dtype.itemsize
        # A length that the elements alone fill: they are part of a safetensors file that begins there.
        if first.length == nbytes and store.files[first.file].read(first.offset, 4) != _ZIP:
            for i in members:
                offsets[i] = _in_safetensors(items[i], store, headers)
            continue
        begin = _in_archive(first, store)
        head = torch.frombuffer(bytearray(store.files[first.file].read(first.offset, begin)), dtype=torch.uint8)
        step = max(1, _BATCH_BYTES // begin)
        for batch in (members[at : at + step] for at in range(0, len(members), step)):
            rows = [[items[i].file, items[i].offset, n * begin, begin] for n, i in enumerate(batch)]
            heads = torch.empty(len(batch), begin, dtype=torch.uint8)
            store.read(torch.tensor(rows, dtype=torch.int64), heads.view(-1))
            for i, same in zip(batch, (heads == head).all(1).tolist(), strict=True):
                offsets[i] = items[i].offset + (begin if same else _in_archive(items[i], store))
    return offsets


def _in_archive(item: _Item, store: ByteStore) -> int:
    """Returns the offset of the first element in the item."""
    section = _Section(store.files[item.file], item.offset, item.length, item.name)
    return _checked_offset(section, item, torch_file.locate_tensor(section))


def _in_safetensors(item: _Item, store: ByteStore, headers: dict[tuple[int, int], dict[str, StoredTensor]]) -> int:
    """Returns the offset of the first element in the file. ``headers``: those that were read, by file and offset."""
    file = store.files[item.file]
    section = _Section(file, item.offset, file.nbytes - item.offset, item.name)
    if (header := headers.get((item.file, item.offset))) is None:
        header = {tensor.name: tensor for tensor in safetensors.read_layout(section)}
        headers[item.file, item.offset] = header
    if item.name not in header:
        raise CheckpointError(f"{section}: the header there does not contain it; save the checkpoint again")
    return item.offset + _checked_offset(section, item, header[item.name])


def _checked_offset(section: _Section, item: _Item, tensor: StoredTensor) -> int:
    if (tensor.dtype, tensor.shape) != (item.dtype, item.shape):
        raise CheckpointError(
            f"{section}: expected {item.dtype} {list(item.shape)} by the metadata, got {tensor.dtype} {list(tensor.shape)}; "
            "save the checkpoint again"
        )
    return tensor.offset


class _Section(StoredFile):
    """A byte range of a file as a file of its own. Read in blocks, as it is parsed in many small reads, each of which could be a
    request to a server."""

    def __init__(self, file: StoredFile, begin: int, nbytes: int, item: str) -> None:
        """``item``: the name of what it has, for error messages."""
        self.name, self.nbytes = file.name, nbytes
        self._file, self._begin, self._item = file, begin, item
        self._blocks: dict[int, bytes] = {}

    def read(self, offset: int, nbytes: int) -> bytes:
        end = min(offset + nbytes, self.nbytes)
        if offset >= end:
            return b""
        first = offset // _BLOCK_BYTES
        blocks = b"".join(self._block(number) for number in range(first, -(-end // _BLOCK_BYTES)))
        return blocks[offset - first * _BLOCK_BYTES :][: end - offset]

    def _block(self, number: int) -> bytes:
        if number not in self._blocks:
            begin = number * _BLOCK_BYTES
            self._blocks[number] = self._file.read(self._begin + begin, min(_BLOCK_BYTES, self.nbytes - begin))
        return self._blocks[number]

    def __str__(self) -> str:
        return f"{self._file} ({self._item}, at byte {self._begin})"
