"""Where bytes come from: safetensors files, torch files, state dicts. Each gives a manifest and ranged reads into a buffer.

Only readers open a checkpoint; the manifest travels to the other ranks in compact form.
"""

from __future__ import annotations

import hashlib
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, overload

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from epload import dtypes, ops
from epload.errors import CheckpointError
from epload.manifest import Manifest, Places
from epload.placement import Box, box_of_range, row_major_strides
from epload.safetensors_file import RangedReader, Readable, file_facts, joined, read_header


class Piece(NamedTuple):
    """Bytes [tensor_offset, tensor_offset + nbytes) of tensor number ``tensor`` of the manifest, wanted at an offset."""

    tensor: int
    tensor_offset: int
    bucket_offset: int
    nbytes: int


class Pieces(Sequence[Piece]):
    """Many pieces, in columns: those of a bucket number in the thousands."""

    def __init__(self, columns: Tensor) -> None:
        """``columns``: int64 [n, 4], the fields of Piece."""
        self.columns = columns

    @staticmethod
    def of(pieces: Sequence[Piece]) -> Pieces:
        if isinstance(pieces, Pieces):
            return pieces
        return Pieces(torch.tensor(pieces, dtype=torch.int64).reshape(-1, len(Piece._fields)))

    def __len__(self) -> int:
        return len(self.columns)

    def __iter__(self) -> Iterator[Piece]:
        return map(Piece._make, self.columns.tolist())

    @overload
    def __getitem__(self, index: int) -> Piece: ...
    @overload
    def __getitem__(self, index: slice) -> Pieces: ...
    def __getitem__(self, index: int | slice) -> Piece | Pieces:
        part = self.columns[index]
        return Pieces(part) if isinstance(index, slice) else Piece(*part.tolist())


class Checkpoint(ABC):
    """A source of tensors. Used by one thread at a time."""

    once: bool = False
    """Whether it can be read only once."""

    @property
    @abstractmethod
    def manifest(self) -> Manifest:
        """Names, shapes and dtypes, from headers alone."""

    @abstractmethod
    def fill(self, bucket: Tensor, pieces: Sequence[Piece]) -> None:
        """Reads pieces into a uint8 CPU tensor. Raises CheckpointError naming the file or the tensor."""

    def tensor(self, number: int) -> Tensor | None:
        """A tensor by its number in the manifest, as it lies in memory; None if this source does not hold it there."""
        return None

    def read_regions(self, regions: Readable) -> int | None:
        """Lets regions of tensors be read straight out of files, into those of a model or for a proof; returns the bytes read,
        None if this source cannot.

        Raises:
            CheckpointError: a file is gone, cannot be read or ends too early.
        """
        return None

    def close(self) -> None:  # noqa: B027  (most sources hold nothing)
        """Gives back files and threads. The checkpoint can be used again afterwards."""

    @staticmethod
    def open(source: Any, known: Manifest | None = None) -> Checkpoint:
        """A file or folder (safetensors with or without an index, ``.pt``, ``.bin``), a dict, or a Checkpoint.

        Args:
            source: what to open.
            known: of a checkpoint opened before; where this one's headers are the same, they are not parsed again.

        Raises:
            CheckpointError: nothing readable is there, or a header is malformed.
            TypeError: something else was passed.
        """
        if isinstance(source, Checkpoint):
            return source
        if isinstance(source, Mapping):
            return StateDictCheckpoint(source)
        if not isinstance(source, str | os.PathLike):
            raise TypeError(
                f"expected a checkpoint as a path, a dict of tensors or an epload.Checkpoint, got {type(source).__name__}"
            )
        path = Path(source)
        try:
            return _open_path(path, known)
        except OSError as error:
            raise CheckpointError(f"cannot read {error.filename or path}: {error.strerror or error}") from error

    @staticmethod
    def join(source: Any, manifest: Manifest) -> Checkpoint:
        """The checkpoint that another rank has opened and described, read by this rank too, without parsing it again.

        Raises:
            CheckpointError: it is not here, or what is here is not the same.
        """
        if manifest.places is None or not isinstance(source, str | os.PathLike):
            return Checkpoint.open(source)
        path = Path(source)
        if path.is_dir() or path.name.endswith(".index.json"):
            folder = path if path.is_dir() else path.parent
            files = [folder / facts.name for facts in manifest.places.files]
        else:
            files = [path]
        if len(files) != len(manifest.places.files):
            raise CheckpointError(
                f"{path} is one file, but the source rank reads {len(manifest.places.files)}; pass the same path on every rank"
            )
        try:
            here = [file_facts(file) for file in files]
        except OSError as error:
            raise CheckpointError(f"cannot read {error.filename or path}: {error.strerror or error}") from error
        for file, ours, theirs in zip(files, here, manifest.places.files, strict=True):
            if ours[1:] != theirs[1:]:
                what = (
                    "size" if ours.nbytes != theirs.nbytes else "header" if ours.header != theirs.header else "content"
                )
                raise CheckpointError(
                    f"{file} is not the file that the source rank has: its {what} differs; "
                    'copy it again, or let one rank read (readers="one")'
                )
        return SafetensorsCheckpoint(files, manifest)

    @staticmethod
    def from_state_dict(state_dict: Mapping[str, Tensor], consume: bool = False) -> Checkpoint:
        """A dict of full tensors. With ``consume`` each is removed from the dict once its last byte has been taken."""
        return StateDictCheckpoint(state_dict, consume=consume)


