"""Times reloads from files that are not in the page cache, next to the best rate at which this machine reads them with O_DIRECT.

    python benchmarks/bench_cold.py                          # 4 GB in 4 files, 4 ranks as 2 nodes x 2
    python benchmarks/bench_cold.py --layers 78 --files 6    # 12 GB
    python benchmarks/bench_cold.py --warm --modes auto      # out of the page cache

Before each run the files are taken out of the cache, which is checked. The runs of all modes and the bare reads alternate, as the
speed of a disk varies over time. The shards of the last load of each mode are compared with the files.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import resource
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path
from time import monotonic
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open

import epload
from measure import PeakMemory
from page_cache import cached, drop
from summary import contents, facts
from tables import Table, megabytes, provenance, seconds, times, write
from workload import Size, meta_model, sharded_model, write_checkpoint

ROOT = Path(__file__).parents[1]
MODES: dict[str, dict[str, Any]] = {
    "auto": {},
    "every": {"readers": "every"},
    "one": {"readers": "one"},
    "per_node": {"readers": "per_node"},
    "partitioned": {"readers": "partitioned"},
    "buffered": {"direct_io": False},
}
BARE = "O_DIRECT"
THREADS, REQUESTS = (1, 2, 4, 8), (1 << 20, 4 << 20, 16 << 20)
"""Of the bare reads, among which the fastest is taken."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=26, help="of 32 experts; 157 MB each")
    parser.add_argument("--many", action="store_true", help="bench_load.py's model: 18,867 tensors, 0.9 GB")
    parser.add_argument("--files", type=int, default=4)
    parser.add_argument("--nodes", type=int, default=2, help="emulated nodes")
    parser.add_argument("--ranks", type=int, default=2, help="ranks per node")
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--modes", default=",".join(MODES), help="comma-separated; buffered is auto with direct_io=False")
    parser.add_argument("--warm", action="store_true", help="leave the files in the page cache")
    parser.add_argument("--data", type=Path, help="directory for the checkpoint; temporary by default")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results", help="directory for the JSON results")
    parser.add_argument("--docs", action="store_true", help="write the table to benchmarks/results.md")
    options = parser.parse_args()
    if "RANK" in os.environ:
        Worker(options).run()
        return
    began = monotonic()
    with tempfile.TemporaryDirectory(prefix="epload-bench-") as temporary:
        folder = (options.data or Path(temporary)) / f"cold-{options.layers}-{options.files}{'-many' * options.many}"
        if not (folder / "config.json").exists():
            write_checkpoint(folder, size_of(options), 0, options.files)
        results = launch(options, folder)
    nbytes, tensors = contents(meta_model(size_of(options)))
    results = facts(nbytes, tensors) | results | {"minutes": (monotonic() - began) / 60}
    options.out.mkdir(parents=True, exist_ok=True)
    mark = "warm" if options.warm else "cold-many" if options.many else f"cold-{options.files}"
    (options.out / f"{mark}.json").write_text(json.dumps(results, indent=1))
    table = compared(results, options)
    table.show()
    if options.docs:
        write(mark, [provenance(results), table.markdown()])


def size_of(options: argparse.Namespace) -> Size:
    return Size() if options.many else Size(options.layers, 32, 1024, 768)


