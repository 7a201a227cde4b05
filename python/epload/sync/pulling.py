"""Receivers that copy a version straight out of the device memory of senders on their own machine.

A sender says where its local tensors lie: in which allocations, by which other processes open these, and at which offsets and
strides. A receiver opens the allocations, and each is to the region copy what a bucket is. Nothing is kept open between versions,
so that the sender may free its memory or move it to the host as soon as a version is sent.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from epload.control.activity import working
from epload.control.control import Control
from epload.core import dtypes
from epload.core.columns import column
from epload.core.copy_table import CopyTable
from epload.core.placement import box_slices
from epload.errors import LoadError
from epload.native import ops
from epload.planning.pulls import Reach, Strided
from epload.planning.shares import Share, digest_of
from epload.planning.streams import ExchangePlan, Members
from epload.staging.device_pipe import DevicePipe
from epload.sync.arrival import same_bits


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
    def of(cls, tensors: Sequence[Tensor]) -> SharedMemory:
        """Raises RuntimeError if other processes cannot open the memory, ValueError if it has not all of the elements."""
        places, handles, sizes = _share(tensors)
        layouts = [Strided(tensor.dtype, tuple(tensor.shape), tensor.stride()) for tensor in tensors]
        numbers = {layout: i for i, layout in enumerate(dict.fromkeys(layouts))}
        return cls(handles, sizes, list(numbers), column([numbers[layout] for layout in layouts]), places)

    def encode(self) -> bytes:
        """Compressed."""
        layouts = [(dtypes.name(each.dtype), each.shape, each.strides) for each in self.layouts]
        columns = [self.layout.tolist(), self.places.flatten().tolist()]
        return zlib.compress(
            json.dumps([self.handles, self.sizes, layouts, *columns], separators=(",", ":")).encode(), 1
        )

    @classmethod
    def decode(cls, content: bytes) -> SharedMemory:
        """The inverse of :meth:`encode`."""
        handles, sizes, layouts, layout, places = json.loads(zlib.decompress(content))
        of_layouts = [Strided(dtypes.from_name(name), tuple(shape), tuple(strides)) for name, shape, strides in layouts]
        return cls(handles, sizes, of_layouts, column(layout), column(places).reshape(-1, 2))


def _share(tensors: Sequence[Tensor]) -> tuple[Tensor, list[str], list[int]]:
    """See ``ops.share_memory``. Raises RuntimeError also for tensors whose memory does not hold their values."""
    if any(tensor.is_conj() or tensor.is_neg() for tensor in tensors):
        raise RuntimeError("one of its tensors is to be conjugated or negated when it is read (Tensor.resolve_conj)")
    return ops.share_memory([tensor.detach() for tensor in tensors])


def accelerator_of(devices: Collection[torch.device]) -> torch.device | None:
    """The only device, if it is no CPU."""
    (device,) = devices if len(devices) == 1 else (torch.device("cpu"),)
    return device if device.type not in ("cpu", "meta") else None


@dataclass(frozen=True)
class Probe:
    """An allocation of a sender, by which receivers find out whether they can open its memory."""

    kind: str
    """Type of the device."""
    handle: str
    """Empty if it cannot be shared."""
    nbytes: int
    obstacle: str
    """Why it cannot."""

    @classmethod
    def of(cls, tensors: Sequence[Tensor]) -> Probe:
        """The probe of a sender with these tensors."""
        devices = {tensor.device for tensor in tensors}
        kind = next((device.type for device in devices if device.type not in ("cpu", "meta")), "")
        if accelerator_of(devices) is None:
            return Probe(kind, "", 0, "its tensors are not all on one device")
        try:
            _, handles, sizes = _share(tensors)
        except (RuntimeError, ValueError) as error:  # if it cannot be read at all, whoever packs it says so
            return Probe(kind, "", 0, _reason(error))
        return Probe(kind, handles[0], sizes[0], "") if handles else Probe(kind, "", 0, "its tensors are empty")

    def opens(self, device: torch.device) -> str:
        """Why it cannot be opened for a device of this process; empty if it can."""
        try:
            ops.close_memory(ops.open_memory(self.handle, self.nbytes, device))
        except RuntimeError as error:
            return _reason(error)
        return ""


def find_reach(
    control: Control, members: Members, device: torch.device | None, near: Sequence[Sequence[Any]]
) -> tuple[Reach, str]:
    """Finds out which receiving nodes can open the memory of which senders. Collective; the same on all ranks.

    Args:
        device: of a receiver that may pull.
        near: of each rank, its machine, the type of its device, and of a sender the rest of its :class:`Probe`.

    Returns:
        The senders that every rank of a node reaches; why one on the same machine cannot be reached, empty if all can.
    """
    probes = {rank: (near[rank][0], Probe(*near[rank][1:])) for rank in members.senders}
    beside = {
        rank: [sender for sender, (machine, probe) in probes.items() if [machine, probe.kind] == near[rank][:2]]
        for rank in members.receivers
        if near[rank][1]
    }
    shared = {rank: [each for each in some if probes[each][1].handle] for rank, some in beside.items()}
    obstacles = [
        f"memory of rank {sender} cannot be shared: {probes[sender][1].obstacle}"
        for rank, some in beside.items()
        for sender in some
        if sender not in shared[rank]
    ]
    if not any(shared.values()):
        return {}, next(iter(obstacles), "")
    view: list[Any] = [[], ""]
    if device is not None:
        found = {sender: probes[sender][1].opens(device) for sender in shared[control.rank]}
        view[0] = [sender for sender, why in found.items() if not why]
        view[1] = next(
            (f"rank {control.rank} cannot open rank {who}'s: {why}" for who, why in found.items() if why), ""
        )
    opened, why = control.settle("opening memory of devices", None, view, _by_receiver)
    reached = {int(rank): set(senders) for rank, senders in opened.items()}
    reach = {}
    for number, node in enumerate(members.nodes):
        if senders := set.intersection(*(reached.get(rank, set()) for rank in node)):
            reach[number] = tuple(sorted(senders))
    return reach, next(iter(obstacles), why)


def _by_receiver(views: dict[int, Any]) -> list[Any]:
    """Returns the senders that each rank has opened, and the first reason why one could not be."""
    return [
        {str(rank): senders for rank, (senders, _) in views.items()},
        next((why for _, why in views.values() if why), ""),
    ]


class _Piece(NamedTuple):
    """Copies between memory of a sender and tensors of this rank, or a bucket."""

    owner: int
    allocation: int
    """Number of the one that is the bucket of the copies; -1 if a bucket of the node is, and the sender's tensors are targets."""
    bucket: int
    """Number of the node's, or -1."""
    targets: list[int]
    copies: CopyTable
    """Targets count in ``targets``."""
    nbytes: int


