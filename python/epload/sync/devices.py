"""Determines what a rank's device allows: which ranks it reaches over its backend, and whose memory a receiver can open."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from epload.model.devices import backends_of
from epload.model.memory import keeps_writes
from epload.native import ops
from epload.planning.pulls import Reach
from epload.planning.streams import Members
from epload.ranks.control import Control
from epload.ranks.groups import can_connect
from epload.ranks.membership import local_network
from epload.transfer.affinity import pci_address

_NCCL_SETTINGS = (
    "NCCL_ALGO", "NCCL_BUFFSIZE", "NCCL_CUMEM_ENABLE", "NCCL_IB_DISABLE", "NCCL_LL128_BUFFSIZE", "NCCL_LL_BUFFSIZE", "NCCL_NET",
    "NCCL_NTHREADS", "NCCL_P2P_NET_CHUNKSIZE", "NCCL_PROTO",
)  # fmt: skip
"""Variables that NCCL reads in each process, and in which ranks that differ may hang."""


def accelerator_of(devices: Collection[torch.device]) -> torch.device | None:
    """Returns the only device, if it is no CPU."""
    accelerators = [device for device in devices if device.type not in ("cpu", "meta")]
    return accelerators[0] if len(accelerators) == len(devices) == 1 else None


class DeviceAccess(NamedTuple):
    """Tells how other ranks reach the device of one rank. Without a device, versions pass through host memory."""

    device: str = ""
    """The only device of the rank's tensors, if it is no CPU."""
    backend: str = ""
    """Connects it to ranks of the other job; empty if none does."""
    kind: str = ""
    """Device, backend, its version and its settings: equal on ranks that can reach each other."""
    identity: tuple[str, ...] = ()
    """Names of the device; ranks on one device have one in common."""
    machine: str = ""
    memory: str = ""
    """Type of the device whose memory the rank has, as a sender, or may open; empty if neither."""
    handle: str = ""
    """Handle of an allocation of a sender, by which receivers find out whether they can open its memory; empty if none can."""
    nbytes: int = 0
    """Bytes of the allocation."""
    obstacle: str = ""
    """Why a sender's memory cannot be shared."""

    @classmethod
    def of(cls, device: torch.device | None, opens: bool) -> DeviceAccess:
        """Returns the access to a rank. ``opens``: whether it has memory that others may open, or may open that of others."""
        if device is None:
            return cls()
        access = cls(str(device), machine=local_network(), memory=device.type if opens else "")
        group = dist.group.WORLD if dist.is_initialized() else None
        backends: Mapping[str, str] = dist.Backend.default_device_backend_map if group is None else backends_of(group)
        backend = str(backends.get(device.type, ""))
        if not can_connect(backend):
            return access
        version = ""
        if backend == "nccl":
            version = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
            version += "".join(f" {name}={value}" for name in _NCCL_SETTINGS if (value := os.environ.get(name)))
        kind = f"{device.type} {backend} {version}".strip()
        return access._replace(backend=backend, kind=kind, identity=tuple(_identity(device)))

    @classmethod
    def of_sender(cls, tensors: Sequence[Tensor]) -> DeviceAccess:
        devices = {tensor.device for tensor in tensors}
        device = accelerator_of(devices)
        if device is None:
            memory = next((device.type for device in devices if device.type not in ("cpu", "meta")), "")
            return cls(machine=local_network(), memory=memory, obstacle="its tensors are not all on one device")
        access = cls.of(device, opens=True)
        try:
            _, handles, sizes = share_memory(tensors)
        except (RuntimeError, ValueError) as error:  # if it cannot be read at all, packing it raises
            return access._replace(obstacle=first_line(error))
        if not handles:
            return access._replace(obstacle="its tensors are empty")
        return access._replace(handle=handles[0], nbytes=sizes[0])


def _identity(device: torch.device) -> Iterator[str]:
    if address := pci_address(device):  # the parts of a divided GPU have one, and NCCL takes them for one device
        yield f"{local_network()} {address}"
    with suppress(Exception):  # an old driver
        uuid = str(getattr(torch, device.type).get_device_properties(device).uuid)
        if uuid.strip("0-"):  # one that has none gives zeros
            yield uuid
            return
    if device.type == "npu":
        visible = os.environ.get("ASCEND_RT_VISIBLE_DEVICES", "").split(",")
        index = device.index or 0
        yield f"{local_network()} {visible[index] if len(visible) > index and visible[index] else index}"


def link_obstacle(ranks: Sequence[DeviceAccess]) -> str:
    """Returns why these ranks cannot all reach each other from their devices; empty if they can."""
    used: dict[str, int] = {}
    for rank, access in enumerate(ranks):
        if not access.kind:
            return f"rank {rank} has tensors elsewhere than on one device that NCCL or the like connects, or is not to use it"
        if access.kind != ranks[0].kind:
            return f"rank 0 has {ranks[0].kind}, rank {rank} {access.kind}"
        for name in access.identity:
            if used.setdefault(name, rank) != rank:
                return f"ranks {used[name]} and {rank} use one device"
    return ""


def share_memory(tensors: Sequence[Tensor]) -> tuple[Tensor, list[str], list[int]]:
    """See ``ops.share_memory``. Raises RuntimeError also for tensors whose memory does not hold their values."""
    if any(tensor.is_conj() or tensor.is_neg() for tensor in tensors):
        raise RuntimeError("one of its tensors is to be conjugated or negated when it is read (Tensor.resolve_conj)")
    if any(not keeps_writes(tensor) for tensor in tensors):
        raise RuntimeError("one of its tensors hands out copies of its elements")
    return ops.share_memory([tensor.detach() for tensor in tensors])


def first_line(error: Exception) -> str:
    """Returns the message of a native op without its trace."""
    return str(error).partition("\n")[0]


def find_reach(control: Control, members: Members, ranks: Sequence[DeviceAccess]) -> tuple[Reach, str]:
    """Finds out which receiving nodes can open the memory of which senders. Collective; the same on all ranks.

    Args:
        ranks: the access of each rank.

    Returns:
        The senders that every rank of a node reaches; why one on the same machine cannot be reached, empty if all can.
    """
    own, problems = ranks[control.rank], dict[int, str]()
    if own.memory and control.rank not in members.senders:
        for sender in members.senders:
            if (ranks[sender].machine, ranks[sender].memory) == (own.machine, own.memory):
                problems[sender] = _opening_problem(control.rank, sender, ranks)
    views = control.agree("opening memory of devices", None, problems, lambda views: list(views.items()))
    opened = {rank: {int(sender) for sender, problem in view.items() if not problem} for rank, view in views}
    reach = {}
    for number, node in enumerate(members.nodes):
        if common := set.intersection(*(opened[rank] for rank in node)):
            reach[number] = tuple(sorted(common))
    return reach, next((problem for _, view in views for problem in view.values() if problem), "")


def _opening_problem(rank: int, sender: int, ranks: Sequence[DeviceAccess]) -> str:
    """Returns why a receiver cannot open a sender's memory; empty if it can."""
    access = ranks[sender]
    if not access.handle:
        return f"memory of rank {sender} cannot be shared: {access.obstacle}"
    try:
        ops.close_memory(ops.open_memory(access.handle, access.nbytes, torch.device(ranks[rank].device)))
    except RuntimeError as error:
        return f"rank {rank} cannot open rank {sender}'s: {first_line(error)}"
    return ""
