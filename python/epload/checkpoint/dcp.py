"""Checkpoints of torch.distributed.checkpoint (DCP): tensors in chunks, which the ranks of the saving job wrote.

The ``.metadata`` file is a pickle. It is not trusted: nothing that it names is imported or called.
"""

from __future__ import annotations

import io
import pickle
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from math import prod
from reprlib import repr as brief
from typing import Any, NamedTuple

import torch

from epload.checkpoint import safetensors, torch_file
from epload.checkpoint.byte_store import ByteStore, StoredFile
from epload.checkpoint.file_checkpoint import FileCheckpoint
from epload.checkpoint.file_sets import DCP, DCP_ROOT
from epload.checkpoint.index import Index, is_plain
from epload.checkpoint.manifest import OpenFiles, StoredTensor
from epload.core import dtypes, garbage_collection
from epload.core.placement import Box
from epload.errors import CheckpointError
from epload.native.extension import _C
from epload.observe.render import list_first

_MAX_BYTES = 2_000_000_000
"""Limit of the metadata. Those of 100,000 tensors in 64 chunks each have about 1 GB."""
_DTYPES = {f"torch {dtypes.name(dtype)}": dtype for dtype in dtypes.TABLE}
_NAMES = {
    *_DTYPES,
    *(
        f"torch.distributed.checkpoint.metadata {name}"
        for name in (
            "Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "TensorProperties", "ChunkStorageMetadata",
            "MetadataIndex", "_MEM_FORMAT_ENCODING", "StorageMeta",
        )
    ),
    "torch Size", "torch.distributed.checkpoint.filesystem _StorageInfo", "torch.serialization _get_layout",
    "pathlib PosixPath", "pathlib PurePosixPath", "pathlib._local PosixPath", "pathlib WindowsPath", "pathlib Path",
}  # fmt: skip
"""The names that the metadata of a DCP checkpoint need."""
_TRAINING_STATE = "optimizer", "lr_scheduler", "dataloader", "train_state"
"""Keys of torchtitan next to the model's own names."""
_BATCH_BYTES = 32 << 20


class DcpMetadata(NamedTuple):
    """The checked content of a ``.metadata`` file."""

    tensors: dict[str, tuple[torch.dtype, tuple[int, ...], list[Box]]]
    """Dtype, shape and chunks of each tensor, by name."""
    others: list[str]
    """Names of the entries that are no tensors."""
    paths: dict[str, tuple[str | int, ...]]
    """Keys and indices of each entry in the nested state dict, by the entry's name; empty if they were not recorded."""
    items: dict[tuple[str, tuple[int, ...] | None], tuple[str, int, int]]
    """File name, offset and length of each chunk, by the tensor's name and the start of the chunk; None for other entries."""


class DcpIndex(Index):
    """The ``.metadata`` file of a folder."""

    def __init__(self, file: StoredFile, prefix: str) -> None:
        """Raises as :class:`Index`. ``prefix``: see :func:`_select`."""
        super().__init__(file, _MAX_BYTES, b"\0" + prefix.encode())
        self.prefix = prefix
        self.weight_map = {}  # the metadata name the files of chunks, not of tensors

    @cached_property
    def metadata(self) -> DcpMetadata:
        """Raises CheckpointError, if the file is malformed or names what no such file has to."""
        try:
            with garbage_collection.paused():
                _C.check_pickle(self.raw, 0, _NAMES)
                return _parse(_Unpickler(io.BytesIO(self.raw)).load())
        except Exception as error:
            raise CheckpointError(
                f"{self.file}: not the metadata of a DCP checkpoint ({type(error).__name__}: {str(error)[:200]}); save it again"
            ) from error

    @property
    def file_names(self) -> list[str]:
        return sorted({file for (_, start), (file, _, _) in self.metadata.items.items() if start is not None})


def read(opened: OpenFiles) -> FileCheckpoint:
    """Returns the checkpoint of the model in a folder with ``.metadata``. Raises CheckpointError, OSError."""
    index, source = opened.index, opened.source
    if not isinstance(index, DcpIndex):
        raise CheckpointError(f"{source} has files of a DCP checkpoint without their {DCP}: pass the folder that has it")
    metadata = index.metadata
    paths = {name: tuple(map(str, path)) for name, path in metadata.paths.items()}
    names, siblings = _select(list(metadata.tensors), paths, index.prefix, source)
    number_of = {file.name: i for i, file in enumerate(opened.store.files)}
    items = []
    shapes = {}
    located = []
    for saved_name, name in names.items():
        dtype, shape, boxes = metadata.tensors[saved_name]
        shapes[name] = shape
        chunks = dict.fromkeys(box for box in boxes if 0 not in box[1])
        if 0 in shape:
            located.append(StoredTensor(name, dtype, shape, 0))
        elif not chunks:
            raise CheckpointError(f"{source}: {name} of shape {list(shape)} has no chunks; save it again")
        for start, size in chunks:
            if not len(start) == len(size) == len(shape):
                raise CheckpointError(f"{source}: {saved_name} of shape {list(shape)} has a chunk of other dims")
            if (item := metadata.items.get((saved_name, start))) is None:
                raise CheckpointError(f"{source}: no file has the chunk of {saved_name} at {list(start)}; save it again")
            number = number_of[item[0]]
            chunk = StoredTensor(name, dtype, size, item[1], start, number)
            items.append(_Item(opened.store.files[number], saved_name, chunk, item[2]))
    located += _locate(items, opened.store)
    located.sort(key=lambda tensor: (tensor.file, tensor.offset))
    # Entries in the model that are no tensors, such as _extra_state.
    inside = {name.rpartition(".")[0] for name in names}
    others = [name for name in metadata.others if name not in siblings and name.rpartition(".")[0] in inside]
    return FileCheckpoint.of(opened, located, [*siblings, *others], shapes)


