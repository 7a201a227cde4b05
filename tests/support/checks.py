"""Comparisons of tests: local shards bit for bit, and the findings of all ranks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from zlib import crc32

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from support.models import Shape


def all_fine(failures: Sequence[Sequence[str]]) -> None:
    """Fails with what the ranks found wrong, one list a rank."""
    problems = [f"rank {rank}: {text}" for rank, texts in enumerate(failures) for text in texts]
    if problems:
        pytest.fail("\n".join(problems), pytrace=False)


def bits(name: str, shape: Shape, dtype: torch.dtype, salt: int = 0) -> Tensor:
    """Elements that differ within a tensor and from those of other names, as far as the dtype has bits for it."""
    index = torch.arange(prod(shape)) + (crc32(name.encode()) + salt) % 2**30
    if dtype == torch.bool:
        return (index * 5 // 3 % 2).to(dtype).reshape(shape)
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    return index.to(integer).view(dtype).reshape(shape)


def full_values(model: nn.Module, salt: int = 0) -> dict[str, Tensor]:
    """Returns values by name; tied names have the same."""
    first: dict[int, str] = {}
    return {
        name: bits(first.setdefault(id(tensor), name), tuple(tensor.shape), tensor.dtype, salt)
        for name, tensor in model.state_dict(keep_vars=True).items()
    }


def as_bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def same_bits(a: Tensor, b: Tensor | None) -> bool:
    return b is not None and (a.shape, a.dtype) == (b.shape, b.dtype) and torch.equal(as_bytes(a), as_bytes(b))


def flipped(tensor: Tensor, step: int) -> Tensor:
    """Returns a copy in which one bit of every so many bytes differs."""
    raw = as_bytes(tensor).clone()
    raw[::step] ^= 1
    return raw.view(tensor.dtype).reshape(tensor.shape)


def local_of(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def full_tensor(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def fill(model: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Writes full tensors into those of a model, sharded or not."""
    for name, tensor in model.state_dict().items():
        full = values[name]
        if isinstance(tensor, DTensor):
            full = distribute_tensor(full, tensor.device_mesh, tensor.placements, src_data_rank=None)
        local_of(tensor).copy_(local_of(full))


def differences(expected: nn.Module, loaded: nn.Module) -> Iterator[str]:
    """Yields the differences of two models of one rank: names, ties, placements, local shapes, dtypes, bits."""
    ours, theirs = expected.state_dict(keep_vars=True), loaded.state_dict(keep_vars=True)
    if list(ours) != list(theirs):
        yield f"expected names {list(ours)}, got {list(theirs)}"
        return
    if ties(ours) != ties(theirs):
        yield f"expected ties {ties(ours)}, got {ties(theirs)}"
    for name, a in ours.items():
        b = theirs[name]
        for attribute in ("shape", "dtype", "requires_grad", "placements", "device"):
            if getattr(a, attribute, None) != getattr(b, attribute, None):
                wanted, got = getattr(a, attribute, None), getattr(b, attribute, None)
                yield f"{name}: expected {attribute} {wanted}, got {got}"
        local_a, local_b = local_of(a), local_of(b)
        where = f"{name} {list(a.shape)} {getattr(a, 'placements', 'plain')}"
        if local_a.shape != local_b.shape or local_a.dtype != local_b.dtype or local_b.is_meta:
            yield (
                f"{where}: expected a local {local_a.dtype} {list(local_a.shape)}, "
                f"got {local_b.dtype} {list(local_b.shape)} on {local_b.device}"
            )
        elif not torch.equal(as_bytes(local_a), as_bytes(local_b)):
            count = int((as_bytes(local_a) != as_bytes(local_b)).sum())
            yield f"{where}: {count} of {local_a.nbytes} bytes of the local {list(local_a.shape)} differ"


def ties(state: dict[str, Tensor]) -> list[list[str]]:
    names = defaultdict(list)
    for name, tensor in state.items():
        names[id(tensor)].append(name)
    return [group for group in names.values() if len(group) > 1]
