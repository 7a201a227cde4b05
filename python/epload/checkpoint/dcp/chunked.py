"""Manifests of tensors that are stored in chunks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import combinations, pairwise, product
from math import prod

import torch

from epload.checkpoint.byte_store import ByteStore, StoredFile
from epload.checkpoint.dcp import payload
from epload.checkpoint.dcp.metadata import DcpMetadata
from epload.checkpoint.dcp.selection import select
from epload.checkpoint.manifest import FileFacts, FileLayout, Manifest, TensorLocations
from epload.core.chunks import Chunks
from epload.core.placement import Box, intersect
from epload.errors import CheckpointError


@dataclass
class _Tensor:
    """A tensor, and where each of its chunks is."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    boxes: list[Box] = field(default_factory=list)
    places: list[tuple[int, int]] = field(default_factory=list)
    """File and offset of each box."""


def of_metadata(
    metadata: DcpMetadata, store: ByteStore, facts: Sequence[FileFacts], source: str, digest: str, prefix: str
) -> Manifest:
    """The manifest of the model in a folder with ``.metadata``.

    Args:
        store: of all files that the metadata names.
        facts: of these files.
        digest: of the metadata and the prefix.
        prefix: see :func:`epload.checkpoint.dcp.selection.select`.

    Raises:
        CheckpointError: chunks are missing, or overlap, or are not in their files.
        OSError: a file cannot be read.
    """
    selected = select([saved.name for saved in metadata.tensors], metadata.paths, prefix, source)
    number_of = {file.name: i for i, file in enumerate(store.files)}
    items: list[payload.Item] = []
    found: dict[str, _Tensor] = {}
    for saved in metadata.tensors:
        if saved.name not in selected.names:
            continue
        tensor = found[selected.names[saved.name]] = _Tensor(saved.shape, saved.dtype)
        for start, size in dict.fromkeys(saved.boxes):
            if len(start) != len(saved.shape) or len(size) != len(saved.shape):
                raise CheckpointError(f"{source}: {saved.name} of shape {list(saved.shape)} has a chunk of other dims")
            if 0 in size:
                continue
            item = metadata.items.get((saved.name, start))
            if item is None:
                raise CheckpointError(
                    f"{source}: no file has the chunk of {saved.name} at {list(start)}; save it again"
                )
            tensor.boxes.append((start, size))
            items.append(payload.Item(saved.name, size, saved.dtype, number_of[item.file], item.offset, item.length))
    _check_covered(found, source)
    offsets = iter(zip(items, payload.locate(items, store), strict=True))
    for tensor in found.values():
        tensor.places += [(item.file, offset) for item, offset in (next(offsets) for _ in tensor.boxes)]
    # Entries in the model that are no tensors, such as _extra_state.
    beside = [*selected.others, *(name for name in metadata.others if name not in selected.others)]
    inside = {name.rpartition(".")[0] for name in selected.names}
    ignored = [key for key in beside if key in selected.others or key.rpartition(".")[0] in inside]
    return _manifest(found, facts, source, digest, ignored)


def of_shards(
    files: Sequence[StoredFile], layouts: Sequence[FileLayout], facts: Sequence[FileFacts], source: str
) -> Manifest:
    """The manifest of safetensors files that each have one rank's parts of tensors.

    Raises:
        CheckpointError: parts are missing or overlap, or differ in what they are parts of.
    """
    found: dict[str, _Tensor] = {}
    for number, (file, layout) in enumerate(zip(files, layouts, strict=True)):
        for i in layout.order:
            name, dtype, size = layout.names[i], layout.dtypes[i], layout.shapes[i]
            start = layout.parts[i] if layout.parts is not None else (0,) * len(size)
            tensor = found.setdefault(name, _Tensor(size, dtype))
            if len(start) != len(size) or len(size) != len(tensor.shape) or dtype != tensor.dtype:
                raise CheckpointError(f"{file}: {name} has other dims or another dtype than its part in another file")
            tensor.shape = tuple(max(n, a + b) for n, a, b in zip(tensor.shape, start, size, strict=True))
            if 0 not in size:
                tensor.boxes.append((start, size))
                tensor.places.append((number, layout.offsets[i]))
    _check_covered(found, source)
    return _manifest(found, facts, source, "", ())


def _manifest(
    found: dict[str, _Tensor], facts: Sequence[FileFacts], source: str, digest: str, ignored: Sequence[str]
) -> Manifest:
    names = sorted(found, key=lambda name: found[name].places[:1])
    tensors = [found[name] for name in names]
    places = torch.tensor([place for tensor in tensors for place in tensor.places], dtype=torch.int64).reshape(-1, 2)
    shapes, kinds = tuple(tensor.shape for tensor in tensors), tuple(tensor.dtype for tensor in tensors)
    chunks = None
    if any(len(tensor.boxes) != 1 for tensor in tensors):
        chunks = Chunks.of(shapes, [dtype.itemsize for dtype in kinds], [tensor.boxes for tensor in tensors])
    file, offset = places.T.contiguous()
    locations = TensorLocations(tuple(facts), file, offset, digest, chunks)
    return Manifest(tuple(names), shapes, kinds, source, locations, tuple(ignored))


def _check_covered(found: dict[str, _Tensor], source: str) -> None:
    """Raises CheckpointError if the chunks of a tensor do not cover it exactly once."""
    checked: set[tuple[object, ...]] = set()
    for name, tensor in found.items():
        key = (tensor.shape, *tensor.boxes)
        if key not in checked and (wrong := _uncovered(tensor.shape, tensor.boxes)):
            raise CheckpointError(f"{source}: {name} of shape {list(tensor.shape)} {wrong}")
        checked.add(key)


def _uncovered(shape: tuple[int, ...], boxes: Sequence[Box]) -> str:
    """Returns why boxes do not cover a shape exactly once; empty if they do."""
    for start, size in boxes:
        if any(a + n > length for a, n, length in zip(start, size, shape, strict=True)):
            return f"has a chunk at {list(start)} of {list(size)}, which reaches outside"
    covered = sum(prod(size) for _, size in boxes)
    if covered < prod(shape):
        return (
            f"has chunks for only {covered} of its {prod(shape)} elements: files are missing, or it was not saved whole"
        )
    if covered == prod(shape) and _is_grid(boxes):
        return ""
    for a, b in combinations(boxes, 2):
        if intersect(a, b) is not None:
            return f"has chunks at {list(a[0])} and {list(b[0])} that overlap"
    return ""


def _is_grid(boxes: Sequence[Box]) -> bool:
    """Returns True if boxes are all combinations of intervals of each dim that do not overlap."""
    if not boxes:
        return True
    per_dim = [sorted({(start[d], size[d]) for start, size in boxes}) for d in range(len(boxes[0][0]))]
    if any(a + n > b for intervals in per_dim for (a, n), (b, _) in pairwise(intervals)):
        return False
    return len(boxes) == len(set(boxes)) == prod(map(len, per_dim)) and {
        tuple(zip(*box, strict=True)) for box in boxes
    } == set(product(*per_dim))
