"""Checks epload's simulator against what bench_net.py measured, then runs it for 8 to 16,384 accelerators, in seconds.

    python benchmarks/simulate.py --net docs/net.json --load docs/load.json
    python benchmarks/simulate.py --docs             # put tables and plots into docs/

What is predicted of the test-bed takes as given: the rates of one link and of reading, each measured alone; the time that
planning took; and, from the smaller checkpoint of the same shape, the rate from regions to shards and what a load takes
besides its phases. What is predicted of clusters takes the numbers of clusters.py, and from the two files the time of planning a
tensor and of a rank's part in a round of agreement.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

import plots
from cases import PIECE, STORE_KEYS
from clusters import MODELS, NODES, SOURCES, STORAGES, Model, Node, cluster
from epload.planning.simulator import Cluster, predict, traffic
from summary import Row, median
from tables import Table, seconds, write

ROOT = Path(__file__).parents[1]
ROUNDS = 6
"""Of agreement in a first load: opening, groups, planning, buffers, materializing, the end."""
NAMES = {
    "tensor ring": "flat ring, a broadcast a tensor", "ring": "flat ring, buckets", "one/two_level": "one, two_level",
    "one/striped": "one, striped", "per_node/two_level": "per_node", "partitioned/two_level": "partitioned, two_level",
    "partitioned/striped": "partitioned, striped", "every/two_level": "every",
}  # fmt: skip
FROM_ONE = ("tensor ring", "ring", "one/two_level", "one/striped")
"""Ways for weights that one rank has."""
ACCELERATORS = [8 << i for i in range(12)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--net", type=Path, default=ROOT / "docs" / "net.json", help="results of bench_net.py")
    parser.add_argument("--load", type=Path, default=ROOT / "docs" / "load.json", help="results of bench_load.py")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results", help="where JSON and plots go")
    parser.add_argument("--docs", action="store_true", help="put tables and plots into docs/")
    options = parser.parse_args()
    for path in (options.net, options.load):
        if not path.exists():
            raise SystemExit(f"no {path}: run `make bench` and `make bench-net` first, or give --net and --load")
    net, load = json.loads(options.net.read_text()), json.loads(options.load.read_text())
    options.out.mkdir(parents=True, exist_ok=True)
    checked = check(net)
    results = scale(*overheads(net, load))
    shown = [_check_table(checked), _bytes_table(checked), *_winners(results)]
    for table in shown:
        table.show()
    folder = ROOT / "docs" if options.docs else options.out
    for node in NODES:
        plots.scale(results, node.name, folder / f"simulated-{node.name.lower()}.png")
    plots.check(checked, folder / "simulated-check.png")
    (options.out / "simulated.json").write_text(json.dumps({"check": checked, "scale": results}, indent=1))
    if options.docs:
        page = ROOT / "docs" / "simulation.md"
        write(page, "check", [table.markdown() for table in shown[:2]])
        write(page, "wins", [table.markdown() for table in shown[2:]])
        write(
            page, "sources", ["| what | source |", "|---|---|", *(f"| {what} | {source} |" for what, source in SOURCES)]
        )


# ---- against the test-bed ----


def check(net: Row) -> list[Row]:
    """Predicted and measured seconds and bytes of every way on the larger checkpoint of each shape."""
    found = []
    for shape in dict.fromkeys(run["shape"] for run in net["runs"]):
        runs = sorted((run for run in net["runs"] if run["shape"] == shape), key=lambda run: run["nbytes"])
        found += [_compare(runs[-1], row, testbed(runs[0], runs[-1])) for row in runs[-1]["rows"] if _way(row)]
    return found


def _way(row: Row) -> str:
    """The simulator's name of what a row measured; empty if it has none."""
    if row["case"] != "reload" or not row["entry"].startswith("epload_modes:") or "median" not in row:
        return ""
    readers, _, algorithm = row["entry"].removeprefix("epload_modes:").partition("/")
    if readers == "auto":
        return "every/two_level" if row["note"].startswith(("auto -> every", "chose every")) else ""
    return f"{readers}/{'two_level' if algorithm == 'auto' else algorithm}" if algorithm else ""


def testbed(smaller: Row, run: Row) -> Cluster:
    """The test-bed in numbers: one link, and one rank reading the checkpoint while all do, each measured alone; planning, as
    these loads report it; and from the smaller load the rate from regions to shards, and what a load takes besides its phases."""
    world = run["nodes"] * run["ranks"]
    rate = run["nbytes"] / _measured(run, "read")
    own = next(row for row in smaller["rows"] if _way(row) == "every/two_level")
    phases = own["phases"]
    rest = own["median"] - phases["plan"] - phases["materialize"] - phases["read"]
    planning = statistics.median(
        row["phases"]["plan"] + row["phases"]["materialize"] for row in run["rows"] if _way(row)
    )
    return Cluster(
        nodes=run["nodes"], ranks=run["ranks"], link=PIECE / _least(run, "link"), storage=rate * run["ranks"],
        storage_all=rate * world, reader=rate * run["ranks"], unpack=smaller["nbytes"] / world / phases["read"],
        fixed=planning + max(rest, 0.0),
    )  # fmt: skip


