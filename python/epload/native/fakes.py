"""Implements the ops for fake tensors and tensors on meta: checks what can be checked without data, or rejects them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


def _refuse_meta(op: str, tensors: Sequence[Tensor]) -> None:
    """The fakes also stand for the meta device, where there is nothing to copy. Fake tensors are a type of their own."""
    for i, tensor in enumerate(tensors):
        if tensor.is_meta and type(tensor) in (Tensor, torch.nn.Parameter):
            raise ValueError(f"{op}: tensor {i} is on meta and holds no data; materialize it first (to_empty)")


def _coalesced_bcast_fake(
    tensors: Sequence[Tensor],
    src: int,
    inter_group: str,
    intra_group: str,
    bucket_bytes: int,
    algorithm: str,
    stream: torch.Stream | None = None,
    *,
    leader: int = -1,
) -> None:
    _refuse_meta("coalesced_bcast", tensors)
    if algorithm not in ("two_level", "striped"):
        raise ValueError(f"coalesced_bcast: expected algorithm 'two_level' or 'striped', got {algorithm!r}")


def _read_regions_fake(*_: object, **__: object) -> tuple[int, int, int, int]:
    raise ValueError("read_regions: expected targets on cpu with data, got fake or meta tensors")


def _relay_fake(*_: object, **__: object) -> int:
    raise ValueError("relay: expected a bucket on cpu with data, got a fake or meta tensor")


def _pack_fake(bucket: Tensor, sources: Sequence[Tensor], copies: Tensor) -> None:
    _refuse_meta("region_copy", [bucket, *sources])


def _unpack_fake(bucket: Tensor, targets: Sequence[Tensor], copies: Tensor) -> None:
    _refuse_meta("region_copy", [bucket, *targets])


def register() -> None:
    """Once the native library is loaded."""
    fakes: dict[str, Callable[..., Any]] = {
        "coalesced_bcast": _coalesced_bcast_fake,
        "read_regions": _read_regions_fake,
        "relay": _relay_fake,
        "pack": _pack_fake,
        "unpack": _unpack_fake,
    }
    for name, fake in fakes.items():
        torch.library.register_fake(f"epload::{name}", fake)
