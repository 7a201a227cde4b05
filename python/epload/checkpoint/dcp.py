"""Checkpoints of torch.distributed.checkpoint (DCP): tensors in chunks, which the ranks of the saving job wrote.

The ``.metadata`` file is a pickle. It is not trusted: nothing that it names is imported or called.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from math import prod
from typing import Any, NamedTuple

import torch

from epload.checkpoint import safetensors, torch_file
from epload.checkpoint.byte_store import ByteStore, StoredFile
from epload.checkpoint.file_checkpoint import FileCheckpoint, Format, OpenFiles
from epload.checkpoint.index import Index, is_plain
from epload.checkpoint.manifest import FileFacts, StoredTensor
from epload.checkpoint.pickles import PickledCall, read_pickle
from epload.core import dtypes
from epload.core.placement import Box
from epload.errors import CheckpointError

FILE = ".metadata"
ROOT = "."
"""The prefix of a whole state dict."""
_MAX_BYTES = 2_000_000_000
"""Limit of the metadata. Those of 100,000 tensors in 64 chunks each have about 1 GB."""
_DTYPES = {f"torch {str(dtype).removeprefix('torch.')}": dtype for dtype in dtypes.SAFETENSORS.values()}
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
_BATCH_BYTES = 32 << 20
_ZIP = b"PK\x03\x04"


class DcpMetadata(NamedTuple):
    """The checked content of a ``.metadata`` file."""

    tensors: dict[str, tuple[torch.dtype, tuple[int, ...], list[Box]]]
    """Dtype, shape and chunks of each tensor, by name."""
    others: list[str]
    """Names of the entries that are no tensors."""
    paths: dict[str, tuple[str, ...]]
    """Keys of each entry in the nested state dict, by the entry's name; empty if they were not recorded."""
    items: dict[tuple[str, tuple[int, ...] | None], tuple[str, int, int]]
    """File name, offset and length of each chunk, by the tensor's name and the start of the chunk; None for other entries."""


class DcpIndex(Index):
    """The ``.metadata`` file of a folder."""

    def __init__(self, file: StoredFile, prefix: str) -> None:
        """Raises as :class:`Index`. ``prefix``: see :func:`_select`."""
        super().__init__(file, _MAX_BYTES, b"\0" + prefix.encode())
        self.prefix = prefix

    @cached_property
    def weight_map(self) -> dict[str, str]:
        """Empty: the metadata name the files of chunks, not of tensors."""
        return {}

    @cached_property
    def metadata(self) -> DcpMetadata:
        """Raises CheckpointError, if the file is malformed or names what no such file has to."""
        try:
            return _parse(read_pickle(self.raw, allowed=_NAMES)[0])
        except Exception as error:
            raise CheckpointError(
                f"{self.file}: not the metadata of a DCP checkpoint ({type(error).__name__}: {str(error)[:200]}); "
                "save it again"
            ) from error

    @property
    def file_names(self) -> list[str]:
        return sorted({file for (_, start), (file, _, _) in self.metadata.items.items() if start is not None})


def read(opened: OpenFiles) -> FileCheckpoint:
    """Returns the checkpoint of the model in a folder with ``.metadata``. Raises CheckpointError, OSError."""
    index, source = opened.index, opened.source
    if not isinstance(index, DcpIndex):
        raise CheckpointError(
            f"{source} has files of a DCP checkpoint without their {FILE}: pass the folder that has it"
        )
    metadata = index.metadata
    names, siblings = _select(list(metadata.tensors), metadata.paths, index.prefix, source)
    number_of = {file.name: i for i, file in enumerate(opened.store.files)}
    items: list[_Item] = []
    located: list[StoredTensor] = []
    for saved_name, name in names.items():
        dtype, shape, boxes = metadata.tensors[saved_name]
        for start, size in dict.fromkeys(boxes):
            if len(start) != len(shape) or len(size) != len(shape):
                raise CheckpointError(f"{source}: {saved_name} of shape {list(shape)} has a chunk of other dims")
            if 0 in size:
                continue
            if (item := metadata.items.get((saved_name, start))) is None:
                raise CheckpointError(
                    f"{source}: no file has the chunk of {saved_name} at {list(start)}; save it again"
                )
            file, offset, length = item
            items.append((saved_name, StoredTensor(name, dtype, size, offset, start, number_of[file]), length))
        if 0 in shape:
            located.append(StoredTensor(name, dtype, shape, 0))
    located += _locate(items, opened.store)
    located.sort(key=lambda tensor: (tensor.file, tensor.offset))
    shapes = {name: metadata.tensors[saved_name][1] for saved_name, name in names.items()}
    if missing := shapes.keys() - {tensor.name for tensor in located}:
        raise CheckpointError(
            f"{source}: {min(missing)} of shape {list(shapes[min(missing)])} has no chunks; save it again"
        )
    # Entries in the model that are no tensors, such as _extra_state.
    inside = {name.rpartition(".")[0] for name in names}
    others = [name for name in metadata.others if name not in siblings and name.rpartition(".")[0] in inside]
    return opened.checkpoint(located, [*siblings, *others], shapes)


