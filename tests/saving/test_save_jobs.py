"""Saves by several ranks: every layout, models on a device, nodes with file systems of their own, and the memory taken."""

from __future__ import annotations

import os
import threading
import time
import traceback
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.fsdp import fully_shard

import epload
from epload.checkpoint.delta import BATCH_BYTES
from epload.core.log import logger
from epload.ranks.control import Control
from epload.ranks.single_flight import Call, exclusive
from epload.ranks.topology import Topology
from epload.saving import run as run_module
from epload.saving import writer
from epload.saving.plan import SLOT_BYTES
from epload.saving.run import PendingSave
from measure import PeakMemory
from support import ranks
from support.accelerator import DEVICE
from support.checkpoints import assert_same, read_all
from support.checks import flipped, full_values, ties
from support.failures import error_of
from support.findings import not_refused_by_all
from support.jobs import Job, Meeting, run
from support.layout_cases import cases
from support.layout_loads import meta_model, none_fails, oracle
from support.on_ranks import on_ranks
from support.small_syncs import receiving, sending, take
from support.synced_models import SHAPES, build, check, values, write


def save_cases(rank: int, folder: str) -> list[str]:
    failures = []
    for number, case in enumerate(cases(4)):
        try:
            model = oracle(case)
            epload.save(model, f"{folder}/{number}", max_shard_bytes=200 if number % 2 else 1 << 30)
            epload.save(model, f"{folder}/changes-{number}", base=f"{folder}/base-{number}")
        except Exception:
            failures.append(f"rank {rank}: {case.name}: {traceback.format_exc(limit=-3)}")
    return failures


def test_every_layout(tmp_path: Path) -> None:
    """Some bytes of each tensor differ in the bases; some tensors are missing, and others have another shape."""
    for number, case in enumerate(cases(4)):
        state = full_values(meta_model(case))
        old = {name: flipped(tensor, 7 + number) for name, tensor in list(state.items())[number % 2 :]}
        if number % 3 == 0:
            old = {name: tensor.reshape(-1) if i % 2 else tensor for i, (name, tensor) in enumerate(old.items())}
        (tmp_path / f"base-{number}").mkdir()
        save_file({"gone": torch.ones(3), **old}, tmp_path / f"base-{number}" / "model.safetensors")
    none_fails(ranks.run(4, save_cases, str(tmp_path), limit=300))
    for number, case in enumerate(cases(4)):
        model = meta_model(case)
        expected = full_values(model)
        found = read_all(epload.Checkpoint.open(tmp_path / str(number)))
        tied = ties(model.state_dict(keep_vars=True))
        assert all(len(found.keys() & {*group}) == 1 for group in tied), f"{case.name}: tied tensors once"
        assert found.keys() | {name for group in tied for name in group} == expected.keys(), case.name
        assert_same(found, {name: expected[name] for name in found})
        assert_same(read_all(epload.Checkpoint.open(tmp_path / f"changes-{number}")), found)


MB = 1 << 20
PYTHON = 24 * MB
"""Planning, threads, and what allocators keep."""


def save_large(rank: int, folder: str) -> int:
    """Returns the bytes above the start, where the shards are 128 MB; of a save with a base, those above a batch."""
    model = nn.Sequential(*(nn.Linear(2048, 2048, bias=False, device="meta") for _ in range(32)))  # 512 MB
    fully_shard(model)
    model.to_empty(device="cpu")
    topology = epload.Topology.from_nodes([[0, 1], [2, 3]])
    for parameter in model.parameters():
        parameter.detach().to_local().normal_()
    dist.barrier()
    with PeakMemory() as memory:
        report = epload.save(model, folder, topology=topology, timeout=60)
    assert report.nbytes == 512 * MB
    for parameter in model.parameters():
        parameter.detach().to_local()[::3] += 1
    with PeakMemory() as with_base:
        epload.save(model, f"{folder}-2", topology=topology, timeout=60, base=folder)
    return max(memory.above, with_base.above - BATCH_BYTES)


