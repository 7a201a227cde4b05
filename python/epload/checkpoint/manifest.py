"""The manifest of a checkpoint: its content and locations, in a form that the rank that parsed it sends to the others."""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, fields, replace
from functools import cached_property
from operator import mul
from typing import Any, NamedTuple

import torch
from torch import Tensor

from epload.checkpoint.byte_store import StoredFile
from epload.core import dtypes
from epload.core.chunks import Chunks
from epload.core.columns import column
from epload.core.pieces import Kinds, Quantization

_SAMPLES, _SAMPLE_BYTES = 16, 512


@dataclass(frozen=True)
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
        """The distinct shapes and dtypes."""
        return Kinds.of(self.shapes, self.dtypes)

    @property
    def _tensors(self) -> list[Any]:
        """Names, shapes, dtypes and quantization as JSON, in which each distinct shape and dtype is listed once."""
        shapes, shape_of, types, dtype_of = self.kinds
        dims = [list(map(int, shape)) for shape in shapes]
        return [
            self.names,
            dims,
            shape_of.tolist(),
            list(map(dtypes.name, types)),
            dtype_of.tolist(),
            self.quantization,
        ]

    @cached_property
    def _content(self) -> bytes:
        """Everything but :attr:`provenance`, as JSON."""
        return _to_json([self._tensors, self.locations and self.locations.to_json()])

    @cached_property
    def compact(self) -> bytes:
        """Everything but :attr:`provenance`, as compressed JSON."""
        return zlib.compress(self._content, level=1)

    @classmethod
    def from_compact(cls, raw: bytes, provenance: list[Any]) -> Manifest:
        """Returns the manifest with this :attr:`compact` form and :attr:`provenance`."""
        tensors, locations = json.loads(zlib.decompress(raw))
        names, dims, shape_of, types, dtype_of, declared = tensors
        shapes, kinds = list(map(tuple, dims)), list(map(dtypes.from_name, types))
        return cls(
            tuple(names),
            tuple(map(shapes.__getitem__, shape_of)),
            tuple(map(kinds.__getitem__, dtype_of)),
            source="",
            locations=TensorLocations.from_json(locations) if locations is not None else None,
            quantization=Quantization.from_json(declared) if declared is not None else None,
        ).with_provenance(provenance)

    @property
    def provenance(self) -> list[Any]:
        """Facts that may differ between two checkpoints with the same tensors at the same locations, as JSON: the source, the
        facts of its files, and the names of its other entries."""
        files = None if self.locations is None else [self.locations.index, *map(list, self.locations.files)]
        return [self.source, files, list(self.ignored)]

    def with_provenance(self, provenance: list[Any]) -> Manifest:
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
        locations, layout = self.locations, [(facts.nbytes, facts.header) for facts in files]
        if locations is None or index != locations.index or layout != [(f.nbytes, f.header) for f in locations.files]:
            return None
        return self.with_provenance([source, [index, *files], self.ignored])

    def with_quantization(self, quantization: Quantization | None) -> Manifest:
        """Returns the manifest of the same tensors with another declared quantization."""
        return self if quantization == self.quantization else replace(self, quantization=quantization)

    def nbytes_of(self) -> list[int]:
        """Returns the size of each tensor in bytes."""
        sizes, kind_of = self.kinds.sizes()
        return list(map(sizes.__getitem__, kind_of.tolist()))

    @cached_property
    def digest(self) -> bytes:
        """16 bytes, equal for two manifests only if they have the same tensors in the same order, quantized in the same way."""
        return hashlib.sha256(_to_json(self._tensors)).digest()[:16]

    @cached_property
    def identity(self) -> str:
        """Equal for two manifests only if they differ in nothing but :attr:`provenance`."""
        return hashlib.sha256(self._content).hexdigest()[:32]

    @property
    def in_object_storage(self) -> bool:
        """True if the files are objects, each of which has an identity and needs no samples."""
        return self.locations is not None and any(not facts.samples for facts in self.locations.files)

    @property
    def version(self) -> str:
        """Equal for two manifests only if their files have the same names and facts."""
        return hashlib.sha256(_to_json(self.provenance[1])).hexdigest()[:32]

    @cached_property
    def nbytes(self) -> int:
        """Size of all tensors in bytes."""
        sizes, kind_of = self.kinds.sizes()
        return sum(map(mul, sizes, torch.bincount(kind_of, minlength=len(sizes)).tolist()))


def _to_json(values: Any) -> bytes:
    """Distinct strings stay distinct: escaped, two surrogates are not told from the character that they encode."""
    return json.dumps(values, separators=(",", ":"), ensure_ascii=False).encode(errors="surrogatepass")


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
        """Reads the samples. Raises CheckpointError, OSError.

        Args:
            file: the file.
            header: the content of its header; empty if it has none.
            data: offset at which the tensors' bytes begin.
        """
        samples = hashlib.sha256()
        nbytes = max(file.nbytes - data, 0)  # a malformed file may end inside its header
        for i in range(_SAMPLES):
            samples.update(file.read(nbytes * i // _SAMPLES + data, _SAMPLE_BYTES))
        # Processors have instructions for SHA-256, and a header can have megabytes that every reader hashes in every load.
        digest = hashlib.sha256(header).hexdigest()[:32] if header else ""
        return cls(file.name, file.nbytes, digest, samples.hexdigest()[:32])


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
        chunks = slice(number, number + 1)
        boxes: list[list[int]] = []
        if self.chunks is not None:
            chunks = slice(*self.chunks.first[number : number + 2].tolist())
            boxes = [*self.chunks.start[chunks].tolist(), *self.chunks.size[chunks].tolist()]
        return tuple(self.file[chunks].tolist()), tuple(self.offset[chunks].tolist()), repr(boxes)

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
            first, shape, itemsize, *boxes = (torch.tensor(v, dtype=torch.int64, device="cpu") for v in chunks)
            start, size = (values.reshape(-1, shape.shape[1]) for values in boxes)
            chunks = Chunks(first, shape, itemsize, start, size)
        return cls((), column(file), column(steps).cumsum(0), chunks=chunks)


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
