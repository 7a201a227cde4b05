"""A storage reader for ``torch.distributed.checkpoint`` (DCP): ``dcp.load`` reads files natively, without a copy."""

from __future__ import annotations

import os
import pickle
from collections import UserList
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    STORAGE_TYPES,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader as TorchStorageReader
from torch.distributed.tensor import DTensor
from torch.futures import Future

from epload.checkpoint import dcp
from epload.checkpoint.base import Checkpoint, read_tensor, regions_of_boxes
from epload.checkpoint.file_sets import DCP, DCP_ROOT
from epload.checkpoint.finding import unreadable
from epload.checkpoint.local_store import LocalStore
from epload.checkpoint.manifest import FileFacts, Manifest, OpenFiles
from epload.checkpoint.quantization import quantized_with
from epload.core import dtypes
from epload.core.default_device import on_cpu
from epload.core.placement import Box, owned_regions
from epload.errors import CheckpointError, ModelMismatch
from epload.mapping.scales import Scaling, dequantize, scaling_of_box
from epload.model.dtensor import layout_of
from epload.model.memory import keeps_writes

_READ_BYTES = 64 << 20
"""Read at a time, and so the size of the buffer for tensors that are not on CPU."""
_ScaledItem = tuple[ReadItem, tuple[int, Scaling] | None]
"""An item, and, if it is multiplied by a scale, the number of that tensor and how."""


