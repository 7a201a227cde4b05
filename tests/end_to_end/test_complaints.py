"""What users of other loaders report as a hang, or as a load that was silently wrong; named after their threads.

Those about state and layouts are in test_state.py and test_expert_parallel.py, a hang without a word in test_failure.py.
"""

from __future__ import annotations

import time
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from epload import HierarchicalLoader, Topology
from support import ranks
from support.checks import all_fine
from support.failures import Raised, Slow, raised_by
from support.small_model import BUCKET, NODES, meta_net, only_readers, state_for, wrong


def skewed(rank: int) -> list[str]:
    """Rank 3 comes 3 s late, and then the source takes longer for the whole than the timeout."""
    loader = HierarchicalLoader(Topology.from_nodes(NODES), bucket_bytes=BUCKET, timeout=6)
    if rank == 3:
        time.sleep(3)
    model, state = meta_net(), state_for(1)
    loader.load(model, Slow(state, 0.6) if rank == 0 else None)
    return wrong(model, state)


def test_transformers_48228_axolotl_3443_ranks_that_come_late() -> None:
    all_fine(ranks.run(4, skewed))


def forbidden(*_: Any, **__: Any) -> None:
    raise AssertionError("a collective that nobody asked for")


def without_collectives(rank: int) -> list[str]:
    """All that torch offers to divide or gather a tensor raises; so does each of its collectives."""
    model, state = meta_net(), state_for(1)
    loader = HierarchicalLoader(Topology.from_nodes(NODES), bucket_bytes=BUCKET)
    names = ("broadcast", "scatter", "all_gather_into_tensor", "all_reduce", "all_to_all", "broadcast_object_list")
    with (
        mock.patch.multiple(dist, **dict.fromkeys(names, forbidden)),
        mock.patch.multiple(DTensor, redistribute=forbidden, full_tensor=forbidden),
        mock.patch("torch.distributed.tensor.distribute_tensor", forbidden),
    ):
        loader.load(model, only_readers(state))
    return wrong(model, state)


def test_axolotl_3476_veomni_642_no_collective_is_implicit() -> None:
    all_fine(ranks.run(4, without_collectives))


def other_order(rank: int, shuffle_model: bool) -> tuple[Raised, list[str]]:
    """Every rank reads; its dict, or its model, names the tensors in an order of its own."""
    names = [f"w{i}" for i in range(12)]
    state = {name: torch.arange(20.0) + 100 * i for i, name in enumerate(names)}
    turned = names[rank:] + names[:rank]
    model = nn.ParameterDict({name: nn.Parameter(torch.zeros(20)) for name in (turned if shuffle_model else names)})
    loader = HierarchicalLoader(Topology.from_nodes(NODES), readers="partitioned", bucket_bytes=BUCKET, timeout=20)
    first = raised_by(lambda: loader.load(model, state if shuffle_model else {name: state[name] for name in turned}))
    return first, [name for name in names if not torch.equal(model[name].detach(), state[name])]


@pytest.mark.parametrize("shuffle_model", [False, True], ids=["checkpoint", "model"])
def test_verl_6365_6002_another_order_on_each_rank(shuffle_model: bool) -> None:
    """No deadlock: the load is right, or all ranks refuse it before anything moves, naming what differs."""
    results = ranks.run(4, other_order, shuffle_model)
    kinds = {kind for (kind, _, _), _ in results}
    assert len({(kind, text) for (kind, text, _), _ in results}) == 1, results
    assert kinds in ({""}, {"ManifestMismatch"}), results
    if kinds == {""}:
        assert [bad for _, bad in results] == [[]] * 4
    else:
        assert "rank" in results[0][0][1]
        assert "w" in results[0][0][1]


def one_sided_key(rank: int, change: str) -> Raised:
    """Only the source rank can know that a key is missing or too many."""
    state = state_for(1)
    if change == "unexpected":
        state["stray"] = torch.zeros(3)
    else:
        del state["norm.weight"]
    loader = HierarchicalLoader(Topology.from_nodes(NODES), bucket_bytes=BUCKET, timeout=20)
    return raised_by(lambda: loader.load(meta_net(), only_readers(state)))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ("unexpected", "1 unexpected checkpoint key: stray"),
        ("missing", "1 parameter missing from the checkpoint: norm.weight"),
    ],
)
def test_a_key_that_only_rank_0_sees_raises_on_all(change: str, text: str) -> None:
    """torch's set_model_state_dict and accelerate's loader raise on rank 0 alone, and the others wait for ever."""
    results = ranks.run(4, one_sided_key, change)
    assert {kind for kind, *_ in results} == {"ModelMismatch"}
    assert len({text for _, text, _ in results}) == 1
    assert text in results[0][1]


def several_topologies(rank: int) -> list[str]:
    """Groups of other nodes, of parts of the job, and again the first ones."""
    problems = []
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    for number, (nodes, group) in enumerate(
        [
            ([[0, 1], [2, 3]], None),
            ([[0, 2], [1, 3]], None),
            ([[0], [1]] if rank < 2 else [[2, 3]], halves[rank // 2]),
            ([[0, 1], [2, 3]], None),
        ]
    ):
        src = 0 if group is None or rank < 2 else 2
        topology = Topology.from_nodes(nodes, group)
        model, state = nn.ParameterDict({"w": nn.Parameter(torch.zeros(300))}), {"w": torch.arange(300.0) + number}
        loader = HierarchicalLoader(topology, src=src, readers="one", bucket_bytes=BUCKET, timeout=20)
        loader.load(model, state if rank == src else None)
        if not torch.equal(model["w"].detach(), state["w"]):
            problems.append(f"{nodes}: wrong")
    return problems


def test_twinkle_207_groups_of_other_members_do_not_meet() -> None:
    all_fine(ranks.run(4, several_topologies))
