"""Opening a checkpoint: by path, in whatever format is found there, or from a state dict."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from epload.checkpoint import safetensors, torch_file, unsupported
from epload.checkpoint.base import Checkpoint
from epload.checkpoint.byte_store import StoredFile
from epload.checkpoint.file_checkpoint import FileCheckpoint, merge_layouts
from epload.checkpoint.index import Index
from epload.checkpoint.local_store import LocalFile, LocalStore, open_files
from epload.checkpoint.manifest import FileFacts, FileLayout, Manifest
from epload.checkpoint.state_dict import StateDictCheckpoint, split_entries
from epload.errors import CheckpointError


def open_source(source: Any, known: Manifest | None) -> Checkpoint:
    """See :meth:`Checkpoint.open`."""
    if isinstance(source, Mapping):
        return from_state_dict(source)
    if isinstance(source, list | tuple):
        raise TypeError(
            f"expected a checkpoint as one path, got a {type(source).__name__} of {len(source)}: pass the folder with the "
            "files, or the index that names them"
        )
    if not isinstance(source, str | os.PathLike):
        raise TypeError(
            f"expected a checkpoint as a path, a dict of tensors or an epload.Checkpoint, got {type(source).__name__}"
        )
    path = _expanded(source)
    try:
        if not path.exists():
            raise CheckpointError(unsupported.missing(path, os.fspath(source)))
        return _open_path(path, known)
    except OSError as error:
        raise _unreadable(path, error) from error


def join_source(source: Any, manifest: Manifest) -> Checkpoint:
    """See :meth:`Checkpoint.join`."""
    if manifest.locations is None or not isinstance(source, str | os.PathLike):
        return Checkpoint.open(source)
    path = _expanded(source)
    paths = [path]
    if path.is_dir() or path.suffix == ".json":
        folder = path if path.is_dir() else path.parent
        paths = [folder / facts.name for facts in manifest.locations.files]
    if len(paths) != len(manifest.locations.files):
        raise CheckpointError(
            f"{path} is one file, but the source rank reads {len(manifest.locations.files)} files; pass the same path on every "
            "rank"
        )
    try:
        with open_files(paths) as files:
            for file, expected in zip(files, manifest.locations.files, strict=True):
                _check_same(file, expected)
            return FileCheckpoint(LocalStore(files), manifest)
    except OSError as error:
        raise _unreadable(path, error) from error


def from_state_dict(state_dict: Mapping[Any, Tensor], consume: bool = False) -> Checkpoint:
    """See :meth:`Checkpoint.from_state_dict`."""
    try:
        tensors, ignored = split_entries(state_dict, "state dict")
    except CheckpointError as error:
        raise TypeError(str(error)) from None
    return StateDictCheckpoint(tensors, ignored=ignored, consumed=state_dict if consume else None)


def _expanded(source: str | os.PathLike[str]) -> Path:
    try:
        return Path(source).expanduser()
    except RuntimeError as error:
        raise CheckpointError(f"no checkpoint at {source}: {error}") from error


def _unreadable(path: Path, error: OSError) -> CheckpointError:
    return CheckpointError(f"cannot read {error.filename or path}: {error.strerror or error}")


def _check_same(file: StoredFile, expected: FileFacts) -> None:
    """Checks that a file is the one that the source rank has. Raises CheckpointError, OSError."""
    facts = _facts(file)
    if facts[1:] != expected[1:]:
        part = "size" if facts.nbytes != expected.nbytes else "header" if facts.header != expected.header else "content"
        raise CheckpointError(
            f"{file} is not the file that the source rank has: its {part} differs; "
            'copy it again, or let one rank read (readers="one")'
        )


# ---- paths ----


def _open_path(path: Path, known: Manifest | None) -> Checkpoint:
    if path.is_file():
        return _open_file(path, known)
    if not path.is_dir():
        raise CheckpointError(f"no checkpoint at {path}: expected a file or a folder")
    for name in ("model.safetensors", "model.safetensors.index.json"):
        if (path / name).is_file():
            return _open_file(path / name, known)
    if paths := sorted(path.glob("*.safetensors")):
        return _open_files(paths, path, known)
    if reason := unsupported.of_folder(path):
        raise CheckpointError(reason)
    for name in (
        "pytorch_model.bin",
        "pytorch_model.bin.index.json",
    ):  # other files may be an optimizer's state and the like
        if (path / name).is_file():
            return _open_file(path / name, known)
    if paths := sorted([*path.glob("*.bin"), *path.glob("*.pt"), *path.glob("*.pth")]):
        return _open_files(paths, path, known)
    raise CheckpointError(f"no checkpoint in {path}: expected *.safetensors, *.bin, *.pt or *.pth files in it")


def _open_file(path: Path, known: Manifest | None) -> Checkpoint:
    with open_files([path]) as files:
        if path.suffix == ".json":
            index = Index(files[0])
            if path.name.endswith(".index.json") or index.is_valid:
                return _open_index(path.parent, index, files, known)
        if not _is_safetensors(files[0]) and (reason := unsupported.of_file(files[0])):
            raise CheckpointError(reason)
        return _checkpoint_of(files, path, known)


def _open_files(paths: Sequence[Path], folder: Path, known: Manifest | None) -> Checkpoint:
    with open_files(paths) as files:
        return _checkpoint_of(files, folder, known)


def _open_index(folder: Path, index: Index, index_files: Sequence[LocalFile], known: Manifest | None) -> Checkpoint:
    names: list[str] = []
    if known is not None and known.locations is not None and known.locations.index == index.digest:
        names = [facts.name for facts in known.locations.files]
    if not names or not all((folder / name).is_file() for name in names):
        names = index.file_names
        for name in names:
            if not (folder / name).is_file():
                raise index.absent(name)
    with open_files([folder / name for name in names]) as files:
        return _checkpoint_of(files, folder, known, index, index_files)


# ---- formats ----


def _checkpoint_of(
    files: Sequence[LocalFile],
    path: Path,
    known: Manifest | None,
    index: Index | None = None,
    index_files: Sequence[LocalFile] = (),
) -> Checkpoint:
    """A checkpoint of open files. Without parsing, if the headers and the index are those of the known manifest."""
    store, source = LocalStore(files, index_files), str(path)
    facts = None
    if known is not None and known.locations is not None:
        facts = list(map(_facts, files))
        digest = "" if index is None else index.digest
        if known.locations.same_layout(digest, facts):
            return FileCheckpoint(store, known.with_provenance([source, [digest, *facts], known.ignored]))
    layouts = _layouts(files, source)
    if layouts is None:
        return torch_file.load_files(files, store, source, index)
    return FileCheckpoint(store, merge_layouts(files, layouts, facts or list(map(_facts, files)), source, index))


def _layouts(files: Sequence[StoredFile], source: str) -> list[FileLayout] | None:
    """Of files of one format; None if the tensors are not all byte ranges of them."""
    if all(map(_is_safetensors, files)):
        return [safetensors.read_layout(file) for file in files]
    if (one := next(filter(_is_safetensors, files), None)) is not None:
        other = next(file for file in files if not _is_safetensors(file))
        raise CheckpointError(
            f"{source} has both safetensors and torch files ({one.name}, {other.name}); expected one format"
        )
    layouts = [torch_file.read_layout(file) for file in files]
    found = [layout for layout in layouts if layout is not None]
    return found if len(found) == len(layouts) else None


def _is_safetensors(file: StoredFile) -> bool:
    return file.name.endswith(".safetensors")


def _facts(file: StoredFile) -> FileFacts:
    """Raises CheckpointError, OSError."""
    return safetensors.file_facts(file) if _is_safetensors(file) else torch_file.file_facts(file)