# ---- the metadata ----


class _Record:
    """An object of a class that the metadata names: its attributes, and nothing else of the class."""

    def __init__(self, *_: Any) -> None:
        pass  # as of an enum or a path, which nothing needs


class _Properties(_Record):
    """The properties of a tensor, of which the dtype is needed."""

    def __setstate__(self, state: Any) -> None:
        self.dtype = state[0] if isinstance(state, tuple) else state["dtype"]


class _Unpickler(pickle.Unpickler):
    """Builds records where a pickle names classes and functions. The pickle has been checked."""

    def find_class(self, module: str, name: str) -> Any:
        if name == "TensorProperties":
            return _Properties
        full = f"{module} {name}"
        return tuple if full == "torch Size" else _DTYPES.get(full, _Record)


def _parse(root: Any) -> DcpMetadata:
    """Raises any exception."""
    parsed = DcpMetadata({}, [], {}, {})
    for name, entry in root.state_dict_metadata.items():
        if not isinstance(name, str):
            raise TypeError(f"expected names to be strings, got {brief(name)}")
        if not hasattr(entry, "chunks"):
            parsed.others.append(name)
            continue
        if not isinstance(dtype := entry.properties.dtype, torch.dtype):
            raise ValueError(f"{name} has no dtype that epload knows")
        boxes = [(_integers(chunk.offsets), _integers(chunk.sizes)) for chunk in entry.chunks]
        parsed.tensors[name] = dtype, _integers(entry.size), boxes
    for index, info in (root.storage_data or {}).items():
        if transforms := getattr(info, "transform_descriptors", None):
            raise ValueError(f"{index.fqn} was saved through an extension ({brief(transforms)}), such as compression")
        if not is_plain(info.relative_path):
            raise ValueError(f"expected a plain file name in the checkpoint's own folder, got {brief(info.relative_path)}")
        offset = getattr(index, "offset", None)
        begin, length = _integers((info.offset, info.length))
        parsed.items[str(index.fqn), None if offset is None else _integers(offset)] = info.relative_path, begin, length
    planned = root.planner_data if isinstance(root.planner_data, dict) else {}
    for name, path in planned.items():
        if path and isinstance(path, tuple):
            parsed.paths[str(name)] = tuple(key if type(key) is int else str(key) for key in path)
    return parsed


def _integers(values: tuple[int, ...]) -> tuple[int, ...]:
    if not all(type(n) is int and 0 <= n < 1 << 62 for n in values):
        raise ValueError(f"expected non-negative integers, got {brief(values)}")
    return tuple(values)


# ---- the model's entries: jobs save an optimizer's state and the like with the model ----


def _select(
    names: Sequence[str], paths: Mapping[str, tuple[str, ...]], prefix: str, source: str
) -> tuple[dict[str, str], list[str]]:
    """Selects what is under ``prefix``; without one, under a top-level key "model" or "state_dict", or under the only key. For
    ``DCP_ROOT`` everything, under its name in the checkpoint.

    Args:
        names: of the checkpoint's tensors.
        paths: for each name the keys under which it was in the nested state dict. Only they tell ``{"model": {"w": ...}}`` from
            ``{"model.w": ...}``, which has no such key.

    Returns:
        The name in the model by the name in the checkpoint, and the keys of what is next to the model.
    """
    if prefix:
        start = "" if prefix == DCP_ROOT else prefix.rstrip(".") + "."
        inner = {name: name.removeprefix(start) for name in names if name.startswith(start)}
        if not inner and start:
            raise CheckpointError(f"{source}: no tensor is under prefix={prefix!r}; there are {list_first(names) or 'none'}")
        return inner, []
    rest_of = {**paths, **{name: paths.get(name, (name,)) for name in names}}
    at: list[str] = []
    siblings: list[str] = []
    while True:
        tensors = {name: rest_of[name] for name in names if name in rest_of}
        is_nested = {keys[0]: len(keys) > 1 for keys in tensors.values()}
        models = [key for key in torch_file.WRAPPERS if is_nested.get(key)]
        if len(models) > 1:
            choices = " or ".join(f"prefix={'.'.join((*at, key))!r}" for key in models)
            raise CheckpointError(f"{source} has a state dict under each of {' and '.join(models)}: pass {choices}")
        if not models and list(is_nested.values()) != [True]:
            if not all(is_nested.values()):  # the model's names are keys, as torchtitan saves them
                siblings += (others := [key for key in _TRAINING_STATE if is_nested.get(key)])
                tensors = {name: keys for name, keys in tensors.items() if keys[0] not in others}
            return {name: ".".join(keys) for name, keys in tensors.items()}, siblings
        key = models[0] if models else next(iter(is_nested))
        at.append(key)
        siblings += dict.fromkeys(keys[0] for keys in rest_of.values() if keys[0] != key)
        rest_of = {name: keys[1:] for name, keys in rest_of.items() if keys[0] == key and len(keys) > 1}


