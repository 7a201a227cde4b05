"""The coalesced broadcast on real processes: every byte in its place, nothing else touched, and wrong use refused."""

from __future__ import annotations

from contextlib import nullcontext
from itertools import product
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from epload import Topology, broadcast, coalesced_bcast
from epload.native import ops
from support import ranks
from support.broadcasts import MATRIX, SHAPES, Nodes, Refusals, agree, exchange, in_place_and_parameters, matrix, raw_op
from support.failures import raised
from support.on_ranks import on_ranks
from support.tensor_classes import Halved


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
    # More ranks in a node than receives are posted.
    assert ranks.run(12, large_buckets, [[[0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11]]], (8,)) == [[]] * 12


def test_tensors_sent_in_place_and_parameters() -> None:
    assert ranks.run(3, in_place_and_parameters) == [[]] * 3


def test_raw_op_with_groups_of_new_group() -> None:
    assert ranks.run(4, raw_op) == [[]] * 4


@on_ranks(2)
def test_messages_of_the_caller_on_the_same_group_are_not_taken_for_those_of_the_op(rank: int) -> list[str]:
    group, weight, own = dist.new_group(), torch.full((4,), 1.0 - rank), torch.full((4,), 9.0 * (1 - rank))
    pending = dist.irecv(own, 0, group) if rank == 1 else None
    ops.coalesced_bcast([weight], 0, "", group.group_name, 1 << 20, "two_level")
    if pending is not None:
        pending.wait()
    else:
        dist.send(own, 1, group)
    return [] if (weight.tolist(), own.tolist()) == ([1.0] * 4, [9.0] * 4) else [f"{weight} {own}"]


@on_ranks(2)
def test_autograd_learns_of_a_broadcast_that_fails_but_not_of_one_that_is_refused(rank: int) -> list[str]:
    group, tensor = dist.new_group(), torch.zeros(4)
    ends = [
        raised(lambda: ops.coalesced_bcast([tensor], 0, "", group.group_name, 64, "ring"))[0],
        raised(lambda: coalesced_bcast([tensor], bucket_bytes=4 if rank == 1 else 64))[0],
        tensor._version,
    ]
    if rank == 0:
        dist.destroy_process_group(group)
        return [] if ends == ["ValueError", "ValueError", 0] else [f"{ends}"]
    ends += [raised(lambda: ops.coalesced_bcast([tensor], 0, "", group.group_name, 64, "two_level"))[0], tensor._version > 0]
    return [] if ends == ["ValueError", "ValueError", 0, "RuntimeError", True] else [f"{ends}"]


@on_ranks(4, limit=60)
def test_ranks_in_different_numbers_of_groups(rank: int) -> list[str]:
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


@on_ranks(2)
def test_defaults_and_unchecked_calls(rank: int) -> list[str]:
    """Without a check no store is needed once groups are there; a list seen before is not compared again."""
    wrong = exchange(rank, 1, Topology.from_nodes([[0], [1]]), SHAPES, 1, check=False)
    topo = Topology.from_nodes([[0, 1]])
    for _ in range(2):
        wrong += exchange(rank, 1, topo, SHAPES, 1)
    if topo.control.position[2] != 0:  # of this call
        wrong.append("a list that was agreed on was compared again")
    tensors = [torch.full((3,), float(rank))]
    coalesced_bcast(tensors)
    if tensors[0].tolist() != [0] * 3:
        wrong.append("the defaults do not broadcast from rank 0 over the whole job")
    return wrong


def wrong_arguments(rank: int) -> tuple[list[str], dict[str, str]]:
    """Every rank makes the same mistake."""
    see = Refusals(rank, [[0, 1], [2]])
    one, freed = torch.full((4,), float(rank)), torch.ones(8)
    freed.untyped_storage().resize_(0)
    dtensor = distribute_tensor(torch.ones(6), init_device_mesh("cpu", (3,)), [Shard(0)])
    see.check("DTensor", "TypeError", ["to_local()", "tensor 1"], [one, dtensor])
    see.check("DTensor parameter", "TypeError", ["to_local()", "tensor 0"], [nn.Parameter(dtensor)])
    see.check("copies", "TypeError", ["tensor 1 is a Halved, which hands out copies"], [one, Halved(torch.ones(4))])
    see.check("no tensor", "TypeError", ["list", "item 1"], [one, [1.0]])
    for options in ({"bucket_bytes": "1"}, {"algorithm": None}, {"stream": "x"}):
        see.check(f"{options}", "TypeError", ["bucket_bytes to be an int", f"{next(iter(options.values()))!r}"], [one], **options)
    see.check("expanded", "ValueError", ["tensor 1", "share memory"], [one, torch.zeros(1).expand(4)])
    refused: list[tuple[list[str], list[torch.Tensor], dict[str, Any]]] = [
        *(([f"{src}", "[0, 1, 2]"], [one], {"src": src}) for src in (3, -1, 10**9)),
        (["ring", "two_level", "striped"], [one], {"algorithm": "ring"}),
        *((["16", f"{size}"], [one], {"bucket_bytes": size}) for size in (15, 0, -1)),
        (["bucket"], [one], {"bucket_bytes": 2**62}),
        (["tensor 1"], [one, torch.eye(3).to_sparse()], {}),
        (["tensor 1", "resolve_conj"], [one, torch.ones(3, dtype=torch.complex64).conj()], {}),
        (["stream", "cpu"], [one], {"stream": cpu_stream()}),
        (["meta"], [one.to("meta")], {}),
        (["tensor 1", "meta"], [one, one.to("meta")], {}),
        (["tensor 1", "storage"], [one, freed], {}),
    ]
    for number, (parts, tensors, options) in enumerate(refused):
        see.check(f"case {number}", "ValueError", parts, tensors, **options)
    return see.answer()


