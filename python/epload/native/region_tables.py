"""The native ops on copy tables that are unpacked again and again, typed, and the guard that can stop them on the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from epload.native import ops

assert ops, "loads the library"
_region_table = torch.ops.epload.region_table.default
_unpack_table = torch.ops.epload.unpack_table.default
_can_guard_table = torch.ops.epload.can_guard_table.default
_can_guard = torch.ops.epload.can_guard.default

RegionTable: TypeAlias = torch.ScriptObject
"""Of the class in csrc/region_table.h, opaque to Python."""


class Guard(NamedTuple):
    """Stops a bucket that is not the expected one from being unpacked, on the device, and all that would be unpacked after it.

    The device reads ``stopped`` and the bucket when it comes to it, and writes ``stopped`` and ``flag`` then, so all three must
    live until it is done. Give the guards of one load the same ``stopped`` and ``flag``, both 0 at first.
    """

    expected: Tensor
    """uint8 [64] on CPU: the bucket's header (``transport/framing.py``). Bytes 16 to 31, size and checksum, are not compared.
    Read by the call."""
    stopped: Tensor
    """int32 [1] on the bucket's device: not 0 if nothing is to be copied. Set when a bucket is stopped."""
    flag: Tensor
    """int32 [1] on CPU, pinned: set to 1 + the expected index of the first bucket that is stopped."""


def region_table(copies: Tensor) -> RegionTable:
    """A copy table for :func:`unpack_table`: what devices make of it is kept. It keeps no tensor alive.

    Args:
        copies: as for ``ops.unpack``. Only its form is checked here.

    Raises:
        ValueError: it is no copy table.
    """
    table: RegionTable = _region_table(copies)
    return table


def unpack_table(bucket: Tensor, targets: Sequence[Tensor], table: RegionTable, guard: Guard | None = None) -> None:
    """``ops.unpack`` with the result of :func:`region_table`. Where there are kernels, what a call has made is used by later
    ones on the same stream whose bucket and targets lie at the same addresses, in the same form; the last is kept.

    Args:
        bucket: with ``guard``, at least 64 bytes.
        guard: needs :func:`can_guard_table`. A guard of an empty table is checked too.

    Raises:
        ValueError: a row reaches outside the bucket or its target, or the guard cannot be used; nothing has been copied.
    """
    _unpack_table(bucket, targets, table, *(guard or (None, None, None)))


def can_guard_table(bucket: Tensor, targets: Sequence[Tensor], table: RegionTable) -> bool:
    """Whether :func:`unpack_table` takes a guard with these arguments: the kernels run there, and they copy all regions. What is
    found out is kept, as if the table had been unpacked.

    Raises:
        ValueError: as for :func:`unpack_table`.
    """
    return bool(_can_guard_table(bucket, targets, table))


def can_guard(device: torch.device) -> bool:
    """Whether the kernels run on a device. If it is a CUDA device on which they do not, a warning says so once."""
    return bool(_can_guard(device))
