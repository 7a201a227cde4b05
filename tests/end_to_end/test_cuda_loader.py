"""The loader into models on a real NVIDIA GPU, which several ranks share. ``EPLOAD_FAIL_WITHOUT_CUDA=1`` fails where there is
none."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from epload import HierarchicalLoader
from support import aborts, ranks
from support.accelerator import CUDA, gloo, nccl
from support.checks import all_fine
from support.readers import matrix, saved

pytestmark = [pytest.mark.cuda, pytest.mark.usefixtures("gpu")]


@pytest.mark.parametrize("world", [1, 2, 4])
def test_the_model_has_its_shards_over_gloo(world: int, tmp_path: Path) -> None:
    all_fine(ranks.run(world, matrix, CUDA, saved(tmp_path), setup=gloo))


def test_the_model_has_its_shards_on_one_rank_of_nccl(tmp_path: Path) -> None:
    all_fine(ranks.run(1, matrix, CUDA, saved(tmp_path), setup=nccl))


@pytest.mark.parametrize("who", aborts.WHO)
@pytest.mark.parametrize("algorithm", ["two_level", "striped"])
def test_all_ranks_end_at_one_bucket_and_none_unpacks_it(algorithm: str, who: str) -> None:
    all_fine(ranks.run(4, aborts.at_each_bucket, "one", algorithm, who, CUDA, setup=gloo))


def test_work_queued_before_and_after_is_in_order() -> None:
    tensors = {f"w{i}": torch.nn.Parameter(torch.zeros(1 << 20)) for i in range(8)}
    parameters = torch.nn.ParameterDict(tensors).to(CUDA)
    for salt, stream in enumerate((None, torch.cuda.Stream())):
        state = {f"w{i}": torch.arange(float(1 << 20)) + i + salt for i in range(8)}
        loader = HierarchicalLoader(bucket_bytes=5 << 20, stream=stream)
        loader.load(parameters, state)
        with torch.cuda.stream(torch.cuda.Stream()), torch.no_grad():
            torch.cuda._sleep(50_000_000)
            for value in parameters.values():
                value.fill_(-1.0)
            loader.load(parameters, state)
            read = {name: value.clone() for name, value in parameters.items()}
            for value in parameters.values():
                value.fill_(7.0)
        torch.cuda.synchronize()
        assert [name for name, value in read.items() if not torch.equal(value.cpu(), state[name])] == []
