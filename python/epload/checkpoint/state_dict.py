"""State dicts as checkpoints: tensors in memory or memory-mapped, of which no more than the wanted piece is copied."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from epload.checkpoint.base import Checkpoint
from epload.checkpoint.byte_store import ByteStore
from epload.checkpoint.manifest import Manifest
from epload.core import dtypes
from epload.core.copy_table import CopyTable
from epload.core.pieces import Piece, Pieces, Quantization
from epload.core.placement import Box, box_of_range, box_slices, boxes_of_range, row_major_strides
from epload.core.regions import Regions
from epload.errors import CheckpointError
from epload.native import ops

STATE_DICT = "state dict"
"""The source of a checkpoint in memory, for messages."""
_MAX_SHOWN = 10


def split_entries(state: Mapping[Any, Any], source: str) -> tuple[dict[str, Tensor], list[str]]:
    """The tensors of a state dict, and the names of its other entries. An empty dict is a state dict without tensors.

    Raises:
        CheckpointError: there are entries, but no tensors among them, or the name of a tensor is not a string.
    """
    tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
    if state and not tensors:
        keys = ", ".join(str(name)[:100] for name in list(state)[:_MAX_SHOWN])
        raise CheckpointError(
            f"{source}: no tensors found; top-level keys: {keys}{', ...' if len(state) > _MAX_SHOWN else ''}"
        )
    if (key := next((name for name in tensors if not isinstance(name, str)), None)) is not None:
        raise CheckpointError(f"{source}: expected a state dict whose keys are strings, got the key {key!r}")
    return tensors, [str(name) for name in state if name not in tensors]


class StateDictCheckpoint(Checkpoint):
    """Full tensors in memory, or memory-mapped from torch files."""

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        source: str = STATE_DICT,
        ignored: Sequence[str] = (),
        consumed: Mapping[Any, Any] | None = None,
        store: ByteStore | None = None,
    ) -> None:
        """
        Args:
            tensors: nothing but tensors, by name.
            source: where they are from, for error messages.
            ignored: names of entries that hold no tensor.
            consumed: the caller's state dict, if each tensor is to be released, and removed from a dict, once its last byte was
                read.
            store: the files that the tensors were loaded or mapped from; owned by the checkpoint from now on.

        Raises:
            CheckpointError: a tensor is sparse, quantized or on meta.
            TypeError: a tensor is a DTensor.
        """
        for name, tensor in tensors.items():
            if isinstance(tensor, DTensor):
                raise TypeError(f"expected a state dict of full tensors, but {name!r} is a {type(tensor).__name__}")
            if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta:
                raise CheckpointError(
                    f"{source}: {name} is not a dense tensor with data ({tensor.layout}, {tensor.device})"
                )
        self._tensors: dict[str, Tensor] = dict(tensors)
        self._consumed = consumed
        self.read_once = consumed is not None
        self._store = store
        self._names = tuple(tensors)
        self._manifest = Manifest(
            self._names,
            tuple(tuple(t.shape) for t in tensors.values()),
            tuple(t.dtype for t in tensors.values()),
            source,
            ignored=tuple(ignored),
        )
        self._dims = max((tensor.ndim for tensor in tensors.values()), default=0) or 1
        self._nbytes_read = [0] * len(self._names)

    @property
    def manifest(self) -> Manifest:
        return self._manifest

    def declare(self, quantization: Quantization | None) -> None:
        """Adds what a configuration next to the tensors declares to the manifest."""
        self._manifest = self._manifest.with_quantization(quantization)

    def tensor(self, index: int) -> Tensor | None:
        return self._tensors.get(self._names[index])

    def fill(self, bucket: Tensor, pieces: Sequence[Piece]) -> None:
        sources = []
        rows = []
        for i, piece in enumerate(pieces):
            name = self._names[piece.tensor]
            if name not in self._tensors:
                raise CheckpointError(f"{name} was consumed by an earlier load")
            tensor, (start, size) = _source_box(self._tensors[name].detach(), piece, bucket.device)
            padding = [0] * (self._dims - tensor.ndim)
            row = [i, piece.bucket_offset, dtypes.code(tensor.dtype), tensor.ndim]
            rows.append([*row, *start, *padding, *size, *padding, *row_major_strides(size), *padding])
            sources.append(tensor)
        if rows:
            ops.pack(bucket, sources, torch.tensor(rows, dtype=torch.int64))
        if self._consumed is not None:
            self._release(pieces, self._consumed)

    def fill_on_device(self, bucket: Tensor, pieces: Sequence[Piece], pipe: ops.Pipe) -> bool:
        columns = Pieces.of(pieces).columns
        sources, origins = [], columns.new_empty(len(columns), 2)
        for i, piece in enumerate(pieces):
            tensor = self._tensors.get(self._names[piece.tensor])
            if tensor is None:
                raise CheckpointError(f"{self._names[piece.tensor]} was consumed by an earlier load")
            source, begin = _bytes_of(tensor), piece.tensor_offset
            if source is None:
                source, ((begin,), _) = _copied(tensor.detach(), piece, torch.device("cpu"))
            origins[i, 0], origins[i, 1] = i, begin
            sources.append(source)
        ops.upload(sources, origins, [bucket], CopyTable.of_bytes(columns[:, 2], columns[:, 3]).rows, pipe)
        if self._consumed is not None:
            self._release(pieces, self._consumed)
        return True

    def read_regions(self, regions: Regions) -> int | None:
        if regions.pipe is None or self._consumed is not None:
            return None
        which, tensor = torch.unique(regions.origins[:, 0], return_inverse=True)
        sources = [_bytes_of(self._tensors[self._names[i]]) for i in which.tolist()]
        if any(source is None for source in sources):
            return None
        origins = torch.stack([tensor, regions.origins[:, 1]], 1)
        ops.upload(sources, origins, regions.targets, regions.copies.rows, regions.pipe)  # type: ignore[arg-type]
        return int(regions.copies.nbytes().sum())

    def _release(self, pieces: Sequence[Piece], consumed: Mapping[Any, Any]) -> None:
        for piece in pieces:
            name = self._names[piece.tensor]
            # A piece at the start of a tensor whose first bytes were read before: that load failed, and this is another.
            before = self._nbytes_read[piece.tensor] if piece.tensor_offset else 0
            self._nbytes_read[piece.tensor] = before + piece.nbytes
            if self._nbytes_read[piece.tensor] == self._tensors[name].nbytes:
                del self._tensors[name]
                if isinstance(consumed, dict):
                    consumed.pop(name, None)


def _bytes_of(tensor: Tensor) -> Tensor | None:
    """Returns the memory of a tensor as bytes, if it is on CPU and holds its elements in order."""
    if not tensor.is_cpu or not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        return None
    return tensor.detach().view(-1).view(torch.uint8)


def _source_box(tensor: Tensor, piece: Piece, device: torch.device) -> tuple[Tensor, Box]:
    """A tensor on ``device``, and the box in it that is a piece of ``tensor``. Copies no more than the piece."""
    if tensor.device == device and not (tensor.is_conj() or tensor.is_neg()):
        if tensor.is_contiguous():
            return tensor.view(-1).view(torch.uint8), ((piece.tensor_offset,), (piece.nbytes,))
        if (box := _box_of_piece(tensor, piece)) is not None:
            return tensor, box
    return _copied(tensor, piece, device)


def _copied(tensor: Tensor, piece: Piece, device: torch.device) -> tuple[Tensor, Box]:
    """A copy of a piece on a device, as bytes, and where in it the piece is."""
    item = tensor.element_size()
    begin, end = piece.tensor_offset // item, -(-(piece.tensor_offset + piece.nbytes) // item)
    if tensor.is_contiguous():
        boxes = [tensor.view(-1)[begin:end]]
    else:
        boxes = [tensor[box_slices(*box)] for box in boxes_of_range(tuple(tensor.shape), begin, end)]
    parts = [box.resolve_conj().resolve_neg().to(device).reshape(-1) for box in boxes]
    copied = (torch.cat(parts) if len(parts) > 1 else parts[0]).view(torch.uint8)
    return copied, ((piece.tensor_offset - begin * item,), (piece.nbytes,))


def _box_of_piece(tensor: Tensor, piece: Piece) -> Box | None:
    """The box of its tensor that a piece covers, which needs no copy; None if it does not cover exactly a box."""
    item = tensor.element_size()
    start, size = box_of_range(tensor.shape, piece.tensor_offset // item, piece.nbytes // item)
    inside = all(a + n <= length for a, n, length in zip(start, size, tensor.shape, strict=True))
    whole = piece.tensor_offset % item == 0 and prod(size) * item == piece.nbytes
    return (start, size) if inside and whole else None
