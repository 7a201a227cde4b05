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

from epload.control.control import Control
from epload.core import dtypes
from epload.core.columns import column
from epload.core.copy_table import CopyTable
from epload.core.placement import box_slices
from epload.errors import LoadError
from epload.native import ops
from epload.planning.pulls import Pulls, Reach, Strided
from epload.planning.shares import Share, digest_of
from epload.planning.streams import Members


@dataclass(frozen=True, eq=False)
class SharedMemory:
    """Where the local tensors of one sender lie, for one version."""

    handles: Sequence[str]
    """Of each allocation; see ``ops.open_memory``."""
    sizes: Sequence[int]
    """Bytes of each allocation."""
    layouts: Sequence[Strided]
    layout: Tensor
    """int64 [m], of each local tensor, an index into ``layouts``."""
    places: Tensor
    """int64 [m, 2], of each local tensor: its allocation, and where in it the tensor begins (bytes)."""

    @classmethod
    def of(cls, tensors: Sequence[Tensor]) -> SharedMemory:
        """Raises RuntimeError if other processes cannot open the memory."""
        places, handles, sizes = ops.share_memory([tensor.detach() for tensor in tensors])
        numbers: dict[Strided, int] = {}
        layout = [numbers.setdefault(Strided(tensor.dtype, tensor.stride()), len(numbers)) for tensor in tensors]
        return cls(handles, sizes, list(numbers), column(layout), places)

    def encode(self) -> bytes:
        """Compressed."""
        layouts = [(dtypes.name(each.dtype), each.strides) for each in self.layouts]
        columns = [self.layout.tolist(), self.places.flatten().tolist()]
        return zlib.compress(
            json.dumps([self.handles, self.sizes, layouts, *columns], separators=(",", ":")).encode(), 1
        )

    @classmethod
    def decode(cls, content: bytes) -> SharedMemory:
        """The inverse of :meth:`encode`."""
        handles, sizes, layouts, layout, places = json.loads(zlib.decompress(content))
        of_layouts = [Strided(dtypes.from_name(name), tuple(strides)) for name, strides in layouts]
        return cls(handles, sizes, of_layouts, column(layout), column(places).reshape(-1, 2))


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
        device = accelerator_of({tensor.device for tensor in tensors})
        first = next((tensor for tensor in tensors if tensor.numel()), None)
        if device is None or first is None:
            return Probe("", "", 0, "its tensors are not all on one device")
        try:
            _, (handle,), (nbytes,) = ops.share_memory([first.detach()])
        except RuntimeError as error:
            return Probe(device.type, "", 0, _reason(error))
        return Probe(device.type, handle, nbytes, "")

    def opens(self, device: torch.device) -> str:
        """Why it cannot be opened for a device of this process; empty if it can."""
        try:
            ops.open_memory(self.handle, self.nbytes, device)
        except RuntimeError as error:
            return _reason(error)
        return ""