def _open_path(path: Path, known: Manifest | None) -> Checkpoint:
    if path.is_file():
        if path.name.endswith(".index.json"):
            return _open_index(path, known)
        if path.suffix == ".safetensors":
            return _open_safetensors([path], str(path), known)
        return _open_torch_files([path], str(path))
    if not path.is_dir():
        raise CheckpointError(f"no checkpoint at {path}: expected a file or a folder")
    for single in ("model.safetensors", "model.safetensors.index.json"):
        if (path / single).is_file():
            return _open_path(path / single, known)
    if files := sorted(path.glob("*.safetensors")):
        return _open_safetensors(files, str(path), known)
    if (path / "pytorch_model.bin").is_file():  # beside it often lie an optimizer's state and the like
        return _open_path(path / "pytorch_model.bin", known)
    if (path / "pytorch_model.bin.index.json").is_file():
        return _open_index(path / "pytorch_model.bin.index.json", known)
    if files := sorted([*path.glob("*.bin"), *path.glob("*.pt"), *path.glob("*.pth")]):
        return _open_torch_files(files, str(path))
    raise CheckpointError(f"no checkpoint in {path}: expected *.safetensors, *.bin, *.pt or *.pth files in it")


def _open_safetensors(files: Sequence[Path], source: str, known: Manifest | None) -> Checkpoint:
    return SafetensorsCheckpoint.recognise(files, source, known) or SafetensorsCheckpoint.parse(files, source)


def _open_index(path: Path, known: Manifest | None) -> Checkpoint:
    raw = path.read_bytes()
    index = hashlib.blake2b(raw, digest_size=16).hexdigest()
    if known is not None and known.places is not None and known.places.index == index:
        files = [path.parent / facts.name for facts in known.places.files]
        if all(file.is_file() for file in files) and (
            again := SafetensorsCheckpoint.recognise(files, str(path.parent), known, index)
        ):
            return again
    try:
        weight_map = json.loads(raw)["weight_map"]
        if not all(isinstance(text, str) for text in [*weight_map.keys(), *weight_map.values()]):
            raise TypeError("weight_map maps something else than names")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f'{path}: expected a JSON object with a "weight_map" of names to files') from error
    files = []
    for file in sorted(set(weight_map.values())):
        if Path(file).name != file or file in ("", ".", ".."):
            raise CheckpointError(
                f"{path}: names the file {file!r}; expected a plain file name in the index's own folder"
            )
        if not (path.parent / file).is_file():
            key = next(name for name, where in weight_map.items() if where == file)
            raise CheckpointError(f"{path}: places {key} in {file}, which is not in {path.parent}")
        files.append(path.parent / file)
    if files and files[0].suffix != ".safetensors":
        return _open_torch_files(files, str(path.parent), weight_map)
    return SafetensorsCheckpoint.parse(files, str(path.parent), weight_map, index)


