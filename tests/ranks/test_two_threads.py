"""Two threads of a process that load at once: one of the two loads is refused, or both, in the same way on all ranks."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from epload import HierarchicalLoader, Topology, coalesced_bcast, load
from epload.checkpoint.base import Checkpoint
from support import ranks
from support.failures import Slow
from support.small_model import BUCKET, NODES, meta_net, state_for, wrong

RUNS = 4
APART = 0.02
"""Seconds between the two threads, which is less than a load takes."""
WAYS = ("one loader", "one topology", "two topologies", "loaders made in the threads", "topologies made in the threads")
End = tuple[str, str]
"""Class and text of what a load raised, or "wrong" and where; empty if it was right."""


def ended(action: Callable[[], Any], model: torch.nn.Module, turn: int) -> End:
    try:
        action()
    except Exception as error:
        return type(error).__name__, str(error)
    bad = wrong(model, state_for(turn))
    return ("wrong", str(bad[:3])) if bad else ("", "")


def new_loader(topology: Topology) -> HierarchicalLoader:
    return HierarchicalLoader(topology, readers="one", bucket_bytes=BUCKET, timeout=30, progress=False)


def makers(way: str) -> list[Callable[[], HierarchicalLoader]]:
    """Returns two functions that return the loaders of two threads."""
    if way == "topologies made in the threads":
        return [lambda: new_loader(Topology.from_nodes(NODES))] * 2
    topologies = [Topology.from_nodes(NODES) for _ in range(1 + (way == "two topologies"))]
    if way == "loaders made in the threads":
        return [lambda: new_loader(topologies[0])] * 2
    loaders = [new_loader(topologies[-i]) for i in range(1 + (way != "one loader"))]
    return [lambda: loaders[0], lambda: loaders[-1]]


def load_both(make: list[Callable[[], HierarchicalLoader]], rank: int, swapped: bool) -> list[End]:
    """Returns how two loads of different checkpoints end; ``swapped``: the second begins a little before the first."""
    ends: list[End] = [("", "did not end")] * 2
    models = [meta_net() for _ in range(2)]

    def load_one(which: int) -> None:
        source: Checkpoint | None = Slow(state_for(which + 1), 0.3) if rank == 0 else None
        ends[which] = ended(lambda: make[which]().load(models[which], source), models[which], which + 1)

    threads = [threading.Thread(target=load_one, args=(which,)) for which in range(2)]
    for thread in reversed(threads) if swapped else threads:
        thread.start()
        time.sleep(APART)
    for thread in threads:
        thread.join()
    return ends


def two_threads(rank: int, way: str, crossed: bool) -> tuple[list[list[End]], list[str]]:
    make = makers(way)
    runs = [load_both(make, rank, crossed and rank in ((1, 2), (0,), (3,))[turn % 3]) for turn in range(RUNS)]
    model = meta_net()
    new_loader(Topology.from_nodes(NODES)).load(model, state_for(3) if rank == 0 else None)
    return runs, wrong(model, state_for(3))


@pytest.mark.parametrize(("way", "crossed"), [(way, i != 1) for i, way in enumerate(WAYS)])
def test_two_loads_at_once(way: str, crossed: bool) -> None:
    results = ranks.run(4, two_threads, way, crossed, limit=110)
    refused = 0
    for turn in range(RUNS):
        for which in range(2):
            ends = {runs[turn][which] for runs, _ in results}
            assert len(ends) == 1, (turn, which, [runs[turn] for runs, _ in results])
            kind, text = ends.pop()
            assert kind in ("", "LoadError"), (turn, which, text)
            assert bool(kind) == bool(text), text
            refused += bool(kind)
    assert refused >= RUNS, "in each run one of the two at least"
    assert [bad for _, bad in results] == [[]] * 4, "a load after all of them is right"


def load_and_broadcast(rank: int) -> list[str]:
    """A broadcast of another thread in the middle of a load."""
    topology = Topology.from_nodes(NODES)
    model = meta_net()
    state = state_for(1)
    loader = new_loader(topology)
    problems: list[str] = []

    def broadcast() -> None:
        try:
            coalesced_bcast([torch.full((3,), float(rank))], 1, topology)
        except Exception as error:
            problems.append(f"{type(error).__name__}: {error}")

    thread = threading.Thread(target=broadcast)
    threading.Timer(0.1, thread.start).start()
    loader.load(model, Slow(state, 0.1) if rank == 0 else None)
    thread.join()
    tensor = torch.full((3,), float(rank))
    coalesced_bcast([tensor], 1, topology)
    return problems + wrong(model, state) + [str(tensor.tolist())]


def test_a_broadcast_in_the_middle_of_a_load_is_refused() -> None:
    results = ranks.run(4, load_and_broadcast, limit=60)
    assert all(each == results[0] for each in results), results
    refusal, after = results[0]
    assert refusal.startswith("LoadError: load() or coalesced_bcast() was called by two threads of a process at once")
    assert after == "[1.0, 1.0, 1.0]"


def load_in_a_hook(rank: int) -> str:
    """A load inside a load of the same thread cannot be either."""
    model = meta_net()
    state = state_for(1) if rank == 0 else None

    def hook(*_: Any) -> None:
        load(meta_net(), state, timeout=30, progress=False)

    model.register_buffer("more", torch.zeros(3, device="meta"), persistent=False)
    try:
        load(model, state, init_missing=hook, timeout=30, progress=False)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "loaded"


def test_a_load_inside_a_load_is_refused() -> None:
    results = ranks.run(2, load_in_a_hook, limit=60)
    assert len(set(results)) == 1, results
    assert "load() or coalesced_bcast() was called" in results[0]
