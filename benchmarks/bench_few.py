"""Times reloads of the same bytes in 18,867 and in 183 tensors, over loopback: the cost per tensor.

    python benchmarks/bench_few.py

"Many" is bench_load.py's model; "few" has 15 layers of one large expert. Loads of the two alternate, because the speed of a
machine varies over time. Times of "many" are scaled to the same number of bytes.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from time import monotonic

from bench_load import ROOT, Measurement, floors, times_of
from summary import Row, by_case
from tables import Table, provenance, seconds, times, write
from workload import Size

MANY = Size()
FEW = Size(layers=15, experts=1, hidden=1536, intermediate=4400)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=2, help="emulated nodes")
    parser.add_argument("--ranks", type=int, default=2, help="ranks per node")
    parser.add_argument("--repeat", type=int, default=7, help="runs per mode")
    parser.add_argument("--peers", default="epload_modes", help="comma-separated file names in peers/")
    parser.add_argument("--data", type=Path, help="directory for the checkpoints; temporary by default")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results", help="directory for the JSON results")
    parser.add_argument("--docs", action="store_true", help="write the tables to benchmarks/results.md")
    options = parser.parse_args()
    options.cases, options.slow_repeat = "floor,reload", options.repeat
    began = monotonic()
    with tempfile.TemporaryDirectory(prefix="epload-bench-") as temporary:
        data = options.data or Path(temporary) / "data"
        measurement = Measurement(options, MANY, data, Path(temporary) / "run", FEW)
        measurement.run()
    results = measurement.results()
    results["minutes"] = (monotonic() - began) / 60
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "few.json").write_text(json.dumps(results, indent=1))
    shown = [floors(results), compared(results)]
    for table in shown:
        table.show()
    if options.docs:
        write("few", [provenance(results), *(table.markdown() for table in shown)])


def compared(results: Row) -> Table:
    """Median seconds, and CPU seconds in the kernel over all ranks."""
    lines = []
    for row in by_case(results["rows"], "few"):
        other = next(other for other in by_case(results["rows"], "reload") if other["entry"] == row["entry"])
        if "median" not in row or "median" not in other:
            lines.append(times_of(other if "median" in row else row))
            continue
        line = [row["title"]]
        for one, more in ((row["median"], other["median"]), (row["cpu"]["system"], other["cpu"]["system"])):
            as_many_bytes = more / results["nbytes"] * results["few"]["nbytes"]
            line += [seconds(one), seconds(as_many_bytes), times(as_many_bytes / one if one else None)]
        lines.append(line)
    few_of, many_of = f"{results['few']['tensors']} tensors", f"{results['tensors']} tensors"
    columns = ("loader", f"{few_of}, s", f"{many_of}, s", "ratio", f"kernel s, {few_of}", many_of, "ratio")
    return Table("Reload: the same bytes in few and in many tensors", columns, lines)


if __name__ == "__main__":
    main()
