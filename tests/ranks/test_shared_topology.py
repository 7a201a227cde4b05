"""Tests of what one load leaves to the next call on its topology, and of two threads that load at once."""

from __future__ import annotations

import os
import re
import socket
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import epload
from epload import HierarchicalLoader, Topology, coalesced_bcast, load
from epload.checkpoint.base import Checkpoint
from epload.core.log import logger
from epload.ranks.connection import DEFAULT_TIMEOUT
from epload.ranks.control import Control
from epload.ranks.groups import Group, GroupStore
from support import ranks
from support.failures import Slow, error_of, outcome, raised, raised_by
from support.memory import memfds
from support.on_ranks import on_ranks
from support.small_model import BUCKET, NODES, meta_net, only_readers, state_for, wrong


@on_ranks(4, limit=80)
def test_a_larger_load_that_one_rank_cannot_plan_leaves_all_with_the_same_memory(rank: int) -> None:
    """One rank cannot plan a load that needs more memory than the one before; the next load needs as much as the first."""
    loader = HierarchicalLoader(Topology.from_nodes(NODES), readers="partitioned", timeout=10, progress=False)
    model = meta_net()
    loader.load(model, state_for(1))
    state = {"weight": torch.ones(200, 301 if rank == 1 else 300), "bias": torch.ones(200)}
    assert "weight" in error_of(lambda: loader.load(nn.Linear(300, 200), state))
    for number in (2, 3):
        loader.load(model, state_for(number))
        assert wrong(model, state_for(number)) == []


def set_lazy() -> None:
    os.environ["TORCH_GLOO_LAZY_INIT"] = "1"


@on_ranks(4, limit=80, setup=set_lazy)
def test_groups_of_gloo_connect_at_once(rank: int) -> None:
    """They do not look for keys when they first send, which are deleted by then."""
    loader, model = new_loader(Topology.from_nodes(NODES)), meta_net()
    for number in (1, 2):
        loader.load(model, only_readers(state_for(number), "one"))
        assert wrong(model, state_for(number)) == []


@pytest.mark.parametrize(("backend", "watched"), [("nccl", False), ("nccl", True), ("hccl", False)])
def test_what_torch_would_end_the_process_for(backend: str, watched: bool) -> None:
    seen, store, variable = [], GroupStore(dist.HashStore(), timedelta(seconds=9)), f"TORCH_{backend.upper()}_BLOCKING_WAIT"

    def make(self: Group, name: str, *_: Any) -> Any:
        seen.append((name, os.environ.get(variable)))
        raise ZeroDivisionError

    with mock.patch.object(Group, "_make_backend", make), mock.patch.dict(os.environ, {variable: "0"}):
        with pytest.raises(ZeroDivisionError):
            Group("name", 0, [0], None).make(store, 0, timedelta(seconds=9), {"cuda": backend}, watched=watched)
        assert os.environ[variable] == "0"
    assert seen == [(backend, "0" if watched else "1")]


@on_ranks(4, limit=60)
def test_a_group_that_one_rank_cannot_make_fails_the_load_on_all(rank: int) -> None:
    """A rank cannot make a group of its first load; the others have made theirs and go on, until they hear of it."""
    loader, model = new_loader(Topology.from_nodes(NODES)), meta_net()
    no_port = mock.patch.object(dist, "ProcessGroupGloo", side_effect=RuntimeError("no port"))
    with no_port if rank == 3 else nullcontext():
        kind, text, seconds = raised_by(lambda: loader.load(model, only_readers(state_for(1), "one")))
    assert kind == "LoadError"
    assert re.search(r"rank 3 could not make the process group of ranks \[2, 3\]: .*no port", text)
    assert seconds < 20
    assert all(parameter.is_meta for parameter in model.parameters())
    loader.load(model, only_readers(state_for(2), "one"))
    assert wrong(model, state_for(2)) == []


