"""Versions that are copied out of a sender's memory: who reaches whom, what stays, and what an error leaves."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import epload
from epload.mapping import Convert, Mapping, Split
from epload.native import ops
from epload.sync.pulling import Puller, SenderMemory
from support import fakedev
from support.accelerator import DEVICE
from support.checks import all_fine
from support.device_syncs import CCL, mapped_of, on_machine, send_versions, topology_of
from support.jobs import Job, Meeting, run
from support.small_syncs import outcome, receiving, take
from support.sync_jobs import send_model
from support.synced_models import SHAPES, build, check, values, write

pytestmark = pytest.mark.usefixtures("fake_device")

setup = partial(fakedev.setup, "nccl")


def receive_on_two_machines(rank: int, meeting: Meeting, stage: str) -> list[str]:
    """One rank of the engine is on the trainer's machine; the parts that it wants are those of one sender."""
    with on_machine("ab"[rank]):
        model = build("tp0", 2, where=DEVICE)
        with receiving(meeting, model, topology=topology_of(("a", "b"), 2), stage=stage) as receiver:
            for version in (1, 2):
                report = take(receiver)
                check(model, version)
                if (report.pulled > 0) != (rank == 0):
                    return [f"rank {rank} pulled {report.pulled}"]
    return []


@pytest.mark.parametrize("stage", ["host", "none"])
def test_an_engine_of_which_one_rank_is_near(stage: str) -> None:
    """It needs nothing of one of the senders within reach."""
    jobs = [Job(2, send_versions, (2, 2, 2, "a"), setup=setup), Job(2, receive_on_two_machines, (stage,), setup=setup)]
    all_fine(run(jobs)[1])


class Padded(nn.Module):
    """An engine whose ``load_weights`` leaves rows of a parameter as they are."""

    def __init__(self) -> None:
        super().__init__()
        for name, shape in SHAPES.items():
            self.register_parameter(name, nn.Parameter(torch.full((64, 16) if name == "embed" else shape, 7.0)))

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        parameters = dict(self.named_parameters())
        for name, tensor in weights:
            target = parameters[name].detach()
            (target[:37] if name == "embed" else target).copy_(tensor)


def receive_beside_others(rank: int, meeting: Meeting, stage: str, kind: str) -> list[str]:
    wrong = []
    if kind == "padded":
        model: nn.Module = Padded().to(DEVICE)
        target: Any = epload.EngineModel(model)
    else:
        model = target = build("plain", 1, where=DEVICE)
        model.extra = nn.Parameter(torch.full((50, 50), 7.0, device=DEVICE))
    with receiving(meeting, target, stage=stage, strict=False) as receiver:
        for version in (1, 2):
            receiver.receive_weights()
            with torch.no_grad():
                others = model.embed[37:] if kind == "padded" else model.extra
                others.fill_(7.0 + version)  # it is the engine's own, also while a version waits
            receiver.commit()
            others = model.embed[37:] if kind == "padded" else model.extra
            if not (others.detach().cpu() == 7.0 + version).all():
                wrong.append(f"version {version} changes what the sender does not have")
            for name, shape in SHAPES.items():
                found = model.get_parameter(name).detach().cpu()
                if not torch.equal(found[: shape[0]] if shape else found, values(name, version)):
                    wrong.append(f"version {version}: {name}")
    return wrong


@pytest.mark.parametrize(("kind", "stage"), [("padded", "host"), ("own", "device"), ("padded", "none")])
def test_what_the_sender_does_not_have_stays(kind: str, stage: str) -> None:
    jobs = [Job(1, send_versions, (1, 1, 2), setup=setup), Job(1, receive_beside_others, (stage, kind), setup=setup)]
    all_fine(run(jobs)[1])


def receive_held(rank: int, meeting: Meeting, stage: str) -> None:
    """Commits on a stream that is busy, and receives the next version."""
    model = build("plain", 1, where=DEVICE)
    with receiving(meeting, model, stage=stage) as receiver:
        receiver.receive_weights()
        stream = torch.Stream(DEVICE)
        with stream:
            fakedev.hold(stream)
            opener = threading.Thread(target=lambda: (time.sleep(1), fakedev.release(stream)))
            opener.start()
            receiver.commit()
        receiver.receive_weights()
        opener.join()
        torch.accelerator.synchronize()
        check(model, 1)


@pytest.mark.parametrize("stage", ["host", "device"])
def test_a_commit_on_another_stream(stage: str) -> None:
    run([Job(1, send_versions, (1, 1, 2), setup=setup), Job(1, receive_held, (stage,), setup=setup)])


