"""One version on its way: who passes what to whom, out of the sender's shards, into a node's memory or a model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from epload.planning.schedule import Step
from epload.planning.streams import ExchangePlan, Members
from epload.transfer.shards import Shards
from epload.transfer.sinks import Sink

_NO_RANK = -1


@dataclass(frozen=True, eq=False)
class ExchangeRoles:
    """See :class:`~epload.planning.schedule.Roles`."""

    plan: ExchangePlan
    members: Members
    rank: int

    crosses = True

    @property
    def sends(self) -> bool:
        return self.rank in self.members.senders

    @cached_property
    def number(self) -> int:
        """Number of this rank's node among the receiving nodes."""
        return next(number for number, node in enumerate(self.members.nodes) if self.rank in node)

    @cached_property
    def sharers(self) -> tuple[int, ...]:
        return (self.rank,) if self.sends else self.members.nodes[self.number]

    @cached_property
    def relays(self) -> tuple[int, ...]:
        return self.sharers[: self.members.rails]

    def reader(self, bucket: int) -> int:
        """The rank that fills a bucket."""
        return self.plan.buckets[bucket].stream.owner

    def steps(self, buckets: Sequence[tuple[int, int, int]]) -> list[Step]:
        """Returns the steps along each bucket's path, between ranks of the rail that its sender is in."""
        members = self.members
        rail = members.rail_of[self.rank]
        steps: list[Step] = []
        for number, begin, end in buckets:
            bucket = self.plan.buckets[number]
            owner, path = bucket.stream.owner, bucket.stream.path(bucket.wave)
            if members.rail_of[owner] != rail:
                continue
            at = -1 if self.sends else path.index(self.number)
            before = _NO_RANK if self.sends else owner if at == 0 else members.nodes[path[at - 1]][rail]
            after = members.nodes[path[at + 1]][rail] if at + 1 < len(path) else _NO_RANK
            steps.append((begin, end, before, _NO_RANK, after, _NO_RANK))
        return steps


class LocalBuckets(Sink):
    """Takes buckets on a receiver: into its shards, or into the memory for a whole version. See
    :class:`~epload.transfer.sinks.Sink`."""

    def __init__(
        self,
        shards: Shards | None,
        places: Mapping[int, Tensor] | None = None,
        verify: Callable[[int, Tensor], None] | None = None,
    ) -> None:
        """
        Args:
            shards: None to leave buckets where they are, as on a rank that sends.
            places: the memory of each bucket, where buckets are on a device and the version stays in host memory.
            verify: raises LoadError if a bucket in that memory has another checksum than its bytes.
        """
        self._shards = shards
        self._places = places or {}
        self._verify = verify

    @contextmanager
    def entered(self) -> Iterator[None]:
        try:
            yield
        finally:
            if self._shards is not None:
                self._shards.finish()

    def unpack(self, number: int, bucket: Tensor) -> None:
        if number in self._places:
            self._keep(self._places[number], bucket)
            if self._verify is not None:  # what is kept, and not what was on the device
                self._verify(number, self._places[number])
        elif self._shards is not None:
            self._shards.unpack(number, bucket)

    @staticmethod
    def _keep(place: Tensor, bucket: Tensor) -> None:
        place.copy_(bucket)
