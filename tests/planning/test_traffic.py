"""Bytes over the links between nodes, against closed formulas."""

from __future__ import annotations

import pytest

from epload.planning.traffic import Traffic, traffic

SHAPES = ((2, 2), (4, 2), (8, 1))
ALGORITHMS = ("two_level", "striped")
BUCKETS = [1000] * 48
"""Can be divided evenly among the readers of all shapes."""
TOTAL = sum(BUCKETS)


def nodes_of(nodes: int, ranks: int) -> list[range]:
    return [range(first, first + ranks) for first in range(0, nodes * ranks, ranks)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_one_reader_is_a_chain_of_nodes(algorithm: str, shape: tuple[int, int]) -> None:
    moved = traffic(BUCKETS, 1, nodes_of(*shape), "one", algorithm)
    assert moved == Traffic([0, *[TOTAL] * (shape[0] - 1)], [*[TOTAL] * (shape[0] - 1), 0])


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_partitioned_receives_what_other_nodes_read(algorithm: str, shape: tuple[int, int]) -> None:
    nodes, ranks = shape
    moved = traffic(BUCKETS, nodes * ranks, nodes_of(*shape), "partitioned", algorithm)
    assert moved.received == moved.sent == [TOTAL * (nodes - 1) // nodes] * nodes


@pytest.mark.parametrize("readers", ["per_node", "every"])
def test_nothing_moves_if_every_node_reads(readers: str) -> None:
    assert traffic(BUCKETS, 1, nodes_of(3, 2), readers) == Traffic([0] * 3, [0] * 3)


def test_a_source_on_another_node() -> None:
    """The chain goes from node 1 over node 2 to node 0."""
    assert traffic(BUCKETS, 1, nodes_of(3, 2), "one", src=3) == Traffic([TOTAL, 0, TOTAL], [0, TOTAL, TOTAL])
