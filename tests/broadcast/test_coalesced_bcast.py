"""The coalesced broadcast on real processes: every byte in its place, nothing else touched."""

from __future__ import annotations

from itertools import product

import pytest
import torch
import torch.distributed as dist

from epload import Topology, coalesced_bcast
from support import ranks
from support.broadcasts import MATRIX, SHAPES, Nodes, exchange, in_place_and_parameters, matrix, raw_op


@pytest.mark.parametrize("world", MATRIX)
def test_every_byte_arrives(world: int) -> None:
    assert ranks.run(world, matrix, MATRIX[world]) == [[]] * world


def large_buckets(rank: int, shapes_of_nodes: list[Nodes], sources: tuple[int, ...]) -> list[str]:
    """Buckets of several chunks of a relay, the last of each stripe short."""
    wrong: list[str] = []
    shapes = [(917_501,), (3, 5), (400_003,)]
    for salt, nodes in enumerate(shapes_of_nodes):
        topo = Topology.from_nodes(nodes)
        for src, algorithm, bucket_bytes in product(sources, ("two_level", "striped"), (16 << 20, (5 << 20) + 13)):
            options = {"bucket_bytes": bucket_bytes, "algorithm": algorithm}
            wrong += exchange(rank, src, topo, shapes, salt, **options)
    return wrong


def test_buckets_of_many_chunks() -> None:
    nodes: list[Nodes] = [[[0, 1, 2], [3, 4, 5]], [[1, 0], [3, 2], [4, 5]], [[0], [1], [2], [3], [4], [5]]]
    assert ranks.run(6, large_buckets, nodes, tuple(range(6))) == [[]] * 6


def test_more_ranks_in_a_node_than_receives_are_posted() -> None:
    assert ranks.run(12, large_buckets, [[[0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11]]], (8,)) == [[]] * 12


def test_tensors_sent_in_place_and_parameters() -> None:
    assert ranks.run(3, in_place_and_parameters) == [[]] * 3


def test_raw_op_with_groups_of_new_group() -> None:
    assert ranks.run(4, raw_op) == [[]] * 4


def uneven_groups(rank: int) -> list[str]:
    """The user's own groups, of which the ranks have made different numbers."""
    wrong = []
    if rank in (0, 2):
        dist.new_group([0, 2], use_local_synchronization=True)
    if rank in (1, 3):
        for _ in range(2):
            dist.new_group([rank], use_local_synchronization=True)
    topo = Topology.from_nodes([[0, 1], [2, 3]])
    wrong += exchange(rank, 0, topo, SHAPES, 1, bucket_bytes=100)
    if rank in (0, 2):  # torch counts the groups of a rank, so that it would hang had epload added to them unequally
        dist.new_group([0, 2], use_local_synchronization=True)
    wrong += exchange(rank, 3, topo, SHAPES, 2, bucket_bytes=100)
    wrong += exchange(rank, 1, topo, SHAPES, 3)
    everyone = dist.new_group()  # the user's own still work: torch 2.15 also counts those above, as many on each rank
    total = torch.tensor([rank])
    dist.all_reduce(total, group=everyone)
    if total.item() != 6:
        wrong.append(f"all_reduce gave {total}")
    return wrong


def test_ranks_in_different_numbers_of_groups() -> None:
    assert ranks.run(4, uneven_groups, limit=60) == [[]] * 4


def options_of_the_call(rank: int) -> list[str]:
    """Without a check no store is needed once groups are there; a list seen before is not compared again."""
    wrong = exchange(rank, 1, Topology.from_nodes([[0], [1]]), SHAPES, 1, check=False)
    topo = Topology.from_nodes([[0, 1]])
    wrong += exchange(rank, 1, topo, SHAPES, 1)
    wrong += exchange(rank, 1, topo, SHAPES, 1)
    if topo.control.position[2] != 0:  # of this call
        wrong.append("a list that was agreed on was compared again")
    tensors = [torch.full((3,), float(rank))]
    coalesced_bcast(tensors)
    if tensors[0].tolist() != [0] * 3:
        wrong.append("the defaults do not broadcast from rank 0 over the whole job")
    return wrong


def test_defaults_and_unchecked_calls() -> None:
    assert ranks.run(2, options_of_the_call) == [[]] * 2
