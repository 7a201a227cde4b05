"""Where bytes come from: safetensors files, torch files, state dicts. Each gives a manifest and ranged reads into a buffer.

Only readers open a checkpoint; the manifest travels to the other ranks in compact form.
"""

from __future__ import annotations

import hashlib
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Container, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from epload.checkpoint import foreign
from epload.checkpoint.manifest import Manifest, Places
from epload.checkpoint.safetensors import (
    FileFacts,
    RangedReader,
    Readable,
    SafetensorsHeader,
    file_facts,
    joined,
    read_header,
)
from epload.checkpoint.source_file import SourceFile, changed, opened
from epload.checkpoint.torch_file import TorchLayout, load_tensors, read_layout, tensors_of, torch_facts
from epload.core import dtypes
from epload.core.pieces import Piece, Pieces
from epload.core.placement import Box, box_of_range, row_major_strides
from epload.errors import CheckpointError
from epload.native import ops


class Checkpoint(ABC):
    """A source of tensors. Used by one thread at a time."""

    once: bool = False
    """Whether it can be read only once."""
    _files: Sequence[SourceFile] = ()
    """Those that it was opened from."""

    @property
    @abstractmethod
    def manifest(self) -> Manifest:
        """Names, shapes and dtypes, from headers alone."""

    def ready(self) -> Checkpoint:
        """Called before anything is asked of it. A source that opens its files no earlier does so here."""
        return self

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

    def changed(self) -> str:
        """What has happened to a file since it was opened, as "PATH was replaced by another file"; empty if nothing."""
        return changed(self._files)

    def reopen(self) -> None:
        """Opens all files again, so that what is read from now on is what others find at their paths.

        Raises:
            CheckpointError: one is not the file that was opened before.
        """
        for file in self._files:
            file.reopen()

    def close(self) -> None:
        """Gives back files and threads. The checkpoint can be used again afterwards, as long as its files are the same."""
        for file in self._files:
            file.close()

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
            if changed := source.changed():
                raise CheckpointError(
                    f"{changed} since this epload.Checkpoint opened it: open it again, or pass the path instead"
                )
            return source.ready()
        if isinstance(source, Mapping):
            return StateDictCheckpoint.of(source)
        if isinstance(source, list | tuple):
            raise TypeError(
                f"expected a checkpoint as one path, got a {type(source).__name__} of {len(source)}: pass the folder with the "
                "files, or the index that names them"
            )
        if not isinstance(source, str | os.PathLike):
            raise TypeError(
                f"expected a checkpoint as a path, a dict of tensors or an epload.Checkpoint, got {type(source).__name__}"
            )
        path = _path_of(source)
        try:
            if not path.exists():
                raise CheckpointError(foreign.missing(path, os.fspath(source)))
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
        path = _path_of(source)
        if path.is_dir() or path.suffix == ".json":
            folder = path if path.is_dir() else path.parent
            files = [folder / facts.name for facts in manifest.places.files]
        else:
            files = [path]
        if len(files) != len(manifest.places.files):
            raise CheckpointError(
                f"{path} is one file, but the source rank reads {len(manifest.places.files)}; pass the same path on every rank"
            )
        try:
            with opened(files) as here:
                for file, theirs in zip(here, manifest.places.files, strict=True):
                    _check_same(file, theirs)
                return FileCheckpoint.of(here, manifest)
        except OSError as error:
            raise CheckpointError(f"cannot read {error.filename or path}: {error.strerror or error}") from error

    @staticmethod
    def from_state_dict(state_dict: Mapping[str, Tensor], consume: bool = False) -> Checkpoint:
        """A dict of full tensors. With ``consume`` each is removed from the dict once its last byte has been taken."""
        return StateDictCheckpoint.of(state_dict, consume)


def _check_same(file: SourceFile, theirs: FileFacts) -> None:
    """That a file is the one that the source rank has. Raises CheckpointError, OSError."""
    ours = _facts_of(file)
    if ours[1:] != theirs[1:]:
        what = "size" if ours.nbytes != theirs.nbytes else "header" if ours.header != theirs.header else "content"
        raise CheckpointError(
            f"{file.path} is not the file that the source rank has: its {what} differs; "
            'copy it again, or let one rank read (readers="one")'
        )


def _path_of(source: str | os.PathLike[str]) -> Path:
    try:
        return Path(source).expanduser()
    except RuntimeError as error:
        raise CheckpointError(f"no checkpoint at {source}: {error}") from error


