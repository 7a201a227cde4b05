"""Measures the control plane without data: store operations, bytes, seconds and the server's CPU, per rank and load.

    python benchmarks/bench_control.py --ranks 512 --per-node 8 --late 3 --json

Ranks are threads of few processes against a real TCPStore in a process of its own. Seconds of a round go from the arrival of its
last rank to the departure of its last rank; Python threads of all ranks share this machine's cores, so that seconds are an
upper bound of what a real job takes, while operations are exact. What the server computes is also measured without the ranks,
by replaying their operations: see store_replay.py.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import Counter
from typing import Any

import torch

from control_bed import FIRST_ROUNDS, RELOAD_ROUNDS, Bed, Cluster, Rank, Sample, preload
from costs import StoreRates, agreement
from epload.ranks.rounds import encode_report, reduce_reports
from store_replay import replay
from summary import facts
from tables import DATA, Table, provenance, seconds, write

LOADS = 5
ROUNDS = 8
"""Of the loads in which seconds of a round are measured."""
IDLE_SECONDS = 8.0
"""Whole intervals between the heartbeats of a node, of 8 s at 512 ranks."""
SWEEP = (8, 16, 64, 256, 512)
MANY = 16384
"""Ranks of a large job, in nodes of 8."""
REPLAYS = (
    (64, RELOAD_ROUNDS),
    (256, RELOAD_ROUNDS),
    (512, RELOAD_ROUNDS),
    (MANY, RELOAD_ROUNDS),
    (MANY, FIRST_ROUNDS),
)
"""Ranks and rounds of the loads with which the simulator is compared."""
VIEW = {"options": "x" * 200, "number": 0}


def load(rank: Rank, rounds: int, late: float = 0.0, late_rank: int = -1) -> None:
    rank.load(rounds, late if rank.rank == late_rank else 0.0)


def loads(rank: Rank, count: int, rounds: int) -> None:
    for _ in range(count):
        rank.load(rounds)


def idle(rank: Rank, seconds: float) -> None:
    """All ranks are inside a load and move data."""
    rank.control.begin()
    with rank.control.guard():
        rank.round(None, last=False)
        rank.move_data(seconds)
        rank.round(None, last=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=512)
    parser.add_argument("--per-node", type=int, default=8)
    parser.add_argument("--late", type=float, default=3.0, help="seconds that one rank comes late")
    parser.add_argument("--processes", type=int, default=32, help="that the ranks are threads of")
    parser.add_argument("--json", action="store_true", help="print the results as JSON")
    parser.add_argument("--docs", action="store_true", help="measure 4 to 512 ranks; write benchmarks/results.md and data/")
    options = parser.parse_args()
    preload()
    if not options.docs:
        found = measure(Bed(options.ranks, options.per_node, options.processes), options.late)
        print(json.dumps(found, indent=1) if options.json else measured([found]).markdown())
        return
    began = time.monotonic()
    beds = [Bed(4, 2, options.processes), *(Bed(ranks, 8, options.processes) for ranks in SWEEP)]
    runs = [measure(bed, options.late) for bed in beds]
    replays = [replayed(ranks, rounds) for ranks, rounds in REPLAYS]
    rates = coefficients(runs, replays)
    results = facts(0, 0) | {
        "minutes": (time.monotonic() - began) / 60,
        "runs": runs,
        "replays": replays,
        "rates": rates,
    }
    (DATA / "control.json").write_text(json.dumps(results, indent=1) + "\n")
    texts = [provenance(results), *(table.markdown() for table in (measured(runs), compared(runs, replays, rates)))]
    write("control", texts)
    import plots  # matplotlib, which tests of the rest do not have

    plots.control(runs, DATA / "control.png")


# ---- measuring ----


def measure(bed: Bed, late: float) -> dict[str, Any]:
    found: dict[str, Any] = {"ranks": bed.ranks, "per_node": bed.per_node, "nodes": len(bed.nodes), "late_s": late}
    with Cluster(bed) as cluster:
        start(cluster)
        samples, cpu, _ = cluster.run(loads, LOADS, RELOAD_ROUNDS)
        check(samples)
        found["nobody_late"] = describe(samples, cpu, LOADS)
        samples, _, _ = cluster.run(loads, LOADS, ROUNDS)
        check(samples)
        found["round"] = round_seconds(samples)
        found["connections"] = cluster.server.connections()
        samples, cpu, _ = cluster.run(load, RELOAD_ROUNDS, late, bed.ranks // 2)
        check(samples)
        found["one_late"] = describe(samples, cpu, 1)
        samples, _, _ = cluster.run(idle, IDLE_SECONDS)
        check(samples)
        found["idle"] = {"operations_per_rank_second": sum(sample.idle_rate for sample in samples) / bed.ranks}
        found["killed"] = killed(cluster)
    return found


def start(cluster: Cluster) -> None:
    """The ranks find one another, and reload twice."""
    for step in (Rank.register, Rank.join_nodes):
        check(cluster.run(step)[0])
    check(cluster.run(loads, 2, RELOAD_ROUNDS)[0])


def killed(cluster: Cluster) -> dict[str, Any]:
    """All are inside a load when one rank is killed."""
    samples, _, when = cluster.run(idle, 60.0, kill_after=3.0)
    texts = {sample.error for sample in samples}
    if len(texts) > 1 or f"rank {cluster.bed.victim} has exited" not in samples[0].error:
        raise SystemExit(f"rank {cluster.bed.victim} was killed, but the others raised {texts}")
    return {"named_s": max(sample.ended for sample in samples) - when}


def check(samples: list[Sample]) -> None:
    for sample in samples:
        if sample.error:
            raise SystemExit(f"rank {sample.rank}: {sample.error}")


def operations(sample: Sample) -> int:
    return sum_operations(sample.operations)


def sum_operations(counts: Counter[str]) -> int:
    return sum(count for kind, count in counts.items() if kind != "bytes")


def describe(samples: list[Sample], cpu: float, count: int) -> dict[str, Any]:
    """Per load, of which there were ``count``."""
    kinds: Counter[str] = Counter()
    for sample in samples:
        kinds.update(sample.operations)
    nbytes = kinds.pop("bytes", 0)
    return {
        "operations_per_rank": sum(kinds.values()) / count / len(samples),
        "operations_most": max(map(operations, samples)) / count,
        "operations": {kind: total / count / len(samples) for kind, total in sorted(kinds.items())},
        "bytes_per_rank": nbytes / count / len(samples),
        "server_cpu_s": cpu / count,
    }


def round_seconds(samples: list[Sample]) -> dict[str, float]:
    """From the arrival of the last rank to the departure of the last one. During the last round of a load, ranks that have
    left end their load and begin the next one, on the cores that those need that have not."""
    taken = [
        max(end for _, end in times) - max(begin for begin, _ in times)
        for times in zip(*(sample.rounds for sample in samples), strict=True)
    ]
    inner = [each for number, each in enumerate(taken) if (number + 1) % ROUNDS]
    last = taken[ROUNDS - 1 : -1 : ROUNDS]  # after the last load none begins
    return {"median_s": statistics.median(inner), "least_s": min(inner), "last_s": statistics.median(last)}


# ---- what follows ----


def replayed(ranks: int, rounds: int) -> dict[str, Any]:
    operations, cpu = replay(ranks // 8, rounds)
    return {"ranks": ranks, "rounds": rounds, "operations": operations, "server_cpu_s": cpu}


def coefficients(runs: list[dict[str, Any]], replays: list[dict[str, Any]]) -> dict[str, float]:
    """Of the simulator. What the coordinator computes is measured alone."""
    operation, of_round = server_rates(replays)
    return {
        "operation": operation,
        "round": of_round,
        "rank": coordinator_seconds(MANY) / MANY,
        "level": next(run for run in runs if run["ranks"] == 16)["round"]["least_s"],
    }


def server_rates(replays: list[dict[str, Any]]) -> tuple[float, float]:
    """Seconds of the server for each operation and for each round besides, with the least squares of relative errors."""
    counts = torch.tensor([[row["operations"], row["rounds"]] for row in replays], dtype=torch.float64)
    cpu = torch.tensor([[row["server_cpu_s"]] for row in replays], dtype=torch.float64)
    operation, of_round = torch.linalg.lstsq(counts / cpu, torch.ones_like(cpu)).solution.flatten().tolist()
    return operation, of_round


def coordinator_seconds(ranks: int) -> float:
    """To decide one round of so many ranks with the same view."""
    text = json.dumps({encode_report("the round", None, VIEW): list(range(ranks))})
    taken = []
    for _ in range(5):
        began = time.perf_counter()
        reduce_reports("the round", json.loads(text), lambda views: len({view["number"] for view in views.values()}))
        taken.append(time.perf_counter() - began)
    return min(taken)


def measured(runs: list[dict[str, Any]]) -> Table:
    columns = (
        "ranks, per node", "operations of a rank and load", "most of one rank", "one rank late", "most", "idle, per rank and s",
        "connections per node besides one per rank", "round, ms: median", "least", "last of a load", "server CPU of a load, ms",
        "killed: named, s",
    )  # fmt: skip
    rows = []
    for run in runs:
        together, late = run["nobody_late"], run["one_late"]
        more = (run["connections"] - run["ranks"]) / run["nodes"]
        cells = [
            together["operations_per_rank"], together["operations_most"], late["operations_per_rank"], late["operations_most"],
            run["idle"]["operations_per_rank_second"], more,
            *(1e3 * run["round"][which] for which in ("median_s", "least_s", "last_s")),
            1e3 * together["server_cpu_s"], run["killed"]["named_s"],
        ]  # fmt: skip
        rows.append([f"{run['ranks']}, {run['per_node']}", *(seconds(cell) for cell in cells)])
    return Table(f"A reload of {RELOAD_ROUNDS} rounds: store operations and seconds", columns, rows)


def compared(runs: list[dict[str, Any]], replays: list[dict[str, Any]], found: dict[str, float]) -> Table:
    """Simulated and measured."""
    ran = {(run["ranks"], RELOAD_ROUNDS): run for run in runs}
    names = {RELOAD_ROUNDS: "reload", FIRST_ROUNDS: "first load"}
    rows = []
    for row in replays:
        ranks, rounds, cpu = row["ranks"], row["rounds"], row["server_cpu_s"]
        there, here = agreement(ranks // 8, ranks, rounds, StoreRates(**found)), ran.get((ranks, rounds))
        operations = here["nobody_late"]["operations_per_rank"] * ranks if here else row["operations"]
        cells = [
            f"{operations:.0f}", f"{there.operations}", difference(there.operations, operations), seconds(1e3 * cpu),
            seconds(1e3 * there.server), difference(there.server, cpu),
            seconds((rounds - 1) * here["round"]["median_s"] + here["round"]["last_s"]) if here else "", seconds(there.seconds),
        ]  # fmt: skip
        rows.append([f"{ranks:,}, {names[rounds]}", *cells])
    columns = (
        "ranks", "operations", "simulated", "error", "server CPU, replayed, ms", "simulated", "error", "rounds of a load, s",
        "simulated",
    )  # fmt: skip
    return Table("Agreement in one load, measured and simulated", columns, rows)


def difference(simulated: float, found: float) -> str:
    return f"{100 * (simulated / found - 1):+.0f} %"


if __name__ == "__main__":
    main()
