"""Defines the state that the parts of one transfer share on one rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from epload.planning.schedule import Roles
from epload.ranks.activity import Activity
from epload.ranks.control import Control
from epload.report import TransferReport
from epload.transfer.framing import Framing
from epload.transfer.sources import BucketSource


class MovedBucket(Protocol):
    """The attributes of a plan's bucket that a transfer needs."""

    @property
    def nbytes(self) -> int:
        """Header included."""
        ...

    @property
    def targets(self) -> tuple[int, ...]:
        """Numbers of the targets that this rank copies it into, if any."""
        ...


class TransferPlan(Protocol):
    """The plan of a transfer; of a load, or of an exchange between two jobs."""

    @property
    def buckets(self) -> Sequence[MovedBucket]: ...


@dataclass(frozen=True)
class TransferContext:
    """One rank's part in moving buckets of one plan."""

    plan: TransferPlan
    flow: Roles
    source: BucketSource | None
    """None on a rank that fills no bucket."""
    framing: Framing
    control: Control
    """Control through which failures are published."""
    report: TransferReport
    activity: Activity = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "activity", Activity(self.control, self.report))

    def read_here(self, numbers: Sequence[int]) -> list[int]:
        """Positions in ``numbers`` of the buckets that this rank fills."""
        return [i for i, number in enumerate(numbers) if self.flow.reader(number) == self.flow.rank]
