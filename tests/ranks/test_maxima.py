"""The maxima of all ranks: values, and failures that no rank waits for."""

from __future__ import annotations

import math
import os
import signal
import time
from contextlib import nullcontext
from unittest import mock

import torch
from torch import Tensor

import epload
from epload.core.attempt import Attempt
from epload.ranks.groups import Group
from epload.ranks.maxima import as_integers, reduce_maxima
from support import ranks
from support.small_syncs import outcome


def reduce(topology: epload.Topology, values: list[float] | Exception) -> Tensor:
    def own() -> Tensor:
        if isinstance(values, Exception):
            raise values
        return as_integers(torch.tensor(values))

    topology.control.begin()
    try:
        with topology.control.guard():
            return reduce_maxima(topology, Attempt(own)).view(torch.float32)
    finally:
        topology.control.end()


def three_ranks(rank: int) -> None:
    topology = epload.Topology.discover()
    own = [[1.0, 0.0, 2.0, math.nan, 0.0], [0.5, 0.0, math.inf, 9.0, 1e-45], [3.0, 0.0, -math.nan, 8.0, 0.0]][rank]
    for _ in range(2):
        found = reduce(topology, own)
        assert found.tolist()[:2] == [3.0, 0.0]
        assert found[2:4].isnan().all()
        assert found[4] == torch.tensor(1e-45)
        assert outcome(lambda: reduce(topology, ValueError("none") if rank == 1 else own)) == "none [rank 1]"
        assert "quantizes 5 blocks that ranks share" in outcome(lambda: reduce(topology, own[: 5 - rank]))
    assert reduce(topology, []).numel() == 0


def test_values_and_errors() -> None:
    ranks.run(3, three_ranks)


def one_dies(rank: int) -> tuple[str, float]:
    topology = epload.Topology.discover(timeout=60)
    reduce(topology, [1.0])

    def die(self: Group, tensor: Tensor) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    began = time.monotonic()
    with mock.patch.object(Group, "all_reduce_maximum", die) if rank == 1 else nullcontext():
        text = outcome(lambda: reduce(topology, [1.0]))
    return text, time.monotonic() - began


def test_a_rank_that_dies_is_named() -> None:
    for text, seconds in filter(None, ranks.run(4, one_dies, dying=(1,))):
        assert "rank 1" in text
        assert seconds < 10
