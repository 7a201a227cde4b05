"""The open files of a checkpoint, and the tensors that their headers describe."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from epload.checkpoint.byte_store import ByteStore, StoredFile
from epload.checkpoint.index import Index
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
