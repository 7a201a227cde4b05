"""The manifest of a checkpoint: its content and locations, in a form that the rank that parsed it sends to the others; and the
open files that it is made from."""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, fields, replace
from functools import cached_property
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from epload.checkpoint.byte_store import ByteStore, StoredFile
from epload.checkpoint.index import Index
from epload.core import dtypes
from epload.core.chunks import Chunks
from epload.core.columns import column
from epload.core.pieces import Kinds, Quantization, distinct_values
from epload.core.placement import Box

_SAMPLES, _SAMPLE_BYTES = 16, 512


class FileFacts(NamedTuple):
    """Facts that two ranks compare to make sure that they see the same file."""

    name: str
    nbytes: int
    header: str
    """Digest of its header; empty if it has none."""
    samples: str
    """Digest of samples from all over the file, which differs for other weights under the same header."""

    @classmethod
    def of(cls, file: StoredFile, header: bytes = b"", data: int = 0) -> FileFacts:
        """Reads the samples, unless the storage identifies the content. Raises CheckpointError, OSError.

        Args:
            file: the file.
            header: the content of its header; empty if it has none.
            data: offset at which the tensors' bytes begin.
        """
        if file.identity:
            return cls(file.name, file.nbytes, file.identity, "")
        nbytes = max(file.nbytes - data, 0)  # a malformed file may end inside its header
        samples = b"".join(file.read(nbytes * i // _SAMPLES + data, _SAMPLE_BYTES) for i in range(_SAMPLES))
        # Processors have instructions for SHA-256, and a header can have megabytes that every reader hashes in every load.
        header_digest, digest = (hashlib.sha256(content).hexdigest()[:32] for content in (header, samples))
        return cls(file.name, file.nbytes, header_digest if header else "", digest)


class StoredTensor(NamedTuple):
    """A tensor of a file, or a chunk of one, as the file's header describes it."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    """Offset from the start of the file, in bytes."""
    start: tuple[int, ...] | None = None
    """Its start, in elements, in the larger tensor of the same name that it is a chunk of; None for a whole tensor."""
    file: int = 0
    """Index of the file in its store."""

    @property
    def box(self) -> Box:
        """Its place in the tensor of its name."""
        return self.start or (0,) * len(self.shape), self.shape


@dataclass(frozen=True)
class OpenFiles:
    """The files of a checkpoint that is not described yet."""

    store: ByteStore
    """The store in which they are open."""
    facts: Sequence[FileFacts]
    """One entry per file."""
    source: str
    """The path, for messages."""
    index: Index | None = None
    """The index that names the files, if there is one."""


@dataclass(frozen=True, eq=False)
class Manifest:
    """Names, shapes and dtypes of a checkpoint's tensors, one entry per tensor in each column, ordered as their bytes are stored.

    Equal on all ranks of a load.
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    source: str
    """The path, or "state dict"; for error messages."""
    locations: TensorLocations | None = None
    """Locations of the tensors in files that other ranks can read without parsing them; None if there are no such files."""
    ignored: tuple[str, ...] = ()
    """Names of entries that hold no tensor, such as ``_extra_state``: listed in reports, otherwise ignored."""
    quantization: Quantization | None = None
    """The declaration of quantized weights in the checkpoint's ``config.json``; None if there is none."""

    @cached_property
    def kinds(self) -> Kinds:
        """See :data:`~epload.core.pieces.Kinds`."""
        return distinct_values(list(zip(self.shapes, self.dtypes, strict=True)))

    @property
    def _tensors(self) -> list[Any]:
        """Names, shapes, dtypes and quantization as JSON, in which each distinct shape and dtype is listed once."""
        shapes, shape_of = distinct_values(self.shapes)
        types, dtype_of = distinct_values(self.dtypes)
        return [
            self.names,
            shapes,
            shape_of.tolist(),
            list(map(dtypes.name, types)),
            dtype_of.tolist(),
            self.quantization,
        ]

    @cached_property
    def compact(self) -> bytes:
        """Everything but :attr:`provenance`, as compressed JSON."""
        return zlib.compress(_to_json([self._tensors, self.locations and self.locations.to_json()]), level=1)

    @classmethod
    def from_compact(cls, raw: bytes, provenance: Sequence[Any]) -> Manifest:
        """Returns the manifest with this :attr:`compact` form and :attr:`provenance`."""
        (names, shapes, shape_of, types, dtype_of, declared), locations = json.loads(zlib.decompress(raw))
        distinct_shapes, distinct_dtypes = list(map(tuple, shapes)), list(map(dtypes.from_name, types))
        return cls(
            tuple(names),
            tuple(distinct_shapes[i] for i in shape_of),
            tuple(distinct_dtypes[i] for i in dtype_of),
            source="",
            locations=locations and TensorLocations.from_json(locations),
            quantization=declared and Quantization.from_json(declared),
        ).with_provenance(provenance)

    @property
    def provenance(self) -> list[Any]:
        """Facts that may differ between two checkpoints with the same tensors at the same locations, as JSON: the source, the
        facts of its files, and the names of its other entries."""
        files = self.locations and [self.locations.index, *self.locations.files]
        return [self.source, files, self.ignored]

    def with_provenance(self, provenance: Sequence[Any]) -> Manifest:
        """Returns the manifest of another checkpoint with the same tensors at the same locations."""
        source, files, ignored = provenance
        locations = self.locations
        if locations is not None:
            index, *facts = files
            locations = replace(locations, index=index, files=tuple(FileFacts(*of_file) for of_file in facts))
        manifest = copy(self)  # with what was computed, which does not depend on the provenance
        manifest.__dict__.update(source=source, locations=locations, ignored=tuple(ignored))
        return manifest

    def with_files(self, source: str, index: str, files: Sequence[FileFacts]) -> Manifest | None:
        """Returns the manifest of other files, if they hold the same tensors at the same locations; else None.

        Args:
            source: as for the manifest.
            index: digest of the index that names the files; empty without one.
            files: the facts of the files.
        """
        locations = self.locations
        if locations is None or [index, *map(_layout, files)] != [locations.index, *map(_layout, locations.files)]:
            return None
        if self.in_object_storage and source != self.source:  # an ETag, or a time, tells only versions of one object apart
            return None
        return self.with_provenance([source, [index, *files], self.ignored])

    def nbytes_of(self) -> list[int]:
        """Returns the size of each tensor in bytes."""
        return [prod(shape) * dtype.itemsize for shape, dtype in zip(self.shapes, self.dtypes, strict=True)]

    @cached_property
    def nbytes(self) -> int:
        """Size of all tensors in bytes."""
        return sum(self.nbytes_of())

    @cached_property
    def digest(self) -> bytes:
        """16 bytes, equal for two manifests only if they have the same tensors in the same order, quantized in the same way."""
        return hashlib.sha256(_to_json(self._tensors)).digest()[:16]

    @cached_property
    def identity(self) -> str:
        """Equal for two manifests only if they differ in nothing but :attr:`provenance`."""
        return hashlib.sha256(zlib.decompress(self.compact)).hexdigest()[:32]

    @property
    def in_object_storage(self) -> bool:
        """True if the files are objects, each of which has an identity and needs no samples."""
        return self.locations is not None and any(not facts.samples for facts in self.locations.files)


def _to_json(values: Any) -> bytes:
    """Distinct strings stay distinct: escaped, two surrogates are not told from the character that they encode."""
    return json.dumps(values, separators=(",", ":"), ensure_ascii=False).encode(errors="surrogatepass")


def _layout(facts: FileFacts) -> tuple[int, str]:
    return facts.nbytes, facts.header


@dataclass(frozen=True)
class TensorLocations:
    """Locations of a checkpoint's tensors in its files, and the facts by which another rank recognizes these files."""

    files: tuple[FileFacts, ...]
    file: Tensor
    """int64 [t], for each tensor of the manifest an index into ``files``; with ``chunks`` int64 [c], for each chunk."""
    offset: Tensor
    """int64 of the same length, in bytes from the start of the file."""
    index: str = ""
    """Digest of the index that names the files; empty without one."""
    chunks: Chunks | None = None
    """The parts in which tensors are stored; None if each is stored in one."""

    def of_tensor(self, number: int) -> tuple[object, ...]:
        """Returns the location of one tensor; equal for two of the same shape and dtype only if they are the same bytes."""
        columns, rows = [self.file, self.offset], slice(number, number + 1)
        if self.chunks is not None:
            columns += [self.chunks.start, self.chunks.size]
            rows = slice(*self.chunks.first[number : number + 2].tolist())
        return tuple(str(values[rows].tolist()) for values in columns)

    def to_json(self) -> list[Any]:
        """Returns all but what :attr:`Manifest.provenance` has. Distances between offsets repeat, and so compress well."""
        steps = self.offset.diff(prepend=self.offset.new_zeros(1))
        chunks = self.chunks and [getattr(self.chunks, field.name).tolist() for field in fields(self.chunks)]
        return [self.file.tolist(), steps.tolist(), chunks]

    @classmethod
    def from_json(cls, columns: list[Any]) -> TensorLocations:
        """Reads what :meth:`to_json` returns."""
        file, steps, chunks = columns
        if chunks is not None:
            chunks = Chunks(*(torch.tensor(values, dtype=torch.int64, device="cpu") for values in chunks))
        return cls((), column(file), column(steps).cumsum(0), chunks=chunks)
