"""A sharded trainer's weights in an engine's model, as the engine's own ``load_weights`` would put them there."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import epload
from epload.integrations.engine.model import EngineTarget
from support.checks import fill
from support.engines import Computing, Engine, Loader, Processing, Weights, engine_checkpoint, unique
from support.fp8 import Tree
from support.jobs import Job, Meeting, run
from support.ranks import RankFailed
from support.recordings import manifest_of, same_bits, tensors_of
from support.small_syncs import receiving, sending, take

ENGINES = {"views": Engine, "computing": Computing, "processing": Computing}


def values(version: int) -> dict[str, Tensor]:
    return {name: tensor + version for name, tensor in engine_checkpoint().items()}


def trainer(world: int) -> nn.Module:
    """Parameters with the names of the checkpoint, sharded along dim 0 where that divides."""
    mesh = init_device_mesh("cpu", (world,))
    model = Tree(engine_checkpoint()).to_empty(device="cpu")
    for name, parameter in list(model.named_parameters()):
        if parameter.ndim and name != "rotary":
            path, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(path), leaf, nn.Parameter(distribute_tensor(parameter, mesh, [Shard(0)])))
    return model


def send(rank: int, meeting: Meeting, world: int, receivers: int, without: str = "") -> None:
    model = trainer(world)
    if without:
        delattr(model, without)
    with sending(meeting, model, receivers, timeout=30, delta="always") as sender:
        for version in (1, 2, 3):
            fill(model, values(version))
            sender.send_weights(version)
        for receiver in range(receivers):
            meeting.hear(f"done-{receiver}")


def receive(rank: int, meeting: Meeting, kind: str, dtype: torch.dtype, options: dict[str, Any]) -> None:
    model, expected = ENGINES[kind](rank, dtype), ENGINES[kind](rank, dtype)
    engine = Processing(model) if kind == "processing" else epload.EngineModel(model)
    one_by_one = mock.patch("epload.integrations.engine.model.BATCH_BYTES", 0)
    with one_by_one, receiving(meeting, engine, timeout=30, **options) as receiver:
        for version in (1, 2, 3):
            take(receiver)
            expected.load_weights((name, tensor.clone()) for name, tensor in values(version).items())
            theirs = tensors_of(model)
            if isinstance(engine, Processing):
                assert engine.most == (8 if options.get("stage") == "none" else 1)
                theirs |= {name: -parameter for name, parameter in model.named_parameters()}
            wrong = [name for name, tensor in tensors_of(expected).items() if not same_bits(tensor, theirs[name])]
            assert wrong == [], f"version {version}"
        meeting.say(f"done-{rank}")


@pytest.mark.parametrize(
    ("kind", "dtype", "options"),
    [
        ("views", torch.float32, {}), ("computing", torch.float32, {"stage": "device"}), ("computing", torch.float32, {}),
        ("views", torch.bfloat16, {"stage": "none"}), ("processing", torch.float32, {}),
        ("processing", torch.bfloat16, {"stage": "device"}), ("processing", torch.float32, {"stage": "none"}),
    ],
)  # fmt: skip
def test_an_engine_holds_what_its_own_load_weights_gives(kind: str, dtype: torch.dtype, options: Any) -> None:
    run([Job(2, send, (2, 2)), Job(2, receive, (kind, dtype, options))])


def local_target(model: Loader, weights: dict[str, Tensor], strict: bool = True) -> EngineTarget:
    """One that has received a version."""
    target = epload.EngineModel(model).sync_target(strict)
    target.holdings(manifest_of(weights))
    target.tensors()
    return target


def loads(way: str, model: Loader, weights: Weights) -> None:
    """A recording cannot hold the first three ways, and sees other memory written by the last two."""
    if way == "reads another":
        model.get_parameter("a").sum().item()
    for name, tensor in weights:
        if way == "reads values":
            model.get_parameter(name).data.fill_(tensor.item())
        elif way == "fills a part":
            model.get_parameter(name).data[1:].fill_(tensor.item())
        elif way == "reads another":
            model.get_parameter(name).data.copy_(tensor)
        elif way == "replaces parameters":
            setattr(model, name, nn.Parameter(tensor.clone()))
        else:
            model.get_parameter(name).data = tensor.clone()


WAYS = ("reads values", "reads another", "fills a part", "replaces parameters", "replaces memory")


@pytest.mark.parametrize("way", WAYS)
def test_parameters_that_nothing_writes_are_an_error_also_beside_what_cannot_be_recorded(way: str) -> None:
    shapes: dict[str, tuple[int, ...]] = {"a": (1,), "b": (1,)}
    load, partly = partial(loads, way), way == "fills a part"
    with pytest.raises(epload.ModelMismatch, match=r"parameters unwritten, in part or as a whole \(.*b\)") as caught:
        local_target(Loader(load, **shapes), unique({"a": (1,)})).finish()
    assert caught.value.missing_keys == (["a", "b"] if partly else ["b"])
    local_target(Loader(load, **shapes), unique({"a": (1,)}), strict=False).finish()
    if not partly:
        local_target(Loader(load, **shapes), unique(shapes)).finish()


def test_a_head_that_the_engine_ties_and_the_sender_does_not() -> None:
    model = Loader(lambda model, weights: [model.a.data.copy_(tensor) for name, tensor in weights if name == "a"], a=(3,))
    model.head = model.a
    local_target(model, unique({"a": (3,)}))
    with pytest.raises(epload.ModelMismatch, match="takes nothing from head, which the engine ties to another parameter"):
        local_target(model, unique({"a": (3,), "head": (3,)}))


@pytest.mark.parametrize("padding", [1, 2])
def test_padding_that_an_engine_declares_needs_no_values(padding: int) -> None:
    model = Loader(lambda model, weights: [model.a.data[:, :2].copy_(tensor) for _, tensor in weights], a=(3, 4))
    model.a.weight_loader_numel = 3 * (4 - padding)
    unwritten = nullcontext() if padding == 2 else pytest.raises(epload.ModelMismatch, match=r"unwritten, .* \(a\)")
    with unwritten:
        local_target(model, unique({"a": (3, 2)}))


def test_full_tensors_are_made_when_load_weights_takes_them() -> None:
    events: list[str] = []

    def load(model: Loader, weights: Weights) -> None:
        for name, tensor in weights:
            model.get_parameter(name).data.copy_(tensor * 2)
            events.append(name)

    model = Loader(load, a=(1,), b=(1,))
    target = epload.EngineModel(model).sync_target(strict=True)
    target.holdings(manifest_of(unique({"b": (1,), "a": (1,)})))
    events.clear()

    def copy(tensors: Mapping[int, Tensor]) -> None:
        for number, tensor in tensors.items():
            events.append(str(number))
            tensor.fill_(number)

    target.fill(copy)
    assert events == ["0", "b", "1", "a"]
    assert (model.a.item(), model.b.item()) == (2, 0)


def test_a_map_that_has_changed_since_it_was_recorded_is_an_error() -> None:
    """An engine that has moved its experts would be given others than it takes them for."""

    def load(model: Loader, weights: Weights) -> None:
        for (_, tensor), row in zip(weights, model.rows, strict=True):
            model.a.data[row.item()].copy_(tensor)

    model = Loader(load, a=(2, 3))
    model.register_buffer("rows", torch.tensor([1, 0]), persistent=False)
    target = local_target(model, unique({"x": (3,), "y": (3,)}))
    model.rows.copy_(torch.tensor([0, 1]))
    expected = r"rows of the engine's model has other values .* make a new WeightReceiver"
    with pytest.raises(epload.LoadError, match=expected):
        target.tensors()


def test_tied_parameters_are_written_under_one_of_their_names() -> None:
    model = Loader(partial(loads, "reads values"), a=(1,), b=(1,))
    model.b = model.a
    local_target(model, unique({"b": (1,)})).finish()


def test_an_engine_without_load_weights_is_refused() -> None:
    with pytest.raises(TypeError, match="expected a model with load_weights, got a Linear"):
        epload.EngineModel(nn.Linear(2, 2))


def test_parameters_that_the_sender_does_not_have_are_an_error() -> None:
    with pytest.raises(RankFailed, match=r"load_weights leaves 1 of the engine's parameters unwritten.*norm\.weight"):
        run([Job(1, send, (1, 2, "norm")), Job(2, receive, ("views", torch.float32, {}))])
