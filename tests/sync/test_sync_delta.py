"""Versions that are sent as changes: every bit against the full tensors, whoever takes part and whatever fails."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from epload.planning.buckets import HEADER_BYTES
from epload.ranks.messages import read_if_set
from epload.sync.changes import ReceivedChanges
from epload.sync.changes_route import ChangesRoute
from epload.sync.handing_on import WAITING, Offers
from epload.sync.participants import EngineRank
from support.accelerator import DEVICE
from support.jobs import Job, Meeting, run
from support.small_syncs import attempt, many_waves, receiving, sending
from support.sync_jobs import jobs_of, receive, send
from support.synced_models import DENSITY, INTEGER_OF, SHAPES, build, check_bits, tensor_of, write_bits


def changed_elements(version: int, dtype: torch.dtype, since: int | None = None) -> int:
    bits = INTEGER_OF[dtype.itemsize]
    pairs = [(tensor_of(name, version, dtype), tensor_of(name, since or version - 1, dtype)) for name in SHAPES]
    return sum(int((a.view(bits) != b.view(bits)).sum()) for a, b in pairs)


HALF, FLOAT = torch.bfloat16, torch.float32


@contextmanager
def threads() -> Iterator[None]:
    """A sender compares with several threads, as it does in a job; ranks of tests have one else."""
    torch.set_num_threads(4)
    yield


FSDP, ON_DEVICE, TP0 = ("fsdp", 2, None, "cpu"), ("fsdp", 2, None, DEVICE), ("tp0", 2, None, "cpu", "host")
PLAIN, FULL = ("plain", 1, None, "cpu", "host"), ("full", 1, None, "cpu", "host")


@pytest.mark.parametrize(
    ("trainer", "engines", "dtype", "verify", "options"),
    [
        (FSDP, [TP0], HALF, False, {"delta": "always"}),
        (("fsdp", 3, [[0, 1], [2]], "cpu"), [("tp1", 2, [[0], [1]], "cpu", "host")], FLOAT, True, {"delta": "auto"}),
        (("tp1", 2, None, "cpu"), [("fsdp", 2, None, "cpu", "host"), FULL], HALF, False, {"delta": "auto"}),
        (("plain", 1, None, "cpu"), [("tp0", 2, None, "cpu", "none"), PLAIN], HALF, True, {"delta": "auto"}),
        (FSDP, [TP0], FLOAT, False, {"delta": "auto", "snapshot": "host"}),
        (ON_DEVICE, [("tp1", 2, None, DEVICE, "host")], HALF, True, {"delta": "auto"}),
        (ON_DEVICE, [("plain", 1, None, DEVICE, "none"), TP0], FLOAT, False, {"delta": "always", "snapshot": "host"}),
    ],
    ids=["always", "two nodes", "two engines", "one in place", "snapshot", "devices", "devices, one in place"],
)  # fmt: skip
@pytest.mark.usefixtures("fake_device")
def test_versions_arrive_bit_for_bit(trainer: Any, engines: Any, dtype: Any, verify: bool, options: Any) -> None:
    versions = range(1, 7)
    sends = partial(send, versions=versions, dtype=dtype, write=write_bits, verify=verify, within=threads, **options)
    # A version that is not committed is the base of the next one, too.
    receives = partial(receive, versions=versions, dtype=dtype, check=check_bits, verify=verify, uncommitted=3)
    jobs = jobs_of(trainer, engines, sends, receives, "nccl" if trainer[-1] != "cpu" else "")
    for sent in run(jobs)[0]:
        assert "committed no version" in sent[0].why_full
        for version in versions[1:]:
            sparse = DENSITY[version] <= 0.3 or options["delta"] == "always"
            assert sent[version - 1].changed == (changed_elements(version, dtype) if sparse else None)
            assert sparse or "50%" in sent[version - 1].why_full
            assert sent[version - 1].transport == ("host" if sparse else sent[0].transport)


def changing_trainer(
    rank: int, meeting: Meeting, make: Callable[[], nn.Module], waits: dict[int, str], receivers: int = 3, versions: int = 7,
    write: Callable[[nn.Module, int], None] = write_bits, hands_on: bool = False, delta: str = "always", **options: Any,
) -> list[tuple[str, Any]]:  # fmt: skip
    """Sends versions to engines that come, go and fail. ``waits``: events before a version, after which an engine waits for it if
    nobody hands the last one on."""
    with many_waves(), nullcontext() if hands_on else mock.patch.object(Offers, "offer"):
        model, outcomes = make(), []
        with sending(meeting, model, receivers, timeout=30, delta=delta, **options) as sender:
            for version in range(1, versions + 1):
                for event in waits.get(version, "").split():
                    meeting.hear(event)
                while version in waits and not hands_on and rank == 0 and not read_if_set(sender._store, WAITING):
                    time.sleep(0.01)
                write(model, version)
                outcomes.append(attempt(partial(sender.send_weights, version)))
                meeting.say(f"tried-{version}")
    return outcomes


def changing_engine(
    rank: int, meeting: Meeting, layout: str, name: str, after: str, last: int, fails_in: int, dtype: torch.dtype,
    source: torch.dtype | None = None,
) -> dict[int, Any]:  # fmt: skip
    """Joins after an event, and receives until a version; one of them fails here. Every version that is received is whole."""
    with many_waves():
        if after:
            meeting.hear(after)
        model, reports = build(layout, 2 if layout != "plain" else 1, dtype), {}
        version = 0
        engine = EngineRank(name, rank, 2 if layout != "plain" else 1)
        with receiving(meeting, model, timeout=30, node=name, engine=engine) as receiver:
            meeting.say(f"{name}-{rank}")
            while version < last:
                failing = mock.patch.object(ReceivedChanges, "unpack", side_effect=RuntimeError("a broken receiver"))
                with failing if version + 1 == fails_in else nullcontext():
                    text, sent = attempt(receiver.receive_weights)
                version = version + 1 if text else receiver.staged
                reports[version] = sent
                if not text:
                    receiver.commit()
                    check_bits(model, version, source)
    return reports


@pytest.mark.parametrize(
    ("layout", "snapshot", "delta"),
    [("fsdp", "none", "always"), ("fsdp", "host", "always"), ("plain", "host", "always"), ("plain", "none", "auto")],
)
def test_engines_that_come_and_go_and_fail_leave_the_others_their_base(layout: str, snapshot: str, delta: str) -> None:
    """An engine joins before version 3. Version 5 fails in another, which leaves after version 6; it is the first one, so
    that those that stay have other ranks then. A scalar has replicas with fsdp; a snapshot has that of version 5. Version 6
    changes so much that it comes in full with "auto"."""
    sends = partial(changing_trainer, snapshot=snapshot, delta=delta)
    keeps = delta == "always" and (layout == "plain" or snapshot == "none")
    jobs = [
        Job(2 if layout == "fsdp" else 1, sends, (partial(build, layout, 2, HALF), {3: "z-0"})),
        Job(2, changing_engine, ("tp0", "m", "", 7, 0, HALF)),
        Job(1, changing_engine, ("plain", "a", "", 6, 5, HALF)),
        Job(1, changing_engine, ("plain", "z", "tried-2", 7, 0, HALF)),
    ]
    trainer, staying, leaving, late = run(jobs)
    assert min(late[0]) == 3
    for of_rank in trainer:
        texts, reports = zip(*of_rank, strict=True)
        assert [bool(text) for text in texts] == [False] * 4 + [True, False, False], texts
        assert "a broken receiver" in texts[4]
        as_changes = [report and report.changed is not None for report in reports]
        assert as_changes == [False, True, True, True, None, keeps, True]
        assert "1 of 3 receiving nodes" in reports[2].why_full
    expected = {1: None, **{version: changed_elements(version, HALF) for version in (2, 3, 4, 7)}}
    expected[6] = changed_elements(6, HALF, since=4) if keeps else None
    for of_rank in (*staying, *leaving):
        assert {version: sent.changed for version, sent in of_rank.items() if sent} == {
            version: changed for version, changed in expected.items() if version <= max(of_rank)
        }
    full, *others = [sent.wire_bytes for sent in late[0].values() if sent]
    assert [nbytes < full for nbytes in others].count(False) == (not keeps)


def test_a_base_in_bf16_is_none_for_weights_that_come_in_fp32_once_an_engine_needs_them() -> None:
    jobs = [Job(2, changing_trainer, (partial(build, "fsdp", 2, FLOAT), {3: "z-0"}, 2))]
    jobs.append(Job(2, changing_engine, ("tp0", "m", "", 7, 0, HALF, FLOAT)))
    for of_rank in run([*jobs, Job(1, changing_engine, ("plain", "z", "tried-2", 7, 0, FLOAT))])[0]:
        texts, reports = zip(*of_rank, strict=True)
        assert not any(texts), texts
        assert [report.changed is not None for report in reports].count(False) in (1, 2)
        assert all(report.changed for report in reports[4:])


def impatient_trainer(rank: int, meeting: Meeting) -> None:
    """Changes the model once a version has been compared, while its changes are sent."""
    with many_waves():
        model, move = build("fsdp", 2, HALF), ChangesRoute.move
        with sending(meeting, model, 2, timeout=30, delta="always") as sender:
            for version in range(1, 6):
                write_bits(model, version)

                def moving(*args: Any, following: int = version + 1) -> None:
                    write_bits(model, following)
                    move(*args)

                with mock.patch.object(ChangesRoute, "move", moving):
                    report = sender.send_weights(version)
                assert report.changed == (changed_elements(version, HALF) if version > 1 else None)


def test_what_changes_while_changes_are_sent_comes_with_the_next_version() -> None:
    """The base becomes what receivers make of theirs, and not what the model has by then."""
    receives = partial(receive, versions=range(1, 6), dtype=HALF, check=check_bits)
    run([Job(2, impatient_trainer), Job(2, receives, ("tp0", 2))])


def neighboring_engine(rank: int, meeting: Meeting, name: str, node: str) -> None:
    """An engine that receives three versions; or leaves after the first, which it commits later."""
    with many_waves():
        model = build("plain", 1, HALF)
        with receiving(meeting, model, timeout=30, node=node, engine=EngineRank(name)) as receiver:
            for version in (1,) if name == "leaving" else (1, 2, 3):
                receiver.receive_weights(version)
                if name == "leaving":
                    receiver._rendezvous.close()
                    meeting.say("left")
                    meeting.hear("tried-2")
                receiver.commit()
                check_bits(model, version)
                if name == "changed" and version == 1:  # registered anew, behind the others
                    embed = model.embed
                    del model.embed
                    model.embed = nn.Parameter(torch.zeros_like(embed))


def test_a_version_stays_for_the_ranks_that_have_it_and_is_no_base_for_other_tensors() -> None:
    """One of two engines that share memory is dropped, and commits its version when the other has the next one. A third has
    other tensors when the ranks find each other anew."""
    sends = partial(changing_trainer, hands_on=True)
    jobs = [Job(1, sends, (partial(build, "plain", 1, HALF), {2: "left"}, 3, 3))]
    jobs += [Job(1, neighboring_engine, each) for each in (("leaving", ""), ("neighbor", ""), ("changed", "other"))]
    trainer, *_ = run(jobs)
    texts, reports = zip(*trainer[0], strict=True)
    assert not any(texts)
    assert "2 of 2 receiving nodes" in reports[1].why_full
    assert reports[2].changed == changed_elements(3, HALF)


REPLICAS = "big"
"""A tensor of which each rank of a sender has a replica. They differ, as no two of them should."""


def replica(rank: int, version: int) -> Tensor:
    """The second rank's does not change."""
    values = torch.arange(torch.Size(SHAPES[REPLICAS]).numel(), dtype=FLOAT).reshape(SHAPES[REPLICAS])
    return values + (version / 2 if rank == 0 else 100_000)