def group_of_a_late_rank(rank: int) -> list[str]:
    """A rank that cannot connect for a while, as behind a firewall."""
    original, messages, store = Group.make, list[str](), dist.distributed_c10d._get_default_store()

    def warn(text: str, *values: Any) -> None:
        messages.append(text % values)
        store.set(f"test/{rank}", "")

    def make(*args: Any, **options: Any) -> None:
        if rank == 1:
            store.wait([f"test/{other}" for other in range(2)])
        original(*args, **options)

    with (
        mock.patch("epload.ranks.group_cache._LATE_SECONDS", 0.3),
        mock.patch.object(Group, "make", make),
        mock.patch.object(logger, "warning", warn),
    ):
        Topology.from_nodes([[0], [1]]).route(0, "two_level")
    return messages


def test_ranks_that_wait_for_connections_say_so() -> None:
    for rank, (message,) in enumerate(ranks.run(2, group_of_a_late_rank)):
        assert f"rank {rank} has waited 0 s for the connections of the process group of ranks [0, 1]" in message


NAMES = [f"{'x' * 6000}{number}" for number in range(1500)]
"""9 MB of them; the store takes values of 8 MiB."""


def large_mismatch(rank: int) -> str:
    model = nn.Module()
    for number, name in enumerate(NAMES):
        odd = rank == 1 and number == 1234
        model.register_parameter(name, nn.Parameter(torch.zeros(3, dtype=torch.float64 if odd else torch.float32)))
    loader = HierarchicalLoader(Topology.from_nodes([[0], [1]]), readers="one", progress=False, timeout=60)
    return error_of(lambda: loader.load(model, {name: torch.ones(3) for name in NAMES} if rank == 0 else None))


def test_a_mismatch_of_models_larger_than_a_value_of_the_store() -> None:
    first, second = ranks.run(2, large_mismatch, tcp=True, limit=100)
    assert first == second
    assert re.match("(?s)ManifestMismatch.*rank 0 has 'model x+1234: float32 .*rank 1 has .* float64", first)


@pytest.mark.parametrize(("size", "warned"), [("4", True), ("1", False)])
def test_a_launched_rank_that_loads_alone_is_warned(size: str, warned: bool, caplog: pytest.LogCaptureFixture) -> None:
    """Under torchrun without init_process_group, every rank would load the whole model by itself without a word."""
    model = nn.Linear(3, 2)
    state = {"weight": torch.arange(6.0).view(2, 3), "bias": torch.arange(2.0)}
    launched = mock.patch.dict(os.environ, {"RANK": "1", "WORLD_SIZE": size})
    with launched, mock.patch("epload.ranks.topology._default", None):
        report = epload.load(model, state, progress=False)
    assert torch.equal(model.weight, state["weight"])
    texts = [text for text in caplog.messages if "torch.distributed is not initialized" in text]
    assert len(texts) == len(report.warnings) == warned
    if warned:
        assert report.warnings == texts == report.to_dict()["warnings"]
        assert re.search(r"rank 1 loads alone.*init_process_group\(\)", texts[0])
        assert f"warning: {texts[0]}" in str(report)


@pytest.mark.parametrize("fails", [False, True])
@on_ranks(4, limit=60)
def test_a_loaders_timeout_ends_with_its_load(rank: int, fails: bool) -> None:
    topology = Topology.from_nodes(NODES)
    loader = HierarchicalLoader(topology, readers="one", bucket_bytes=BUCKET, timeout=7.0)
    model, state = meta_net(), state_for(1)
    if fails:
        state.popitem()
    with pytest.raises(epload.LoadError, match="missing") if fails else nullcontext():
        loader.load(model, only_readers(state, "one"))
    tensor, route = torch.tensor([rank]), topology.route(1)
    coalesced_bcast([tensor], 1, topology)
    assert int(tensor) == 1
    assert topology.control.timeout == DEFAULT_TIMEOUT
    for name in {route.inter_group, route.intra_group} - {""}:
        group = dist.distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type]
        assert group._get_backend(torch.device("cpu")).options._timeout == DEFAULT_TIMEOUT


def kept_across_groups(rank: int, folder: Path) -> str:
    state, model = {"weight": torch.ones(2, 3), "bias": torch.ones(2)}, torch.nn.Linear(3, 2)
    loader = epload.HierarchicalLoader(progress=False)
    loader.load(model, state)
    pending = epload.save_async(model, folder / "c")
    dist.barrier()
    dist.destroy_process_group()
    pending.wait()
    dist.init_process_group("gloo", init_method=f"file://{folder}/again", rank=rank, world_size=2)
    text = raised(lambda: loader.load(model, state))[1]
    epload.load(model, folder / "c", progress=False)
    return text


