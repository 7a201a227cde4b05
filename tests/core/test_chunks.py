"""Checkpoints whose tensors lie in chunks that form no grid, against the tensors themselves."""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from random import Random

import torch
from torch import Tensor
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import epload
from support import ranks
from support.checkpoints import tensor
from support.checks import all_fine, as_bytes, local_of

SHAPES = ((7, 5), (9,), (), (3, 4, 5), (1, 6, 1, 2), (2, 1, 8))
KINDS = (torch.float32, torch.bfloat16, torch.uint8, torch.float64)
Box = tuple[tuple[int, ...], tuple[int, ...]]


def divided(random: Random, start: tuple[int, ...], size: tuple[int, ...], depth: int = 3) -> list[Box]:
    """Boxes that need not form a grid."""
    dims = [dim for dim, length in enumerate(size) if length > 1]
    if not dims or not depth or random.random() < 0.2:
        return [(start, size)]
    dim = random.choice(dims)
    cut = random.randint(1, size[dim] - 1)
    upper = (*start[:dim], start[dim] + cut, *start[dim + 1 :])
    sizes = [(*size[:dim], length, *size[dim + 1 :]) for length in (cut, size[dim] - cut)]
    return [*divided(random, start, sizes[0], depth - 1), *divided(random, upper, sizes[1], depth - 1)]


def values() -> dict[str, Tensor]:
    return {f"t{i}": tensor(i, shape, KINDS[i % len(KINDS)]) for i, shape in enumerate(SHAPES)}


def save(folder: Path, seed: int) -> None:
    """Writes a DCP checkpoint with chunks in two files, in any order and with gaps."""
    folder.mkdir()
    random = Random(seed)
    metadata, storage = {}, {}
    files = {f"__{rank}_0.distcp": bytearray() for rank in range(2)}
    boxes = {name: divided(random, (0,) * value.ndim, tuple(value.shape)) for name, value in values().items()}
    for name, value in values().items():
        chunks = [dcp.ChunkStorageMetadata(torch.Size(start), torch.Size(size)) for start, size in boxes[name]]
        metadata[name] = dcp.TensorStorageMetadata(dcp.TensorProperties(value.dtype), value.size(), chunks)
    parts = [(name, box) for name, of_tensor in boxes.items() for box in of_tensor]
    for name, (start, size) in random.sample(parts, len(parts)):
        file = random.choice(sorted(files))
        part = values()[name][tuple(slice(at, at + length) for at, length in zip(start, size, strict=True))]
        torch.save(part.clone(), raw := io.BytesIO())
        files[file] += b"y" * random.randrange(3)
        storage[dcp.MetadataIndex(name, start)] = _StorageInfo(file, len(files[file]), len(raw.getvalue()))
        files[file] += raw.getvalue()
    for file, content in files.items():
        (folder / file).write_bytes(content)
    (folder / ".metadata").write_bytes(pickle.dumps(dcp.Metadata(metadata, storage_data=storage)))


def load(rank: int, folder: Path) -> list[str]:
    problems = []
    mesh = init_device_mesh("cpu", (3,))
    for number, path in enumerate(sorted(folder.iterdir())):
        for readers in ("every", "partitioned"):
            shards, target = {}, {}
            for i, (name, value) in enumerate(values().items()):
                dim = (i + number) % (value.ndim + 1)
                placements = [Shard(dim) if dim < value.ndim else Replicate()]
                shards[name] = local_of(distribute_tensor(value, mesh, placements, src_data_rank=None))
                target[name] = distribute_tensor(torch.zeros_like(value), mesh, placements, src_data_rank=None)
            epload.load_state(target, path, readers=readers, progress=False)
            found = {name: as_bytes(local_of(tensor)) for name, tensor in target.items()}
            wrong = [name for name, shard in shards.items() if not torch.equal(found[name], as_bytes(shard))]
            problems += [f"{path.name}, {readers}: {name}" for name in wrong]
    return problems


def test_tensors_in_any_chunks(tmp_path: Path) -> None:
    for seed in range(20):
        save(tmp_path / str(seed), seed)
    all_fine(ranks.run(3, load, tmp_path))
