"""Temporary."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from epload.native import ops

RegionTable = Tensor


class Guard(NamedTuple):
    expected: Tensor
    stopped: Tensor
    flag: Tensor


def region_table(copies: Tensor) -> Any:
    return copies


def unpack_table(bucket: Tensor, targets: Sequence[Tensor], table: Any, guard: Guard | None = None) -> None:
    assert guard is None
    ops.unpack(bucket, targets, table)


def can_guard(device: torch.device) -> bool:
    return False


def can_guard_table(bucket: Tensor, targets: Sequence[Tensor], table: Any) -> bool:
    return False
