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
from dataclasses import dataclass
from datetime import timedelta
from typing import NamedTuple

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
from epload.ranks.activity import working
from epload.ranks.control import Control
from epload.sync.arrival import same_bits
from epload.sync.devices import first_line, share_memory
from epload.sync.store import get, put
from epload.transfer.device_pipe import DevicePipe


@dataclass(frozen=True, eq=False)
class SharedMemory:
    """Tells where the local tensors of one sender lie, for one version."""

    handles: Sequence[str]
    """One for each allocation; see ``ops.open_memory``."""
    sizes: Sequence[int]
    """Bytes of each allocation."""
    layouts: Sequence[Strided]
    layout: Tensor
    """int64 [m], of each local tensor, an index into ``layouts``."""
    places: Tensor
    """int64 [m, 2], of each local tensor: its allocation, and where in it the tensor begins (bytes)."""

    @classmethod
    def decode(cls, content: bytes) -> SharedMemory:
        """Returns what a sender has published; see :func:`publish_memory`."""
        handles, sizes, names, layout, places = json.loads(zlib.decompress(content))
        layouts = [Strided(dtypes.from_name(name), tuple(shape), tuple(strides)) for name, shape, strides in names]
        return cls(handles, sizes, layouts, column(layout), column(places).reshape(-1, 2))


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


class _Piece(NamedTuple):
    """Copies between memory of a sender and tensors of this rank, or a bucket."""

    owner: int
    allocation: int
    """Number of the one that is the bucket of the copies; -1 if a bucket of the node is, and the sender's tensors are targets."""
    bucket: int
    """Number of the node's, or -1."""
    targets: Sequence[int]
    copies: CopyTable
    """Targets count in ``targets``."""
    nbytes: int


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
            turns: after how many buckets its turn comes again.
        """
        self._pulls, self._landing = plan.pulls, plan.landing
        owners = set(plan.pulls.owners) if plan.pulls is not None else set[int]()
        if plan.landing is not None:
            owners = {bucket.stream.owner for bucket in plan.landing.buckets}
        self._holdings = {owner: holdings[owner] for owner in sorted(owners)}
        self.refused = False
        """True if memory could not be opened."""
        self.device = device
        self._turn, self._turns = turn, turns
        self._memory: dict[int, tuple[str, SharedMemory, list[_Piece]]] = {}
        """Each sender's memory with its digest, and the copies out of it; kept as long as its tensors lie where they did."""
        self._stream = torch.Stream(device)

    @property
    def lands(self) -> bool:
        """True if versions come into the node's memory."""
        return self._landing is not None

    @property
    def nbytes(self) -> int:
        """Bytes that are copied for a version."""
        return sum(piece.nbytes for *_, pieces in self._memory.values() for piece in pieces)

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
            memory = SharedMemory.decode(content)
            pieces = self._landed(owner) if self.lands else self._pulled(owner, holdings, memory)
            self._memory[owner] = digests[owner], memory, list(pieces)

    def _pulled(self, owner: int, holdings: Holdings, memory: SharedMemory) -> Iterator[_Piece]:
        assert self._pulls is not None
        copies, local = self._pulls.copies(owner, holdings, memory.layout, memory.layouts)
        allocation, begin = memory.places[local].unbind(1)
        copies.offset.add_(begin)
        for number in torch.unique(allocation).tolist():
            table = copies.select(allocation == number)
            yield _Piece(owner, number, -1, table.renumber_targets(), table, int(table.nbytes().sum()))

    def _landed(self, owner: int) -> Iterator[_Piece]:
        assert self._landing is not None
        for number in range(self._turn, len(self._landing.buckets), self._turns):
            bucket = self._landing.sources[owner][number]
            if bucket.stream.owner == owner:
                yield _Piece(owner, -1, number, bucket.targets, bucket.copies, int(bucket.copies.nbytes().sum()))

    @contextmanager
    def copying(
        self,
        tensors: Sequence[Tensor],
        buckets: Mapping[int, Tensor],
        pipe: DevicePipe | None,
        verify: bool,
        control: Control,
    ) -> Iterator[None]:
        """Copies the version that was planned while the block runs, behind what is on the current stream. Afterwards nothing is
        open any more, and nothing under way.

        Args:
            tensors: this rank's, unless versions land.
            buckets: of the node, by their number in the landing.
            pipe: through which they are filled.
            verify: whether the copies are compared with what the senders hold.
            control: by which the rank hears that another one has failed, and copies no more.

        Raises:
            LoadError: memory of a sender cannot be opened, a copy differs from it, or another rank has failed.
        """
        stream = self._stream
        stream.wait_stream(torch.accelerator.current_stream(self.device))
        opened = _Opened(self.device)
        sides: list[tuple[Tensor, list[Tensor], _Piece]] = []
        try:
            with working(control, "copies what a sender has in memory of a device") as done:
                for _, memory, pieces in self._memory.values():
                    for piece in pieces:
                        if piece.bucket < 0:
                            bucket = opened.allocation(piece.owner, memory, piece.allocation)
                            targets = [tensors[i] for i in piece.targets]
                        else:
                            bucket = buckets[piece.bucket]
                            targets = [opened.tensor(piece.owner, memory, i) for i in piece.targets]
                        sides.append((bucket, targets, piece))
                        with stream:
                            _copy(bucket, targets, piece, pipe)
                        done(piece.nbytes)
            yield
            stream.synchronize()
            if verify:
                with stream:
                    for side in sides:
                        _compare(*side)
        finally:
            self.refused = opened.refused
            try:
                stream.synchronize()
            finally:
                opened.close()


