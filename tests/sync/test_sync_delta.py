"""Versions that are sent as changes: every bit against the full tensors, whoever takes part and whatever fails."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import cache, partial
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import epload
from epload.sync.changes import ReceivedChanges
from epload.sync.participants import EngineRank
from support import checks, fakedev
from support.accelerator import DEVICE
from support.jobs import Job, Meeting, run
from support.small_model import local_of
from support.small_syncs import many_waves, outcome
from support.synced_models import SHAPES, build

INTEGER_OF = {2: torch.int16, 4: torch.int32}
DENSITY = {1: 1.0, 2: 0.02, 3: 0.0, 4: 0.3, 5: 0.001, 6: 0.9, 7: 0.02}
"""The share of elements that each version changes."""


@cache
def tensor_of(name: str, version: int, dtype: torch.dtype) -> Tensor:
    """Random bits, NaN of every payload and -0.0 among them; of which a version changes some."""
    generator = torch.Generator().manual_seed(1000 * version + list(SHAPES).index(name))
    bits = INTEGER_OF[dtype.itemsize]
    limits = torch.iinfo(bits)
    count = torch.Size(SHAPES[name]).numel()
    fresh = torch.randint(limits.min, limits.max, (count,), dtype=bits, generator=generator)
    if version > 1:
        change = torch.rand(count, generator=generator) < DENSITY[version]
        fresh = torch.where(change, fresh, tensor_of(name, version - 1, dtype).view(bits).flatten())
    return fresh.view(dtype).reshape(SHAPES[name])


def changed_elements(version: int, dtype: torch.dtype) -> int:
    bits = INTEGER_OF[dtype.itemsize]
    pairs = [(tensor_of(name, version, dtype), tensor_of(name, version - 1, dtype)) for name in SHAPES]
    return sum(int((a.view(bits) != b.view(bits)).sum()) for a, b in pairs)


def write_bits(model: nn.Module, version: int) -> None:
    for name, parameter in model.named_parameters():
        local = checks.local_of(parameter.detach())
        local.copy_(local_of(tensor_of(name, version, local.dtype), parameter))


def differing_bits(model: nn.Module, version: int) -> list[str]:
    names = []
    for name, parameter in model.named_parameters():
        local = checks.local_of(parameter.detach()).cpu()
        bits = INTEGER_OF[local.dtype.itemsize]
        if not torch.equal(local.view(bits), local_of(tensor_of(name, version, local.dtype), parameter).view(bits)):
            names.append(name)
    return names


class Sent(NamedTuple):
    """Describes what the report of a version says."""

    wire_bytes: int
    changed: int | None
    why_full: str

    @classmethod
    def of(cls, report: epload.SyncReport | None) -> Sent:
        assert report is not None
        return cls(report.wire_bytes, report.changed, report.why_full)


def send(
    rank: int, meeting: Meeting, layout: str, world: int, receivers: int, versions: int, dtype: torch.dtype,
    nodes: Any = None, where: str = "cpu", snapshot: str = "none", **options: Any,
) -> list[Sent]:  # fmt: skip
    with many_waves(lease_seconds=10):
        model = build(layout, world, dtype, where)
        topology = epload.Topology.from_nodes(nodes) if nodes else None
        reports = []
        with epload.WeightSender(
            model, ("127.0.0.1", 0), receivers=receivers, topology=topology, timeout=60, snapshot=snapshot, **options
        ) as sender:
            if rank == 0:
                meeting.say("address", sender.address)
            for version in range(1, versions + 1):
                write_bits(model, version)
                report = sender.send_weights(version, wait=snapshot == "none")
                if snapshot == "host":
                    write_bits(model, 7 - version)  # another version, which must not be sent
                    report = sender.wait()
                reports.append(Sent.of(report))
    return reports


def receive(
    rank: int, meeting: Meeting, layout: str, world: int, versions: int, dtype: torch.dtype, nodes: Any = None,
    where: str = "cpu", stage: str = "host", **options: Any,
) -> list[Sent]:  # fmt: skip
    with many_waves(lease_seconds=10):
        topology = epload.Topology.from_nodes(nodes) if nodes else None
        model = build(layout, world, dtype, where) if layout != "full" else None
        reports = []
        with epload.WeightReceiver(
            model, meeting.hear("address"), topology=topology, timeout=60, stage=stage, **options
        ) as receiver:
            for version in range(1, versions + 1):
                reports.append(Sent.of(receiver.receive_weights(version)))
                if model is None:
                    for name, tensor in receiver.tensors():
                        bits = INTEGER_OF[tensor.dtype.itemsize]
                        assert torch.equal(tensor.view(bits), tensor_of(name, version, tensor.dtype).view(bits)), name
                else:
                    if version != 3:  # a version that is not committed is the base of the next one, too
                        receiver.commit()
                        assert differing_bits(model, version) == []
    return reports


HALF, FLOAT = torch.bfloat16, torch.float32
FSDP, PLAIN, FULL = ("fsdp", 2, None, "cpu"), ("plain", 1, None, "cpu", "host"), ("full", 1, None, "cpu", "host")


@pytest.mark.parametrize(
    ("trainer", "engines", "dtype", "verify", "options"),
    [
        (FSDP, [("tp0", 2, None, "cpu", "host")], HALF, False, {"delta": "always"}),
        (("fsdp", 3, [[0, 1], [2]], "cpu"), [("tp1", 2, [[0], [1]], "cpu", "host")], FLOAT, True, {"delta": "auto"}),
        (("tp1", 2, None, "cpu"), [("fsdp", 2, None, "cpu", "host"), FULL], HALF, False, {"delta": "auto"}),
        (("plain", 1, None, "cpu"), [("tp0", 2, None, "cpu", "none"), PLAIN], HALF, True, {"delta": "auto"}),
        (FSDP, [("tp0", 2, None, "cpu", "host")], FLOAT, False, {"delta": "auto", "snapshot": "host"}),
        (("fsdp", 2, None, DEVICE), [("tp1", 2, None, DEVICE, "host")], HALF, True, {"delta": "auto"}),
        (
            ("fsdp", 2, None, DEVICE), [("plain", 1, None, DEVICE, "none"), ("tp0", 2, None, "cpu", "host")],
            FLOAT, False, {"delta": "always", "snapshot": "host"},
        ),
    ],
    ids=["always", "two nodes", "two engines", "one in place", "snapshot", "devices", "devices, one in place"],
)  # fmt: skip
@pytest.mark.usefixtures("fake_device")
def test_every_version_arrives_bit_for_bit(
    trainer: Any, engines: list[Any], dtype: torch.dtype, verify: bool, options: Any
) -> None:
    versions = 6
    layout, world, nodes, where = trainer
    receivers = sum(count for _, count, *_ in engines)
    setup = partial(fakedev.setup, "nccl", shares=False) if where != "cpu" else None
    sends = partial(send, nodes=nodes, where=where, verify=verify, **options)
    jobs = [Job(world, sends, (layout, world, receivers, versions, dtype), setup=setup)]
    for other, count, other_nodes, there, stage in engines:
        receives = partial(receive, nodes=other_nodes, where=there, stage=stage, verify=verify)
        jobs.append(Job(count, receives, (other, count, versions, dtype), setup=setup))
    for sent in run(jobs)[0]:
        assert "committed no version" in sent[0].why_full
        for version in range(2, versions + 1):
            if DENSITY[version] <= 0.3 or options["delta"] == "always":
                assert sent[version - 1].changed == changed_elements(version, dtype)
            else:
                assert sent[version - 1].changed is None
                assert "50%" in sent[version - 1].why_full


def attempt(step: Callable[[], Any]) -> tuple[str, Sent | None]:
    """The error's text, or an empty string and the report."""
    reports: list[Any] = []
    text = outcome(lambda: reports.append(step()))
    return text, Sent.of(reports[0]) if reports else None