def find_reach(
    control: Control, members: Members, device: torch.device | None, near: Sequence[Sequence[Any]]
) -> tuple[Reach, str]:
    """Which receiving nodes can open the memory of which senders. Collective; the same on all ranks.

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
    """Of each rank, the senders that it has opened; the first reason why one could not be."""
    return [
        {str(rank): senders for rank, (senders, _) in views.items()},
        next((why for _, why in views.values() if why), ""),
    ]


class _Allocation(NamedTuple):
    """What is copied out of one allocation of a sender."""

    handle: str
    nbytes: int
    """Of the allocation."""
    targets: list[int]
    """Local tensors of the receiver."""
    copies: CopyTable
    """Targets count in ``targets``; the allocation is the bucket."""


class Puller:
    """What one receiver pulls, version after version."""

    def __init__(self, pulls: Pulls, shares: Mapping[int, Share], device: torch.device) -> None:
        """``shares``: of the senders that it pulls from."""
        self._pulls = pulls
        self._shares = shares
        self.device = device
        """Of this rank's tensors."""
        self._planned: dict[int, tuple[str, list[_Allocation]]] = {}
        """By sender, with the digest of where its tensors lie."""

    @property
    def nbytes(self) -> int:
        """What is copied for a version."""
        return sum(int(each.copies.nbytes().sum()) for _, some in self._planned.values() for each in some)

    def plan(self, digests: Sequence[str], fetch: Callable[[int], bytes]) -> None:
        """Plans the copies of a version, but for senders whose tensors lie where they did.

        Args:
            digests: for each rank, of what it has encoded.
            fetch: returns what a sender has encoded.
        """
        for owner in self._pulls.owners:
            if (known := self._planned.get(owner)) is not None and known[0] == digests[owner]:
                continue
            content = fetch(owner)
            if digest_of(content) != digests[owner]:
                raise LoadError(f"rank {owner} says something else of where its tensors lie than it did")
            self._planned[owner] = digests[owner], list(self._allocations(owner, SharedMemory.decode(content)))

    def _allocations(self, owner: int, memory: SharedMemory) -> Iterator[_Allocation]:
        copies, allocation = self._pulls.copies(
            owner, self._shares[owner], memory.layout, memory.layouts, memory.places
        )
        for number in torch.unique(allocation).tolist():
            if number < 0:
                raise LoadError(f"rank {owner} says that tensors which have elements are empty")
            rows = copies.select(allocation == number)
            targets = rows.renumber_targets()
            yield _Allocation(memory.handles[number], memory.sizes[number], targets, rows)

    @contextmanager
    def copying(self, tensors: Sequence[Tensor], prove: bool) -> Iterator[None]:
        """Copies the version that was planned while the block runs, behind what is on the current stream. Afterwards nothing is
        open any more, and nothing under way.

        Args:
            tensors: this rank's.
            prove: whether the copies are compared with what the senders hold.

        Raises:
            LoadError: memory of a sender cannot be opened, or a copy differs from it.
        """
        stream = torch.Stream(self.device)
        stream.wait_stream(torch.accelerator.current_stream(self.device))
        opened: list[Tensor] = []
        try:
            for owner, (_, allocations) in self._planned.items():
                for each in allocations:
                    opened.append(self._open(owner, each))
                    with stream:
                        ops.unpack(opened[-1], [tensors[i] for i in each.targets], each.copies.rows)
            yield
            stream.synchronize()
            if prove:
                self._compare(opened, tensors)
        finally:
            stream.synchronize()
            opened.clear()

    def _open(self, owner: int, allocation: _Allocation) -> Tensor:
        try:
            return ops.open_memory(allocation.handle, allocation.nbytes, self.device)
        except RuntimeError as error:
            raise LoadError(f"rank {owner} has ended or has freed its tensors: {_reason(error)}") from error

    def _compare(self, opened: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
        """Compares by torch's own means, not those that have copied."""
        allocations = [(owner, each) for owner, (_, some) in self._planned.items() for each in some]
        for memory, (owner, each) in zip(opened, allocations, strict=True):
            for row in each.copies.rows.tolist():
                source, target = _sides(memory, tensors, each, row, each.copies.dims)
                same = same_bits if source.dtype == target.dtype else _same_values
                if not same(source.to(target.dtype), target):
                    raise LoadError(
                        f"a copy out of the memory of rank {owner} differs from it: the memory of this machine changes bits, or "
                        "the sender's tensors were changed meanwhile"
                    )


def _sides(
    memory: Tensor, tensors: Sequence[Tensor], allocation: _Allocation, row: list[int], dims: int
) -> tuple[Tensor, Tensor]:
    """What a row of a copy table is about, in the allocation and in this rank's tensor."""
    number, offset, code, ndim = row[:4]
    start, size, stride = (row[4 + i * dims : 4 + i * dims + ndim] for i in range(3))
    dtype = dtypes.from_code(code)
    end = offset + (sum((n - 1) * step for n, step in zip(size, stride, strict=True)) + 1) * dtype.itemsize
    source = memory[offset:end].view(dtype).as_strided(size, stride)
    return source, tensors[allocation.targets[number]][box_slices(tuple(start), tuple(size))]


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors of one shape and dtype are equal in each bit."""
    return torch.equal(a.contiguous().view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8))


def _same_values(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are equal, but for the bits of NaNs."""
    return bool(((a == b) | (a.isnan() & b.isnan())).all())


def _reason(error: RuntimeError) -> str:
    """The first line of what a native op says."""
    return str(error).partition("\n")[0]
