"""A campaign of seeded faults, each judged: the right result, or one same error on every live rank, in time; and nothing left.

    python -m campaigns.chaos --faults 300 --seed 0
    python -m campaigns.chaos --faults 300 --seed 0 --links     # each node in a network namespace; needs root

With --links the two nodes are joined by links of a given rate, and a slow link is one of 64 kbit/s; without, it is a relay that
is held up.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import re
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from multiprocessing.connection import wait
from pathlib import Path

import torch.distributed as dist
from safetensors.torch import save_file

from campaigns.chaos.faults import HARMLESS, KINDS, REGRESSIONS, WORLD, Fault
from campaigns.chaos.job import TIMEOUT, Outcome, Place, main
from netbed import HOST, NetBed
from support.small_model import NODES, state_for

_context = multiprocessing.get_context("forkserver")
HANG = 90.0
"""Seconds after which a rank that has not answered hangs."""
IN_TIME = 4 * TIMEOUT + 15
"""Seconds that a failing load may take: waits of a timeout may follow one another, and this machine may be busy."""
MBIT = 1000
"""Of a node's link in the test-bed."""


class Job:
    """Four ranks, and a store that outlives them, as a launcher's does."""

    def __init__(self, bed: NetBed | None) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="epload-chaos-")
        save_file(state_for(1), Path(self._folder.name) / "model.safetensors")
        save_file(state_for(2), Path(self._folder.name) / "other.safetensors")
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._links, self._processes = [], []
        if bed is not None:
            bed.restore()
        for rank in range(WORLD):
            place = Place("127.0.0.1", self._store.port)
            if bed is not None:
                node = next(i for i, ranks in enumerate(NODES) if rank in ranks)
                place = Place(HOST, self._store.port, bed.namespace(node), bed.mbit)
            ours, theirs = _context.Pipe()
            process = _context.Process(target=main, args=(rank, self._folder.name, place, theirs), daemon=True)
            process.start()
            theirs.close()
            self._links.append(ours)
            self._processes.append(process)
        self.pids = self.collect(set(range(WORLD)))
        if absent := sorted(rank for rank in range(WORLD) if self.pids.get(rank) is None):
            self.close()
            raise SystemExit(f"ranks {absent} did not start")

    def tell(self, step: str, seed: int) -> None:
        for link in self._links:
            link.send((step, seed))

    def collect(self, ranks: set[int]) -> dict[int, list[Outcome] | None]:
        """What ``ranks`` answer, None for one that died; those that hang are missing."""
        answers: dict[int, list[Outcome] | None] = {}
        until = time.monotonic() + HANG
        waiting = {self._links[rank]: rank for rank in ranks}
        while waiting and (ready := wait(list(waiting), timeout=max(0.0, until - time.monotonic()))):
            for link in ready:
                rank = waiting.pop(link)
                try:
                    answers[rank] = link.recv()
                except (EOFError, ConnectionResetError):
                    answers[rank] = None
        return answers

    def close(self) -> None:
        for link in self._links:
            link.close()
        for process in self._processes:
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join()
        self._folder.cleanup()


def run(job: Job, fault: Fault) -> tuple[str, bool, bool]:
    """What is wrong with how a fault ended, whether it happened, and whether the job can go on."""
    everyone = set(range(WORLD))
    job.tell("run", fault.seed)
    first = everyone - {fault.victim} if fault.kind == "stop" else everyone
    answers = job.collect(first)
    stopped = fault.kind == "stop" and _state(job.pids[fault.victim]) == "T"
    if fault.kind == "stop":
        os.kill(job.pids[fault.victim], signal.SIGCONT)
        answers |= job.collect({fault.victim})
    if hung := sorted(everyone - set(answers)):
        return f"HANG: ranks {hung} did not answer in {HANG:.0f} s", True, False
    dead = sorted(rank for rank, answer in answers.items() if answer is None)
    fired = bool(dead) or stopped or any(answer[1].fired for answer in answers.values() if answer is not None)
    if dead:
        if not fault.kind.startswith("kill") or dead != [fault.victim]:
            return f"WRONG: ranks {dead} died", fired, False
        live = [answer for answer in answers.values() if answer is not None]
        return judge(fault, [answer[1] for answer in live]), fired, False
    by_rank = [answers[rank] for rank in sorted(answers)]
    for answer in by_rank:
        if problem := judge_clean([answer[0]]):
            return f"{problem} before the fault", fired, False
    for at in range(1, len(by_rank[0])):  # of two loads at once, each by itself
        if problem := judge(fault, [answer[at] for answer in by_rank]):
            return problem, fired, False
    job.tell("after", fault.seed)
    answers = job.collect(everyone)
    if hung := sorted(everyone - set(answers)):
        return f"HANG: after the fault, ranks {hung} did not answer in {HANG:.0f} s", fired, False
    if None in answers.values():
        return "WRONG: a rank died in the load after the fault", fired, False
    problem = judge_clean([answers[rank][0] for rank in sorted(answers)])
    return (f"{problem} in the load after the fault" if problem else ""), fired, not problem


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]