FORMAT = Format((".distcp",), FileFacts.of, read)


# ---- the metadata ----


def _parse(root: Any) -> DcpMetadata:
    """Raises any exception."""
    metadata = _fields(root)
    tensors, others = {}, []
    for name, entry in _pairs(metadata["state_dict_metadata"]):
        if not isinstance(name, str):
            raise TypeError(f"expected names to be strings, got {_show(name)}")
        fields = _fields(entry)
        if "chunks" not in fields:
            others.append(name)
            continue
        state = fields["properties"][-1]  # a tuple, whose first part is the dtype, or a dict
        dtype = _DTYPES.get(state[0] if isinstance(state, tuple) else dict(_pairs(state))["dtype"])
        if dtype is None:
            raise ValueError(f"{name} has no dtype that epload knows")
        chunks = map(_fields, fields["chunks"])
        boxes = [(_integers(*chunk["offsets"]), _integers(*chunk["sizes"])) for chunk in chunks]
        tensors[name] = dtype, _integers(*fields["size"]), boxes
    items = {}
    for index, info in _pairs(metadata["storage_data"] or []):
        place, fields = _fields(index), _fields(info)
        if transforms := fields.get("transform_descriptors"):
            raise ValueError(
                f"{place['fqn']} was saved through an extension ({_show(transforms)}), such as compression"
            )
        file, offset = fields["relative_path"], place.get("offset")
        if not isinstance(file, str) or not is_plain(file):
            raise ValueError(f"expected a plain file name in the checkpoint's own folder, got {_show(file)}")
        key = str(place["fqn"]), None if offset is None else _integers(*offset)
        begin, length = _integers((fields["offset"], fields["length"]))
        items[key] = file, begin, length
    planned = metadata["planner_data"] if isinstance(metadata["planner_data"], list) else []
    paths = {str(name): tuple(map(str, path)) for name, path in _pairs(planned) if path and isinstance(path, tuple)}
    return DcpMetadata(tensors, others, paths, items)


def _pairs(values: list[Any]) -> Iterator[tuple[Any, Any]]:
    """Yields the keys and values of a pickled dict."""
    return zip(values[::2], values[1::2], strict=True)


def _fields(value: Any) -> dict[str, Any]:
    """Returns the attributes of a pickled object of a dataclass."""
    if not isinstance(value, PickledCall):
        raise TypeError(f"expected an object with attributes, got {_show(value)}")
    return {str(key): part for key, part in _pairs(value[-1])} if value else {}


def _integers(values: Any = ()) -> tuple[int, ...]:
    if not all(type(n) is int and 0 <= n < 1 << 62 for n in values):
        raise ValueError(f"expected non-negative integers, got {_show(values)}")
    return tuple(values)


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
    """
    if prefix:
        start = "" if prefix == ROOT else prefix.rstrip(".") + "."
        inner = {name: name.removeprefix(start) for name in names if name.startswith(start)}
        if not inner and prefix != ROOT:
            listed = ", ".join(names[:5]) + (f", ... ({len(names) - 5} more)" if len(names) > 5 else "") or "none"
            raise CheckpointError(f"{source}: no tensor is under prefix={prefix!r}; there are {listed}")
        return inner, []
    rest_of = {**paths, **{name: paths.get(name, (name,)) for name in names}}
    at: list[str] = []
    others: list[str] = []
    while True:
        tensors = {name: rest_of[name] for name in names if name in rest_of}
        keys = {rest[0] for rest in tensors.values()}
        nested = {rest[0] for rest in tensors.values() if len(rest) > 1}
        wrappers = [key for key in torch_file.WRAPPERS if key in nested]
        if len(wrappers) > 1:
            choices = " or ".join(f"prefix={'.'.join((*at, key))!r}" for key in wrappers)
            raise CheckpointError(f"{source} has a state dict under each of {' and '.join(wrappers)}: pass {choices}")
        if not wrappers and not len(keys) == len(nested) == 1:
            return {name: ".".join(rest) for name, rest in tensors.items()}, others
        key = wrappers[0] if wrappers else nested.pop()
        at.append(key)
        others += dict.fromkeys(rest[0] for rest in rest_of.values() if rest[0] != key)
        rest_of = {name: rest[1:] for name, rest in rest_of.items() if rest[0] == key and len(rest) > 1}


# ---- the elements of saved items ----

_Item = tuple[str, StoredTensor, int]
"""A saved chunk: the name of its tensor in the checkpoint, the place of the item that it is in, and the item's length."""


