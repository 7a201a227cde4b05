"""Reads from Megatron-Core's modules which part of which tensor each parameter is.

Megatron says that itself: ``sharded_state_dict`` has, for each parameter or part of one, the name and the shape of the tensor
that ranks share, and where the part starts in it. It calls no collective, and its data are views of the parameters.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from epload.core.views import Shape
from epload.errors import ModelMismatch
from epload.model.megatron import MegatronChunks

_NOT_COPIES = {
    "layernorm_zero_centered_gamma": "checkpoints have the weights of norms plus 1",
    "attention_output_gate": "queries and gates alternate in linear_qkv",
    "moe_mlp_glu_interleave_size": "gate and up projections alternate in linear_fc1",
    "moe_shared_expert_glu_interleave_size": "gate and up projections alternate in linear_fc1",
    "fp8_param": "parameters are fp8, and their scales are in no checkpoint",
    "fp4_param": "parameters are fp4, and their scales are in no checkpoint",
}
"""Options of Megatron's TransformerConfig with which weights are no copies of those in a checkpoint, and why."""


class MegatronShard(NamedTuple):
    """A part of one of Megatron's tensors, and where it is in the memory of a parameter or a buffer. All in elements."""

    key: str
    """Megatron's name of the tensor, in which layers and experts have their global numbers."""
    target: str
    """Name of the parameter or buffer in the rank's :class:`MegatronChunks`."""
    shape: Shape
    """Shape of the tensor."""
    start: Shape
    """Start of the part in the tensor."""
    size: Shape
    offset: int
    """Start of the part in the storage of the parameter, from the parameter's first element on."""
    strides: Shape
    """Strides in that storage."""


def read_shards(chunks: MegatronChunks) -> tuple[list[MegatronShard], dict[str, Tensor]]:
    """Returns the parts of tensors that this rank has, and its parameters and persistent buffers by name. Not collective.

    Raises:
        ModelMismatch: a parameter holds other values than checkpoints do, or Megatron does not say what it is a part of.
        ValueError: a parameter is on meta.
    """
    _check_config(chunks.config)
    tensors = dict(chunks.named_parameters()) | dict(_persistent_buffers(chunks))
    for name, tensor in tensors.items():
        if tensor.is_meta:
            raise ValueError(f"{name} is on meta; build Megatron's modules with storage")
        if type(tensor) not in (Tensor, nn.Parameter):
            raise ModelMismatch(
                f"{name} is a {type(tensor).__name__}, whose elements are not those of a checkpoint; expected plain parameters"
            )
    owners = sorted((tensor.data_ptr(), name) for name, tensor in tensors.items() if tensor.numel())
    addresses = [address for address, _ in owners]
    shards, covered = [], Counter[str]()
    for entry in chain.from_iterable(map(_entries, chunks)):
        data = entry.data
        if data.numel() == 0:
            continue
        number = bisect_right(addresses, data.data_ptr()) - 1
        target = owners[number][1] if number >= 0 else ""
        offset = (data.data_ptr() - addresses[number]) // data.element_size()
        if not target or offset >= tensors[target].numel() or data.dtype != tensors[target].dtype:
            raise ModelMismatch(
                f"sharded_state_dict of Megatron has a copy for {entry.key}, which does not follow the parameter; of grouped "
                "experts use TEGroupedMLP or SequentialMLP, not the legacy GroupedMLP"
            )
        if entry.prepend_axis_num or entry.flattened_range is not None:
            raise ModelMismatch(f"{entry.key} has other dims in Megatron's checkpoints than in the model")
        shapes = tuple(entry.global_shape), tuple(entry.global_offset), tuple(entry.local_shape)
        shards.append(MegatronShard(entry.key, target, *shapes, offset, data.stride()))
        covered[target] += data.numel()
    for name, tensor in tensors.items():
        if covered[name] != tensor.numel():
            raise ModelMismatch(
                f"sharded_state_dict of Megatron has {covered[name]} of the {tensor.numel()} elements of {name}; "
                "expected each once"
            )
    return shards, tensors


def _entries(chunk: Any) -> Iterator[Any]:
    """Yields the ShardedTensors of a module, those that are made of one parameter apart."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories

    state = chunk.sharded_state_dict(metadata={"singleton_local_shards": True})
    with torch.no_grad():
        apply_factories(state)
    yield from (value for value in nested_values(state) if isinstance(value, ShardedTensor))


def _persistent_buffers(chunks: MegatronChunks) -> Iterator[tuple[str, Tensor]]:
    for path, module in chunks.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                yield f"{path}.{name}", buffer


def _check_config(config: Any) -> None:
    """Raises ModelMismatch for options with which weights are no copies of those in a checkpoint."""
    for option, reason in _NOT_COPIES.items():
        if value := getattr(config, option, None):
            raise ModelMismatch(f"Megatron's {option}={value} is not supported: {reason}")
    if getattr(config, "rotary_interleaved", False) and not getattr(config, "multi_latent_attention", False):
        raise ModelMismatch(
            "Megatron's rotary_interleaved=True is not supported: checkpoints have the rows of queries and keys in another order"
        )
