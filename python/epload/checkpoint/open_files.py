"""The open files of a checkpoint, and the tensors that their headers describe."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import NamedTuple

import torch

from epload.checkpoint.byte_store import ByteStore, StoredFile
from epload.checkpoint.index import Index
from epload.core.placement import Box, intersect
from epload.errors import CheckpointError

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

    def tensors(
        self,
        stored: Iterable[StoredTensor],
        ignored: Sequence[str] = (),
        shapes: Mapping[str, tuple[int, ...]] | None = None,
    ) -> dict[str, tuple[tuple[int, ...], list[StoredTensor]]]:
        """Returns the shape of each tensor, and the chunks in which it is stored, by its name.

        Args:
            stored: tensors in the files, or chunks of tensors, in the order of their bytes.
            ignored: names of entries that hold no tensor.
            shapes: of tensors that are stored in chunks, by name; by default the smallest that have room for the chunks.

        Raises:
            CheckpointError: a tensor is in two files, the index names one that is in none, or chunks are missing or overlap.
        """
        index, files = self.index, self.store.files
        chunks_of: dict[str, list[StoredTensor]] = {}
        for tensor in stored:
            if index is None or index.places(tensor.name, files[tensor.file].name):
                chunks_of.setdefault(tensor.name, []).append(tensor)
        if index is not None:
            index.check_complete({*chunks_of, *ignored})
        tensors = {}
        for name, chunks in chunks_of.items():
            shape = chunks[0].shape
            if len(chunks) > 1 or chunks[0].start is not None:
                shape = self._shape(chunks) if shapes is None else shapes[name]
                chunks[:] = [chunk for chunk in chunks if 0 not in chunk.shape] or chunks[:1]
                if fault := _fault(shape, tuple(chunk.box for chunk in chunks)):
                    raise CheckpointError(f"{self.source}: {name} of shape {list(shape)} {fault}")
            tensors[name] = shape, chunks
        return tensors

    def _shape(self, chunks: Sequence[StoredTensor]) -> tuple[int, ...]:
        """Returns the shape of the tensor that these are the chunks of, which files describe one by one."""
        first, files = chunks[0], self.store.files
        for chunk in chunks:
            if chunk.start is None:
                raise CheckpointError(f"{first.name} is both in {files[first.file]} and in {files[chunks[1].file]}")
            if not len(chunk.start) == len(chunk.shape) == len(first.shape) or chunk.dtype != first.dtype:
                raise CheckpointError(
                    f"{files[chunk.file]}: {first.name} has other dims or another dtype than its part in another file"
                )
        ends = (map(int.__add__, *chunk.box) for chunk in chunks)
        return tuple(map(max, zip(*ends, strict=True)))


@lru_cache
def _fault(shape: tuple[int, ...], boxes: Sequence[Box]) -> str:
    """Returns why boxes do not cover a shape exactly once; empty if they do."""
    for start, size in boxes:
        if any(a + n > length for a, n, length in zip(start, size, shape, strict=True)):
            return f"has a chunk at {list(start)} of {list(size)}, which reaches outside"
    covered = sum(prod(size) for _, size in boxes)
    if covered < prod(shape):
        return (
            f"has chunks for only {covered} of its {prod(shape)} elements: files are missing, or it was not saved whole"
        )
    ordered = sorted(boxes)
    for i, a in enumerate(ordered):
        for b in ordered[i + 1 :]:
            if shape and b[0][0] >= a[0][0] + a[1][0]:
                break  # as are all after it
            if intersect(a, b) is not None:
                return f"has chunks at {list(a[0])} and {list(b[0])} that overlap"
    return ""
