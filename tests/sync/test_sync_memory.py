"""The memory that a sync takes besides the weights, and a version in host memory: two waves on each sending rank and each
receiving node, or on each rank's device."""

from __future__ import annotations

import gc
import weakref
from contextlib import nullcontext
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

import epload
from epload import LoadError
from epload.planning.schedule import SYNC_WAVE_BYTES, wave_limit
from epload.sync.sources import SentModel
from measure import PeakMemory
from support import fakedev
from support.accelerator import DEVICE
from support.jobs import Job, Meeting, run
from support.small_syncs import outcome, receiving, sending, take
from support.sync_jobs import send_model
from support.synced_models import build, check, write

MB = 1 << 20
PYTHON = 24 * MB
LAYERS, FEATURES = 16, 2048
WEIGHTS = LAYERS * FEATURES * FEATURES * 4
VERSIONS = 2


def layers(where: str) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(FEATURES, FEATURES, bias=False, device=where) for _ in range(LAYERS)))


def send(rank: int, meeting: Meeting, where: str) -> int:
    """Bytes above the start, where the shards are half of the weights."""
    model = fully_shard(layers("meta"), mesh=init_device_mesh(torch.device(where).type, (2,)))
    model.to_empty(device=where)
    shards = [parameter.detach().to_local().zero_() for parameter in model.parameters()]
    dist.barrier()
    with PeakMemory() as memory, sending(meeting, model, 2) as sender:
        for version in range(1, VERSIONS + 1):
            for layer, shard in enumerate(shards):
                shard.fill_(100.0 * version + layer)
            sender.send_weights(version)
    return memory.above


