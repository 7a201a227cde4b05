"""The region copy and the op on a real NVIDIA GPU. ``EPLOAD_FAIL_WITHOUT_CUDA=1`` fails where there is none."""

from __future__ import annotations

import os
from itertools import product

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import epload
from epload.native import ops
from support import broadcasts as contract
from support import ranks
from support.accelerator import CUDA, gloo, nccl
from support.on_ranks import on_ranks
from support.region_copies import Problem, big_problem, check_conversions, check_equal, problems

pytestmark = [pytest.mark.cuda, pytest.mark.usefixtures("gpu")]
MANY = settings(max_examples=300, suppress_health_check=list(HealthCheck), database=None)


@MANY
@given(problems(), st.booleans())
def test_equal_to_plain_torch(problem: Problem, unpack: bool) -> None:
    check_equal(problem, unpack, ops.unpack if unpack else ops.pack, CUDA)


def test_tiny_and_huge_regions_and_conversions() -> None:
    assert epload.build_info()["cuda"], "build with EPLOAD_CUDA=1"
    for unpack, op in ((False, ops.pack), (True, ops.unpack)):
        check_equal(big_problem(), unpack, op, CUDA)
    check_conversions(ops.pack, ops.unpack, CUDA)


def many_regions(device: str) -> tuple[torch.Tensor, list[torch.Tensor], torch.Tensor]:
    tensors = [torch.zeros(64, 100 + i % 7, device=device)[:, ::2] for i in range(2000)]
    rows, at = [], 0
    for i, t in enumerate(tensors):
        rows.append([i, at, 6, 2, 0, 0, *t.shape, t.shape[1], 1])
        at += t.numel() * 4
    return torch.arange(at // 4, dtype=torch.float32).to(device).view(torch.uint8), tensors, torch.tensor(rows)


def test_ordered_on_the_current_stream() -> None:
    """The bucket is written late on the stream, and the tensors are read at once; memory let go of is asked for again."""
    bucket, tensors, table = many_regions(CUDA)
    want, stream = bucket.clone(), torch.cuda.Stream()
    bucket.zero_()
    torch.cuda.synchronize()
    for _ in range(20):
        with torch.cuda.stream(stream):
            torch.cuda._sleep(20_000_000)
            bucket.copy_(want)
            ops.unpack(bucket, tensors, table)
            bucket.zero_()
            got = torch.cat([t.flatten() for t in tensors])
        others = [torch.full((table.numel() * 20,), 255, dtype=torch.uint8, device=CUDA) for _ in range(8)]
        stream.synchronize()
        assert torch.equal(got, want.view(torch.float32))
        assert len(others) == 8


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_every_byte_arrives_over_gloo(world: int) -> None:
    assert ranks.run(world, contract.matrix, contract.MATRIX[world], CUDA, setup=gloo) == [[]] * world


@on_ranks(1, setup=nccl)
def test_nccl_on_one_rank(rank: int) -> list[str]:
    group = dist.group.WORLD
    assert group is not None
    wrong = []
    for stream, bucket_bytes in product((None, torch.cuda.Stream()), (1000, 1 << 20)):
        contents = [contract.values(i, (40, 5), torch.float32, 1) for i in range(6)]
        layouts = [contract.LAYOUTS[i % 4] for i in range(6)]
        made = [
            contract.Guarded((40, 5), torch.float32, layout, c if rank == 0 else None, CUDA)
            for c, layout in zip(contents, layouts, strict=True)
        ]
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        ops.coalesced_bcast([g.tensor for g in made], 0, str(group.group_name), "", bucket_bytes, "two_level", stream)
        torch.cuda.set_sync_debug_mode("default")
        wrong += [text for g, c in zip(made, contents, strict=True) if (text := g.wrong(c))]
    return wrong


def test_nccl_with_several_ranks_on_one_gpu() -> None:
    try:
        answers = ranks.run(2, with_environment, setup=nccl)
    except ranks.RankFailed as error:
        if "Duplicate GPU" in str(error) or "invalid usage" in str(error):
            pytest.skip("this NCCL does not take several ranks on one GPU (NCCL_MULTI_RANK_GPU_ENABLE needs 2.30)")
        raise
    assert answers == [[]] * 2


def with_environment(rank: int) -> list[str]:
    os.environ["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"  # read when the first communicator is made
    return contract.matrix(rank, contract.MATRIX[2], CUDA)
