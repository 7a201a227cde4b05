"""One rank of a job that is loaded into over and over, with faults."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from campaigns.chaos.faults import ANEW, WORLD, Fault, Moments, broken, moments_of
from epload import HierarchicalLoader, Topology
from epload.transfer import direct_read
from netbed import INTERFACE, enter
from support.small_model import NODES, meta_net, state_for, wrong

TIMEOUT = 4.0
"""Seconds without progress; short, as a stopped rank takes it whole."""


@dataclass
class Outcome:
    """What one load did on one rank."""

    kind: str = ""
    """Class of what it raised, empty if nothing."""
    text: str = ""
    seconds: float = 0.0
    wrong: list[str] = field(default_factory=list)
    """Tensors with other values than the checkpoint's, after a load that raised nothing."""
    leaks: list[str] = field(default_factory=list)
    fired: bool = False


def leaks(folder: Path, memories_of: int = 1, watches: int = 1) -> list[str]:
    """What a load must not leave behind. Sockets of groups that a failure retired are not looked at (docs/reliability.md).

    ``memories_of``: how many loaders keep a buffer for their next load. ``watches``: how many topologies keep a watch over the
    processes of the other ranks.
    """
    gc.collect()
    problems = [f"thread {thread.name}" for thread in threading.enumerate() if thread.name.startswith("epload-")]
    watched = Counter[str]()
    for entry in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{entry}")
            if "[pidfd]" in target:
                watched[_process_of(entry)] += 1
        except OSError:
            continue
        if target.startswith((str(folder), "/dev/shm/")):
            problems.append(f"descriptor {target}")
    problems += [f"{count} watches over process {pid}" for pid, count in watched.items() if count > watches]
    if memories() > memories_of:  # those of each loader, which it keeps for its next load
        problems.append(f"{memories()} shared buffers")
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return problems + [f"process {child}" for child in children]


def _process_of(pidfd: str) -> str:
    """Id of a process that a descriptor refers to; -1 if it has ended."""
    return next(
        line.split()[1]
        for line in Path(f"/proc/self/fdinfo/{pidfd}").read_text().splitlines()
        if line.startswith("Pid:")
    )


def memories() -> int:
    """Node-shared buffers that are mapped; each has a descriptor."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    return sum("memfd:epload" in line for line in maps)


class Rank:
    def __init__(self, rank: int, folder: Path, mbit: int) -> None:
        self._rank = rank
        self._mbit = mbit
        self._path = folder / "model.safetensors"
        self._good = self._path.read_bytes()
        self._folder = folder
        self._topology = Topology.from_nodes(NODES)

    def run(self, seed: int) -> list[Outcome]:
        """A load without the fault, one with it, one without again."""
        fault = Fault.of(seed)
        loader = self._loader(fault)
        counter = Moments(moments_of(fault))
        with counter.watched():
            outcomes = [self._load(loader)]
        if fault.kind == "full disk":
            loader = self._loader(fault)  # which has no buffers yet
        if fault.kind == "two threads":
            return outcomes + self._two_threads(fault, loader)
        make = (
            (lambda: self._loader(fault, Topology.from_nodes(NODES, timeout=TIMEOUT))) if fault.kind in ANEW else None
        )
        if fault.kind == "mismatch" and self._rank == fault.victim:
            outcomes.append(self._load(loader, torch.float64 if fault.moment < 0.5 else torch.bfloat16))
            outcomes[-1].fired = True
        elif self._rank == fault.victim:
            with broken(fault, self._path, counter.count, TIMEOUT, self._mbit) as moments:
                outcomes.append(self._load(loader, make=make))
            outcomes[-1].fired = moments.fired
        else:
            outcomes.append(self._load(loader, make=make))
        return outcomes

    def _two_threads(self, fault: Fault, loader: HierarchicalLoader) -> list[Outcome]:
        """Two loads of different checkpoints, with one loader, two of one topology, or two topologies; in half of the faults the
        victim begins them in another order than the other ranks."""
        other = (
            loader if fault.seed % 3 == 0
            else self._loader(fault) if fault.seed % 3 == 1
            else self._loader(fault, Topology.from_nodes(NODES))
        )  # fmt: skip
        outcomes = [Outcome(), Outcome()]

        def load(which: int) -> None:
            path = self._path if which == 0 else self._folder / "other.safetensors"
            outcomes[which] = self._load(loader if which == 0 else other, path=path, number=which + 1)

        threads = [threading.Thread(target=load, args=(which,)) for which in (0, 1)]
        for thread in reversed(threads) if fault.moment < 0.5 and self._rank == fault.victim else threads:
            thread.start()
            time.sleep(0.02 * fault.moment)
        for thread in threads:
            thread.join()
        topologies = {id(each.topology) for each in (loader, other)}
        found = leaks(self._folder, memories_of=1 if other is loader else 2, watches=len(topologies))
        for outcome in outcomes:
            outcome.leaks, outcome.fired = found, True
        return outcomes

    def after(self, seed: int) -> list[Outcome]:
        """A load when all ranks are done with the fault."""
        fault = Fault.of(seed)
        if fault.kind == "truncated" and self._rank == fault.victim:
            with open(self._path, "r+b") as file:  # the same file: others have it open
                file.write(self._good)
        if fault.kind == "replaced" and self._rank == fault.victim:
            self._path.write_bytes(self._good)
        dist.barrier()
        return [self._load(self._loader(fault))]

    def _loader(self, fault: Fault, topology: Topology | None = None) -> HierarchicalLoader:
        return HierarchicalLoader(
            topology or self._topology, readers=fault.way[0], algorithm=fault.way[1], bucket_bytes=fault.bucket_bytes,
            verify=fault.verify, timeout=TIMEOUT, progress=False,
        )  # fmt: skip

    def _load(
        self,
        loader: HierarchicalLoader,
        dtype: torch.dtype = torch.float32,
        make: Callable[[], HierarchicalLoader] | None = None,
        path: Path | None = None,
        number: int = 1,
    ) -> Outcome:
        """``make``: a loader of a topology that is part of what may fail. ``number``: of the state that ``path`` has."""
        outcome = Outcome()
        model = meta_net(dtype)
        began = time.monotonic()
        try:
            (make() if make is not None else loader).load(model, path or self._path)
            outcome.wrong = wrong(model, state_for(number))
        except BaseException as error:
            outcome.kind, outcome.text = type(error).__name__, str(error)
        outcome.seconds = time.monotonic() - began
        outcome.leaks = leaks(self._folder)
        return outcome


@dataclass(frozen=True)
class Place:
    """Where a rank runs, and where it finds the store."""

    host: str
    port: int
    namespace: str = ""
    """Of its node in the test-bed."""
    mbit: int = 0
    """Rate of that node's link."""


def main(rank: int, folder: str, place: Place, link: Connection) -> None:
    """Carries out the commands that arrive over ``link`` until it closes."""
    if place.namespace:
        enter(place.namespace)
        os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE
    torch.set_num_threads(1)
    direct_read.READ_BYTES = 1  # so that each wave of the small model is a call, which may fail
    signal.signal(signal.SIGINT, signal.default_int_handler)
    store = dist.TCPStore(place.host, place.port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD, timeout=timedelta(seconds=120))
    worker: Any = Rank(rank, Path(folder), place.mbit)
    link.send(os.getpid())
    while True:
        try:
            step, seed = link.recv()
        except EOFError:
            os._exit(0)  # without destroying groups whose other ranks may be gone
        link.send(getattr(worker, step)(seed))
