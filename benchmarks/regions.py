"""The regions that one rank unpacks from each bucket of a large Mixture-of-Experts model, for several sharding layouts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from epload.core import dtypes


@dataclass(frozen=True)
class Model:
    """The shapes of Qwen3-30B-A3B (public config.json), with one weight per expert and projection."""

    layers: int = 48
    experts: int = 128
    hidden: int = 2048
    intermediate: int = 768
    heads: int = 32
    kv_heads: int = 4
    head_dim: int = 128
    vocabulary: int = 151936

    def shapes(self) -> Iterator[tuple[int, tuple[int, ...]]]:
        """Yields (expert index or -1, shape) of each weight in checkpoint order."""
        query, key = self.heads * self.head_dim, self.kv_heads * self.head_dim
        yield -1, (self.vocabulary, self.hidden)
        for _ in range(self.layers):
            for shape in ((query, self.hidden), (key, self.hidden), (key, self.hidden), (self.hidden, query)):
                yield -1, shape
            for length in (self.head_dim, self.head_dim, self.hidden, self.hidden):
                yield -1, (length,)
            yield -1, (self.experts, self.hidden)
            for expert in range(self.experts):
                yield expert, (self.intermediate, self.hidden)
                yield expert, (self.intermediate, self.hidden)
                yield expert, (self.hidden, self.intermediate)
        yield -1, (self.hidden,)
        yield -1, (self.vocabulary, self.hidden)


@dataclass
class Work:
    """One rank's shards and, for each bucket, a copy table with the shards it refers to."""

    shards: list[Tensor]
    buckets: list[tuple[list[Tensor], Tensor]]
    payload: int
    """Bytes copied into the shards."""

    @property
    def regions(self) -> int:
        return sum(len(table) for _, table in self.buckets)


LAYOUTS = ("Shard(0)", "Shard(1)", "EP x FSDP")


def ranges_of(layout: str, world: int, model: Model, expert: int, shape: tuple[int, ...]) -> list[tuple[int, int]] | None:
    """Rank 0's range in each dim; None if it owns nothing of the weight. EP uses half the ranks; the rest shard dim 0."""

    def first(extent: int, parts: int) -> tuple[int, int]:
        return 0, -(-extent // parts)

    whole = [(0, n) for n in shape]
    if layout == "Shard(1)" and len(shape) > 1:
        return [whole[0], first(shape[1], world)]
    if layout == "EP x FSDP" and expert >= 0:
        parallel = max(1, world // 2)
        if expert >= model.experts // parallel:
            return None
        return [first(shape[0], world // parallel), *whole[1:]]
    return [first(shape[0], world), *whole[1:]]


def work(layout: str, world: int, model: Model, bucket_bytes: int, dtype: torch.dtype, device: torch.device) -> Work:
    """Fills buckets with whole weights, splits larger weights between rows, and computes rank 0's regions of each."""
    done = Work([], [], 0)
    shards: list[Tensor] = []
    rows: list[list[int]] = []
    at = 0

    def close() -> None:
        nonlocal shards, rows, at
        if rows:
            done.buckets.append((shards, torch.tensor(rows, dtype=torch.int64)))
        shards, rows, at = [], [], 0

    for expert, shape in model.shapes():
        mine = ranges_of(layout, world, model, expert, shape)
        if mine is not None:
            done.shards.append(torch.zeros([end - begin for begin, end in mine], dtype=dtype, device=device))
        row_bytes = dtype.itemsize * (shape[1] if len(shape) > 1 else 1)
        begin = 0
        while begin < shape[0]:
            fitting = (bucket_bytes - at) // row_bytes
            if fitting < min(shape[0] - begin, bucket_bytes // row_bytes):
                close()
                continue
            end = min(shape[0], begin + fitting)
            if mine is not None and (low := max(begin, mine[0][0])) < (high := min(end, mine[0][1])):
                offset = at + (low - begin) * row_bytes
                start, size, stride = [low - mine[0][0], 0], [high - low, 1], [1, 1]
                if len(shape) > 1:
                    offset += mine[1][0] * dtype.itemsize
                    size[1], stride[0] = mine[1][1] - mine[1][0], shape[1]
                ndim = len(shape)
                rows.append([len(shards), offset, dtypes.code(dtype), ndim, *start, *size, *stride])
                shards.append(done.shards[-1])
                done.payload += size[0] * size[1] * dtype.itemsize
            at += -(-(end - begin) * row_bytes // 16) * 16
            begin = end
    close()
    return done


def wrong_regions(bucket: Tensor, part: tuple[list[Tensor], Tensor]) -> int:
    """The number of shard regions that differ from plain views of the bucket."""
    shards, table = part
    wrong = 0
    for row in table.tolist():
        index, offset, ndim = row[0], row[1], row[3]
        start, size, stride = row[4 : 4 + ndim], row[6 : 6 + ndim], row[8 : 8 + ndim]
        shard = shards[index]
        actual = shard
        for dim in range(ndim):
            actual = actual.narrow(dim, start[dim], size[dim])
        span = (1 + sum((n - 1) * s for n, s in zip(size, stride, strict=True))) * shard.element_size()
        raw = (
            bucket[offset : offset + span]
            .view(shard.dtype)
            .as_strided(size, stride, (bucket.storage_offset() + offset) // shard.element_size())
        )
        wrong += not torch.equal(actual.contiguous().view(torch.uint8), raw.contiguous().view(torch.uint8))
    return wrong