def receive_with_one_that_does_not_open(rank: int, meeting: Meeting, stage: str) -> list[Any]:
    model, found = build("plain", 1, where=DEVICE), []
    opens, tries = ops.open_memory, []

    def some(*args: Any) -> Tensor:
        tries.append(args)
        if len(tries) > 1:
            raise RuntimeError("peer access is not supported")
        return opens(*args)

    with mock.patch.object(ops, "open_memory", some), receiving(meeting, model, stage=stage) as receiver:
        for version in (1, 2, 3):
            text = outcome(receiver.receive_weights)
            if not text:
                receiver.commit()
                check(model, version)
            found.append(text)
    return found


@pytest.mark.parametrize("stage", ["host", "none"])
def test_memory_that_does_not_open_though_some_does(stage: str) -> None:
    """One version fails; those after it go another way."""
    sent, received = run(
        [Job(1, send_versions, (1, 1), setup=setup), Job(1, receive_with_one_that_does_not_open, (stage,), setup=setup)]
    )
    assert "memory of rank 0 cannot be opened" in received[0][0]
    assert "peer access is not supported" in sent[0][0].error
    assert received[0][1:] == ["", ""]
    assert [version.transport for version in sent[0]] == ["", CCL, CCL]


def receive_failing(rank: int, meeting: Meeting, stage: str, fails: bool) -> Any:
    """One engine fails in its copies, the other is slow. Returns when it had closed the memory of the sender, and what is open
    while the error is held and after the next version."""
    closed: list[float] = []
    copying, close = Puller.copying, SenderMemory.close

    @contextmanager
    def copies(self: Any, *args: Any) -> Iterator[None]:
        with copying(self, *args):
            time.sleep(0.1 if fails else 1)
            if fails:
                raise RuntimeError("broken")
            yield

    def closes(self: Any) -> None:
        close(self)
        closed.append(time.time())

    model = build("plain", 1, where=DEVICE)
    with receiving(meeting, model, stage=stage) as receiver:
        pid, held = int(meeting.hear("pid-0")), None
        with mock.patch.object(Puller, "copying", copies), mock.patch.object(SenderMemory, "close", closes):
            try:
                receiver.receive_weights()
            except epload.LoadError as error:
                held = error
        opened = [len(mapped_of(pid))]
        receiver.receive_weights()
        opened.append(len(mapped_of(pid)))
        receiver.commit()
        check(model, 2)
        return held is not None, closed[0], opened


@pytest.mark.parametrize("stage", ["device", "none"])
def test_a_sender_hears_of_a_failure_once_its_memory_is_closed(stage: str) -> None:
    sent, broken, slow = run(
        [
            Job(1, send_versions, (1, 2, 2), setup=setup),
            Job(1, receive_failing, (stage, True), setup=setup),
            Job(1, receive_failing, (stage, False), setup=setup),
        ]
    )
    assert "broken" in sent[0][0].error
    for raised, closed, opened in (broken[0], slow[0]):
        assert raised
        assert opened == [0, 0]
        assert closed <= sent[0][0].ended


class FailsOnce(epload.EngineModel):
    failed = False

    def finish(self) -> None:
        if not self.failed:
            self.failed = True
            raise RuntimeError("cannot repack")


def receive_and_apply_again(rank: int, meeting: Meeting, stage: str) -> list[Any]:
    target = FailsOnce(Padded().to(DEVICE))
    with receiving(meeting, target, stage=stage, strict=False) as receiver:
        if stage != "none":
            receiver.receive_weights()
        apply = receiver.receive_weights if stage == "none" else receiver.commit
        found: list[Any] = []
        for _ in range(2):
            found += [outcome(apply), receiver.version, receiver.partially_updated]
        if stage != "none":
            receiver.receive_weights()
        return [*found, receiver.staged]


@pytest.mark.parametrize("stage", ["host", "device", "none"])
def test_an_engine_that_cannot_finish_is_partially_updated_until_the_next_try(stage: str) -> None:
    jobs = [Job(1, send_versions, (1, 1, 2), setup=setup), Job(1, receive_and_apply_again, (stage,), setup=setup)]
    version, staged = (2, None) if stage == "none" else (1, 2)
    assert run(jobs)[1] == [["cannot repack", None, True, "", version, False, staged]]


class Odd(nn.Module):
    """Single elements, and a slice of one column."""

    def __init__(self, make: Any, names: Iterable[str]) -> None:
        super().__init__()
        for name in names:
            self.register_parameter(name, nn.Parameter(make(name), requires_grad=False))


