"""Times loads over links of a given rate, with one network namespace per node; counts the bytes over every link. Needs root.

    python benchmarks/bench_net.py                   # 2, 4 and 8 nodes, 80 and 312 MB, 1 Gbit/s
    python benchmarks/bench_net.py --quick
    python benchmarks/bench_net.py --shapes 4x2 --layers 4 --peers epload_modes

S is the checkpoint's size in bytes and B a link's rate: a load in which one node reads takes at least S/B. All loads are reloads
in the same processes, one of each mode in turn; every shard is compared bit for bit after every load. The case "collective"
broadcasts one list of tensors without a model, to measure coalescing and hierarchy separately. The case "rates" measures the
inputs of the simulator. Other loaders are measured on the first shape with at least four nodes, with the fewest layers. The nodes
share the machine's page cache, so modes in which every node reads are limited by the CPU, not by links or storage.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import asdict
from pathlib import Path
from time import monotonic
from typing import Any

import launch
import plots
import summary
from collectives import COLLECTIVES
from launch import Outcome, Plan
from netbed import INTERFACE, NetBed, available
from summary import Row, by_case
from tables import DATA, Table, provenance, seconds, times, write
from workload import Size, meta_model, plan_buckets

ROOT = Path(__file__).parents[1]
RATES = ("link", "read")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="2x2,4x2,8x1", help="nodes x ranks, comma-separated")
    parser.add_argument("--layers", default="4,16", help="layers of 128 experts; 4 gives 80 MB, 16 gives 312 MB")
    parser.add_argument("--mbit", type=int, default=1000, help="rate of each node's link, each way")
    parser.add_argument("--repeat", type=int, default=5, help="timed loads per mode")
    parser.add_argument("--quick", action="store_true", help="2x2 and 4x2 nodes, 80 MB, three runs")
    parser.add_argument("--peers", default="", help="comma-separated file names in peers/; all by default")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results", help="directory for JSON results and plots")
    parser.add_argument("--docs", action="store_true", help="write benchmarks/results.md and data/")
    options = parser.parse_args()
    if why := available():
        raise SystemExit(f"bench_net.py needs a testbed: {why}")
    if options.quick:
        options.shapes, options.layers, options.repeat = "2x2,4x2", "4", 3
    began = monotonic()
    layers = sorted(map(int, options.layers.split(",")))
    runs: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="epload-net-") as temporary:
        compared = False
        for shape in options.shapes.split(","):
            nodes = int(shape.split("x")[0])
            for count in layers:
                others = count == layers[0] and nodes >= 4 and not compared
                compared = compared or others
                runs.append(measure(options, shape, count, others, Path(temporary)))
    results: Row = {**summary.facts(0, 0), "mbit": options.mbit, "minutes": (monotonic() - began) / 60, "runs": runs}
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "net.json").write_text(json.dumps(results, indent=1))
    shown = [table for run in runs for table in tables(run)]
    for table in shown:
        table.show()
    plots.net(results, options.out / "net.png")
    if options.docs:
        plots.net(results, DATA / "net.png")
        (DATA / "net.json").write_text(json.dumps(results, indent=1))
        write("net", [provenance(results), *(table.markdown() for table in shown)])


def measure(options: argparse.Namespace, shape: str, layers: int, others: bool, temporary: Path) -> Row:
    """Measures one shape and size in a testbed of its own. ``others``: whether to include the other loaders."""
    nodes, ranks = map(int, shape.split("x"))
    size = Size(layers=layers)
    state = meta_model(size).state_dict()
    nbytes = sum(t.nbytes for t in state.values())
    print(f"{shape}: {nbytes / 1e6:.0f} MB in {len(state)} tensors, links of {options.mbit} Mbit/s", flush=True)
    outcome = Outcome()
    loads = launch.loaders(("reload",), outcome, options.peers)["reload"]
    own = {entry: seconds for entry, seconds in loads.items() if others or entry.startswith("epload")}
    entries: dict[str, dict[str, Any]] = {"rates": {name: [] for name in RATES}, "reload": own}
    if layers == min(map(int, options.layers.split(","))):
        entries["collective"] = {name: [] for name in COLLECTIVES}
    work = Path(tempfile.mkdtemp(dir=temporary))
    folders = launch.checkpoints(temporary, size)
    plan = Plan(nodes, ranks, asdict(size), folders, entries, repeat=options.repeat, interface=INTERFACE)
    where = [range(first, first + ranks) for first in range(0, nodes * ranks, ranks)]
    with NetBed(nodes, options.mbit) as bed:
        launch.run(plan, work, outcome, bed)
    return {
        "shape": shape, "nodes": nodes, "ranks": ranks, "layers": layers, "nbytes": nbytes, "tensors": len(state),
        "bound": nbytes / (options.mbit * 1e6 / 8), "rows": summary.rows(outcome, nbytes),
        "buckets": {readers: plan_buckets(Path(folders[0]), size, where, readers) for readers in ("one", "partitioned")},
    }  # fmt: skip


def tables(run: Row) -> list[Table]:
    """The tables of one shape and size."""
    where = f"{run['nodes']} nodes x {run['ranks']}, {run['nbytes'] / 1e6:.0f} MB, S/B = {run['bound']:.2f} s"
    columns = ("loader", "runs", "min s", "median s", "max s", "x S/B", "max in / S", "max out / S")
    made = [Table(f"Reload, {where}", columns, [_line(run, row) for row in by_case(run["rows"], "reload")])]
    collective = by_case(run["rows"], "collective")
    if collective:
        made.append(Table(f"Broadcast of one list of tensors, {where}", columns, [_line(run, row) for row in collective]))
        made.append(_gains(run, where))
    return made


def _line(run: Row, row: Row) -> list[str]:
    name = f"**{row['title']}**" if row["ours"] else row["title"]
    if "median" not in row:
        return [name, f"FAILED: {row['error']}"[:160]]
    line = [name, str(row["runs"]), *(seconds(row[key]) for key in ("min", "median", "max"))]
    return [*line, times(row["median"] / run["bound"]), f"{row['in']:.2f}", f"{row['out']:.2f}"]


def _gains(run: Row, where: str) -> Table:
    """The gains of coalescing and of hierarchy, measured separately."""
    found = {row["entry"]: row["median"] for row in by_case(run["rows"], "collective") if "median" in row}
    steps = (
        ("coalescing", "one broadcast per tensor", "buckets, flat tree (gloo)"),
        ("hierarchy, over gloo's flat tree", "buckets, flat tree (gloo)", "buckets, two_level"),
        ("hierarchy, over a flat ring like NCCL's", "buckets, flat ring (like NCCL)", "buckets, two_level"),
        ("stripes, over one leader", "buckets, two_level", "buckets, striped"),
    )
    rows = []
    for what, before, after in steps:
        if before in found and after in found:
            gain = times(found[before] / found[after])
            rows.append([what, f"{before} -> {after}", seconds(found[before]), seconds(found[after]), gain])
    return Table(f"Gains measured separately, {where}", ("gain", "from -> to", "before s", "after s", "speedup"), rows)


if __name__ == "__main__":
    main()
