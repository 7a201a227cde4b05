"""Holds a version in the memory that the ranks of a receiving node share."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor

from epload.core.columns import column
from epload.core.default_device import on_cpu
from epload.core.pieces import Metadata
from epload.native import ops
from epload.planning.buckets import HEADER_BYTES
from epload.planning.holdings import NO_PART, Holdings, combine
from epload.planning.streams import ExchangeBucket, ExchangePlan
from epload.planning.waves import Wave
from epload.transfer.shards import Shards
from epload.transfer.shared_memory import NodeMemory


class NodeVersion:
    """A whole version, in the layout of the plan by which it came. What was changed since is changed in place."""

    key = ""
    """Key of the version as it was committed; empty while there is none, or the memory has parts of several."""

    def __init__(self, plan: ExchangePlan, memory: NodeMemory, generation: int, who: str, verify: bool) -> None:
        """
        Args:
            generation: whose buckets lie in the memory.
            who: names this rank, for messages.
            verify: see :class:`~epload.transfer.shards.Shards`.
        """
        self.plan = plan
        self.memory = memory
        self._generation = generation
        self._who = who
        self._verify = verify
        self._pipe: object = None
        """Kept from one call of :meth:`unpack` to the next, as making one takes long."""

    def _staged(self, waves: Sequence[Wave]) -> dict[int, Tensor]:
        return {
            number: self.memory.buffers[wave.index][begin:end]
            for wave in waves
            for number, begin, end in zip(wave.numbers, wave.begins, wave.ends, strict=True)
        }

    @cached_property
    def buckets(self) -> dict[int, Tensor]:
        """The buckets that came from senders, by their numbers in the plan."""
        return self._staged(self.plan.waves)

    @cached_property
    def landed(self) -> dict[int, Tensor]:
        """The buckets that were copied out of the memory of senders, by their numbers in the landing."""
        return self._staged(self.plan.landing_waves)

    def _parts(self) -> Iterator[tuple[ExchangePlan, dict[int, Tensor]]]:
        """Yields the plans by which the version came, each with its buckets."""
        if self.buckets:
            yield self.plan, self.buckets
        if self.plan.landing is not None and self.landed:
            yield self.plan.landing, self.landed

    def contents(self, manifest: Metadata) -> tuple[Holdings, list[Tensor]]:
        """Returns what the memory has of the sender's tensors, and the local tensors of these holdings: views of the memory."""
        nothing = [()] * len(manifest.names)
        holdings, tensors = Holdings(torch.full((len(nothing),), NO_PART), (), nothing), list[Tensor]()
        for plan, buckets in self._parts():
            if plan.layout is not None:
                of_plan = plan.layout.holdings(manifest.shapes)
                holdings = combine(holdings, of_plan, len(tensors))
                tensors += plan.layout.tensors([buckets[number] for number in sorted(buckets)])
        return holdings, tensors

    @cached_property
    def _buckets_of(self) -> list[dict[int, list[int]]]:
        """The numbers of the buckets that have something of each of this rank's tensors, for each part."""
        parts: list[dict[int, list[int]]] = []
        for plan, buckets in self._parts():
            parts.append(defaultdict(list))
            for number in buckets:
                for target in plan.buckets[number].targets:
                    parts[-1][target].append(number)
        return parts

    @on_cpu
    def unpack(self, tensors: Mapping[int, Tensor]) -> None:
        """Copies the version into some of this rank's tensors, by their numbers in the holdings."""
        numbers = torch.tensor(sorted(tensors), dtype=torch.int64)
        for (plan, buckets), buckets_of in zip(self._parts(), self._buckets_of, strict=True):
            used = sorted({number for target in tensors for number in buckets_of.get(target, ())})
            planned = [plan.buckets[number] for number in used]
            for i, bucket in enumerate(planned):
                if not tensors.keys() >= set(bucket.targets):
                    planned[i] = replace(bucket, rows=bucket.rows.select(torch.isin(bucket.rows.target, numbers)))
            shards = Shards(replace(plan, buckets=planned), tensors, self._verify, self._who, len(self.memory.ranks))
            self._pipe = shards.pipe or self._pipe
            with shards.entered():
                for i, number in enumerate(used):
                    shards.unpack(i, buckets[number])

    # ---- as the base of the next version ----

    def holdings(self, shapes: Sequence[tuple[int, ...]]) -> Holdings | None:
        """Returns what the memory has of the sender's tensors, of these shapes; None if another generation cannot use it."""
        layout = self.plan.layout
        if not self.key or layout is None or self.plan.landing is not None or len(shapes) != len(self.plan.names):
            return None
        return layout.holdings(shapes)

    def is_base_of(self, plan: ExchangePlan, generation: int, ranks: int) -> bool:
        """Returns True if all buckets of a generation's plan can be made out of this version's, and changed there.

        Args:
            ranks: of the node in that generation. If the memory is also another rank's, the version stays as it is: that rank may
                be alive, and commit it later.
        """
        if not self.key or ranks != len(self.memory.ranks):
            return False
        if generation == self._generation:
            return True
        return plan.landing is None and all(bucket.base and self._comes_from_owner(bucket) for bucket in plan.buckets)

    def _comes_from_owner(self, bucket: ExchangeBucket) -> bool:
        """Returns True if the version's bytes of a bucket came from the rank that sends it now, not from a replica of that."""
        assert bucket.base is not None
        assert self.plan.layout is not None
        buckets = set(self.plan.layout.bucket[column(bucket.base.targets)].tolist())
        return all(self.plan.buckets[number].stream.owner == bucket.stream.owner for number in buckets)

    @cached_property
    def _numbers(self) -> dict[tuple[int, int, int], int]:
        buckets = enumerate(self.plan.buckets)
        return {(bucket.stream.owner, bucket.stream.number, bucket.wave): number for number, bucket in buckets}

    @cached_property
    def _local(self) -> list[Tensor]:
        assert self.plan.layout is not None
        return self.plan.layout.tensors(list(map(self.buckets.__getitem__, range(len(self.plan.buckets)))))

    def bucket(self, bucket: ExchangeBucket, generation: int) -> Tensor:
        """Returns the version's bytes of a generation's bucket: in the memory itself, or a copy if they lie there in another
        layout."""
        if generation == self._generation:
            return self.buckets[self._numbers[bucket.stream.owner, bucket.stream.number, bucket.wave]]
        assert bucket.base is not None
        buffer = torch.zeros(bucket.nbytes, dtype=torch.uint8, device="cpu")
        ops.pack(buffer, [self._local[target] for target in bucket.base.targets], bucket.base.copies.rows)
        return buffer

    def apply(self, bucket: ExchangeBucket, generation: int, encoded: Tensor) -> None:
        """Applies the encoded changes of a generation's bucket."""
        buffer = self.bucket(bucket, generation)
        ops.apply_changes(encoded, buffer[HEADER_BYTES:])
        if generation != self._generation:
            assert bucket.base is not None
            ops.unpack(buffer, [self._local[target] for target in bucket.base.targets], bucket.base.copies.rows)