class StorageReader(TorchStorageReader):
    """Reads checkpoints for ``dcp.load``: safetensors files as ``HuggingFaceStorageReader`` does, and DCP's own folders as
    ``FileSystemReader`` does, with the same result, planners and collectives. What each rank keeps goes from the files into its
    tensors directly, in large parallel reads. Tensors are converted to the dtype that they are loaded into. fp8 weights are
    multiplied by their scales, as by ``QuantizedHuggingFaceStorageReader``, unless they stay in fp8.

    Entries of a DCP folder that are no tensors are read by torch's own reader, which unpickles them.

    Example::

        import torch.distributed.checkpoint as dcp
        from epload.integrations.dcp import StorageReader

        state = model.state_dict()
        dcp.load(state, storage_reader=StorageReader("/checkpoints/Qwen3-30B-A3B"))
    """

    def __init__(self, path: str | os.PathLike[str] | None = None) -> None:
        """``path``: a local DCP folder, or a safetensors checkpoint wherever :func:`epload.load` finds one. None if ``dcp.load``
        gets it as ``checkpoint_id``."""
        self._path = path
        self._checkpoint: Checkpoint | None = None
        self._number_of: dict[str, int] = {}
        """Number of each tensor in the manifest, by name."""
        self._planned: _PickledItems | None = None
        """The items that this rank's planner asks for."""

    # ---- what dcp.load calls, in this order ----

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id is not None:
            self._path = checkpoint_id
        self._close()

    @on_cpu
    def read_metadata(self) -> Metadata:  # with rank=, torch would go on without the other ranks
        """Describes every tensor as one chunk: in which parts of which files it is, only this reader needs to know.

        Raises:
            CheckpointError: there is nothing readable, or it is malformed.
            ValueError: no path was given.
        """
        if self._path is None:
            raise ValueError("expected a path: pass it to StorageReader(path), or as checkpoint_id= to dcp.load")
        self._close()
        self._checkpoint, others, paths = _open(self._path)
        manifest = self._checkpoint.manifest
        self._number_of = {name: number for number, name in enumerate(manifest.names)}
        entries: dict[str, STORAGE_TYPES] = {name: BytesStorageMetadata() for name in others}
        for name, shape, dtype in zip(manifest.names, manifest.shapes, manifest.dtypes, strict=True):
            size, origin = torch.Size(shape), torch.Size([0] * len(shape))
            chunks = [ChunkStorageMetadata(origin, size)]
            entries[name] = TensorStorageMetadata(TensorProperties(dtype=dtype), size, chunks)
        return Metadata(entries, planner_data={name: path for name, path in paths.items() if name in entries} or None)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        self._planned = _PickledItems(list(plan.items))
        return replace(plan, items=self._planned)  # type: ignore[arg-type]  # a list but by inheritance

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    @on_cpu
    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """
        Raises:
            CheckpointError: a file cannot be read, or has changed since it was opened.
            ModelMismatch: an fp8 weight has no scale that applies, a weight is quantized in another way, or a rank has rows of a
                tensor that are apart. Nothing is read.
        """
        assert self._checkpoint is not None
        _check_boxes(getattr(planner, "state_dict", None) or {})
        items, planned = plan.items, self._planned
        if isinstance(items, _PickledItems) and items.items is None and planned and items.pickled == planned.pickled:
            items = planned.data  # which nobody has looked at
        objects, batches, room = [], list[list[_ScaledItem]](), 0
        for item in items:
            if item.type == LoadItemType.BYTE_IO:
                objects.append(item)
            elif 0 not in item.lengths:
                if room <= 0:
                    batches.append([])
                    room = _READ_BYTES
                scaling = None
                number = self._number_of[item.storage_index.fqn]
                dtype = self._checkpoint.manifest.dtypes[number]
                room -= prod(item.lengths) * dtype.itemsize
                if dtype in (*dtypes.FP8, *dtypes.INTEGERS) and (into := planner.resolve_tensor(item).dtype) != dtype:
                    manifest = self._checkpoint.manifest
                    if dtype in dtypes.FP8:
                        scaling = scaling_of_box(manifest, self._number_of, number, _box_of(item), into)
                    elif into.is_floating_point:
                        _check_not_packed(manifest, number, into)
                batches[-1].append((item, scaling))
        for batch in batches:
            self._read(self._checkpoint, batch, planner)
        if changed := self._checkpoint.changed():
            raise CheckpointError(f"{changed} while it was loaded; tensors may be partly overwritten")
        self._close()
        if objects:
            assert self._path is not None
            reader = FileSystemReader(self._path)
            reader.set_up_storage_reader(reader.read_metadata(), False)
            return reader.read_data(LoadPlan(objects), planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return Path(checkpoint_id).exists()

    def _read(self, checkpoint: Checkpoint, items: Sequence[_ScaledItem], planner: LoadPlanner) -> None:
        """Reads the boxes of the checkpoint's tensors that some items ask for, and multiplies fp8 weights by their scales."""
        tensors, targets, boxes = [], [], []
        for item, scaled in items:
            tensor = planner.resolve_tensor(item).detach()
            if tensor.shape != torch.Size(item.lengths):
                raise ValueError(
                    f"{item.dest_index.fqn}: expected the planner to give a tensor of shape {list(item.lengths)}, got "
                    f"{list(tensor.shape)}"
                )
            tensors.append(tensor)
            # Weights are not scaled where they are: one tensor may have several names.
            in_place = tensor.is_cpu and keeps_writes(tensor) and scaled is None
            targets.append(tensor if in_place else torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu"))
            boxes.append((self._number_of[item.storage_index.fqn], _box_of(item)))
        if checkpoint.read_regions(regions_of_boxes(checkpoint.manifest, boxes, targets)) is None:
            raise CheckpointError(f"{checkpoint.manifest.source}: its tensors are no byte ranges of files")
        for (item, scaled), tensor, target in zip(items, tensors, targets, strict=True):
            if scaled is not None:
                scale, scaling = scaled
                dequantize(scaling, target, read_tensor(checkpoint, scale).reshape(scaling.counts))
            if tensor is not target:
                tensor.copy_(target)
            planner.commit_tensor(item, tensor)

    def _close(self) -> None:
        self._planned = None
        if self._checkpoint is not None:
            self._checkpoint.close()


class _PickledItems(UserList[ReadItem]):
    """The items of a plan, which travel to the coordinating rank and back without being unpickled if no planner looks at them:
    that takes 2 seconds for 20,000 items, for each rank of the job."""

    def __init__(self, items: list[ReadItem] | None = None, pickled: bytes = b"") -> None:
        self.items = items
        self.pickled = pickled

    @property
    def data(self) -> list[ReadItem]:  # type: ignore[override]
        if self.items is None:
            self.items = pickle.loads(self.pickled)
        return self.items

    def __reduce__(self) -> tuple[type[_PickledItems], tuple[None, bytes]]:
        if self.items is not None:
            self.pickled = pickle.dumps(self.items)
        return _PickledItems, (None, self.pickled)


def _check_not_packed(manifest: Manifest, number: int, into: torch.dtype) -> None:
    """Raises ModelMismatch if a tensor of integers is a quantized weight, which has scales or the like next to it."""
    name, stored = manifest.names[number], manifest.dtypes[number]
    beside = quantized_with(manifest.names, manifest.dtypes, manifest.shapes)
    if (companion := next((other for other, weight in beside.items() if weight == name), None)) is not None:
        raise ModelMismatch(
            f"{name} is {dtypes.name(stored)} in the checkpoint, a quantized weight that {companion} belongs to, and "
            f"{dtypes.name(into)} in the state dict: pass a checkpoint that was dequantized"
        )


def _box_of(item: ReadItem) -> Box:
    return tuple(item.storage_offsets), tuple(item.lengths)


def _open(path: str | os.PathLike[str]) -> tuple[Checkpoint, list[str], dict[str, tuple[str | int, ...]]]:
    """Returns the checkpoint, the names of its entries that are no tensors, and the keys of entries in the nested state dict.

    Names in a DCP folder are as they were saved, with the keys of the state dict that the entries were in.
    """
    root = Path(path).expanduser()
    if not (root / DCP).is_file():
        return Checkpoint.open(path), [], {}
    store = LocalStore(root)
    try:
        index = dcp.DcpIndex(store.open_description(DCP), DCP_ROOT)
        facts = list(map(FileFacts.of, store.open(index.file_names)))
        return dcp.read(OpenFiles(store, facts, str(store), index)), index.metadata.others, index.metadata.paths
    except OSError as error:
        raise unreadable(error) from error


def _check_boxes(state: Mapping[str, Any]) -> None:
    """Raises ModelMismatch for a DTensor of which this rank has several parts, such as the rows of gate and up in a fused matrix:
    torch's planner takes them for consecutive ones."""
    for name, value in state.items():
        strided = isinstance(value, DTensor) and any(hasattr(placement, "split_factor") for placement in value.placements)
        if strided and len(owned_regions(*layout_of(name, value, in_module=False))) > 1:
            raise ModelMismatch(
                f"{name} has placements {value.placements}, which give this rank rows that are apart, and dcp.load would fill "
                "consecutive ones; redistribute it, or use epload.load"
            )
