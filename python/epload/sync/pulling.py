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
from dataclasses import replace
from datetime import timedelta

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
from epload.planning.buckets import BucketCopies
from epload.planning.holdings import Holdings, digest_of
from epload.planning.streams import ExchangePlan
from epload.ranks.contents import get
from epload.ranks.control import Control
from epload.ranks.messages import put
from epload.report import TransferReport
from epload.sync.arrival import same_bits
from epload.sync.devices import first_line, share_memory
from epload.transfer.shards import Shards


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
        self.layouts = [(dtypes.from_name(name), tuple(shape), tuple(strides)) for name, shape, strides in layouts]
        self.layout = column(layout)
        """int64 [m], of each local tensor, an index into ``layouts``."""
        self.places = column(places).reshape(-1, 2)
        """int64 [m, 2], of each local tensor: its allocation, and where in it the tensor begins (bytes)."""
        self.pieces: list[tuple[int, BucketCopies]] = []
        """The copies out of it, valid as long as the tensors lie where they do: into this rank's tensors, each with the number of
        an allocation; or, where versions land in the node's memory, with the number of one of its buckets."""
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
        """Returns one of the sender's local tensors."""
        dtype, shape, strides = self.layouts[int(self.layout[number])]
        if 0 in shape:
            return torch.empty_strided(shape, strides, dtype=dtype, device=self._device)
        allocation, begin = self.places[number].tolist()
        return _view(self.allocation(allocation), begin, dtype, shape, strides)

    def close(self) -> None:
        """Closes what is open, once nothing uses it any more. Views of it may be left in a traceback."""
        while self._opened:
            ops.close_memory(self._opened.popitem()[1])


class Puller:
    """Copies versions out of the memory of senders, for one receiver: into its tensors, or into its part of the buckets of its
    node, as a sender packs them."""

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
        self._pipe: object = None
        """The device's, for the next version."""

    @property
    def rejected(self) -> bool:
        """True if memory could not be opened."""
        return any(memory.rejected for memory in self._memory.values())

    @property
    def nbytes(self) -> int:
        """Bytes that are copied for a version."""
        return sum(piece.copied for memory in self._memory.values() for _, piece in memory.pieces)

    def plan(self, digests: Mapping[int, str], store: Store, timeout: timedelta) -> None:
        """Plans the copies of a version, except for senders whose tensors lie where they did.

        Args:
            digests: of where the tensors of each sender lie.
        """
        for owner, holdings in self._holdings.items():
            if owner in self._memory and self._memory[owner].digest == digests[owner]:
                continue
            content = get(store, f"memory/{owner}", timeout)
            memory = self._memory[owner] = SenderMemory(owner, content, digests[owner], self.device)
            if self._landing is not None:
                buckets = self._landing.sources[owner]
                numbers = range(self._index, len(buckets), self._ranks)
                memory.pieces = [(i, buckets[i]) for i in numbers if buckets[i].stream.owner == owner]
            elif self._pulls is not None:
                copies, local = self._pulls.copies(owner, holdings, memory.layout, memory.layouts)
                allocation, begin = memory.places[local].unbind(1)
                copies.offset.add_(begin)
                for number in torch.unique(allocation).tolist():
                    memory.pieces.append((number, BucketCopies(0, copies.select(allocation == number))))

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
        self._stream.wait_stream(torch.accelerator.current_stream(self.device))
        packed: list[Shards] = []
        activity = "copies what a sender has in memory of a device"
        try:
            with report.timed("unpack", activity), control.working(activity) as done:
                for memory in self._memory.values():
                    if self._landing is not None:
                        packed.append(self._shards(memory, self._landing, verify))
                    for number, piece in memory.pieces:
                        if packed:
                            packed[-1].pack(number, buckets[number])
                        else:
                            local = [tensors[i] for i in piece.targets]
                            with self._stream:
                                ops.unpack(memory.allocation(number), local, piece.copies.rows)
                        done(piece.copied)
            yield
            with report.timed("unpack", activity):
                self._stream.synchronize()
            with self._stream:
                for memory in self._memory.values() if verify and not packed else ():
                    for number, piece in memory.pieces:
                        _compare(memory, number, tensors, piece.rows)
        finally:
            try:
                for shards in packed:
                    shards.finish()
                self._stream.synchronize()
            finally:
                packed.clear()
                for memory in self._memory.values():
                    memory.close()

    def _shards(self, memory: SenderMemory, landing: ExchangePlan, verify: bool) -> Shards:
        """Returns a sender's tensors, to be packed as the sender would pack them."""
        used = {number for _, piece in memory.pieces for number in piece.targets}
        tensors = [memory.tensor(i) if i in used else torch.empty(0) for i in range(len(memory.layout))]
        who = f"a receiver, out of the memory of rank {memory.owner},"
        shards = Shards(replace(landing, buckets=landing.sources[memory.owner]), tensors, verify, who, self._ranks)
        self._pipe = shards.pipe
        return shards


def _compare(memory: SenderMemory, number: int, tensors: Sequence[Tensor], copies: CopyTable) -> None:
    """Compares what was copied by torch's own means, not those that have copied. Raises LoadError if it differs."""
    for target, offset, dtype, start, size, strides in copies.boxes():
        source = _view(memory.allocation(number), offset, dtype, size, strides)
        copy = tensors[target][box_slices(start, size)]
        expected = source.to(copy.dtype)
        # Converted NaNs may have other bits.
        converted = source.dtype != copy.dtype
        if not (torch.allclose(expected, copy, 0, 0, equal_nan=True) if converted else same_bits(expected, copy)):
            raise LoadError(
                f"a copy out of the memory of rank {memory.owner} differs from it: the memory of this machine changes bits, or "
                "the sender's tensors were changed meanwhile"
            )


def _view(memory: Tensor, begin: int, dtype: torch.dtype, shape: Sequence[int], strides: Sequence[int]) -> Tensor:
    """Returns a tensor of at least one element that lies in some bytes. Raises RuntimeError if it does not."""
    return memory[begin : begin + dtype.itemsize].view(dtype).as_strided(shape, strides)
