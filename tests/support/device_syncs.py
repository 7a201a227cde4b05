"""Jobs that sync models on the fake accelerator."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from glob import glob
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import torch

import epload
from support import fakedev
from support.accelerator import DEVICE
from support.jobs import Meeting
from support.small_syncs import attempt, receiving, sending, take
from support.synced_models import build, values, write

CCL = "fakeccl"
"""The backend of the device."""


def move_to_cpu(model: torch.nn.Module) -> None:
    for name, parameter in list(model.named_parameters()):
        setattr(model, name, torch.nn.Parameter(parameter.detach().cpu()))


class Sent(NamedTuple):
    error: str
    transport: str
    seconds: float
    ended: float
    """Time at which it had ended."""


def send_versions(
    rank: int, meeting: Meeting, world: int = 1, receivers: int = 1, versions: int = 3, machine: str = "",
    before_second: Callable[[torch.nn.Module], None] = lambda model: None, verify: bool = False,
    waves: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> list[Sent]:  # fmt: skip
    """Sends versions of a model on the device. ``waves``: ``many_waves`` if receivers have that, too."""
    with on_machine(machine), waves():
        model, sent = build("fsdp" if world > 1 else "plain", world, where=DEVICE), []
        with sending(meeting, model, receivers, topology=topology_of((machine,), world), verify=verify) as sender:
            meeting.say(f"pid-{rank}", str(os.getpid()))
            for version in range(1, versions + 1):
                if version == 2:
                    before_second(model)
                write(model, version)
                began = time.monotonic()
                error, report = attempt(partial(sender.send_weights, version))
                sent.append(Sent(error, report.transport if report else "", time.monotonic() - began, time.time()))
        return sent


def send_late(rank: int, meeting: Meeting) -> None:
    """The weights are still being written on the caller's stream when they are sent."""
    model = build("plain", 1, where=DEVICE)
    with sending(meeting, model) as sender:
        caller = torch.Stream(DEVICE)
        full = values("big", 1).to(DEVICE)
        with caller:
            fakedev.hold(caller)
            with torch.no_grad():
                model.big.copy_(full)
            opener = threading.Thread(target=lambda: (time.sleep(0.5), fakedev.release(caller)))
            opener.start()
            sender.send_weights(1)
        opener.join()


def receive_late(rank: int, meeting: Meeting, where: str, stage: str) -> bool:
    """Checks that what the caller has queued reads the weights before they are replaced."""
    model = build("plain", 1, where=where)
    with receiving(meeting, model, stage=stage) as receiver:
        if where == "cpu":
            take(receiver)
            return torch.equal(model.big.detach(), values("big", 1))
        caller = torch.Stream(where)
        with caller:
            fakedev.hold(caller)
            seen = model.big.detach().clone()
            opener = threading.Thread(target=lambda: (time.sleep(1), fakedev.release(caller)))
            opener.start()
            take(receiver)
            found = model.big.detach().clone()
        opener.join()
        caller.synchronize()
        return not seen.cpu().any() and torch.equal(found.cpu(), values("big", 1))


@contextmanager
def on_machine(name: str) -> Iterator[None]:
    """This process takes itself to be on another machine than those with other names."""
    with ExitStack() as stack:
        for module in ("devices", "sender", "participants") if name else ():
            stack.enter_context(mock.patch(f"epload.sync.{module}.local_network", return_value=name))
        yield


def topology_of(machines: Sequence[str], world: int) -> epload.Topology | None:
    """Each machine is a node; the last is that of all further ranks. None if it has no name."""
    if not machines[0]:
        return None
    used = [machines[min(rank, len(machines) - 1)] for rank in range(world)]
    return epload.Topology.from_nodes([[i for i in range(world) if used[i] == name] for name in dict.fromkeys(used)])


def mapped_of(pid: int) -> set[int]:
    """Inodes of another process's device memory that this one has mapped."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    own = {int(line.split()[4]) for line in maps if "memfd:fakedev" in line}
    remote = set()
    for link in glob(f"/proc/{pid}/fd/*"):  # none if it has ended
        with suppress(OSError):  # closed meanwhile
            if "memfd:fakedev" in os.readlink(link):
                remote.add(os.stat(link).st_ino)
    return own & remote
