"""Opening a checkpoint: by path, in whatever format and store it is, or from a state dict."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from epload.checkpoint import dcp, file_sets, hub, safetensors, torch_file, unsupported
from epload.checkpoint.base import Checkpoint, Progress
from epload.checkpoint.byte_store import Folder, StoredFile
from epload.checkpoint.file_checkpoint import FileCheckpoint, Format, OpenFiles
from epload.checkpoint.index import Index
from epload.checkpoint.local_store import LocalFolder
from epload.checkpoint.manifest import FileFacts, Manifest
from epload.checkpoint.object_store import ObjectFolder
from epload.checkpoint.quantization import quantization_of
from epload.checkpoint.state_dict import STATE_DICT, StateDictCheckpoint, split_entries
from epload.core.dtypes import FP8, INTEGERS
from epload.core.pieces import Quantization
from epload.errors import CheckpointError

STORES: tuple[type[Folder], ...] = (hub.HubFolder, ObjectFolder, LocalFolder)
"""The stores. The first that knows a path or URL has it."""
FORMATS: tuple[Format, ...] = (safetensors.FORMAT, dcp.FORMAT, torch_file.FORMAT)
"""The formats. The first that knows a file's suffix has it."""
_CONFIGS = (file_sets.CONFIG, "hf_quant_config.json")
"""Files next to the weights that declare a quantization: the first that does counts."""
_MAX_CONFIG_BYTES = 16 << 20


def open_source(source: Any, known: Manifest | None, prefix: str, variant: str, progress: Progress) -> Checkpoint:
    """See :meth:`Checkpoint.open`."""
    if isinstance(source, Mapping):
        _check_no_options("a dict of tensors", prefix, variant)
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
    with _located(source, variant, progress) as (folder, name):
        if not name:
            return _open_folder(folder, known, prefix, variant)
        _check_no_options(folder.path_of(name), prefix, variant)
        return _open_file(folder, name, known)


def join_source(source: Any, manifest: Manifest, progress: Progress) -> Checkpoint:
    """See :meth:`Checkpoint.join`."""
    if manifest.locations is None or not isinstance(source, str | os.PathLike):
        return Checkpoint.open(source)
    expected = manifest.locations.files
    with _located(source, "", progress, manifest) as (folder, name):
        is_file = name and not name.endswith(".json")
        if is_file and len(expected) > 1:
            raise CheckpointError(
                f"{folder.path_of(name)} is one file, but the source rank reads {len(expected)} files; pass the same path on "
                "every rank"
            )
        files = folder.open([name] if is_file else [facts.name for facts in expected])
        facts = list(map(_facts, files))
        _check_same(files, facts, expected)
        return FileCheckpoint(folder.store(files), manifest)


def read_objects(source: Any, names: Sequence[str]) -> dict[str, bytes]:
    """Returns the entries of a DCP folder that are no tensors, each as ``torch.save`` wrote it, by name. Not those that it lacks.
    Raises CheckpointError."""
    if not isinstance(source, str | os.PathLike) or hub.parse(source) is not None:
        return {}
    with _located(source) as (folder, name):
        if name or dcp.FILE not in folder.names([dcp.FILE]):
            return {}
        (file,) = folder.open([dcp.FILE])
        saved = dcp.DcpIndex(file, dcp.ROOT).metadata.items
        items = {name: saved[name, None] for name in names if (name, None) in saved}
        paths = sorted({item.file for item in items.values()})
        file_of = dict(zip(paths, folder.open(paths), strict=True))
        contents = {name: file_of[item.file].read(item.offset, item.length) for name, item in items.items()}
        folder.close()
        return contents


def read_config(source: Any) -> dict[str, Any]:
    """Returns the content of the ``config.json`` next to a checkpoint; empty if there is none, or it is no JSON object. Raises
    CheckpointError if it cannot be read."""
    if not isinstance(source, str | os.PathLike):
        return {}
    with _located(source) as (folder, _):
        try:
            config = json.loads(folder.read(file_sets.CONFIG, _MAX_CONFIG_BYTES))
        except (FileNotFoundError, ValueError, RecursionError):
            return {}
    return config if isinstance(config, dict) else {}


def from_state_dict(state_dict: Mapping[Any, Tensor], consume: bool = False) -> Checkpoint:
    """See :meth:`Checkpoint.from_state_dict`."""
    try:
        tensors, ignored = split_entries(state_dict, STATE_DICT)
    except CheckpointError as error:
        raise TypeError(str(error)) from None
    return StateDictCheckpoint(tensors, ignored=ignored, consumed=state_dict if consume else None)


@contextmanager
def _located(
    source: str | os.PathLike[str],
    variant: str = "",
    progress: Progress = lambda nbytes: None,
    joined: Manifest | None = None,
) -> Iterator[tuple[Folder, str]]:
    """Yields what :meth:`Folder.locate` returns. If the body fails, closes the files. ``joined``: manifest of another rank."""
    folder: Folder | None = None
    try:
        shared = None
        if joined is not None and joined.locations is not None:
            shared = joined.source, [facts.name for facts in joined.locations.files]
        located = (store.locate(source, variant, progress, shared) for store in STORES)
        folder, name = next(filter(None, located))
        yield folder, name
    except BaseException as error:
        if folder is not None:
            folder.close()
        if isinstance(error, OSError):
            raise unreadable(error) from error
        raise


