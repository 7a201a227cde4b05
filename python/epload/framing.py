"""What stands in front of a bucket's bytes: written by its reader, checked by everybody who receives it.

A reader that cannot go on sends its bucket with an abort status and the error's text in place of data.
"""

from __future__ import annotations

import torch
from torch import Tensor

from epload.checkpoint import Checkpoint
from epload.control import HEADER_BYTES, STATUS_ABORT, STATUS_OK, BucketHeader
from epload.errors import LoadError, Told, text_of
from epload.plan import LoadPlan


class Framing:
    """The headers of one plan's buckets, as one rank writes and checks them."""

    def __init__(self, plan: LoadPlan, rank: int) -> None:
        self._plan = plan
        self._rank = rank
        self._fingerprint = plan.fingerprint[:16]

    def fill(self, number: int, buffer: Tensor, checkpoint: Checkpoint) -> LoadError | None:
        """Reads a bucket into ``buffer`` (uint8 on CPU), or makes it one that tells everybody why there will be no more.

        Returns what went wrong.
        """
        status, nbytes, failure = STATUS_OK, buffer.nbytes - HEADER_BYTES, None
        try:
            checkpoint.fill(buffer, self._plan.pieces(self._plan.buckets[number]))
        except Exception as error:
            failure = self.unreadable(range(number, number + 1), error)
            text = str(failure).encode(errors="backslashreplace")[:nbytes]
            buffer[HEADER_BYTES : HEADER_BYTES + len(text)] = _bytes(text)
            status, nbytes = STATUS_ABORT, len(text)
        buffer[:HEADER_BYTES] = _bytes(BucketHeader(number, status, nbytes, 0, self._fingerprint).pack())
        return failure

    def check(self, number: int, header: Tensor, body: Tensor) -> Told | None:
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
        return Told(bytes(body[: found.nbytes].tolist()).decode(errors="replace"))

    def unreadable(self, numbers: range, error: Exception) -> LoadError:
        which = f"bucket {numbers[0]}" if len(numbers) == 1 else f"buckets {numbers[0]} to {numbers[-1]}"
        return LoadError(f"rank {self._rank} could not read {which}: {text_of(error)}")

    def not_unpacked(self, number: int, error: Exception) -> LoadError:
        return LoadError(f"rank {self._rank} could not unpack bucket {number}: {text_of(error)}")


def _bytes(raw: bytes) -> Tensor:
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8)
