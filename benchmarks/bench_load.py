"""Times loading one checkpoint of many tensors into an FSDP2 model, and compares with other loaders and with the floor.

    python benchmarks/bench_load.py                  # 4 ranks as 2 nodes x 2, everything; about 15 minutes on 2 cores
    python benchmarks/bench_load.py --loaders epload --cases reload

The floor is the raw broadcast of the same bytes in flat buckets over gloo from warm reused buffers, the best of {flat, two-level}
x {16, 64 MiB}. "reload": the model is materialised and was written before; "meta": everything from a meta model on. Before each
reload all shards are overwritten, after each load they are compared bit for bit with the checkpoint, and the checkpoints of
successive loads differ.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import epload
from epload.materialise import materialise
from epload.targets import collect
from peers import PEERS
from workload import Size, meta_model, reference, sharded_model, write_checkpoint, wrong_shards


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=2, help="emulated nodes")
    parser.add_argument("--ranks", type=int, default=2, help="ranks a node")
    parser.add_argument("--layers", type=int, default=48, help="of 128 experts; 48 gives 18,867 tensors")
    parser.add_argument(
        "--few", action="store_true", help="about as many bytes in 183 tensors: 15 layers of one expert"
    )
    parser.add_argument("--repeat", type=int, default=5, help="timed runs of epload and the floor (from meta: half)")
    parser.add_argument("--peer-repeat", type=int, default=1, help="timed runs of the others, which take a minute each")
    parser.add_argument(
        "--loaders",
        default="epload,epload_every,epload_partitioned,epload_per_node,epload_auto,materialise," + ",".join(PEERS),
        help="comma-separated",
    )
    parser.add_argument("--cases", default="reload,meta", help="reload, meta or both")
    parser.add_argument("--data", type=Path, help="folder for the checkpoints; a temporary one by default")
    parser.add_argument("--json", type=Path, help="where to write the results")
    options = parser.parse_args()
    if "RANK" in os.environ:
        _run(options)
        return
    with tempfile.TemporaryDirectory(prefix="epload-bench-") as temporary:
        data = options.data or Path(temporary)
        data.mkdir(parents=True, exist_ok=True)
        for seed in (0, 1):
            if not (data / f"{seed}.safetensors").exists():
                write_checkpoint(data / f"{seed}.safetensors", _size(options), seed)
        environment = {
            **os.environ,
            "EPLOAD_BENCH_DATA": str(data),
            "OMP_NUM_THREADS": "1",
            "TORCH_CPP_LOG_LEVEL": "ERROR",
        }
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        torchrun += ["--nproc-per-node", str(options.nodes * options.ranks), __file__, *sys.argv[1:]]
        sys.exit(subprocess.run(torchrun, env=environment).returncode)


class PeakMemory:
    """The most anonymous + shared memory of this process while it runs, sampled every 5 ms; bytes above the start."""

    def __enter__(self) -> PeakMemory:
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # else memory that earlier runs freed would count as there already
        self.start = self.peak = self._now()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()
        return self

    def _sample(self) -> None:
        while not self._stop.wait(0.005):
            self.peak = max(self.peak, self._now())

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self.peak = max(self.peak, self._now())
        self.above = self.peak - self.start

    @staticmethod
    def _now() -> int:
        with open("/proc/self/status") as status:
            return sum(int(line.split()[1]) << 10 for line in status if line.startswith(("RssAnon", "RssShmem")))


class Bench:
    """One rank of the benchmark."""

    def __init__(self, options: argparse.Namespace) -> None:
        dist.init_process_group("gloo")
        self.options = options
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        data = Path(os.environ["EPLOAD_BENCH_DATA"])
        self.files = [data / "0.safetensors", data / "1.safetensors"]
        self.size = _size(options)
        each = options.ranks
        self.topology = epload.Topology.from_nodes([list(range(n, n + each)) for n in range(0, self.world, each)])
        state = meta_model(self.size).state_dict()
        self.nbytes, self.tensors = sum(t.nbytes for t in state.values()), len(state)
        self.loads = 0
        self.rows: list[dict[str, object]] = []

    def say(self, text: str) -> None:
        if self.rank == 0:
            print(text, flush=True)

    def timed(self, work: Callable[[], object]) -> float:
        """Seconds from a common start until the slowest rank is done."""
        dist.barrier()
        began = time.perf_counter()
        work()
        seconds = torch.tensor([time.perf_counter() - began], dtype=torch.float64)
        dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
        return float(seconds)

    def record(self, case: str, loader: str, seconds: list[float], peak: int | None = None, note: str = "") -> None:
        row = {
            "case": case, "loader": loader, "runs": len(seconds), "min": min(seconds),
            "median": statistics.median(seconds), "max": max(seconds),
            "GB/s": self.nbytes / statistics.median(seconds) / 1e9, "peak_bytes_per_rank": peak, "note": note,
        }  # fmt: skip
        self.rows.append(row)
        memory = "" if peak is None else f"  +{peak / 1e6:6.0f} MB"
        self.say(
            f"{case:<8}{loader:<28}{row['min']:8.2f}{row['median']:8.2f}{row['max']:8.2f}{row['GB/s']:7.2f}{memory}  {note}"
        )

    def next_file(self) -> Path:
        """Alternates, so that a load that does nothing is found out."""
        self.loads += 1
        return self.files[self.loads % 2]

    def verify(self, model: nn.Module, file: Path, loader: str) -> None:
        wrong = wrong_shards(model, reference(file), self.rank, self.world)
        if wrong:
            raise SystemExit(f"rank {self.rank}: {loader} left {len(wrong)} wrong shards, the first {wrong[0]}")
        dist.barrier()

    # ---- what is timed ----

    def floor(self) -> float:
        """Seconds of the best raw broadcast of the same bytes."""
        best = []
        leaders = self.topology.leaders(0)
        groups = [dist.new_group(list(node)) for node in self.topology.nodes]
        intra, inter = groups[self.topology.nodes.index(self.topology.node)], dist.new_group(list(leaders))
        for mib in (16, 64):
            buffer = torch.ones(mib << 20, dtype=torch.uint8)

            def flat(buffer: torch.Tensor = buffer) -> None:
                for begin in range(0, self.nbytes, buffer.numel()):
                    dist.broadcast(buffer[: self.nbytes - begin], 0)

            def two_level(buffer: torch.Tensor = buffer) -> None:
                for begin in range(0, self.nbytes, buffer.numel()):
                    part = buffer[: self.nbytes - begin]
                    if self.rank in leaders:
                        dist.broadcast(part, 0, group=inter)
                    dist.broadcast(part, self.topology.node[0], group=intra)

            for work in (flat, two_level):
                self.timed(work)
                seconds = [self.timed(work) for _ in range(self.options.repeat)]
                self.record("floor", f"{work.__name__} {mib} MiB", seconds)
                best.append(statistics.median(seconds))
        return min(best)

    def epload_loader(self, readers: str, mebibytes: float) -> Callable[[nn.Module, Path, int], None]:
        loader = epload.HierarchicalLoader(
            self.topology, readers=readers, bucket_bytes=int(mebibytes * (1 << 20)), progress=False
        )

        def load(model: nn.Module, file: Path, rank: int) -> None:
            self.report = loader.load(model, file)

        return load

    def loader(self, name: str) -> Callable[[nn.Module, Path, int], None]:
        """By name; ``epload@16`` is epload with buckets of 16 MiB."""
        if name in PEERS:
            return PEERS[name]
        kind, _, mebibytes = name.partition("@")
        readers = kind.removeprefix("epload").lstrip("_") or "one"
        return self.epload_loader(readers, float(mebibytes or 64))

    def reload(self, name: str, model: nn.Module) -> None:
        loader = self.loader(name)
        seconds = []
        repeat = self.options.repeat if name.startswith("epload") else self.options.peer_repeat
        for run in range(repeat + name.startswith("epload")):  # epload's first run warms its buffers and groups
            with torch.no_grad():
                torch._foreach_zero_([p.to_local() for p in model.parameters() if p.to_local().numel()])
            file = self.next_file()
            took = self.timed(lambda: loader(model, file, self.rank))  # noqa: B023
            self.verify(model, file, name)
            if run or not name.startswith("epload"):
                seconds.append(took)
        self.record("reload", name, seconds)
        if name.startswith("epload"):
            self.say(str(self.report))

    def from_meta(self, name: str) -> None:
        seconds, peaks = [], []
        repeat = (self.options.repeat + 1) // 2 if name.startswith("epload") else self.options.peer_repeat
        for _ in range(repeat):
            model = sharded_model(self.size)
            loader = self.loader(name)
            file = self.next_file()
            with PeakMemory() as memory:
                seconds.append(self.timed(lambda: loader(model, file, self.rank)))  # noqa: B023
            self.verify(model, file, name)
            shards = sum(p.to_local().nbytes for p in model.parameters())
            peaks.append(memory.above - shards)
        peak = torch.tensor([max(peaks)])
        dist.all_reduce(peak, op=dist.ReduceOp.MAX)
        self.record("meta", name, seconds, int(peak), "memory above the shards")
        if name.startswith("epload"):
            self.say(str(self.report))

    def materialise(self) -> None:
        """epload's materialise against nn.Module.to_empty."""
        ours, theirs = [], []
        for _ in range((self.options.repeat + 1) // 2):
            model = sharded_model(self.size)
            targets = collect(model)
            ours.append(self.timed(lambda: materialise(model, targets, torch.device("cpu"))))  # noqa: B023
            model = sharded_model(self.size)
            theirs.append(self.timed(lambda: model.to_empty(device="cpu")))  # noqa: B023
        self.record("meta", "materialise: epload", ours)
        self.record("meta", "materialise: to_empty", theirs)


def _size(options: argparse.Namespace) -> Size:
    if options.few:
        return Size(layers=15, experts=1, hidden=1536, intermediate=4400)
    return Size(layers=options.layers)


def _run(options: argparse.Namespace) -> None:
    bench = Bench(options)
    loaders = options.loaders.split(",")
    cases = options.cases.split(",")
    bench.say(
        f"{bench.nbytes / 1e6:.0f} MB in {bench.tensors} tensors, {options.nodes} nodes x {options.ranks} "
        f"ranks over gloo on one machine with {os.cpu_count()} cores, torch {torch.__version__}\n"
        f"{'case':<8}{'loader':<28}{'min':>8}{'median':>8}{'max':>8}{'GB/s':>7}"
    )
    floor = bench.floor()
    if "reload" in cases:
        model = sharded_model(bench.size)
        model.to_empty(device="cpu")
        for name in loaders:
            if name != "materialise":
                bench.reload(name, model)
        del model
    if "meta" in cases:
        for name in loaders:
            bench.materialise() if name == "materialise" else bench.from_meta(name)
    medians = {(row["case"], row["loader"]): float(row["median"]) for row in bench.rows}  # type: ignore[arg-type]
    bench.say(f"floor: {floor:.2f} s")
    for (case, loader), seconds in medians.items():
        if case == "reload":
            bench.say(f"reload {loader}: {seconds / floor:.2f} x the floor")
    for (case, loader), seconds in medians.items():
        for ours in ("epload", "epload_every"):
            if (case, ours) in medians and loader in PEERS:
                bench.say(f"{case}: {ours} is {seconds / medians[case, ours]:.1f} x faster than {loader}")
    if options.json and bench.rank == 0:
        facts = {"date": time.strftime("%Y-%m-%d"), "machine": platform.machine(), "cores": os.cpu_count()}
        facts |= {"torch": torch.__version__, "options": {k: str(v) for k, v in vars(options).items()}}
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps({**facts, "floor_seconds": floor, "rows": bench.rows}, indent=2))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
