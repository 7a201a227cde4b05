"""Defines the state that the parts of one transfer share on one rank, and how its buckets are framed.

A reader that cannot go on, or has heard of a rank that cannot, sends its bucket with an abort status and the error's text in
place of data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

from torch import Tensor

from epload.errors import CheckpointError, LoadError, RemoteFailure, WaitTimeout, message_of
from epload.native import ops
from epload.planning.buckets import HEADER_BYTES
from epload.planning.plan import LoadPlan
from epload.planning.schedule import Flow
from epload.planning.streams import ExchangePlan, ExchangeRoles
from epload.ranks.control import Control
from epload.report import Phase, TransferReport
from epload.transfer.framing import BucketHeader, list_buckets, write_bytes

Fill = Callable[[int, Tensor], None]
"""Fills a bucket, by its number, behind its header; the buffer (uint8) is the whole bucket. Called by one thread. Raises
CheckpointError if it cannot be read."""


class Sink:
    """Takes the buckets of a transfer. Used by one thread, within :meth:`entered`."""

    def __init__(self, take: Callable[[int, Tensor], None] = lambda number, bucket: None) -> None:
        """``take``: see :meth:`unpack`; by default keeps nothing, as a rank that sends."""
        self._take = take

    def entered(self) -> AbstractContextManager[None]:
        """Returns a context for the whole transfer."""
        return nullcontext()

    def unpack(self, number: int, bucket: Tensor) -> None:
        """Takes what this rank keeps, if anything, out of a bucket (uint8). The sink no longer needs it when this returns, or
        when the work that it has queued on its stream is done."""
        self._take(number, bucket)


@dataclass(frozen=True)
class TransferContext:
    """One rank's part in moving buckets of one plan."""

    plan: LoadPlan | ExchangePlan
    flow: Flow | ExchangeRoles
    fill: Fill | None
    """Fills buckets; None on a rank that fills none."""
    names: Callable[[Sequence[int]], str]
    """Describes some consecutive buckets, for messages."""
    control: Control
    """Control through which failures are published."""
    report: TransferReport
    checked: bool = False
    """True if buckets carry a checksum, for a plan whose receivers cannot read the source. Equal on all ranks."""
    version: int = 0
    """Version of the weights, where there are versions; else 0."""
    ends_in_order: bool = True
    """True if all ranks receive a bucket from whoever aborts the transfer. Otherwise a failure is raised, and the ranks are
    interrupted."""

    def fill_bucket(self, number: int, buffer: Tensor) -> LoadError | None:
        """Fills a bucket in ``buffer`` (uint8, on any device), or makes it one that tells everybody why there will be no more.

        Returns the failure.
        """
        assert self.fill is not None
        failure: LoadError | None = self.remote_failure()
        if failure is not None and not self.ends_in_order:
            raise failure
        if failure is None:
            try:
                self.fill(number, buffer)
            except Exception as error:
                failure = self.publish_failure("read", [number], error)
        body = buffer[HEADER_BYTES:]
        nbytes = body.nbytes
        if failure is not None:
            text = str(failure).encode(errors="backslashreplace")[:nbytes]
            nbytes = len(text)
            write_bytes(text, body[:nbytes])
        checksum = ops.checksum(body.cpu()) if self.checked else 0
        write_bytes(self._header(number, failure is not None, nbytes, checksum).pack(), buffer[:HEADER_BYTES])
        return failure

    def check(self, number: int, header: Tensor, body: Tensor) -> RemoteFailure | None:
        """Returns the failure that the reader of a bucket that has arrived reports; None if it reports none.

        Args:
            header: the bucket's first HEADER_BYTES, on CPU.
            body: the bytes behind it, on any device; looked at only if the bucket ends the transfer.

        Raises:
            LoadError: this is not the bucket that was expected.
        """
        received, expected = BucketHeader.unpack(header), str(self._header(number))
        if str(received) != expected:
            raise LoadError(f"rank {self.flow.rank} expected {expected}, got {received}: the ranks are out of step")
        if not received.aborted:
            return None
        return RemoteFailure(bytes(body[: received.nbytes].tolist()).decode(errors="replace"))

    def _header(self, number: int, aborted: bool = False, nbytes: int = 0, checksum: int = 0) -> BucketHeader:
        index, fingerprint = self.plan.identity(number)
        return BucketHeader(index, aborted, nbytes, checksum, fingerprint, self.version)

    def verify(self, number: int, bucket: Tensor) -> None:
        """Raises LoadError when the payload of a bucket (uint8 on CPU) is not what its checksum says."""
        sent = BucketHeader.unpack(bucket[:HEADER_BYTES]).checksum
        if ops.checksum(bucket[HEADER_BYTES:]) != sent:
            raise LoadError(
                f"rank {self.flow.rank} found that bucket {number} ({self.names([number])}) is not as rank "
                f"{self.flow.reader(number)} read it: its checksum is not {sent:#018x}; the network or the memory of a machine "
                "changes bits"
            )

    def remote_failure(self) -> RemoteFailure | None:
        """Returns the failure that another rank has published, if any."""
        failure = self.control.published_failure()
        return RemoteFailure(failure.text) if failure is not None else None

    def describe_failure(self, what: str, numbers: Sequence[int], error: Exception) -> LoadError:
        """Returns an error that names the rank and the buckets. ``what``: "read" or "unpack"."""
        kind = CheckpointError if isinstance(error, CheckpointError) else LoadError
        buckets = f"{list_buckets(numbers)} ({self.names(numbers)})"
        failure = kind(f"rank {self.flow.rank} could not {what} {buckets}: {message_of(error)}")
        failure.__cause__ = error
        return failure

    def publish_failure(self, what: str, numbers: Sequence[int], error: Exception) -> LoadError:
        """Publishes the error of :meth:`describe_failure` and returns it: readers end the transfer, and this rank goes on until
        then. Raises it where transfers do not end in order."""
        failure = self.describe_failure(what, numbers, error)
        if not self.ends_in_order:
            raise failure
        self.control.fail(failure, hard=False)
        return failure

    @contextmanager
    def moving(self, phase: str, doing: str, number: int) -> Iterator[Phase]:
        """A context for messages of a bucket: a phase of the report. Raises LoadError if a message did not arrive."""
        with self.control.activity(doing), self.report.timed(phase, doing) as span:
            try:
                yield span
            except RuntimeError as error:
                text, kind = message_of(error), LoadError
                if "given up" in text:
                    raise RemoteFailure(text) from error
                if "Timed out" in text or "timeout" in text:
                    kind = WaitTimeout
                bucket = f"bucket {number} ({self.names([number])})"
                raise kind(f"rank {self.flow.rank} could not pass on {bucket}: {text}") from error
