"""Times loading a checkpoint of many tensors into a sharded model, with every loader in peers/, over loopback.

    python benchmarks/bench_load.py                  # 18,867 tensors, 4 ranks as 2 nodes x 2
    python benchmarks/bench_load.py --quick          # 1,575 tensors, three runs
    python benchmarks/bench_load.py --peers epload_modes,safe_open_slices --cases reload

Cases: "floor" broadcasts the same bytes in flat buckets; "collective" broadcasts the tensors without a model; "reload" fills a
model that has storage; "meta" starts from a model on meta; "library" builds and fills a transformers model; "materialize" only
allocates storage. Within a case the entries run in turn, and every result is compared bit for bit with the file before its time
counts.
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
from summary import Row, by_case, median
from tables import DATA, Table, megabytes, provenance, seconds, times, write
from workload import Size, meta_model

FLOORS = ("flat 16 MiB", "two-level 16 MiB", "flat 64 MiB", "two-level 64 MiB")
CASES = ("floor", "collective", "reload", "meta", "library", "materialize")
ROOT = Path(__file__).parents[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=2, help="emulated nodes")
    parser.add_argument("--ranks", type=int, default=2, help="ranks per node")
    parser.add_argument("--layers", type=int, default=48, help="layers of 128 experts; 48 gives 18,867 tensors")
    parser.add_argument("--repeat", type=int, default=5, help="runs of entries that take up to 20 s")
    parser.add_argument("--slow-repeat", type=int, default=3, help="runs of slower entries")
    parser.add_argument("--quick", action="store_true", help="4 layers, three runs")
    parser.add_argument("--peers", default="", help="comma-separated file names in peers/; all by default")
    parser.add_argument("--cases", default=",".join(CASES), help="comma-separated")
    parser.add_argument("--data", type=Path, help="directory for the checkpoints; temporary by default")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results", help="directory for JSON results and plots")
    parser.add_argument("--docs", action="store_true", help="write benchmarks/results.md and data/")
    options = parser.parse_args()
    if options.quick:
        options.layers, options.repeat, options.slow_repeat = 4, 3, 3
    began = monotonic()
    with tempfile.TemporaryDirectory(prefix="epload-bench-") as temporary:
        data = options.data or Path(temporary) / "data"
        measurement = Measurement(options, Size(layers=options.layers), data, Path(temporary) / "run")
        measurement.run()
    results = measurement.results()
    results["minutes"] = (monotonic() - began) / 60
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "load.json").write_text(json.dumps(results, indent=1))
    shown = tables(results)
    for table in shown:
        table.show()
    plots.load(results, options.out / "load.png")
    if options.docs:
        write_docs(results, shown)


class Measurement:
    """The selected cases, with one model and its checkpoints."""

    def __init__(self, options: argparse.Namespace, size: Size, data: Path, work: Path, few: Size | None = None) -> None:
        """
        Args:
            work: directory to create for this measurement alone.
            few: size of the second model, for the case "few".
        """
        self._nbytes, tensors = summary.contents(meta_model(size))
        self._outcome = Outcome()
        self._work = work
        self._about = {
            **summary.facts(self._nbytes, tensors), "nodes": options.nodes, "ranks": options.ranks
        }  # fmt: skip
        entries: dict[str, Any] = {
            "floor": {name: [] for name in FLOORS},
            "collective": {name: [] for name in COLLECTIVES},
            **launch.loaders(("reload", "meta", "library"), self._outcome, options.peers),
            "materialize": {"epload": [], "to_empty": []},
        }
        self._plan = Plan(
            options.nodes, options.ranks, asdict(size), launch.checkpoints(data, size),
            {case: entries[case] for case in options.cases.split(",") if entries[case]},
            repeat=options.repeat, slow_repeat=options.slow_repeat,
        )  # fmt: skip
        if few is not None:
            nbytes, tensors = summary.contents(meta_model(few))
            self._about["few"] = {"nbytes": nbytes, "tensors": tensors}
            self._plan.few = {"size": asdict(few), "checkpoints": launch.checkpoints(data, few)}
            self._plan.entries["few"] = {entry: [] for entry in self._plan.entries["reload"]}
        work.mkdir()

    def run(self) -> None:
        launch.run(self._plan, self._work, self._outcome)

    def results(self) -> Row:
        few_bytes = self._about.get("few", {}).get("nbytes", 0)
        rows = summary.rows(self._outcome, self._nbytes, few_bytes)
        return {**self._about, "rows": rows, "samples": self._outcome.samples}


def tables(results: Row) -> list[Table]:
    found = results["rows"]
    floor = min((row["median"] for row in by_case(found, "floor") if "median" in row), default=None)
    made = [floors(results), _collectives(found)]
    heads = {
        "reload": "Reload: the model has storage",
        "meta": "From meta: materialize and load",
        "library": "A transformers model from scratch: experts fused in the model, separate in the checkpoint",
    }
    for case, head in heads.items():
        best = min((row["median"] for row in by_case(found, case) if row["ours"] and "median" in row), default=None)
        columns = ["loader", "runs", "min s", "median s", "max s", "x fastest epload"]
        columns += ["x floor"] if case == "reload" else ["MB above the shards"]
        columns += ["read s", "transfer s", "slice s", "sent / S"]
        lines = []
        for row in by_case(found, case):
            line = times_of(row)
            if "median" in row:
                phases = row["phases"]
                line += [times(best and row["median"] / best)]
                line += [times(floor and row["median"] / floor)] if case == "reload" else [megabytes(row["peak"])]
                line += [seconds(phases.get(name)) for name in ("read", "transfer", "slice")]
                line += [f"{row['out']:.2f}"]
            lines.append(line)
        made.append(Table(head, columns, lines))
    made.append(
        Table(
            "Materialize only",
            ("what", "runs", "min s", "median s", "max s"),
            [times_of(row) for row in by_case(found, "materialize")],
        )
    )
    made.append(_processors(found))
    made.append(_targets(found, floor))
    return [table for table in made if table.rows]


def floors(results: Row) -> Table:
    title = f"Floor: the same {results['nbytes'] / 1e6:.0f} MB as raw buckets over gloo"
    columns = ("what", "runs", "min s", "median s", "max s")
    return Table(title, columns, [times_of(row) for row in by_case(results["rows"], "floor")])


def _collectives(found: list[Row]) -> Table:
    each = median(found, "collective", "one broadcast per tensor")
    lines = []
    for row in by_case(found, "collective"):
        faster = "" if "median" not in row or each is None else times(each / row["median"])
        lines.append([*times_of(row), faster] if "median" in row else times_of(row))
    columns = ("broadcast of one list of tensors", "runs", "min s", "median s", "max s", "speedup over per-tensor")
    return Table("Coalescing alone: no model, no file", columns, lines)


def _processors(found: list[Row]) -> Table:
    """CPU seconds summed over all ranks: per stage, in the kernel, and in other threads (gloo's and the read helpers)."""
    lines = []
    for row in by_case(found, "reload"):
        if "median" in row and row["ours"]:
            cpu = row["cpu"]
            stages = [
                cpu["plan"] + cpu["materialize"],
                cpu["read"],
                cpu["inter_node"] + cpu["intra_node"],
                cpu["unpack"],
                cpu["verify"],
            ]
            total = cpu["user"] + cpu["system"]
            rest = max(0.0, total - sum(stages))
            lines.append([row["title"], *map(seconds, (row["median"], total, cpu["system"], *stages, rest))])
    columns = (
        "mode",
        "median s",
        "CPU s",
        "in kernel",
        "plan",
        "read",
        "relay",
        "unpack",
        "verify",
        "other threads",
    )
    return Table("Reload: CPU seconds, sum over all ranks", columns, lines)


def _targets(found: list[Row], floor: float | None) -> Table:
    """Target and measured ratios."""

    def ratio(case: str, above: str, below: str | None) -> float | None:
        over = median(found, case, above)
        under = floor if below is None else median(found, case, below)
        return over / under if over and under else None

    one, every, auto = (f"epload_modes:{mode}" for mode in ("one/two_level", "every/auto", "auto/auto"))
    library = "epload_library:auto"
    checked = "epload_verified:one/two_level, verify=True"
    rows = (
        ("reload, one reader, over the floor", "<= 1.5", ratio("reload", one, None)),
        ("reload, every rank reads, over the floor", "<= 0.9", ratio("reload", every, None)),
        ("reload, safe_open over every rank reads", ">= 10", ratio("reload", "safe_open_slices", every)),
        ("from meta, per-parameter broadcast over one reader", ">= 14", ratio("meta", "per_parameter", one)),
        ("from meta, torch over one reader", ">= 19", ratio("meta", "set_model_state_dict", one)),
        ("from meta, torch over auto", ">= 25", ratio("meta", "set_model_state_dict", auto)),
        ("from nothing, transformers over auto", ">= 10", ratio("library", "transformers_from_pretrained", library)),
        ("reload, one reader, verify=True over False", "<= 1.4", ratio("reload", checked, one)),
        ("from meta, one reader, verify=True over False", "<= 1.4", ratio("meta", checked, one)),
        ("materialize over to_empty", "<= 0.33", ratio("materialize", "epload", "to_empty")),
    )
    return Table("Targets", ("ratio of medians", "target", "measured"), [_reached(*row) for row in rows])


def _reached(what: str, target: str, ratio: float | None) -> list[str]:
    """Returns the line of a target, such as ``">= 10"``."""
    sign, limit = target.split()
    met = ratio is None or (ratio >= float(limit) if sign == ">=" else ratio <= float(limit))
    return [what, target, times(ratio) + ("" if met else " (missed)")]


def times_of(row: Row) -> list[str]:
    name = f"**{row['title']}**" if row["ours"] else row["title"]
    if "median" not in row:
        return [name, f"FAILED: {row['error']}"[:160]]
    return [name, str(row["runs"]), *(seconds(row[key]) for key in ("min", "median", "max"))]


def write_docs(results: Row, shown: list[Table]) -> None:
    plots.load(results, DATA / "load.png")
    (DATA / "load.json").write_text(json.dumps({k: v for k, v in results.items() if k != "samples"}, indent=1))
    write("load", [provenance(results), *(table.markdown() for table in shown)])


if __name__ == "__main__":
    main()
