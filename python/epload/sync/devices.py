"""Determines what a rank's device allows: which ranks it reaches over its backend, and whose memory a receiver can open."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from epload.native import ops
from epload.planning.pulls import Reach
from epload.planning.streams import Members
from epload.ranks.control import Control
from epload.ranks.groups import backends_of, can_connect
from epload.ranks.membership import local_network


def accelerator_of(devices: Collection[torch.device]) -> torch.device | None:
    """Returns the only device, if it is no CPU."""
    (device,) = devices if len(devices) == 1 else (torch.device("cpu"),)
    return device if device.type not in ("cpu", "meta") else None


@dataclass(frozen=True)
class DeviceLink:
    """The connection by which one rank's device may reach the ranks of the other job."""

    backend: str = ""
    """Empty if versions have to pass through host memory."""
    kind: str = ""
    """Device, backend and its version: equal on ranks that can reach each other."""
    place: str = ""
    """Identity of the device; empty if it is not known."""

    @classmethod
    def of(cls, device: torch.device | None) -> DeviceLink:
        """Returns the link of a rank whose tensors are on a device; an empty one unless a backend connects it."""
        if device is None or not dist.is_available():
            return cls()
        group = dist.group.WORLD if dist.is_initialized() else None
        backends: Mapping[str, str] = (
            backends_of(group) if group is not None else dist.Backend.default_device_backend_map
        )
        backend = str(backends.get(device.type, ""))
        if not can_connect(backend):
            return cls()
        version = ".".join(map(str, torch.cuda.nccl.version())) if backend == "nccl" else ""  # type: ignore[no-untyped-call]
        return cls(backend, f"{device.type} {backend} {version}".strip(), _place_of(device))


def _place_of(device: torch.device) -> str:
    with suppress(Exception):  # an old driver
        uuid = str(getattr(torch, device.type).get_device_properties(device).uuid)
        if uuid.strip("0-"):  # one that has none gives zeros
            return uuid
    if device.type != "npu":
        return ""
    visible = os.environ.get("ASCEND_RT_VISIBLE_DEVICES", "").split(",")
    index = device.index or 0
    return f"{local_network()} {visible[index] if len(visible) > index and visible[index] else index}"


def obstacle(links: Sequence[DeviceLink]) -> str:
    """Returns why ranks with these links cannot all reach each other from their devices; empty if they can."""
    used: dict[str, int] = {}
    for rank, link in enumerate(links):
        if not link.kind:
            return f"rank {rank} has tensors elsewhere than on one device that NCCL or the like connects, or is not to use it"
        if link.kind != links[0].kind:
            return f"rank 0 has {links[0].kind}, rank {rank} {link.kind}"
        if link.place and used.setdefault(link.place, rank) != rank:
            return f"ranks {used[link.place]} and {rank} use one device"
    return ""


@dataclass(frozen=True)
class Probe:
    """An allocation of a sender, by which receivers find out whether they can open its memory; or a receiver that may."""

    machine: str = ""
    kind: str = ""
    """Type of the device; empty for a rank that neither shares nor opens memory."""
    handle: str = ""
    """Empty if the memory cannot be shared."""
    nbytes: int = 0
    obstacle: str = ""
    """Why it cannot."""

    @classmethod
    def of(cls, tensors: Sequence[Tensor]) -> Probe:
        """Returns the probe of a sender with these tensors."""
        devices, machine = {tensor.device for tensor in tensors}, local_network()
        kind = next((device.type for device in devices if device.type not in ("cpu", "meta")), "")
        if accelerator_of(devices) is None:
            return cls(machine, kind, obstacle="its tensors are not all on one device")
        try:
            _, handles, sizes = share_memory(tensors)
        except (RuntimeError, ValueError) as error:  # if it cannot be read at all, whoever packs it says so
            return cls(machine, kind, obstacle=first_line(error))
        return (
            cls(machine, kind, handles[0], sizes[0])
            if handles
            else cls(machine, kind, obstacle="its tensors are empty")
        )

    def open_error(self, device: torch.device) -> str:
        """Returns why a device of this process cannot open it; empty if it can."""
        try:
            ops.close_memory(ops.open_memory(self.handle, self.nbytes, device))
        except RuntimeError as error:
            return first_line(error)
        return ""


def share_memory(tensors: Sequence[Tensor]) -> tuple[Tensor, list[str], list[int]]:
    """See ``ops.share_memory``. Raises RuntimeError also for tensors whose memory does not hold their values."""
    if any(tensor.is_conj() or tensor.is_neg() for tensor in tensors):
        raise RuntimeError("one of its tensors is to be conjugated or negated when it is read (Tensor.resolve_conj)")
    return ops.share_memory([tensor.detach() for tensor in tensors])


def first_line(error: Exception) -> str:
    """Returns the message of a native op without its trace."""
    return str(error).partition("\n")[0]


def find_reach(
    control: Control, members: Members, device: torch.device | None, probes: Sequence[Probe]
) -> tuple[Reach, str]:
    """Finds out which receiving nodes can open the memory of which senders. Collective; the same on all ranks.

    Args:
        device: of a receiver that may open memory.
        probes: of each rank.

    Returns:
        The senders that every rank of a node reaches; why one on the same machine cannot be reached, empty if all can.
    """
    shared: dict[int, list[int]] = {}
    reasons = []
    for rank in members.receivers:
        key = probes[rank].machine, probes[rank].kind
        local = [each for each in members.senders if key == (probes[each].machine, probes[each].kind) and key[1]]
        shared[rank] = [sender for sender in local if probes[sender].handle]
        hidden = [sender for sender in local if not probes[sender].handle]
        reasons += [f"memory of rank {sender} cannot be shared: {probes[sender].obstacle}" for sender in hidden]
    reason = next(iter(reasons), "")
    if not any(shared.values()):
        return {}, reason
    errors: dict[int, str] = {}
    if device is not None:
        errors = {sender: probes[sender].open_error(device) for sender in shared[control.rank]}

    def decide(views: dict[int, dict[str, str]]) -> dict[str, dict[str, str]]:
        return {str(rank): view for rank, view in views.items() if view}

    decision = control.settle("opening memory of devices", None, errors, decide)
    reached = {int(rank): {int(each) for each, why in view.items() if not why} for rank, view in decision.items()}
    failed = (
        f"rank {rank} cannot open rank {sender}'s: {why}"
        for rank, view in decision.items()
        for sender, why in view.items()
        if why
    )
    nodes = enumerate(members.nodes)
    common = {number: set.intersection(*(reached.get(rank, set()) for rank in node)) for number, node in nodes}
    return {number: tuple(sorted(senders)) for number, senders in common.items() if senders}, reason or next(failed, "")
