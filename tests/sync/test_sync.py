"""A trainer's weights in the ranks of another job: every layout against the full tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import epload
from support.jobs import Job, Meeting, run

SHAPES = {
    "embed": (37, 16), "norm": (16,), "experts": (5, 12, 16), "head": (16, 41), "scale": (), "empty": (0, 4), "big": (600, 131),
}  # fmt: skip


def values(name: str, version: int) -> Tensor:
    shape = SHAPES[name]
    number = list(SHAPES).index(name)
    count = torch.Size(shape).numel()
    return (torch.arange(count, dtype=torch.float64).reshape(shape) + 1000.0 * number + 0.125 * version).float()


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for name, shape in SHAPES.items():
            setattr(self, name, nn.Parameter(torch.zeros(shape)))


def build(layout: str, world: int, dtype: torch.dtype = torch.float32) -> nn.Module:
    model = Plain().to(dtype)
    if layout == "fsdp":
        model.scale = nn.Parameter(model.scale.detach().reshape(1)[0:1].reshape(()).clone(), requires_grad=True)
        fully_shard(model, ignored_params={model.scale})
    elif layout in ("tp0", "tp1"):
        mesh = init_device_mesh("cpu", (world,))
        for name, parameter in list(model.named_parameters()):
            dim = 0 if layout == "tp0" else 1
            placement = Shard(dim) if parameter.dim() > dim else Replicate()
            sharded = distribute_tensor(parameter.detach(), mesh, [placement])
            setattr(model, name, nn.Parameter(sharded))
    return model


def write(model: nn.Module, version: int) -> None:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            full = values(name, version).to(parameter.dtype)
            if isinstance(parameter, DTensor):
                full = distribute_tensor(full, parameter.device_mesh, parameter.placements).to_local()
                parameter.to_local().copy_(full)
            else:
                parameter.copy_(full)


def check(model: nn.Module, version: int, source: torch.dtype = torch.float32) -> None:
    for name, parameter in model.named_parameters():
        found = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        assert torch.equal(found.detach(), values(name, version).to(source).to(parameter.dtype)), name


def send(rank: int, meeting: Meeting, layout: str, world: int, receivers: int, nodes: Any, options: Any) -> list[str]:
    model = build(layout, world)
    topology = epload.Topology.from_nodes(nodes) if nodes else None
    with epload.WeightSender(
        model, ("127.0.0.1", 0), receivers=receivers, topology=topology, timeout=60, **options
    ) as sender:
        if rank == 0:
            meeting.say("address", sender.address)
        reports = []
        for version in (1, 2, 3):
            write(model, version)
            report = sender.send_weights(version)
            assert report is not None
            reports.append(str(report))
        for receiver in range(receivers):
            meeting.hear(f"done-{receiver}")
    return reports


def receive(
    rank: int, meeting: Meeting, layout: str, world: int, first: int, nodes: Any, dtype: torch.dtype, options: Any
) -> list[str]:
    model = build(layout, world, dtype)
    topology = epload.Topology.from_nodes(nodes) if nodes else None
    reports = []
    with epload.WeightReceiver(model, meeting.hear("address"), topology=topology, timeout=60, **options) as receiver:
        for version in (1, 2, 3):
            before = receiver.version
            report = receiver.receive_weights()
            if options.get("stage", "host") == "host":
                assert receiver.version == before
                assert receiver.staged == version
            receiver.commit()
            assert receiver.version == version
            assert not receiver.torn
            check(model, version)
            reports.append(str(report))
        meeting.say(f"done-{first + rank}")
    return reports


@pytest.mark.parametrize(
    ("trainer", "engine", "dtype", "options"),
    [
        (("fsdp", 2, None), ("tp0", 2, None), torch.float32, {}),
        (("fsdp", 3, [[0, 1], [2]]), ("tp1", 2, [[0], [1]]), torch.bfloat16, {"verify": "full"}),
        (("tp1", 2, [[0], [1]]), ("fsdp", 4, [[0, 1], [2, 3]]), torch.float32, {"stage": "none", "verify": "full"}),
        (("plain", 1, None), ("plain", 2, [[0], [1]]), torch.float32, {"stage": "none", "verify": "buckets"}),
    ],
    ids=["fsdp to tp", "three to two nodes", "tp to fsdp in place", "plain"],
)
def test_every_version_arrives_as_a_whole(trainer: Any, engine: Any, dtype: torch.dtype, options: Any) -> None:
    layout, world, nodes = trainer
    theirs, count, their_nodes = engine
    both = {name: value for name, value in options.items() if name == "verify"}
    reports = run(
        [
            Job(world, send, (layout, world, count, nodes, both)),
            Job(count, receive, (theirs, count, 0, their_nodes, dtype, options)),
        ]
    )
    assert "sent version 3" in reports[0][0][2]
    assert "received version 3" in reports[1][0][2]
