"""Times saving an FSDP2 model in the layout of ``save_pretrained``, on one machine.

    python benchmarks/bench_save.py               # 18,867 tensors, 4 ranks
    python benchmarks/bench_save.py --layers 12   # a quarter of them

Entries run in turn, each into a new folder. "Floor" are the same bytes in one file, of which each rank writes its part with
pwrite, 4 MiB at a time, and calls fsync. The time of an entry ends when all ranks are done and the bytes are on disk. What epload
has saved is loaded again, and each shard compared.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from time import monotonic, perf_counter

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.tensor import DTensor

import epload
from summary import facts
from tables import Table, provenance, seconds, times, write
from workload import Size, sharded_model

RANKS = 4
CHUNK = 4 << 20
FLOOR, OURS = "floor: pwrite and fsync", "epload.save"


def model_with_values(size: Size) -> nn.Module:
    model = sharded_model(size)
    model.to_empty(device="cpu")
    generator = torch.Generator().manual_seed(dist.get_rank())
    for tensor in model.state_dict().values():
        tensor.to_local().normal_(generator=generator)
    return model


def floor(model: nn.Module, folder: Path) -> None:
    """Of as many bytes as this rank's shards have."""
    shards = [tensor.to_local() for tensor in model.state_dict().values()]
    counts = [0] * dist.get_world_size()
    dist.all_gather_object(counts, sum(shard.nbytes for shard in shards))
    data = memoryview(torch.full((CHUNK,), 7, dtype=torch.uint8).numpy())
    if dist.get_rank() == 0:
        folder.mkdir()
        (folder / "floor").touch()
        os.truncate(folder / "floor", sum(counts))
    dist.barrier()
    begin, left = sum(counts[: dist.get_rank()]), counts[dist.get_rank()]
    fd = os.open(folder / "floor", os.O_WRONLY)
    while left:
        written = os.pwrite(fd, data[: min(CHUNK, left)], begin)
        begin, left = begin + written, left - written
    os.fsync(fd)
    os.close(fd)


def ours(model: nn.Module, folder: Path) -> None:
    epload.save(model, folder)


def gather(model: nn.Module, folder: Path) -> None:
    """What ``save_pretrained`` of a model under FSDP2 comes to."""
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if dist.get_rank() == 0:
        folder.mkdir()
        save_file(state, folder / "model.safetensors")
        with open(folder / "model.safetensors", "rb") as file:
            os.fsync(file.fileno())


def dcp_huggingface(model: nn.Module, folder: Path) -> None:
    writer = dcp.HuggingFaceStorageWriter(str(folder), save_distributed=True, enable_consolidation=True)
    dcp.save(model.state_dict(), storage_writer=writer)


ENTRIES: dict[str, Callable[[nn.Module, Path], None]] = {
    FLOOR: floor,
    OURS: ours,
    "gather to rank 0, save_file": gather,
    "DCP, HuggingFaceStorageWriter with consolidation": dcp_huggingface,
}


def check(model: nn.Module, size: Size, folder: Path) -> None:
    again = sharded_model(size)
    epload.load(again, folder, progress=False)
    expected = model.state_dict()
    for name, tensor in again.state_dict().items():
        assert isinstance(tensor, DTensor)
        if not torch.equal(tensor.to_local(), expected[name].to_local()):
            raise AssertionError(f"{name} is not what was saved")


def worker(options: argparse.Namespace) -> None:
    dist.init_process_group("gloo")
    size = Size(layers=options.layers)
    model = model_with_values(size)
    taken: dict[str, list[float]] = {name: [] for name in ENTRIES}
    for turn in range(options.repeat + 1):
        for name, save in ENTRIES.items():
            if turn > options.slow_repeat and name not in (FLOOR, OURS):
                continue
            folder = options.data / "saved"
            dist.barrier()
            began = perf_counter()
            save(model, folder)
            dist.barrier()
            if turn:
                taken[name].append(perf_counter() - began)
            elif name == OURS:
                check(model, size, folder)
            dist.barrier()
            if dist.get_rank() == 0:
                shutil.rmtree(folder)
    if dist.get_rank() == 0:
        state = model.state_dict()
        found = {"seconds": taken, "tensors": len(state), "nbytes": sum(tensor.nbytes for tensor in state.values())}
        (options.data / "result.json").write_text(json.dumps(found))
    dist.barrier()
    os._exit(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=Size.layers, help="of 128 experts; 393 tensors, 19 MB each")
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--slow-repeat", type=int, default=3, help="runs of the other loaders")
    parser.add_argument("--data", type=Path, help="directory to save to; temporary by default")
    parser.add_argument("--docs", action="store_true", help="write the table to benchmarks/results.md")
    options = parser.parse_args()
    if "RANK" in os.environ:
        worker(options)
        return
    began = monotonic()
    with tempfile.TemporaryDirectory(prefix="epload-bench-", dir=options.data) as temporary:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}", __file__]
        command += [f"--layers={options.layers}", f"--repeat={options.repeat}", f"--slow-repeat={options.slow_repeat}"]
        subprocess.run([*command, f"--data={temporary}"], check=True, env={"OMP_NUM_THREADS": "1", **os.environ})
        found = json.loads((Path(temporary) / "result.json").read_text())
    median = {name: statistics.median(each) for name, each in found["seconds"].items()}
    rows = [
        [name, seconds(median[name]), times(median[name] / median[FLOOR]), times(median[name] / median[OURS])] for name in ENTRIES
    ]
    title = f"Saving {found['tensors']:,} tensors, {found['nbytes'] / 1e6:.0f} MB, {RANKS} ranks, FSDP2 (medians)"
    table = Table(title, ("", "s", "over the floor", "over epload.save"), rows)
    table.show()
    if options.docs:
        about = facts(found["nbytes"], found["tensors"]) | {"minutes": (monotonic() - began) / 60}
        write("save", [provenance(about), table.markdown()])


if __name__ == "__main__":
    main()
