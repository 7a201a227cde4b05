"""Views and copies are recorded: the model is the one that an engine's own ``load_weights`` gives."""

from __future__ import annotations

import threading
from collections.abc import Callable
from math import prod
from typing import Any

import pytest
import torch
from torch import Tensor

from support.engines import Engine, Loader, Weights, engine_checkpoint, unique
from support.recordings import check_recording, record_model

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("checkpoint_dtype", DTYPES)
def test_every_loader_of_an_engine_is_recorded(rank: int, dtype: torch.dtype, checkpoint_dtype: torch.dtype) -> None:
    recording = check_recording(lambda: Engine(rank, dtype), engine_checkpoint(checkpoint_dtype))
    assert recording.whole == {}
    assert recording.unwritten == {}
    others = [f"experts.{expert}.{part}" for expert in range(4) for part in ("gate", "up", "down")]
    assert recording.unused == ("rotary", *(name for name in others if int(name[8]) // 2 != rank))


def test_the_padding_of_a_vocabulary_is_a_fill() -> None:
    assert record_model(Engine(1), engine_checkpoint()).fills == (("embed.weight", ((5, 0), (3, 6)), 0),)
    assert record_model(Engine(0), engine_checkpoint()).fills == ()


def test_a_fused_parameter_takes_one_box_from_each_tensor() -> None:
    weights = engine_checkpoint()
    recording = record_model(Engine(1), weights)
    places = dict(zip(weights, recording.regions, strict=True))
    ((name, view),) = places["k"]
    assert (name, *view) == ("qkv.weight", (4, 0), (2, 6), 2 * 6, (6, 1))
    ((name, view),) = places["down"]
    assert (name, *view) == ("down.weight", (0, 0), (6, 5), 5, (10, 1))
    ((name, view),) = places["router"]
    assert (name, *view) == ("router.weight", (0, 0), (6, 4), 0, (1, 6))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_autograd_modes(mode: Callable[[], Any]) -> None:
    weights = engine_checkpoint()
    plain = record_model(Engine(1), weights)
    with mode():
        assert record_model(Engine(1), weights) == plain


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_composite_operations_are_taken_apart(mode: Callable[[], Any]) -> None:
    """In inference mode, they are dispatched in one piece."""

    def load(model: Loader, weights: Weights) -> None:
        model.p.data.fill_diagonal_(2)

    with mode():
        recording = record_model(Loader(load, p=(3, 3)), {})
    assert sorted(box for _, box, _ in recording.fills) == [((i, i), (1, 1)) for i in range(3)]
    assert len(recording.unwritten["p"]) > 1


def in_threads(model: Loader, weights: Weights) -> None:
    for name, tensor in weights:
        thread = threading.Thread(target=lambda: model.get_parameter(name).data.copy_(tensor))  # noqa: B023
        thread.start()
        thread.join()


def lookahead(model: Loader, weights: Weights) -> None:
    for name, tensor in sorted(weights, key=lambda pair: pair[0], reverse=True):
        model.get_parameter(name).data.copy_(tensor)


@pytest.mark.parametrize("load", [in_threads, lookahead])
def test_loaders_that_use_threads_or_take_all_tensors_first(load: Callable[..., Any]) -> None:
    recording = check_recording(lambda: Loader(load, a=(3, 4), b=(5,)), unique({"a": (3, 4), "b": (5,)}))
    assert (recording.whole, recording.unwritten) == ({}, {})


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
