"""Loads from a store that takes 1 ms for each request, where the ranks keep strided parts of 12 KB: requests and seconds.

    python benchmarks/bench_slow_store.py              # 8 ranks as 2 nodes x 4, 604 MB in one file
    python benchmarks/bench_slow_store.py --layers 4   # little of each rank

A preloaded library (slow_store.c) delays each call that reads the checkpoint; the bytes come out of the page cache. Each mode has
a loader of its own. Requests are those of all ranks from opening the file to the end of the load. The shards are compared with
what was saved.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard

import epload
import slow_store
from summary import facts
from tables import Table, provenance, seconds, write

MODES = ("every", "per_node", "partitioned", "one", "auto")
NODES, RANKS = 2, 4
PART = 12 << 10
"""Bytes of a row that a rank keeps."""
ROWS = 512


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=12, help="of 50 MB")
    parser.add_argument("--milliseconds", type=float, default=1.0, help="that each request takes longer")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--modes", default=",".join(MODES), help="comma-separated")
    parser.add_argument("--json", type=Path, help="file for what was measured")
    parser.add_argument("--docs", action="store_true", help="write the table to benchmarks/results.md")
    options = parser.parse_args()
    if "RANK" in os.environ:
        run_rank(options)
        return
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="epload-bench-") as temporary:
        samples = launch(options, Path(temporary))
    nbytes = sum(value.nbytes for value in state(options.layers).values())
    results = facts(nbytes, options.layers) | {"minutes": (time.monotonic() - began) / 60}
    table = measured(samples, nbytes, options)
    table.show()
    if options.json:
        options.json.write_text(json.dumps(samples))
    if options.docs:
        write("slow-store", [provenance(results), table.markdown()])


def launch(options: argparse.Namespace, folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Runs the ranks; returns what each load of each mode took. Raises SystemExit if a rank fails."""
    store, log = folder / "store", folder / "requests"
    store.mkdir()
    save_file(state(options.layers), store / "model.safetensors")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = {
        **os.environ, **slow_store.environment(store, log, options.milliseconds / 1e3), "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port), "WORLD_SIZE": str(NODES * RANKS), "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    ranks = [
        subprocess.Popen([sys.executable, *sys.argv], env={**common, "RANK": str(rank)}, stdout=subprocess.PIPE)
        for rank in range(NODES * RANKS)
    ]
    try:
        output, _ = ranks[0].communicate()
        codes = [rank.wait() for rank in ranks]
        if any(codes):
            raise SystemExit("a rank failed")
    finally:
        for rank in ranks:
            rank.kill()
    found: dict[str, list[dict[str, Any]]] = json.loads(output.decode().splitlines()[-1])
    return found


def state(layers: int) -> dict[str, torch.Tensor]:
    """Elements differ within a tensor and between tensors."""
    columns = NODES * RANKS * PART // 4
    count = ROWS * columns
    return {
        f"{layer}.weight": torch.arange(layer * count, (layer + 1) * count, dtype=torch.int32).view(torch.float32)
        .view(ROWS, columns)
        for layer in range(layers)
    }  # fmt: skip


def run_rank(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    store, log = Path(os.environ["SLOW_FOLDER"]), Path(os.environ["SLOW_LOG"])
    rank = dist.get_rank()
    with torch.device("meta"):
        columns = NODES * RANKS * PART // 4
        model = nn.Sequential(*(nn.Linear(columns, ROWS, bias=False) for _ in range(options.layers)))
    fully_shard(model, shard_placement_fn=lambda _: Shard(1))
    model.to_empty(device="cpu")
    topology = epload.Topology.from_nodes(torch.arange(NODES * RANKS).view(NODES, RANKS).tolist())
    samples: dict[str, list[dict[str, Any]]] = {}
    for mode in options.modes.split(","):
        with epload.HierarchicalLoader(topology, readers=mode, progress=False) as loader:
            for _ in range(options.repeat):
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.to_local().zero_()
                dist.barrier()
                before, began = len(slow_store.requests(log)), time.perf_counter()
                report = loader.load(model, store)
                dist.barrier()
                took, made = time.perf_counter() - began, slow_store.requests(log)[before:]
                check(model, rank)
                dist.barrier()
                samples.setdefault(mode, []).append(
                    {"seconds": took, "requests": len(made), "bytes": sum(made), "why": report.reason}
                )
    if rank == 0:
        print(json.dumps(samples))
    dist.barrier()


def check(model: nn.Module, rank: int) -> None:
    """Compares this rank's shards with what was saved."""
    part = PART // 4
    for name, parameter in model.named_parameters():
        layer = int(name.split(".")[0])
        row = torch.arange(ROWS, dtype=torch.int32)[:, None] + layer * ROWS
        want = row * (NODES * RANKS * part) + torch.arange(rank * part, (rank + 1) * part, dtype=torch.int32)
        assert torch.equal(parameter.to_local().view(torch.int32), want), f"{name} is wrong"


def measured(samples: dict[str, list[dict[str, Any]]], nbytes: int, options: argparse.Namespace) -> Table:
    rows = []
    for mode, runs in samples.items():
        last = runs[-1]
        took = [run["seconds"] for run in runs]
        rows.append([
            mode, f"{last['requests']:,}", f"{last['bytes'] / last['requests'] / 1e3:,.0f}", f"{last['bytes'] / nbytes:.2f}",
            seconds(took[0]), seconds(statistics.median(took)), last["why"],
        ])  # fmt: skip
    title = f"{nbytes / 1e6:.0f} MB from a store of {options.milliseconds:g} ms a request, {NODES * RANKS} ranks, parts of 12 KB"
    columns = ("readers", "requests", "kB each", "bytes read over size", "first load s", "median s", "auto")
    return Table(title, columns, rows)


if __name__ == "__main__":
    main()
