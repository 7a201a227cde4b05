"""Defines the header in front of a bucket's bytes: written by its reader, checked by every rank that receives it.

A reader that cannot go on, or has heard of a rank that cannot, sends its bucket with an abort status and the error's text in
place of data.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass

import torch
from torch import Tensor

from epload.errors import CheckpointError, LoadError, RemoteFailure, message_of
from epload.native import ops
from epload.planning.buckets import HEADER_BYTES
from epload.ranks.control import Control

Fill = Callable[[int, Tensor], None]
"""Fills a bucket, by its number, behind its header; the buffer (uint8) is the whole bucket. Called by one thread. Raises
CheckpointError if it cannot be read."""
_HEADER = struct.Struct("<8sIIQQ16sQ8x")
_MAGIC = b"epload01"
STATUS_OK = 0
STATUS_ABORT = 1


@dataclass(frozen=True)
class BucketHeader:
    """The first 64 bytes of a bucket: which one it is, of which plan and version, and whether its sender is well."""

    index: int
    status: int
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
    def unpack(cls, raw: bytes | memoryview) -> BucketHeader:
        """Raises LoadError when these are not the bytes of a header."""
        magic, *fields = _HEADER.unpack(raw)
        if magic != _MAGIC:
            raise LoadError(f"expected a bucket that starts with {_MAGIC!r}, got {magic!r}: the ranks are out of step")
        return cls(*fields)


class Framing:
    """The headers of one plan's buckets, as one rank writes and checks them."""

    def __init__(
        self,
        identity: Callable[[int], tuple[int, bytes]],
        names: Callable[[Sequence[int]], str],
        rank: int,
        control: Control,
        checked: bool = False,
        version: int = 0,
        ends_in_order: bool = True,
    ) -> None:
        """
        Args:
            identity: index and fingerprint of a bucket's header, equal on all ranks that send or receive it.
            names: describes some consecutive buckets, for messages.
            control: publishes failures.
            checked: True if buckets carry a checksum, for a plan whose receivers cannot read the source. Equal on all ranks.
            version: of the weights.
            ends_in_order: whether all ranks receive a bucket from whoever aborts the transfer. Otherwise a failure is raised, and
                the ranks are interrupted.
        """
        self._identity = identity
        self.names = names
        self._rank = rank
        self._control = control
        self.checked = checked
        self._version = version
        self._ends_in_order = ends_in_order

    def fill(self, number: int, buffer: Tensor, fill: Fill) -> LoadError | None:
        """Fills a bucket in ``buffer`` (uint8, on any device), or makes it one that tells everybody why there will be no more.

        Returns the failure.
        """
        failure: LoadError | None = self.remote_failure()
        if failure is not None and not self._ends_in_order:
            raise failure
        if failure is None:
            try:
                fill(number, buffer)
            except Exception as error:
                failure = self.publish_failure("read", [number], error)
        body = buffer[HEADER_BYTES:]
        status, nbytes = STATUS_OK, body.nbytes
        if failure is not None:
            text = str(failure).encode(errors="backslashreplace")[:nbytes]
            status, nbytes = STATUS_ABORT, len(text)
            _write(text, body[:nbytes])
        checksum = ops.checksum(body.cpu()) if self.checked else 0
        _write(self._header(number, status, nbytes, checksum).pack(), buffer[:HEADER_BYTES])
        return failure

    def check(self, number: int, header: Tensor, body: Tensor) -> RemoteFailure | None:
        """Returns the failure that the reader of a bucket that has arrived reports; None if it reports none.

        Args:
            header: the bucket's first HEADER_BYTES, on CPU.
            body: the bytes behind it, on any device; looked at only if the bucket ends the transfer.

        Raises:
            LoadError: this is not the bucket that was expected.
        """
        received = BucketHeader.unpack(bytes(header.tolist()))
        expected = _describe(self._header(number))
        if _describe(received) != expected:
            raise LoadError(
                f"rank {self._rank} expected {expected}, got {_describe(received)}: the ranks are out of step"
            )
        if received.status != STATUS_ABORT:
            return None
        return RemoteFailure(bytes(body[: received.nbytes].tolist()).decode(errors="replace"))

    def _header(self, number: int, status: int = STATUS_OK, nbytes: int = 0, checksum: int = 0) -> BucketHeader:
        index, fingerprint = self._identity(number)
        return BucketHeader(index, status, nbytes, checksum, fingerprint, self._version)

    def verify(self, number: int, reader: int, bucket: Tensor) -> None:
        """Raises LoadError when the payload of a bucket (uint8 on CPU) is not what its checksum says."""
        sent = BucketHeader.unpack(bytes(bucket[:HEADER_BYTES].tolist())).checksum
        if ops.checksum(bucket[HEADER_BYTES:]) != sent:
            raise LoadError(
                f"rank {self._rank} found that bucket {number} ({self.names([number])}) is not as rank {reader} read it: its "
                f"checksum is not {sent:#018x}; the network or the memory of a machine changes bits"
            )

    def remote_failure(self) -> RemoteFailure | None:
        """Returns the failure that another rank has published, if any."""
        failure = self._control.known()
        return RemoteFailure(failure.text) if failure is not None else None

    def describe_failure(self, what: str, numbers: Sequence[int], error: Exception) -> LoadError:
        """Returns an error that names the rank and the buckets. ``what``: "read" or "unpack"."""
        buckets = list_numbers("bucket", numbers)
        kind = CheckpointError if isinstance(error, CheckpointError) else LoadError
        failure = kind(f"rank {self._rank} could not {what} {buckets} ({self.names(numbers)}): {message_of(error)}")
        failure.__cause__ = error
        return failure

    def publish_failure(self, what: str, numbers: Sequence[int], error: Exception) -> LoadError:
        """Publishes the error of :meth:`describe_failure` and returns it: readers end the transfer, and this rank goes on until
        then. Raises it where transfers do not end in order."""
        failure = self.describe_failure(what, numbers, error)
        if not self._ends_in_order:
            raise failure
        self._control.fail(failure, hard=False)
        return failure


def list_numbers(what: str, numbers: Sequence[int]) -> str:
    """Returns ``"bucket 3"`` or ``"buckets 3, 4"``."""
    if len(numbers) == 1:
        return f"{what} {numbers[0]}"
    return f"{what}s {', '.join(map(str, numbers))}"


def _describe(header: BucketHeader) -> str:
    version = f" of version {header.version}" if header.version else ""
    return f"bucket {header.index} of plan {header.fingerprint.hex()}{version}"


def _write(raw: bytes, buffer: Tensor) -> None:
    """Copies bytes to CPU, or to a device on its current stream, for which the host does not wait."""
    data = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
    if buffer.is_cpu:
        buffer.copy_(data)
    else:
        buffer.copy_(data.pin_memory(), non_blocking=True)