def judge(fault: Fault, outcomes: list[Outcome]) -> str:
    """Empty if a load with a fault ended as it may."""
    if all(not outcome.kind for outcome in outcomes) or fault.kind in HARMLESS:
        return judge_clean(outcomes)
    interrupted = [outcome for outcome in outcomes if outcome.kind == "KeyboardInterrupt"]
    if len(interrupted) > (fault.kind == "interrupt"):
        return f"WRONG: {len(interrupted)} ranks were interrupted"
    others = [outcome for outcome in outcomes if outcome not in interrupted]
    if len({(outcome.kind, outcome.text) for outcome in others}) > 1:
        if interrupted and all(not outcome.kind for outcome in others):
            return ""
        return "WRONG: different ends: " + " | ".join(f"{o.kind}: {o.text[:300]}" for o in others)
    kind = others[0].kind
    if kind and (not kind.endswith(("Error", "Mismatch")) or not others[0].text):
        return f"WRONG: raised {kind}: {others[0].text[:300]}"
    if not kind and (problem := judge_clean(others)):
        return problem
    if max(outcome.seconds for outcome in outcomes) > IN_TIME and fault.kind != "stop":
        return f"LATE: took {max(outcome.seconds for outcome in outcomes):.0f} s"
    return _leaked(outcomes)


def judge_clean(outcomes: list[Outcome]) -> str:
    for outcome in outcomes:
        if outcome.kind:
            return f"WRONG: raised {outcome.kind}: {outcome.text[:600]}"
        if outcome.wrong:
            return f"WRONG: data: {outcome.wrong[:3]}"
    return _leaked(outcomes)


def _leaked(outcomes: list[Outcome]) -> str:
    left = sorted({leak for outcome in outcomes for leak in outcome.leaks})
    return f"LEAK: {', '.join(left)}" if left else ""


def shared_files(pids: set[int], folder: str = "/dev/shm") -> list[str]:
    """Files in shared memory whose names say that one of these processes made them. Other programs have files there too."""
    made_by = re.compile(rf"(?<!\d)({'|'.join(map(str, sorted(pids)))})(?!\d)")
    return sorted(name for name in os.listdir(folder) if made_by.search(name))


def campaign(seeds: Sequence[int], until: float, verbose: bool, bed: NetBed | None) -> int:
    """Runs the faults of ``seeds`` until the time is over; prints what came of them. The exit status."""
    _context.set_forkserver_preload(["torch", "torch.distributed.fsdp", "torch.distributed.tensor", "epload"])
    happened, reached, bad = Counter[str](), Counter[str](), []
    job, began = Job(bed), time.monotonic()
    pids = set(job.pids.values())
    for seed in seeds:
        if time.monotonic() > until:
            break
        fault = Fault.of(seed)
        problem, fired, goes_on = run(job, fault)
        happened[fault.kind] += 1
        reached[fault.kind] += fired
        if verbose:
            print(
                f"{time.monotonic() - began:7.1f} s  {fault}: {problem or ('right' if fired else 'did not happen')}",
                flush=True,
            )
        if problem:
            bad.append(f"{fault}: {problem}")
            print(bad[-1], flush=True)
        if not goes_on:
            job.close()
            job = Job(bed)
            pids |= set(job.pids.values())
    job.close()
    if left := shared_files(pids):
        bad.append(f"LEAK: /dev/shm has {left}")
        print(bad[-1])
    count = sum(happened.values())
    print(f"{'fault':<16}{'loads':>6}{'it happened':>13}")
    for kind in KINDS:
        print(f"{kind:<16}{happened[kind]:>6}{reached[kind]:>13}")
    verdicts = {
        what: sum(f": {what}: " in text or text.startswith(what) for text in bad)
        for what in ("HANG", "WRONG", "LEAK", "LATE")
    }
    print(
        f"seeds {seeds[0]} to {seeds[count - 1]}: {count} faults in {time.monotonic() - began:.0f} s, "
        f"{count - len(bad)} judged right, "
        + ", ".join(f"{number} {what.lower()}" for what, number in verdicts.items())
    )
    return 1 if bad or count == 0 else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0, help="of the first fault")
    parser.add_argument(
        "--regressions", action="store_true", help="the seeds that were once judged wrong, in place of others"
    )
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after so long")
    parser.add_argument("--verbose", action="store_true", help="a line for each fault")
    parser.add_argument("--links", action="store_true", help="over links of the test-bed; needs root")
    options = parser.parse_args()
    with NetBed(len(NODES), MBIT, host=True) if options.links else nullcontext() as links:
        seeds = REGRESSIONS if options.regressions else range(options.seed, options.seed + options.faults)
        sys.exit(campaign(seeds, time.monotonic() + options.seconds, options.verbose, links))
