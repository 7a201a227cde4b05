"""A campaign of seeded faults in loads, each judged: the right result, or one same error on every live rank, in time; and nothing
left.

    python -m campaigns.chaos --faults 300 --seed 0

Two nodes of two ranks load without a fault, with one, and without again.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from campaigns import seeds
from campaigns.chaos_faults import ANEW, HARMLESS, REGRESSIONS, WORLD, Fault, broken, places_of
from epload import HierarchicalLoader, Topology
from epload.transfer import direct_read
from support import ranks
from support.small_model import NODES, meta_net, state_for, wrong

TIMEOUT = 4.0
"""Seconds without progress; short, as a stopped rank takes it whole."""
PATIENCE = 30.0
"""The same where all ranks have to succeed, on a machine that may be busy."""
IN_TIME = 4 * TIMEOUT + 15
"""Seconds that a failing load may take: waits of a timeout may follow one another, and this machine may be busy."""


@dataclass
class Outcome:
    """Describes what one load did on one rank."""

    kind: str = ""
    """Class of what it raised, empty if nothing."""
    text: str = ""
    seconds: float = 0.0
    wrong: list[str] = field(default_factory=list)
    """Tensors with other values than the checkpoint's, after a load that raised nothing."""
    leaks: list[str] = field(default_factory=list)
    fired: bool = False


def leaks(folder: str, memories: int = 1) -> list[str]:
    """Returns what a load must not leave behind, except sockets of groups that a failure retired (docs/reliability.md).

    ``memories``: how many loaders keep a shared buffer.
    """
    gc.collect()
    problems = [f"thread {name}" for name in seeds.left_over()]
    for entry in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{entry}")
        except OSError:
            continue
        if target.startswith((folder, "/dev/shm/")):
            problems.append(f"descriptor {target}")
    mapped = sum("memfd:epload" in line for line in Path("/proc/self/maps").read_text().splitlines())
    return problems + ([f"{mapped} shared buffers"] if mapped > memories else [])


class Loads:
    """The loads of one rank."""

    def __init__(self, fault: Fault, folder: str) -> None:
        self._fault = fault
        self._folder = folder
        self._path = Path(folder) / "model.safetensors"
        self._topology = Topology.from_nodes(NODES)

    def run(self, rank: int) -> tuple[list[Outcome], list[Outcome], list[Outcome]]:
        """Returns how the loads without a fault, with it, and without again have ended."""
        fault, content = self._fault, self._path.read_bytes()
        is_victim = rank == fault.victim
        loader, counter = self._loader(), seeds.Moments(places_of(fault))
        with counter:
            before = self._load(loader)
        if fault.kind == "full disk":
            loader = self._loader()  # which has no buffers yet
        if fault.kind == "two threads":
            during = self._two_threads(loader, is_victim and fault.moment < 0.5)
        elif fault.kind == "mismatch" and is_victim:
            during = [self._load(loader, torch.float64 if fault.moment < 0.5 else torch.bfloat16)]
            during[0].fired = True
        else:
            make = (lambda: self._loader(Topology.from_nodes(NODES, timeout=TIMEOUT))) if fault.kind in ANEW else None
            if is_victim:
                with broken(fault, self._path, counter.count, TIMEOUT) as moments:
                    during = [self._load(loader, make=make)]
                during[0].fired = moments.fired
            else:
                during = [self._load(loader, make=make)]
        if fault.kind.startswith("kill"):
            return [before], during, []
        dist.barrier()
        if is_victim and fault.kind in ("truncated", "replaced"):
            with open(self._path, "r+b") as file:  # the same file: others have it open
                file.write(content)
        dist.barrier()
        del loader  # and its buffers
        return [before], during, [self._load(self._loader(patient=True))]

    def _two_threads(self, loader: HierarchicalLoader, swapped: bool) -> list[Outcome]:
        """Two loads of different checkpoints, with one loader, two of one topology, or two topologies."""
        kind = self._fault.seed % 3
        topologies = [self._topology] + [Topology.from_nodes(NODES)] * (kind == 2)
        loaders = [loader, loader if kind == 0 else self._loader(topologies[-1])]
        outcomes = [Outcome(), Outcome()]

        def load(which: int) -> None:
            path = self._path.with_name(("model", "other")[which] + ".safetensors")
            outcomes[which] = self._load(loaders[which], path=path, number=which + 1)

        threads = [threading.Thread(target=load, args=(which,)) for which in (0, 1)]
        for thread in reversed(threads) if swapped else threads:
            thread.start()
            time.sleep(0.02 * self._fault.moment)
        for thread in threads:
            thread.join()
        left = leaks(self._folder, memories=1 + (kind > 0))
        for outcome in outcomes:
            outcome.leaks, outcome.fired = left, True
        return outcomes

    def _loader(self, topology: Topology | None = None, patient: bool = False) -> HierarchicalLoader:
        fault = self._fault
        timeout = PATIENCE if patient or fault.kind in HARMLESS else TIMEOUT
        return HierarchicalLoader(
            topology or self._topology, readers=fault.way[0], algorithm=fault.way[1], bucket_bytes=fault.bucket_bytes,
            verify=fault.verify, timeout=timeout, progress=False,
        )  # fmt: skip

    def _load(
        self, loader: HierarchicalLoader, dtype: torch.dtype = torch.float32,
        make: Callable[[], HierarchicalLoader] | None = None, path: Path | None = None, number: int = 1,
    ) -> Outcome:  # fmt: skip
        """``make``: a loader of a topology that is part of what may fail. ``number``: of the state that ``path`` has."""
        outcome, model, began = Outcome(), meta_net(dtype), time.monotonic()
        try:
            (make() if make is not None else loader).load(model, path or self._path)
            outcome.wrong = wrong(model, state_for(number))
        except BaseException as error:
            outcome.kind, outcome.text = type(error).__name__, str(error)
        outcome.seconds = time.monotonic() - began
        outcome.leaks = leaks(self._folder)
        return outcome