def _least(run: Row, rate: str) -> float:
    """A link is never faster than it is, but whoever sends over it may be slow."""
    return float(next(row["min"] for row in run["rows"] if (row["case"], row["entry"]) == ("rates", rate)))


def _measured(run: Row, rate: str) -> float:
    found = median(run["rows"], "rates", rate)
    if found is None:
        raise SystemExit(f"no rate of {rate!r} was measured on {run['shape']}: run bench_net.py again")
    return found


def _compare(run: Row, row: Row, bed: Cluster) -> Row:
    way = _way(row)
    readers, _, algorithm = way.partition("/")
    nodes = [range(first, first + bed.ranks) for first in range(0, bed.world, bed.ranks)]
    buckets, per_wave = run["buckets"]["partitioned" if readers == "partitioned" else "one"]
    moved = traffic(buckets, per_wave, nodes, readers, algorithm)
    seconds = predict(way, run["nbytes"], run["tensors"], bed)
    return {
        "shape": run["shape"], "nodes": run["nodes"], "way": row["title"], "measured": row["median"],
        "predicted": seconds, "error": seconds / row["median"] - 1, "links": row["links"],
        "moved": [list(pair) for pair in zip(moved.received, moved.sent, strict=True)],
    }  # fmt: skip


def _check_table(checked: list[Row]) -> Table:
    rows = [
        [
            f"{row['shape']} {row['way']}",
            seconds(row["measured"]),
            seconds(row["predicted"]),
            f"{100 * row['error']:+.0f} %",
        ]
        for row in checked
    ]
    worst = max((abs(row["error"]) for row in checked), default=0.0)
    title = f"Simulated against measured seconds; the largest error is {100 * worst:.0f} %"
    return Table(title, ("nodes x ranks, way", "measured s", "simulated s", "error"), rows)


def _bytes_table(checked: list[Row]) -> Table:
    rows = []
    for row in checked:
        counted, moved = max(map(max, row["links"])), max(map(max, row["moved"]))
        if moved:
            more = f"{100 * (counted / moved - 1):+.1f} %"
            rows.append([f"{row['shape']} {row['way']}", f"{counted / 1e6:.1f}", f"{moved / 1e6:.1f}", more])
    columns = ("nodes x ranks, way", "counted MB", "simulated MB", "counted more")
    return Table("Bytes over the busiest link, counted by the link and simulated", columns, rows)


# ---- clusters that are not at hand ----


def overheads(net: Row, load: Row) -> tuple[float, float]:
    """Measured seconds of planning one tensor, and of one rank's part in all rounds of agreement."""
    plan = next(
        row["phases"]["plan"]
        for row in load["rows"]
        if (row["case"], row["entry"]) == ("meta", "epload_modes:every/auto")
    )
    return plan / load["tensors"], ROUNDS * _measured(net["runs"][0], "store") / STORE_KEYS


def scale(per_tensor: float, per_rank: float) -> list[Row]:
    """Seconds of every way, for every model, kind of node, number of cards, storage and number of accelerators."""
    found: list[Row] = []
    for model in MODELS:
        nbytes, tensors = model.size()
        for node in NODES:
            for cards in (1, 8):
                for storage in STORAGES:
                    for count in ACCELERATORS:
                        where = cluster(node, count // 8, cards, storage, per_tensor * tensors, per_rank)
                        ways = NAMES if storage in ("local", "shared") else FROM_ONE
                        taken = {way: predict(way, nbytes, tensors, where) for way in ways}
                        found.append(_row(model, node, cards, storage, count, taken))
    return found


def _row(model: Model, node: Node, cards: int, storage: str, count: int, taken: dict[str, float]) -> Row:
    return {
        "model": model.name, "node": node.name, "cards": cards, "storage": storage, "accelerators": count,
        "seconds": {NAMES[way]: value for way, value in taken.items()},
    }  # fmt: skip


def _winners(results: list[Row]) -> list[Table]:
    """The fastest way, overall and where one rank has the weights, by kind of node."""
    made = []
    one = [NAMES[way] for way in ("ring", "one/two_level", "one/striped")]
    counts = (64, 16384)
    for node in NODES:
        rows: list[list[str]] = []
        for row in results:
            if row["node"] != node.name or row["accelerators"] not in counts:
                continue
            key = f"{row['model']}, {row['cards']} card{'s' * (row['cards'] > 1)}, {row['storage']}, {row['accelerators']:,}"
            best = min(row["seconds"], key=lambda way: row["seconds"][way])
            cells = [f"**{best}**: {seconds(row['seconds'][best])} s"]
            cells += [seconds(row["seconds"][way]) for way in one]
            rows.append([key, *cells])
        columns = ("model, cards a node, storage, accelerators", "fastest of all", *(f"{way} s" for way in one))
        made.append(Table(f"SIMULATED, {node.name} nodes of 8: where each way wins", columns, rows))
    return made


if __name__ == "__main__":
    main()
