"""State dicts as checkpoints: tensors in memory or memory-mapped, of which no more than a piece is copied."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from epload.checkpoint.base import Checkpoint
from epload.checkpoint.byte_store import ByteStore
from epload.checkpoint.manifest import Manifest
from epload.core.columns import arange
from epload.core.copy_table import CopyTable
from epload.core.pieces import Piece, Pieces, Quantization
from epload.core.placement import box_slices
from epload.core.regions import Regions
from epload.core.views import View
from epload.errors import CheckpointError
from epload.native import ops

STATE_DICT = "state dict"
"""The source of a checkpoint in memory, for messages."""
_MAX_SHOWN = 10


def split_entries(state: Mapping[Any, Any], source: str) -> tuple[dict[str, Tensor], list[str]]:
    """Returns the tensors of a state dict, and the names of its other entries. An empty dict is a state dict without tensors.

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
        columns = Pieces.of(pieces).columns
        sources, origins = self._sources(pieces)
        copies = CopyTable.of_bytes(columns[:, 2], columns[:, 3])
        copies.target.copy_(arange(len(pieces)))
        copies.start.copy_(origins[:, 1:])
        if sources:
            ops.pack(bucket, sources, copies.rows)
        self._release(pieces)

    def fill_on_device(self, bucket: Tensor, pieces: Sequence[Piece], pipe: ops.Pipe) -> bool:
        columns = Pieces.of(pieces).columns
        sources, origins = self._sources(pieces)
        ops.upload(sources, origins, [bucket], CopyTable.of_bytes(columns[:, 2], columns[:, 3]).rows, pipe)
        self._release(pieces)
        return True

    def _sources(self, pieces: Sequence[Piece]) -> tuple[list[Tensor], Tensor]:
        """Returns bytes on CPU that have each piece, and int64 [n, 2]: the number of a piece, and where in them it begins."""
        sources, origins = [], []
        for i, piece in enumerate(pieces):
            if (tensor := self._tensors.get(self._names[piece.tensor])) is None:
                raise CheckpointError(f"{self._names[piece.tensor]} was consumed by an earlier load")
            source, begin = _bytes_of(tensor), piece.tensor_offset
            if source is None:
                source, begin = _copied(tensor.detach(), piece)
            sources.append(source)
            origins.append([i, begin])
        return sources, torch.tensor(origins, dtype=torch.int64, device="cpu").reshape(-1, 2)

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

    def _release(self, pieces: Sequence[Piece]) -> None:
        """Drops the tensors that have been read, if the caller's state dict is consumed."""
        for piece in pieces if self._consumed is not None else ():
            name = self._names[piece.tensor]
            # A piece at the start of a tensor whose first bytes were read before: that load failed, and this is another.
            before = self._nbytes_read[piece.tensor] if piece.tensor_offset else 0
            self._nbytes_read[piece.tensor] = before + piece.nbytes
            if self._nbytes_read[piece.tensor] == self._tensors[name].nbytes:
                del self._tensors[name]
                if isinstance(self._consumed, dict):
                    self._consumed.pop(name, None)


def _bytes_of(tensor: Tensor) -> Tensor | None:
    """Returns the memory of a tensor as bytes, if it is on CPU and holds its elements in order."""
    if not tensor.is_cpu or not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        return None
    return tensor.detach().view(-1).view(torch.uint8)


def _copied(tensor: Tensor, piece: Piece) -> tuple[Tensor, int]:
    """Returns a copy of a piece on CPU, as bytes, and where in it the piece is. Copies no more than whole elements."""
    item = tensor.element_size()
    begin, end = piece.tensor_offset // item, -(-(piece.tensor_offset + piece.nbytes) // item)
    if tensor.is_contiguous():
        boxes = [tensor.view(-1)[begin:end]]
    else:
        views = View.whole(tuple(tensor.shape)).within(begin, end)
        boxes = [tensor[box_slices(view.start, view.size)] for view in views]
    parts = [box.resolve_conj().resolve_neg().cpu().reshape(-1) for box in boxes]
    copied = (torch.cat(parts) if len(parts) > 1 else parts[0].contiguous()).view(torch.uint8)
    return copied, piece.tensor_offset - begin * item
