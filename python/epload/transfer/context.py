"""Defines the state that the parts of one transfer share on one rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from epload.planning.plan import LoadPlan
from epload.planning.schedule import Roles
from epload.planning.streams import ExchangePlan
from epload.ranks.activity import Activity
from epload.ranks.control import Control
from epload.report import TransferReport
from epload.transfer.framing import Fill, Framing


@dataclass(frozen=True)
class TransferContext:
    """One rank's part in moving buckets of one plan."""

    plan: LoadPlan | ExchangePlan
    flow: Roles
    fill: Fill | None
    """Fills buckets; None on a rank that fills none."""
    framing: Framing
    control: Control
    """Control through which failures are published."""
    report: TransferReport

    @cached_property
    def activity(self) -> Activity:
        return Activity(self.control, self.report)

    def read_here(self, numbers: Sequence[int]) -> list[int]:
        """Returns the positions in ``numbers`` of the buckets that this rank fills."""
        return [i for i, number in enumerate(numbers) if self.flow.reader(number) == self.flow.rank]
