"""Moves what has changed in a version to the nodes that have the version before, through host memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from epload.core.attempt import Attempt
from epload.errors import for_both_jobs
from epload.planning.changes import ChangedBucket, ChangesPlan, plan_changes
from epload.planning.streams import ExchangePlan, ExchangeRoles, Members
from epload.ranks.control import Control
from epload.sync.changes import ReceivedChanges
from epload.sync.committed import CommittedTensors
from epload.sync.comparison import DENSE, Comparison, compare
from epload.sync.host_route import HostRoute
from epload.sync.node_version import NodeVersion
from epload.sync.report import SyncReport
from epload.transfer.context import Sink, TransferContext
from epload.transfer.shards import Shards
from epload.transfer.shared_memory import BUFFERS, NodeMemory

WAVE_BYTES = 16 << 20
"""Bytes of a wave of changes, over all senders."""
_TOO_MANY = "too many"
"""View of a sender that has too many changes."""
Share = Callable[[Sequence[tuple[int, ...]], int, int], NodeMemory]
"""Makes memory for some nodes, with buffers of so many bytes, and so many of them. Collective over the generation's ranks."""


class ChangesRoute:
    """The route of one generation, on one rank. Its methods are collective over the generation's ranks."""

    def __init__(
        self,
        members: Members,
        control: Control,
        generation: int,
        verify: bool,
        route: Callable[[], HostRoute],
        share: Share,
    ) -> None:
        """``route``: makes or returns the generation's route through host memory."""
        self._members = members
        self._control = control
        self._generation = generation
        self._verify = verify
        self._route = route
        self._share = share
        self._nodes: frozenset[int] = frozenset()
        """Nodes with memory through which changes pass."""
        self._nbytes = 0
        """Bytes of each buffer of that memory, on all ranks."""
        self._memory: NodeMemory | None = None
        self._comparison: Comparison | None = None
        """A sender's, until its changes have moved."""
        self._received: ReceivedChanges | None = None
        """A receiver's, until they are applied."""
        self._changes: ChangesPlan | None = None

    def compare(
        self,
        plan: ExchangePlan,
        nodes: frozenset[int],
        shards: Callable[[], Shards],
        base: CommittedTensors | None,
        report: SyncReport,
    ) -> bool:
        """Compares a version with the one before, on the senders.

        Args:
            plan: by which its buckets go to some nodes.
            nodes: those, which have the version before.
            shards: returns a sender's tensors.
            base: a copy of what they were; None on a receiver.

        Returns:
            False if the version comes in full, on all ranks.
        """
        view: object = None
        compared: Attempt[Comparison | None] = Attempt(lambda: None)
        if base is not None:
            before, limit = base.shards(plan), base.limit(plan)
            with report.timed("read", "compares with the version before"):
                compared = Attempt(lambda: compare(plan, shards(), before, self._verify, limit))
            view = compared.result.changed if compared.result is not None else _TOO_MANY
        failure = for_both_jobs(compared.failure)
        merged = self._control.agree("comparing with the version before", failure, view, _merge_views)
        if merged is None:
            report.why_full = f"more than {DENSE:.0%} of the bytes would be sent"
            return False
        self._comparison = compared.result
        if base is not None:
            base.comparison = compared.result
        of_senders = {int(rank): [ChangedBucket(*fields) for fields in buckets] for rank, buckets in merged.items()}
        self._changes = plan_changes(plan, of_senders, WAVE_BYTES)
        nbytes = self._changes.staging_bytes
        if nbytes > self._nbytes or not nodes <= self._nodes:
            self._route()
            self._nbytes, self._nodes = max(nbytes, 1), nodes
            receivers = [self._members.nodes[number] for number in sorted(nodes)]
            self._memory = self._share(receivers + [(rank,) for rank in self._members.senders], self._nbytes, BUFFERS)
        return True

    def move(self, version: NodeVersion | None, node: Sequence[int], report: SyncReport) -> None:
        """Moves the changes that were compared.

        Args:
            version: the one before, on a receiver that has it.
            node: the ranks of its node.
        """
        changes, control = self._changes, self._control
        assert changes is not None
        plan, fill = changes.plan, self._fill if self._comparison is not None else None
        if fill is None and version is not None and changes.version.buckets:
            self._received = ReceivedChanges(changes, version, self._generation, node, control.rank, self._verify)
            self._received.check_unchanged()
        roles = ExchangeRoles(plan, self._members, control.rank)
        context = TransferContext(
            plan, roles, fill, plan.describe, control, report, self._verify, report.version, ends_in_order=False
        )
        self._route().run(context, self._memory, self._received or Sink())
        report.wire_bytes += plan.nbytes
        report.changed = changes.elements
        report.buckets_unchanged = len(changes.unchanged)
        report.buckets_changed = sum(map(len, changes.parts))
        report.peak_staging += self._received.nbytes if self._received is not None else 0
        report.peak_staging += sum(encoded.nbytes for encoded in self._comparison.encoded) if self._comparison else 0
        self._comparison = self._changes = None

    def _fill(self, number: int, buffer: Tensor) -> None:
        """See :data:`~epload.transfer.context.Fill`."""
        assert self._changes is not None
        assert self._comparison is not None
        for part in self._changes.parts[number]:
            buffer[part.begin : part.end] = self._comparison.encoded[part.bucket]

    def commit(self) -> None:
        """Applies what has moved, once the version is committed. See :meth:`ReceivedChanges.apply`."""
        if self._received is not None and self._memory is not None:
            self._received.apply(self._control, self._memory)
        self._received = None

    def close(self) -> None:
        """Ends the wait of others for changes that this rank has not applied."""
        if self._received is not None and self._memory is not None:
            self._memory.fail()

    @property
    def footprint(self) -> int:
        """Bytes of its buffers."""
        return self._memory.footprint if self._memory is not None else 0


def _merge_views(views: Mapping[int, Any]) -> Any:
    """Returns the changed buckets of each sender; None if one has too many changes. Views of receivers are None."""
    of_senders = {rank: view for rank, view in views.items() if view is not None}
    return None if _TOO_MANY in of_senders.values() else of_senders
