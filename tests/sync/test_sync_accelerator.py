"""Models on devices whose memory other processes cannot open: communicators, streams, and models that move."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

import epload
from epload.core import dtypes
from epload.core.copy_table import CopyTable
from epload.planning.waves import Wave
from epload.ranks.groups import Group
from epload.sync.device_route import DeviceRoute
from epload.sync.devices import DeviceAccess, link_obstacle, share_memory
from epload.transfer.shards import Shards
from support import fakedev
from support.accelerator import DEVICE
from support.device_syncs import CCL, move_to_cpu, send_versions
from support.jobs import Job, Meeting, run
from support.on_ranks import on_ranks
from support.small_syncs import attempt, many_waves, receiving, take
from support.sync_jobs import receive, send
from support.synced_models import build, check
from support.tensor_classes import Halved

pytestmark = pytest.mark.usefixtures("fake_device")


def test_which_ranks_reach_each_other_from_their_devices() -> None:
    first = DeviceAccess(kind="cuda nccl 2.27.5", identity=("slot-1", "GPU-1"))
    assert link_obstacle([first, DeviceAccess(kind="cuda nccl 2.27.5", identity=("slot-2", "GPU-2"))]) == ""
    for kind, identity, expected in (
        ("cuda nccl 2.27.5", ("GPU-1",), "ranks 0 and 1 use one device"),
        ("cuda nccl 2.27.5", ("slot-1", "MIG-2"), "ranks 0 and 1 use one device"),
        ("cuda nccl 2.26.2", (), "rank 0 has cuda nccl 2.27.5, rank 1 cuda nccl 2.26.2"),
        ("", (), "rank 1 has tensors elsewhere"),
    ):
        assert link_obstacle([first, DeviceAccess(kind=kind, identity=identity)]).startswith(expected)


def test_memory_that_does_not_hold_the_values_is_not_shared() -> None:
    """Dequantized copies are freed after the op that would publish their memory."""
    for tensor, text in (
        (Halved(torch.ones(2)), "hands out copies"),
        (torch.zeros(2, dtype=torch.complex64).conj(), "conjugated"),
    ):
        with pytest.raises(RuntimeError, match=text):
            share_memory([torch.ones(2), tensor])


def never_connects(rank: int, meeting: Meeting, dies: bool) -> tuple[bool, bool]:
    """Fails while the other member of its first group waits for it. Returns whether it is partially updated, has no version."""
    model = build("plain", 1, where=DEVICE)
    make = Group.make

    def fails(self: Group, *args: Any, **options: Any) -> None:
        if args[-1] is None:
            return make(self, *args, **options)
        time.sleep(1)
        if dies:
            os.kill(os.getpid(), signal.SIGKILL)
        raise RuntimeError("no communicator")

    with many_waves(), receiving(meeting, model, timeout=60, stage="none") as receiver:
        with mock.patch.object(Group, "make", fails), pytest.raises(epload.LoadError):
            receiver.receive_weights()
        return receiver.partially_updated, receiver.version is None


@pytest.mark.parametrize(("dies", "semantics"), [(True, "nccl"), (False, "hccl")], ids=["dies", "raises"])
def test_a_rank_that_does_not_come_to_a_communicator_is_an_error(dies: bool, semantics: str) -> None:
    setup = partial(fakedev.setup, semantics, lazy=True, shares=False)
    sends = Job(1, partial(send_versions, versions=1, waves=many_waves), setup=setup)
    (sent,), received = run([sends, Job(1, never_connects, (dies,), dying=(0,) if dies else (), setup=setup)])
    text, _, seconds, ended = sent[0]
    assert "rank 1 has exited" in text if dies else "no communicator" in text
    assert seconds < 30
    assert time.time() - ended < 30  # the sender closes while a thread of its waits up to 60 s for the communicator
    if not dies:
        assert received == [(False, True)]


def receive_moved(rank: int, meeting: Meeting, moves: bool, stage: str) -> list[Any]:
    model = build("plain", 1, where=DEVICE)
    found = []
    with many_waves(), receiving(meeting, model, timeout=20, stage=stage) as receiver:
        for version in (1, 2, 3):
            if moves and version == 2:
                move_to_cpu(model)
            error, report = attempt(partial(take, receiver))
            found.append("" if error else report.transport)
            if error:
                assert not receiver.partially_updated
            else:
                check(model, version)
    return found


@pytest.mark.parametrize(
    ("moves", "stage", "transports"),
    [
        ("trainer", "none", [CCL, "host", "host"]),
        ("engine", "host", [CCL] * 3),  # which leaves the device out
        ("engine", "none", [CCL, "", "host"]),
    ],
)
def test_a_model_that_moves_to_another_device(moves: str, stage: str, transports: list[str]) -> None:
    setup = partial(fakedev.setup, "nccl", shares=False)
    options: Any = {"before_second": move_to_cpu} if moves == "trainer" else {}
    jobs = [Job(1, partial(send_versions, waves=many_waves, **options), setup=setup)]
    (sent,), (received,) = run([*jobs, Job(1, receive_moved, (moves == "engine", stage), setup=setup)])
    assert [version.transport for version in sent] == received == transports
    assert "" not in transports or "no longer all on" in sent[1].error


def receive_offloaded(rank: int, meeting: Meeting) -> bool:
    """Returns whether a commit into parameters that FSDP offloads waits for the device."""
    model = build("plain", 1, where=DEVICE)
    policy = CPUOffloadPolicy(pin_memory=False)
    fully_shard(model, mesh=init_device_mesh(fakedev.NAME, (1,)), ignored_params={model.scale}, offload_policy=policy)
    with many_waves(), receiving(meeting, model) as receiver:
        receiver.receive_weights()
        with mock.patch.object(torch.accelerator, "synchronize", wraps=torch.accelerator.synchronize) as waits:
            receiver.commit()
    check(model, 1)
    return waits.called


def test_a_commit_waits_until_the_device_has_read_what_is_offloaded() -> None:
    setup = partial(fakedev.setup, "nccl", shares=False)
    sends = Job(1, partial(send_versions, versions=1, waves=many_waves), setup=setup)
    assert run([sends, Job(1, receive_offloaded, setup=setup)])[1] == [True]


@contextmanager
def slow(stream: str) -> Iterator[None]:
    """Whatever a wave has to do on a stream waits for a while, however soon the other streams are done."""
    move, timers = DeviceRoute.move, []

    def moved(self: DeviceRoute, wave: Wave) -> None:
        held = getattr(self._staging, stream)
        fakedev.hold(held)
        timers.append(threading.Timer(0.15, fakedev.release, [held]))
        timers[-1].start()
        move(self, wave)

    with mock.patch.object(DeviceRoute, "move", moved):
        yield
    for timer in timers:
        timer.join()


@pytest.mark.parametrize(
    ("slow_job", "stream", "stage"),
    [("trainer", "entry", "host"), ("trainer", "stream", "none"), ("engine", "forwarding", "host"), ("engine", "stream", "none")],
)  # fmt: skip
def test_no_stream_overtakes_another(slow_job: str, stream: str, stage: str) -> None:
    """A checksum would make the host wait for the stream, so that nothing is verified."""
    setup = partial(fakedev.setup, "nccl", shares=False)
    held = {slow_job: partial(slow, stream)}
    sends = partial(send, where=DEVICE, within=held.get("trainer", nullcontext))
    receives = partial(receive, where=DEVICE, stage=stage, nodes=[[0, 1], [2]], within=held.get("engine", nullcontext))
    jobs = [Job(2, sends, ("fsdp", 2, 3), setup=setup), Job(3, receives, ("tp0", 3), setup=setup)]
    for of_rank in (of_rank for job in run(jobs) for of_rank in job):
        assert [report.transport for report in of_rank] == [CCL] * 3


def on_device_1(job: Callable[..., Any], rank: int, meeting: Meeting, *args: Any, **options: Any) -> list[int]:
    """Returns the contexts that a job's syncs make, whose tensors are on ``fakedev:1``."""
    torch.accelerator.set_device_index(1)
    job(rank, meeting, *args, where=DEVICE.replace("0", "1"), versions=(1, 2), **options)
    return fakedev.contexts()


