"""Values that are not copies are not recorded: such tensors go through ``load_weights`` in full."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from epload.errors import LoadError
from epload.integrations.engine.recording import record
from support.engines import Loader, Weights, unique
from support.recordings import by_name, check_recording, manifest_of, record_model, tensors_of

COMPUTED: dict[str, Callable[[Loader, Tensor], Any]] = {
    "times two": lambda m, w: m.p.data.copy_(w * 2),
    "in place": lambda m, w: m.p.data.copy_(w.mul_(3)),
    "quantize": lambda m, w: m.p.data.copy_((w / w.abs().amax()).mul(127).round()),
    "round on the way": lambda m, w: m.p.data.copy_(w.to(torch.bfloat16)),
    "to integers": lambda m, w: m.p.data.copy_(w.to(torch.int32)),
    "other bits": lambda m, w: m.p.data.copy_(w.view(torch.int32)),
    "as bits": lambda m, w: m.p.data.view(torch.int32).copy_(w.view(torch.int32)),
    "bits of another size": lambda m, w: m.p.data.copy_(w.view(torch.bfloat16)[:, ::2]),
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
    "filled before and after": lambda m, w: (m.p.data.zero_(), m.p.data.copy_(w), m.p.data.zero_()),
    "a constant as bits": lambda m, w: (m.p.data.copy_(w), m.p.data.view(torch.int32)[:2].fill_(5)),
    "a constant as bytes": lambda m, w: (m.p.data.copy_(w), m.p.data.view(torch.uint8)[:, :3].fill_(5)),
    "in place through bits": lambda m, w: (w.view(torch.int32).add_(1), m.p.data.copy_(w)),
    "in place through a view": lambda m, w: (w[1].mul_(2), m.p.data.copy_(w)),
    "cat": lambda m, w: m.p.data.copy_(torch.cat([w[2:], w[:2]])),
    "stack": lambda m, w: m.p.data.copy_(torch.stack([w[2], w[0], w[1]])),
    "reshape a transposed tensor": lambda m, w: m.p.data.copy_(w.t().reshape(3, 4)),
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
    assert list(recording.whole) in (["w.0"], ["w.0", "view"])
    assert recording.regions[0] == ()
    assert all(recording.whole.values())


def test_tensors_that_are_not_targets_are_not_written() -> None:
    def load(model: Loader, weights: Weights) -> None:
        model.calls.add_(1)
        by_name(model, weights)

    weights = unique({"a": (3,)})
    model = Loader(load, a=(3,))
    model.calls = torch.zeros(1)
    recording = record_model(model, weights)
    assert model.calls.item() == 0
    assert list(recording.whole) == ["a"]
    assert "add_ writes to a tensor that is not one of the targets" in str(recording.whole)


def test_two_tensors_for_one_place_come_together() -> None:
    weights = unique({"a.0": (3,), "b.0": (2,), "a.1": (3,), "b.1": (2,), "c": (4,)})
    recording = check_recording(lambda: Loader(by_name, a=(3,), b=(2,), c=(4,)), weights)
    assert list(recording.whole) == ["a.0", "b.0", "a.1", "b.1"]
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
    assert list(recording.whole) == ["weight", "scale"]
    assert "mul" in str(recording.whole)


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
    assert recording.untraced == tuple(name for name in weights if name.endswith("scale"))
    assert tuple(recording.whole) == recording.untraced
    check_recording(lambda: Loader(load, scales=(20,), weights=(20, 3)), weights)


def test_a_loader_that_needs_what_cannot_be_recorded_takes_everything() -> None:
    def load(model: Loader, weights: Weights) -> None:
        given = dict(weights)
        model.a.data.fill_(given["a"].item())
        model.b.data.copy_(given["b"])

    recording = check_recording(lambda: Loader(load, a=(3,), b=(2,)), unique({"a": (1,), "b": (2,)}))
    assert list(recording.whole) == ["a", "b"]
    assert "KeyError" in str(recording.whole)


def through_another_tensor(model: Loader) -> None:
    between = torch.empty(1)
    between.copy_(model.scale)
    model.copy.data.copy_(between)


def through_an_output(model: Loader) -> None:
    between = torch.empty(1)
    torch.mul(model.scale.data, 2, out=between)
    model.copy.data.copy_(between)


FINISH: dict[str, Callable[[Loader], Any]] = {
    "direct": lambda m: m.copy.data.copy_(m.scale),
    "through a view": lambda m: m.copy.data.fill_(m.scale.data[0]),
    "through another tensor": through_another_tensor,
    "through an output": through_an_output,
}


@pytest.mark.parametrize("finish", FINISH.values(), ids=FINISH)
def test_a_value_that_the_model_has_is_no_constant(finish: Callable[[Loader], None]) -> None:
    """It is that of the version that is loaded, not of the one while it was recorded."""

    def load(model: Loader, weights: Weights) -> None:
        for name, tensor in weights:
            model.get_parameter(name).data.copy_(tensor)
        finish(model)

    recording = check_recording(lambda: Loader(load, scale=(1,), copy=(1,)), unique({"scale": (1,)}))
    assert recording.fills == ()
    assert "reads a parameter's values" in str(recording.whole)
    assert recording.written == {}


def test_a_loader_that_does_something_else_without_the_others_takes_everything() -> None:
    def load(model: Loader, weights: Weights) -> None:
        given = list(weights)
        for name, tensor in given:
            model.get_parameter(name).data.copy_(tensor * 2 if name == "a" else tensor)
        if len(given) > 1:
            model.a.data[0].fill_(7)

    recording = check_recording(lambda: Loader(load, a=(3,), b=(2,)), unique({"a": (3,), "b": (2,)}))
    assert list(recording.whole) == ["a", "b"]


def test_what_an_unseen_tensor_writes_is_guarded() -> None:
    """A recording does not know what ``a`` writes; when it does write where ``b`` goes, that is an error."""

    def load(model: Loader, weights: Weights) -> None:
        for name, tensor in weights:
            model.p.data[2:].copy_(tensor) if name == "b" else model.p.data[:3].fill_(tensor.item())

    weights = unique({"a": (1,), "b": (2, 4)})
    model = Loader(load, p=(4, 4))
    recording = record_model(model, weights)
    assert (recording.untraced, len(recording.regions[1])) == (("a",), 1)
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