class SafetensorsCheckpoint(Checkpoint):
    """One or several safetensors files. Tensors that are adjacent in a file are read with one request."""

    def __init__(self, files: Sequence[Path], manifest: Manifest) -> None:
        """``manifest`` has places."""
        assert manifest.places is not None
        self._manifest = manifest
        self._places = manifest.places
        self._reader = RangedReader([str(file) for file in files])

    @classmethod
    def recognise(
        cls, files: Sequence[Path], source: str, known: Manifest | None, index: str = ""
    ) -> SafetensorsCheckpoint | None:
        """Without parsing, if the headers, and the index that has this digest, are those of a known checkpoint."""
        if known is None or known.places is None:
            return None
        facts = list(map(file_facts, files))
        if not known.places.same_layout(index, facts):
            return None
        return cls(files, known.seen_as([source, [index, *facts]]))

    @classmethod
    def parse(
        cls, files: Sequence[Path], source: str, weight_map: Mapping[str, str] | None = None, index: str = ""
    ) -> SafetensorsCheckpoint:
        """From the files' headers. ``weight_map`` says which tensor is in which file, and ``index`` is the digest of it."""
        headers = [read_header(file) for file in files]
        numbers: list[int] = []
        offsets: list[int] = []
        names: list[str] = []
        where: dict[str, int] = {}
        shapes: list[tuple[int, ...]] = []
        kinds: list[torch.dtype] = []
        for number, (file, header) in enumerate(zip(files, headers, strict=True)):
            for i in header.order:
                name = header.names[i]
                if weight_map is not None and weight_map.get(name, file.name) != file.name:
                    continue
                if name in where:
                    raise CheckpointError(f"{name} is both in {files[where[name]]} and in {file}")
                where[name] = number
                names.append(name)
                shapes.append(header.shapes[i])
                kinds.append(header.dtypes[i])
                numbers.append(number)
                offsets.append(header.offsets[i])
        if absent := next((name for name in weight_map or () if name not in where), None):
            raise CheckpointError(
                f"the index of {source} places {absent} in {(weight_map or {})[absent]}, which lacks it"
            )
        places = Places(
            tuple(map(file_facts, files)),
            torch.tensor(numbers, dtype=torch.int64),
            torch.tensor(offsets, dtype=torch.int64),
            index,
        )
        return cls(files, Manifest(tuple(names), tuple(shapes), tuple(kinds), source, places))

    @property
    def manifest(self) -> Manifest:
        return self._manifest

    def fill(self, bucket: Tensor, pieces: Sequence[Piece]) -> None:
        tensor, tensor_offset, bucket_offset, nbytes = Pieces.of(pieces).columns.unbind(1)
        offset = self._places.offset[tensor] + tensor_offset
        self._reader.read(bucket, joined(self._places.file[tensor], offset, bucket_offset, nbytes))

    def read_regions(self, regions: Readable) -> int | None:
        return self._reader.read_regions(self._places.file, self._places.offset, regions)

    def close(self) -> None:
        self._reader.close()