def unreadable(error: OSError) -> CheckpointError:
    """Returns what all ranks raise for a file that cannot be read."""
    file = f" {error.filename}" if error.filename else ""
    return CheckpointError(f"cannot read{file}: {error.strerror or error}")


def _check_same(files: Sequence[StoredFile], present: Sequence[FileFacts], expected: Sequence[FileFacts]) -> None:
    """Checks that files are those that the source rank has. Raises CheckpointError."""
    for file, facts, other in zip(files, present, expected, strict=True):
        if facts[1:] != other[1:]:
            part = "size" if facts.nbytes != other.nbytes else "header" if facts.header != other.header else "content"
            raise CheckpointError(
                f"{file} is not the file that the source rank has: its {part} differs; "
                'copy it again, or let one rank read (readers="one")'
            )


def _check_no_options(source: str, prefix: str, variant: str = "") -> None:
    if prefix and prefix != dcp.ROOT:
        raise ValueError(
            f"prefix={prefix!r} is where the model is in a DCP folder, which {source} is not; to change names, pass "
            "mapping=epload.Mapping(renames=...)"
        )
    if variant:
        raise ValueError(
            f"variant={variant!r} chooses between the sets of weights in a folder, which {source} is not; pass the folder, or "
            "leave it out"
        )


# ---- files ----


def _open_folder(folder: Folder, known: Manifest | None, prefix: str, variant: str) -> Checkpoint:
    names = folder.names([file_sets.CONFIG, dcp.FILE, *file_sets.standard_names(variant)])
    chosen = [dcp.FILE]
    if not prefix or dcp.FILE not in names:  # a prefix is not for the other weights that the folder may have
        _check_no_options(str(folder), prefix)
        config = folder.read(file_sets.CONFIG, _MAX_CONFIG_BYTES) if file_sets.CONFIG in names else b""
        chosen = file_sets.choose(names, str(folder), variant, file_sets.weights_in_config(config))
    elif variant:
        raise ValueError(f"{folder}: expected prefix= or variant=, got prefix={prefix!r} and variant={variant!r}")
    if chosen == [dcp.FILE]:
        (file,) = folder.open(chosen)
        return _open_index(folder, dcp.DcpIndex(file, prefix), known)
    if len(chosen) == 1:
        return _open_file(folder, chosen[0], known, is_folder=True)
    return _read(folder, folder.open(chosen), str(folder), known)


def _open_file(folder: Folder, name: str, known: Manifest | None, is_folder: bool = False) -> Checkpoint:
    """Opens a file or an index. ``is_folder``: True if the folder was passed, so that its configuration is that of the file."""
    (file,) = folder.open([name])
    if name.endswith(".json"):
        index = Index(file)
        if name.endswith(".index.json") or index.is_valid:
            return _open_index(folder, index, known)
    if not name.endswith(safetensors.FORMAT.suffixes) and (reason := unsupported.of_file(file)):
        raise CheckpointError(reason)
    return _read(folder, [file], folder.path_of(name), known, is_folder=is_folder)


def _open_index(folder: Folder, index: Index, known: Manifest | None) -> Checkpoint:
    if known is not None and known.locations is not None and known.locations.index == index.digest:
        names = [facts.name for facts in known.locations.files]
    else:
        names = index.file_names
    try:
        files = folder.open(names)
    except FileNotFoundError as error:
        raise index.absent(Path(error.filename).name) from error
    return _read(folder, files, str(folder), known, index)


def _read(
    folder: Folder,
    files: Sequence[StoredFile],
    source: str,
    known: Manifest | None,
    index: Index | None = None,
    is_folder: bool = True,
) -> Checkpoint:
    """Returns a checkpoint of open files. Without parsing, if the headers and the index are those of the known manifest."""
    store = folder.store(files, [index.file] if index is not None else [])
    facts = list(map(_facts, files))
    manifest = known and known.with_files(source, index.digest if index is not None else "", facts)
    checkpoint: FileCheckpoint | StateDictCheckpoint
    if manifest is not None:
        checkpoint = FileCheckpoint(store, manifest)
    else:
        checkpoint = _format(files, source, index).read(OpenFiles(files, facts, store, source, index))
    checkpoint.declare(_quantization(folder, checkpoint.manifest) if is_folder else None)
    return checkpoint


def _format(files: Sequence[StoredFile], source: str, index: Index | None) -> Format:
    """Returns the format of all of these files. Raises CheckpointError if there are two."""
    if isinstance(index, dcp.DcpIndex):
        return dcp.FORMAT
    file_of = {_format_of(file): file.name for file in reversed(files)}
    if len(file_of) > 1:
        raise CheckpointError(
            f"{source} has files of several formats ({', '.join(file_of.values())}); expected one format"
        )
    return next(iter(file_of), FORMATS[0])


def _format_of(file: StoredFile) -> Format:
    return next(format for format in FORMATS if file.name.endswith(format.suffixes))


def _facts(file: StoredFile) -> FileFacts:
    """Raises CheckpointError, OSError."""
    if file.identity:
        return FileFacts(file.name, file.nbytes, file.identity, "")
    return _format_of(file).facts(file)


# ---- quantization ----


def _quantization(folder: Folder, manifest: Manifest) -> Quantization | None:
    """Returns the quantization that a folder's configuration declares; None if no tensor of it can be quantized. Raises
    CheckpointError if the configuration of fp8 weights cannot be read."""
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
        raw = folder.read(name, _MAX_CONFIG_BYTES + 1)
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
