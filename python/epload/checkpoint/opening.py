"""Opening a checkpoint: by path, in whatever format and store it is, or from a state dict."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from epload.checkpoint import dcp, delta, file_sets, hub, safetensors, torch_file
from epload.checkpoint.base import Checkpoint
from epload.checkpoint.byte_store import ByteStore, Progress, StoredFile, in_threads
from epload.checkpoint.file_checkpoint import FileCheckpoint
from epload.checkpoint.finding import check_no_options, choose, located, open_named, read_json
from epload.checkpoint.index import Index
from epload.checkpoint.manifest import FileFacts, Manifest, OpenFiles
from epload.checkpoint.quantization import quantization_of
from epload.checkpoint.state_dict import STATE_DICT, StateDictCheckpoint, split_entries
from epload.core.dtypes import FP8, INTEGERS
from epload.core.pieces import Quantization
from epload.errors import CheckpointError, redact_url

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
        check_no_options("an open epload.Checkpoint", prefix, variant)
        if changed := source.changed():
            raise CheckpointError(f"{changed} since this epload.Checkpoint opened it: open it again, or pass the path instead")
        source.prepare()
        return source
    if isinstance(source, Mapping):
        check_no_options("a dict of tensors", prefix, variant)
        try:
            tensors, ignored = split_entries(source, STATE_DICT)
        except CheckpointError as error:
            raise TypeError(str(error)) from None
        return StateDictCheckpoint(tensors, ignored=ignored)
    if isinstance(source, list | tuple):
        raise TypeError(
            f"expected a checkpoint as one path, got a {type(source).__name__} of {len(source)}: pass the folder with the "
            "files, or the index that names them"
        )
    if not isinstance(source, str | os.PathLike):
        raise TypeError(
            f"expected a checkpoint as a path, a dict of tensors or an epload.Checkpoint, got {type(source).__name__}"
        )
    if not str(source):
        raise ValueError("expected the path of a checkpoint, got an empty string")
    if str(source).startswith("epload:/"):  # also as a pathlib.Path
        raise ValueError(f"expected a stored checkpoint, got {redact_url(str(source))}, a running job; pass it to epload.load()")
    with located(source, variant, progress) as (store, name):
        chosen, has_config = choose(store, name, prefix, variant), not name
        if chosen == [file_sets.DELTA]:
            if not links:
                raise CheckpointError(f"{store} ends a chain of more than {delta.MAX_LINKS} deltas; convert one of them")
            return delta.read(store, lambda base: open_source(base, None, "", "", progress, links - 1))
        if chosen[0].endswith(".json") or (has_config and chosen == [file_sets.DCP]):
            return _open_index(store, chosen[0], prefix, known)
        file, *others = store.open(chosen)
        if others:
            return _read(store, str(store), known)
        if not file.name.endswith(".safetensors") and (reason := file_sets.unsupported_file(file)):
            raise CheckpointError(reason)
        return _read(store, store.path_of(file.name), known, has_config=has_config)


def join_source(source: Any, manifest: Manifest, progress: Progress | None = None) -> Checkpoint:
    """Opens on this rank the checkpoint that another rank has opened and described, without parsing it again.

    Args:
        source, progress: as for :meth:`Checkpoint.open`.
        manifest: that of the other rank.

    Raises:
        CheckpointError: there is nothing at the path, or it is not the same checkpoint.
        TypeError: ``source`` has another type.
    """
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
    with located(source, "", progress, (manifest.source, names)) as (store, name):
        is_file = name and not name.endswith(".json")
        try:
            files = store.open([name] if is_file else names)
        except FileNotFoundError as error:
            raise CheckpointError(
                f"cannot read {error.filename}, a file that the source rank reads: pass the same checkpoint on every rank, or "
                'let one rank read (readers="one")'
            ) from error
        if len(files) != len(expected):
            raise CheckpointError(
                f"{files[0]} is one file, but the source rank reads {len(expected)} files; pass the same path on every rank"
            )
        found = in_threads(_facts, files)
        for file, of_file, facts in zip(files, found, expected, strict=True):
            parts = zip(("size", "header", "content"), of_file[1:], facts[1:], strict=True)
            if part := next((part for part, own, other in parts if own != other), ""):
                raise CheckpointError(
                    f"{file} is not the file that the source rank has: its {part} differs; "
                    'copy it again, or let one rank read (readers="one")'
                )
        return FileCheckpoint(store, manifest)


def read_objects(source: Any, names: Sequence[str]) -> dict[str, bytes]:
    """Returns the entries of a DCP folder that are no tensors, each as ``torch.save`` wrote it, by name. Not those that it lacks.
    Raises CheckpointError."""
    if not names or not isinstance(source, str | os.PathLike) or hub.parse(source) is not None:
        return {}
    with located(source) as (store, file_name):
        if file_name or file_sets.DCP not in store.names([file_sets.DCP]):
            return {}
        saved = dcp.DcpIndex(store.open_description(file_sets.DCP), file_sets.DCP_ROOT).metadata.items
        items = {name: saved[name, None] for name in names if (name, None) in saved}
        paths = sorted({path for path, _, _ in items.values()})
        file_of = dict(zip(paths, store.open(paths), strict=True))
        contents = {name: file_of[path].read(offset, length) for name, (path, offset, length) in items.items()}
        store.close()
        return contents


# ---- files ----


def _open_index(store: ByteStore, name: str, prefix: str, known: Manifest | None) -> Checkpoint:
    file = store.open_description(name)
    index = dcp.DcpIndex(file, prefix) if name == file_sets.DCP else Index(file)
    if not name.endswith((file_sets.DCP, ".index.json")) and b'"weight_map"' not in index.raw:
        raise CheckpointError(file_sets.unsupported_file(file))
    if known is not None and known.locations is not None and known.locations.index == index.digest:
        names = [facts.name for facts in known.locations.files]
    else:
        names = index.file_names
    open_named(store, index, names)
    return _read(store, str(store), known, index)


def _read(
    store: ByteStore, source: str, known: Manifest | None, index: Index | None = None, has_config: bool = True
) -> Checkpoint:
    """Returns the checkpoint of open files. Without parsing, if the headers and the index are those of the known manifest.
    ``has_config``: True if the configuration in their folder is theirs."""
    facts = in_threads(_facts, store.files)
    manifest = known and known.with_files(source, index.digest if index is not None else "", facts)
    checkpoint: Checkpoint
    if manifest is not None:
        checkpoint = FileCheckpoint(store, manifest)
    else:
        name_of = {_format_of(file): file.name for file in reversed(store.files)}
        if isinstance(index, dcp.DcpIndex):
            name_of = {".distcp": file_sets.DCP}
        if len(name_of) > 1:
            raise CheckpointError(f"{source} has files of several formats ({', '.join(name_of.values())}); expected one format")
        _, read = FORMATS[next(iter(name_of), ".safetensors")]
        checkpoint = read(OpenFiles(store, facts, source, index))
    manifest = checkpoint.manifest
    quantization = _quantization(store, manifest) if has_config else None
    if quantization != manifest.quantization:
        assert isinstance(checkpoint, FileCheckpoint | StateDictCheckpoint)  # what formats read
        checkpoint._manifest = replace(manifest, quantization=quantization)
    return checkpoint


def config_next_to(checkpoint: Checkpoint, name: str = file_sets.CONFIG) -> dict[str, Any]:
    """Returns the content of the ``config.json`` next to a checkpoint, or of another file; empty if there is none."""
    if isinstance(checkpoint, delta.DeltaCheckpoint):
        config: dict[str, Any] = json.loads(checkpoint.config.get(name, b"{}"))
        return config
    return read_json(checkpoint._store, name) if checkpoint._store is not None else {}


def _format_of(file: StoredFile) -> str:
    if "." not in file.name and file.read(8, 1) == b"{":  # as in the Hub's cache, where names are digests
        return ".safetensors"
    return next(suffix for suffix in FORMATS if file.name.endswith(suffix))


def _facts(file: StoredFile) -> FileFacts:
    """Raises CheckpointError, OSError."""
    facts, _ = FORMATS[_format_of(file)]
    return FileFacts.of(file) if file.identity else facts(file)


# ---- quantization ----


def _quantization(store: ByteStore, manifest: Manifest) -> Quantization | None:
    """Returns the quantization that a folder's configuration declares; None if no tensor of it can be quantized. Raises
    CheckpointError if the configuration of fp8 weights cannot be read."""
    dtypes = manifest.dtypes
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
