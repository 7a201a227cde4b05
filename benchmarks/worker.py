"""One rank of a benchmark: times the entries of a plan in rounds, one of each in turn, and checks every result.

Started by launch.py. Rank 0 appends a line of JSON to the log before and after each run, so that the launcher knows which entry
was running when a rank died. A rank that fails writes its error and exits; the launcher ends the others.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist

import epload
import launch
from cases import CASES, Bench
from epload.core import garbage_collection
from measure import PeakMemory, TransferClock, link_bytes
from workload import Size


class Worker:
    counts_slow_first = True
    """Whether the first run of a slow entry counts."""

    def __init__(self, folder: Path) -> None:
        """``folder`` has plan.json (see launch.Plan) and receives the log and errors."""
        self.read(folder)
        dist.init_process_group("gloo", timeout=timedelta(seconds=self.plan["limit"]))
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        each = self.world // self.plan["nodes"]
        nodes = [list(range(first, first + each)) for first in range(0, self.world, each)]
        topology = epload.Topology.from_nodes(nodes)
        self.bench, self.few = (
            model and Bench(
                self.rank, self.world, topology, Size(**model["size"]), [Path(path) for path in model["checkpoints"]]
            )
            for model in (self.plan, self.plan["few"])
        )  # fmt: skip
        self.each = each
        self.clock = TransferClock()
        self.interface = self.plan["interface"]

    def read(self, folder: Path) -> None:
        self.folder = folder
        self.plan = json.loads((folder / "plan.json").read_text())

    def run(self) -> None:
        for cases in launch.together(self.plan["entries"]):
            self.measure_all(cases)
        dist.barrier()

    def measure_all(self, cases: list[str]) -> None:
        """Runs each entry of each case once per round."""
        done: dict[tuple[str, str], list[float]] = {}
        instances, warm = {}, set()
        for case in cases:
            entries = self.plan["entries"][case]
            instances[case] = self.make_case(case, list(entries))
            done.update({(case, entry): list(seconds) for entry, seconds in entries.items()})
        if cases[0] in ("meta", "materialize"):
            warm |= set(done)
        order = list(dict.fromkeys(entry for _, entry in done))
        in_turns = sorted(done, key=lambda at: order.index(at[1]))
        while waiting := [at for at in in_turns if len(done[at]) < self._wanted(done[at])]:
            for case, entry in waiting:
                self.log({"began": [case, entry]})
                sample = self.measure(instances[case], case, entry)
                if (case, entry) in warm or (self.counts_slow_first and sample["seconds"] > self.plan["slow"]):
                    done[case, entry].append(sample["seconds"])
                    self.log(sample)
                warm.add((case, entry))  # the first run warms buffers and groups; it counts only if it is slow
        for instance in instances.values():
            if hasattr(instance, "close"):
                instance.close()

    def make_case(self, case: str, entries: list[str]) -> Any:
        if case == "few":
            return CASES["reload"](self.few, "reload", entries)
        return CASES[case](self.bench, case, entries)

    def _wanted(self, seconds: list[float]) -> int:
        slow = bool(seconds) and max(seconds) > self.plan["slow"]
        return int(self.plan["slow_repeat"] if slow else self.plan["repeat"])

    def log(self, line: dict[str, Any]) -> None:
        if self.rank == 0:
            with open(self.folder / "log", "a") as file:
                file.write(json.dumps(line) + "\n")

    def measure(self, instance: Any, case: str, entry: str) -> dict[str, Any]:
        with garbage_collection.paused():
            work = instance.prepare(entry)
        dist.barrier()
        before = link_bytes(self.interface)
        watch = PeakMemory() if case in ("meta", "library") else None
        if watch:
            watch.__enter__()
        dist.barrier()
        self.clock.seconds = 0.0
        began, busy = perf_counter(), os.times()
        work()
        seconds, now = perf_counter() - began, os.times()
        transfer = self.clock.seconds
        if watch:
            watch.__exit__()
        dist.barrier()  # no rank reads the counters while bytes are in flight
        after = link_bytes(self.interface)
        with garbage_collection.paused():
            wrong = instance.wrong()
        if wrong:
            raise RuntimeError(f"wrong result: {len(wrong)} differ from the checkpoint, the first {wrong[0]}")
        mine = {
            "seconds": seconds, "moved": [after[0] - before[0], after[1] - before[1]],
            "phases": instance.phases(transfer) if hasattr(instance, "phases") else {},
            "peak": max(0, watch.above - instance.shard_bytes()) if watch else None,
            "cpu": {
                "user": now.user - busy.user, "system": now.system - busy.system,
                **(instance.processors() if hasattr(instance, "processors") else {}),
            },
        }  # fmt: skip
        everyones: list[Any] = [None] * self.world
        dist.all_gather_object(everyones, mine)
        names = list(dict.fromkeys(name for one in everyones for name in one["phases"]))
        return {
            "case": case, "entry": entry, "seconds": max(one["seconds"] for one in everyones),
            "phases": {name: max(one["phases"].get(name, 0.0) for one in everyones) for name in names},
            "peak": max(one["peak"] for one in everyones) if watch else None,
            "cpu": {name: sum(one["cpu"].get(name, 0.0) for one in everyones) for name in everyones[0]["cpu"]},
            "links": [one["moved"] for one in everyones[:: self.each]],
            "note": instance.notes() if hasattr(instance, "notes") else "",
        }  # fmt: skip


def main(worker: Callable[[Path], Worker] = Worker) -> None:
    torch.set_num_threads(1)
    folder = Path(os.environ["EPLOAD_BENCH"])
    try:
        worker(folder).run()
        os._exit(0)  # a gloo group that is destroyed while another rank still uses it can abort the process
    except BaseException as error:
        (folder / f"error-{os.environ['RANK']}").write_text(f"{type(error).__name__}: {error}")
        traceback.print_exc(file=sys.stderr)
        sys.stderr.flush()
        os._exit(1)  # do not wait for a group whose other ranks may hang


if __name__ == "__main__":
    main()