def test_a_loader_of_a_group_that_was_destroyed_is_refused(tmp_path: Path) -> None:
    first, second = ranks.run(2, kept_across_groups, tmp_path)
    assert first == second
    assert "the process group with which this topology was made has been destroyed" in first


def load_and_destroy(rank: int, folder: Path) -> None:
    """The job's store is in the first rank, at a port of its own."""
    server = dist.TCPStore("127.0.0.1", 0, 2, True, wait_for_workers=False) if rank == 0 else None
    ports = [server.port if server is not None else 0]
    dist.broadcast_object_list(ports)
    dist.barrier()
    dist.destroy_process_group()
    store = server or dist.TCPStore("127.0.0.1", ports[0], 2, False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    model, topology = torch.nn.Linear(3, 2), epload.Topology.from_nodes([[0], [1]])
    state = {"weight": torch.ones(2, 3), "bias": torch.ones(2)}
    loader = HierarchicalLoader(topology, readers="one", progress=False)
    loader.load(model, state)
    load(model, state, readers="one", progress=False)
    del server, store
    dist.barrier()
    dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=f"file://{folder}/again", rank=rank, world_size=2)
    dist.barrier()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", ports[0])).close()
    for call in (lambda: loader.load(model, state), lambda: coalesced_bcast([torch.ones(3)], 0, topology)):
        with pytest.raises((ValueError, epload.LoadError), match="has been destroyed"):
            call()
    load(model, state, progress=False)


def test_a_store_ends_with_its_group(tmp_path: Path) -> None:
    """torch would use it for the next job at its address, whose ranks would find keys of the last one."""
    ranks.run(2, load_and_destroy, tmp_path)


@on_ranks(2)
def test_a_child_of_a_fork_takes_no_part_of_its_parent(rank: int) -> None:
    """Its calls would have the numbers of the parent's next ones, and decide their outcome."""
    model, state = torch.nn.Linear(3, 2), {"weight": torch.ones(2, 3), "bias": torch.ones(2)}
    loader = HierarchicalLoader(progress=False)
    loader.load(model, state)
    if (child := os.fork()) == 0:
        code = 1
        try:
            code = int("was forked from rank" not in error_of(lambda: loader.load(model, state)))
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    loader.load(model, state)
    load(model, state, progress=False)


def test_a_second_thread_of_one_process_leaves_the_load_of_the_first_alone() -> None:
    """No ranks can have paired the two."""
    refused, state = list[str](), {"weight": torch.ones(2, 3), "bias": torch.ones(2)}

    class Meanwhile(Slow):
        def fill(self, bucket: torch.Tensor, pieces: Any) -> None:
            thread = threading.Thread(target=lambda: refused.append(error_of(lambda: load(torch.nn.Linear(3, 2), state))))
            thread.start()
            thread.join()
            super().fill(bucket, pieces)

    model = torch.nn.Linear(3, 2)
    load(model, Meanwhile(state, 0.0), progress=False)
    assert "by two threads of a process at once" in refused[0]
    assert model.weight.eq(1).all()


RUNS = 4
APART = 0.02  # seconds between the two threads, which is less than a load takes
WAYS = ("one loader", "one topology", "two topologies", "loaders made in the threads", "topologies made in the threads")
End = tuple[str, str]
"""Class and text of what a load raised, or "wrong" and where; empty if it was right."""


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
        failed = outcome(lambda: make[which]().load(models[which], source))
        if failed is None and (bad := wrong(models[which], state_for(which + 1))):
            failed = "wrong", str(bad[:3])
        ends[which] = failed or ("", "")

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
            assert (kind == "LoadError" and text) or (kind, text) == ("", ""), (turn, which, text)
            refused += bool(kind)
    assert refused >= RUNS, "in each run one of the two at least"
    assert [bad for _, bad in results] == [[]] * 4, "a load after all of them is right"


