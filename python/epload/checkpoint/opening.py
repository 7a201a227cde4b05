"""Opening a checkpoint: by path, in whatever format is found there, or from a state dict."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from epload.checkpoint import dcp, safetensors, torch_file, unsupported
from epload.checkpoint.base import Checkpoint, Progress
from epload.checkpoint.byte_store import Folder, StoredFile
from epload.checkpoint.file_checkpoint import FileCheckpoint, merge_layouts
from epload.checkpoint.index import Index
from epload.checkpoint.local_store import LocalFolder
from epload.checkpoint.manifest import FileFacts, FileLayout, Manifest
from epload.checkpoint.remote import hub, object_store
from epload.checkpoint.state_dict import StateDictCheckpoint, split_entries
from epload.errors import CheckpointError


def open_source(source: Any, known: Manifest | None, prefix: str, progress: Progress) -> Checkpoint:
    """See :meth:`Checkpoint.open`."""
    if isinstance(source, Mapping):
        _check_no_prefix(prefix, "a dict of tensors")
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
        if (model := hub.parse(source)) is not None:
            return _open_folder(hub.download(model, progress), known, prefix)
        if (place := object_store.parse(source)) is not None:
            address, name = place
            objects = object_store.ObjectFolder(address)
            if not name:
                return _open_folder(objects, known, prefix)
            _check_no_prefix(prefix, objects.path_of(name))
            return _open_file(objects, name, known)
        if not path.exists():
            raise CheckpointError(f"no checkpoint at {path}: expected a file or a folder")
        if path.is_file():
            _check_no_prefix(prefix, str(path))
            return _open_file(LocalFolder(path.parent), path.name, known)
        if not path.is_dir():
            raise CheckpointError(f"no checkpoint at {path}: expected a file or a folder")
        return _open_folder(LocalFolder(path), known, prefix)
    except OSError as error:
        raise _unreadable(path, error) from error


def join_source(source: Any, manifest: Manifest, progress: Progress) -> Checkpoint:
    """See :meth:`Checkpoint.join`."""
    if manifest.locations is None or not isinstance(source, str | os.PathLike):
        return Checkpoint.open(source)
    path = _expanded(source)
    names = [facts.name for facts in manifest.locations.files]
    if (model := hub.parse(source)) is not None:
        folder: Folder = hub.join(model, manifest.source, names, progress)
    elif (place := object_store.parse(source)) is not None:
        folder = object_store.ObjectFolder(place[0])
        names = names if not place[1] or place[1].endswith(".json") else [place[1]]
    elif path.is_dir() or path.suffix == ".json":
        folder = LocalFolder(path if path.is_dir() else path.parent)
    else:
        folder, names = LocalFolder(path.parent), [path.name]
    if len(names) != len(manifest.locations.files):
        raise CheckpointError(
            f"{path} is one file, but the source rank reads {len(manifest.locations.files)} files; pass the same path on every "
            "rank"
        )
    try:
        with folder.open(names) as files:
            for file, expected in zip(files, manifest.locations.files, strict=True):
                _check_same(file, expected)
            return FileCheckpoint(folder.store(files), manifest)
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


def _check_no_prefix(prefix: str, source: str) -> None:
    if prefix:
        raise ValueError(
            f"prefix={prefix!r} is where the model is in a DCP folder, which {source} is not; to change names, pass "
            "mapping=epload.Mapping(renames=...)"
        )


# ---- folders ----


def _open_folder(folder: Folder, known: Manifest | None, prefix: str) -> Checkpoint:
    names = folder.names()
    whole = next((name for name in ("model.safetensors", "model.safetensors.index.json") if name in names), None)
    if whole is None and dcp.FILE in names:
        return _open_dcp(folder, known, prefix)
    _check_no_prefix(prefix, str(folder))
    if whole is not None:
        return _open_file(folder, whole, known)
    if found := [name for name in names if name.endswith(".safetensors")]:
        return _open_files(folder, found, known)
    if reason := unsupported.of_folder(folder, names):
        raise CheckpointError(reason)
    for name in (
        "pytorch_model.bin",
        "pytorch_model.bin.index.json",
    ):  # other files may be an optimizer's state and the like
        if name in names:
            return _open_file(folder, name, known)
    if found := [name for name in names if name.endswith((".bin", ".pt", ".pth"))]:
        return _open_files(folder, found, known)
    raise CheckpointError(f"no checkpoint in {folder}: expected *.safetensors, *.bin, *.pt or *.pth files in it")


def _open_file(folder: Folder, name: str, known: Manifest | None) -> Checkpoint:
    with folder.open([name]) as files:
        if name.endswith(".json"):
            index = Index(files[0])
            if name.endswith(".index.json") or index.is_valid:
                return _open_index(folder, index, files, known)
        if not _is_safetensors(files[0]) and (reason := unsupported.of_file(files[0])):
            raise CheckpointError(reason)
        return _checkpoint_of(folder, files, folder.path_of(name), known)


def _open_files(folder: Folder, names: Sequence[str], known: Manifest | None) -> Checkpoint:
    with folder.open(names) as files:
        return _checkpoint_of(folder, files, str(folder), known)


def _open_index(folder: Folder, index: Index, index_files: Sequence[StoredFile], known: Manifest | None) -> Checkpoint:
    names: list[str] = []
    if known is not None and known.locations is not None and known.locations.index == index.digest:
        names = [facts.name for facts in known.locations.files]
    if not names or not folder.present(names).issuperset(names):
        names = index.file_names
        if absent := sorted({*names} - folder.present(names)):
            raise index.absent(absent[0])
    with folder.open(names) as files:
        return _checkpoint_of(folder, files, str(folder), known, index, index_files)


# ---- formats ----


def _checkpoint_of(
    folder: Folder,
    files: Sequence[StoredFile],
    source: str,
    known: Manifest | None,
    index: Index | None = None,
    index_files: Sequence[StoredFile] = (),
) -> Checkpoint:
    """A checkpoint of open files. Without parsing, if the headers and the index are those of the known manifest."""
    store = folder.store(files, index_files)
    facts, manifest = None, None
    if known is not None and known.locations is not None:
        facts = list(map(_facts, files))
        manifest = _if_same(known, "" if index is None else index.digest, facts, source)
    if manifest is None:
        layouts = _layouts(files, source)
        if layouts is None:
            return torch_file.load_files(files, store, source, index)
        facts = facts or list(map(_facts, files))
        if index is None and any(layout.parts is not None for layout in layouts):
            manifest = dcp.of_shards(files, layouts, facts, source)
        else:
            manifest = merge_layouts(files, layouts, facts, source, index)
    return FileCheckpoint(store, manifest)


def _open_dcp(folder: Folder, known: Manifest | None, prefix: str) -> Checkpoint:
    with folder.open([dcp.FILE]) as metadata_files:
        raw = metadata_files[0].read(0, metadata_files[0].nbytes)
        digest = hashlib.blake2b(raw + b"\0" + prefix.encode(), digest_size=16).hexdigest()
        metadata = None
        if known is not None and known.locations is not None and known.locations.index == digest:
            names = [facts.name for facts in known.locations.files]
        else:
            metadata = dcp.read_metadata(metadata_files[0])
            names = sorted({item.file for item in metadata.items.values()})
        with folder.open(names) as files:
            store, facts = folder.store(files, metadata_files), list(map(_facts, files))
            manifest = None if known is None else _if_same(known, digest, facts, str(folder))
            if manifest is None:
                metadata = metadata or dcp.read_metadata(metadata_files[0])
                manifest = dcp.of_metadata(metadata, store, facts, str(folder), digest, prefix)
            return FileCheckpoint(store, manifest)


def _if_same(known: Manifest, index: str, facts: Sequence[FileFacts], source: str) -> Manifest | None:
    """The manifest of files with these facts, if it is the known one but for its provenance."""
    if known.locations is None or not known.locations.same_layout(index, facts):
        return None
    return known.with_provenance([source, [index, *facts], known.ignored])


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
    if file.identity:
        return FileFacts(file.name, file.nbytes, file.identity, "")
    if file.name.endswith(dcp.SUFFIX):  # described by the metadata
        return FileFacts.of(file, "", 0)
    return safetensors.file_facts(file) if _is_safetensors(file) else torch_file.file_facts(file)
