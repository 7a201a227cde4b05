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

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import Store

from epload.core import dtypes
from epload.core.columns import column
from epload.core.copy_table import CopyTable
from epload.core.placement import box_slices
from epload.errors import LoadError, message_of
from epload.native import ops
from epload.planning.holdings import Holdings, digest_of
from epload.planning.pulls import Strided
from epload.planning.streams import ExchangePlan
from epload.ranks.contents import get
from epload.ranks.control import Control
from epload.ranks.messages import put
from epload.sync.arrival import same_bits
from epload.sync.devices import first_line, share_memory
from epload.transfer.device_pipe import DevicePipe

Piece = tuple[int, Sequence[int], CopyTable]
"""Copies between a bucket and tensors: the number of the bucket, those of the tensors, and a table that counts in these. Where
versions land in the node's memory, the bucket is one of the node's and the tensors are the sender's; else the bucket is an
allocation of the sender, and the tensors are this rank's."""


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
    numbers = {layout: i for i, layout in enumerate(dict.fromkeys(layouts))}
    fields = [handles, sizes, list(numbers), [numbers[layout] for layout in layouts], places.flatten().tolist()]
    content = zlib.compress(json.dumps(fields, separators=(",", ":")).encode(), 1)
    for device in {tensor.device for tensor in tensors}:
        torch.accelerator.current_stream(device).synchronize()
    put(store, f"memory/{rank}", content)
    return digest_of(content)


class SenderMemory:
    """The memory in which one sender's tensors lie, as a receiver opens it for a version."""

    def __init__(self, owner: int, content: bytes, device: torch.device) -> None:
        """``content``: what the sender has published, see :func:`publish_memory`."""
        self._handles, self._sizes, names, layout, places = json.loads(zlib.decompress(content))
        self.owner = owner
        self.layouts = [Strided(dtypes.from_name(name), tuple(shape), tuple(strides)) for name, shape, strides in names]
        self.layout = column(layout)
        """int64 [m], of each local tensor, an index into ``layouts``."""
        self.places = column(places).reshape(-1, 2)
        """int64 [m, 2], of each local tensor: its allocation, and where in it the tensor begins (bytes)."""
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
        self, plan: ExchangePlan, holdings: Mapping[int, Holdings], device: torch.device, turn: int, turns: int
    ) -> None:
        """
        Args:
            plan: which tensors are pulled, or buckets land.
            holdings: of the senders within reach.
            device: by which their memory is opened.
            turn: number of the first bucket that this rank of its node fills.
            turns: number of ranks of the node, which take turns.
        """
        self._pulls, self._landing = plan.pulls, plan.landing
        owners = set(plan.pulls.owners) if plan.pulls is not None else set[int]()
        if plan.landing is not None:
            owners = {bucket.stream.owner for bucket in plan.landing.buckets}
        self._holdings = {owner: holdings[owner] for owner in sorted(owners)}
        self.device = device
        self._turn, self._turns = turn, turns
        self._memory: dict[int, tuple[str, SenderMemory, list[Piece]]] = {}
        """Each sender's memory with its digest, and the copies out of it; valid as long as its tensors lie where they did."""
        self._stream = torch.Stream(device)
        self._pipe = DevicePipe.of(device, turns) if self.lands else None

    @property
    def lands(self) -> bool:
        """True if versions come into the node's memory."""
        return self._landing is not None

    @property
    def rejected(self) -> bool:
        """True if memory could not be opened."""
        return any(memory.rejected for _, memory, _ in self._memory.values())

    @property
    def nbytes(self) -> int:
        """Bytes that are copied for a version."""
        return sum(int(copies.nbytes().sum()) for *_, pieces in self._memory.values() for *_, copies in pieces)

    def plan(self, digests: Mapping[int, str], store: Store, timeout: timedelta) -> None:
        """Plans the copies of a version, except for senders whose tensors lie where they did.

        Args:
            digests: of where the tensors of each sender lie.
        """
        for owner, holdings in self._holdings.items():
            if owner in self._memory and self._memory[owner][0] == digests[owner]:
                continue
            content = get(store, f"memory/{owner}", timeout)
            if digest_of(content) != digests[owner]:
                raise LoadError(f"rank {owner} says something else of where its tensors lie than it did")
            memory = SenderMemory(owner, content, self.device)
            pieces = self._landed(owner) if self.lands else self._pulled(memory, holdings)
            self._memory[owner] = digests[owner], memory, list(pieces)

    def _pulled(self, memory: SenderMemory, holdings: Holdings) -> Iterator[Piece]:
        assert self._pulls is not None
        copies, local = self._pulls.copies(memory.owner, holdings, memory.layout, memory.layouts)
        allocation, begin = memory.places[local].unbind(1)
        copies.offset.add_(begin)
        for number in torch.unique(allocation).tolist():
            table = copies.select(allocation == number)
            yield number, table.renumber_targets(), table

    def _landed(self, owner: int) -> Iterator[Piece]:
        assert self._landing is not None
        for number in range(self._turn, len(self._landing.buckets), self._turns):
            bucket = self._landing.sources[owner][number]
            if bucket.stream.owner == owner:
                yield number, bucket.targets, bucket.copies

    @contextmanager
    def copying(
        self, tensors: Sequence[Tensor], buckets: Mapping[int, Tensor], verify: bool, control: Control
    ) -> Iterator[None]:
        """Copies the version that was planned while the block runs, behind what is on the current stream. Afterwards nothing is
        open any more, and nothing under way.

        Args:
            tensors: this rank's, unless versions land.
            buckets: of the node, by their number in the landing.
            verify: whether the copies are compared with what the senders hold.
            control: by which the rank hears that another one has failed, and copies no more.

        Raises:
            LoadError: memory of a sender cannot be opened, a copy differs from it, or another rank has failed.
        """
        stream = self._stream
        stream.wait_stream(torch.accelerator.current_stream(self.device))
        copied: list[tuple[int, Tensor, list[Tensor], CopyTable]] = []
        try:
            with control.working("copies what a sender has in memory of a device") as done:
                for _, memory, pieces in self._memory.values():
                    for number, targets, copies in pieces:
                        if self.lands:
                            bucket, others = buckets[number], [memory.tensor(i) for i in targets]
                        else:
                            bucket, others = memory.allocation(number), [tensors[i] for i in targets]
                        copied.append((memory.owner, bucket, others, copies))
                        with stream:
                            self._copy(bucket, others, copies)
                        done(int(copies.nbytes().sum()))
            yield
            stream.synchronize()
            with stream:
                for piece in copied if verify else ():
                    self._compare(*piece)
        finally:
            try:
                stream.synchronize()
            finally:
                copied.clear()
                for _, memory, _ in self._memory.values():
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
            in_bucket = _view(
                bucket, offset, dtypes.from_code(code), size, strides, f"what is copied from rank {owner}"
            )
            in_tensor = tensors[target][box_slices(start, size)]
            source, copy = (in_tensor, in_bucket) if self.lands else (in_bucket, in_tensor)
            expected = source.to(copy.dtype).to(copy.device)
            if source.dtype == copy.dtype:
                same = same_bits(expected, copy)
            else:  # a NaN may get other bits
                same = bool(((expected == copy) | (expected.isnan() & copy.isnan())).all())
            if not same:
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