def cpu_stream() -> torch.Stream:
    """Any stream object; a machine without a device has no better one."""
    return torch.Stream(stream_id=0, device_index=0, device_type=1)


def mistake_of_one(rank: int) -> tuple[list[str], dict[str, str]]:
    """Rank 2 alone is wrong; all hear of it and none is left waiting. The last three are no part of the compared list."""
    see = Refusals(rank, [[0, 1], [2]])
    odd, other = rank == 2, "ManifestMismatch"
    one, two, three = torch.full((4,), float(rank)), torch.zeros(3, 2), torch.full((5,), float(rank))
    dtensor = distribute_tensor(torch.ones(12), init_device_mesh("cpu", (3,)), [Shard(0)])
    see.check("DTensor", "TypeError", ["to_local()", "rank 2"], [dtensor if odd else one])
    see.check("src", "ValueError", ["7", "rank 2"], [one], src=7 if odd else 0)
    see.check("small bucket", "ValueError", ["16", "rank 2"], [one], bucket_bytes=4 if odd else 64)
    see.check("other src", other, ["src", "rank 0", "rank 2"], [one], src=1 if odd else 0)
    see.check("other bucket", other, ["bucket_bytes", "rank 2"], [one], bucket_bytes=80 if odd else 96)
    see.check("algorithm", other, ["striped", "rank 2"], [one], algorithm="striped" if odd else "two_level")
    see.check("count", other, ["2 tensors", "3", "rank 2"], [one, two] + [two] * odd)
    see.check("fewer", other, ["2 tensors", "1", "rank 2"], [one, two][: 1 if odd else 2])
    see.check("none", other, ["tensors", "0", "rank 2"], [] if odd else [one, one, one])
    see.check("shape", other, ["tensor 1", "[3, 2]", "[2, 3]", "rank 2"], [one, two.view(2, 3) if odd else two])
    see.check("dtype", other, ["tensor 1", "float32", "int32", "rank 2"], [one, two.int() if odd else two])
    see.check("meta", "ValueError", ["meta"], [one, three.to("meta") if odd else three])
    see.check("stream", "ValueError", ["stream"], [one], stream=cpu_stream() if odd else None)
    if odd:
        three.untyped_storage().resize_(0)
    see.check("freed", "ValueError", ["storage"], [one, three])
    return see.answer()


LEAVES = {
    "interrupted": ("LoadError", "rank 1 was interrupted (KeyboardInterrupt)"),
    "freed": ("ValueError", "storage"),
    "expanded": ("ValueError", "share memory"),
    "meta": ("ValueError", "meta"),
}
"""Why a rank leaves a call, and what the others then raise."""


def one_leaves(rank: int, why: str) -> list[tuple[str, str]]:
    """A list that all know is broadcast again and again; one rank leaves the call once, and the others are in the broadcast."""
    topology, ends = Topology.from_nodes([[0, 1]]), []

    def interrupt(*args: object) -> None:
        raise KeyboardInterrupt

    for step in range(1, 7):
        tensor, leaves = torch.full((10,), float(step) if rank == 0 else 0.0), (rank, step) == (1, 4)
        if leaves and why == "freed":
            tensor.untyped_storage().resize_(0)
        elif leaves and why != "interrupted":
            tensor = tensor[:1].expand(10) if why == "expanded" else tensor.to("meta")
        with mock.patch.object(broadcast, "_check_arguments", interrupt) if leaves and why == "interrupted" else nullcontext():
            try:
                coalesced_bcast([tensor], 0, topology)
            except BaseException as error:
                ends.append((type(error).__name__, str(error)))
            else:
                ends.append(("right", "") if (tensor == step).all() else ("wrong", f"{tensor[0]} at step {step}"))
        dist.barrier()
    return ends


@pytest.mark.parametrize("why", LEAVES)
def test_all_learn_why_a_rank_has_left_a_call_and_none_gets_the_values_of_another(why: str) -> None:
    first, second = ranks.run(2, one_leaves, why)
    right, (kind, text) = ("right", ""), LEAVES[why]
    assert first[:3] + first[4:] == second[:3] + second[4:] == [right] * 5
    assert first[3][0] == kind
    assert text in first[3][1]
    assert second[3] == (("KeyboardInterrupt", "") if why == "interrupted" else first[3])


@pytest.mark.parametrize("mistakes", [wrong_arguments, mistake_of_one])
def test_wrong_use_is_refused_before_anything_moves(mistakes: Any) -> None:
    agree(ranks.run(3, mistakes))


def test_wrong_use_on_a_single_rank() -> None:
    one = torch.ones(3)
    for text, tensors, options in (
        ("meta", [one.to("meta")], {}),
        ("tensor 1", [one, one.to("meta")], {}),
        ("stream", [one], {"stream": cpu_stream()}),
        ("bucket_bytes", [one], {"bucket_bytes": 8}),
        ("algorithm", [one], {"algorithm": "ring"}),
    ):
        with pytest.raises(ValueError, match=text):
            coalesced_bcast(tensors, **options)  # type: ignore[arg-type]
