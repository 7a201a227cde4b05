"""Recordings against what an engine's own ``load_weights`` gives, and what must not be recorded."""

from __future__ import annotations

import threading
from collections.abc import Callable
from math import prod
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from epload.errors import LoadError, ModelMismatch
from epload.recording import Recording, record
from support.engines import Engine, Loader, Weights, engine_checkpoint, unique
from support.recordings import check_recording, manifest_of, record_model, tensors_of

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


# ---- engines whose loaders are views ----


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("checkpoint_dtype", DTYPES)
def test_every_loader_of_an_engine_is_recorded(rank: int, dtype: torch.dtype, checkpoint_dtype: torch.dtype) -> None:
    recording = check_recording(lambda: Engine(rank, dtype), engine_checkpoint(checkpoint_dtype))
    assert recording.whole == ()
    assert recording.unwritten == {}
    others = [f"experts.{expert}.{part}" for expert in range(4) for part in ("gate", "up", "down")]
    assert recording.unused == ("rotary", *(name for name in others if int(name[8]) // 2 != rank))


def test_the_padding_of_a_vocabulary_is_a_fill() -> None:
    assert [(fill.target, fill.box, fill.value) for fill in record_model(Engine(1), engine_checkpoint()).fills] == [
        ("embed.weight", ((5, 0), (3, 6)), 0)
    ]
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
    assert sorted(fill.box for fill in recording.fills) == [((i, i), (1, 1)) for i in range(3)]
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
    assert (recording.whole, recording.unwritten) == ((), {})


VIEWS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "reshape a transposed tensor": lambda p, w: p.data.copy_(w.t().reshape(6, 8)),
    "view": lambda p, w: p.data.copy_(w.view(2, 3, 8).transpose(0, 1).reshape(6, 8)),
    "write through a flat view": lambda p, w: p.data.view(-1).copy_(w.flatten()),
    "write through a transposed view": lambda p, w: p.data.t().copy_(w.view(6, 8).t()),
    "every other row": lambda p, w: (p.data[::2].copy_(w.view(6, 8)[:3]), p.data[1::2].copy_(w.view(6, 8)[3:])),
    "interleave": lambda p, w: p.data.view(3, 2, 8).copy_(w.view(2, 3, 8).transpose(0, 1)),
    "unbind": lambda p, w: [p.data[i].copy_(row) for i, row in enumerate(w.view(6, 8).unbind(0))],
    "cat": lambda p, w: p.data.copy_(torch.cat([w.view(6, 8)[3:], w.view(6, 8)[:3]])),
    "stack": lambda p, w: p.data.copy_(torch.stack([w.view(2, 3, 8)[1], w.view(2, 3, 8)[0]], 1).view(6, 8)),
    "cat of columns": lambda p, w: p.data.copy_(torch.cat([w.t()[:, :2], w.t()[:, 2:]], dim=1).t().reshape(6, 8)),
    "foreach": lambda p, w: torch._foreach_copy_([p.data[:3], p.data[3:]], list(w.view(6, 8).split(3))),
    "copies of copies": lambda p, w: p.data.copy_(w.t().clone().t().contiguous().clone().view(6, 8)),
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
    assert recording.whole == ()
    filled = sum(prod(view.size) for _, view in recording.regions[0])
    assert filled + sum(prod(fill.box[1]) for fill in recording.fills) == 48


# ---- what goes through load_weights ----

COMPUTED: dict[str, Callable[[Loader, Tensor], Any]] = {
    "times two": lambda m, w: m.p.data.copy_(w * 2),
    "in place": lambda m, w: m.p.data.copy_(w.mul_(3)),
    "quantize": lambda m, w: m.p.data.copy_((w / w.abs().amax()).mul(127).round()),
    "round on the way": lambda m, w: m.p.data.copy_(w.to(torch.bfloat16)),
    "to integers": lambda m, w: m.p.data.copy_(w.to(torch.int32)),
    "other bits": lambda m, w: m.p.data.copy_(w.view(torch.int32)),
    "as bits": lambda m, w: m.p.data.view(torch.int32).copy_(w.view(torch.int32)),
    "broadcast": lambda m, w: m.p.data.copy_(w[:1]),
    "add": lambda m, w: m.p.data.zero_().add_(w),
    "index": lambda m, w: m.p.data.copy_(w[torch.tensor([2, 0, 1])]),
    "write by index": lambda m, w: m.p.data.__setitem__(torch.tensor([2, 0, 1]), w),
    "pad": lambda m, w: m.p.data.copy_(nn.functional.pad(w[:, :3], (0, 1))),
    "padded in a new tensor": lambda m, w: m.p.data.copy_(padded(w)),
    "padded in a tensor like it": lambda m, w: m.p.data.copy_(padded(w, w.new_zeros(3, 4))),
    "fill from an item": lambda m, w: m.p.data.fill_(w[0, 0].item()),
    "condition": lambda m, w: m.p.data.copy_(w if w[0, 0] > 0 else w.flip(0)),
    "numpy": lambda m, w: m.p.data.copy_(torch.from_numpy(w.numpy().copy())),
    "list": lambda m, w: m.p.data.copy_(torch.tensor(w.tolist())),
    "overwritten by a fill": lambda m, w: (m.p.data.copy_(w), m.p.data[1].fill_(5)),
    "shifted over itself": lambda m, w: (m.p.data.copy_(w), m.p.data[1:].copy_(w[:2])),
    "caught": lambda m, w: m.p.data.copy_(w + (1 if sign(w) else 2)),
    "the parameter's values": lambda m, w: m.p.data.copy_(w if m.p.sum() > 1e9 else w.clone()),
    "a value of its own": lambda m, w: (m.p.data.copy_(w), m.p.data[1].copy_(torch.arange(4))),
    "the parameter's memory": lambda m, w: m.p.data.numpy().__setitem__(..., w.numpy()),
    "another parameter": lambda m, w: setattr(m, "p", nn.Parameter(w.clone(), requires_grad=False)),
    "other data": lambda m, w: setattr(m.p, "data", w.clone()),
    "other data of its own": lambda m, w: (setattr(m.p, "data", torch.empty(3, 4)), m.p.data.copy_(w)),
}


def padded(tensor: Tensor, result: Tensor | None = None) -> Tensor:
    result = torch.zeros(3, 4) if result is None else result
    result[:2].copy_(tensor[:2])
    return result


def sign(tensor: Tensor) -> bool:
    try:
        return bool(tensor[0, 0] > 0)
    except Exception:
        return False


@pytest.mark.parametrize("load", COMPUTED.values(), ids=COMPUTED)
def test_what_is_not_a_copy_goes_through_load_weights(load: Callable[[Loader, Tensor], Any]) -> None:
    """And views beside it are recorded, unless an effect cannot be said to be that of one tensor."""

    def load_weights(model: Loader, weights: Weights) -> None:
        for name, tensor in weights:
            if name == "view":
                model.q.data.copy_(tensor)
            else:
                load(model, tensor)

    weights = unique({"w.0": (3, 4), "view": (5,)})
    recording = check_recording(lambda: Loader(load_weights, p=(3, 4), q=(5,)), weights)
    assert [name for group in recording.whole for name in group.names] in (["w.0"], ["w.0", "view"])
    assert recording.regions[0] == ()
    assert all(group.reason for group in recording.whole)


@pytest.mark.parametrize(
    ("load", "shape", "dtype"),
    [
        (lambda p, w: p.data.view(torch.int32).copy_(w), (3, 4), torch.int32),
        (lambda p, w: p.data.copy_(w.view(torch.float32)), (3, 8), torch.bfloat16),
    ],
)
def test_bits_of_another_dtype_go_through_load_weights(load: Any, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    def load_weights(model: Loader, weights: Weights) -> None:
        for _, tensor in weights:
            load(model.p, tensor)

    recording = check_recording(lambda: Loader(load_weights, p=(3, 4)), unique({"w": shape}, dtype))
    assert whole_names(recording) == [("w",)]


def test_tensors_that_are_not_targets_are_not_written() -> None:
    def load(model: Loader, weights: Weights) -> None:
        model.calls.add_(1)
        by_name(model, weights)

    weights = unique({"a": (3,)})
    model = Loader(load, a=(3,))
    model.calls = torch.zeros(1)
    recording = record_model(model, weights)
    assert model.calls.item() == 0
    assert whole_names(recording) == [("a",)]
    assert "add_ writes to a tensor that is not one of the targets" in recording.whole[0].reason


def whole_names(recording: Recording) -> list[tuple[str, ...]]:
    return [group.names for group in recording.whole]


def by_name(model: Loader, weights: Weights) -> None:
    for name, tensor in weights:
        target = model.get_parameter(name[0])
        target.data.copy_(tensor)


def test_two_tensors_for_one_place_come_together() -> None:
    weights = unique({"a.0": (3,), "b.0": (2,), "a.1": (3,), "b.1": (2,), "c": (4,)})
    recording = check_recording(lambda: Loader(by_name, a=(3,), b=(2,), c=(4,)), weights)
    assert whole_names(recording) == [("a.0", "a.1"), ("b.0", "b.1")]
    assert [len(places) for places in recording.regions] == [0, 0, 0, 0, 1]


def test_what_is_computed_from_several_tensors_comes_together() -> None:
    def load(model: Loader, weights: Weights) -> None:
        pending: dict[str, Tensor] = {}
        for name, tensor in weights:
            pending[name] = tensor
            if name != "b" and {"weight", "scale"} <= pending.keys():
                model.a.data.copy_(pending.pop("weight") * pending.pop("scale"))
            if name == "b":
                model.b.data.copy_(tensor)

    weights = unique({"weight": (3, 4), "b": (2,), "scale": (3, 1)})
    recording = check_recording(lambda: Loader(load, a=(3, 4), b=(2,)), weights)
    assert whole_names(recording) == [("weight", "scale")]
    assert "mul" in recording.whole[0].reason


def test_refusals_in_one_layer_hold_for_all_of_its_kind() -> None:
    calls = 0

    def load(model: Loader, weights: Weights) -> None:
        nonlocal calls
        calls += 1
        for name, tensor in weights:
            layer = int(name.split(".")[1])
            if name.endswith("scale"):
                model.scales.data[layer].fill_(tensor.item())
            else:
                model.weights.data[layer].copy_(tensor)

    shapes = {f"layers.{i}.{kind}": shape for i in range(20) for kind, shape in (("scale", (1,)), ("weight", (3,)))}
    weights = unique(shapes)
    recording = record(
        (model := Loader(load, scales=(20,), weights=(20, 3))).load_weights, manifest_of(weights), tensors_of(model)
    )
    assert calls == 2
    assert recording.unseen == tuple(name for name in weights if name.endswith("scale"))
    assert whole_names(recording) == [(name,) for name in recording.unseen]
    check_recording(lambda: Loader(load, scales=(20,), weights=(20, 3)), weights)


def test_tied_parameters_are_one_target() -> None:
    def make() -> Loader:
        model = Loader(by_name, a=(3, 4))
        model.b = model.a
        return model

    recording = check_recording(make, unique({"a": (3, 4)}))
    assert [name for name, _ in recording.regions[0]] == ["a"]
    assert recording.unwritten == {}
    assert whole_names(check_recording(make, unique({"a": (3, 4), "b": (3, 4)}))) == [("a", "b")]


def test_a_loader_that_needs_what_cannot_be_recorded_takes_everything() -> None:
    def load(model: Loader, weights: Weights) -> None:
        given = dict(weights)
        model.a.data.fill_(given["a"].item())
        model.b.data.copy_(given["b"])

    recording = check_recording(lambda: Loader(load, a=(3,), b=(2,)), unique({"a": (1,), "b": (2,)}))
    assert whole_names(recording) == [("a", "b")]
    assert "KeyError" in recording.whole[0].reason


def direct(model: Loader) -> None:
    model.copy.data.copy_(model.scale)


def through_a_view(model: Loader) -> None:
    model.copy.data.fill_(model.scale.data[0])


def through_another_tensor(model: Loader) -> None:
    between = torch.empty(1)
    between.copy_(model.scale)
    model.copy.data.copy_(between)


def through_an_output(model: Loader) -> None:
    between = torch.empty(1)
    torch.mul(model.scale.data, 2, out=between)
    model.copy.data.copy_(between)


@pytest.mark.parametrize("finish", [direct, through_a_view, through_another_tensor, through_an_output])
def test_a_value_that_the_model_has_is_no_constant(finish: Callable[[Loader], None]) -> None:
    """It is that of the version that is loaded, not of the one while it was recorded."""

    def load(model: Loader, weights: Weights) -> None:
        for name, tensor in weights:
            model.get_parameter(name).data.copy_(tensor)
        finish(model)

    recording = check_recording(lambda: Loader(load, scale=(1,), copy=(1,)), unique({"scale": (1,)}))
    assert recording.fills == ()
    assert "reads a parameter's values" in recording.whole[0].reason
    assert set(recording.unwritten) == {"scale", "copy"}


def test_a_loader_that_does_something_else_without_the_others_takes_everything() -> None:
    def load(model: Loader, weights: Weights) -> None:
        given = list(weights)
        for name, tensor in given:
            model.get_parameter(name).data.copy_(tensor * 2 if name == "a" else tensor)
        if len(given) > 1:
            model.a.data[0].fill_(7)

    recording = check_recording(lambda: Loader(load, a=(3,), b=(2,)), unique({"a": (3,), "b": (2,)}))
    assert whole_names(recording) == [("a", "b")]


def test_what_an_unseen_tensor_writes_is_guarded() -> None:
    """A recording does not know what ``a`` writes; when it does write where ``b`` goes, that is an error."""

    def load(model: Loader, weights: Weights) -> None:
        for name, tensor in weights:
            model.p.data[2:].copy_(tensor) if name == "b" else model.p.data[:3].fill_(tensor.item())

    weights = unique({"a": (1,), "b": (2, 4)})
    model = Loader(load, p=(4, 4))
    recording = record_model(model, weights)
    assert (recording.unseen, len(recording.regions[1])) == (("a",), 1)
    with pytest.raises(LoadError, match=r"it writes p at \[2, 0\], where a recorded tensor goes"):
        recording.load_whole(model.load_weights, [("a", weights["a"])], tensors_of(model))
    assert bool((model.p == -1).all())


def test_what_load_weights_writes_by_itself_is_noted() -> None:
    def load(model: Loader, weights: Weights) -> None:
        for _, tensor in weights:
            model.p.data[1:, 1:].fill_(tensor.item())

    weights = unique({"a": (1,)})
    model = Loader(load, p=(3, 4), q=(2,))
    recording = record_model(model, weights)
    assert recording.load_whole(model.load_weights, weights.items(), tensors_of(model)) == {"p": [((1, 1), (2, 3))]}


# ---- what is reported, and what is an error ----


def test_regions_that_nothing_writes_are_reported() -> None:
    def load(model: Loader, weights: Weights) -> None:
        for _, tensor in weights:
            model.a.data[1:, :2].copy_(tensor)

    recording = record_model(Loader(load, a=(3, 4), b=(2,)), unique({"w": (2, 2)}))
    assert recording.unwritten == {"a": (((0, 0), (1, 4)), ((1, 2), (2, 2))), "b": (((0,), (2,)),)}


def test_skipped_names_are_reported() -> None:
    recording = check_recording(
        lambda: Loader(lambda model, weights: by_name(model, list(weights)[:1]), a=(3,)), unique({"a": (3,), "x": (2,)})
    )
    assert recording.unused == ("x",)


def test_an_error_of_the_engine_is_an_error_at_once() -> None:
    def load(model: Loader, weights: Weights) -> None:
        for name, tensor in weights:
            if name == "x":
                raise KeyError("no parameter x")
            model.a.data.copy_(tensor)

    with pytest.raises(ModelMismatch, match=r"KeyError after it took x, and nothing was written: 'no parameter x'"):
        record_model(Loader(load, a=(3,)), unique({"a": (3,), "x": (2,)}))


def test_a_shape_that_does_not_fit_is_an_error() -> None:
    with pytest.raises(ModelMismatch, match=r"after it took a, and nothing was written: .*size"):
        record_model(Loader(by_name, a=(3, 4)), unique({"a": (3, 5)}))


@pytest.mark.parametrize("keep", [lambda w: w, lambda w: w[1:], lambda w: w * 2, lambda w: w.clone()])
def test_a_loader_that_keeps_tensors_for_later_is_refused(keep: Callable[[Tensor], Tensor]) -> None:
    def load(model: Loader, weights: Weights) -> None:
        model.pending = {name: keep(tensor) for name, tensor in weights}

    with pytest.raises(LoadError, match=r"keeps 2 of the tensors .*the first is a"):
        record_model(Loader(load, a=(3,), b=(2,)), unique({"a": (3,), "b": (2,)}))


def test_targets_that_share_memory_are_refused() -> None:
    memory = torch.zeros(8)
    with pytest.raises(ModelMismatch, match="a and b share part of their memory"):
        record(list, manifest_of({}), {"a": memory[:5], "b": memory[3:]})


def test_targets_whose_elements_share_memory_are_refused() -> None:
    with pytest.raises(ValueError, match="expected targets that are dense, but a is not"):
        record(list, manifest_of({}), {"a": torch.zeros(1).expand(4)})


def test_targets_may_be_on_meta() -> None:
    weights = engine_checkpoint()
    with torch.device("meta"):
        model = Engine(1)
    assert record(model.load_weights, manifest_of(weights), tensors_of(model)) == record_model(Engine(1), weights)


def test_targets_may_be_regions_of_one_storage() -> None:
    memory = torch.full((6, 8), -1.0)
    targets = {"a": memory[:, :3], "b": memory[:, 4:]}

    def load(weights: Weights) -> None:
        for name, tensor in weights:
            targets[name].copy_(tensor)

    weights = unique({"a": (6, 3), "b": (6, 4)})
    recording = record(load, manifest_of(weights), targets)
    assert [places[0][0] for places in recording.regions] == ["a", "b"]
    assert bool((memory == -1).all())


def test_a_write_beside_a_parameter_is_not_recorded() -> None:
    memory = torch.full((6, 8), -1.0)

    def load(weights: Weights) -> None:
        for _, tensor in weights:
            memory.copy_(tensor)

    weights = unique({"a": (6, 8)})
    recording = record(load, manifest_of(weights), {"a": memory[:, :3]})
    assert "outside" in recording.whole[0].reason
    assert bool((memory == -1).all())