@pytest.mark.parametrize(
    ("options", "stage"), [({"transport": "host"}, "none"), ({"delta": "auto", "snapshot": "host"}, "host"), ({}, "host")]
)
def test_each_thread_uses_the_ranks_own_device(options: dict[str, Any], stage: str) -> None:
    setup = partial(fakedev.setup, "nccl", shares=False)
    sends, receives = partial(on_device_1, send, **options), partial(on_device_1, receive, stage=stage)
    assert run([Job(2, sends, ("fsdp", 2, 1), setup=setup), Job(1, receives, ("plain", 1), setup=setup)]) == [[[1]] * 2, [[1]]]


ELEMENTS = 1000


class Bucket:
    nbytes = 64 + 4 * ELEMENTS
    targets = (0,)
    copies = CopyTable(torch.tensor([[0, 64, dtypes.code(torch.float32), 1, 0, ELEMENTS, 1]]))


class Plan:
    buckets = (Bucket(),)
    largest = Bucket.nbytes

    def describe(self, numbers: object) -> str:
        return "a bucket"


@on_ranks(1, setup=fakedev.setup)
def test_nothing_arrives_after_a_failure(rank: int) -> list[str]:
    tensor, bucket = torch.zeros(ELEMENTS, device=DEVICE), torch.zeros(Bucket.nbytes, dtype=torch.uint8)
    shards = Shards(Plan(), [tensor], False, "rank 0", 1)
    bucket[64:].view(torch.float32).fill_(7.0)
    stream = shards._stream
    assert stream is not None
    torch.accelerator.synchronize()
    fakedev.hold(stream)
    threading.Timer(0.2, fakedev.release, [stream]).start()

    def fail() -> None:
        with shards.entered():
            shards.unpack(0, bucket)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    tensor.fill_(9.0)  # what a caller does who repairs it
    torch.accelerator.synchronize()
    stream.synchronize()
    return [f"holds {tensor[0].item()}"] if tensor[0].item() != 9.0 else []