def changing_trainer(
    rank: int, meeting: Meeting, waits: dict[int, str], dtype: torch.dtype
) -> list[tuple[str, Sent | None]]:
    """Sends versions to engines that come, go and fail. ``waits``: what is waited for before a version."""
    with many_waves(lease_seconds=1.5):
        model, outcomes = build("fsdp", 2, dtype), []
        with epload.WeightSender(model, ("127.0.0.1", 0), receivers=3, timeout=30, delta="always") as sender:
            if rank == 0:
                meeting.say("address", sender.address)
            for version in range(1, 8):
                if version in waits:
                    meeting.hear(waits[version])
                write_bits(model, version)
                outcomes.append(attempt(partial(sender.send_weights, version)))
                if rank == 0:
                    meeting.say(f"tried-{version}")
    return outcomes


def changing_engine(
    rank: int, meeting: Meeting, layout: str, name: str, after: str, last: int, fails_in: int, dtype: torch.dtype
) -> dict[int, Sent | None]:
    """Joins after an event, and receives until a version; one of them fails here. Every version that is received is whole."""
    with many_waves(lease_seconds=1.5):
        if after:
            meeting.hear(after)
        model, reports = build(layout, 2 if layout != "plain" else 1, dtype), {}
        version = 0
        engine = EngineRank(name, rank, 2 if layout != "plain" else 1)
        with epload.WeightReceiver(model, meeting.hear("address"), timeout=30, node=name, engine=engine) as receiver:
            meeting.say(f"{name}-{rank}")
            while version < last:
                failing = mock.patch.object(ReceivedChanges, "unpack", side_effect=RuntimeError("a broken receiver"))
                with failing if version + 1 == fails_in else nullcontext():
                    text, sent = attempt(receiver.receive_weights)
                if text:
                    version += 1
                    reports[version] = None
                    continue
                assert receiver.staged is not None
                version, reports[receiver.staged] = receiver.staged, sent
                receiver.commit()
                assert differing_bits(model, version) == []
    return reports


