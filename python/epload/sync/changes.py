"""Changes that receivers apply to the version before.

Nothing is applied before the version has been committed, so that a version that fails leaves the one before as it was.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from time import monotonic

from torch import Tensor

from epload.errors import LoadError, WaitTimeout, message_of
from epload.native import ops
from epload.planning.buckets import HEADER_BYTES
from epload.planning.changes import ChangesPlan
from epload.ranks.control import Control
from epload.sync.node_version import NodeVersion
from epload.transfer.context import Sink
from epload.transfer.shared_memory import NodeMemory

_POLL_SECONDS = 0.5


class ReceivedChanges(Sink):
    """The changes that this rank applies to the version in its node's memory: those of every n-th bucket of n ranks."""

    def __init__(
        self, changes: ChangesPlan, version: NodeVersion, generation: int, ranks: Sequence[int], rank: int, verify: bool
    ) -> None:
        """
        Args:
            version: the one before, which becomes the one that is received.
            ranks: of the node, in this generation.
            rank: this process's.
            verify: whether buckets are compared with what the sender has packed.
        """
        self._plan = changes.version
        self._changes = changes
        self._version = version
        self._generation = generation
        self._ranks = ranks
        self._position = ranks.index(rank)
        self._rank = rank
        self._verify = verify
        self._encoded: dict[int, Tensor] = {}

    @property
    def nbytes(self) -> int:
        """Bytes that wait to be applied."""
        return sum(encoded.nbytes for encoded in self._encoded.values())

    def _is_own(self, bucket: int) -> bool:
        return bucket % len(self._ranks) == self._position

    def unpack(self, number: int, bucket: Tensor) -> None:
        for part in self._changes.parts[number]:
            if self._is_own(part.bucket):
                encoded = bucket[part.begin : part.end].clone()
                ops.check_changes(encoded, self._plan.buckets[part.bucket].nbytes - HEADER_BYTES)
                self._check(part.bucket, encoded, part.checksum)
                self._encoded[part.bucket] = encoded

    def check_unchanged(self) -> None:
        """Raises LoadError if a bucket that does not change is not what the sender has packed."""
        for number, checksum in self._changes.unchanged.items():
            if self._is_own(number):
                self._check(number, None, checksum)

    def _check(self, number: int, encoded: Tensor | None, checksum: int) -> None:
        if not self._verify:
            return
        payload = self._version.bucket(self._plan.buckets[number], self._generation)[HEADER_BYTES:]
        if encoded is not None:
            payload = payload.clone()
            ops.apply_changes(encoded, payload)
        if ops.checksum(payload) != checksum:
            self._version.key = ""
            raise LoadError(
                f"rank {self._rank} has applied the changes of {self._plan.describe([number])} to the version before, and the "
                "result is not what the sender has: the memory of a machine changes bits; the next version comes in full"
            )

    def apply(self, control: Control, counted: NodeMemory) -> None:
        """Applies the changes, once the version is committed. Returns when all ranks of the node have.

        Args:
            counted: memory of the node through which the changes came.

        Raises:
            LoadError: a rank of the node has ended, or takes longer than the timeout.
        """
        try:
            for number, encoded in self._encoded.items():
                self._version.apply(self._plan.buckets[number], self._generation, encoded)
        except BaseException:
            counted.fail()  # ends the wait of the others
            raise
        self._encoded.clear()
        counted.waves_before += 1
        counted.post("unpack", counted.waves_before)
        until = monotonic() + control.timeout.total_seconds()
        while True:
            try:
                counted.wait("unpack", counted.waves_before, self._ranks, timedelta(seconds=_POLL_SECONDS))
                return
            except WaitTimeout as error:
                if monotonic() > until or any(rank in control.processes.ended for rank in self._ranks):
                    raise LoadError(
                        f"rank {self._rank} has applied its part of the changes, but a rank of its node has not: "
                        f"{message_of(error)}; the next version comes in full"
                    ) from error
