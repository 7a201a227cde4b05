"""Receivers that copy a version straight out of the device memory of senders on their own machine.

A sender says where its local tensors lie: in which allocations, by which other processes open these, and at which offsets and
strides. A receiver opens the allocations, and each is to the region copy what a bucket is. Nothing is kept open between versions,
so that the sender may free its memory or move it to the host as soon as a version is sent.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import Store

from epload.core import dtypes
from epload.core.columns import column
from epload.core.copy_table import CopyTable
from epload.core.pieces import distinct_values
from epload.core.placement import box_slices
from epload.errors import LoadError, message_of
from epload.native import ops
from epload.planning.holdings import Holdings, digest_of
from epload.planning.pulls import Strided
from epload.planning.streams import ExchangePlan
from epload.ranks.activity import working
from epload.ranks.contents import get, put
from epload.ranks.control import Control
from epload.report import TransferReport
from epload.sync.arrival import same_bits
from epload.sync.devices import first_line, share_memory
from epload.transfer.device_pipe import DevicePipe


class PulledCopies(NamedTuple):
    """Copies between a bucket and tensors. Where versions land in the node's memory, these are one of its buckets and tensors of
    the sender; else an allocation of the sender and this rank's tensors."""

    bucket: int
    targets: Sequence[int]
    copies: CopyTable
    """Targets count in ``targets``."""


def publish_memory(store: Store, rank: int, tensors: Sequence[Tensor]) -> str:
    """Tells receivers where a sender's tensors lie, once what is queued on them is done; returns the digest of that.

    Raises:
        LoadError: other processes cannot open the memory, or it has not all of the elements.
    """
    try:
        places, handles, sizes = share_memory(tensors)
    except (RuntimeError, ValueError) as error:
        raise LoadError(
            f"the sender's tensors can no longer be opened by other processes: {message_of(error)}; the next version goes "
            "another way"
        ) from error
    layouts = [(dtypes.name(tensor.dtype), tuple(tensor.shape), tensor.stride()) for tensor in tensors]
    distinct, layout = distinct_values(layouts)
    fields = [handles, sizes, distinct, layout.tolist(), places.flatten().tolist()]
    content = zlib.compress(json.dumps(fields, separators=(",", ":")).encode(), 1)
    for device in {tensor.device for tensor in tensors}:
        torch.accelerator.current_stream(device).synchronize()
    put(store, f"memory/{rank}", content)
    return digest_of(content)


class SenderMemory:
    """The memory in which one sender's tensors lie, as a receiver opens it for a version."""

    def __init__(self, owner: int, content: bytes, digest: str, device: torch.device) -> None:
        """
        Args:
            content: what the sender has published, see :func:`publish_memory`.
            digest: of the content.
        """
        self._handles, self._sizes, layouts, layout, places = json.loads(zlib.decompress(content))
        self.owner = owner
        self.digest = digest
        self.layouts = [
            Strided(dtypes.from_name(name), tuple(shape), tuple(strides)) for name, shape, strides in layouts
        ]
        self.layout = column(layout)
        """int64 [m], of each local tensor, an index into ``layouts``."""
        self.places = column(places).reshape(-1, 2)
        """int64 [m, 2], of each local tensor: its allocation, and where in it the tensor begins (bytes)."""
        self.pieces: list[PulledCopies] = []
        """The copies out of it; valid as long as the tensors lie where they do."""
        self.rejected = False
        """True if some of it could not be opened."""
        self._device = device
        self._opened: dict[int, Tensor] = {}

    def allocation(self, number: int) -> Tensor:
        """Returns one of the allocations, uint8. Raises LoadError if it cannot be opened."""
        if number not in self._opened:
            try:
                self._opened[number] = ops.open_memory(self._handles[number], self._sizes[number], self._device)
            except RuntimeError as error:
                self.rejected = True
                raise LoadError(
                    f"memory of rank {self.owner} cannot be opened, as if it had ended or freed its tensors: {first_line(error)}"
                ) from error
        return self._opened[number]

    def tensor(self, number: int) -> Tensor:
        """Returns one of the sender's local tensors. Raises LoadError if it does not lie in its allocation."""
        dtype, shape, strides = self.layouts[int(self.layout[number])]
        if 0 in shape:
            return torch.empty_strided(shape, strides, dtype=dtype, device=self._device)
        allocation, begin = self.places[number].tolist()
        return _view(self.allocation(allocation), begin, dtype, shape, strides, f"a tensor of rank {self.owner}")

    def close(self) -> None:
        """Closes what is open, once nothing uses it any more. Views of it may be left in a traceback."""
        while self._opened:
            ops.close_memory(self._opened.popitem()[1])


