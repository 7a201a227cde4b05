"""The public interface of checkpoints."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from importlib import import_module
from math import prod
from typing import Any

import torch
from torch import Tensor

from epload.checkpoint.byte_store import SPAN_BYTES, ByteStore, Progress, StoredFile
from epload.checkpoint.manifest import Manifest
from epload.core.copy_table import CopyTable, copy_row
from epload.core.default_device import on_cpu
from epload.core.pieces import Piece
from epload.core.placement import Box, row_major_strides
from epload.core.regions import Regions
from epload.native.ops import Pipe


class Checkpoint(ABC):
    """A source of tensors: a manifest, and ranged reads into a buffer.

    Only reading ranks open a checkpoint; the others receive its manifest. A checkpoint is used by one thread at a time.

    A subclass implements :attr:`manifest` and :meth:`fill`, and can be passed wherever a checkpoint is expected. This one
    computes its tensors when they are read::

        class Constant(epload.Checkpoint):
            def __init__(self, names: list[str], value: int, nbytes: int) -> None:
                self._value = value
                shapes, dtypes = ((nbytes,),) * len(names), (torch.uint8,) * len(names)
                self._manifest = epload.Manifest(tuple(names), shapes, dtypes, source="constant")

            @property
            def manifest(self) -> epload.Manifest:
                return self._manifest

            def fill(self, bucket: torch.Tensor, pieces: Sequence[epload.Piece]) -> None:
                for piece in pieces:
                    bucket[piece.bucket_offset : piece.bucket_offset + piece.nbytes] = self._value
    """

    verified: bool = False
    """True if it verifies what it gives by itself, or cannot be read again for that."""
    _store: ByteStore | None = None
    """The files it was opened from, if any."""

    @property
    def cannot_verify(self) -> str:
        """Says why ``verify=True`` is rejected; empty if it is not."""
        return ""

    @property
    @abstractmethod
    def manifest(self) -> Manifest:
        """Names, shapes and dtypes, known without reading any tensor. Read often: compute it once."""

    @abstractmethod
    def fill(self, bucket: Tensor, pieces: Sequence[Piece]) -> None:
        """Reads pieces of tensors into a buffer. Bytes that no piece covers are left as they are.

        Args:
            bucket: contiguous uint8 CPU tensor.
            pieces: what to read and where to write it; in any order, without overlaps in the buffer.

        Raises:
            CheckpointError: a piece cannot be read; it names the file or the tensor.
        """

    def prepare(self) -> None:
        """Called before anything else. A checkpoint that delays opening its files opens them here. Raises CheckpointError."""
        return None

    def tensor(self, index: int) -> Tensor | None:
        """Returns the tensor with this index in the manifest if it is in memory, else None."""
        return None

    def fill_on_device(self, bucket: Tensor, pieces: Sequence[Piece], pipe: Pipe) -> bool:
        """Does what :meth:`fill` does, into a buffer on the pipe's device. Returns False if the checkpoint cannot."""
        return False

    def read_regions(self, regions: Regions) -> int | None:
        """Reads regions of tensors from files directly into a model's tensors, on CPU or, if they have a pipe, on its device.

        Returns the bytes read, or None if the checkpoint cannot read this way. Raises as :meth:`fill`.
        """
        return None

    @property
    def files(self) -> Sequence[StoredFile]:
        """The open files that hold its tensors; none if these are elsewhere, or some of them are."""
        return () if self._store is None else self._store.files

    def changed(self) -> str:
        """Returns how a file has changed since it was opened, e.g. "PATH was replaced by another file"; empty if none has."""
        return "" if self._store is None else self._store.changed()

    def reopen(self) -> None:
        """Opens all files by path again, so that later reads see what other ranks find there. Raises CheckpointError if a file
        is not the one that was opened before."""
        if self._store is not None:
            self._store.reopen()

    def configure_reads(self, direct: bool, threads: int | None = None) -> None:
        """Sets how later reads of files are made.

        Args:
            direct: whether they may go past the page cache; see ``HierarchicalLoader``.
            threads: how many threads read at once into memory of the host; None for the default.
        """
        if self._store is not None:
            self._store.direct_io = direct
            self._store.threads = threads

    def close(self) -> None:
        """Closes the files. The checkpoint can still be used afterwards, provided that its files are unchanged."""
        if self._store is not None:
            self._store.close()

    @staticmethod
    @on_cpu
    def open(
        source: Any,
        known: Manifest | None = None,
        prefix: str = "",
        variant: str = "",
        progress: Progress | None = None,
    ) -> Checkpoint:
        """Opens a checkpoint.

        Args:
            source: path of a file (safetensors, ``.pt``, ``.bin``), of a folder of them or of an index; of a folder that
                torch.distributed.checkpoint (DCP) wrote; a model on the Hugging Face Hub, as ``org/name`` if there is no such
                path, or ``hf://org/name@revision``; the URL of a file or folder in object storage (``s3://``, ``gs://``,
                ``az://``, ``https://`` or another scheme of fsspec); a dict of tensors; or a Checkpoint, which is returned.
            known: manifest of a checkpoint that was opened before. Headers equal to its own are not parsed again.
            prefix: of a DCP folder: where in the saved state dict the model is, e.g. ``"app.model"``. By default under a
                top-level key "model" or "state_dict", or under the only key, if there is one.
            variant: of a folder, or of a model on the Hub: which set of weights to open, e.g. ``"fp16"`` for
                ``model.fp16.safetensors``. By default the one without a variant.
            progress: called now and then with a number of bytes while a download goes on.

        Raises:
            CheckpointError: there is nothing readable, a header is malformed, or a file of the given Checkpoint has changed.
            TypeError: ``source`` has another type.
            ValueError: ``prefix`` for another source than a DCP folder, or ``variant`` for one that is no folder.
        """
        opened: Checkpoint = _opening().open_source(source, known, prefix, variant, progress)
        return opened


