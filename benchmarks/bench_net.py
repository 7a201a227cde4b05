"""Loads over links of a given rate, one network namespace a node: time over S/B, and the bytes over every link. Needs root.

    python benchmarks/bench_net.py --json benchmarks/results/net.json
    python benchmarks/bench_net.py --shapes 4x2 --layers 4 --ways one/two_level,auto

S is the checkpoint's bytes and B a link's rate; a load in which one node reads can take no less than S/B. All ways are reloads of
the same model in the same processes, interleaved, and every shard is compared bit for bit after every load. The nodes share this
machine's disk cache, so that ways in which every node reads are limited by the processor, not by a link. "source" in place of
readers is "auto" where only the source rank has the checkpoint.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file

import epload
from netbed import NetBed, link_bytes
from workload import Size, reference, sharded_model, write_checkpoint, wrong_shards

WAYS = (
    "one/two_level,one/striped,one/flat,partitioned/two_level,partitioned/striped,per_node/auto,every/auto,auto/auto,"
    "source/auto"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="2x2,4x2,8x1", help="nodes x ranks, comma-separated")
    parser.add_argument("--layers", default="4,16", help="of 128 experts; 4 gives 80 MB, 16 gives 312 MB")
    parser.add_argument("--ways", default=WAYS, help="readers/algorithm, comma-separated")
    parser.add_argument("--mbit", type=int, default=1000, help="rate of each node's link, each way")
    parser.add_argument("--repeat", type=int, default=5, help="timed loads of each way")
    parser.add_argument("--experts", type=int, default=128, help="a layer; 128 times fewer give larger tensors")
    parser.add_argument("--json", type=Path, help="where to write the results")
    options = parser.parse_args()
    if "RANK" in os.environ:
        Worker(options).run()
        return
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="epload-net-") as temporary:
        for layers in map(int, options.layers.split(",")):
            data = Path(temporary) / str(layers)
            data.mkdir()
            for seed in (0, 1):
                write_checkpoint(data / f"{seed}.safetensors", Size(layers=layers), seed)
            for shape in options.shapes.split(","):
                nodes, ranks = map(int, shape.split("x"))
                results = Path(temporary) / "rows.json"
                with NetBed(nodes, options.mbit) as bed:
                    command = [sys.executable, __file__, *sys.argv[1:]]
                    bed.run(
                        ranks, command, limit=1200, EPLOAD_BENCH_SHAPE=shape, EPLOAD_BENCH_LAYERS=str(layers),
                        EPLOAD_BENCH_DATA=str(data), EPLOAD_BENCH_ROWS=str(results),
                    )  # fmt: skip
                rows += json.loads(results.read_text())
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        facts = {"date": time.strftime("%Y-%m-%d"), "cores": os.cpu_count(), "torch": torch.__version__}
        options.json.write_text(json.dumps({**facts, "mbit": options.mbit, "rows": rows}, indent=2))


class Worker:
    """One rank of one shape and size."""

    def __init__(self, options: argparse.Namespace) -> None:
        dist.init_process_group("gloo")
        self.options = options
        self.rank = dist.get_rank()
        self.shape = os.environ["EPLOAD_BENCH_SHAPE"]
        self.nodes, self.each = map(int, self.shape.split("x"))
        self.layers = int(os.environ["EPLOAD_BENCH_LAYERS"])
        self.files = [Path(os.environ["EPLOAD_BENCH_DATA"]) / f"{seed}.safetensors" for seed in (0, 1)]
        self.model = sharded_model(Size(layers=self.layers))
        self.model.to_empty(device="cpu")
        first = range(0, self.nodes * self.each, self.each)
        self.topology = epload.Topology.from_nodes([list(range(n, n + self.each)) for n in first])

    def run(self) -> None:
        loaders = {}
        for way in self.options.ways.split(","):
            readers, algorithm = way.split("/")
            readers = "auto" if readers == "source" else readers
            loaders[way] = epload.HierarchicalLoader(
                self.topology, readers=readers, algorithm=algorithm, progress=False
            )
        seen: dict[str, list[tuple[float, list[tuple[int, int]]]]] = {way: [] for way in loaders}
        reports: dict[str, epload.LoadReport] = {}
        for number in range(self.options.repeat + 1):  # the first round warms buffers and groups
            for way, loader in loaders.items():
                measured, reports[way] = self.measure(way, loader, self.files[number % 2])
                if number:
                    seen[way].append(measured)
        if self.rank == 0:
            self.report(seen, reports)
        dist.barrier()
        dist.destroy_process_group()

    def measure(
        self, way: str, loader: epload.HierarchicalLoader, file: Path
    ) -> tuple[tuple[float, list[tuple[int, int]]], epload.LoadReport]:
        """Seconds until the slowest rank is done, and the bytes into and out of every node."""
        checkpoint: Any = file
        if way.startswith("source"):
            checkpoint = load_file(file) if self.rank == 0 else None
        with torch.no_grad():
            torch._foreach_zero_([p.to_local() for p in self.model.parameters() if p.to_local().numel()])
        dist.barrier()
        before = link_bytes()
        began = time.perf_counter()
        report = loader.load(self.model, checkpoint)
        seconds = torch.tensor([time.perf_counter() - began], dtype=torch.float64)
        after = link_bytes()
        if wrong := wrong_shards(self.model, reference(file), self.rank, self.nodes * self.each):
            raise SystemExit(f"rank {self.rank}: {way} left {len(wrong)} wrong shards, the first {wrong[0]}")
        dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
        moved = torch.tensor([[after[0] - before[0], after[1] - before[1]]])
        everyones = [torch.empty_like(moved) for _ in range(self.nodes * self.each)]
        dist.all_gather(everyones, moved)
        links = [(int(m[0, 0]), int(m[0, 1])) for m in everyones[:: self.each]]
        return (float(seconds), links), report

    def report(
        self, seen: dict[str, list[tuple[float, list[tuple[int, int]]]]], reports: dict[str, epload.LoadReport]
    ) -> None:
        nbytes = next(iter(reports.values())).nbytes
        bound = nbytes / (self.options.mbit * 1e6 / 8)
        print(
            f"{self.shape}: {nbytes / 1e6:.0f} MB in {next(iter(reports.values())).tensors} tensors, links of "
            f"{self.options.mbit} Mbit/s, S/B {bound:.3f} s\n"
            f"{'way':<24}{'min':>8}{'median':>8}{'max':>8}{'/(S/B)':>8}{'in/S':>7}{'out/S':>7}"
        )
        rows = []
        for way, runs in seen.items():
            seconds = [run[0] for run in runs]
            into = max(max(link[0] for link in run[1]) for run in runs) / nbytes
            out = max(max(link[1] for link in run[1]) for run in runs) / nbytes
            row = {
                "shape": self.shape, "way": way, "nbytes": nbytes, "tensors": reports[way].tensors, "bound": bound,
                "seconds": seconds, "in": into, "out": out, "readers": reports[way].readers,
                "algorithm": reports[way].algorithm, "chosen": reports[way].chosen,
            }  # fmt: skip
            rows.append(row)
            median = statistics.median(seconds)
            print(
                f"{way:<24}{min(seconds):8.3f}{median:8.3f}{max(seconds):8.3f}{median / bound:8.2f}{into:7.3f}{out:7.3f}"
                f"  {reports[way].chosen}",
                flush=True,
            )
        Path(os.environ["EPLOAD_BENCH_ROWS"]).write_text(json.dumps(rows))


if __name__ == "__main__":
    main()
