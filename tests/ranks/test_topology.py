"""Tests who shares a machine, who leads, and parts of a job that work side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import epload
from epload import HierarchicalLoader, Topology, coalesced_bcast
from epload.ranks import topology
from support import fakedev, ranks
from support.accelerator import DEVICE, meta_net, wrong
from support.failures import must_raise, raised
from support.on_ranks import on_ranks
from support.small_model import BUCKET, state_for

Nodes = list[list[int]]


@on_ranks(3)
def test_ranks_with_another_version_of_epload_are_named(rank: int) -> None:
    installed = SimpleNamespace(version=f"0.{4 + rank // 2}.0")
    with mock.patch("epload.ranks.rendezvous._C", installed):
        must_raise(epload.LoadError, r"got 0\.4\.0 on rank 0, 1 and 0\.5\.0 on rank 2; install the same", Topology.discover)
    Topology.discover()


def discover(rank: int, machines: list[str] | None, nodes: tuple[tuple[int, ...], ...]) -> None:
    if machines is not None:
        topology.machine_identity = lambda: machines[rank]  # this process is this rank's own
    topo = Topology.discover()
    assert topo.nodes == nodes, "nodes are in the order of their first ranks"
    assert (topo.rank, topo.node) == (rank, next(own for own in nodes if rank in own))
    assert f"rank {rank}" in repr(topo)
    tensors = [torch.full((5,), float(rank))]
    coalesced_bcast(tensors, src=1, topology=topo)
    assert tensors[0].tolist() == [1] * 5


@pytest.mark.parametrize(
    ("machines", "nodes"),
    [
        (None, ((0, 1, 2),)), (["a", "a", "b", "b"], ((0, 1), (2, 3))), (["b", "a", "b", "a"], ((0, 2), (1, 3))),
        (["a", "b", "c", "a", "c"], ((0, 3), (1,), (2, 4))),
    ],
)  # fmt: skip
def test_machines_become_nodes(machines: list[str] | None, nodes: tuple[tuple[int, ...], ...]) -> None:
    ranks.run(sum(map(len, nodes)), discover, machines, nodes)


def discover_without_heartbeats(rank: int) -> int:
    """The watch has nothing to do of itself before a quarter of the timeout has passed."""
    with (
        mock.patch("epload.ranks.watch.Watch._beat", side_effect=AssertionError("waited for a heartbeat")),
        mock.patch("epload.ranks.watch._FIRST_BEAT", float("inf")),
        mock.patch("epload.ranks.heartbeat.INTERVAL", 3600.0),
    ):
        return len(Topology.discover(timeout=60).node)


def test_a_message_of_a_new_link_wakes_its_receiver() -> None:
    assert ranks.run(3, discover_without_heartbeats) == [3] * 3


WRONG: dict[str, tuple[Nodes, str]] = {
    "rank in no node": ([[0, 1]], "[2]"),
    "own rank in no node": ([[1, 2]], "[0]"),
    "rank in two nodes": ([[0, 1], [1, 2]], "share no rank"),
    "rank twice in a node": ([[0, 1, 1], [2]], "share no rank"),
    "unknown rank": ([[0, 1], [2, 3]], "[3]"),
    "negative rank": ([[0, 1], [2, -1]], "[-1]"),
    "empty node": ([[0, 1], [], [2]], "not empty"),
    "no node": ([], "[0, 1, 2]"),
}


def wrong_nodes(rank: int) -> dict[str, tuple[str, str]]:
    seen: dict[str, tuple[str, str]] = {}
    for name, (nodes, _) in WRONG.items():
        seen[name] = raised(lambda nodes=nodes: Topology.from_nodes(nodes))  # type: ignore[misc]
    topo = Topology.from_nodes([[0, 2], [1]])  # a refused topology leaves no trace
    for src in (-1, 3, 10**12):
        seen[f"src {src}"] = raised(lambda src=src: coalesced_bcast([], src, topo))  # type: ignore[misc]
    tensors = [torch.full((3,), float(rank))]
    coalesced_bcast(tensors, src=2, topology=topo)
    seen["after"] = ("", str(tensors[0].tolist()))
    return seen


def test_wrong_nodes_are_refused_on_every_rank() -> None:
    views = ranks.run(3, wrong_nodes)
    seen = views[0]
    assert views == [seen] * 3
    assert seen.pop("after") == ("", "[2.0, 2.0, 2.0]")
    for name, (kind, text) in seen.items():
        assert kind == "ValueError", (name, text)
        for part in (WRONG[name][1],) if name in WRONG else ("[0, 1, 2]", name.split()[1]):
            assert part in text, (name, text)


@on_ranks(5)
def test_parts_of_a_job_work_side_by_side(rank: int) -> list[str]:
    """Two halves work at the same time and never call anything together."""
    members = [[0, 1], [2, 3, 4]]
    made = [dist.new_group(ranks) for ranks in members]
    half = int(rank > 1)
    group, own, stranger = made[half], members[half], members[1 - half][0]
    wrong = []
    for others, part in (([own, [stranger]], f"[{stranger}]"), ([own[:-1]], f"[{own[-1]}]")):
        kind, text = raised(partial(Topology.from_nodes, others, group=group))
        wrong += [] if kind == "ValueError" and part in text else [f"{others}: {kind} {text}"]
    kind, text = raised(partial(Topology.from_nodes, [members[1 - half]], group=made[1 - half]))
    wrong += [] if (kind, text) == ("ValueError", f"rank {rank} is not in the group") else [f"a group of others: {kind} {text}"]
    for no_group in ("world", [0, 1]):
        kind, text = raised(partial(Topology.discover, no_group))
        wrong += [] if kind == "TypeError" and "expected group to be a torch.distributed.Pro" in text else [f"{kind} {text}"]
    topo = Topology.from_nodes([[2, 4], [3]], group=group) if half else Topology.discover(group=group)
    if topo.ranks != tuple(own):
        wrong.append(f"ranks {topo.ranks}")
    for turn, src in enumerate(own * 2):
        tensors = [torch.full((40,), float(100 * turn + rank)), torch.tensor(rank)]
        # The halves differ in the number of their calls, so that a hidden common step would hang.
        for _ in range(1 + half):
            coalesced_bcast(tensors, src, topo, bucket_bytes=64, algorithm=["two_level", "striped"][turn % 2])
        if tensors[0].tolist() != [100 * turn + src] * 40 or int(tensors[1]) != src:
            wrong.append(f"src {src}: {tensors}")
    if raised(lambda: coalesced_bcast([torch.zeros(1)], src=stranger, topology=topo))[0] != "ValueError":
        wrong.append("a source of the other half")
    loader = HierarchicalLoader(topology=topo, src=own[-1], progress=False)
    for src, load in ((own[-1], loader.load), (own[0], partial(epload.load, topology=topo, readers="one", progress=False))):
        model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3))
        state = {k: torch.arange(v.numel(), dtype=v.dtype).view_as(v) + 1000 * half for k, v in model.state_dict().items()}
        report = load(model, state if rank == src else None)
        if report.missing_keys or report.unexpected_keys:
            wrong.append(str(report))
        wrong.extend(f"{k} is wrong" for k, v in model.state_dict().items() if not torch.equal(v, state[k]))
    filled, sent = {"values": torch.zeros(2)}, torch.full((2,), float(rank))
    epload.load_state(filled, {"values": sent} if rank == own[0] else None, readers="one", topology=topo, progress=False)
    coalesced_bcast([sent], topology=topo)
    if not filled["values"].tolist() == sent.tolist() == [float(own[0])] * 2:
        wrong.append(f"without src: {filled}, {sent}")
    return wrong


def test_without_a_process_group() -> None:
    assert not dist.is_initialized()
    for topo in (Topology.discover(), Topology.from_nodes([[0]])):
        assert (topo.nodes, topo.rank, topo.ranks, topo.node) == (((0,),), 0, (0,), (0,))
        tensor = torch.arange(4)
        coalesced_bcast([tensor], topology=topo)
        assert tensor.tolist() == [0, 1, 2, 3]
    for nodes in ([[0, 1]], [[1]], [], [[]]):
        with pytest.raises(ValueError, match="node"):
            Topology.from_nodes(nodes)
    with pytest.raises(ValueError, match="expected src among"):
        coalesced_bcast([torch.zeros(1)], src=1)
    assert Topology.from_nodes([torch.arange(1)]).nodes == ((0,),)  # type: ignore[list-item]
    assert all(type(rank) is int for rank in Topology.from_nodes(np.zeros((1, 1), int)).ranks)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "call",
    [
        lambda nodes: coalesced_bcast([torch.zeros(1)], topology=nodes),
        lambda nodes: HierarchicalLoader(nodes),
        lambda nodes: epload.load(nn.Linear(1, 1), {}, topology=nodes),
        lambda nodes: epload.load_state({"a": torch.zeros(1)}, {}, topology=nodes),
        lambda nodes: epload.save(nn.Linear(1, 1), "/nowhere", topology=nodes),
        lambda nodes: epload.convert("/nowhere", "/nowhere/else", topology=nodes),
        lambda nodes: epload.WeightSender(nn.Linear(1, 1), "127.0.0.1:0", receivers=1, topology=nodes),
        lambda nodes: epload.WeightReceiver(nn.Linear(1, 1), "127.0.0.1:1", topology=nodes),
    ],
)
def test_what_is_no_topology_is_refused(call: Callable[[Any], Any]) -> None:
    must_raise(TypeError, r"expected topology to be an epload\.Topology, got a list; make one with", call, [[0]])


@pytest.mark.parametrize(
    ("timeout", "kind", "text"),
    [
        (True, TypeError, "a number of seconds or a timedelta, got True"),
        (0, ValueError, "above 0, got 0"),
        (-1.5, ValueError, "above 0, got -1.5"),
        (timedelta(), ValueError, "above 0, got 0:00:00"),
    ],
)
def test_a_timeout_is_above_0(timeout: Any, kind: type[Exception], text: str) -> None:
    must_raise(kind, f"expected timeout to be {text}", Topology.discover, timeout=timeout)


def two_groups(rank: int) -> list[float]:
    """Topologies of the same ranks, each with a store of its own."""
    seen = []
    for number in range(2):
        topology = Topology.from_nodes([[0, 1], [2]], dist.new_group([0, 1, 2]))
        for src in (0, 2):
            tensor = torch.tensor([10.0 * number + rank])
            coalesced_bcast([tensor], src, topology)
            seen.append(tensor.item())
    return seen


def test_topologies_of_two_groups_of_the_same_ranks() -> None:
    assert ranks.run(3, two_groups) == [[0.0, 2.0, 10.0, 12.0]] * 3


# ---- a default group that is bound to a device (init_process_group(device_id=)), on a fake accelerator ----
# torch then makes each group by splitting the default one's communicator, in which all ranks of the job have to take part: those
# of a load would wait for the others.

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

    public, c10d = {"new_group": refuse, "split_group": refuse}, dist.distributed_c10d
    with mock.patch.multiple(dist, **public), mock.patch.multiple(c10d, _new_process_group_helper=refuse, **public):
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


@pytest.mark.usefixtures("fake_device")
@on_ranks(WORLD, setup=fakedev.setup)
def test_only_members_make_a_group(rank: int, tmp_path: Path) -> list[str]:
    """All ranks load, then some of them: the others take no part, and are not needed."""
    bind(rank, tmp_path)
    group = dist.new_group(list(PART))  # the caller's, of which all ranks of the job know
    with no_group_of_torchs():
        problems = loads(Topology.from_nodes([[0, 1], [2, 3], [4]]), (0, 1))
        return problems + loads(Topology.from_nodes([[0, 1], [3]], group), (0, 1)) if rank in PART else problems