def _copy(bucket: Tensor, targets: list[Tensor], piece: _Piece, pipe: DevicePipe | None) -> None:
    if pipe is None:
        ops.unpack(bucket, targets, piece.copies.rows)
    else:
        ops.download(targets, piece.copies.rows, [bucket], piece.copies.in_bucket(), pipe.native)


class _Opened:
    """Memory of senders that is open."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._allocations: dict[tuple[int, int], Tensor] = {}
        self.refused = False
        """True if some could not be opened."""

    def allocation(self, owner: int, memory: SharedMemory, number: int) -> Tensor:
        """uint8, one of a sender's allocations. Raises LoadError if it cannot be opened."""
        opened = self._allocations.get((owner, number))
        if opened is None:
            try:
                opened = ops.open_memory(memory.handles[number], memory.sizes[number], self._device)
            except RuntimeError as error:
                self.refused = True
                raise LoadError(
                    f"memory of rank {owner} cannot be opened, as if it had ended or freed its tensors: {first_line(error)}"
                ) from error
            self._allocations[owner, number] = opened
        return opened

    def tensor(self, owner: int, memory: SharedMemory, number: int) -> Tensor:
        """One of a sender's local tensors. Raises LoadError if it does not lie in its allocation."""
        layout = memory.layouts[int(memory.layout[number])]
        allocation, begin = memory.places[number].tolist()
        if 0 in layout.shape:
            return torch.empty_strided(layout.shape, layout.strides, dtype=layout.dtype, device=self._device)
        opened = self.allocation(owner, memory, allocation)
        last = sum((size - 1) * stride for size, stride in zip(layout.shape, layout.strides, strict=True))
        end = begin + (last + 1) * layout.dtype.itemsize
        if not 0 <= begin < end <= opened.nbytes:
            raise LoadError(f"rank {owner} says that a tensor ends at byte {end} of an allocation of {opened.nbytes}")
        return opened[begin:end].view(layout.dtype).as_strided(layout.shape, layout.strides)

    def close(self) -> None:
        """Once nothing uses it any more. Views of it may be left in a traceback."""
        for memory in self._allocations.values():
            ops.close_memory(memory)
        self._allocations.clear()


def _compare(bucket: Tensor, targets: Sequence[Tensor], piece: _Piece) -> None:
    """Compares what was copied by torch's own means, not those that have copied.

    Raises:
        LoadError: it differs.
    """
    for row in piece.copies.rows.tolist():
        in_bucket, in_target = _sides(bucket, targets, row, piece.copies.dims)
        source, copy = (in_bucket, in_target) if piece.bucket < 0 else (in_target, in_bucket)
        same = same_bits if source.dtype == copy.dtype else _same_values
        if not same(source.to(copy.dtype).to(copy.device), copy):
            raise LoadError(
                f"a copy out of the memory of rank {piece.owner} differs from it: the memory of this machine changes bits, or "
                "the sender's tensors were changed meanwhile"
            )


def _sides(bucket: Tensor, targets: Sequence[Tensor], row: list[int], dims: int) -> tuple[Tensor, Tensor]:
    """Returns the box of a row of a copy table, in the bucket and in its target."""
    target, offset, code, ndim = row[:4]
    start, size, stride = (row[4 + i * dims : 4 + i * dims + ndim] for i in range(3))
    dtype = dtypes.from_code(code)
    end = offset + (sum((n - 1) * step for n, step in zip(size, stride, strict=True)) + 1) * dtype.itemsize
    return bucket[offset:end].view(dtype).as_strided(size, stride), targets[target][box_slices(start, size)]


def _same_values(a: Tensor, b: Tensor) -> bool:
    """Returns whether two tensors are equal, but for the bits of NaNs."""
    return bool(((a == b) | (a.isnan() & b.isnan())).all())
