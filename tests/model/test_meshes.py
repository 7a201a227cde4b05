"""Ranks that disagree about a device mesh are refused, as are DTensors whose memory is not what torch's functions make; meshes
that rightly differ between ranks are not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import epload
from epload import HierarchicalLoader, OuterShard, Topology
from support import ranks
from support.checks import as_bytes, full_values
from support.failures import error_of
from support.findings import must_be_refused
from support.on_ranks import on_ranks

NODES = [[0, 1], [2, 3]]
ROWS, COLUMNS = 7, 5


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(COLUMNS, ROWS)
        self.down = nn.Linear(ROWS, COLUMNS)


def place(model: nn.Module, mesh: DeviceMesh, placements: list[Any]) -> None:
    """Shards each parameter, without a collective."""
    for module in model.modules():
        for key, parameter in list(module.named_parameters(recurse=False)):
            sharded = distribute_tensor(parameter.detach(), mesh, placements, src_data_rank=None)
            module.register_parameter(key, nn.Parameter(sharded))


def zeros() -> Net:
    model = Net()
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    return model


def in_order(order: list[Any], **options: Any) -> DeviceMesh:
    return DeviceMesh("cpu", order, _init_backend=False, **options)


def made(readers: str = "one") -> HierarchicalLoader:
    return HierarchicalLoader(Topology.from_nodes(NODES), readers=readers, progress=False, timeout=30)


def load(rank: int, model: nn.Module, loader: HierarchicalLoader) -> str:
    source = full_values(Net()) if loader.options.readers == "every" or rank == 0 else None
    return error_of(lambda: loader.load(model, source))


ODD = ((2, "one"), (0, "one"), (3, "every"))
"""The rank whose mesh is in another order, and the readers."""


def another_order(rank: int) -> list[str]:
    """Includes the mesh of outer shards, and two meshes that rank 3 uses the other way round."""
    results = []
    for odd, readers in ODD:
        model = zeros()
        place(model, in_order([0, 1, 3, 2] if rank == odd else [0, 1, 2, 3]), [Shard(0)])
        results.append(load(rank, model, made(readers)))
        assert not any(bool(parameter.to_local().any()) for parameter in model.parameters()), "something was written"

    outer = nn.Module()
    outer.weight = nn.Parameter(torch.zeros(2, COLUMNS))
    shards = [OuterShard("weight", in_order([0, 1, 3, 2] if rank == 1 else [0, 1, 2, 3]))]
    source = {"weight": torch.arange(8.0 * COLUMNS).view(8, COLUMNS)} if rank == 0 else None
    results.append(error_of(lambda: made().load(outer, source, outer_shards=shards)))
    assert not outer.weight.any(), "something was written"

    meshes = [in_order(order) for order in ([0, 1, 2, 3], [3, 2, 1, 0])]
    swapped = zeros()
    first, second = reversed(meshes) if rank == 3 else meshes
    place(swapped.up, first, [Shard(0)])
    place(swapped.down, second, [Shard(0)])
    return [*results, load(rank, swapped, made())]


def test_a_mesh_in_another_order_on_one_rank() -> None:
    """Two ranks would hold the same shard, and nobody the fourth."""
    results = ranks.run(4, another_order)
    assert all(other == results[0] for other in results), results
    assert all(text.startswith("ManifestMismatch") for text in results[0])
    *of_parameters, outer, swapped = results[0]
    for (odd, _), text in zip(ODD, of_parameters, strict=True):
        others = [rank for rank in range(4) if rank != odd]
        assert f"ranks {others} have mesh [0, 1, 2, 3] of shape [4], e.g. for up.weight" in text
        assert f"ranks [{odd}] have mesh [0, 1, 3, 2] of shape [4], e.g. for up.weight" in text
        assert "the same order on all ranks" in text
    assert "ranks [1] have mesh [0, 1, 3, 2]" in outer
    assert "for weight" in outer
    assert "disagree about the device mesh" in swapped


@on_ranks(4)
def test_meshes_that_rightly_differ_between_ranks(rank: int) -> None:
    """Rows and columns of a mesh are other meshes on other ranks; a mesh in another order is right if all have it."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    reordered = in_order([[3, 1], [0, 2]], mesh_dim_names=("dp", "tp"))
    for name, given, placements in (
        ("tp rows", mesh["tp"], [Shard(0)]),
        ("dp columns", mesh["dp"], [Shard(0)]),
        ("hsdp", mesh, [Replicate(), Shard(0)]),
        ("reordered", reordered, [Replicate(), Shard(0)]),
        ("reordered, both", reordered, [Shard(0), Shard(0)]),
    ):
        model, expected, loader = zeros(), Net(), made()
        expected.load_state_dict(full_values(Net()))
        place(model, given, placements)
        place(expected, given, placements)
        for turn in range(4):  # the last of which takes the way of reloads
            for parameter in model.parameters():
                nn.init.zeros_(parameter.to_local())
            assert load(rank, model, loader) == "", f"{name}, load {turn}"
            for (key, ours), theirs in zip(model.named_parameters(), expected.parameters(), strict=True):
                same = torch.equal(as_bytes(ours.to_local()), as_bytes(theirs.to_local()))
                assert same, f"{name}, load {turn}: {key}"


@on_ranks(2)
def test_dtensors_with_other_memory_than_their_placements_say(rank: int, tmp_path: Path) -> None:
    mesh, whole = init_device_mesh("cpu", (2,)), torch.arange(8.0)
    sharded = distribute_tensor(torch.zeros(8), mesh, [Shard(0)])

    def of(*tensors: torch.Tensor) -> nn.Module:
        model = nn.Module()
        for name, tensor in zip("ab", tensors, strict=False):
            model.register_parameter(name, nn.Parameter(tensor))
        return model

    def from_local(local: torch.Tensor) -> DTensor:
        return DTensor.from_local(local, mesh, [Shard(0)], shape=(8,), stride=(1,), run_check=False)

    def send(model: nn.Module) -> None:
        with epload.WeightSender(model, ("127.0.0.1", 0), receivers=1, timeout=20) as sender:
            sender.send_weights(1)

    uneven, large = from_local(whole[:5] if rank == 0 else whole[5:]), from_local(torch.zeros(6))
    shape = "a, of shape [8], has a local tensor of shape "
    for text, call in (
        (f"{shape}[5] on this rank", lambda: epload.save(of(uneven), tmp_path / "saved")),
        (f"{shape}[5] on this rank", lambda: send(of(uneven))),
        (f"{shape}[5] on this rank", lambda: epload.load(of(uneven), {"a": whole})),
        (f"{shape}[6] on this rank", lambda: epload.load(of(large), {"a": whole}, verify=True)),
        ("a is expanded", lambda: epload.load(of(from_local(torch.zeros(1).expand(4))), {"a": whole})),
        ("the model ties a and b", lambda: epload.load(of(sharded, sharded.detach()), {"a": whole, "b": -whole})),
        (
            "a and b share part of their memory",
            lambda: epload.load(of(sharded, sharded.to_local()[1:]), {"a": whole, "b": whole[:3]}),
        ),
    ):
        must_be_refused(call, text)
    assert not (tmp_path / "saved").exists()
    tied = of(sharded, sharded.detach())
    epload.load(tied, {"a": whole})
    assert tied.b.full_tensor().equal(whole)
