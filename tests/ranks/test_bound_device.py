"""A default group that is bound to a device (``init_process_group(device_id=)``).

torch then makes each group by splitting the default one's communicator, in which all ranks of the job have to take part: those of
a load would wait for the others. On a fake accelerator.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from epload import HierarchicalLoader, Topology, coalesced_bcast
from support import fakedev, ranks
from support.accelerator import DEVICE, meta_net, wrong
from support.checks import all_fine
from support.small_model import BUCKET, state_for

pytestmark = pytest.mark.usefixtures("fake_device")

WORLD = 5
PART = (0, 1, 3)


def bind(rank: int, folder: Path) -> None:
    dist.barrier()
    dist.destroy_process_group()
    init, device = f"file://{folder}/bound", torch.device(DEVICE)
    dist.init_process_group(fakedev.BACKENDS, init_method=init, rank=rank, world_size=WORLD, device_id=device)
    assert dist.group.WORLD.bound_device_id == device  # type: ignore[union-attr]


@contextmanager
def no_group_of_torchs() -> Iterator[None]:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a group was made by torch, which needs all ranks of the job")

    public = {"new_group": refuse, "split_group": refuse}
    with (
        mock.patch.multiple(dist, **public),
        mock.patch.multiple(dist.distributed_c10d, _new_process_group_helper=refuse, **public),
    ):
        yield


def loads(topology: Topology, sources: tuple[int, ...]) -> list[str]:
    problems = []
    for src in sources:  # each rail has leaders of its own
        for readers in ("one", "partitioned"):
            loader = HierarchicalLoader(topology, src=src, readers=readers, bucket_bytes=BUCKET, timeout=60.0)
            model = meta_net()
            source = state_for(src) if readers != "one" or topology.rank == src else None
            loader.load(model, source)
            problems += wrong(model, state_for(src))
        tensor = torch.full((5,), float(topology.rank), device=DEVICE)
        coalesced_bcast([tensor], src, topology)
        problems += [] if tensor.tolist() == [float(src)] * 5 else [f"broadcast from {src}: {tensor}"]
    return problems


def whole_and_part(rank: int, folder: Path) -> list[str]:
    """All ranks load, then some of them: the others take no part, and are not needed."""
    bind(rank, folder)
    group = dist.new_group(list(PART))  # the caller's, of which all ranks of the job know
    with no_group_of_torchs():
        problems = loads(Topology.from_nodes([[0, 1], [2, 3], [4]]), (0, 1))
        return problems + loads(Topology.from_nodes([[0, 1], [3]], group), (0, 1)) if rank in PART else problems


def test_only_members_make_a_group(tmp_path: Path) -> None:
    all_fine(ranks.run(WORLD, whole_and_part, tmp_path, setup=fakedev.setup))
