"""Receivers that copy versions straight out of the device memory of senders on their machine, against the full tensors."""

from __future__ import annotations

import os
from contextlib import nullcontext
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch

from epload.native import ops
from epload.transfer.context import TransferContext
from support import fakedev
from support.accelerator import DEVICE
from support.device_syncs import CCL, move_to_cpu, receive_late, send_late, send_versions
from support.jobs import Job, Meeting, run
from support.small_syncs import many_waves, outcome, receiving
from support.sync_jobs import VERSIONS, receive, send
from support.synced_models import SHAPES, build

pytestmark = pytest.mark.usefixtures("fake_device")

setup = partial(fakedev.setup, "nccl")
TOTAL = 4 * sum(torch.Size(shape).numel() for shape in SHAPES.values())
on_device, into_device = partial(send, where=DEVICE), partial(receive, where=DEVICE)


@pytest.mark.parametrize(
    ("trainer", "engines", "dtype", "verify", "stage"),
    [
        (("fsdp", 3), [("tp1", 2)], torch.bfloat16, True, "device"),
        (("tp1", 2), [("plain", 1), ("fsdp", 2)], torch.float32, True, "none"),
        (("plain", 1), [("tp0", 3)], torch.bfloat16, True, "host"),
        (("plain", 2), [("plain", 1)], torch.float32, True, "device"),
    ],
    ids=["narrower", "two engines", "one to three", "replicas"],
)
def test_versions_are_copied_from_the_sender(trainer: Any, engines: Any, dtype: Any, verify: bool, stage: str) -> None:
    layout, world = trainer
    receivers = sum(count for _, count in engines)
    jobs = [Job(world, partial(on_device, verify=verify), (layout, world, receivers), setup=setup)]
    receives = partial(into_device, dtype=dtype, stage=stage, verify=verify)
    jobs += [Job(count, receives, (other, count), setup=setup) for other, count in engines]
    sent, *received = run(jobs)
    reports = [report for job in (sent, *received) for of_rank in job for report in of_rank]
    assert {(report.transport, report.wire_bytes, report.not_pulled) for report in reports} == {("ipc", 0, "")}
    for i in range(len(VERSIONS)):
        # All receivers are one node, for which a sender counts once what several of them copy.
        assert sum(of_rank[i].pulled for of_rank in sent) == TOTAL
    if stage == "host":  # ranks of a node divide what they copy into its memory
        assert sum(of_rank[0].pulled for job in received for of_rank in job) == TOTAL * dtype.itemsize // 4
    elif engines[0] == ("plain", 1):
        assert received[0][0][0].pulled == TOTAL
    if layout == "plain" and world == 2:
        of_each = [of_rank[0].pulled for of_rank in sent]
        assert min(of_each) > 0.4 * TOTAL, "replicas take turns"


@pytest.mark.parametrize(("stage", "delta"), [("host", "off"), ("none", "off"), ("host", "always")])
def test_what_is_not_within_reach_moves(stage: str, delta: str) -> None:
    """The trainer is on two machines, an engine on each and one on a third. What is within reach is never sent as changes. Those
    that keep the last version hand it on to a fourth engine."""
    last, until = VERSIONS[-1], f"d-{VERSIONS[-1]}" if stage == "host" else ""
    sends = partial(on_device, machines=("a", "a", "b"), verify=True, delta=delta, until=until)
    jobs = [Job(3, sends, ("fsdp", 3, 4), setup=setup)]
    receives = partial(into_device, stage=stage, verify=True)
    for layout, count, machine in (("tp0", 2, "a"), ("plain", 1, "b"), ("plain", 1, "c")):
        jobs.append(Job(count, partial(receives, machine=machine, until=until), (layout, count), setup=setup))
    if until:
        joins = partial(receives, machine="d", versions=(last,), after=f"c-{last}")
        jobs.append(Job(1, joins, ("plain", 1), setup=setup))
    sent, on_a, on_b, on_c, *_ = run(jobs)
    for i in range(len(VERSIONS)):
        pulled = [sum(of_rank[i].pulled for of_rank in job) for job in (on_a, on_b, on_c)]
        assert 0 < pulled[1] < pulled[0] < TOTAL
        assert pulled[2] == 0
        reports = [of_rank[i] for job in (sent, on_a, on_b, on_c) for of_rank in job]
        by_changes = delta == "always" and i > 0
        assert all(report.transport == ("host" if by_changes else CCL) and report.wire_bytes > 0 for report in reports)
        assert on_c[0][i].wire_bytes > TOTAL > on_b[0][i].wire_bytes > on_a[0][i].wire_bytes


def other_memory(model: torch.nn.Module) -> None:
    """Gives the model's parameters other memory, and what they had back to the system; as a trainer that moves its model to the
    host and back."""
    move_to_cpu(model)
    torch.accelerator.empty_cache()
    for name, parameter in list(model.named_parameters()):
        setattr(model, name, torch.nn.Parameter(parameter.detach().to(DEVICE)))