class Puller:
    """Copies versions out of the memory of senders, for one receiver: into its tensors, or into its part of the buckets of its
    node."""

    def __init__(
        self, plan: ExchangePlan, shares: Mapping[int, Share], device: torch.device, turn: int, turns: int
    ) -> None:
        """
        Args:
            plan: which tensors are pulled, or buckets land.
            shares: of the senders within reach.
            device: by which their memory is opened.
            turn: number of the first bucket that this rank of its node fills.
            turns: after how many buckets its turn comes again.
        """
        self._pulls, self._landing = plan.pulls, plan.landing
        owners = set(plan.pulls.owners) if plan.pulls is not None else set[int]()
        if plan.landing is not None:
            streams = plan.landing.buckets.streams
            owners = {streams[number].owner for number in plan.landing.buckets.stream}
        self._shares = {owner: shares[owner] for owner in sorted(owners)}
        self.refused = False
        """True if memory could not be opened."""
        self.device = device
        self._turn, self._turns = turn, turns
        self._memory: dict[int, tuple[str, SharedMemory, list[_Piece]]] = {}
        """Each sender's memory with its digest, and the copies out of it; kept as long as its tensors lie where they did."""
        self._stream = torch.Stream(device)
        self._copies: dict[int, tuple[Tensor, Sequence[Strided], CopyTable, Tensor]] = {}
        """All that follows from the layouts of each sender's tensors, and is the same wherever they lie."""

    @property
    def lands(self) -> bool:
        """True if versions come into the node's memory."""
        return self._landing is not None

    @property
    def nbytes(self) -> int:
        """Bytes that are copied for a version."""
        return sum(piece.nbytes for *_, pieces in self._memory.values() for piece in pieces)

    def plan(self, digests: Sequence[str], fetch: Callable[[int], bytes]) -> None:
        """Plans the copies of a version, but for senders whose tensors lie where they did.

        Args:
            digests: for each rank, of what it has encoded.
            fetch: returns what a sender has encoded.
        """
        for owner, share in self._shares.items():
            if (known := self._memory.get(owner)) is not None and known[0] == digests[owner]:
                continue
            content = fetch(owner)
            if digest_of(content) != digests[owner]:
                raise LoadError(f"rank {owner} says something else of where its tensors lie than it did")
            memory = SharedMemory.decode(content)
            pieces = (
                self._pieces_of_tensors(owner, share, memory)
                if self._pulls is not None
                else self._pieces_of_buckets(owner)
            )
            self._memory[owner] = digests[owner], memory, list(pieces)

    def _pieces_of_tensors(self, owner: int, share: Share, memory: SharedMemory) -> Iterator[_Piece]:
        assert self._pulls is not None
        known = self._copies.get(owner)
        if known is None or known[1] != memory.layouts or not torch.equal(known[0], memory.layout):
            made = self._pulls.copies(owner, share, memory.layout, memory.layouts)
            known = self._copies[owner] = memory.layout, memory.layouts, *made
        copies, local = known[2:]
        allocation, begin = memory.places[local].unbind(1)
        order = allocation.argsort(stable=True)
        copies = copies.select(order)
        copies.offset.add_(begin[order])
        numbers, counts = torch.unique_consecutive(allocation[order], return_counts=True)
        sizes = counts.tolist()
        nbytes = torch.split(copies.nbytes(), sizes)
        for number, rows, each in zip(numbers.tolist(), torch.split(copies.rows, sizes), nbytes, strict=True):
            table = CopyTable(rows)
            yield _Piece(owner, number, -1, table.renumber_targets(), table, int(each.sum()))

    def _pieces_of_buckets(self, owner: int) -> Iterator[_Piece]:
        assert self._landing is not None
        for number in range(self._turn, len(self._landing.buckets), self._turns):
            bucket = self._landing.sources[owner][number]
            if bucket.stream.owner == owner:
                copies = bucket.copies
                yield _Piece(owner, -1, number, list(bucket.targets), copies, int(copies.nbytes().sum()))

    @contextmanager
    def copying(
        self,
        tensors: Sequence[Tensor],
        buckets: Mapping[int, Tensor],
        pipe: DevicePipe | None,
        prove: bool,
        control: Control,
    ) -> Iterator[None]:
        """Copies the version that was planned while the block runs, behind what is on the current stream. Afterwards nothing is
        open any more, and nothing under way.

        Args:
            tensors: this rank's, unless versions land.
            buckets: of the node, by their number in the landing.
            pipe: through which they are filled.
            prove: whether the copies are compared with what the senders hold.
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
                        sides.append(self._sides_of(piece, opened, memory, tensors, buckets))
                        with stream:
                            _copy(*sides[-1], pipe)
                        done(piece.nbytes)
            yield
            stream.synchronize()
            if prove:
                with stream:
                    for side in sides:
                        _compare(*side)
        finally:
            self.refused = opened.refused
            try:
                stream.synchronize()
            finally:
                opened.close()

    @staticmethod
    def _sides_of(
        piece: _Piece,
        opened: _Opened,
        memory: SharedMemory,
        tensors: Sequence[Tensor],
        buckets: Mapping[int, Tensor],
    ) -> tuple[Tensor, list[Tensor], _Piece]:
        """The bucket of a piece, and its targets."""
        if piece.bucket < 0:
            return (
                opened.allocation(piece.owner, memory, piece.allocation),
                [tensors[i] for i in piece.targets],
                piece,
            )
        return buckets[piece.bucket], [opened.tensor(piece.owner, memory, i) for i in piece.targets], piece


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
        found = self._allocations.get((owner, number))
        if found is None:
            try:
                found = ops.open_memory(memory.handles[number], memory.sizes[number], self._device)
            except RuntimeError as error:
                self.refused = True
                raise LoadError(
                    f"memory of rank {owner} cannot be opened, as if it had ended or freed its tensors: {_reason(error)}"
                ) from error
            self._allocations[owner, number] = found
        return found

    def tensor(self, owner: int, memory: SharedMemory, number: int) -> Tensor:
        """One of a sender's local tensors. Raises LoadError if it does not lie in its allocation."""
        layout = memory.layouts[int(memory.layout[number])]
        allocation, begin = memory.places[number].tolist()
        if 0 in layout.shape:
            return torch.empty_strided(layout.shape, layout.strides, dtype=layout.dtype, device=self._device)
        found = self.allocation(owner, memory, allocation)
        last = sum((size - 1) * stride for size, stride in zip(layout.shape, layout.strides, strict=True))
        end = begin + (last + 1) * layout.dtype.itemsize
        if not 0 <= begin < end <= found.nbytes:
            raise LoadError(f"rank {owner} says that a tensor ends at byte {end} of an allocation of {found.nbytes}")
        return found[begin:end].view(layout.dtype).as_strided(layout.shape, layout.strides)

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
        here, there = _sides(bucket, targets, row, piece.copies.dims)
        source, copy = (here, there) if piece.bucket < 0 else (there, here)
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


def _reason(error: Exception) -> str:
    """The first line of what a native op says."""
    return str(error).partition("\n")[0]