def launch(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Runs the ranks; returns what rank 0 has measured. Raises SystemExit if one fails."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    world = options.nodes * options.ranks
    common = {
        **os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(world),
        "OMP_NUM_THREADS": "1", "EPLOAD_BENCH": str(folder),
    }  # fmt: skip
    ranks = [
        subprocess.Popen([sys.executable, *sys.argv], env={**common, "RANK": str(rank)}, stdout=subprocess.PIPE)
        for rank in range(world)
    ]
    try:
        output, _ = ranks[0].communicate()
        codes = [rank.wait() for rank in ranks]
        if any(codes):
            raise SystemExit("a rank failed")
    finally:
        for rank in ranks:
            rank.kill()
    found: dict[str, Any] = json.loads(output.decode().splitlines()[-1])
    return found


class Worker:
    """One rank."""

    def __init__(self, options: argparse.Namespace) -> None:
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        self.options = options
        self.rank = dist.get_rank()
        self.folder = Path(os.environ["EPLOAD_BENCH"])
        self.files = sorted(self.folder.glob("*.safetensors"))
        self.nbytes = sum(file.stat().st_size for file in self.files)
        self.model = sharded_model(size_of(options)).to_empty(device="cpu")
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.to_local().zero_()  # its pages do not count as the load's
        nodes = torch.arange(dist.get_world_size()).view(options.nodes, -1).tolist()
        self.topology = epload.Topology.from_nodes(nodes)
        self.loaders: dict[str, epload.HierarchicalLoader] = {}

    def run(self) -> None:
        modes = self.options.modes.split(",")
        best = self._best() if not self.options.warm else (1, 4 << 20)
        samples: dict[str, list[dict[str, Any]]] = {name: [] for name in [BARE, *modes]}
        notes: dict[str, str] = {}
        with PeakMemory() as memory:
            for mode in modes:  # which makes groups and buffers
                self._measure(lambda mode=mode: self._load(mode))
        for turn in range(self.options.repeat):
            names = [BARE, *modes]
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                if name == BARE:
                    if not self.options.warm:
                        samples[name].append(self._measure(lambda: read_bare(self.files, *best) if self.rank == 0 else None))
                    continue
                samples[name].append(self._measure(lambda name=name: self._load(name)))
                notes[name] = self.report.reason
        for mode in modes:
            with torch.no_grad():
                for parameter in self.model.parameters():
                    parameter.to_local().fill_(float("nan"))
            self._load(mode)
            self._check(mode)
        peaks = [0] * dist.get_world_size()
        dist.all_gather_object(peaks, memory.above)
        if self.rank == 0:
            print(json.dumps({"samples": samples, "best": best, "peaks": peaks, "bytes": self.nbytes, "notes": notes}))
        dist.barrier()

    def _best(self) -> tuple[int, int]:
        """Threads and bytes of a request with which bare reads are fastest."""
        took = {}
        for threads, request in product(THREADS, REQUESTS):
            run = self._measure(lambda: read_bare(self.files, threads, request) if self.rank == 0 else None)  # noqa: B023
            took[threads, request] = run["seconds"]
        return min(took, key=took.__getitem__)

    def _measure(self, work: Callable[[], None]) -> dict[str, Any]:
        """Seconds from the first rank's start to the last one's end, and CPU seconds of all ranks."""
        if self.rank == 0 and not self.options.warm:
            for file in self.files:
                drop(file)
                assert cached(file) < 0.01, f"{file} is still in the page cache"
        dist.barrier()
        before, began = _processor(), time.perf_counter()
        work()
        own = _processor() - before
        dist.barrier()
        took = time.perf_counter() - began
        total = torch.tensor(own)
        dist.all_reduce(total)
        return {"seconds": took, "cpu": total.item()}

    def _load(self, mode: str) -> None:
        if mode not in self.loaders:
            self.loaders[mode] = epload.HierarchicalLoader(self.topology, progress=False, **MODES[mode])
        self.report = self.loaders[mode].load(self.model, self.folder)

    def _check(self, mode: str) -> None:
        """Compares every shard with the files."""
        state = self.model.state_dict()
        for file in self.files:
            with safe_open(file, "pt") as stored:
                for name in stored.keys():  # noqa: SIM118  (not a dict)
                    local, rows = state[name].to_local(), -(-state[name].shape[0] // dist.get_world_size())
                    want = stored.get_slice(name)[self.rank * rows : (self.rank + 1) * rows]
                    assert torch.equal(local.view(torch.int16), want.view(torch.int16)), f"{mode}: {name} is wrong"


def read_bare(files: list[Path], threads: int, request: int) -> None:
    """Reads files with O_DIRECT and does nothing with them."""
    places = iter([(file, at) for file in files for at in range(0, file.stat().st_size, request)])
    lock = threading.Lock()
    descriptors = {file: os.open(file, os.O_RDONLY | os.O_DIRECT) for file in files}

    def read() -> None:
        with mmap.mmap(-1, request) as buffer:
            while True:
                with lock:
                    file, at = next(places, (None, 0))
                if file is None:
                    return
                os.preadv(descriptors[file], [buffer], at)

    workers = [threading.Thread(target=read) for _ in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    for descriptor in descriptors.values():
        os.close(descriptor)


def _processor() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def compared(results: dict[str, Any], options: argparse.Namespace) -> Table:
    """Medians; ratios are medians of the ratios within a turn."""
    samples, rows = results["samples"], []
    bare = [run["seconds"] for run in samples[BARE]]
    for name, runs in samples.items():
        if not runs:
            continue
        took = [run["seconds"] for run in runs]
        title = name
        if name == BARE:
            threads, request = results["best"]
            title = f"bare reads, {threads} threads of {request >> 20} MiB"
        ratio = statistics.median(a / b for a, b in zip(bare, took, strict=True)) if bare else None
        median = statistics.median(took)
        rows.append([
            title, str(len(took)), seconds(min(took)), seconds(median), seconds(max(took)),
            f"{results['bytes'] / median / 1e9:.2f}", times(ratio), seconds(statistics.median(run["cpu"] for run in runs)),
            results["notes"].get(name, ""),
        ])  # fmt: skip
    state = "in the page cache" if options.warm else "not in the page cache"
    title = f"Reload of {results['bytes'] / 1e9:.1f} GB in {options.files} files {state}"
    if len(samples) == 2:  # the loaders of several modes have buffers each
        title += f"; at most {megabytes(max(results['peaks']))} MB a rank above the model"
    return Table(title, ("", "runs", "min s", "median s", "max s", "GB/s", "bare reads over it", "CPU s", "auto"), rows)


if __name__ == "__main__":
    main()