@pytest.mark.parametrize("stage", ["host", "none"])
def test_a_trainer_whose_memory_is_elsewhere_each_time(stage: str) -> None:
    """Receivers keep none of what it has freed, and open the new one."""
    jobs = [Job(1, partial(on_device, between=other_memory), ("plain", 1, 2), setup=setup)]
    jobs.append(Job(2, partial(into_device, stage=stage), ("tp0", 2), setup=setup))
    assert [report.transport for job in run(jobs) for of_rank in job for report in of_rank] == ["ipc"] * 9


def nothing_opens() -> Any:
    return mock.patch.object(ops, "open_memory", side_effect=RuntimeError("another IPC namespace"))


@pytest.mark.parametrize(
    ("options", "shares", "broken", "transport", "why"),
    [
        ({}, False, nullcontext, CCL, "memory of rank 0 cannot be shared: invalid argument: CUDA shares what cudaMalloc"),
        ({}, True, nothing_opens, CCL, "cannot open rank 0's: another IPC namespace"),
        ({"transport": "host"}, True, nullcontext, "host", ""), ({"snapshot": "host"}, True, nullcontext, "host", ""),
    ],
    ids=["expandable segments", "containers", "host transport", "snapshot"],
)  # fmt: skip
def test_what_cannot_be_opened_moves(options: Any, shares: bool, broken: Any, transport: str, why: str) -> None:
    trainers = partial(fakedev.setup, "nccl", shares=shares)
    jobs = [Job(2, partial(on_device, **options), ("fsdp", 2, 1), setup=trainers)]
    jobs.append(Job(1, partial(into_device, stage="none", within=broken), ("plain", 1), setup=setup))
    for of_rank in (of_rank for job in run(jobs) for of_rank in job):
        assert [(report.transport, report.pulled) for report in of_rank] == [(transport, 0)] * 3
        assert all(why in report.not_pulled if why else not report.not_pulled for report in of_rank), of_rank


def no_longer_shared(model: torch.nn.Module) -> None:
    os.environ["EPLOAD_TEST_NOT_SHARED"] = "1"


@pytest.mark.parametrize(("between", "transport"), [(no_longer_shared, CCL), (move_to_cpu, "host")])
def test_memory_that_cannot_be_opened_any_more(between: Any, transport: str) -> None:
    jobs = [Job(1, partial(on_device, between=between), ("plain", 1, 1), setup=setup)]
    jobs.append(Job(1, partial(into_device, stage="device"), ("plain", 1), setup=setup))
    for (reports,) in run(jobs):
        assert [report.transport for report in reports] == ["ipc", transport, transport]


def receive_flipped(rank: int, meeting: Meeting, pulls: bool) -> str:
    unpack, check = ops.unpack, TransferContext.verify

    def flips_target(bucket: torch.Tensor, targets: Any, copies: torch.Tensor) -> None:
        unpack(bucket, targets, copies)
        max(targets, key=torch.Tensor.numel).view(-1)[7] += 1

    def flips_bucket(self: TransferContext, number: int, bucket: torch.Tensor) -> None:
        bucket[200] ^= 0x40
        check(self, number, bucket)

    patches = mock.patch.object(TransferContext, "verify", flips_bucket), mock.patch.object(ops, "unpack", flips_target)
    model, stage = build("plain", 1, where=DEVICE), "device" if pulls else "host"
    with many_waves(), patches[pulls], receiving(meeting, model, verify=True, stage=stage) as receiver:
        text = outcome(receiver.receive_weights)
        assert receiver.version is None
        return text


@pytest.mark.parametrize(("shares", "expected"), [(True, "memory of rank 0 differs from it"), (False, "its checksum is not")])
def test_a_bit_that_changes_on_its_way_is_found(shares: bool, expected: str) -> None:
    setup = partial(fakedev.setup, "nccl", shares=shares)
    sends = partial(send_versions, versions=1, verify=True, waves=many_waves)
    ((sent,),), (received,) = run([Job(1, sends, setup=setup), Job(1, receive_flipped, (shares,), setup=setup)])
    assert expected in received
    assert sent.error == received


@pytest.mark.parametrize(
    ("shares", "where", "stage"),
    [(False, "cpu", "host"), (False, DEVICE, "none"), (True, DEVICE, "host"), (True, DEVICE, "device"), (True, DEVICE, "none")],
)  # fmt: skip
def test_what_the_caller_has_queued_comes_before(shares: bool, where: str, stage: str) -> None:
    setup = partial(fakedev.setup, "nccl", shares=shares)
    _, received = run([Job(1, send_late, setup=setup), Job(1, receive_late, (where, stage), setup=setup)])
    assert received == [True]