class StateDictCheckpoint(Checkpoint):
    """Full tensors in memory, or memory-mapped from a torch file."""

    def __init__(self, tensors: Mapping[str, Tensor], source: str = "state dict", consume: bool = False) -> None:
        for name, tensor in tensors.items():
            if not isinstance(name, str):
                raise TypeError(f"expected a state dict with names for keys, got the key {name!r}")
            if isinstance(tensor, DTensor) or not isinstance(tensor, Tensor):
                raise TypeError(f"expected a state dict of full tensors, {name!r} is a {type(tensor).__name__}")
            if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta:
                raise CheckpointError(
                    f"{source}: {name} is not a dense tensor with data ({tensor.layout}, {tensor.device})"
                )
        self._tensors: dict[str, Tensor] = dict(tensors)
        self._origin = tensors if consume else None
        self.once = consume
        self._names = tuple(tensors)
        self._manifest = Manifest(
            self._names,
            tuple(tuple(t.shape) for t in tensors.values()),
            tuple(t.dtype for t in tensors.values()),
            source,
        )
        self._taken = [0] * len(self._names)

    @property
    def manifest(self) -> Manifest:
        return self._manifest

    def tensor(self, number: int) -> Tensor | None:
        return self._tensors.get(self._names[number])

    def fill(self, bucket: Tensor, pieces: Sequence[Piece]) -> None:
        dims = max((tensor.ndim for tensor in self._tensors.values()), default=0) or 1
        sources = []
        rows = []
        for i, piece in enumerate(pieces):
            name = self._names[piece.tensor]
            if name not in self._tensors:
                raise CheckpointError(f"{name} was consumed by an earlier load")
            tensor = self._tensors[name].detach().to(bucket.device).resolve_conj().resolve_neg()
            box = None if tensor.is_contiguous() else _box_of_piece(tensor, piece)
            if box is None:  # as bytes
                tensor = tensor.contiguous().view(-1).view(torch.uint8)
                box = (piece.tensor_offset,), (piece.nbytes,)
            start, size = box
            fill = [0] * (dims - tensor.ndim)
            row = [i, piece.bucket_offset, dtypes.code(tensor.dtype), tensor.ndim]
            rows.append([*row, *start, *fill, *size, *fill, *row_major_strides(size), *fill])
            sources.append(tensor)
        if rows:
            ops.pack(bucket, sources, torch.tensor(rows, dtype=torch.int64))
        if self._origin is not None:
            self._release(pieces)

    def _release(self, pieces: Sequence[Piece]) -> None:
        for piece in pieces:
            name = self._names[piece.tensor]
            begun = self._taken[piece.tensor] if piece.tensor_offset else 0  # from the start again after a failed load
            self._taken[piece.tensor] = begun + piece.nbytes
            if self._taken[piece.tensor] == self._tensors[name].nbytes:
                del self._tensors[name]
                if isinstance(self._origin, dict):
                    self._origin.pop(name, None)


def _box_of_piece(tensor: Tensor, piece: Piece) -> Box | None:
    """The box that a piece is of its tensor, which can then be read where it lies; None if it is none."""
    item = tensor.element_size()
    start, size = box_of_range(tensor.shape, piece.tensor_offset // item, piece.nbytes // item)
    inside = all(a + n <= length for a, n, length in zip(start, size, tensor.shape, strict=True))
    whole = piece.tensor_offset % item == 0 and prod(size) * item == piece.nbytes
    return (start, size) if inside and whole else None


def _open_torch_files(
    files: Sequence[Path], source: str, weight_map: Mapping[str, str] | None = None
) -> StateDictCheckpoint:
    tensors: dict[str, Tensor] = {}
    for file in files:
        for name, tensor in _load_torch_file(file).items():
            if weight_map is not None and weight_map.get(name, file.name) != file.name:
                continue
            if name in tensors:
                raise CheckpointError(f"{name} is in {file} and in a file before it")
            tensors[name] = tensor
    if absent := next((name for name in weight_map or () if name not in tensors), None):
        raise CheckpointError(f"the index of {source} places {absent} in {(weight_map or {})[absent]}, which lacks it")
    return StateDictCheckpoint(tensors, source)


def _load_torch_file(path: Path) -> Mapping[str, Tensor]:
    """Memory-mapped, so that only what is loaded is read; ``weights_only``, so that no code in the file is run."""
    try:
        state = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except OSError:
        raise
    except Exception as error:
        raise CheckpointError(
            f"{path}: not a torch file of tensors that can be memory-mapped "
            f"({type(error).__name__}: {str(error)[:200]}); save it again with torch.save, or as safetensors"
        ) from error
    for wrapper in ("state_dict", "model"):
        if isinstance(state, dict) and isinstance(state.get(wrapper), dict):
            state = state[wrapper]
    if not isinstance(state, dict) or not all(isinstance(v, Tensor) for v in state.values()):
        raise CheckpointError(f"{path}: expected a dict of tensors, got {type(state).__name__}")
    return state
