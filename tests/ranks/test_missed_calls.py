"""A call to which a rank does not come, or with a mistake of one rank, fails on all; the next one works on the same topology."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.distributed_c10d import _get_default_store as default_store

import epload
from epload.core import threads
from epload.errors import LoadError
from epload.ranks import control
from epload.ranks.single_flight import preparing_call
from support import ranks
from support.failures import raised, raised_by
from support.on_ranks import on_ranks

TIMEOUT = 3.0
"""Seconds that a call which a rank misses waits."""
LIMIT = 60.0
"""Seconds that all other calls may take."""
Calls = dict[str, Callable[..., Any]]


def calls(topology: epload.Topology, folder: Path) -> tuple[nn.Module, Calls]:
    """A model, and calls with it that take keyword arguments."""
    model, state = nn.Linear(5, 4), {"weight": torch.ones(4, 5), "bias": torch.full((4,), 2.0)}
    loader = epload.HierarchicalLoader(topology, progress=False)
    usual = {"topology": topology, "timeout": LIMIT}

    def load_with(timeout: float = LIMIT) -> None:
        with mock.patch.object(loader, "_timeout", timedelta(seconds=timeout)):
            loader.load(model, state)

    def load_state(**options: Any) -> None:
        epload.load_state(dict(model.state_dict()), state, progress=False, **usual | options)

    def save_async(**options: Any) -> None:
        epload.save_async(model, folder / "saved", overwrite=True, **usual | options).wait()

    load = partial(epload.load, model, state, progress=False, **usual)
    save = partial(epload.save, model, folder / "saved", overwrite=True, **usual)
    loading = {"load": load, "loader": load_with, "load_state": load_state}
    return model, {**loading, "save": save, "save_async": save_async}


def misses(rank: int, absent: tuple[int, ...], kind: str, nodes: list[list[int]], folder: Path) -> list[str]:
    topology = epload.Topology.from_nodes(nodes)
    model, by_kind = calls(topology, folder)
    call = by_kind[kind]
    call()
    texts = []
    for _ in range(2 if kind == "load" else 1):
        if rank not in absent:
            texts.append(raised(partial(call, timeout=TIMEOUT))[1])
        dist.barrier()
    with torch.no_grad():
        model.weight.zero_()
    for _ in range(3):
        call()
        dist.barrier()
    if "load" in kind and kind != "load_state":
        assert bool((model.weight == 1).all())
    return texts


@pytest.mark.parametrize(
    ("absent", "kind", "nodes"),
    [
        ((1,), "load", [[0, 1, 2]]), ((0,), "load", [[0, 1, 2]]), ((1,), "loader", [[0, 1], [2]]),
        ((0, 1), "save", [[0, 1], [2]]), ((2,), "save", [[0], [1, 2]]), ((1,), "load_state", [[0], [1, 2]]),
        ((0,), "save_async", [[0, 1, 2]]), ((1, 2), "load_state", [[0], [1, 2]]),
    ],
)  # fmt: skip
def test_a_rank_that_has_missed_calls_takes_part(absent: Any, kind: str, nodes: Any, tmp_path: Path) -> None:
    texts = ranks.run(3, misses, absent, kind, nodes, tmp_path)
    named = f"rank{'s' * (len(absent) > 1)} {', '.join(map(str, absent))}"
    ending = ", the coordinator, made no decision within 3 s" if absent == (0,) else " did not arrive within 3 s"
    for of_call in zip(*(texts[rank] for rank in range(3) if rank not in absent), strict=True):
        assert len(set(of_call)) == 1
        assert named + ending in of_call[0]


@pytest.mark.parametrize("missed", ["load", "save", "load_state"])
@pytest.mark.parametrize("nodes", [[[0, 1]], [[0], [1]]], ids=["one node", "two nodes"])
@on_ranks(2)
def test_what_was_made_before_a_missed_call_is_made_again(rank: int, missed: str, nodes: Any, tmp_path: Path) -> None:
    """Rank 1 misses a call that is not of this loader, which has memory and groups."""
    topology = epload.Topology.from_nodes(nodes)
    model, by_kind = calls(topology, tmp_path)
    sent = torch.zeros(2)
    with epload.HierarchicalLoader(topology, readers="one", progress=False, timeout=60) as loader:
        loader.load(model, {"weight": torch.zeros(4, 5), "bias": torch.zeros(4)})
        epload.coalesced_bcast([sent], 0, topology)
        if rank == 0:
            assert "rank 1 did not arrive within 3 s" in raised(partial(by_kind[missed], timeout=TIMEOUT))[1]
        dist.barrier()
        for number in (1.0, 2.0, 3.0):
            sent.fill_(number + 10 * rank)
            if missed == "load_state":
                epload.coalesced_bcast([sent], 0, topology)
            loader.load(model, {"weight": torch.full((4, 5), number), "bias": torch.zeros(4)})
            epload.coalesced_bcast([sent], 0, topology)
            assert (model.weight.unique().tolist(), sent.tolist()) == ([number], [number] * 2)


def alone(rank: int) -> tuple[str, float]:
    """The other rank does not come to the first call, in which ranks find one another."""
    if rank == 1:
        default_store().wait(["test/raised"])
        return "", 0.0
    state = {"weight": torch.ones(2, 2), "bias": torch.ones(2)}
    result = raised_by(lambda: epload.load(nn.Linear(2, 2), state, timeout=TIMEOUT, progress=False))[1:]
    default_store().set("test/raised", "")
    return result


def test_a_call_whose_ranks_do_not_find_one_another_ends_after_its_timeout() -> None:
    (text, seconds), _ = ranks.run(2, alone)
    assert "rank 1 did not arrive within 3 s" in text
    assert seconds < 10 * TIMEOUT


def broken(rank: int) -> str:
    topology, sent = epload.Topology.from_nodes([[0, 1]]), torch.full((3,), float(rank))

    def tensors() -> Iterator[torch.Tensor]:
        yield sent
        if rank == 1:
            raise KeyError("no such layer")

    text = raised(lambda: epload.coalesced_bcast(tensors(), 0, topology))[1]
    epload.coalesced_bcast([sent], 0, topology)
    assert sent.tolist() == [0.0] * 3
    return text


def test_a_list_of_tensors_that_cannot_be_read_ends_the_broadcast_on_all() -> None:
    here, there = ranks.run(2, broken)
    assert "no such layer" in there
    assert "rank 1: KeyError: 'no such layer'" in here


def is_late(rank: int, folder: Path) -> str:
    _, by_kind = calls(epload.Topology.from_nodes([[0, 1]]), folder)
    by_kind["load"]()
    if rank == 1:
        default_store().wait(["test/raised"])
    with mock.patch.object(control, "_RESUMED_SECONDS", 0.5):
        text = raised(partial(by_kind["load"], timeout=TIMEOUT))[1]
    default_store().set("test/raised", "")
    dist.barrier()
    by_kind["save"]()
    return text.partition("\n")[0]


def test_a_rank_that_is_late_raises_what_the_others_have(tmp_path: Path) -> None:
    here, there = ranks.run(2, is_late, tmp_path)
    assert here == there
    assert "rank 1 did not arrive within 3 s" in here


MISTAKES: dict[str, tuple[str, dict[str, Any], str]] = {
    "readers": ("load", {"readers": "all"}, "ValueError"),
    "timeout": ("load", {"timeout": "4"}, "TypeError"),
    "infinite timeout": ("load", {"timeout": float("inf")}, "ValueError"),
    "options": ("load", {"options": {}}, "TypeError"),
    "source": ("load_state", {"src": 7}, "ValueError"),
    "timeout of a save": ("save", {"timeout": "4"}, "TypeError"),
    "files": ("save_async", {"files": [3]}, "TypeError"),
}


def mistaken(rank: int, folder: Path) -> dict[str, tuple[str, str]]:
    seen = {}
    _, by_kind = calls(epload.Topology.from_nodes([[0, 1]]), folder)
    for name, (kind, wrong, _) in MISTAKES.items():
        seen[name] = raised(lambda: by_kind[kind](**(wrong if rank == 1 else {})))  # noqa: B023
        dist.barrier()
        seen[f"{name} on all ranks"] = raised(lambda: by_kind[kind](**wrong))  # noqa: B023
        dist.barrier()
        for call in by_kind.values():
            call()
    return seen


def test_a_mistake_of_one_rank_ends_the_call_on_all(tmp_path: Path) -> None:
    here, there = ranks.run(2, mistaken, tmp_path)
    assert here == there
    for name, (_, _, kind) in MISTAKES.items():
        assert here[f"{name} on all ranks"][0] == kind
        assert (here[name][0], here[name][1].endswith(" [rank 1]")) == (kind, True)


def faulty(rank: int, kind: str, folder: Path) -> str:
    """Rank 1 has no memory left before its call has begun, or no thread for it."""
    _, by_kind = calls(epload.Topology.from_nodes([[0, 1]]), folder)
    start = threads.start

    def fails(name: str, target: Callable[[], None]) -> Any:
        if name == "epload-save":
            raise LoadError("cannot start thread epload-save")
        return start(name, target)

    memory = mock.patch.object(sys.modules["epload.load"], "SingleLoad", side_effect=MemoryError("none is left"))
    fault = memory if kind == "load" else mock.patch.object(threads, "start", fails)
    with fault if rank == 1 else nullcontext():
        text = raised(by_kind[kind])[1]
    dist.barrier()
    for call in by_kind.values():
        call()
    return text


def test_a_fault_of_one_rank_ends_the_call_on_all(tmp_path: Path) -> None:
    expected = ["MemoryError: none is left before the call [rank 1]", "none is left"]
    assert ranks.run(2, faulty, "load", tmp_path) == expected
    here, there = ranks.run(2, faulty, "save_async", tmp_path)
    assert here == there
    assert "cannot start thread epload-save" in here


def sleeps(rank: int, folder: Path) -> str:
    topology = epload.Topology.from_nodes([[0, 1]])
    _, by_kind = calls(topology, folder)
    if rank == 0:
        return raised(by_kind["load"])[1]
    with pytest.raises(LoadError) as error, preparing_call(topology):
        raise LoadError("the engine sleeps")
    return str(error.value)


def test_an_error_of_another_call_ends_the_one_that_it_prepares(tmp_path: Path) -> None:
    assert ranks.run(2, sleeps, tmp_path) == ["the engine sleeps before the call [rank 1]"] * 2


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


def fails_oddly(rank: int) -> dict[str, tuple[str, str]]:
    """Rank 1 raises errors that are their own cause, cannot be shown, or end generators."""
    topology, seen = epload.Topology.from_nodes([[0, 1]]), {}

    def hook(error: Exception, *_: Any) -> None:
        if rank == 0:
            return
        if isinstance(error, KeyError):
            raise error from error
        raise error

    for error in (KeyError("itself"), Unprintable(), StopIteration()):
        options = {"strict": False, "topology": topology, "progress": False}
        load = partial(epload.load, nn.Linear(2, 2), {"bias": torch.ones(2)}, **options)
        seen[type(error).__name__] = raised(partial(load, init_missing=partial(hook, error)))
        dist.barrier()
    return seen


def test_errors_that_are_hard_to_tell_reach_all_ranks() -> None:
    here, there = ranks.run(2, fails_oddly)
    assert here == there
    for name, part in {"KeyError": "'itself'", "Unprintable": "cannot be shown (RuntimeError)", "StopIteration": ""}.items():
        kind, text = here[name]
        assert (kind, f"{name}: " in text, part in text) == ("LoadError", True, True)
