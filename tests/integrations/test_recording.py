"""Recordings of ``load_weights``: views and copies, what they report, and which targets they take."""

from __future__ import annotations

import threading
from collections.abc import Callable
from math import prod
from typing import Any

import pytest
import torch
from torch import Tensor

from epload.errors import LoadError, ModelMismatch
from epload.integrations.engine.recording import record
from support.engines import Engine, Loader, Weights, engine_checkpoint, unique
from support.recordings import by_name, check_recording, manifest_of, record_model, tensors_of

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("checkpoint_dtype", DTYPES)
def test_every_loader_of_an_engine_is_recorded(rank: int, dtype: torch.dtype, checkpoint_dtype: torch.dtype) -> None:
    recording = check_recording(lambda: Engine(rank, dtype), engine_checkpoint(checkpoint_dtype))
    assert recording.whole == {}
    without_effect = {name for name, places in zip(engine_checkpoint(), recording.regions, strict=True) if not places}
    experts = [f"experts.{expert}.{part}" for expert in range(4) for part in ("gate", "up", "down")]
    assert without_effect == {"rotary", *(name for name in experts if int(name[8]) // 2 != rank)}
    # The padding of the vocabulary.
    assert recording.fills == ((("embed.weight", ((5, 0), (3, 6)), 0),) if rank else ())


def test_a_fused_parameter_takes_one_box_from_each_tensor() -> None:
    weights = engine_checkpoint()
    recording = record_model(Engine(1), weights)
    places = dict(zip(weights, recording.regions, strict=True))
    assert places["k"] == (("qkv.weight", ((4, 0), (2, 6), 2 * 6, (6, 1))),)
    assert places["down"] == (("down.weight", ((0, 0), (6, 5), 5, (10, 1))),)
    assert places["router"] == (("router.weight", ((0, 0), (6, 4), 0, (1, 6))),)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_autograd_modes(mode: Callable[[], Any]) -> None:
    """Composite operations are dispatched in one piece in inference mode."""

    def fill_diagonal(model: Loader, weights: Weights) -> None:
        model.p.data.fill_diagonal_(2)

    weights = engine_checkpoint()
    expected = record_model(Engine(1), weights)
    with mode():
        assert record_model(Engine(1), weights) == expected
        recording = record_model(Loader(fill_diagonal, p=(3, 3)), {})
    assert sorted(box for _, box, _ in recording.fills) == [((i, i), (1, 1)) for i in range(3)]


def in_threads(model: Loader, weights: Weights) -> None:
    for name, tensor in weights:
        thread = threading.Thread(target=lambda: model.get_parameter(name).data.copy_(tensor))  # noqa: B023
        thread.start()
        thread.join()


def lookahead(model: Loader, weights: Weights) -> None:
    by_name(model, sorted(weights, key=lambda pair: pair[0], reverse=True))


@pytest.mark.parametrize("load", [in_threads, lookahead])
def test_loaders_that_use_threads_or_take_all_tensors_first(load: Callable[..., Any]) -> None:
    recording = check_recording(lambda: Loader(load, a=(3, 4), b=(5,)), unique({"a": (3, 4), "b": (5,)}))
    assert recording.whole == {}


VIEWS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "write through a flat view": lambda p, w: p.data.view(-1).copy_(w.flatten()),
    "write through a transposed view": lambda p, w: p.data.t().copy_(w.view(6, 8).t()),
    "every other row": lambda p, w: (p.data[::2].copy_(w.view(6, 8)[:3]), p.data[1::2].copy_(w.view(6, 8)[3:])),
    "interleave": lambda p, w: p.data.view(3, 2, 8).copy_(w.view(2, 3, 8).transpose(0, 1)),
    "unbind": lambda p, w: [p.data[i].copy_(row) for i, row in enumerate(w.view(6, 8).unbind(0))],
    "foreach": lambda p, w: torch._foreach_copy_([p.data[:3], p.data[3:]], list(w.view(6, 8).split(3))),
    "copies of copies": lambda p, w: p.data.copy_(w.t().clone().t().contiguous().clone().view(6, 8)),
    "views of a transposed copy": lambda p, w: p.data.t().copy_(
        w.view(6, 8).t().contiguous().reshape(2, 4, 6).view(8, 6)
    ),
    "through float64": lambda p, w: p.data.copy_(w.double().view(6, 8).float()),
    "parts of dtype and device": lambda p, w: p.data.copy_(w.to(device=p.device, dtype=p.dtype).view(6, 8)),
    "narrow, squeeze and expand as itself": lambda p, w: p.data.copy_(w.view(6, 1, 8).squeeze(1).expand(6, 8)),
    "set items": lambda p, w: [p.data.__setitem__(i, w.view(6, 8)[i]) for i in range(6)],
    "twice the same": lambda p, w: [p.data.copy_(w.view(6, 8)) for _ in range(2)],
    "zero first": lambda p, w: (p.data.zero_(), p.data[1:5].copy_(w.view(6, 8)[1:5])),
}


@pytest.mark.parametrize("load", VIEWS.values(), ids=VIEWS)
def test_views_and_copies_are_recorded(load: Callable[[Tensor, Tensor], Any]) -> None:
    def load_weights(model: Loader, weights: Weights) -> None:
        for _, tensor in weights:
            load(model.p, tensor)

    recording = check_recording(lambda: Loader(load_weights, p=(6, 8)), unique({"w": (4, 12)}))
    assert recording.whole == {}
    filled = sum(prod(view.size) for _, view in recording.regions[0])
    assert filled + sum(prod(size) for _, (_, size), _ in recording.fills) == 48


# ---- reports ----


def test_an_error_of_the_engine_is_an_error_at_once() -> None:
    def load(model: Loader, weights: Weights) -> None:
        for name, tensor in weights:
            if name == "x":
                raise KeyError("no parameter x")
            model.a.data.copy_(tensor)

    with pytest.raises(ModelMismatch, match=r"KeyError after it took x, and nothing was written: 'no parameter x'"):
        record_model(Loader(load, a=(3,)), unique({"a": (3,), "x": (2,)}))
    with pytest.raises(ModelMismatch, match=r"after it took a, and nothing was written: .*size"):
        record_model(Loader(by_name, a=(3, 4)), unique({"a": (3, 5)}))


@pytest.mark.parametrize("keep", [lambda w: w, lambda w: w[1:], lambda w: w * 2, lambda w: w.clone()])
def test_a_loader_that_keeps_tensors_for_later_is_refused(keep: Callable[[Tensor], Tensor]) -> None:
    def load(model: Loader, weights: Weights) -> None:
        model.pending = {name: keep(tensor) for name, tensor in weights}

    with pytest.raises(LoadError, match=r"keeps 2 of the tensors .*the first is a"):
        record_model(Loader(load, a=(3,), b=(2,)), unique({"a": (3,), "b": (2,)}))


# ---- targets ----


def test_targets_that_share_memory_are_refused() -> None:
    memory = torch.zeros(8)
    with pytest.raises(ModelMismatch, match="a and b share part of their memory"):
        record(list, manifest_of({}), {"a": memory[:5], "b": memory[3:]})
    with pytest.raises(ValueError, match="expected targets that are dense, but a is not"):
        record(list, manifest_of({}), {"a": torch.zeros(1).expand(4)})


def test_targets_may_be_on_meta() -> None:
    weights = engine_checkpoint()
    with torch.device("meta"):
        model = Engine(1)
    assert record(model.load_weights, manifest_of(weights), tensors_of(model)) == record_model(Engine(1), weights)


def test_targets_may_be_regions_of_one_storage() -> None:
    """A write across them is not recorded."""
    memory = torch.full((6, 8), -1.0)
    targets = {"a": memory[:, :3], "b": memory[:, 4:]}

    def load(weights: Weights) -> None:
        for name, tensor in weights:
            targets.get(name, memory).copy_(tensor)

    weights = unique({"a": (6, 3), "b": (6, 4)})
    recording = record(load, manifest_of(weights), targets)
    assert [places[0][0] for places in recording.regions] == ["a", "b"]
    recording = record(load, manifest_of(unique({"all": (6, 8)})), targets)
    assert "outside" in recording.whole["all"]
    assert bool((memory == -1).all())


def test_tied_parameters_are_one_target() -> None:
    def make() -> Loader:
        model = Loader(by_name, a=(3, 4))
        model.b = model.a
        return model

    recording = check_recording(make, unique({"a": (3, 4)}))
    assert [name for name, _ in recording.regions[0]] == ["a"]
    assert list(check_recording(make, unique({"a": (3, 4), "b": (3, 4)})).whole) == ["a", "b"]