def _open_path(path: Path, known: Manifest | None) -> Checkpoint:
    if path.is_file():
        if path.name.endswith(".index.json") or (path.suffix == ".json" and _is_index(path)):
            return _open_index(path, known)
        if path.suffix != ".safetensors" and (said := foreign.file(path)):
            raise CheckpointError(said)
        return _open_files([path], str(path), known)
    if not path.is_dir():
        raise CheckpointError(f"no checkpoint at {path}: expected a file or a folder")
    for single in ("model.safetensors", "model.safetensors.index.json"):
        if (path / single).is_file():
            return _open_path(path / single, known)
    if files := sorted(path.glob("*.safetensors")):
        return _open_files(files, str(path), known)
    if said := foreign.folder(path):
        raise CheckpointError(said)
    if (path / "pytorch_model.bin").is_file():  # beside it often lie an optimizer's state and the like
        return _open_path(path / "pytorch_model.bin", known)
    if (path / "pytorch_model.bin.index.json").is_file():
        return _open_index(path / "pytorch_model.bin.index.json", known)
    if files := sorted([*path.glob("*.bin"), *path.glob("*.pt"), *path.glob("*.pth")]):
        return _open_files(files, str(path), known)
    raise CheckpointError(f"no checkpoint in {path}: expected *.safetensors, *.bin, *.pt or *.pth files in it")


def _is_index(path: Path) -> bool:
    """Whether a JSON file by another name than an index has is one."""
    try:
        found = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        return False
    return isinstance(found, dict) and "weight_map" in found


def _open_index(path: Path, known: Manifest | None) -> Checkpoint:
    with opened([path]) as (index,):
        raw = index.read(0, index.nbytes)
        digest = hashlib.blake2b(raw, digest_size=16).hexdigest()
        names: list[str] = []
        weight_map: dict[str, str] | None = None
        if known is not None and known.places is not None and known.places.index == digest:
            names = [facts.name for facts in known.places.files]
        if not names or not all((path.parent / name).is_file() for name in names):
            names, weight_map = _parse_index(path, raw)
        with opened([path.parent / name for name in names]) as files:
            source = str(path.parent)
            if again := FileCheckpoint.recognize(files, source, known, index, digest):
                return again
            if weight_map is None:
                _, weight_map = _parse_index(path, raw)
            return _parse_files(files, source, weight_map, index, digest)


def _parse_index(path: Path, raw: bytes) -> tuple[list[str], dict[str, str]]:
    """The files that an index names, and in which of them it places each tensor."""
    try:
        weight_map = json.loads(raw)["weight_map"]
        if not all(isinstance(text, str) for text in [*weight_map.keys(), *weight_map.values()]):
            raise TypeError("weight_map maps something else than names")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f'{path}: expected a JSON object with a "weight_map" of names to files') from error
    names = sorted(set(weight_map.values()))
    for name in names:
        if Path(name).name != name or name in ("", ".", ".."):
            raise CheckpointError(
                f"{path}: names the file {name!r}; expected a plain file name in the index's own folder"
            )
        if not (path.parent / name).is_file():
            key = next(key for key, where in weight_map.items() if where == name)
            raise CheckpointError(f"{path}: places {key} in {name}, which is not in {path.parent}")
    return names, weight_map


def _open_files(paths: Sequence[Path], source: str, known: Manifest | None) -> Checkpoint:
    with opened(paths) as files:
        return FileCheckpoint.recognize(files, source, known) or _parse_files(files, source)


def _parse_files(
    files: Sequence[SourceFile],
    source: str,
    weight_map: Mapping[str, str] | None = None,
    index: SourceFile | None = None,
    digest: str = "",
) -> Checkpoint:
    """All of a kind. ``weight_map`` says which tensor is in which file; the index that says so has this digest."""
    if all(_is_safetensors(file) for file in files):
        return SafetensorsCheckpoint.parse(files, source, weight_map, index, digest)
    if strange := next(filter(_is_safetensors, files), None):
        other = next(file for file in files if not _is_safetensors(file))
        raise CheckpointError(
            f"{source} has both safetensors and torch files ({strange.path.name}, {other.path.name}); expected one kind"
        )
    layouts = [read_layout(file) for file in files]
    whole = [layout for layout in layouts if layout is not None]
    if len(whole) == len(files):
        ignored = list(dict.fromkeys(name for layout in whole for name in layout.ignored))
        return TorchCheckpoint(files, _manifest_of(files, whole, ignored, source, weight_map, digest), index)
    return _load_torch_files(files, source, weight_map, index)


def _is_safetensors(file: SourceFile) -> bool:
    return file.path.suffix == ".safetensors"


def _facts_of(file: SourceFile) -> FileFacts:
    """Raises OSError."""
    return file_facts(file) if _is_safetensors(file) else torch_facts(file)