def odd(name: str, version: int) -> Tensor:
    shapes = {"one": (1,), "square": (1, 1), "column": (4, 1), "row": (1, 5), "scalar": ()}
    return torch.full(shapes[name], float(version)) + torch.arange(torch.Size(shapes[name]).numel()).view(shapes[name])


ODD = ("one", "square", "column", "row", "scalar")


def make_odd() -> Odd:
    model = Odd(lambda name: odd(name, 0).to(DEVICE), ODD)
    model.column = nn.Parameter(torch.zeros(4, 3, device=DEVICE)[:, 1:2], requires_grad=False)
    return model


def write_odd(model: Odd, version: int) -> None:
    for name in ODD:
        model.get_parameter(name).copy_(odd(name, version))


def receive_odd(rank: int, meeting: Meeting, stage: str, verify: bool) -> list[str]:
    with torch.inference_mode(stage == "device"):
        model = Odd(lambda name: torch.zeros_like(odd(name, 0)).to(DEVICE), ODD)
    wrong = []
    with receiving(meeting, model, stage=stage, verify=verify) as receiver:
        for version in (1, 2):
            report = take(receiver)
            wrong += [] if report.transport == "ipc" else [report.transport]
            wrong += [
                name for name in ODD if not torch.equal(model.get_parameter(name).detach().cpu(), odd(name, version))
            ]
    return wrong


@pytest.mark.parametrize(("verify", "stage"), [(False, "host"), (True, "device"), (False, "none")])
def test_single_elements_and_inference_tensors(verify: bool, stage: str) -> None:
    sends = partial(send_model, verify=verify)
    jobs = [Job(1, sends, (make_odd, write_odd, 2), setup=setup), Job(1, receive_odd, (stage, verify), setup=setup)]
    sent, received = run(jobs)
    assert sent == [["", ""]]
    all_fine(received)


def make_unreadable(kind: str) -> nn.Module:
    """A tensor whose memory does not hold its values, or not all of them."""
    model = build("plain", 1, where=DEVICE)
    write(model, 1)
    if kind == "negated":
        pairs = torch.complex(torch.zeros(37, 16), -values("embed", 1)).to(DEVICE)
        model.embed = nn.Parameter(pairs.conj().imag, requires_grad=False)
    if kind == "freed":
        model.big.untyped_storage().resize_(20)
    return model


def receive_unreadable(rank: int, meeting: Meeting, stage: str) -> str:
    model = build("plain", 1, where=DEVICE)
    with receiving(meeting, model, stage=stage) as receiver:
        text = outcome(receiver.receive_weights)
        if text:
            assert receiver.version is None
        else:
            receiver.commit()
            check(model, 1)
        return text


@pytest.mark.parametrize(("kind", "expected", "stage"), [("negated", "", "host"), ("freed", "too few", "device")])
def test_memory_that_does_not_hold_the_values(kind: str, expected: str, stage: str) -> None:
    sends = Job(1, send_model, (partial(make_unreadable, kind),), setup=setup)
    sent, received = run([sends, Job(1, receive_unreadable, (stage,), setup=setup)])
    for text in (sent[0][0], received[0]):
        assert re.search(expected, text) if expected else not text, text


def make_halves() -> nn.Module:
    """Two halves of a tensor, of other dtypes than the names say."""
    model = nn.Module()
    model.upper = nn.Parameter(torch.full((4, 8), 1.001, dtype=torch.bfloat16, device=DEVICE))
    model.lower = nn.Parameter(torch.full((4, 8), 2.002, device=DEVICE))
    return model


HALVES = Mapping(converts=(Convert((r"^both$",), ("upper", "lower"), (Split(0),)),))


def receive_halves(rank: int, meeting: Meeting, where: str) -> list[float]:
    model = Odd(lambda name: torch.zeros(8, 8).to(where), ["both"])
    with receiving(meeting, model, stage="none") as receiver:
        receiver.receive_weights()
        return sorted(set(model.get_parameter("both").cpu().flatten().tolist()))


def test_engines_agree_on_a_tensor_of_several_dtypes(tmp_path: Path) -> None:
    """One that pulls gets what one gets to which it moves."""
    save_file({"both": torch.zeros(8, 8, dtype=torch.bfloat16)}, tmp_path / "model.safetensors")
    sends = partial(send_model, receivers=2, mapping=HALVES, names_from=tmp_path)
    jobs = [Job(1, sends, (make_halves,), setup=setup)]
    jobs += [Job(1, receive_halves, (where,), setup=setup) for where in (DEVICE, "cpu")]
    sent, near, far = run(jobs)
    assert sent == [[""]]
    assert near == far
