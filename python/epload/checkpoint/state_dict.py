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
from epload.core.columns import arange, column
from epload.core.copy_table import CopyTable, byte_view
from epload.core.pieces import Piece, Pieces
from epload.core.placement import box_slices
from epload.core.views import View
from epload.errors import CheckpointError
from epload.native import ops
from epload.observe.render import list_first

STATE_DICT = "state dict"
"""The source of a checkpoint in memory, for messages."""


def split_entries(state: Mapping[Any, Any], source: str) -> tuple[dict[str, Tensor], list[str]]:
    """Returns the tensors of a state dict, and the names of its other entries. An empty dict is a state dict without tensors.
    Raises CheckpointError if there are entries, but no tensors among them, or the name of a tensor is not a string."""
    tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
    others = [str(name) for name in state if name not in tensors]
    if others and not tensors:
        raise CheckpointError(f"{source}: no tensors found; top-level keys: {list_first([name[:100] for name in others])}")
    for name in tensors:
        if not isinstance(name, str):
            raise CheckpointError(f"{source}: expected a state dict whose keys are strings, got the key {name!r}")
    return tensors, others


class StateDictCheckpoint(Checkpoint):
    """Full tensors in memory, or memory-mapped from torch files."""

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        source: str = STATE_DICT,
        ignored: Sequence[str] = (),
        store: ByteStore | None = None,
    ) -> None:
        """
        Args:
            tensors: nothing but tensors, by name.
            source: where they are from, for error messages.
            ignored: names of entries that hold no tensor.
            store: the files that the tensors were loaded or mapped from; owned by the checkpoint from now on.

        Raises:
            CheckpointError: a tensor is sparse, quantized or on meta, or of a class whose elements cannot be read as bytes.
            TypeError: a tensor is a DTensor.
        """
        for name, tensor in tensors.items():
            if isinstance(tensor, DTensor):
                raise TypeError(f"expected a state dict of full tensors, but {name!r} is a {type(tensor).__name__}")
            nested = "nested, " if tensor.is_nested else ""
            if nested or tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta:
                raise CheckpointError(
                    f"{source}: {name} is not a dense tensor with data ({nested}{tensor.layout}, {tensor.device})"
                )
            if type(tensor) not in (Tensor, torch.nn.Parameter) and tensor.numel() and not _is_readable(tensor):
                raise CheckpointError(
                    f"{source}: {name} is a {type(tensor).__name__}, whose elements cannot be read as bytes; dequantize or "
                    "unwrap it first"
                )
        self._tensors = list(tensors.values())
        self._store = store
        shapes = tuple(tuple(tensor.shape) for tensor in tensors.values())
        dtypes = tuple(tensor.dtype for tensor in tensors.values())
        self._manifest = Manifest(tuple(tensors), shapes, dtypes, source, ignored=tuple(ignored))

    @property
    def manifest(self) -> Manifest:
        return self._manifest

    def tensor(self, index: int) -> Tensor:
        return self._tensors[index]

    def fill(self, bucket: Tensor, pieces: Sequence[Piece]) -> None:
        self._copy(bucket, pieces, None)

    def fill_on_device(self, bucket: Tensor, pieces: Sequence[Piece], pipe: ops.Pipe) -> bool:
        self._copy(bucket, pieces, pipe)
        return True

    def _copy(self, bucket: Tensor, pieces: Sequence[Piece], pipe: ops.Pipe | None) -> None:
        """Copies pieces from bytes on CPU that have them, each from where it begins there."""
        sources, begins = [], []
        for piece in pieces:
            tensor, begin = self._tensors[piece.tensor], piece.tensor_offset
            if (source := _bytes_of(tensor)) is None:
                source, begin = _copied(tensor.detach(), piece)
            sources.append(source)
            begins.append(begin)
        columns, number, begin_of = Pieces.of(pieces).columns, arange(len(sources)), column(begins)
        copies = CopyTable.of_bytes(columns[:, 2], columns[:, 3])
        if pipe is not None:
            ops.upload(sources, torch.stack([number, begin_of], 1), [bucket], copies.rows, pipe)
        elif sources:
            copies.target.copy_(number)
            copies.start.copy_(begin_of[:, None])
            ops.pack(bucket, sources, copies.rows)


def _bytes_of(tensor: Tensor) -> Tensor | None:
    """Returns the memory of a tensor as bytes, if it is on CPU and holds its elements in order."""
    if not tensor.is_cpu or not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        return None
    return byte_view(tensor.detach())


def _is_readable(tensor: Tensor) -> bool:
    """Returns False for a tensor of a class of its own whose first element cannot be read."""
    try:
        if _bytes_of(tensor) is None:
            _copied(tensor.detach(), Piece(0, 0, 0, tensor.element_size()))
    except (RuntimeError, TypeError):
        return False
    return True


def _copied(tensor: Tensor, piece: Piece) -> tuple[Tensor, int]:
    """Returns a copy of a piece on CPU, as bytes, and where in it the piece is. Copies no more than whole elements."""
    item = tensor.element_size()
    begin, end = piece.tensor_offset // item, -(-(piece.tensor_offset + piece.nbytes) // item)
    views = View.whole(tuple(tensor.shape)).within(begin, end)
    boxes = (tensor[box_slices(view.start, view.size)] for view in views)
    parts = [box.resolve_conj().resolve_neg().cpu().reshape(-1) for box in boxes]
    return torch.cat(parts).view(torch.uint8), piece.tensor_offset - begin * item
