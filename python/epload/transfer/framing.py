"""Defines the header in front of a bucket's bytes: written by its reader, checked by every rank that receives it."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import astuple, dataclass

import torch
from torch import Tensor

from epload.errors import LoadError

_HEADER = struct.Struct("<8sIIQQ16sQ8x")
_MAGIC = b"epload01"


@dataclass(frozen=True)
class BucketHeader:
    """The first 64 bytes of a bucket: which one it is, of which plan and version, and whether its sender is well."""

    index: int
    aborted: bool
    """True if the transfer ends with this bucket."""
    nbytes: int
    """Bytes that follow the header; of an aborted bucket, the length of the error's text."""
    checksum: int
    """Checksum of the bytes that follow; 0 when not computed."""
    fingerprint: bytes
    """16 bytes of the plan."""
    version: int = 0
    """Version of the weights, where there are versions; else 0."""

    def pack(self) -> bytes:
        return _HEADER.pack(_MAGIC, *astuple(self))

    @classmethod
    def unpack(cls, raw: Tensor) -> BucketHeader:
        """``raw``: uint8 on CPU. Raises LoadError when these are not the bytes of a header."""
        magic, *fields = _HEADER.unpack(bytes(raw.tolist()))
        if magic != _MAGIC:
            raise LoadError(f"expected a bucket that starts with {_MAGIC!r}, got {magic!r}: the ranks are out of step")
        return cls(*fields)

    def __str__(self) -> str:
        version = f" of version {self.version}" if self.version else ""
        return f"bucket {self.index} of plan {self.fingerprint.hex()}{version}"


def write_bytes(raw: bytes, buffer: Tensor) -> None:
    """Copies bytes to CPU, or to a device on its current stream, for which the host does not wait."""
    data = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
    buffer.copy_(data if buffer.is_cpu else data.pin_memory(), non_blocking=True)


def list_buckets(numbers: Sequence[int]) -> str:
    """Returns ``"bucket 3"`` or ``"buckets 3, 4"``."""
    return f"bucket{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"