# ---- the elements of saved items ----


class _Item(StoredFile):
    """A saved chunk: a byte range of a file as a file of its own."""

    def __init__(self, file: StoredFile, saved_name: str, chunk: StoredTensor, nbytes: int) -> None:
        """``chunk``: its offset is that of the item. ``saved_name``: of its tensor in the checkpoint."""
        if chunk.offset + nbytes > file.nbytes:
            raise CheckpointError(
                f"{file} has {file.nbytes} bytes, but {saved_name} is to end at byte {chunk.offset + nbytes}: the file is "
                "truncated or of another checkpoint; copy it again"
            )
        self.name, self.nbytes = file.name, nbytes
        self.file, self.saved_name, self.chunk = file, saved_name, chunk

    def read(self, offset: int, nbytes: int) -> bytes:
        return self.file.read(self.chunk.offset + offset, max(0, min(nbytes, self.nbytes - offset)))

    def locate(self, tensor: StoredTensor) -> StoredTensor:
        """Returns the chunk with the place of a tensor that is stored in the item."""
        if (tensor.dtype, tensor.shape) != (self.chunk.dtype, self.chunk.shape):
            raise CheckpointError(
                f"{self}: expected {self.chunk.dtype} {list(self.chunk.shape)} by the metadata, got "
                f"{tensor.dtype} {list(tensor.shape)}; save the checkpoint again"
            )
        return self.chunk._replace(offset=self.chunk.offset + tensor.offset)

    def __str__(self) -> str:
        return f"{self.file} ({self.saved_name}, at byte {self.chunk.offset})"


def _locate(items: Sequence[_Item], store: ByteStore) -> Iterator[StoredTensor]:
    """Yields the chunks with the offset of the first element in place of that of the item."""
    similar: dict[tuple[object, ...], list[_Item]] = defaultdict(list)
    for item in items:
        similar[item.nbytes, item.chunk.shape, item.chunk.dtype].append(item)
    headers = {}
    for members in similar.values():
        first = members[0]
        if first.nbytes != prod(first.chunk.shape) * first.chunk.dtype.itemsize or first.read(0, 4) == torch_file.ZIP:
            yield from _in_archives(members, store)
            continue
        # The elements alone have this length: they are part of a safetensors file that begins there.
        for item in members:
            key = item.chunk.file, item.chunk.offset
            if key not in headers:
                item.nbytes = item.file.nbytes - item.chunk.offset
                headers[key] = {tensor.name: tensor for tensor in safetensors.read_layout(item)}
            if (found := headers[key].pop(item.saved_name, None)) is None:
                raise CheckpointError(
                    f"{item}: the header there does not contain it, or has one of a rank's several chunks, as torch writes them; "
                    "save the checkpoint again, without SerializationFormat.SAFETENSORS"
                )
            yield item.locate(found)


def _in_archives(items: Sequence[_Item], store: ByteStore) -> Iterator[StoredTensor]:
    """Locates chunks of one shape in items of ``torch.save``, each a zip archive: a short pickle, then the tensor.

    Items of one shape have equal archives but for the tensor's bytes and what follows them. So one pickle is loaded, and the
    beginnings of all other items are compared with that item's.
    """
    tensor = torch_file.locate_tensor(items[0])
    begin = tensor.offset
    head = torch.frombuffer(bytearray(items[0].read(0, begin)), dtype=torch.uint8)
    step = max(1, _BATCH_BYTES // begin)
    for batch in (items[at : at + step] for at in range(0, len(items), step)):
        ranges = [[item.chunk.file, item.chunk.offset, n * begin, begin] for n, item in enumerate(batch)]
        heads = torch.empty(len(batch), begin, dtype=torch.uint8)
        store.read(torch.tensor(ranges, dtype=torch.int64), heads.view(-1))
        for item, is_same in zip(batch, (heads == head).all(1).tolist(), strict=True):
            yield item.locate(tensor if is_same else torch_file.locate_tensor(item))