def receive(rank: int, meeting: Meeting, where: str, stage: str) -> int:
    model = layers(where)
    mesh = init_device_mesh(torch.device(where).type, (2,))
    for layer in model:
        local = torch.zeros(FEATURES // 2, FEATURES, device=where)
        layer.weight = nn.Parameter(DTensor.from_local(local, mesh, [Shard(0)], run_check=False))
    meeting.hear("address")
    with PeakMemory() as memory, receiving(meeting, model, stage=stage) as receiver:
        for _ in range(VERSIONS):
            take(receiver)
    for number, parameter in enumerate(model.parameters()):
        local = parameter.detach().to_local().cpu()
        assert torch.equal(local, torch.full_like(local, 100.0 * VERSIONS + number))
    return memory.above


@pytest.mark.parametrize(("where", "stage"), [("cpu", "host"), (DEVICE, "none")])
@pytest.mark.usefixtures("fake_device")
def test_memory_is_bounded(where: str, stage: str) -> None:
    setup: Any = partial(fakedev.setup, "nccl") if where == DEVICE else None
    sent, received = run([Job(2, send, (where,), setup=setup), Job(2, receive, (where, stage), setup=setup)])
    waves = 2 * wave_limit(WEIGHTS, SYNC_WAVE_BYTES) + PYTHON
    version = WEIGHTS if stage == "host" else 0  # pages that the ranks of a node share count for each of them
    assert all(above <= waves for above in sent), [above // MB for above in sent]
    assert all(above <= waves + version for above in received), [above // MB for above in received]


def _send_until_closed(rank: int, meeting: Meeting) -> None:
    with sending(meeting, nn.Linear(64, 64)) as sender:
        sender.send_weights(1)
        meeting.hear("closed")


def _close_uncollected(rank: int, meeting: Meeting) -> list[bool]:
    receiver = epload.WeightReceiver(nn.Linear(64, 64), meeting.hear("address"), timeout=30, stage="host")
    take(receiver)
    memory = weakref.ref(receiver._generation.node_version.memory)
    gc.collect()
    gc.disable()
    held = memory() is not None
    receiver.close()
    meeting.say("closed")
    return [held, memory() is None]


def test_a_receiver_frees_its_version_when_it_is_closed() -> None:
    """It does so at once: a version has the size of the model, and the garbage collector may come late or never."""
    assert run([Job(1, _send_until_closed), Job(1, _close_uncollected)])[1] == [[True, True]]


def send_freed(rank: int, meeting: Meeting, options: dict[str, Any], late: bool) -> str:
    model, read = nn.Linear(64, 64), SentModel.read

    def read_and_free(sent: SentModel) -> None:
        read(sent)
        model.weight.untyped_storage().resize_(0)  # as a trainer that offloads

    with sending(meeting, model, **options) as sender:
        sender.send_weights(1)
        if not late:
            model.weight.untyped_storage().resize_(0)
        with mock.patch.object(SentModel, "read", read_and_free) if late else nullcontext():
            return outcome(partial(sender.send_weights, 2))


def receive_freed(rank: int, meeting: Meeting) -> str:
    with receiving(meeting, nn.Linear(64, 64)) as receiver:
        take(receiver)
        with pytest.raises(LoadError) as caught:  # which engines catch
            receiver.receive_weights()
        return str(caught.value)


@pytest.mark.parametrize(
    ("options", "late"), [({}, False), ({}, True), ({"snapshot": "host"}, False), ({"delta": "auto"}, True)], ids=str
)
def test_memory_that_a_trainer_has_freed_is_not_read(options: dict[str, Any], late: bool) -> None:
    """An engine may learn of a version that was not begun, or that the trainer has left."""
    (sent,), (received,) = run([Job(1, send_freed, (options, late)), Job(1, receive_freed)])
    assert "its storage was freed" in sent or late
    assert "freed" in sent
    assert "freed" in received or not late


QUANTIZED = epload.mapping.Quantize(weights=(r"^a\.weight$",))


def replace_tensors(model: nn.Module) -> list[Any]:
    """Gives a model other parameters, as a load with ``assign=True`` does. Returns references to the former."""
    former = [weakref.ref(parameter.detach().untyped_storage()) for parameter in model.parameters()]
    former += [weakref.ref(parameter) for parameter in model.parameters()]
    model.load_state_dict({name: tensor.clone() for name, tensor in model.state_dict().items()}, assign=True)
    return former


def alive(references: list[Any]) -> int:
    gc.collect()
    return sum(reference() is not None for reference in references)


def send_replaced(rank: int, meeting: Meeting, options: dict[str, Any]) -> list[int]:
    model, left = pair(), []
    with sending(meeting, model, **options) as sender:
        for version in (1, 2, 3):
            sender.send_weights(version)
            left.append(alive(replace_tensors(model)))
    return left


def receive_replaced(rank: int, meeting: Meeting, options: dict[str, Any]) -> list[int]:
    model, left = pair(), []
    with receiving(meeting, model if "mapping" not in options else None) as receiver:
        for _ in range(3):
            receiver.receive_weights()
            if "mapping" not in options:
                receiver.commit()
                left.append(alive(replace_tensors(model)))
    return left


def pair() -> nn.ModuleDict:
    return nn.ModuleDict({"a": nn.Linear(256, 128), "b": nn.Linear(128, 64)})


@pytest.mark.parametrize(
    "options", [{}, {"snapshot": "host"}, {"delta": "auto"}, {"mapping": QUANTIZED}], ids=lambda o: "".join(o)
)
def test_tensors_that_a_model_replaces_are_freed(options: dict[str, Any]) -> None:
    """Neither job keeps a model's tensors between versions: a trainer moves them elsewhere meanwhile."""
    sent, received = run([Job(1, send_replaced, (options,)), Job(1, receive_replaced, (options,))])
    assert sent == [[0, 0, 0]]
    assert received == ([[]] if "mapping" in options else [[0, 0, 0]])


def send_and_report(rank: int, meeting: Meeting, options: dict[str, Any]) -> int:
    with sending(meeting, pair(), **options) as sender:
        return sender.send_weights(1).peak_staging


def receive_and_report(rank: int, meeting: Meeting, stage: str) -> int:
    with receiving(meeting, pair(), stage=stage) as receiver:
        return take(receiver).peak_staging


@pytest.mark.parametrize("options", [{"snapshot": "host"}, {"delta": "auto"}], ids=lambda o: "".join(o))
def test_reports_count_copies(options: dict[str, Any]) -> None:
    """A sender's, and those that wait for a commit."""
    model = sum(parameter.nbytes for parameter in pair().parameters())
    without, copied = (
        run([Job(1, send_and_report, (sent,)), Job(1, receive_and_report, (stage,))])
        for sent, stage in (({}, "none"), (options, "device"))
    )
    assert copied == [[buffers + model] for [buffers] in without]


def send_in_inference_mode(rank: int, meeting: Meeting) -> None:
    model = build("plain", 1)
    with sending(meeting, model, snapshot="host", delta="auto") as sender:
        for version in (1, 2, 3):
            write(model, version)
            with torch.inference_mode(version != 2):
                sender.send_weights(version, wait=version == 2)
                if version != 2:
                    sender.wait()


def receive_all(rank: int, meeting: Meeting) -> None:
    model = build("plain", 1)
    with receiving(meeting, model) as receiver:
        for version in (1, 2, 3):
            take(receiver)
            check(model, version)


def test_copies_that_are_made_in_inference_mode_are_written_outside_of_it() -> None:
    run([Job(1, send_in_inference_mode), Job(1, receive_all)])


def fill(model: nn.Module, version: int) -> None:
    for parameter in model.parameters():
        parameter.fill_(version)


def receive_under_autocast(rank: int, meeting: Meeting) -> list[list[float]]:
    """Returns what the model computes with each version."""
    model, found = nn.Linear(4, 4), []
    with torch.autocast("cpu", torch.bfloat16), receiving(meeting, model) as receiver:
        for _ in range(2):
            take(receiver)
            found.append(model(torch.ones(4)).tolist())
    return found


def test_what_autocast_has_cast_is_cast_anew() -> None:
    sends = Job(1, send_model, (partial(nn.Linear, 4, 4), fill, 2))
    assert run([sends, Job(1, receive_under_autocast)])[1] == [[[5.0] * 4, [10.0] * 4]]