def _manifest_of(
    files: Sequence[SourceFile],
    layouts: Sequence[SafetensorsHeader | TorchLayout],
    ignored: Sequence[str],
    source: str,
    weight_map: Mapping[str, str] | None,
    digest: str,
) -> Manifest:
    numbers: list[int] = []
    offsets: list[int] = []
    names: list[str] = []
    where: dict[str, int] = {}
    shapes: list[tuple[int, ...]] = []
    kinds: list[torch.dtype] = []
    for number, (file, layout) in enumerate(zip(files, layouts, strict=True)):
        for i in layout.order:
            name = layout.names[i]
            if weight_map is not None and weight_map.get(name, file.path.name) != file.path.name:
                continue
            if name in where:
                raise CheckpointError(f"{name} is both in {files[where[name]].path} and in {file.path}")
            where[name] = number
            names.append(name)
            shapes.append(layout.shapes[i])
            kinds.append(layout.dtypes[i])
            numbers.append(number)
            offsets.append(layout.offsets[i])
    _check_index(source, weight_map, {*where, *ignored})
    places = Places(
        tuple(map(_facts_of, files)),
        torch.tensor(numbers, dtype=torch.int64),
        torch.tensor(offsets, dtype=torch.int64),
        digest,
    )
    return Manifest(tuple(names), tuple(shapes), tuple(kinds), source, places, tuple(ignored))


def _check_index(source: str, weight_map: Mapping[str, str] | None, found: Container[str]) -> None:
    if absent := next((name for name in weight_map or () if name not in found), None):
        raise CheckpointError(f"the index of {source} places {absent} in {(weight_map or {})[absent]}, which lacks it")


class FileCheckpoint(Checkpoint):
    """One or several files of which each tensor is a range. Tensors that are adjacent in a file are read with one request."""

    def __init__(self, files: Sequence[SourceFile], manifest: Manifest, index: SourceFile | None = None) -> None:
        """Owns the files from now on. ``manifest`` has places."""
        assert manifest.places is not None
        self._manifest = manifest
        self._places = manifest.places
        self._reader = RangedReader(files)
        self._files = [*files] if index is None else [index, *files]

    @staticmethod
    def recognize(
        files: Sequence[SourceFile],
        source: str,
        known: Manifest | None,
        index: SourceFile | None = None,
        digest: str = "",
    ) -> FileCheckpoint | None:
        """Without parsing, if the headers, and the index that has this digest, are those of a known checkpoint."""
        if known is None or known.places is None:
            return None
        facts = list(map(_facts_of, files))
        if not known.places.same_layout(digest, facts):
            return None
        return FileCheckpoint.of(files, known.seen_as([source, [digest, *facts], known.ignored]), index)

    @staticmethod
    def of(files: Sequence[SourceFile], manifest: Manifest, index: SourceFile | None = None) -> FileCheckpoint:
        """Of files that a manifest describes."""
        kind = SafetensorsCheckpoint if all(map(_is_safetensors, files)) else TorchCheckpoint
        return kind(files, manifest, index)

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
        super().close()


class TorchCheckpoint(FileCheckpoint):
    """Files that ``torch.save`` wrote."""


class SafetensorsCheckpoint(FileCheckpoint):
    """Safetensors files."""

    @classmethod
    def parse(
        cls,
        files: Sequence[SourceFile],
        source: str,
        weight_map: Mapping[str, str] | None = None,
        index: SourceFile | None = None,
        digest: str = "",
    ) -> SafetensorsCheckpoint:
        """From the files' headers. For ``weight_map``, ``index`` and ``digest`` see :func:`_parse_files`."""
        headers = [read_header(file) for file in files]
        return cls(files, _manifest_of(files, headers, (), source, weight_map, digest), index)


