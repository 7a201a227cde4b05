"""Compares epload's simulator with the results of bench_net.py, then simulates 8 to 16,384 accelerators. Takes seconds.

    python benchmarks/simulate.py --net benchmarks/data/net.json --load benchmarks/data/load.json
    python benchmarks/simulate.py --docs             # write tables to results.md, plots to data/

Syncs are in simulate_sync.py.

Inputs for the testbed: the rates of one link and of reading, each measured alone; the measured planning time; and, from the
smaller checkpoint of the same shape, the copy rate into shards and the time of a load outside its phases. Inputs for clusters:
the numbers in clusters.py, the measured planning time per tensor, and the coefficients of agreement from bench_control.py.
"""

from __future__ import annotations

import argparse
import json
import statistics
from dataclasses import replace
from pathlib import Path

import plots
import simulate_sync
from cases import PIECE
from clusters import MODELS, NODES, SOURCES, STORAGES, Model, Node, cluster
from control_bed import FIRST_ROUNDS
from costs import StoreRates
from epload.planning.traffic import traffic
from simulator import Cluster, predict
from summary import Row, median
from tables import DATA, Table, seconds, write

ROOT = Path(__file__).parents[1]
ROUNDS = FIRST_ROUNDS
"""Agreement rounds in a first load."""
NAMES = {
    "tensor ring": "flat ring, one broadcast per tensor", "ring": "flat ring, buckets", "one/two_level": "one, two_level",
    "one/striped": "one, striped", "per_node/two_level": "per_node", "partitioned/two_level": "partitioned, two_level",
    "partitioned/striped": "partitioned, striped", "every/two_level": "every",
}  # fmt: skip
FROM_ONE = ("tensor ring", "ring", "one/two_level", "one/striped")
"""Modes for weights that only one rank has."""
LOOKED_AT = 100e-6
"""Seconds that a device is idle after a bucket whose header the host looks at; assumed, see clusters.py."""
ACCELERATORS = [8 << i for i in range(12)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--net", type=Path, default=DATA / "net.json", help="results of bench_net.py")
    parser.add_argument("--load", type=Path, default=DATA / "load.json", help="results of bench_load.py")
    parser.add_argument("--control", type=Path, default=DATA / "control.json", help="results of bench_control.py")
    parser.add_argument("--sync", type=Path, default=DATA / "sync.json", help="results of bench_sync.py")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results", help="directory for JSON results and plots")
    parser.add_argument("--docs", action="store_true", help="write benchmarks/results.md and data/")
    options = parser.parse_args()
    for path in (options.net, options.load, options.control, options.sync):
        if not path.exists():
            raise SystemExit(
                f"{path} not found: run `make bench`, `make bench-net`, `make bench-control`, `make bench-sync` first"
            )
    net, load = json.loads(options.net.read_text()), json.loads(options.load.read_text())
    options.out.mkdir(parents=True, exist_ok=True)
    checked = check(net)
    rates = StoreRates(**json.loads(options.control.read_text())["rates"])
    results = scale(planning_seconds(load), rates)
    shown = [_check_table(checked), _bytes_table(checked), _device_steps(), *_winners(results)]
    for table in shown:
        table.show()
    syncs = json.loads(options.sync.read_text())
    synced = [
        simulate_sync.check_table(simulate_sync.check(syncs)),
        simulate_sync.scale_table(simulate_sync.scale(syncs["planning"]["planned"], rates)),
    ]
    for table in synced:
        table.show()
    folder = DATA if options.docs else options.out
    for node in NODES:
        plots.scale(results, node.name, folder / f"simulated-{node.name.lower()}.png")
    plots.check(checked, folder / "simulated-check.png")
    (options.out / "simulated.json").write_text(json.dumps({"check": checked, "scale": results}, indent=1))
    if options.docs:
        write("simulated-check", [table.markdown() for table in shown[:2]])
        write("simulated-sync", [table.markdown() for table in synced])
        write("simulated-steps", [shown[2].markdown()])
        write("simulated-modes", [table.markdown() for table in shown[3:]])
        write(
            "simulated-sources",
            ["| what | source |", "|---|---|", *(f"| {what} | {source} |" for what, source in SOURCES)],
        )


# ---- comparison with the testbed ----


def check(net: Row) -> list[Row]:
    """Predicted and measured seconds and bytes of every mode, for the larger checkpoint of each shape."""
    found = []
    for shape in dict.fromkeys(run["shape"] for run in net["runs"]):
        runs = sorted((run for run in net["runs"] if run["shape"] == shape), key=lambda run: run["nbytes"])
        found += [_compare(runs[-1], row, testbed(runs[0], runs[-1])) for row in runs[-1]["rows"] if _mode(row)]
    return found


def _mode(row: Row) -> str:
    """The simulator's name for the mode of a row; empty if it has none."""
    if row["case"] != "reload" or not row["entry"].startswith("epload_modes:") or "median" not in row:
        return ""
    readers, _, algorithm = row["entry"].removeprefix("epload_modes:").partition("/")
    if readers == "auto":
        return "every/two_level" if row["note"].startswith(("auto -> every", "chose every")) else ""
    return f"{readers}/{'two_level' if algorithm == 'auto' else algorithm}" if algorithm else ""


def testbed(smaller: Row, run: Row) -> Cluster:
    """The testbed as simulator input. See the module docstring for where each number comes from."""
    world = run["nodes"] * run["ranks"]
    rate = run["nbytes"] / _measured(run, "read")
    own = next(row for row in smaller["rows"] if _mode(row) == "every/two_level")
    phases = own["phases"]
    rest = own["median"] - phases["plan"] - phases["materialize"] - phases["read"]
    planning = statistics.median(row["phases"]["plan"] + row["phases"]["materialize"] for row in run["rows"] if _mode(row))
    return Cluster(
        nodes=run["nodes"], ranks=run["ranks"], link=PIECE / _least(run, "link"), storage=rate * run["ranks"],
        storage_all=rate * world, reader=rate * run["ranks"], unpack=smaller["nbytes"] / world / phases["read"],
        fixed=planning + max(rest, 0.0),
    )  # fmt: skip


def _least(run: Row, rate: str) -> float:
    """The fastest run: a slow sender can hide a link's rate, but nothing exceeds it."""
    return float(next(row["min"] for row in run["rows"] if (row["case"], row["entry"]) == ("rates", rate)))


def _measured(run: Row, rate: str) -> float:
    found = median(run["rows"], "rates", rate)
    if found is None:
        raise SystemExit(f"no {rate!r} rate was measured for {run['shape']}: run bench_net.py again")
    return found


def _compare(run: Row, row: Row, bed: Cluster) -> Row:
    mode = _mode(row)
    readers, _, algorithm = mode.partition("/")
    nodes = [range(first, first + bed.ranks) for first in range(0, bed.world, bed.ranks)]
    buckets, per_wave = run["buckets"]["partitioned" if readers == "partitioned" else "one"]
    received, sent = traffic(buckets, per_wave, nodes, readers, algorithm)
    seconds = predict(mode, run["nbytes"], run["tensors"], bed)
    return {
        "shape": run["shape"], "nodes": run["nodes"], "mode": row["title"], "measured": row["median"],
        "predicted": seconds, "error": seconds / row["median"] - 1, "links": row["links"],
        "moved": [list(pair) for pair in zip(received, sent, strict=True)],
    }  # fmt: skip


def _check_table(checked: list[Row]) -> Table:
    rows = [
        [
            f"{row['shape']} {row['mode']}",
            seconds(row["measured"]),
            seconds(row["predicted"]),
            f"{100 * row['error']:+.0f} %",
        ]
        for row in checked
    ]
    worst = max((abs(row["error"]) for row in checked), default=0.0)
    title = f"Simulated and measured seconds; largest error: {100 * worst:.0f} %"
    return Table(title, ("nodes x ranks, mode", "measured s", "simulated s", "error"), rows)


def _bytes_table(checked: list[Row]) -> Table:
    rows = []
    for row in checked:
        counted, moved = max(map(max, row["links"])), max(map(max, row["moved"]))
        if moved:
            more = f"{100 * (counted / moved - 1):+.1f} %"
            rows.append([f"{row['shape']} {row['mode']}", f"{counted / 1e6:.1f}", f"{moved / 1e6:.1f}", more])
    columns = ("nodes x ranks, mode", "measured MB", "simulated MB", "difference")
    return Table("Bytes over the busiest link: link counters and simulation", columns, rows)


# ---- clusters ----


def planning_seconds(load: Row) -> float:
    """Measured, of one tensor."""
    plan = next(
        row["phases"]["plan"] for row in load["rows"] if (row["case"], row["entry"]) == ("meta", "epload_modes:every/auto")
    )
    return float(plan / load["tensors"])


def scale(per_tensor: float, store: StoreRates) -> list[Row]:
    """Seconds of every mode, for every model, node type, number of NICs, storage and number of accelerators."""
    found: list[Row] = []
    for model in MODELS:
        nbytes, tensors = model.size()
        for node in NODES:
            for nics in (1, 8):
                for storage in STORAGES:
                    for count in ACCELERATORS:
                        where = cluster(node, count // 8, nics, storage, per_tensor * tensors, ROUNDS, store)
                        modes = NAMES if storage in ("local", "shared") else FROM_ONE
                        taken = {mode: predict(mode, nbytes, tensors, where) for mode in modes}
                        found.append(_row(model, node, nics, storage, count, taken))
    return found


def _row(model: Model, node: Node, nics: int, storage: str, count: int, taken: dict[str, float]) -> Row:
    return {
        "model": model.name, "node": node.name, "nics": nics, "storage": storage, "accelerators": count,
        "seconds": {NAMES[mode]: value for mode, value in taken.items()},
    }  # fmt: skip


def _device_steps() -> Table:
    """What each way of keeping a device's streams busy takes off the moving of weights that are on one accelerator."""
    rows = []
    for node in NODES:
        for model in MODELS:
            nbytes, tensors = model.size()
            for mode in ("one/two_level", "one/striped"):
                bed = cluster(node, 8, 8, "one rank's memory", 0.0, 0, StoreRates())
                looked = replace(bed, header_wait=LOOKED_AT)
                steps = (replace(looked, wave=64 << 20), looked, bed, replace(bed, overlap=True))
                cells = [seconds(predict(mode, nbytes, tensors, each)) for each in steps]
                if node.header_wait:  # on Ascend the host always looks
                    cells[2] = "-"
                ring = seconds(predict("ring", nbytes, tensors, bed))
                rows.append([f"{node.name}, {model.name}, {NAMES[mode]}", *cells, ring])
    columns = (
        "nodes, model, mode", "64 MiB buckets, the host looks at each header s", "256 MiB s", "the device looks s",
        "second stream inside nodes s", "flat ring s",
    )  # fmt: skip
    return Table("SIMULATED, 8 nodes of 8 accelerators, 8 NICs each, weights on one accelerator: moving alone", columns, rows)


def _winners(results: list[Row]) -> list[Table]:
    """The fastest mode, overall and where one rank has the weights, by node type."""
    made = []
    one = [NAMES[mode] for mode in ("ring", "one/two_level", "one/striped")]
    counts = (64, 16384)
    for node in NODES:
        rows: list[list[str]] = []
        for row in results:
            if row["node"] != node.name or row["accelerators"] not in counts:
                continue
            key = f"{row['model']}, {row['nics']} NIC{'s' * (row['nics'] > 1)}, {row['storage']}, {row['accelerators']:,}"
            best = min(row["seconds"], key=lambda mode: row["seconds"][mode])
            cells = [f"**{best}**: {seconds(row['seconds'][best])} s"]
            cells += [seconds(row["seconds"][mode]) for mode in one]
            rows.append([key, *cells])
        columns = ("model, NICs per node, storage, accelerators", "fastest of all", *(f"{mode} s" for mode in one))
        made.append(Table(f"SIMULATED, {node.name} nodes of 8: where each mode wins", columns, rows))
    return made


if __name__ == "__main__":
    main()
