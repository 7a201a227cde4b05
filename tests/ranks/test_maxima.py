"""The largest values of all ranks, on nodes of any sizes."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch

from epload import Topology
from epload.core.attempt import Attempt
from epload.ranks.maxima import as_integers, reduce_maxima
from support import ranks
from support.failures import error_of


def reduced(rank: int, nodes: list[list[int]]) -> tuple[list[float], str]:
    topology = Topology.from_nodes(nodes)
    values = torch.tensor([(7 * rank + 3 * i) % 11 / 8 for i in range(9)])
    values[rank] = float("nan") if rank == 1 else 2.0
    with topology.control.load(timedelta(seconds=30)):
        largest = reduce_maxima(topology, Attempt(lambda: as_integers(values)))
    with topology.control.load(timedelta(seconds=30)):
        error = error_of(lambda: reduce_maxima(topology, Attempt(lambda: largest[: 9 - rank // 2])))
    return largest.view(torch.float32).tolist(), error


@pytest.mark.parametrize("nodes", [[[0, 1, 2, 3, 4]], [[0, 1], [2], [3, 4]], [[4, 1], [3], [0, 2]], [[0], [1], [2], [3], [4]]])
def test_the_largest_of_all_ranks(nodes: list[list[int]]) -> None:
    results = ranks.run(5, reduced, nodes)
    all_values = torch.stack([torch.tensor([(7 * rank + 3 * i) % 11 / 8 for i in range(9)]) for rank in range(5)])
    all_values[range(5), range(5)] = torch.tensor([2.0, float("nan"), 2.0, 2.0, 2.0])
    expected = all_values.amax(0)  # in which NaN is the largest
    for values, error in results:
        assert torch.equal(torch.tensor(values).nan_to_num(9), expected.nan_to_num(9))
        assert "rank 0 quantizes 9 blocks that ranks share, rank 2 8" in error
