"""Opening a checkpoint: by path, in whatever format and store it is, or from a state dict."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch import Tensor

from epload.checkpoint import (
    dcp,
    delta,
    file_sets,
    hub,
    local_store,
    object_store,
    safetensors,
    torch_file,
    unsupported,
)
from epload.checkpoint.base import Checkpoint, Progress
from epload.checkpoint.byte_store import ByteStore, Shared, Source, StoredFile
from epload.checkpoint.file_checkpoint import FileCheckpoint, OpenFiles
from epload.checkpoint.index import Index
from epload.checkpoint.manifest import FileFacts, Manifest
from epload.checkpoint.quantization import quantization_of
from epload.checkpoint.state_dict import STATE_DICT, StateDictCheckpoint, split_entries
from epload.core.dtypes import FP8, INTEGERS
from epload.core.pieces import Quantization
from epload.errors import CheckpointError

Locate = Callable[[Source, str, Progress, Shared | None], tuple[ByteStore, str] | None]
STORES: tuple[Locate, ...] = (hub.locate, object_store.locate, local_store.locate)
"""The stores: functions that find what a path or URL means. The first that knows it has it. A store that downloads does so here.

They get the path or URL; the variant of the weights; a function to call with numbers of bytes as they are downloaded; and what
another rank has opened, if this one joins it. They return the folder and the name of the file in it that is meant, "" for the
folder itself; None if the path or URL is of another store. They raise CheckpointError if there is nothing."""
FORMATS: dict[str, tuple[Callable[[StoredFile], FileFacts], Callable[[OpenFiles], Checkpoint]]] = {
    ".safetensors": (safetensors.file_facts, safetensors.read),
    ".distcp": (FileFacts.of, dcp.read),
    "": (torch_file.file_facts, torch_file.read),
}
"""The formats by the suffix of their files, and last that of all other files.