def load_and_broadcast(rank: int) -> list[str]:
    """A broadcast of another thread in the middle of a load."""
    topology = Topology.from_nodes(NODES)
    model, state, loader = meta_net(), state_for(1), new_loader(topology)
    problems: list[str] = []

    def broadcast() -> None:
        problems.append(error_of(lambda: coalesced_bcast([torch.full((3,), float(rank))], 1, topology)))

    thread = threading.Timer(0.1, broadcast)
    thread.start()
    loader.load(model, Slow(state, 0.1) if rank == 0 else None)
    thread.join()
    tensor = torch.full((3,), float(rank))
    coalesced_bcast([tensor], 1, topology)
    return problems + wrong(model, state) + [str(tensor.tolist())]


def test_a_broadcast_in_the_middle_of_a_load_is_refused() -> None:
    (refusal, after), *others = ranks.run(4, load_and_broadcast, limit=60)
    assert others == [[refusal, after]] * 3
    assert refusal.startswith("LoadError: load() or coalesced_bcast() was called by two threads of a process at once")
    assert after == "[1.0, 1.0, 1.0]"


def load_in_a_hook(rank: int) -> str:
    """A load inside a load of the same thread cannot be either."""
    model = meta_net()
    state = state_for(1) if rank == 0 else None

    def hook(*_: Any) -> None:
        load(meta_net(), state, timeout=30, progress=False)

    model.register_buffer("more", torch.zeros(3, device="meta"), persistent=False)
    return error_of(lambda: load(model, state, init_missing=hook, timeout=30, progress=False))


def test_a_load_inside_a_load_is_refused() -> None:
    results = ranks.run(2, load_in_a_hook, limit=60)
    assert len(set(results)) == 1, results
    assert "load() or coalesced_bcast() was called" in results[0]


@pytest.mark.parametrize("round_", ["planning", "sharing memory"])
@on_ranks(4, limit=60)
def test_a_round_that_fails_leaves_no_descriptor_of_shared_memory(rank: int, round_: str) -> list[str]:
    """A round fails between a leader's announcement of memory and the end of it: another rank was interrupted in it."""
    loader = HierarchicalLoader(Topology.from_nodes(NODES), readers="one", bucket_bytes=BUCKET, timeout=30)
    before = len(memfds())
    agree = Control.agree

    def interrupted(self: Control, what: str, *args: Any, **options: Any) -> Any:
        if what == round_:
            raise MemoryError("no room for a round")
        return agree(self, what, *args, **options)

    model = meta_net()
    with mock.patch.object(Control, "agree", interrupted) if rank == 3 else nullcontext():
        error = error_of(lambda: loader.load(model, only_readers(state_for(1), "one")))
    problems = [] if error.startswith("LoadError") and "no room for a round" in error else [error]
    if len(memfds()) != before:
        problems.append(f"descriptors of shared memory are left: {memfds()}")
    loader.load(model, only_readers(state_for(2), "one"))
    return problems + wrong(model, state_for(2))


def load_in_a_load(rank: int, inside: str) -> tuple[str, list[float]]:
    """Loads while this thread is in another load, as a signal's handler does."""
    model, values, texts = torch.nn.Linear(1, 1, bias=False), [], list[str]()

    def load(value: float) -> None:
        epload.load(model, {"weight": torch.full((1, 1), value)}, progress=False)
        values.append(model.weight.item())

    owner, method = {"discovery": (Topology, "discover"), "begin": (Control, "begin")}[inside]
    original = getattr(owner, method)

    def handled(*args: Any, **options: Any) -> Any:
        if not texts:
            texts.append("")
            texts.append(raised(lambda: load(2.0))[1])
        return original(*args, **options)

    with mock.patch.object(owner, method, handled), suppress(epload.LoadError):
        load(1.0)
    load(3.0)
    return texts[-1], values


@pytest.mark.parametrize("inside", ["discovery", "begin"])
def test_a_load_by_the_handler_of_a_signal_does_not_wait_for_the_load_that_it_interrupts(inside: str) -> None:
    ((text, values),) = ranks.run(1, load_in_a_load, inside, limit=60)
    assert "by two threads of a process at once" in text
    assert values[-1] == 3.0
    assert 2.0 not in values
