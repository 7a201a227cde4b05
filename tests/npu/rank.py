"""One rank: ``rank.py RANK RANKS FOLDER WHAT ALGORITHM``. Does it twice; prints what was wrong, and where in its trace the second
time begins."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch_npu  # noqa: F401  (brings the device)

import epload

TENSORS = 6


def state(salt: int) -> dict[str, torch.Tensor]:
    return {f"w{i}": torch.arange(500.0) + 1000 * i + salt for i in range(TENSORS)}


def main(rank: int, ranks: int, folder: str, what: str, algorithm: str) -> None:
    torch.npu.set_device(0)
    dist.init_process_group("hccl", store=dist.FileStore(f"{folder}/store", ranks), rank=rank, world_size=ranks)
    topology = epload.Topology.from_nodes([[0, 1], [2, 3]])
    stream = torch.npu.Stream()
    start = {name: value - 7 for name, value in state(0).items()}
    model = torch.nn.ParameterDict({name: torch.nn.Parameter(value) for name, value in start.items()}).to("npu:0")
    loader = None
    if what != "op":
        options = {"readers": what, "algorithm": algorithm, "bucket_bytes": 64 + 2000, "stream": stream}
        loader = epload.HierarchicalLoader(topology, **options)

    def step(salt: int) -> bool:
        if loader is not None:
            source = state(salt) if what != "one" or rank == 0 else None
            return loader.load(model, source).phases["read"].nbytes > 0
        if rank == 0:
            for name, value in state(salt).items():
                model[name].data.copy_(value)
        options = {"algorithm": algorithm, "bucket_bytes": 4096, "stream": stream}
        epload.coalesced_bcast(list(model.values()), topology=topology, **options)
        return False

    step(1)
    torch.npu.synchronize()
    begin = len(Path(os.environ["FAKECANN_TRACE"]).read_text().splitlines())
    reads = step(2)
    torch.npu.synchronize()
    wrong = [name for name, value in state(2).items() if not torch.equal(model[name].detach().cpu(), value)]
    if "destroy" in Path(os.environ["FAKECANN_TRACE"]).read_text():
        wrong.append("a communicator has ended")
    for group in topology.groups._groups.values():
        group.abort()
    if Path(os.environ["FAKECANN_TRACE"]).read_text().count("destroy") != len(topology.groups._groups):
        wrong.append("communicators were not aborted")
    print(json.dumps({"wrong": wrong, "begin": begin, "reads": int(reads), "stream": hex(stream.npu_stream)}), flush=True)
    os._exit(0)  # torch_npu's end asks for more of CANN than there is here


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