def _locate(items: Sequence[_Item], store: ByteStore) -> Iterator[StoredTensor]:
    """Yields the chunks with the offset of the first element in place of that of the item.

    An item of ``torch.save`` is a zip archive of its own: a pickle of a few hundred bytes, then the tensor. Items of one shape
    have equal archives but for the tensor's bytes and what follows them. So the pickle is loaded once for each shape, and the
    beginnings of all other items are compared with that one's.
    """
    similar: dict[tuple[object, ...], list[_Item]] = defaultdict(list)
    for item in items:
        name, chunk, length = item
        file = store.files[chunk.file]
        if chunk.offset + length > file.nbytes:
            raise CheckpointError(
                f"{file} has {file.nbytes} bytes, but {name} is to end at byte {chunk.offset + length}: the file is truncated "
                "or of another checkpoint; copy it again"
            )
        similar[length, chunk.shape, chunk.dtype].append(item)
    headers: dict[tuple[int, int], dict[str, StoredTensor]] = {}
    for members in similar.values():
        _, chunk, length = members[0]
        # A length that the elements alone fill: they are part of a safetensors file that begins there.
        is_full = length == prod(chunk.shape) * chunk.dtype.itemsize
        if is_full and store.files[chunk.file].read(chunk.offset, 4) != _ZIP:
            yield from (_in_safetensors(item, store, headers) for item in members)
        else:
            yield from _in_archives(members, store)


def _in_archives(items: Sequence[_Item], store: ByteStore) -> Iterator[StoredTensor]:
    """Locates chunks of one shape."""
    _, first, _ = items[0]
    begin = _in_archive(items[0], store).offset - first.offset
    head = torch.frombuffer(bytearray(store.files[first.file].read(first.offset, begin)), dtype=torch.uint8)
    step = max(1, _BATCH_BYTES // begin)
    for batch in (items[at : at + step] for at in range(0, len(items), step)):
        rows = [[chunk.file, chunk.offset, n * begin, begin] for n, (_, chunk, _) in enumerate(batch)]
        heads = torch.empty(len(batch), begin, dtype=torch.uint8)
        store.read(torch.tensor(rows, dtype=torch.int64), heads.view(-1))
        for item, same in zip(batch, (heads == head).all(1).tolist(), strict=True):
            yield item[1]._replace(offset=item[1].offset + begin) if same else _in_archive(item, store)


def _in_archive(item: _Item, store: ByteStore) -> StoredTensor:
    name, chunk, length = item
    section = _Section(store.files[chunk.file], chunk.offset, length, name)
    return _checked(section, chunk, torch_file.locate_tensor(section))


def _in_safetensors(
    item: _Item, store: ByteStore, headers: dict[tuple[int, int], dict[str, StoredTensor]]
) -> StoredTensor:
    """``headers``: those that were read, by file and offset."""
    name, chunk, _ = item
    file = store.files[chunk.file]
    section = _Section(file, chunk.offset, file.nbytes - chunk.offset, name)
    if (header := headers.get((chunk.file, chunk.offset))) is None:
        header = {tensor.name: tensor for tensor in safetensors.read_layout(section)}
        headers[chunk.file, chunk.offset] = header
    if name not in header:
        raise CheckpointError(f"{section}: the header there does not contain it; save the checkpoint again")
    return _checked(section, chunk, header[name])


def _checked(section: _Section, chunk: StoredTensor, tensor: StoredTensor) -> StoredTensor:
    """Returns the chunk with the place of a tensor that is stored in the section."""
    if (tensor.dtype, tensor.shape) != (chunk.dtype, chunk.shape):
        raise CheckpointError(
            f"{section}: expected {chunk.dtype} {list(chunk.shape)} by the metadata, got {tensor.dtype} {list(tensor.shape)}; "
            "save the checkpoint again"
        )
    return chunk._replace(offset=chunk.offset + tensor.offset)


class _Section(StoredFile):
    """A byte range of a file as a file of its own."""

    def __init__(self, file: StoredFile, begin: int, nbytes: int, item: str) -> None:
        """``item``: the name of what it has, for error messages."""
        self.name, self.nbytes = file.name, nbytes
        self._file, self._begin, self._item = file, begin, item

    def read(self, offset: int, nbytes: int) -> bytes:
        return self._file.read(self._begin + offset, max(0, min(nbytes, self.nbytes - offset)))

    def __str__(self) -> str:
        return f"{self._file} ({self._item}, at byte {self._begin})"
