"""Opening a checkpoint: by path, in whatever format is found there, or from a state dict."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from epload.checkpoint import dcp, file_sets, safetensors, torch_file, unsupported
from epload.checkpoint.base import Checkpoint, OtherLayout, Progress
from epload.checkpoint.byte_store import Folder, StoredFile
from epload.checkpoint.file_checkpoint import FileCheckpoint, merge_layouts
from epload.checkpoint.index import Index
from epload.checkpoint.local_store import LocalFolder
from epload.checkpoint.manifest import FileFacts, FileLayout, Manifest
from epload.checkpoint.quantization import quantization_of
from epload.checkpoint.remote import hub, object_store
from epload.checkpoint.state_dict import STATE_DICT, StateDictCheckpoint, split_entries
from epload.core.dtypes import FP8, INTEGERS
from epload.core.pieces import Quantization
from epload.errors import CheckpointError

_CONFIGS = ("config.json", "hf_quant_config.json")
"""Files next to the weights that declare a quantization: the first that does counts."""
_MAX_CONFIG_BYTES = 16 << 20


def open_source(source: Any, known: Manifest | None, prefix: str, variant: str, progress: Progress) -> Checkpoint:
    """See :meth:`Checkpoint.open`."""
    if isinstance(source, Mapping):
        _check_no_prefix(prefix, "a dict of tensors")
        _check_no_variant(variant, "a dict of tensors")
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
    try:
        if (model := hub.parse(source)) is not None:
            return _open_folder(hub.download(model, variant, progress), known, prefix, variant)
        folder, name = _locate(source)
        if not name:
            return _open_folder(folder, known, prefix, variant)
        if isinstance(folder, LocalFolder) and not (folder.path / name).exists():
            raise CheckpointError(f"no checkpoint at {folder.path_of(name)}: expected a file or a folder")
        _check_no_prefix(prefix, folder.path_of(name))
        _check_no_variant(variant, folder.path_of(name))
        return _open_file(folder, name, known)
    except OSError as error:
        raise unreadable(error) from error


def join_source(source: Any, manifest: Manifest, progress: Progress, same_content: bool) -> Checkpoint:
    """See :meth:`Checkpoint.join`."""
    if manifest.locations is None or not isinstance(source, str | os.PathLike):
        return Checkpoint.open(source)
    expected = manifest.locations.files
    try:
        if (model := hub.parse(source)) is not None:
            if not same_content:  # the manifest has the commit of the load before
                raise OtherLayout(f"{source}: the source rank says which commit is loaded")
            folder: Folder = hub.join(model, manifest.source, [facts.name for facts in expected], progress)
            name = ""
        else:
            folder, name = _locate(source)
        one = name and not name.endswith(".json")
        if one and len(expected) > 1:
            raise CheckpointError(
                f"{folder.path_of(name)} is one file, but the source rank reads {len(expected)} files; pass the same path on "
                "every rank"
            )
        with folder.open([name] if one else [facts.name for facts in expected]) as files:
            facts = list(map(_facts, files))
            if same_content:
                _check_same(files, facts, expected)
                return FileCheckpoint(folder.store(files), manifest)
            found = _if_same(manifest, manifest.locations.index, facts, manifest.source)
            if found is None:
                raise OtherLayout(f"{folder} has no checkpoint of the same layout as {manifest.source}")
            return FileCheckpoint(folder.store(files), found)
    except OSError as error:
        raise unreadable(error) from error


def read_objects(source: Any, names: Sequence[str]) -> dict[str, bytes]:
    """The entries of a DCP folder that are no tensors, each as ``torch.save`` wrote it, by name. Not those that it lacks.

    Raises:
        CheckpointError: the folder cannot be read.
    """
    if not isinstance(source, str | os.PathLike) or hub.parse(source) is not None:
        return {}
    try:
        folder, name = _locate(source)
        if name or dcp.FILE not in folder.names([dcp.FILE]):
            return {}
        with folder.open([dcp.FILE]) as metadata:
            objects = dcp.read_metadata(metadata[0]).objects
        wanted = {name: objects[name] for name in names if name in objects}
        files = sorted({item.file for item in wanted.values()})
        with folder.open(files) as opened:
            file_of = dict(zip(files, opened, strict=True))
            return {name: file_of[item.file].read(item.offset, item.length) for name, item in wanted.items()}
    except OSError as error:
        raise unreadable(error) from error


def read_config(source: Any) -> dict[str, Any]:
    """Returns the content of the ``config.json`` next to a checkpoint; empty if there is none, or it is no JSON object.

    Raises:
        CheckpointError: it cannot be read.
    """
    if not isinstance(source, str | os.PathLike):
        return {}
    try:
        if (model := hub.parse(source)) is not None:
            folder: Folder = hub.download(model, "", lambda nbytes: None)
        else:
            folder = _locate(source)[0]
        if file_sets.CONFIG not in folder.present([file_sets.CONFIG]):
            return {}
        with folder.open([file_sets.CONFIG]) as files:
            config = json.loads(files[0].read_whole(_MAX_CONFIG_BYTES))
            files[0].close()
    except (ValueError, RecursionError):
        return {}
    except OSError as error:
        raise unreadable(error) from error
    return config if isinstance(config, dict) else {}


def from_state_dict(state_dict: Mapping[Any, Tensor], consume: bool = False) -> Checkpoint:
    """See :meth:`Checkpoint.from_state_dict`."""
    try:
        tensors, ignored = split_entries(state_dict, STATE_DICT)
    except CheckpointError as error:
        raise TypeError(str(error)) from None
    return StateDictCheckpoint(tensors, ignored=ignored, consumed=state_dict if consume else None)


def _locate(source: str | os.PathLike[str]) -> tuple[Folder, str]:
    """The folder of a checkpoint, and the name of the file in it that is meant; "" for the folder itself."""
    if (place := object_store.parse(source)) is not None:
        address, name = place
        return object_store.ObjectFolder(address), name
    try:
        path = Path(source).expanduser()
    except RuntimeError as error:
        raise CheckpointError(f"no checkpoint at {source}: {error}") from error
    return (LocalFolder(path), "") if path.is_dir() else (LocalFolder(path.parent), path.name)


def unreadable(error: OSError) -> CheckpointError:
    """Returns what all ranks raise for a file that cannot be read."""
    file = f" {error.filename}" if error.filename else ""
    return CheckpointError(f"cannot read{file}: {error.strerror or error}")


def _check_same(files: Sequence[StoredFile], found: Sequence[FileFacts], expected: Sequence[FileFacts]) -> None:
    """Checks that files are those that the source rank has. Raises CheckpointError."""
    for file, facts, theirs in zip(files, found, expected, strict=True):
        if facts[1:] != theirs[1:]:
            part = "size" if facts.nbytes != theirs.nbytes else "header" if facts.header != theirs.header else "content"
            raise CheckpointError(
                f"{file} is not the file that the source rank has: its {part} differs; "
                'copy it again, or let one rank read (readers="one")'
            )


def _check_no_prefix(prefix: str, source: str) -> None:
    if prefix and prefix != dcp.ROOT:
        raise ValueError(
            f"prefix={prefix!r} is where the model is in a DCP folder, which {source} is not; to change names, pass "
            "mapping=epload.Mapping(renames=...)"
        )


def _check_no_variant(variant: str, source: str) -> None:
    if variant:
        raise ValueError(
            f"variant={variant!r} chooses between the sets of weights in a folder, which {source} is not; pass the folder, or "
            "leave it out"
        )


# ---- folders ----


def _open_folder(folder: Folder, known: Manifest | None, prefix: str, variant: str) -> Checkpoint:
    names = folder.names([file_sets.CONFIG, dcp.FILE, *file_sets.standard_names(variant)])
    if prefix and dcp.FILE in names:  # also where the folder has other weights, which have no prefix
        if variant:
            raise ValueError(f"{folder}: expected prefix= or variant=, got prefix={prefix!r} and variant={variant!r}")
        return _open_dcp(folder, known, prefix)
    _check_no_prefix(prefix, str(folder))
    chosen = file_sets.choose(names, str(folder), variant, _weights_in_config(folder, names))
    if chosen == [dcp.FILE]:
        return _open_dcp(folder, known, prefix)
    return (
        _open_file(folder, chosen[0], known, is_folder=True) if len(chosen) == 1 else _open_files(folder, chosen, known)
    )


def _weights_in_config(folder: Folder, names: Sequence[str]) -> str:
    if file_sets.CONFIG not in names:
        return ""
    with folder.open([file_sets.CONFIG]) as files:
        name = file_sets.weights_in_config(files[0].read(0, min(files[0].nbytes, _MAX_CONFIG_BYTES)))
        files[0].close()
    return name


def _open_file(folder: Folder, name: str, known: Manifest | None, is_folder: bool = False) -> Checkpoint:
    """``is_folder``: True if the folder was passed, so that its configuration is that of the file."""
    with folder.open([name]) as files:
        if name.endswith(".json"):
            index = Index(files[0])
            if name.endswith(".index.json") or index.is_valid:
                return _open_index(folder, index, files, known)
        if not _is_safetensors(files[0]) and (reason := unsupported.of_file(files[0])):
            raise CheckpointError(reason)
        return _checkpoint_of(folder, files, folder.path_of(name), known, is_folder=is_folder)


def _open_files(folder: Folder, names: Sequence[str], known: Manifest | None) -> Checkpoint:
    with folder.open(names) as files:
        return _checkpoint_of(folder, files, str(folder), known, is_folder=True)


def _open_index(folder: Folder, index: Index, index_files: Sequence[StoredFile], known: Manifest | None) -> Checkpoint:
    names: list[str] = []
    if known is not None and known.locations is not None and known.locations.index == index.digest:
        names = [facts.name for facts in known.locations.files]
    if not names or not folder.present(names).issuperset(names):
        names = index.file_names
        if absent := sorted({*names} - folder.present(names)):
            raise index.absent(absent[0])
    with folder.open(names) as files:
        return _checkpoint_of(folder, files, str(folder), known, index, index_files, is_folder=True)


# ---- formats ----


def _checkpoint_of(
    folder: Folder,
    files: Sequence[StoredFile],
    source: str,
    known: Manifest | None,
    index: Index | None = None,
    index_files: Sequence[StoredFile] = (),
    is_folder: bool = False,
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
            loaded = torch_file.load_files(files, store, source, index)
            loaded.declare(_quantization(folder, loaded.manifest) if is_folder else None)
            return loaded
        facts = facts or list(map(_facts, files))
        if index is None and any(layout.parts is not None for layout in layouts):
            manifest = dcp.of_shards(files, layouts, facts, source)
        else:
            manifest = merge_layouts(files, layouts, facts, source, index)
    return FileCheckpoint(store, manifest.with_quantization(_quantization(folder, manifest) if is_folder else None))


def _quantization(folder: Folder, manifest: Manifest) -> Quantization | None:
    """Returns the quantization that a folder's configuration declares; None if no tensor of it can be quantized.

    Raises:
        CheckpointError: the configuration of fp8 weights cannot be read.
    """
    if {*FP8, *INTEGERS}.isdisjoint(manifest.kinds.dtypes):
        return None
    try:
        return next(filter(None, (_declared(folder, name) for name in _CONFIGS)), None)
    except CheckpointError:
        if set(FP8).isdisjoint(manifest.kinds.dtypes):
            return None
        raise


def _declared(folder: Folder, name: str) -> Quantization | None:
    """Returns the quantization that one file declares, if the folder has the file. Raises CheckpointError."""
    try:
        with folder.open([name]) as files:
            raw = files[0].read(0, _MAX_CONFIG_BYTES + 1)
            files[0].close()
        if len(raw) > _MAX_CONFIG_BYTES:
            raise ValueError(f"it has more than {_MAX_CONFIG_BYTES >> 20} MiB")
        return quantization_of(json.loads(raw))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or error
        raise CheckpointError(
            f"cannot read the quantization of fp8 weights from {folder.path_of(name)}: {reason}; correct the file, or remove it"
        ) from error


def _open_dcp(folder: Folder, known: Manifest | None, prefix: str) -> Checkpoint:
    with folder.open([dcp.FILE]) as metadata_files:
        raw = metadata_files[0].read_whole(dcp.MAX_BYTES)
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
            return FileCheckpoint(store, manifest.with_quantization(_quantization(folder, manifest)))


def _if_same(known: Manifest, index: str, facts: Sequence[FileFacts], source: str) -> Manifest | None:
    """The manifest of files with these facts, if it is the known one but for its provenance."""
    if known.locations is None or not known.locations.same_layout(index, facts):
        return None
    return known.with_provenance([source, [index, *facts], known.ignored])


def _layouts(files: Sequence[StoredFile], source: str) -> list[FileLayout] | None:
    """Returns the layouts of files of one format; None if the tensors are not all byte ranges of them."""
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