def make_replicas() -> nn.Module:
    model, mesh = nn.Module(), init_device_mesh("cpu", (2,))
    values = distribute_tensor(torch.zeros(SHAPES[REPLICAS]), mesh, [Replicate()], src_data_rank=None)
    model.register_buffer(REPLICAS, values)
    return model


def write_replica(model: nn.Module, version: int) -> None:
    model.get_buffer(REPLICAS).to_local().copy_(replica(dist.get_rank(), version))


def replicated_engine(rank: int, meeting: Meeting, whole: bool) -> None:
    """Receives a tensor on one rank or, from version 3 or 4 on, a half on each of two. The memory of the one rank is damaged
    before version 6."""
    with many_waves():
        model, version = nn.Module(), 0
        values = torch.zeros(SHAPES[REPLICAS])
        if not whole:
            meeting.hear("tried-2")
            values = distribute_tensor(values, init_device_mesh("cpu", (2,)), [Shard(0)], src_data_rank=None)
        model.register_buffer(REPLICAS, values)
        node = "one" if whole else f"other {rank}"
        with receiving(meeting, model, timeout=30, node=node, verify=True) as receiver:
            while version < 7:
                text, _ = attempt(receiver.receive_weights)
                if text:
                    assert version == 5
                    assert "is not what the sender has" in text
                    version = 6
                    continue
                version = receiver.staged
                receiver.commit()
                meeting.say("one" if whole else f"joined-{rank}")
                if whole:
                    assert ((values == replica(0, version)) | (values == replica(1, version))).all()
                    if version == 5:
                        for bucket in receiver._generation.node_version.buckets.values():
                            bucket[HEADER_BYTES] ^= 1


def test_a_base_of_another_replica_and_one_that_is_damaged_are_replaced() -> None:
    """An engine joins before version 3, after which other ranks of the sender send parts of the tensor."""
    sends = partial(changing_trainer, write=write_replica, hands_on=True, verify=True)
    jobs = [Job(2, sends, (make_replicas, {3: "joined-0 joined-1"}, 1))]
    for of_rank in run([*jobs, *(Job(count, replicated_engine, (count == 1,)) for count in (1, 2))])[0]:
        texts, reports = zip(*of_rank, strict=True)
        assert [bool(text) for text in texts] == [False] * 5 + [True, False], texts
        changed = [report and report.changed is not None for report in reports]
        assert changed[:5] == [False, True, False, True, True]
        assert "1 of 3 receiving nodes" in reports[6].why_full
