"""Times syncs of a trainer's weights into a rollout job, over loopback and over links of a given rate. The latter needs root.

    python benchmarks/bench_sync.py                      # all cases: loopback, then 2 trainer nodes and 2 or 4 rollout nodes
    python benchmarks/bench_sync.py --cases loopback
    python benchmarks/bench_sync.py --cases large        # 2 rollout nodes again, twice the bytes in half of the tensors
    python benchmarks/bench_sync.py --cases planning     # one sender's and one receiver's plan, of up to 1,024 + 4,096 ranks
    python benchmarks/bench_sync.py --cases 2,4 --layers 16 --peers epload_sync,floor

The trainer shards its model by FSDP2 over all its ranks. Each rollout node has a whole model, sharded by tensor parallelism over
its ranks. Nodes have two ranks. Over loopback there is one node of each, with the whole model; the two share no memory. Every
version has other values, and counts only after every shard has been compared bit for bit. Peers run in turn, in the same
processes; the first version of each is not counted. Over links, no sync can take less than the bound: the largest of the bytes
that a node needs over its link's rate, and of all bytes over the rate of all the trainer's links.

Cases of earlier runs stay in the JSON and on the page, each with its command.
"""

from __future__ import annotations

import argparse
import json
import re
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from time import monotonic

import launch
import summary
import sync_peers
import sync_planning
from launch import Outcome, Plan
from netbed import INTERFACE, NetBed, available
from summary import Row, by_case, median
from tables import DATA, Table, provenance, seconds, times, write
from workload import Size, meta_model

