"""Places the tensors of a Hugging Face checkpoint in Megatron's parameters: names, shapes and shards in, regions out. Pure.

All of a checkpoint's tensors are runs of rows of Megatron's. Only the fused queries, keys and values take several runs: for each
of the ``n`` query groups Megatron has the rows of its ``r`` query heads, then those of its key head, then those of its value head
(``SelfAttention.get_query_key_value_tensors``). Ranks divide these rows evenly, also within a group.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from epload.core.placement import row_major_strides
from epload.core.views import Loop, Shape, View, boxes_of_region
from epload.errors import ModelMismatch
from epload.mapping.megatron.names import PADDED, Names, alternatives
from epload.mapping.megatron.shards import MegatronShard
from epload.mapping.place import Place

MAX_PADDING = 1024
"""Rows that padding adds to a vocabulary at most on each rank; Megatron's default is less than 128."""


_Rows = tuple[int, int, int]
"""A run of rows of a checkpoint tensor and of a shard: the first in the tensor, the first in the shard, and their number."""


def place_shards(
    shards: Sequence[MegatronShard],
    tensors: Mapping[str, Tensor],
    config: Any,
    names: Sequence[str],
    shapes: Sequence[Shape],
) -> tuple[list[tuple[Place, ...]], dict[str, str]]:
    """Returns the places of each of a checkpoint's tensors in the parameters of one rank; and Megatron's names of which the
    checkpoint has none, each with the names that it might have.

    Args:
        tensors: this rank's parameters and buffers.
        config: Megatron's ``TransformerConfig``.
        names, shapes: of the checkpoint's tensors.

    Raises:
        ModelMismatch: Megatron has a tensor that the tables lack, or the checkpoint has it in another shape, in part, or under
            two names.
    """
    number_of = {name: i for i, name in enumerate(names)}
    placed: list[list[Place]] = [[] for _ in names]
    missing = {}
    views: dict[object, tuple[View, ...]] = {}
    for shard in shards:
        options = list(alternatives(shard.key, config.num_layers))
        if not options:
            raise ModelMismatch(
                f"Megatron's {shard.key} has no name in checkpoints; add it to LAYER or MODEL in epload.mapping.megatron.names"
            )
        present = [option for option in options if any(name in number_of for name in option)]
        if not present:
            missing[shard.key] = " or ".join(map(", ".join, options))
            continue
        if len(present) > 1 or (absent := [name for name in present[0] if name not in number_of]):
            problem = "has two names for" if len(present) > 1 else f"lacks {', '.join(absent)} of"
            raise ModelMismatch(f"the checkpoint {problem} Megatron's {shard.key}: {'; '.join(map(', '.join, present))}")
        tensor = tensors[shard.target]
        layout = tuple(tensor.shape), tensor.stride()
        for name, rows in _rows_of(shard, present[0], config, {name: shapes[number_of[name]] for name in present[0]}):
            number = number_of[name]
            key = layout, shard.start, shard.size, shard.offset, shard.strides, shapes[number], rows
            if key not in views:
                views[key] = tuple(_views(shard, shapes[number], rows, *layout))
            placed[number] += [(shard.target, view) for view in views[key]]
    return list(map(tuple, placed)), missing


def _rows_of(shard: MegatronShard, names: Names, config: Any, shapes: Mapping[str, Shape]) -> Iterator[tuple[str, _Rows]]:
    """Yields the rows of a shard that the checkpoint has, with the tensor's name. ``shapes``: of the tensors with these names."""
    if len(names) == 3:
        yield from _fused_rows(shard, names, config, shapes)
        return
    (name,), start, count = names, shard.start[0], shard.size[0]
    shape = shapes[name]
    if shard.key in PADDED:
        parts = shard.shape[0] // count
        if shape[1:] != shard.shape[1:] or not 0 <= shard.shape[0] - shape[0] < MAX_PADDING * parts:
            raise _mismatch(
                shard, name, shape, f"{list(shard.shape)}, where fewer than {MAX_PADDING * parts} rows may be padding"
            )
        count = min(count, shape[0] - start)
    elif shape != shard.shape:
        raise _mismatch(shard, name, shape, str(list(shard.shape)))
    if count > 0:
        yield name, (start, 0, count)


def _fused_rows(shard: MegatronShard, names: Names, config: Any, shapes: Mapping[str, Shape]) -> Iterator[tuple[str, _Rows]]:
    """Yields the rows of queries, keys and values in a shard of the fused projection."""
    groups, channels = config.num_query_groups, config.kv_channels
    lengths = config.num_attention_heads // groups * channels, channels, channels
    group, begin, end = sum(lengths), shard.start[0], shard.start[0] + shard.size[0]
    for name, length in zip(names, lengths, strict=True):
        if shapes[name] != (expected := (groups * length, *shard.shape[1:])):
            raise _mismatch(shard, name, shapes[name], str(list(expected)))
    if shard.shape[0] != groups * group:
        raise ModelMismatch(f"Megatron's {shard.key} has {shard.shape[0]} rows, expected {groups * group} from its config")
    for number in range(begin // group, -(-end // group)):
        first = number * group
        for name, length in zip(names, lengths, strict=True):
            low, high = max(first, begin), min(first + length, end)
            if low < high:
                yield name, (number * length + low - first, low - begin, high - low)
            first += length


def _views(shard: MegatronShard, source: Shape, rows: _Rows, shape: Shape, strides: Shape) -> Iterator[View]:
    """Yields the boxes of a parameter of this shape and strides that rows fill. ``source``: shape of their checkpoint tensor."""
    first, begin, length = rows
    steps = row_major_strides(source)
    sizes, starts = (length, *shard.size[1:]), (first, *shard.start[1:])
    loops = [Loop(*dim) for dim in zip(sizes, shard.strides, steps, strict=True)]
    offset = shard.offset + begin * shard.strides[0]
    yield from boxes_of_region(shape, strides, offset, loops, sum(map(int.__mul__, starts, steps)))


def _mismatch(shard: MegatronShard, name: str, shape: Shape, expected: str) -> ModelMismatch:
    return ModelMismatch(
        f"{name} has shape {list(shape)} in the checkpoint, expected {expected}, as Megatron has it in {shard.key}; build the "
        "model with the checkpoint's sizes",
    )
