"""The manifest of a checkpoint: its content and locations, in a form that the rank that parsed it sends to the others."""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
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

_CACHED = ("kinds", "_tensors", "compact", "digest", "identity", "nbytes")
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

    @cached_property
    def _tensors(self) -> bytes:
        """Names, shapes and dtypes as a line of JSON, in which each distinct shape and dtype is listed once."""
        shapes, shape_of, types, dtype_of = self.kinds
        dims = [list(map(int, shape)) for shape in shapes]
        return _to_json([self.names, dims, _runs(shape_of), list(map(dtypes.name, types)), _runs(dtype_of)])

    @cached_property
    def compact(self) -> bytes:
        """Compressed JSON of everything but :attr:`provenance`."""
        locations = self.locations and self.locations.to_json(self.kinds)
        return zlib.compress(b"\n".join([self._tensors, self._declared, _to_json(locations)]), level=1)

    @property
    def _declared(self) -> bytes:
        """The quantization as a line of JSON; empty if there is none."""
        return b"" if self.quantization is None else _to_json(self.quantization.to_json())

    @classmethod
    def from_compact(cls, raw: bytes, provenance: list[Any]) -> Manifest:
        """The inverse of :attr:`compact` and :attr:`provenance`."""
        tensors, declared, stored = zlib.decompress(raw).split(b"\n")
        names, distinct_shapes, shape_of, names_of_types, dtype_of = json.loads(tensors)
        kinds = Kinds(
            list(map(tuple, distinct_shapes)),
            _from_runs(shape_of),
            list(map(dtypes.from_name, names_of_types)),
            _from_runs(dtype_of),
        )
        shapes = tuple(map(kinds.shapes.__getitem__, kinds.shape_of.tolist()))
        types = tuple(map(kinds.dtypes.__getitem__, kinds.dtype_of.tolist()))
        columns = json.loads(stored)
        locations = TensorLocations.from_json(columns, shapes, types, kinds) if columns is not None else None
        quantization = Quantization.from_json(json.loads(declared)) if declared else None
        manifest = cls(tuple(names), shapes, types, "", locations, quantization=quantization)
        manifest.__dict__.update(kinds=kinds, compact=raw, digest=_digest(tensors + declared))
        return manifest.with_provenance(provenance)

    @property
    def provenance(self) -> list[Any]:
        """Facts that may differ between two checkpoints with the same tensors at the same locations, as JSON: the source, the
        facts of its files, and the names of its other entries."""
        files = None if self.locations is None else [self.locations.index, *map(list, self.locations.files)]
        return [self.source, files, list(self.ignored)]

    def with_provenance(self, provenance: list[Any]) -> Manifest:
        """The manifest of another checkpoint with the same tensors at the same locations; keeps all computed values."""
        source, files, ignored = provenance
        locations = self.locations
        if locations is not None:
            index, *facts = files
            locations = replace(locations, index=index, files=tuple(FileFacts(*of_file) for of_file in facts))
        manifest = replace(self, source=source, locations=locations, ignored=tuple(ignored))
        manifest.__dict__.update({name: self.__dict__[name] for name in _CACHED if name in self.__dict__})
        return manifest

    def with_quantization(self, quantization: Quantization | None) -> Manifest:
        """Returns the manifest of the same tensors with another declared quantization."""
        if quantization == self.quantization:
            return self
        manifest = replace(self, quantization=quantization)
        kept = ("kinds", "_tensors", "nbytes")
        manifest.__dict__.update({name: self.__dict__[name] for name in kept if name in self.__dict__})
        return manifest

    def nbytes_of(self) -> list[int]:
        """Size of each tensor in bytes."""
        sizes, kind_of = self.kinds.sizes()
        return list(map(sizes.__getitem__, kind_of.tolist()))

    @cached_property
    def digest(self) -> bytes:
        """16 bytes, equal for two manifests only if they have the same tensors in the same order, quantized in the same way."""
        return _digest(self._tensors + self._declared)

    @cached_property
    def identity(self) -> str:
        """Equal for two manifests only if they differ in nothing but :attr:`provenance`."""
        return hashlib.blake2b(self.compact, digest_size=16).hexdigest()

    @property
    def in_object_storage(self) -> bool:
        """True if the files are objects, each of which has an identity and needs no samples."""
        return self.locations is not None and any(not facts.samples for facts in self.locations.files)

    @property
    def version(self) -> str:
        """Equal for two manifests only if their files have the same names and facts."""
        _, files, _ = self.provenance
        return hashlib.blake2b(json.dumps(files).encode(), digest_size=16).hexdigest()

    @cached_property
    def nbytes(self) -> int:
        """Size of all tensors in bytes."""
        sizes, kind_of = self.kinds.sizes()
        return sum(map(mul, sizes, torch.bincount(kind_of, minlength=len(sizes)).tolist()))


def _to_json(values: Any) -> bytes:
    """A line. Distinct strings stay distinct: escaped, two surrogates are not told from the character that they encode."""
    return json.dumps(values, separators=(",", ":"), ensure_ascii=False).encode(errors="surrogatepass")


def _digest(tensors: bytes) -> bytes:
    # Processors have instructions for SHA-256.
    return hashlib.sha256(tensors).digest()[:16]


def _runs(values: Tensor) -> list[Any]:
    """The values, of which each is followed by as many equal ones, and how many; None if that takes more room than it saves.

    ``values``: int64 [n].
    """
    distinct, counts = torch.unique_consecutive(values, return_counts=True)
    if 2 * len(distinct) > len(values):
        return [values.tolist(), None]
    return [distinct.tolist(), counts.tolist()]