ROOT = Path(__file__).parents[1]
RANKS = 2
"""Of each node."""
TRAINERS = 2
"""Nodes of the trainer, over links."""
OURS = ("epload_sync:stage=none", "epload_sync:stage=host")
FLOOR = "floor"
FP8 = "epload_fp8"
JOIN = "epload_join"
QUANTIZED = re.compile(r"_proj\.weight$")
"""Names of the weights that are sent in fp8."""
PLANNING, LARGE = "planning", "large"
LARGE_PEERS = (FLOOR, JOIN, "epload_sync")
"""Peers that are measured with large tensors: each takes twice as long."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--cases", default="loopback,2,large,4,planning",
        help="loopback, numbers of rollout nodes, large, planning; comma-separated",
    )  # fmt: skip
    parser.add_argument(
        "--layers",
        type=int,
        help="layers of 128 experts; 48 (929 MB) over loopback, else 16 (311 MB); large: 8 (622 MB)",
    )
    parser.add_argument("--experts", type=int, default=128, help="of a layer")
    parser.add_argument(
        "--width",
        type=int,
        help="factor of the layers' sizes, large: 2, else 1; their bytes grow with its square",
    )
    parser.add_argument("--mbit", type=int, default=1000, help="rate of each node's link, each way")
    parser.add_argument("--repeat", type=int, default=7, help="timed versions of each peer")
    parser.add_argument("--slow", type=float, default=4.0, help="peers that take longer than so many seconds run three times")
    parser.add_argument("--peers", default="", help="comma-separated file names in sync_peers/; all by default")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results", help="directory for the JSON")
    parser.add_argument("--docs", action="store_true", help="write benchmarks/results.md and data/")
    options = parser.parse_args()
    cases = options.cases.split(",")
    if set(cases) - {"loopback", PLANNING} and (why := available()):
        raise SystemExit(f"bench_sync.py needs a testbed: {why}; or pass --cases loopback,{PLANNING}")
    folders = [options.out, *([DATA] if options.docs else [])]
    options.out.mkdir(parents=True, exist_ok=True)
    for case in cases:
        run = measure_planning() if case == PLANNING else measure(options, case)
        for folder in folders:
            file = folder / "sync.json"
            known = json.loads(file.read_text()) if file.exists() else {}
            file.write_text(json.dumps({**known, case: run}, indent=1))
    runs = json.loads((folders[-1] / "sync.json").read_text())
    runs = {case: runs[case] for case in sorted(runs, key=lambda case: (case != "loopback", case))}
    texts = []
    for run in runs.values():
        shown = tables(run)
        texts += [provenance(run), *(table.markdown() for table in shown)]
        for table in shown:
            table.show()
    reached = targets(runs)
    reached.show()
    if options.docs:
        write("sync", [reached.markdown(), *texts])


def measure(options: argparse.Namespace, case: str) -> Row:
    """Measures all peers between two jobs. ``case``: "loopback", the number of rollout nodes in a testbed, or "large"."""
    began = monotonic()
    linked, large = case != "loopback", case == LARGE
    width = options.width or (2 if large else 1)
    layers = options.layers or (8 if large else 16 if linked else 48)
    size = Size(layers, options.experts, width * Size.hidden, width * Size.intermediate)
    nbytes, tensors = summary.contents(meta_model(size))
    experts = (parameter for name, parameter in meta_model(size).named_parameters() if QUANTIZED.search(name))
    quantized = sum(parameter.nbytes for parameter in experts)
    trainers, rollouts = (TRAINERS, 2 if large else int(case)) if linked else (1, 1)
    print(f"{case}: {nbytes / 1e6:.0f} MB in {tensors} tensors, {trainers} + {rollouts} nodes x {RANKS} ranks", flush=True)
    outcome = Outcome()
    entries: dict[str, dict[str, list[float]]] = {"sync": {}}
    titles = {}
    for name in sync_peers.names():
        if name in options.peers.split(",") if options.peers else not large or name in LARGE_PEERS:
            for peer in sync_peers.find(name):
                if (name == JOIN and not linked) or (peer.changes == "adamw" and case != "2"):
                    continue  # there is no second node that could join; the optimizer takes four times the memory
                entries["sync"][peer.name], titles[peer.name] = [], peer.title
    if not linked:
        entries["plan"] = {"plan_exchange": [], "make_plan": []}
    plan = Plan(
        trainers + rollouts, RANKS, asdict(size), [], entries, repeat=options.repeat, slow=options.slow, limit=120.0,
        trainers=trainers, worker="sync_worker.py",
    )  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="epload-sync-") as folder:
        if linked:
            plan.interface = INTERFACE
            with NetBed(plan.nodes, options.mbit) as bed:
                launch.run(plan, Path(folder), outcome, bed)
        else:
            launch.run(plan, Path(folder), outcome)
    rows = summary.rows(outcome, nbytes)
    for row in rows:
        row["title"] = titles.get(row["entry"], row["entry"])
        row["quantized"] = quantized
        links = [sample["links"] for sample in outcome.samples if sample["entry"] == row["entry"]]
        if linked and links:  # the worst of all versions
            row["in"] = max(into for nodes in links for into, _ in nodes[trainers:]) / nbytes
            row["out"] = max(sum(out for _, out in nodes[:trainers]) for nodes in links) / nbytes
            row["sent"] = max(out for nodes in links for _, out in nodes) / nbytes
    rate = options.mbit * 1e6 / 8
    return {
        **summary.facts(nbytes, tensors), "minutes": (monotonic() - began) / 60, "case": case, "trainers": trainers,
        "rollouts": rollouts, "ranks": RANKS, "mbit": options.mbit if linked else None,
        "bound": max(nbytes / rate, nbytes / (trainers * rate)) if linked else None, "rows": rows,
    }  # fmt: skip


def measure_planning() -> Row:
    began = monotonic()
    rows = [row for name in sync_planning.NAMES for row in sync_planning.measure(name)]
    facts = summary.facts(rows[-1]["total"], rows[-1]["tensors"])
    return {**facts, "minutes": (monotonic() - began) / 60, "case": PLANNING, "rows": [], "planned": rows}


def tables(run: Row) -> list[Table]:
    """The tables of one case."""
    if run["case"] == PLANNING:
        return [sync_planning.table(run["planned"])]
    linked = run["bound"] is not None
    where = f"{run['trainers']} + {run['rollouts']} nodes x {run['ranks']}, {run['nbytes'] / 1e6:.0f} MB"
    columns = ["how", "runs", "min s", "median s", "max s", "trainer s", "first s", "commit s"]
    if linked:
        where += f", links of {run['mbit']} Mbit/s, bound {run['bound']:.2f} s"
        columns += ["bound / time", "in / union", "out / S"]
    else:
        where += ", loopback"
        columns += ["x floor", "CPU s"]
    made = [Table(f"Sync, {where}", columns, [_line(run, row) for row in by_case(run["rows"], "sync")])]
    ours = [row for row in by_case(run["rows"], "sync") if row["ours"] and "median" in row]
    phases = list(dict.fromkeys(name for row in ours for name in row["phases"] if ": " in name))
    made.append(
        Table(
            f"epload's phases, seconds of the slowest rank, {where}",
            ["phase", *(row["title"] for row in ours)],
            [[name, *(seconds(row["phases"].get(name)) for row in ours)] for name in phases],
        )
    )
    planning = by_case(run["rows"], "plan")
    if planning:
        lines = [[row["title"], *(f"{row[key]:.3f}" for key in ("min", "median", "max"))] for row in planning]
        made.append(Table(f"Planning, {run['tensors']} tensors", ("what", "min s", "median s", "max s"), lines))
    return made


def _line(run: Row, row: Row) -> list[str]:
    name = f"**{row['title']}**" if row["ours"] else row["title"]
    if "median" not in row:
        return [name, f"FAILED: {row['error']}"[:160]]
    phases = row["phases"]
    line = [name, str(row["runs"]), *(seconds(row[key]) for key in ("min", "median", "max"))]
    line += [seconds(phases.get(key)) for key in ("send", "first", "commit")]
    if run["bound"] is not None:
        return [*line, times(run["bound"] / row["median"]), f"{row['in']:.3f}", f"{row['out']:.3f}"]
    floor = median(run["rows"], "sync", FLOOR)
    return [*line, times(row["median"] / floor) if floor else "", seconds(row["cpu"]["user"] + row["cpu"]["system"])]


def targets(runs: dict[str, Row]) -> Table:
    """What is asked for, and what was measured, with each stage."""
    found = {(case, row["entry"]): row for case, run in runs.items() for row in run["rows"] if row.get("median") is not None}

    def line(what: str, limit: str, met: Callable[[float], bool], value: Callable[[str], float | None]) -> list[str]:
        values = [value(entry) for entry in OURS]
        shown = ["" if x is None else f"{x:.2f}{'' if met(x) else ' (missed)'}" for x in values]
        return [what, limit, *shown]

    def of(case: str, entry: str, key: Callable[[Row], float]) -> float | None:
        row = found.get((case, entry))
        return None if row is None else key(row)

    def ratio(over: float | None, under: float | None) -> float | None:
        return over / under if over and under else None

    rows = []
    for case in ("2", "4"):
        bound = runs.get(case, {}).get("bound", 0.0)
        rows += [
            line(f"{case} rollout nodes: bound over time", ">= 0.85", lambda x: x >= 0.85,
                 lambda entry, case=case, bound=bound: of(case, entry, lambda row: bound / row["median"])),
            line(f"{case} rollout nodes: bytes into a node over its union", "<= 1.06", lambda x: x <= 1.06,
                 lambda entry, case=case: of(case, entry, lambda row: row["in"])),
            line(f"{case} rollout nodes: bytes out of the trainer over S", "<= 1.06", lambda x: x <= 1.06,
                 lambda entry, case=case: of(case, entry, lambda row: row["out"])),
        ]  # fmt: skip

    def median_of(case: str, entry: str) -> float | None:
        return of(case, entry, lambda row: row["median"])

    def growth(entry: str) -> float | None:
        return ratio(*(of(case, entry, lambda row: row["phases"]["send"]) for case in ("4", "2")))

    def over_floor(entry: str) -> float | None:
        return ratio(median_of("loopback", entry), median_of("loopback", FLOOR))

    planning = ratio(median_of("loopback", "plan_exchange"), median_of("loopback", "make_plan"))
    rows += [
        line("trainer's seconds, 4 rollout nodes over 2", "<= 1.15", lambda x: x <= 1.15, growth),
        line("loopback: over the raw floor", "<= 1.5", lambda x: x <= 1.5, over_floor),
        line("planning a sync over planning a load", "<= 0.5", lambda x: x <= 0.5, lambda entry: planning),
    ]
    full, few, all_changed = (f"epload_sync:{mode}" for mode in ("stage=host", "delta, 2 % changed", "delta, all changed"))

    def of_quantized(row: Row) -> float:
        """Bytes into a node for the weights in fp8, and for all scales and headers, over those of the weights in bf16."""
        total = runs["2"]["nbytes"]
        return float((row["in"] * total - (total - row["quantized"])) / row["quantized"])

    def cpu_of_comparison(row: Row) -> float:
        return RANKS * row["phases"]["send: CPU of read"]

    def cpu_of_sync(row: Row) -> float:
        return float(row["cpu"]["user"] + row["cpu"]["system"])

    with_changes = []
    for case, legend in (("2", "2 rollout nodes"), (LARGE, "2 rollout nodes, large tensors")):
        full_seconds, bound = median_of(case, full), runs.get(case, {}).get("bound")
        with_changes += [
            (f"{legend}, 2 % changed: bytes into a node over its union", 0.036, of(case, few, lambda row: row["in"])),
            (f"{legend}, 2 % changed: time over a full sync's", 1 / 12, ratio(median_of(case, few), full_seconds)),
            (f"{legend}, all changed: time over a full sync's", 1.03, ratio(median_of(case, all_changed), full_seconds)),
            (f"{legend}, one joins: time over S/B", 1.15, ratio(median_of(case, JOIN), bound)),
        ]  # fmt: skip
    with_changes += [
        ("2 rollout nodes, fp8: bytes into a node of quantized weights, over bf16", 0.52, of("2", FP8, of_quantized)),
        ("2 rollout nodes, fp8: bytes into a node, over all in bf16", 1.0, of("2", FP8, lambda row: row["in"])),
        ("three nodes join at once: bytes out of a node, over S", 2.0, of("4", JOIN, lambda row: row["sent"])),
        (
            "loopback: CPU time of the comparison over that of a full sync", 0.35,
            ratio(of("loopback", few, cpu_of_comparison), of("loopback", full, cpu_of_sync)),
        ),
    ]  # fmt: skip
    for what, limit, value in with_changes:
        rows.append(
            line(
                what,
                f"<= {limit:.3f}",
                lambda x, limit=limit: x <= limit,
                lambda entry, x=value: x if entry == full else None,
            )
        )
    return Table("Targets", ("what", "target", "stage=none", "stage=host"), rows)


if __name__ == "__main__":
    main()