def load_with(rank: int, fault: Fault, folder: str) -> tuple[list[Outcome], list[Outcome], list[Outcome]]:
    direct_read.READ_BYTES, direct_read.GROWTH = 1, 1  # so that each wave of the small model is a call, which may fail
    signal.signal(signal.SIGINT, signal.default_int_handler)
    return Loads(fault, folder).run(rank)


def judge(seed: int) -> tuple[str, str]:
    """Returns the verdict on one fault, and why."""
    fault = Fault.of(seed)
    dies = fault.kind.startswith("kill")
    with tempfile.TemporaryDirectory(prefix="epload-chaos-") as folder:
        save_file(state_for(1), Path(folder) / "model.safetensors")
        save_file(state_for(2), Path(folder) / "other.safetensors")
        try:
            answers = ranks.run(WORLD, load_with, fault, folder, dying=[fault.victim] if dies else [], tcp=True)
        except ranks.RankFailed as error:
            if "was to die, but returned" in str(error):
                return "no fault", str(fault)
            return "hang" if seeds.has_hung(error) else "wrong", f"{fault}\n{error}"
    living = [answer for answer in answers if answer is not None]
    fired = dies or any(outcome.fired for _, during, _ in living for outcome in during)
    phases = [[outcome for each in living for outcome in each[number]] for number in (0, 2)]
    for verdict, why in [
        *map(judge_clean, phases),
        *(judge_load(fault, list(outcomes)) for outcomes in zip(*(during for _, during, _ in living), strict=True)),
    ]:
        if verdict:
            return verdict, f"{fault}: {why}"
    return ("right" if fired or fault.kind == "stop" else "no fault"), str(fault)


def judge_load(fault: Fault, outcomes: list[Outcome]) -> tuple[str, str]:
    """Judges a load with a fault; empty if it ended as it may."""
    if all(not outcome.kind for outcome in outcomes) or fault.kind in HARMLESS:
        return judge_clean(outcomes)
    interrupted = [outcome for outcome in outcomes if outcome.kind == "KeyboardInterrupt"]
    if len(interrupted) > (fault.kind == "interrupt"):
        return "wrong", f"{len(interrupted)} ranks were interrupted"
    others = [outcome for outcome in outcomes if outcome not in interrupted]
    if len({(outcome.kind, outcome.text) for outcome in others}) > 1:
        return "wrong", "different ends: " + " | ".join(f"{o.kind}: {o.text[:300]}" for o in others)
    kind, text = others[0].kind, others[0].text
    if kind and (not kind.endswith(("Error", "Mismatch")) or not text):
        return "wrong", f"raised {kind}: {text[:300]}"
    if not kind:
        return judge_clean(others)
    if max(outcome.seconds for outcome in outcomes) > IN_TIME and fault.kind != "stop":
        return "late", f"took {max(outcome.seconds for outcome in outcomes):.0f} s"
    return _left(outcomes)


def judge_clean(outcomes: Sequence[Outcome]) -> tuple[str, str]:
    for outcome in outcomes:
        if outcome.kind or outcome.wrong:
            return "wrong", f"{outcome.kind}: {outcome.text[:600]} {outcome.wrong[:3]}"
    return _left(outcomes)


def _left(outcomes: Sequence[Outcome]) -> tuple[str, str]:
    left = sorted({leak for outcome in outcomes for leak in outcome.leaks})
    return ("leak", ", ".join(left)) if left else ("", "")


if __name__ == "__main__":
    sys.exit(seeds.run(__doc__, judge, ("right", "no fault"), REGRESSIONS))
