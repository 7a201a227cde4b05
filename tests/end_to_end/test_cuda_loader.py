"""The loader into models on a real NVIDIA GPU, which several ranks share. ``EPLOAD_FAIL_WITHOUT_CUDA=1`` fails where there is
none."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file

from epload import HierarchicalLoader, Topology
from support import aborts, ranks
from support.accelerator import NODES, WAYS, for_readers, meta_net, wrong
from support.checks import all_fine
from support.cuda import DEVICE, gloo, nccl
from support.small_model import BUCKET, state_for

pytestmark = [pytest.mark.cuda, pytest.mark.usefixtures("gpu")]


def contract(rank: int, folder: Path) -> list[str]:
    """Loads from meta and again; every choice of readers and algorithm; the stream given, current and own."""
    problems: list[str] = []
    nodes = NODES[dist.get_world_size()]
    streams = (None, torch.cuda.Stream(), torch.cuda.current_stream())
    cases = [(nodes, *way) for way in WAYS] + [
        ([[rank for node in nodes for rank in node]], readers, "auto") for readers in ("one", "partitioned")
    ]
    for number, (case, readers, algorithm) in enumerate(cases):
        loader = HierarchicalLoader(
            Topology.from_nodes(case),
            readers=readers,
            algorithm=algorithm,
            bucket_bytes=BUCKET,
            stream=streams[number % 3],
        )
        model = meta_net(where=DEVICE)
        loader.load(model, folder / "one.safetensors")
        problems += [f"{readers} {algorithm}, from meta: {text}" for text in wrong(model, state_for(1), where=DEVICE)]
        loader.load(model, for_readers(state_for(2), readers))
        problems += [f"{readers} {algorithm}, reload: {text}" for text in wrong(model, state_for(2), where=DEVICE)]
    return problems


@pytest.mark.parametrize("world", [1, 2, 4])
def test_the_model_has_its_shards_over_gloo(world: int, tmp_path: Path) -> None:
    save_file(state_for(1), tmp_path / "one.safetensors")
    all_fine(ranks.run(world, contract, tmp_path, setup=gloo))


def test_the_model_has_its_shards_on_one_rank_of_nccl(tmp_path: Path) -> None:
    save_file(state_for(1), tmp_path / "one.safetensors")
    all_fine(ranks.run(1, contract, tmp_path, setup=nccl))


@pytest.mark.parametrize("who", aborts.WHO)
@pytest.mark.parametrize("algorithm", ["two_level", "striped"])
def test_all_ranks_end_at_one_bucket_and_none_unpacks_it(algorithm: str, who: str) -> None:
    aborts.none_differs(ranks.run(4, aborts.at_each_bucket, "one", algorithm, who, DEVICE, setup=gloo))


def test_work_queued_before_and_after_is_in_order() -> None:
    """The caller writes to the parameters late before the load, and reads them at once after it, on a stream of its own."""
    parameters = torch.nn.ParameterDict({f"w{i}": torch.nn.Parameter(torch.zeros(1 << 20)) for i in range(8)}).to(
        DEVICE
    )
    for salt, stream in enumerate((None, torch.cuda.Stream())):
        state = {f"w{i}": torch.arange(float(1 << 20)) + i + salt for i in range(8)}
        loader = HierarchicalLoader(bucket_bytes=5 << 20, stream=stream)
        loader.load(parameters, state)
        caller = torch.cuda.Stream()
        with torch.cuda.stream(caller), torch.no_grad():
            torch.cuda._sleep(50_000_000)
            for value in parameters.values():
                value.fill_(-1.0)
            loader.load(parameters, state)
            read = {name: value.clone() for name, value in parameters.items()}
            for value in parameters.values():
                value.fill_(7.0)
        torch.cuda.synchronize()
        assert [name for name, value in read.items() if not torch.equal(value.cpu(), state[name])] == []