def test_engines_that_come_and_go_and_fail_leave_the_others_their_base() -> None:
    """An engine joins before version 3 or 4. Version 5 fails in another, which leaves after version 6; it is the first one, so
    that those that stay have other ranks then."""
    jobs = [
        Job(2, changing_trainer, ({3: "z-0"}, HALF)),
        Job(2, changing_engine, ("tp0", "m", "", 7, 0, HALF)),
        Job(1, changing_engine, ("plain", "a", "", 6, 5, HALF)),
        Job(1, changing_engine, ("plain", "z", "tried-2", 7, 0, HALF)),
    ]
    trainer, staying, leaving, late = run(jobs)
    joined = min(late[0])
    assert joined in (3, 4)
    for of_rank in trainer:
        texts, reports = zip(*of_rank, strict=True)
        assert [bool(text) for text in texts] == [False] * 4 + [True, False, False], texts
        assert "a broken receiver" in texts[4]
        assert [report and report.changed is not None for report in reports] == [
            False,
            True,
            True,
            True,
            None,
            True,
            True,
        ]
        assert "1 of 3 receiving nodes" in reports[joined - 1].why_full
    between = sum(
        int((tensor_of(name, 6, HALF).view(torch.int16) != tensor_of(name, 4, HALF).view(torch.int16)).sum())
        for name in SHAPES
    )
    expected = {1: None, **{version: changed_elements(version, HALF) for version in (2, 3, 4, 7)}, 6: between}
    for of_rank in (*staying, *leaving):
        assert {version: sent.changed for version, sent in of_rank.items() if sent} == {
            version: changed for version, changed in expected.items() if version <= max(of_rank)
        }
    full, *others = [sent.wire_bytes for sent in late[0].values() if sent]
    assert all(nbytes < full for nbytes in others)


def damaged_engine(rank: int, meeting: Meeting) -> list[tuple[str, Sent | None]]:
    """Receives versions, of whose first one a bit changes in the node's memory."""
    with many_waves(lease_seconds=10):
        model, outcomes = build("plain", 1, HALF), []
        with epload.WeightReceiver(model, meeting.hear("address"), timeout=30, verify=True) as receiver:
            for version in (1, 2, 3, 4):
                outcomes.append(attempt(receiver.receive_weights))
                if not outcomes[-1][0]:
                    receiver.commit()
                    assert differing_bits(model, version) == []
                if version == 1:
                    assert receiver._generation is not None
                    assert receiver._generation.node_version is not None
                    receiver._generation.node_version.buckets[0][-1] ^= 1
    return outcomes


def damaged_trainer(rank: int, meeting: Meeting) -> list[tuple[str, Sent | None]]:
    with many_waves(lease_seconds=10):
        model, outcomes = build("plain", 1, HALF), []
        with epload.WeightSender(
            model, ("127.0.0.1", 0), receivers=1, timeout=30, delta="always", verify=True
        ) as sender:
            meeting.say("address", sender.address)
            for version in (1, 2, 3, 4):
                write_bits(model, version)
                outcomes.append(attempt(partial(sender.send_weights, version)))
    return outcomes


def test_a_base_whose_bits_have_changed_is_found_and_replaced() -> None:
    for (outcomes,) in run([Job(1, damaged_trainer), Job(1, damaged_engine)]):
        assert "the result is not what the sender has" in outcomes[1][0]
        assert [sent and sent.changed for _, sent in outcomes] == [None, None, None, changed_elements(4, HALF)]
        assert not any(text for text, _ in (outcomes[0], *outcomes[2:]))
