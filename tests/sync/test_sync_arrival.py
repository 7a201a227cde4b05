"""Versions that are copied out of a sender's memory: who reaches whom, what stays, and what an error leaves."""

from __future__ import annotations

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
from support.checkpoints import assert_same
from support.device_syncs import CCL, mapped_of, on_machine, send_versions, topology_of
from support.engines import Processing
from support.jobs import Job, Meeting, run
from support.small_syncs import outcome, receiving, take
from support.sync_jobs import send_model
from support.synced_models import SHAPES, build, check, values, write

pytestmark = pytest.mark.usefixtures("fake_device")

setup = partial(fakedev.setup, "nccl")


def exchange(receive: Any, *args: Any, sends: Any = send_versions, sent: tuple[Any, ...] = (1, 1, 2)) -> Any:
    """Runs a rank that sends, and one that receives; returns what both do."""
    (sent_there,), (received,) = run([Job(1, sends, sent, setup=setup), Job(1, receive, args, setup=setup)])
    return sent_there, received


def receive_on_two_machines(rank: int, meeting: Meeting, stage: str) -> None:
    """One rank of the engine is on the trainer's machine; the parts that it wants are those of one sender."""
    with on_machine("ab"[rank]):
        model = build("tp0", 2, where=DEVICE)
        with receiving(meeting, model, topology=topology_of(("a", "b"), 2), stage=stage) as receiver:
            for version in (1, 2):
                report = take(receiver)
                check(model, version)
                assert (report.pulled > 0) == (rank == 0)


@pytest.mark.parametrize("stage", ["host", "none"])
def test_an_engine_of_which_one_rank_is_near(stage: str) -> None:
    run([Job(2, send_versions, (2, 2, 2, "a"), setup=setup), Job(2, receive_on_two_machines, (stage,), setup=setup)])


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


def check_filled(model: nn.Module, version: int) -> None:
    for name, shape in SHAPES.items():
        found = model.get_parameter(name).detach().cpu()
        assert torch.equal(found[: shape[0]] if shape else found, values(name, version)), name


def receive_beside_others(rank: int, meeting: Meeting, stage: str, kind: str) -> None:
    model: Any = Padded().to(DEVICE) if kind == "padded" else build("plain", 1, where=DEVICE)
    if kind != "padded":
        model.extra = nn.Parameter(torch.full((50, 50), 7.0, device=DEVICE))
    target = epload.EngineModel(model) if kind == "padded" else model
    others = (model.embed[37:] if kind == "padded" else model.extra).detach()
    with receiving(meeting, target, stage=stage, strict=False) as receiver:
        for version in (1, 2):
            receiver.receive_weights()
            others.fill_(7.0 + version)  # it is the engine's own, also while a version waits
            receiver.commit()
            assert (others.cpu() == 7.0 + version).all()
            check_filled(model, version)


@pytest.mark.parametrize(("kind", "stage"), [("padded", "host"), ("own", "device"), ("padded", "none")])
def test_what_the_sender_does_not_have_stays(kind: str, stage: str) -> None:
    exchange(receive_beside_others, stage, kind)