class Puller:
    """Copies versions out of the memory of senders, for one receiver: into its tensors, or into its part of the buckets of its
    node."""

    def __init__(
        self, plan: ExchangePlan, holdings: Mapping[int, Holdings], device: torch.device, index: int, ranks: int
    ) -> None:
        """
        Args:
            plan: which tensors are pulled, or buckets land.
            holdings: of the senders within reach.
            device: by which their memory is opened.
            index: of this rank in its node; it fills every ``ranks``-th bucket, from this one on.
            ranks: number of ranks of the node.
        """
        self._pulls, self._landing = plan.pulls, plan.landing
        owners = list(plan.pulls.owners) if plan.pulls is not None else []
        if plan.landing is not None:
            owners = [bucket.stream.owner for bucket in plan.landing.buckets]
        self._holdings = {owner: holdings[owner] for owner in sorted(set(owners))}
        self.device = device
        self._index, self._ranks = index, ranks
        self._memory: dict[int, SenderMemory] = {}
        self._stream = torch.Stream(device)
        self._pipe = DevicePipe.of(device, ranks) if self.lands else None

    @property
    def lands(self) -> bool:
        """True if versions come into the node's memory."""
        return self._landing is not None

    @property
    def rejected(self) -> bool:
        """True if memory could not be opened."""
        return any(memory.rejected for memory in self._memory.values())

    @property
    def nbytes(self) -> int:
        """Bytes that are copied for a version."""
        return sum(int(piece.copies.nbytes().sum()) for memory in self._memory.values() for piece in memory.pieces)

    def plan(self, digests: Mapping[int, str], store: Store, timeout: timedelta) -> None:
        """Plans the copies of a version, except for senders whose tensors lie where they did.

        Args:
            digests: of where the tensors of each sender lie.
        """
        for owner, holdings in self._holdings.items():
            if owner in self._memory and self._memory[owner].digest == digests[owner]:
                continue
            content = get(store, f"memory/{owner}", timeout)
            if digest_of(content) != digests[owner]:
                raise LoadError(f"rank {owner} says something else of where its tensors lie than it did")
            memory = SenderMemory(owner, content, digests[owner], self.device)
            memory.pieces = list(self._landed(owner) if self.lands else self._pulled(memory, holdings))
            self._memory[owner] = memory

    def _pulled(self, memory: SenderMemory, holdings: Holdings) -> Iterator[PulledCopies]:
        assert self._pulls is not None
        copies, local = self._pulls.copies(memory.owner, holdings, memory.layout, memory.layouts)
        allocation, begin = memory.places[local].unbind(1)
        copies.offset.add_(begin)
        for number in torch.unique(allocation).tolist():
            table = copies.select(allocation == number)
            yield PulledCopies(number, table.renumber_targets(), table)

    def _landed(self, owner: int) -> Iterator[PulledCopies]:
        assert self._landing is not None
        buckets = self._landing.sources[owner]
        for number in range(self._index, len(buckets), self._ranks):
            if buckets[number].stream.owner == owner:
                yield PulledCopies(number, buckets[number].targets, buckets[number].copies)

    @contextmanager
    def copying(
        self,
        tensors: Sequence[Tensor],
        buckets: Mapping[int, Tensor],
        verify: bool,
        control: Control,
        report: TransferReport,
    ) -> Iterator[None]:
        """Copies the version that was planned while the block runs, behind what is on the current stream. Afterwards nothing is
        open any more, and nothing under way.

        Args:
            tensors: this rank's, unless versions land.
            buckets: of the node, by their number in the landing.
            verify: whether the copies are compared with what the senders hold.
            control: notifies this rank when another one has failed; it then copies no more.

        Raises:
            LoadError: memory of a sender cannot be opened, a copy differs from it, or another rank has failed.
        """
        stream = self._stream
        stream.wait_stream(torch.accelerator.current_stream(self.device))
        copied: list[tuple[int, Tensor, list[Tensor], CopyTable]] = []
        activity = "copies what a sender has in memory of a device"
        try:
            with report.timed("unpack", activity), working(control, activity) as done:
                for memory in self._memory.values():
                    for number, targets, copies in memory.pieces:
                        if self.lands:
                            bucket, local = buckets[number], [memory.tensor(i) for i in targets]
                        else:
                            bucket, local = memory.allocation(number), [tensors[i] for i in targets]
                        copied.append((memory.owner, bucket, local, copies))
                        with stream:
                            self._copy(bucket, local, copies)
                        done(int(copies.nbytes().sum()))
            yield
            with report.timed("unpack", activity):
                stream.synchronize()
            with stream:
                for piece in copied if verify else ():
                    self._compare(*piece)
        finally:
            try:
                stream.synchronize()
            finally:
                copied.clear()
                for memory in self._memory.values():
                    memory.close()

    def _copy(self, bucket: Tensor, tensors: list[Tensor], copies: CopyTable) -> None:
        if self._pipe is None:
            ops.unpack(bucket, tensors, copies.rows)
        else:
            ops.download(tensors, copies.rows, [bucket], copies.in_bucket(), self._pipe.native)

    def _compare(self, owner: int, bucket: Tensor, tensors: list[Tensor], copies: CopyTable) -> None:
        """Compares what was copied by torch's own means, not those that have copied. Raises LoadError if it differs."""
        for row in copies.rows.tolist():
            target, offset, code, ndim = row[:4]
            start, size, strides = (row[4 + i * copies.dims :][:ndim] for i in range(3))
            source = _view(bucket, offset, dtypes.from_code(code), size, strides, f"what is copied from rank {owner}")
            copy = tensors[target][box_slices(start, size)]
            if self.lands:
                source, copy = copy, source
            expected = source.to(copy.dtype).to(copy.device)
            # Converted NaNs may have other bits.
            converted = source.dtype != copy.dtype
            if not (torch.allclose(expected, copy, 0, 0, equal_nan=True) if converted else same_bits(expected, copy)):
                raise LoadError(
                    f"a copy out of the memory of rank {owner} differs from it: the memory of this machine changes bits, or "
                    "the sender's tensors were changed meanwhile"
                )


def _view(
    memory: Tensor, begin: int, dtype: torch.dtype, shape: Sequence[int], strides: Sequence[int], what: str
) -> Tensor:
    """Returns a tensor of at least one element that lies in some bytes. Raises LoadError if it does not."""
    last = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    end = begin + (last + 1) * dtype.itemsize
    if not 0 <= begin < end <= memory.nbytes:
        raise LoadError(f"{what} ends at byte {end} of an allocation of {memory.nbytes}")
    return memory[begin:end].view(dtype).as_strided(shape, strides)
