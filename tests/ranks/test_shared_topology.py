"""Tests of what one load leaves to the next call on its topology: groups, memory and timeouts."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import epload
from epload import HierarchicalLoader, ManifestMismatch, Topology, coalesced_bcast
from epload.ranks.connection import DEFAULT_TIMEOUT
from epload.ranks.control import Control
from support import ranks
from support.checks import all_fine
from support.failures import error_of, raised, raised_by
from support.memory import memfds
from support.small_model import BUCKET, NODES, meta_net, only_readers, state_for, wrong


def failing_larger_load(rank: int) -> list[str]:
    """One rank cannot plan a load that needs more memory than the one before; the next load needs as much as the first."""
    loader = HierarchicalLoader(Topology.from_nodes(NODES), readers="partitioned", timeout=10, progress=False)
    model, problems = meta_net(), []
    loader.load(model, state_for(1))
    state = {"weight": torch.ones(200, 301 if rank == 1 else 300), "bias": torch.ones(200)}
    error = error_of(lambda: loader.load(nn.Linear(300, 200), state))
    if "weight" not in error:
        problems.append(error)
    for number in (2, 3):
        loader.load(model, state_for(number))
        problems += wrong(model, state_for(number))
    return problems


def test_a_larger_load_that_one_rank_cannot_plan_leaves_all_with_the_same_memory() -> None:
    all_fine(ranks.run(4, failing_larger_load, limit=80))


def failing_group(rank: int) -> list[str]:
    """A rank cannot make a group of its first load; the others have made theirs and go on, until they hear of it."""
    loader = HierarchicalLoader(Topology.from_nodes(NODES), readers="one", bucket_bytes=BUCKET, timeout=30)
    model, problems = meta_net(), []
    no_port = mock.patch.object(dist, "ProcessGroupGloo", side_effect=RuntimeError("no port"))
    with no_port if rank == 3 else nullcontext():
        kind, text, seconds = raised_by(lambda: loader.load(model, only_readers(state_for(1), "one")))
    if (
        kind != "LoadError"
        or "rank 3 could not make the process group of ranks [2, 3]: " not in text
        or "no port" not in text
    ):
        problems.append(f"{kind}: {text}")
    if seconds > 20:
        problems.append("the other ranks have waited for the timeout")
    if not all(parameter.is_meta for parameter in model.parameters()):
        problems.append("the model left meta")
    loader.load(model, only_readers(state_for(2), "one"))
    return problems + wrong(model, state_for(2))


def test_a_group_that_one_rank_cannot_make_fails_the_load_on_all() -> None:
    all_fine(ranks.run(4, failing_group, limit=60))


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
    results = ranks.run(2, large_mismatch, tcp=True, limit=100)
    assert results[0] == results[1]
    assert results[0].startswith(ManifestMismatch.__name__)
    assert re.search("rank 0 has 'model x+1234: float32 .* where rank 1 has 'model x+1234: float64", results[0])


@contextmanager
def launched(size: str) -> Iterator[None]:
    with (
        mock.patch.dict(os.environ, {"RANK": "1", "WORLD_SIZE": size}),
        mock.patch("epload.ranks.topology._default", None),
    ):
        yield


@pytest.mark.parametrize(("size", "warned"), [("4", True), ("1", False)])
def test_a_launched_rank_that_loads_alone_is_warned(size: str, warned: bool, caplog: pytest.LogCaptureFixture) -> None:
    """Under torchrun without init_process_group, every rank would load the whole model by itself without a word."""
    assert not dist.is_initialized()
    model = nn.Linear(3, 2)
    state = {"weight": torch.arange(6.0).view(2, 3), "bias": torch.arange(2.0)}
    with launched(size):
        report = epload.load(model, state, progress=False)
    assert torch.equal(model.weight, state["weight"])
    texts = [text for text in caplog.messages if "torch.distributed is not initialized" in text]
    assert len(texts) == len(report.warnings) == warned
    if warned:
        assert report.warnings == texts
        assert "rank 1 loads alone" in texts[0]
        assert "init_process_group()" in texts[0]
        assert f"warning: {texts[0]}" in str(report)
        assert report.to_dict()["warnings"] == texts


def timeouts_of_groups(topology: Topology) -> list[timedelta]:
    found = []
    for name in {*vars(topology.route(0)).values()} if topology.ranks else ():
        if isinstance(name, str) and name:
            group = dist.distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type]
            found.append(group._get_backend(torch.device("cpu")).options._timeout)
    return found


def broadcast_after_a_load(rank: int, fails: bool) -> list[str]:
    topology = Topology.from_nodes(NODES)
    loader = HierarchicalLoader(topology, readers="one", bucket_bytes=BUCKET, timeout=7.0)
    model = meta_net()
    state = state_for(1)
    if fails:
        state.popitem()
    with pytest.raises(epload.LoadError, match="missing") if fails else nullcontext():
        loader.load(model, only_readers(state, "one"))
    tensor = torch.tensor([rank])
    coalesced_bcast([tensor], 1, topology)
    timeouts = timeouts_of_groups(topology)
    problems = [] if int(tensor) == 1 else ["the broadcast is wrong"]
    if topology.control.timeout != DEFAULT_TIMEOUT or set(timeouts) - {DEFAULT_TIMEOUT} or not timeouts:
        problems.append(f"a timeout of {topology.control.timeout} and groups with timeouts of {timeouts}")
    return problems


@pytest.mark.parametrize("fails", [False, True])
def test_a_loaders_timeout_ends_with_its_load(fails: bool) -> None:
    assert ranks.run(4, broadcast_after_a_load, fails, limit=60) == [[]] * 4


def failing_announcement(rank: int, round_: str) -> list[str]:
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


@pytest.mark.parametrize("round_", ["planning", "sharing memory"])
def test_a_round_that_fails_leaves_no_descriptor_of_shared_memory(round_: str) -> None:
    all_fine(ranks.run(4, failing_announcement, round_, limit=60))


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
    texts = ranks.run(2, kept_across_groups, tmp_path)
    assert len(set(texts)) == 1
    assert "the process group with which this topology was made has been destroyed" in texts[0]
