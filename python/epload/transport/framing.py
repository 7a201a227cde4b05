"""What stands in front of a bucket's bytes: written by its reader, checked by everybody who receives it.

A reader that cannot go on, or has heard of a rank that cannot, sends its bucket with an abort status and the error's text in
place of data.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from epload.checkpoint.base import Checkpoint
from epload.checkpoint.manifest import Manifest
from epload.control.control import Control
from epload.errors import CheckpointError, LoadError, RemoteFailure, message_of
from epload.native import ops
from epload.planning.buckets import HEADER_BYTES
from epload.planning.plan import LoadPlan

_HEADER = struct.Struct("<8sIIQQ16s16x")
_MAGIC = b"epload01"
STATUS_OK = 0
STATUS_ABORT = 1


@dataclass(frozen=True)
class BucketHeader:
    """The first 64 bytes of a bucket: which one it is, of which plan, and whether its sender is well."""

    index: int
    status: int
    nbytes: int
    """Bytes that follow the header; of an aborted bucket, the length of the error's text."""
    checksum: int
    """Of the bytes that follow; 0 when not computed."""
    fingerprint: bytes
    """The first 16 bytes of the plan's fingerprint."""

    def pack(self) -> bytes:
        return _HEADER.pack(_MAGIC, self.index, self.status, self.nbytes, self.checksum, self.fingerprint)

    @classmethod
    def unpack(cls, raw: bytes | memoryview) -> BucketHeader:
        """Raises LoadError when these are not the bytes of a header."""
        magic, index, status, nbytes, checksum, fingerprint = _HEADER.unpack(raw)
        if magic != _MAGIC:
            raise LoadError(f"expected a bucket that starts with {_MAGIC!r}, got {magic!r}: the ranks are out of step")
        return cls(index, status, nbytes, checksum, fingerprint)


class Framing:
    """The headers of one plan's buckets, as one rank writes and checks them."""

    def __init__(self, plan: LoadPlan, rank: int, manifest: Manifest, control: Control, checked: bool) -> None:
        """
        Args:
            manifest: names what is in a bucket, for messages.
            control: where failures are told.
            checked: whether buckets carry a checksum. Equal on all ranks.
        """
        self._plan = plan
        self._rank = rank
        self._manifest = manifest
        self._control = control
        self.checked = checked
        self._fingerprint = plan.fingerprint[:16]

    def fill(self, number: int, buffer: Tensor, checkpoint: Checkpoint) -> LoadError | None:
        """Reads a bucket into ``buffer`` (uint8 on CPU), or makes it one that tells everybody why there will be no more.

        Returns what went wrong.
        """
        nbytes = buffer.nbytes - HEADER_BYTES
        status = STATUS_OK
        failure: LoadError | None = self.remote_failure()
        if failure is None:
            try:
                checkpoint.fill(buffer, self._plan.pieces(self._plan.buckets[number]))
            except Exception as error:
                failure = self.publish_failure("read", [number], error)
        if failure is not None:
            text = str(failure).encode(errors="backslashreplace")[:nbytes]
            buffer[HEADER_BYTES : HEADER_BYTES + len(text)] = _bytes(text)
            status, nbytes = STATUS_ABORT, len(text)
        checksum = ops.checksum(buffer[HEADER_BYTES:]) if self.checked else 0
        buffer[:HEADER_BYTES] = _bytes(BucketHeader(number, status, nbytes, checksum, self._fingerprint).pack())
        return failure

    def check(self, number: int, header: Tensor, body: Tensor) -> RemoteFailure | None:
        """What the reader of a bucket that has arrived says went wrong.

        Args:
            header: the bucket's first HEADER_BYTES, on CPU.
            body: the bytes behind it, on any device; looked at only if the bucket ends the transfer.

        Raises:
            LoadError: this is not the bucket that was expected.
        """
        found = BucketHeader.unpack(bytes(header.tolist()))
        if (found.index, found.fingerprint) != (number, self._fingerprint):
            raise LoadError(
                f"rank {self._rank} expected bucket {number} of plan {self._fingerprint.hex()}, "
                f"got bucket {found.index} of plan {found.fingerprint.hex()}: the ranks are out of step"
            )
        if found.status != STATUS_ABORT:
            return None
        return RemoteFailure(bytes(body[: found.nbytes].tolist()).decode(errors="replace"))

    def expected(self, number: int) -> Tensor:
        """The header of a bucket that does not abort the transfer, with any length and checksum; uint8 [HEADER_BYTES] on CPU."""
        return _bytes(BucketHeader(number, STATUS_OK, 0, 0, self._fingerprint).pack())

    def verify(self, number: int, reader: int, bucket: Tensor) -> None:
        """Raises LoadError when the payload of a bucket (uint8 on CPU) is not what its checksum says."""
        sent = BucketHeader.unpack(bytes(bucket[:HEADER_BYTES].tolist())).checksum
        if ops.checksum(bucket[HEADER_BYTES:]) != sent:
            raise LoadError(
                f"rank {self._rank} found that bucket {number} ({self.names([number])}) is not as rank {reader} read it: its "
                f"checksum is not {sent:#018x}; the network or the memory of a machine changes bits"
            )

    def remote_failure(self) -> RemoteFailure | None:
        """The failure that another rank has published, if any."""
        failure = self._control.known()
        return RemoteFailure(failure.text) if failure is not None else None

    def describe_failure(self, what: str, numbers: Sequence[int], error: Exception) -> LoadError:
        """``what``: "read" or "unpack"."""
        buckets = list_numbers("bucket", numbers)
        kind = CheckpointError if isinstance(error, CheckpointError) else LoadError
        failure = kind(f"rank {self._rank} could not {what} {buckets} ({self.names(numbers)}): {message_of(error)}")
        failure.__cause__ = error
        return failure

    def publish_failure(self, what: str, numbers: Sequence[int], error: Exception) -> LoadError:
        """As :meth:`describe_failure`, and publishes it, so that the readers end the transfer. This rank goes on until then."""
        failure = self.describe_failure(what, numbers, error)
        self._control.fail(failure, hard=False)
        return failure

    def names(self, numbers: Sequence[int]) -> str:
        """The tensors in some consecutive buckets, and where they are from."""
        of = self._plan.slots.tensor
        first, last = (self._plan.buckets[number].slots for number in (numbers[0], numbers[-1]))
        ends = dict.fromkeys(self._manifest.names[of[slot]] for slot in (first[0], last[-1]))
        return f"{' to '.join(ends)} of {self._manifest.source}"


def list_numbers(what: str, numbers: Sequence[int]) -> str:
    if len(numbers) == 1:
        return f"{what} {numbers[0]}"
    return f"{what}s {', '.join(map(str, numbers))}"


def _bytes(raw: bytes) -> Tensor:
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8)
