"""``readers="every"`` from checkpoints that give whole buckets only."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from unittest import mock

import torch
from safetensors.torch import save_file
from torch import Tensor

from epload import Checkpoint, HierarchicalLoader, Manifest, Topology
from epload.core.pieces import Piece
from support import ranks
from support.checks import all_fine
from support.small_model import BUCKET, meta_net, state_for, wrong


class WholeBuckets(Checkpoint):
    """A file of which a subclass of Checkpoint reads whole buckets, each rank at a pace of its own."""

    def __init__(self, path: Path, seconds: float) -> None:
        self._inner = Checkpoint.open(path)
        self._seconds = seconds

    @property
    def manifest(self) -> Manifest:
        return self._inner.manifest

    def fill(self, bucket: Tensor, pieces: Sequence[Piece]) -> None:
        self._inner.fill(bucket, pieces)
        time.sleep(self._seconds)


def whole_buckets(rank: int, path: Path) -> list[str]:
    if rank == 0:
        save_file(state_for(1), path)
    torch.distributed.barrier()
    loader = HierarchicalLoader(Topology.from_nodes([[0, 1, 2]]), bucket_bytes=BUCKET, timeout=60.0)
    model = meta_net()
    with mock.patch("epload.loading.agreement.choose_readers", return_value=("every", "for this test")):
        report = loader.load(model, WholeBuckets(path, 0.02 * rank))
    return wrong(model, state_for(1)) + ([] if report.readers == "every" else [report.readers])


def test_ranks_that_share_memory_do_not_read_into_one_buffer(tmp_path: Path) -> None:
    all_fine(ranks.run(3, whole_buckets, tmp_path / "model.safetensors"))
