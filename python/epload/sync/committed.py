"""Keeps a copy of what a sender has sent, with which it compares the next version."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import Future

from torch import Tensor

from epload.core import threads
from epload.planning.holdings import Holdings
from epload.planning.streams import ExchangePlan
from epload.sync.comparison import DENSE, Comparison
from epload.transfer.host_copies import copy_to_host, host_memory_for
from epload.transfer.shards import Shards

VERSIONS_BETWEEN = 50
"""Number of versions sent as changes before one is sent in full, unless receivers verify what they make of them."""


class CommittedTensors:
    """A rank's local tensors as they were committed, in host memory; pinned where they are on a device."""

    def __init__(self, delta: str) -> None:
        """``delta``: the sender's option."""
        self._delta = delta
        self.tensors: list[Tensor] = []
        self.key = ""
        """Key of the version; empty while there is none, or it has not been committed."""
        self._count = 0
        """Number of versions since the last that was sent in full."""
        self.comparison: Comparison | None = None
        """Comparison of the version that is being sent, if receivers get its changes."""
        self._copying: Future[None] | None = None

    def reserve(self, tensors: Sequence[Tensor]) -> None:
        """Allocates memory for the copy of tensors, unless there is some."""
        layouts = [(tensor.shape, tensor.dtype) for tensor in tensors]
        if layouts != [(copy.shape, copy.dtype) for copy in self.tensors]:
            self.forget()  # before more is allocated
            self.tensors = host_memory_for(tensors)

    def forget(self) -> None:
        """Frees the copy."""
        self.key, self.tensors, self.comparison = "", [], None

    def shards(self, plan: ExchangePlan) -> Shards:
        """Returns the copy as the tensors of a plan."""
        return Shards(plan, self.tensors, False, "the copy", 1)

    def copy(self, tensors: Sequence[Tensor]) -> None:
        """Copies tensors, which are committed once :meth:`commit` is called."""
        self.comparison = None
        self.reserve(tensors)
        self._copy(tensors, range(len(tensors)))

    def copy_left_out(self, tensors: Sequence[Tensor], holdings: Holdings) -> None:
        """Copies those tensors that do not follow from the comparison. See :meth:`Comparison.left_out`."""
        assert self.comparison is not None
        self._copy(tensors, self.comparison.left_out(holdings))

    def _copy(self, tensors: Sequence[Tensor], numbers: Iterable[int]) -> None:
        chosen = list(numbers)
        self.key = "" if chosen else self.key
        copy_to_host([tensors[number] for number in chosen], [self.tensors[number] for number in chosen])

    def copy_meanwhile(self, tensors: Sequence[Tensor]) -> None:
        """Copies tensors on CPU in a thread, until :meth:`finish`."""
        self.key = ""
        self._copying = threads.call("epload-copy", lambda: self.copy(tensors))

    def finish(self) -> bool:
        """Waits for the thread. Returns False if there was none, or it could not copy them."""
        copied = self._copying is not None and self._copying.exception() is None
        self._copying = None
        return copied

    def commit(self, key: str, in_full: bool) -> None:
        """Says that the version was committed: makes the copy what the receivers have.

        Args:
            in_full: whether no receiver got it as changes.
        """
        if self.comparison is not None:
            self.key = ""  # while the copy has parts of two versions
            self.comparison.apply()
            self.comparison = None
        self.key, self._count = key, 0 if in_full else self._count + 1

    def obstacle(self, verify: bool) -> str:
        """Returns why the next version has to be sent in full; empty if it may be compared with the one of :attr:`key`."""
        if not self.key:
            return "the sender has committed no version of these tensors before"
        if self._count >= VERSIONS_BETWEEN and not verify:
            return f"{self._count} versions were sent as changes"
        return ""

    def limit(self, plan: ExchangePlan) -> float:
        """Returns the most bytes that changes may have."""
        return float("inf") if self._delta == "always" else DENSE * plan.nbytes
