"""What the parts of one transfer share on one rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from epload.checkpoint.base import Checkpoint
from epload.control.activity import Activity
from epload.control.control import Control
from epload.planning.plan import LoadPlan
from epload.planning.schedule import Flow
from epload.report import LoadReport
from epload.transport.framing import Framing


@dataclass(frozen=True)
class TransferContext:
    """One rank's part in moving buckets of one plan."""

    plan: LoadPlan
    flow: Flow
    checkpoint: Checkpoint | None
    """None on a rank that does not read."""
    framing: Framing
    control: Control
    """Where failures are published."""
    report: LoadReport
    activity: Activity = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "activity", Activity(self.control))

    def read_here(self, numbers: Sequence[int]) -> list[int]:
        """Positions in ``numbers`` of the buckets that this rank reads."""
        return [i for i, number in enumerate(numbers) if self.flow.reader(number) == self.flow.rank]
