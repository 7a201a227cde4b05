"""What models need besides plain shards, for models on a device: fp8 with scales, buffers that some rank lacks, readers chosen by
the loader. On a fake asynchronous accelerator."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from epload import HierarchicalLoader, Topology
from support import fakedev, ranks
from support import fp8 as fp8
from support.accelerator import DEVICE, NODES, SEMANTICS, wrong
from support.checks import all_fine
from support.small_model import BUCKET

pytestmark = pytest.mark.usefixtures("fake_device")


def _dequantized(rank: int, folder: Path) -> list[str]:
    """Scales travel to the device, and the weights there are what the same load leaves on CPU."""
    problems = []
    values = fp8.expected(fp8.checkpoint(), torch.bfloat16)
    mesh = init_device_mesh(fakedev.NAME, (dist.get_world_size(),))
    for nodes, readers in (([[0], [1]], "one"), ([[0, 1]], "one"), ([[0, 1]], "every")):
        loader = HierarchicalLoader(Topology.from_nodes(nodes), readers=readers, bucket_bytes=20000)
        model, whole = fp8.Tree(values), fp8.Tree(values)
        for name, tensor in values.items():
            path, _, leaf = name.rpartition(".")
            whole.get_submodule(path)._parameters[leaf] = nn.Parameter(tensor, requires_grad=False)
        fully_shard(model, mesh=mesh)
        loader.load(model, folder, mapping=fp8.MAPPING)
        problems += [f"{readers} on {nodes}: {text}" for text in wrong(model, whole.state_dict())]
    return problems


@SEMANTICS
def test_fp8_weights_are_dequantized_on_the_device(semantics: str, tmp_path: Path) -> None:
    fp8.store(tmp_path)
    all_fine(ranks.run(2, _dequantized, tmp_path, setup=partial(fakedev.setup, semantics)))


class Buffered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(6))
        self.register_buffer("angles", torch.arange(5.0) + 1, persistent=False)
        self.register_buffer("mask", torch.ones(3, dtype=torch.bool), persistent=False)


def _lacking(rank: int) -> list[str]:
    """Rank 1 made its model, the others have theirs on meta; one of the buffers stays on CPU where it is."""
    if rank == 1:
        model = Buffered().to(DEVICE)
        model.mask = model.mask.cpu()
    else:
        with torch.device("meta"):
            model = Buffered()
        model.weight = nn.Parameter(torch.zeros(6, device=DEVICE))
    loader = HierarchicalLoader(Topology.from_nodes(NODES[3]), bucket_bytes=BUCKET)
    loader.load(model, {"weight": torch.arange(6.0)} if rank == 0 else None)
    wanted = {"weight": torch.arange(6.0), "angles": torch.arange(5.0) + 1, "mask": torch.ones(3, dtype=torch.bool)}
    found = {"weight": model.weight.detach(), "angles": model.angles, "mask": model.mask}
    return [f"{name}: {found[name]}" for name, value in wanted.items() if not torch.equal(found[name].cpu(), value)]


def test_a_buffer_comes_from_the_rank_that_has_it() -> None:
    all_fine(ranks.run(3, _lacking, setup=partial(fakedev.setup, "hccl")))
