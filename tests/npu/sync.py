"""One rank of a sync: ``sync.py RANK RANKS FOLDER STAGE TRANSPORT``. The first two train, the others are an engine of another
job. Prints which of its tensors were wrong after each version."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch_npu  # noqa: F401  (brings the device)
from torch.distributed.tensor import DeviceMesh, DTensor, Shard

import epload

TENSORS = 6
ROWS = 501
"""Shards are uneven. They are rows, as the fake device copies nothing else."""
EACH = 2
"""Ranks of a job."""


def full(number: int, version: int) -> torch.Tensor:
    return torch.arange(ROWS * 3.0).reshape(ROWS, 3) + 10000 * number + version


def shard(number: int, version: int, rank: int, sharded: bool) -> torch.Tensor:
    tensor = full(number, version)
    return tensor.chunk(EACH)[rank] if sharded else tensor


def main(rank: int, ranks: int, folder: str, stage: str, transport: str) -> None:
    torch.npu.set_device(0)
    os.environ["ASCEND_RT_VISIBLE_DEVICES"] = str(rank)  # so that ranks have devices of their own
    sends, rank = rank < EACH, rank % EACH
    dist.init_process_group("hccl", store=dist.FileStore(f"{folder}/store-{sends}", EACH), rank=rank, world_size=EACH)
    topology = epload.Topology.from_nodes([list(range(EACH))])
    mesh = DeviceMesh("npu", list(range(EACH)), _init_backend=False)
    model = torch.nn.ParameterDict()
    for number in range(TENSORS):
        sharded = sends == (number % 2 == 0)  # the other job has it whole
        tensor = shard(number, 0, rank, sharded).to("npu:0")
        if sharded:
            tensor = DTensor.from_local(tensor, mesh, [Shard(0)], run_check=False, shape=(ROWS, 3), stride=(3, 1))
        model[f"w{number}"] = torch.nn.Parameter(tensor, requires_grad=False)

    def local(number: int) -> torch.Tensor:
        tensor = model[f"w{number}"].detach()
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor

    wrong, transports = [], []
    address = Path(folder, "address")
    if sends:
        sender = epload.WeightSender(
            model,
            ("127.0.0.1", 0),
            receivers=ranks - EACH,
            topology=topology,
            timeout=60,
            verify=True,
            transport=transport,
        )
        with sender:
            if rank == 0:
                address.with_suffix(".new").write_text(sender.address)
                address.with_suffix(".new").rename(address)
            for version in (1, 2):
                for number in range(TENSORS):
                    sharded = isinstance(model[f"w{number}"], DTensor)
                    local(number).copy_(shard(number, version, rank, sharded))
                transports.append(sender.send_weights(version).transport)
    else:
        until = time.monotonic() + 60
        while not address.exists() and time.monotonic() < until:
            time.sleep(0.01)
        receiver = epload.WeightReceiver(model, address.read_text(), topology=topology, timeout=60, stage=stage, verify=True)
        with receiver:
            for version in (1, 2):
                transports.append(receiver.receive_weights(version).transport)
                receiver.commit()
                for number in range(TENSORS):
                    expected = shard(number, version, rank, isinstance(model[f"w{number}"], DTensor))
                    if not torch.equal(local(number).cpu(), expected):
                        wrong.append(f"w{number} of version {version}")
    print(json.dumps({"wrong": wrong, "sends": sends, "transports": transports}), flush=True)
    os._exit(0)  # torch_npu's end asks for more of CANN than there is here


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