def _opening() -> Any:
    """Returns the module that opens checkpoints. It imports this one, as the formats are subclasses of :class:`Checkpoint`."""
    return import_module("epload.checkpoint.opening")


def regions_of_boxes(manifest: Manifest, boxes: Sequence[tuple[int, Box]], targets: list[Tensor]) -> Regions:
    """Returns boxes of tensors as regions that fill whole targets.

    Args:
        boxes: the tensor's index in the manifest, and the box.
        targets: of the shapes of the boxes, on CPU.
    """
    dims = max((len(start) for _, (start, _) in boxes), default=0) or 1
    rows, origins = [], []
    for target, (tensor, (start, size)) in enumerate(boxes):
        dtype, strides = manifest.dtypes[tensor], row_major_strides(manifest.shapes[tensor])
        rows.append(copy_row(dims, target, 0, dtype, [0] * len(size), size, strides))
        origins.append([tensor, sum(map(int.__mul__, start, strides)) * dtype.itemsize])
    return Regions(targets, CopyTable(torch.tensor(rows)), torch.tensor(origins))


def read_tensor(checkpoint: Checkpoint, tensor: int) -> Tensor:
    """Returns a tensor in full, on CPU. ``tensor``: its index in the manifest. Raises CheckpointError: it cannot be read."""
    shape, dtype = checkpoint.manifest.shapes[tensor], checkpoint.manifest.dtypes[tensor]
    empty = torch.empty(0, dtype=dtype, device="cpu")
    return next(read_in_chunks(checkpoint, tensor, prod(shape) or 1), empty).reshape(shape)


def read_in_chunks(checkpoint: Checkpoint, tensor: int, elements: int, within: int = 0) -> Iterator[Tensor]:
    """Yields the elements of a tensor on CPU, in row-major order, so many at a time. In object storage, where requests run at
    once, about SPAN_BYTES are read together.

    Args:
        tensor: its index in the manifest.
        within: number of elements of equal parts of the tensor, of which each chunk has one only; 0 for one part.

    Raises:
        CheckpointError: they cannot be read.
    """
    manifest = checkpoint.manifest
    dtype, count = manifest.dtypes[tensor], prod(manifest.shapes[tensor])
    span = SPAN_BYTES // dtype.itemsize if manifest.in_object_storage else 1
    begin, end, within = 0, 0, within or count
    while begin < count:
        lengths = []
        while end < min(begin + span, count):
            lengths.append(min(elements, within - end % within))
            end += lengths[-1]
        buffer = torch.empty((end - begin) * dtype.itemsize, dtype=torch.uint8, device="cpu")
        checkpoint.fill(buffer, [Piece(tensor, begin * dtype.itemsize, 0, len(buffer))])
        yield from torch.split(buffer.view(dtype), lengths)
        begin = end