def _from_runs(runs: list[Any]) -> Tensor:
    """The inverse."""
    values, counts = runs
    return column(values) if counts is None else torch.repeat_interleave(column(values), column(counts))


class FileFacts(NamedTuple):
    """Facts that two ranks compare to make sure that they see the same file."""

    name: str
    nbytes: int
    header: str
    """Digest of its header; empty if it has none."""
    samples: str
    """Digest of samples from all over the file, which differs for other weights under the same header."""

    @classmethod
    def of(cls, file: StoredFile, header: str, data: int) -> FileFacts:
        """``data``: offset at which the tensors' bytes begin. Raises CheckpointError, OSError."""
        samples = hashlib.sha256()
        nbytes = max(file.nbytes - data, 0)  # a malformed file may end inside its header
        for i in range(_SAMPLES):
            samples.update(file.read(nbytes * i // _SAMPLES + data, _SAMPLE_BYTES))
        return cls(file.name, file.nbytes, header, samples.hexdigest()[:32])


@dataclass(frozen=True)
class FileLayout:
    """The tensors of one file, as its header describes them: one entry per tensor in each column."""

    names: list[str]
    dtypes: list[torch.dtype]
    shapes: list[tuple[int, ...]]
    offsets: list[int]
    """Offset of each tensor from the start of the file, in bytes."""
    order: Sequence[int]
    """Indices of the tensors, ordered as their bytes are stored."""
    ignored: Sequence[str] = ()
    """Names of entries that hold no tensor."""
    parts: Sequence[tuple[int, ...]] | None = None
    """Start of each tensor, in elements, in the larger tensor of the same name that it is a part of; None for whole tensors."""


@dataclass(frozen=True)
class TensorLocations:
    """Locations of a checkpoint's tensors in its files, and the facts by which another rank recognizes these files."""

    files: tuple[FileFacts, ...]
    file: Tensor
    """int64 [t], for each tensor of the manifest an index into ``files``; with ``chunks`` int64 [c], for each chunk."""
    offset: Tensor
    """Likewise, in bytes from the start of the file."""
    index: str = ""
    """Digest of the index that names the files; empty without one."""
    chunks: Chunks | None = None
    """The parts in which tensors are stored; None if each is stored in one."""

    def same_layout(self, index: str, files: Sequence[FileFacts]) -> bool:
        """Returns True if such files, under an index with this digest, hold the same tensors at the same locations."""
        layout = [(facts.nbytes, facts.header) for facts in files]
        return index == self.index and layout == [(facts.nbytes, facts.header) for facts in self.files]

    def of_tensor(self, number: int) -> tuple[object, ...]:
        """Returns the location of one tensor; equal for two of the same shape and dtype only if they are the same bytes."""
        chunks = slice(number, number + 1)
        boxes: list[list[int]] = []
        if self.chunks is not None:
            chunks = slice(*self.chunks.first[number : number + 2].tolist())
            boxes = [*self.chunks.start[chunks].tolist(), *self.chunks.size[chunks].tolist()]
        return tuple(self.file[chunks].tolist()), tuple(self.offset[chunks].tolist()), repr(boxes)

    def to_json(self, kinds: Kinds) -> list[Any]:
        """Most tensors follow the one before without a gap, and equal gaps compress well. ``kinds``: of the manifest."""
        boxes = None
        if (chunks := self.chunks) is not None:
            distinct, which = torch.unique(torch.cat([chunks.start, chunks.size], 1), dim=0, return_inverse=True)
            boxes = [chunks.first.diff().tolist(), distinct.tolist(), which.tolist()]
        gaps = self.offset - self._without_gaps(self.offset, _sizes(kinds, chunks))
        return [_runs(self.file), _runs(gaps), boxes]

    @classmethod
    def from_json(
        cls, columns: list[Any], shapes: Sequence[tuple[int, ...]], types: Sequence[torch.dtype], kinds: Kinds
    ) -> TensorLocations:
        """``shapes``, ``types``, ``kinds``: of the manifest."""
        file, gaps, boxes = columns
        chunks = None
        if boxes is not None:
            counts, distinct, which = boxes
            dims = len(distinct[0]) // 2 if distinct else 1
            of_chunk = iter([(tuple(distinct[i][:dims]), tuple(distinct[i][dims:])) for i in which])
            of_tensor = [[next(of_chunk) for _ in range(count)] for count in counts]
            chunks = Chunks.of(shapes, [dtype.itemsize for dtype in types], of_tensor)
        steps = _from_runs(gaps)
        steps[1:] += _sizes(kinds, chunks)[:-1]
        return cls((), _from_runs(file), steps.cumsum(0), chunks=chunks)

    @staticmethod
    def _without_gaps(offset: Tensor, nbytes: Tensor) -> Tensor:
        """Returns the offset that each tensor would have if it directly followed the one before, in bytes."""
        expected = torch.zeros_like(offset)
        expected[1:] = offset[:-1] + nbytes[:-1]
        return expected


def _sizes(kinds: Kinds, chunks: Chunks | None) -> Tensor:
    """Bytes of each tensor, or of each chunk."""
    if chunks is not None:
        return chunks.nbytes
    sizes, kind_of = kinds.sizes()
    return column(sizes)[kind_of]
