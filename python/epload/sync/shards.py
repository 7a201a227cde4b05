"""The local tensors that a sync packs or fills, on CPU. What depends on their layouts is prepared natively once, and kept."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from epload.core import dtypes
from epload.errors import LoadError
from epload.native import ops
from epload.planning.exchange import ExchangePlan


class PreparedExchange:
    """What is prepared of a plan for tensors of some layouts. Keeps no tensor alive."""

    def __init__(self, plan: ExchangePlan, layouts: ops.Layouts) -> None:
        self.plan = plan
        self.layouts = layouts
        self.copies: dict[int, ops.PreparedCopies] = {}
        """Of each bucket."""


class Shards:
    """The local tensors of one rank, for one sync."""

    def __init__(
        self, plan: ExchangePlan, tensors: list[Tensor], known: PreparedExchange | None, prove: bool, who: str
    ) -> None:
        """
        Args:
            plan: whose buckets' targets count in ``tensors``.
            known: of the sync before.
            prove: whether each copy is followed by a comparison of digests.
            who: whose they are, for messages.
        """
        self.tensors = tensors
        self._plan = plan
        self._prove = prove
        self._who = who
        self._list, foreign = ops.tensor_list(tensors, known.layouts if known is not None else None)
        self.prepared: PreparedExchange | None = None
        """For the next sync."""
        if not foreign:
            if known is None or known.plan is not plan or not ops.has_layouts(self._list, known.layouts):
                known = PreparedExchange(plan, ops.layouts(self._list))
            self.prepared = known

    def pack(self, number: int, bucket: Tensor) -> None:
        """Copies this rank's boxes of a bucket into it."""
        self._copy(number, bucket, ops.pack_prepared, ops.pack)
        if self._prove:
            self._compare(number, bucket, "packed")

    def unpack(self, number: int, bucket: Tensor) -> None:
        """Copies what this rank keeps out of a bucket."""
        self._copy(number, bucket, ops.unpack_prepared, ops.unpack)
        if self._prove:
            self._compare(number, bucket, "unpacked")

    def _copy(self, number: int, bucket: Tensor, prepared: Callable[..., None], plain: Callable[..., None]) -> None:
        planned = self._plan.buckets[number]
        if not planned.targets:
            return
        if self.prepared is None:
            plain(bucket, [self.tensors[i] for i in planned.targets], planned.copies.rows)
            return
        copies = self.prepared.copies.get(number)
        if copies is None:
            copies = ops.prepare_copies(self._list, planned.targets, planned.copies.rows, planned.nbytes)
            self.prepared.copies[number] = copies
        prepared(bucket, self._list, copies)

    def _compare(self, number: int, bucket: Tensor, what: str) -> None:
        """Raises LoadError if the tensors do not hold what the bucket does, or the bucket not what the tensors do."""
        planned = self._plan.buckets[number]
        if not planned.targets:
            return
        rows = planned.copies
        wire = {
            target: dtypes.from_code(code)
            for target, code in zip(rows.target.tolist(), rows.dtype.tolist(), strict=True)
        }
        tensors = [self.tensors[i] for i in planned.targets]
        if what == "packed":  # a narrower bucket holds what the tensors become
            tensors = [tensor.to(wire.get(i, tensor.dtype)).to(tensor.dtype) for i, tensor in enumerate(tensors)]
        table = rows.clone()
        table.target[:] = torch.tensor([dtypes.code(tensor.dtype) for tensor in tensors], dtype=torch.int64)[
            rows.target
        ]
        if not torch.equal(ops.digest_bucket(bucket, table.rows), ops.digest_tensors(tensors, rows.rows)):
            raise LoadError(
                f"{self._who} {what} {self._plan.describe([number])}, but the bucket and the tensors differ; the memory of this "
                "machine changes bits"
            )
