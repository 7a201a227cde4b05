"""One rank: ``refusals.py RANK RANKS FOLDER``. Passes streams that torch_npu did not make, then one that it made, with which HCCL
fails once. Prints what was refused and how, what was wrong, and how much the trace had by then."""

from __future__ import annotations

import ctypes
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch_npu  # noqa: F401  (brings the device)

import epload

NODES = [[0, 1], [2, 3]]
NO_LINK = 9
"""An error of HCCL."""


def main(rank: int, ranks: int, folder: str) -> None:
    torch.npu.set_device(0)
    dist.init_process_group("hccl", store=dist.FileStore(f"{folder}/store", ranks), rank=rank, world_size=ranks)
    topology = epload.Topology.from_nodes(NODES)
    everyone = str(dist.group.WORLD.group_name)  # type: ignore[union-attr]
    stream = torch.npu.Stream()
    external = torch.npu.ExternalStream(stream.npu_stream)
    tensors = [torch.full((n,), float(rank)).to("npu:0") for n in (8, 60)]
    model = torch.nn.ParameterDict({"w": torch.nn.Parameter(torch.full((9,), float(rank)))}).to("npu:0")
    outcomes: dict[str, list[str]] = {}
    wrong = []

    def refused(what: str, action: Callable[[], object]) -> None:
        try:
            action()
            outcomes[what] = ["", "raised nothing"]
        except Exception as error:
            outcomes[what] = [type(error).__name__, str(error).splitlines()[0]]
        wrong.extend(f"{what}: {t.tolist()}" for t in (*tensors, model["w"]) if t.tolist() != [rank] * t.numel())

    def load(given: torch.Stream) -> None:
        epload.HierarchicalLoader(topology, stream=given).load(model, {"w": torch.ones(9)} if rank == 0 else None)

    refused("op", lambda: epload.coalesced_bcast(tensors, topology=topology, stream=external))
    given = external if rank == 2 else stream
    refused("op, rank 2", lambda: epload.coalesced_bcast(tensors, topology=topology, stream=given))

    def native(given: torch.Stream) -> None:
        torch.ops.epload.coalesced_bcast(tensors, 0, everyone, "", 1000, "two_level", given)

    refused("native op", lambda: native(external))
    refused("loader", lambda: load(external))
    trace = Path(os.environ["FAKECANN_TRACE"])
    so_far = len(trace.read_text().splitlines()) if trace.exists() else 0
    ctypes.CDLL("libascendcl.so").fakecann_fail_broadcast(NO_LINK)
    refused("first broadcast", lambda: native(stream))

    epload.coalesced_bcast(tensors, topology=topology, stream=stream)
    load(stream)
    torch.npu.synchronize()
    wrong += [f"after: {t.tolist()}" for t in tensors if t.tolist() != [0] * t.numel()]
    wrong += [f"after: {value.tolist()}" for value in model.values() if value.tolist() != [1] * 9]
    print(json.dumps({"outcomes": outcomes, "wrong": wrong, "trace": so_far}), flush=True)
    os._exit(0)  # torch_npu's end asks for more of CANN than there is here


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