def test_memory_is_bounded(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    found = ranks.run(4, save_large, str(folder))
    limit = 2 * SLOT_BYTES + PYTHON
    assert all(above <= limit for above in found), ([above // MB for above in found], limit // MB)
    assert (folder / "model.safetensors").stat().st_size > 512 * MB
    with torch.no_grad():
        epload.load(nn.Sequential(*(nn.Linear(2048, 2048, bias=False) for _ in range(32))), folder)


PATH = "/proc/self/cwd/step/1"


def save_on_disks(rank: int, nodes: list[list[int]], disks: list[str], in_background: bool) -> str:
    os.chdir(disks[rank])
    model = build("fsdp", dist.get_world_size())
    write(model, 3)
    options = {"topology": epload.Topology.from_nodes(nodes), "timeout": 30}
    if in_background:
        return error_of(lambda: epload.save_async(model, PATH, **options).wait())
    return error_of(lambda: epload.save(model, PATH, **options))


def make_disks(folder: Path, names: str) -> list[str]:
    for name in names:
        (folder / name).mkdir(exist_ok=True)
    return [str(folder / name) for name in names]


@pytest.mark.parametrize(
    ("nodes", "disks", "others", "in_background"),
    [
        ([[1, 2], [0]], "abb", "ranks 1, 2 do", False),
        ([[0, 1], [2]], "aba", "ranks 1 do", True),  # as in containers with file systems of their own
        ([[0], [1, 2]], "aaa", "", False),
    ],
)
def test_another_file_system_is_refused(
    nodes: list[list[int]], disks: str, others: str, in_background: bool, tmp_path: Path
) -> None:
    texts = ranks.run(len(disks), save_on_disks, nodes, make_disks(tmp_path, disks), in_background)
    assert len(set(texts)) == 1
    if not others:
        assert texts[0] == ""
        assert os.listdir(tmp_path / "a" / "step") == ["1"]
        assert os.listdir(tmp_path / "a" / "step" / "1") == ["model.safetensors"]
        return
    assert texts[0].startswith("LoadError")
    assert f"{others} not see the folder that rank 0 has made there, and nothing was saved" in texts[0]
    assert "save to a folder that all nodes share" in texts[0]
    assert not [name for disk in tmp_path.iterdir() for name in os.listdir(disk) if os.listdir(disk / name)]


def save_where_a_byte_is_lost(rank: int, folder: str) -> list[str]:
    """Another node writes the whole page, as rank 2 has not written to it."""
    model, texts = build("fsdp", dist.get_world_size()), []
    write(model, 3)
    epload.save(model, f"{folder}/base", topology=epload.Topology.from_nodes([[0, 1, 2]]), timeout=30)
    with mock.patch.object(writer, "_write_byte", return_value=None) if rank == 2 else nullcontext():
        for nodes in ([[0, 1], [2]], [[2], [0, 1]], [[0, 1, 2]]):
            options: dict[str, Any] = {"topology": epload.Topology.from_nodes(nodes), "timeout": 30}
            texts.append(error_of(partial(epload.save, model, f"{folder}/new-{len(texts)}", **options)))
        options["topology"] = epload.Topology.from_nodes([[0, 1], [2]])
        texts.append(error_of(partial(epload.save, model, f"{folder}/changes", base=f"{folder}/base", **options)))
    return texts


def test_a_mount_that_loses_what_nodes_write_to_one_file_is_refused(tmp_path: Path) -> None:
    first, *others = ranks.run(3, save_where_a_byte_is_lost, str(tmp_path))
    assert others == [first] * 2
    for text in first[:2]:
        assert text.startswith(f"LoadError: {tmp_path} does not keep what several nodes write to one file")
        assert "a byte of each of ranks 2 is lost, and nothing was saved; save to a file system that keeps it" in text
    assert first[2:] == ["", ""]
    assert sorted(os.listdir(tmp_path)) == ["base", "changes", "new-2"]


def save_on_one_node(rank: int, disks: list[str]) -> None:
    os.chdir(disks[rank])
    group = dist.new_group([2, 3])
    if rank >= 2:
        model = build("plain", 1)
        write(model, 3)
        epload.save(model, PATH, topology=epload.Topology.discover(group), timeout=30)


def test_the_ranks_of_one_node_save_to_its_disk(tmp_path: Path) -> None:
    ranks.run(4, save_on_one_node, make_disks(tmp_path, "aabb"))
    assert os.listdir(tmp_path / "a") == []
    found = load_file(tmp_path / "b" / "step" / "1" / "model.safetensors")
    assert all(found[name].equal(values(name, 3)) for name in SHAPES)


@pytest.mark.usefixtures("fake_device")
@pytest.mark.parametrize("semantics", ["nccl", "hccl"])
@on_ranks(2)
@mock.patch.object(writer, "CALL_BYTES", 5_000)
def test_a_model_on_a_device_writes_the_same_files(rank: int, tmp_path: Path, semantics: str) -> list[str]:
    """A model on a device writes what it writes on CPU, where regions are packed first; in each layout, and converted."""
    model, problems = build("fsdp", dist.get_world_size(), where=DEVICE), []
    write(model, 1)
    epload.save(model, f"{tmp_path}/now")
    pending = epload.save_async(model, f"{tmp_path}/later")
    write(model, 2)
    pending.wait()
    epload.save(model, f"{tmp_path}/changes", base=f"{tmp_path}/now")
    for name, version in (("now", 1), ("later", 1), ("changes", 2)):
        again = build("tp1", dist.get_world_size(), where=DEVICE if name == "changes" else "cpu")
        epload.load(again, f"{tmp_path}/{name}", progress=False)
        check(again, version)
    for kind in ("plain", "fsdp", "tp0", "tp1"):
        for dtype in (None, torch.bfloat16):
            for where in ("cpu", DEVICE):
                model = build(kind, dist.get_world_size(), where=where)
                write(model, 3)
                path = f"{tmp_path}/{kind}-{dtype}-{where[:3]}"
                epload.save(model, path, dtype=dtype, max_shard_bytes=20_000)
            dist.barrier()
            one, other = (Path(f"{tmp_path}/{kind}-{dtype}-{where}") for where in ("cpu", DEVICE[:3]))
            names = sorted(each.name for each in one.iterdir())
            if names != sorted(each.name for each in other.iterdir()):
                problems.append(f"{kind}: other files")
            different = [name for name in names if (one / name).read_bytes() != (other / name).read_bytes()]
            problems += [f"{kind}, {dtype}: {name} differs" for name in different]
    return problems


def train(rank: int, meeting: Meeting, folder: str) -> list[str]:
    """Calls that follow a save in the background, which begins later on one rank, and a version that is sent there."""
    model, problems, original = build("fsdp", 2), list[str](), PendingSave._run
    write(model, 1)

    def run_later(save: PendingSave, *number: int) -> epload.SaveReport:
        time.sleep(0.5 * rank)
        return original(save, *number)

    late = mock.patch.object(PendingSave, "_run", run_later)
    with sending(meeting, model, 1, timeout=30, snapshot="host") as sender, late:
        epload.save_async(model, f"{folder}/1")
        sender.send_weights(1)
        epload.save_async(model, f"{folder}/2")
        buffer = torch.full((3,), float(rank))
        epload.coalesced_bcast([buffer], src=1)
        problems += [] if buffer.eq(1).all() else ["broadcast"]
        write(model, 2)
        sender.send_weights(2, wait=False)
        epload.save(model, f"{folder}/3")
        write(model, 3)
        sender.wait()
        epload.save_async(model, f"{folder}/4")
        again = build("tp1", 2)
        for name, version in (("1", 1), ("2", 1), ("3", 2), ("4", 3)):
            epload.load(again, f"{folder}/{name}", progress=False)
            check(again, version)
    return problems


def infer(rank: int, meeting: Meeting) -> None:
    model = build("plain", 1)
    with receiving(meeting, model, timeout=30) as receiver:
        for version in (1, 2):
            time.sleep(0.5)
            take(receiver)
            check(model, version)


def test_calls_wait_for_what_runs_in_the_background(tmp_path: Path) -> None:
    assert run([Job(2, train, (str(tmp_path),)), Job(1, infer)])[0] == [[], []]


@on_ranks(2)
def test_what_is_made_or_called_wrongly_waits_too(rank: int, tmp_path: Path) -> list[str]:
    """Makes a sender, and calls load wrongly, while a save begins on one rank only once that says that a call waits for it."""
    model, original, problems, messages = build("fsdp", 2), PendingSave._run, list[str](), list[str]()

    def said(path: Path | str) -> bool:
        return any(f"background: save_async() to {path}" in message for message in messages)

    def run_later(save: PendingSave, *number: int) -> epload.SaveReport:
        until = time.monotonic() + 30 * rank
        while not said(save._path) and time.monotonic() < until:
            time.sleep(0.01)
        return original(save, *number)

    with (
        mock.patch.object(PendingSave, "_run", run_later),
        mock.patch("epload.ranks.single_flight._PATIENCE", 0.1),
        mock.patch.object(logger, "warning", lambda text, *values: messages.append(text % values)),
    ):
        first = epload.save_async(model, f"{tmp_path}/1")
        problems += not_refused_by_all(lambda: epload.load(model, f"{tmp_path}/1", readers="none"), "ValueError", "readers")
        second = epload.save_async(model, f"{tmp_path}/2")
        with epload.WeightSender(model, ("127.0.0.1", 0), receivers=1):
            problems += [] if second.done() else ["a sender was made while a save ran"]
    first.wait(), second.wait()
    if rank == 1 and not said(f"{tmp_path}/2"):
        problems.append(f"no warning: {messages}")
    return problems


def test_a_child_of_a_fork_is_in_no_call_of_its_parent() -> None:
    topology, entered, over = Topology([[0]], None, 0, Control(None, (0,), 0)), threading.Event(), threading.Event()

    def call() -> None:
        with exclusive(Call("save()", topology)):
            entered.set()
            over.wait(60)

    thread = threading.Thread(target=call)
    thread.start()
    assert entered.wait(60)
    if (child := os.fork()) == 0:
        code = 1
        try:
            with exclusive(Call("load()", topology)):
                code = 0
        finally:
            os._exit(code)
    over.set()
    thread.join()
    assert os.waitpid(child, 0)[1] == 0


def test_two_copies_for_saves_in_the_background_share_no_memory() -> None:
    """Two threads may begin one at once, of which one is refused later."""
    with mock.patch.object(run_module, "_pinned", [torch.zeros(3)]):
        first = run_module._copy([torch.ones(3)])
        second = run_module._copy([torch.full((3,), 2.0)])
    assert [first[0].tolist(), second[0].tolist()] == [[1.0] * 3, [2.0] * 3]