class StateDictCheckpoint(Checkpoint):
    """Full tensors in memory, or memory-mapped from torch files."""

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        source: str = "state dict",
        consume: bool = False,
        ignored: Sequence[str] = (),
        files: Sequence[SourceFile] = (),
    ) -> None:
        """
        Args:
            tensors: nothing but tensors, by name.
            ignored: names of entries that hold none.
            files: that the tensors are mapped from; owned from now on.
        """
        for name, tensor in tensors.items():
            if isinstance(tensor, DTensor):
                raise TypeError(f"expected a state dict of full tensors, {name!r} is a {type(tensor).__name__}")
            if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta:
                raise CheckpointError(
                    f"{source}: {name} is not a dense tensor with data ({tensor.layout}, {tensor.device})"
                )
        self._tensors: dict[str, Tensor] = dict(tensors)
        self._origin: Any = None
        self.once = consume
        self._files = list(files)
        self._names = tuple(tensors)
        self._manifest = Manifest(
            self._names,
            tuple(tuple(t.shape) for t in tensors.values()),
            tuple(t.dtype for t in tensors.values()),
            source,
            ignored=tuple(ignored),
        )
        self._taken = [0] * len(self._names)

    @classmethod
    def of(cls, state_dict: Mapping[Any, Any], consume: bool = False) -> StateDictCheckpoint:
        """Of a state dict that the caller has. Raises TypeError, CheckpointError."""
        try:
            tensors, ignored = tensors_of(state_dict, "state dict")
        except CheckpointError as error:
            raise TypeError(str(error)) from None
        made = cls(tensors, consume=consume, ignored=ignored)
        made._origin = state_dict if consume else None
        return made

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
            tensor, (start, size) = _readable(self._tensors[name].detach(), piece, bucket.device)
            fill = [0] * (dims - tensor.ndim)
            row = [i, piece.bucket_offset, dtypes.code(tensor.dtype), tensor.ndim]
            rows.append([*row, *start, *fill, *size, *fill, *row_major_strides(size), *fill])
            sources.append(tensor)
        if rows:
            ops.pack(bucket, sources, torch.tensor(rows, dtype=torch.int64))
        if self.once:
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


def _readable(tensor: Tensor, piece: Piece, device: torch.device) -> tuple[Tensor, Box]:
    """A tensor on ``device`` and the box in it that is a piece of ``tensor``. Copies no more than the piece."""
    if tensor.device == device and not (tensor.is_conj() or tensor.is_neg()):
        if tensor.is_contiguous():
            return tensor.view(-1).view(torch.uint8), ((piece.tensor_offset,), (piece.nbytes,))
        if (box := _box_of_piece(tensor, piece)) is not None:
            return tensor, box
    item = tensor.element_size()
    begin, end = piece.tensor_offset // item, -(-(piece.tensor_offset + piece.nbytes) // item)
    if tensor.is_contiguous():
        boxes = [tensor.view(-1)[begin:end]]
    else:
        boxes = [tensor[box] for box in _boxes_of_range(tuple(tensor.shape), begin, end)]
    parts = [box.resolve_conj().resolve_neg().to(device).reshape(-1) for box in boxes]
    copied = (torch.cat(parts) if len(parts) > 1 else parts[0]).view(torch.uint8)
    return copied, ((piece.tensor_offset - begin * item,), (piece.nbytes,))


def _box_of_piece(tensor: Tensor, piece: Piece) -> Box | None:
    """The box that a piece is of its tensor, which can then be read where it lies; None if it is none."""
    item = tensor.element_size()
    start, size = box_of_range(tensor.shape, piece.tensor_offset // item, piece.nbytes // item)
    inside = all(a + n <= length for a, n, length in zip(start, size, tensor.shape, strict=True))
    whole = piece.tensor_offset % item == 0 and prod(size) * item == piece.nbytes
    return (start, size) if inside and whole else None


def _boxes_of_range(shape: tuple[int, ...], begin: int, end: int) -> list[tuple[slice, ...]]:
    """Boxes that follow one another, and are the elements [begin, end) of a tensor in row-major order; begin < end."""
    if not shape:
        return [()]
    row = prod(shape[1:])
    first, last = -(-begin // row), end // row

    def part_of_row(number: int, begin: int, end: int) -> list[tuple[slice, ...]]:
        return [(slice(number, number + 1), *box) for box in _boxes_of_range(shape[1:], begin, end)]

    if first > last:  # inside one row
        return part_of_row(last, begin - last * row, end - last * row)
    boxes = part_of_row(first - 1, begin - (first - 1) * row, row) if begin < first * row else []
    if first < last:
        boxes.append((slice(first, last),))
    return boxes + (part_of_row(last, 0, end - last * row) if end > last * row else [])


def _load_torch_files(
    files: Sequence[SourceFile], source: str, weight_map: Mapping[str, str] | None, index: SourceFile | None
) -> StateDictCheckpoint:
    tensors: dict[str, Tensor] = {}
    ignored: list[str] = []
    for file in files:
        found, beside = load_tensors(file)
        ignored += beside
        for name, tensor in found.items():
            if weight_map is not None and weight_map.get(name, file.path.name) != file.path.name:
                continue
            if name in tensors:
                raise CheckpointError(f"{name} is in {file.path} and in a file before it")
            tensors[name] = tensor
    _check_index(source, weight_map, {*tensors, *ignored})
    kept = [*files] if index is None else [index, *files]
    return StateDictCheckpoint(tensors, source, ignored=list(dict.fromkeys(ignored)), files=kept)