The first function returns the facts of a file, and raises CheckpointError if it has changed, OSError if it cannot be read. The
second parses files, and raises CheckpointError if they are malformed, OSError if they cannot be read."""


def open_source(
    source: Any,
    known: Manifest | None,
    prefix: str,
    variant: str,
    progress: Progress | None,
    links: int = delta.MAX_LINKS,
) -> Checkpoint:
    """See :meth:`Checkpoint.open`. ``links``: maximum number of deltas in a chain."""
    if isinstance(source, Checkpoint):
        _check_no_options("an open epload.Checkpoint", prefix, variant)
        if changed := source.changed():
            raise CheckpointError(
                f"{changed} since this epload.Checkpoint opened it: open it again, or pass the path instead"
            )
        source.prepare()
        return source
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
    with _located(source, variant, progress) as (store, name):
        if name:
            _check_no_options(store.path_of(name), prefix, variant)
            chosen, has_config = [name], False
        else:
            chosen, has_config = _choose(store, prefix, variant), True
        if chosen == [file_sets.DELTA]:
            if not links:
                raise CheckpointError(
                    f"{store} ends a chain of more than {delta.MAX_LINKS} deltas; convert one of them"
                )
            return delta.read(store, lambda base: open_source(base, None, "", "", progress, links - 1))
        if chosen[0].endswith(".json") or (has_config and chosen == [dcp.FILE]):
            return _open_index(store, chosen[0], prefix, known)
        file, *others = store.open(chosen)
        if others:
            return _read(store, str(store), known)
        if not file.name.endswith(".safetensors") and (reason := unsupported.of_file(file)):
            raise CheckpointError(reason)
        return _read(store, store.path_of(file.name), known, has_config=has_config)


def join_source(source: Any, manifest: Manifest, progress: Progress | None) -> Checkpoint:
    """See :meth:`Checkpoint.join`."""
    if manifest.locations is None or not isinstance(source, str | os.PathLike):
        return Checkpoint.open(source)
    expected = manifest.locations.files
    names = [facts.name for facts in expected]
    if names[:1] == [file_sets.DELTA]:  # whose chunks each rank has to find and check
        commit = hub.at_commit(manifest.source) if hub.parse(source) else ""
        opened = open_source(commit or source, None, "", "", progress)
        own = opened.manifest
        if (own.identity, own.provenance[1]) == (manifest.identity, manifest.provenance[1]):
            return opened
        opened.close()
        raise CheckpointError(f"{own.source} has not the changes that the source rank has: copy it again")
    with _located(source, "", progress, (manifest.source, names)) as (store, name):
        is_file = name and not name.endswith(".json")
        if is_file and len(expected) > 1:
            raise CheckpointError(
                f"{store.path_of(name)} is one file, but the source rank reads {len(expected)} files; pass the same path on "
                "every rank"
            )
        try:
            files = store.open([name] if is_file else names)
        except FileNotFoundError as error:
            raise CheckpointError(
                f"cannot read {error.filename}, a file that the source rank reads: pass the same checkpoint on every rank, or "
                'let one rank read (readers="one")'
            ) from error
        for file, facts in zip(files, expected, strict=True):
            parts = zip(("size", "header", "content"), _facts(file)[1:], facts[1:], strict=True)
            if part := next((part for part, own, other in parts if own != other), ""):
                raise CheckpointError(
                    f"{file} is not the file that the source rank has: its {part} differs; "
                    'copy it again, or let one rank read (readers="one")'
                )
        return FileCheckpoint(store, manifest)


def read_objects(source: Any, names: Sequence[str]) -> dict[str, bytes]:
    """Returns the entries of a DCP folder that are no tensors, each as ``torch.save`` wrote it, by name. Not those that it lacks.
    Raises CheckpointError."""
    if not isinstance(source, str | os.PathLike) or hub.parse(source) is not None:
        return {}
    with _located(source) as (store, file_name):
        if file_name or dcp.FILE not in store.names([dcp.FILE]):
            return {}
        saved = dcp.DcpIndex(store.open_description(dcp.FILE), dcp.ROOT).metadata.items
        items = {name: saved[name, None] for name in names if (name, None) in saved}
        paths = sorted({path for path, _, _ in items.values()})
        file_of = dict(zip(paths, store.open(paths), strict=True))
        contents = {name: file_of[path].read(offset, length) for name, (path, offset, length) in items.items()}
        store.close()
        return contents


def read_config(source: Any) -> dict[str, Any]:
    """Returns the content of the ``config.json`` next to a checkpoint; empty if there is none, or it is no JSON object. Raises
    CheckpointError if it cannot be read."""
    if not isinstance(source, str | os.PathLike):
        return {}
    with _located(source) as (store, _):
        try:
            config = json.loads(store.peek(file_sets.CONFIG))
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
    source: Source, variant: str = "", progress: Progress | None = None, shared: Shared | None = None
) -> Iterator[tuple[ByteStore, str]]:
    """Yields what one of :data:`STORES` returns. If the body fails, closes the files."""
    try:
        report = progress or (lambda nbytes: None)
        store, name = next(filter(None, (locate(source, variant, report, shared) for locate in STORES)))
        try:
            yield store, name
        except BaseException:
            store.close()
            raise
    except OSError as error:
        raise unreadable(error) from error


def unreadable(error: OSError) -> CheckpointError:
    """Returns what all ranks raise for a file that cannot be read."""
    file = f" {error.filename}" if error.filename else ""
    return CheckpointError(f"cannot read{file}: {error.strerror or error}")


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


def _choose(store: ByteStore, prefix: str, variant: str) -> list[str]:
    """Returns the files of a folder to open, or the index of them."""
    names = store.names([file_sets.CONFIG, dcp.FILE, *file_sets.standard_names(variant)])
    if prefix and dcp.FILE in names:  # a prefix is not for the other weights that the folder may have
        if variant:
            raise ValueError(f"{store}: expected prefix= or variant=, got prefix={prefix!r} and variant={variant!r}")
        return [dcp.FILE]
    _check_no_options(str(store), prefix)
    return file_sets.choose(names, str(store), variant, store.peek)


def _open_index(store: ByteStore, name: str, prefix: str, known: Manifest | None) -> Checkpoint:
    file = store.open_description(name)
    index = dcp.DcpIndex(file, prefix) if name == dcp.FILE else Index(file)
    if not name.endswith((dcp.FILE, ".index.json")) and b'"weight_map"' not in index.raw:
        raise CheckpointError(unsupported.of_file(file))
    if known is not None and known.locations is not None and known.locations.index == index.digest:
        names = [facts.name for facts in known.locations.files]
    else:
        names = index.file_names
    try:
        store.open(names)
    except FileNotFoundError as error:
        raise CheckpointError(
            f"cannot read {error.filename}, which {file} names: there is no such file in its folder; copy it again"
        ) from error
    return _read(store, str(store), known, index)


def _read(
    store: ByteStore, source: str, known: Manifest | None, index: Index | None = None, has_config: bool = True
) -> Checkpoint:
    """Returns the checkpoint of open files. Without parsing, if the headers and the index are those of the known manifest.

    Args:
        has_config: True if the configuration in their folder is theirs.
    """
    facts = list(map(_facts, store.files))
    manifest = known and known.with_files(source, index.digest if index is not None else "", facts)
    checkpoint: Checkpoint
    if manifest is not None:
        checkpoint = FileCheckpoint(store, manifest)
    else:
        name_of = {_format_of(file): file.name for file in reversed(store.files)}
        if isinstance(index, dcp.DcpIndex):
            name_of = {".distcp": dcp.FILE}
        if len(name_of) > 1:
            raise CheckpointError(
                f"{source} has files of several formats ({', '.join(name_of.values())}); expected one format"
            )
        _, read = FORMATS[next(iter(name_of), ".safetensors")]
        checkpoint = read(OpenFiles(store, facts, source, index))
    manifest = checkpoint.manifest
    quantization = _quantization(store, manifest) if has_config else None
    if quantization != manifest.quantization:
        assert isinstance(checkpoint, FileCheckpoint | StateDictCheckpoint)  # what formats read
        checkpoint._manifest = replace(manifest, quantization=quantization)
    return checkpoint


def _format_of(file: StoredFile) -> str:
    return next(suffix for suffix in FORMATS if file.name.endswith(suffix))


def _facts(file: StoredFile) -> FileFacts:
    """Raises CheckpointError, OSError."""
    facts, _ = FORMATS[_format_of(file)]
    return FileFacts.of(file) if file.identity else facts(file)


# ---- quantization ----


def _quantization(store: ByteStore, manifest: Manifest) -> Quantization | None:
    """Returns the quantization that a folder's configuration declares; None if no tensor of it can be quantized. Raises
    CheckpointError if the configuration of fp8 weights cannot be read."""
    dtypes = manifest.kinds.dtypes
    if {*FP8, *INTEGERS}.isdisjoint(dtypes):
        return None
    for name in file_sets.CONFIGS:
        try:
            if (declared := quantization_of(json.loads(store.peek(name)))) is not None:
                return declared
        except FileNotFoundError:
            continue
        except (CheckpointError, OSError, ValueError, RecursionError) as error:
            if set(FP8).isdisjoint(dtypes):
                return None
            reason = getattr(error, "strerror", None) or error
            raise CheckpointError(
                f"cannot read the quantization of fp8 weights from {store.path_of(name)}: {reason}; correct the file, or remove "
                "it"
            ) from error
    return None