def receive_processed(rank: int, meeting: Meeting, stage: str) -> None:
    model = build("plain", 1, where=DEVICE)

    def load_weights(weights: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in weights:
            model.get_parameter(name).detach().copy_(tensor)

    with receiving(meeting, Processing(model, load_weights, DEVICE), stage=stage) as receiver:
        for version in (1, 2):
            assert take(receiver).pulled > 0
            for name, parameter in model.named_parameters():
                assert torch.equal(-parameter.detach().cpu(), values(name, version)), name


@pytest.mark.parametrize("stage", ["host", "device", "none"])
def test_an_engine_that_has_what_it_loads_only_then(stage: str) -> None:
    exchange(receive_processed, stage)


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
    exchange(receive_held, stage)


def receive_with_one_that_does_not_open(rank: int, meeting: Meeting, stage: str) -> list[Any]:
    model, found, opens = build("plain", 1, where=DEVICE), [], ops.open_memory

    def some(*args: Any) -> Tensor:
        if opened.call_count > 1:
            raise RuntimeError("peer access is not supported")
        return opens(*args)

    patch = mock.patch.object(ops, "open_memory", side_effect=some)
    with patch as opened, receiving(meeting, model, stage=stage) as receiver:
        for version in (1, 2, 3):
            found.append(outcome(partial(take, receiver)))
            if not found[-1]:
                check(model, version)
    return found


@pytest.mark.parametrize("stage", ["host", "none"])
def test_memory_that_does_not_open_though_some_does(stage: str) -> None:
    sent, (failed, *others) = exchange(receive_with_one_that_does_not_open, stage, sent=(1, 1))
    assert "memory of rank 0 cannot be opened" in failed
    assert "peer access is not supported" in sent[0].error
    assert others == ["", ""]
    assert [version.transport for version in sent] == ["", CCL, CCL]


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
        pid = int(meeting.hear("pid-0"))
        patches = mock.patch.object(Puller, "copying", copies), mock.patch.object(SenderMemory, "close", closes)
        with patches[0], patches[1], pytest.raises(epload.LoadError) as held:
            receiver.receive_weights()
        opened = [len(mapped_of(pid))]
        receiver.receive_weights()
        opened.append(len(mapped_of(pid)))
        receiver.commit()
        check(model, 2)
        return held.value is not None, closed[0], opened


@pytest.mark.parametrize("stage", ["device", "none"])
def test_a_sender_hears_of_a_failure_once_its_memory_is_closed(stage: str) -> None:
    engines = [Job(1, receive_failing, (stage, fails), setup=setup) for fails in (True, False)]
    sends = partial(send_versions, waves=partial(mock.patch, "epload.sync.generation._CLOSING_SECONDS", 30.0))
    ((sent, _),), *received = run([Job(1, sends, (1, 2, 2), setup=setup), *engines])
    assert "broken" in sent.error
    for ((raised, closed, opened),) in received:
        assert (raised, opened) == (True, [0, 0])
        assert closed <= sent.ended


class FailsOnce(epload.EngineModel):
    failed = False

    def finish(self) -> None:
        if not self.failed:
            self.failed = True
            for parameter in self.model.parameters():
                parameter.detach().zero_()
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
        check_filled(target.model, 2 if stage == "none" else 1)
        if stage != "none":
            receiver.receive_weights()
        return [*found, receiver.staged]


@pytest.mark.parametrize("stage", ["host", "device", "none"])
def test_an_engine_that_cannot_finish_is_partially_updated_until_the_next_try(stage: str) -> None:
    version, staged = (2, None) if stage == "none" else (1, 2)
    found = exchange(receive_and_apply_again, stage)[1]
    assert found == ["cannot repack", None, True, "", version, False, staged]


ODD = {"one": (1,), "square": (1, 1), "column": (4, 1), "row": (1, 5), "scalar": ()}


def odd(name: str, version: int) -> Tensor:
    return torch.full(ODD[name], float(version)) + torch.arange(torch.Size(ODD[name]).numel()).view(ODD[name])


def make_odd() -> nn.ParameterDict:
    """Single elements, and a slice of one column."""
    model = nn.ParameterDict({name: nn.Parameter(odd(name, 0).to(DEVICE), requires_grad=False) for name in ODD})
    model["column"] = nn.Parameter(torch.zeros(4, 3, device=DEVICE)[:, 1:2], requires_grad=False)
    return model


def write_odd(model: nn.ParameterDict, version: int) -> None:
    for name, parameter in model.items():
        parameter.copy_(odd(name, version))


def receive_odd(rank: int, meeting: Meeting, stage: str, verify: bool) -> None:
    with torch.inference_mode(stage == "device"):
        zeros = {name: torch.zeros(shape, device=DEVICE) for name, shape in ODD.items()}
        model = nn.ParameterDict({name: nn.Parameter(zero, requires_grad=False) for name, zero in zeros.items()})
    with receiving(meeting, model, stage=stage, verify=verify) as receiver:
        for version in (1, 2):
            assert take(receiver).transport == "ipc"
            assert_same({name: x.cpu() for name, x in model.items()}, {name: odd(name, version) for name in ODD})


@pytest.mark.parametrize(("verify", "stage"), [(False, "host"), (True, "device"), (False, "none")])
def test_single_elements_and_inference_tensors(verify: bool, stage: str) -> None:
    sends = partial(send_model, verify=verify)
    assert exchange(receive_odd, stage, verify, sends=sends, sent=(make_odd, write_odd, 2)) == (["", ""], None)


def make_unreadable(kind: str) -> nn.Module:
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
        text = outcome(partial(take, receiver))
        if text:
            assert receiver.version is None
        else:
            check(model, 1)
        return text


@pytest.mark.parametrize(("kind", "expected", "stage"), [("negated", "", "host"), ("freed", "too few", "device")])
def test_memory_that_does_not_hold_the_values(kind: str, expected: str, stage: str) -> None:
    (sent,), received = exchange(receive_unreadable, stage, sends=send_model, sent=(partial(make_unreadable, kind),))
    for text in (sent, received):
        assert expected in text if expected else not text


def make_halves() -> nn.Module:
    """Two halves of a tensor, of other dtypes than the names say."""
    model = nn.Module()
    model.upper = nn.Parameter(torch.full((4, 8), 1.001, dtype=torch.bfloat16, device=DEVICE))
    model.lower = nn.Parameter(torch.full((4, 8), 2.002, device=DEVICE))
    return model


HALVES = Mapping(converts=(Convert((r"^both$",), ("upper", "lower"), (Split(0),)),))


def receive_halves(rank: int, meeting: Meeting, where: str) -> list[float]:
    model = nn.ParameterDict({"both": torch.zeros(8, 8).to(where)})
    with receiving(meeting, model, stage="none") as receiver:
        receiver.receive_weights()
        return sorted(set(model["both"].cpu().flatten().tolist()))


def test_engines_agree_on_a_tensor_of_several_dtypes(tmp_path: Path) -> None:
    save_file({"both": torch.zeros(8, 8, dtype=torch.bfloat16)}, tmp_path / "model.safetensors")
    sends = partial(send_model, receivers=2, mapping=HALVES, names_from=tmp_path)
    jobs = [Job(1, sends, (make_halves,), setup=setup)]
    jobs += [Job(1, receive_halves, (where,), setup=setup) for where in (DEVICE, "cpu")]
    sent, near, far = run(jobs)
    assert sent == [[""]]
    assert near == far
