"""Recordings of ``load_weights``: views and copies become regions, and what is anything else goes through it in full."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from math import prod
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from epload.errors import LoadError, ModelMismatch
from epload.integrations.engine.recording import record
from support.engines import Engine, Loader, Weights, engine_checkpoint, unique
from support.recordings import by_name, check_recording, manifest_of, record_model, tensors_of

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def each(load: Callable[[Loader, str, Tensor], Any]) -> Callable[[Loader, Weights], None]:
    """A ``load_weights`` that takes one tensor after another."""

    def load_weights(model: Loader, weights: Weights) -> None:
        for name, tensor in weights:
            load(model, name, tensor)

    return load_weights


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("checkpoint_dtype", DTYPES)
def test_every_loader_of_an_engine_is_recorded(rank: int, dtype: torch.dtype, checkpoint_dtype: torch.dtype) -> None:
    recording = check_recording(lambda: Engine(rank, dtype), engine_checkpoint(checkpoint_dtype))
    assert recording.passed_through == {}
    without_effect = {name for name, places in zip(engine_checkpoint(), recording.regions, strict=True) if not places}
    experts = [f"experts.{expert}.{part}" for expert in range(4) for part in ("gate", "up", "down")]
    assert without_effect == {"rotary", *(name for name in experts if int(name[8]) // 2 != rank)}
    # The padding of the vocabulary.
    assert recording.constants == ((("embed.weight", ((5, 0), (3, 6)), 0),) if rank else ())


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
    assert sorted(box for _, box, _ in recording.constants) == [((i, i), (1, 1)) for i in range(3)]


def in_thread(call: Callable[[], Any]) -> Any:
    with ThreadPoolExecutor() as threads:
        return threads.submit(call).result()


@each
def in_threads(model: Loader, name: str, tensor: Tensor) -> None:
    in_thread(lambda: model.get_parameter(name).data.copy_(tensor))


@each
def while_another_model_runs(model: Loader, name: str, tensor: Tensor) -> None:
    in_thread(lambda: nn.Linear(2, 2).register_buffer("cache", torch.zeros(2)))
    model.get_parameter(name).data.copy_(tensor)


def lookahead(model: Loader, weights: Weights) -> None:
    by_name(model, sorted(weights, key=lambda pair: pair[0], reverse=True))


@pytest.mark.parametrize("load", [in_threads, while_another_model_runs, lookahead])
def test_loaders_that_use_threads_or_take_all_tensors_first(load: Callable[..., Any]) -> None:
    recording = check_recording(lambda: Loader(load, a=(3, 4), b=(5,)), unique({"a": (3, 4), "b": (5,)}))
    assert recording.passed_through == {}


VIEWS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "write through a flat view": lambda p, w: p.data.view(-1).copy_(w.flatten()),
    "write through a transposed view": lambda p, w: p.data.t().copy_(w.view(6, 8).t()),
    "every other row": lambda p, w: (p.data[::2].copy_(w.view(6, 8)[:3]), p.data[1::2].copy_(w.view(6, 8)[3:])),
    "interleave": lambda p, w: p.data.view(3, 2, 8).copy_(w.view(2, 3, 8).transpose(0, 1)),
    "unbind": lambda p, w: [p.data[i].copy_(row) for i, row in enumerate(w.view(6, 8).unbind(0))],
    "foreach": lambda p, w: torch._foreach_copy_([p.data[:3], p.data[3:]], list(w.view(6, 8).split(3))),
    "copies of copies": lambda p, w: p.data.copy_(w.t().clone().t().contiguous().clone().view(6, 8)),
    "views of a transposed copy": lambda p, w: p.data.t().copy_(w.view(6, 8).t().contiguous().reshape(2, 4, 6).view(8, 6)),
    "through float64": lambda p, w: p.data.copy_(w.double().view(6, 8).float()),
    "parts of dtype and device": lambda p, w: p.data.copy_(w.to(device=p.device, dtype=p.dtype).view(6, 8)),
    "narrow, squeeze and expand as itself": lambda p, w: p.data.copy_(w.view(6, 1, 8).squeeze(1).expand(6, 8)),
    "set items": lambda p, w: [p.data.__setitem__(i, w.view(6, 8)[i]) for i in range(6)],
    "twice the same": lambda p, w: [p.data.copy_(w.view(6, 8)) for _ in range(2)],
    "an item": lambda p, w: [p.data[i, j].fill_(w.view(6, 8)[i, j].item()) for i in range(6) for j in range(8)],
    "zero first": lambda p, w: (p.data.zero_(), p.data[1:5].copy_(w.view(6, 8)[1:5])),
}


@pytest.mark.parametrize("load", VIEWS.values(), ids=VIEWS)
def test_views_and_copies_are_recorded(load: Callable[[Tensor, Tensor], Any]) -> None:
    load_weights = each(lambda model, _, tensor: load(model.p, tensor))
    recording = check_recording(lambda: Loader(load_weights, p=(6, 8)), unique({"w": (4, 12)}))
    assert recording.passed_through == {}
    filled = sum(prod(view.size) for _, view in recording.regions[0])
    assert filled + sum(prod(size) for _, (_, size), _ in recording.constants) == 48


# ---- what is no copy ----

COMPUTED: dict[str, Callable[[Loader, Tensor], Any]] = {
    "times two": lambda m, w: m.p.data.copy_(w * 2),
    "in place": lambda m, w: m.p.data.copy_(w.mul_(3)),
    "round on the way": lambda m, w: m.p.data.copy_(w.to(torch.bfloat16)),
    "to integers": lambda m, w: m.p.data.copy_(w.to(torch.int32)),
    "other bits": lambda m, w: m.p.data.copy_(w.view(torch.int32)),
    "as bits": lambda m, w: m.p.data.view(torch.int32).copy_(w.view(torch.int32)),
    "bits of another size": lambda m, w: m.p.data.copy_(w.view(torch.bfloat16)[:, ::2]),
    "broadcast": lambda m, w: m.p.data.copy_(w[:1]),
    "add": lambda m, w: m.p.data.zero_().add_(w),
    "index": lambda m, w: m.p.data.copy_(w[torch.tensor([2, 0, 1])]),
    "pad": lambda m, w: m.p.data.copy_(nn.functional.pad(w[:, :3], (0, 1))),
    "padded in a new tensor": lambda m, w: m.p.data.copy_(padded(w)),
    "fill from an item": lambda m, w: m.p.data.fill_(w[0, 0].item()),
    "an item as a number": lambda m, w: m.p.data.fill_(float(w[0, 0].item())),
    "condition": lambda m, w: m.p.data.copy_(w if w[0, 0] > 0 else w.flip(0)),
    "numpy": lambda m, w: m.p.data.copy_(torch.from_numpy(w.numpy().copy())),
    "overwritten by a fill": lambda m, w: (m.p.data.copy_(w), m.p.data[1].fill_(5)),
    "shifted over itself": lambda m, w: (m.p.data.copy_(w), m.p.data[1:].copy_(w[:2])),
    "caught": lambda m, w: m.p.data.copy_(w + (1 if sign(w) else 2)),
    "filled before and after": lambda m, w: (m.p.data.zero_(), m.p.data.copy_(w), m.p.data.zero_()),
    "a constant as bits": lambda m, w: (m.p.data.copy_(w), m.p.data.view(torch.int32)[:2].fill_(5)),
    "a constant as bytes": lambda m, w: (m.p.data.copy_(w), m.p.data.view(torch.uint8)[:, :3].fill_(5)),
    "in place through bits": lambda m, w: (w.view(torch.int32).add_(1), m.p.data.copy_(w)),
    "cat": lambda m, w: m.p.data.copy_(torch.cat([w[2:], w[:2]])),
    "reshape a transposed tensor": lambda m, w: m.p.data.copy_(w.t().reshape(3, 4)),
    "the parameter's values": lambda m, w: m.p.data.copy_(w if m.p.sum() > 1e9 else w.clone()),
    "a value of its own": lambda m, w: (m.p.data.copy_(w), m.p.data[1].copy_(torch.arange(4))),
    "the parameter's memory": lambda m, w: m.p.data.numpy().__setitem__(..., w.numpy()),
    "another parameter": lambda m, w: setattr(m, "p", nn.Parameter(w.clone(), requires_grad=False)),
    "another parameter in a thread": lambda m, w: in_thread(
        lambda: setattr(m, "p", nn.Parameter(w.clone(), requires_grad=False))
    ),
    "other data": lambda m, w: setattr(m.p, "data", w.clone()),
}


def padded(tensor: Tensor) -> Tensor:
    result = torch.zeros(3, 4)
    result[:2].copy_(tensor[:2])
    return result


def sign(tensor: Tensor) -> bool:
    try:
        return bool(tensor[0, 0] > 0)
    except Exception:
        return False


@pytest.mark.parametrize("load", COMPUTED.values(), ids=COMPUTED)
def test_what_is_not_a_copy_goes_through_load_weights(load: Callable[[Loader, Tensor], Any]) -> None:
    """Views beside it are recorded, unless an effect cannot be said to be that of one tensor."""

    @each
    def load_weights(model: Loader, name: str, tensor: Tensor) -> None:
        model.q.data.copy_(tensor) if name == "view" else load(model, tensor)

    weights = unique({"w.0": (3, 4), "view": (5,)})
    recording = check_recording(lambda: Loader(load_weights, p=(3, 4), q=(5,)), weights)
    assert list(recording.passed_through) in (["w.0"], ["w.0", "view"])
    assert all(recording.passed_through.values())


def computed_from_two(model: Loader, weights: Weights) -> None:
    pending: dict[str, Tensor] = {}
    for name, tensor in weights:
        if name == "other":
            model.other.data.copy_(tensor)
        else:
            pending[name] = tensor
    if pending:
        model.a.data.copy_(pending["weight"] * pending["scale"].reciprocal())


@each
def two_in_one_place(model: Loader, name: str, tensor: Tensor) -> None:
    (model.other if name == "other" else model.a).data[:].copy_(tensor)


@each
def filled_between(model: Loader, name: str, tensor: Tensor) -> None:
    if name == "scale":
        model.a.data[:1].fill_(7)
    (model.other if name == "other" else model.a).data[: len(tensor)].copy_(tensor)


@pytest.mark.parametrize("load", [computed_from_two, two_in_one_place, filled_between])
def test_tensors_that_belong_together_come_together(load: Callable[[Loader, Weights], Any]) -> None:
    weights = unique({"weight": (3, 4), "other": (2,), "scale": (1, 4)})
    recording = check_recording(lambda: Loader(load, a=(3, 4), other=(2,)), weights)
    assert list(recording.passed_through) == ["weight", "scale"]
    assert [len(places) for places in recording.regions] == [0, 1, 0]


# ---- what takes everything ----


def needs_others(model: Loader, weights: Weights) -> None:
    given = dict(weights)
    model.a.data.copy_(given["a"] * 2)
    model.b.data.copy_(given["b"])


def counts_others(model: Loader, weights: Weights) -> None:
    given = list(weights)
    for name, tensor in given:
        model.get_parameter(name).data.copy_(tensor * 2 if name == "a" else tensor)
    if len(given) > 1:
        model.a.data[0].fill_(7)


def zeroes_once(model: Loader, weights: Weights) -> None:
    model.a.data.zero_()
    for name, tensor in weights:
        model.a.data[: len(tensor)].copy_(tensor * 2) if name == "a" else model.a.data[-len(tensor) :].copy_(tensor)


@pytest.mark.parametrize("load", [needs_others, counts_others, zeroes_once])
def test_a_loader_that_does_something_else_without_the_others_takes_everything(load: Any) -> None:
    recording = check_recording(lambda: Loader(load, a=(5,), b=(2,)), unique({"a": (1,), "b": (2,)}))
    assert list(recording.passed_through) == ["a", "b"]
    assert recording.written is None


def test_tensors_that_are_not_targets_are_not_written() -> None:
    def load(model: Loader, weights: Weights) -> None:
        model.calls.add_(1)
        by_name(model, weights)

    model = Loader(load, a=(3,))
    model.calls = torch.zeros(1)
    recording = record_model(model, unique({"a": (3,)}))
    assert model.calls.item() == 0
    assert "add_ writes to a tensor that is not one of the targets" in recording.passed_through["a"]


def through(between: Tensor, model: Loader, compute: Callable[..., Any]) -> None:
    compute(between, model.scale.data)
    model.copy.data.copy_(between)


@each
def in_two_steps(model: Loader, name: str, tensor: Tensor) -> None:
    """Computes a parameter from what was copied to it, as loaders of Mamba do."""
    parameter = model.get_parameter(name)
    parameter.data.copy_(tensor)
    if name == "a":
        parameter.data.copy_(-torch.exp(parameter.float()))


@each
def cleared(model: Loader, name: str, tensor: Tensor) -> None:
    """Changes a tensor that it is given, as ranks do on which GPT-OSS has no bias."""
    if name == "a":
        tensor.zero_()
    model.get_parameter(name).data.copy_(tensor)


@each
def cleared_below(model: Loader, name: str, tensor: Tensor) -> None:
    """The same, but for a view of the tensor."""
    before = tensor.view(-1)
    if name == "a":
        tensor.zero_()
    model.get_parameter(name).data.copy_(before)


@pytest.mark.parametrize(("load", "others_are_copied"), [(in_two_steps, True), (cleared, True), (cleared_below, False)])
def test_what_changes_before_or_after_it_is_copied_goes_through_alone(load: Any, others_are_copied: bool) -> None:
    recording = check_recording(lambda: Loader(load, a=(3,), b=(2,)), unique({"a": (3,), "b": (2,)}))
    assert list(recording.passed_through) == (["a"] if others_are_copied else ["a", "b"])


FINISH: dict[str, Callable[[Loader], Any]] = {
    "direct": lambda m: m.copy.data.copy_(m.scale),
    "through a view": lambda m: m.copy.data.fill_(m.scale.data[0]),
    "through another tensor": lambda m: through(torch.empty(1), m, Tensor.copy_),
    "through an output": lambda m: through(torch.empty(1), m, lambda between, scale: torch.mul(scale, 2, out=between)),
}


@pytest.mark.parametrize("finish", FINISH.values(), ids=FINISH)
def test_a_value_that_the_model_has_is_no_constant(finish: Callable[[Loader], None]) -> None:
    """It is that of the version that is loaded, not of the one while it was recorded."""

    def load(model: Loader, weights: Weights) -> None:
        for _, tensor in weights:
            model.scale.data.copy_(tensor)
        finish(model)

    recording = check_recording(lambda: Loader(load, scale=(1,), copy=(1,)), unique({"scale": (1,)}))
    assert recording.constants == ()
    assert "reads a parameter's values" in recording.passed_through["scale"]


@each
def by_map(model: Loader, name: str, tensor: Tensor) -> None:
    """Fills the rows of which a map of integers has the numbers, as engines do with their own experts."""
    row = model.rows[int(name[1:])].item()
    if row >= 0:
        model.p.data[row].copy_(tensor)


def mapped(load: Callable[[Loader, Weights], None], *rows: int) -> Loader:
    model = Loader(load, p=(2, 3))
    model.register_buffer("rows", torch.tensor(rows), persistent=False)
    return model


def test_integers_that_the_model_has_may_choose_where_a_tensor_goes() -> None:
    make = partial(mapped, by_map, 1, -1, 0, -1)
    recording = check_recording(make, unique({f"w{i}": (3,) for i in range(4)}))
    assert recording.passed_through == {}
    assert [[view.start for _, view in places] for places in recording.regions] == [[(1, 0)], [], [(0, 0)], []]
    model = make()
    assert recording.changed_input(tensors_of(model)) is None
    model.rows[1] = 1
    assert recording.changed_input(tensors_of(model)) == "rows"


@pytest.mark.parametrize("written_first", [False, True])
def test_integers_that_are_read_and_written_are_passed_through(written_first: bool) -> None:
    def load(model: Loader, weights: Weights) -> None:
        (_, rows), weight = weights
        if written_first:
            model.rows.copy_(rows)
        by_map(model, [weight])
        model.rows.copy_(rows)

    weights = {"rows": torch.tensor([0]), **unique({"w0": (3,)})}
    recording = check_recording(partial(mapped, load, 1), weights)
    assert sorted(recording.passed_through) == ["rows", "w0"]


# ---- errors ----


def test_an_error_of_the_engine_is_an_error_at_once() -> None:
    @each
    def load(model: Loader, name: str, tensor: Tensor) -> None:
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


def test_a_view_of_a_whole_target_is_that_target() -> None:
    """vLLM's Mamba-2 keeps such a view of its convolution's weight for a kernel."""

    load = each(lambda model, name, tensor: model.get_parameter(name).data[1:3].copy_(tensor))
    model = Loader(load, weight=(4, 1, 3))
    model.register_buffer("flat", model.weight.view(4, 3), persistent=False)
    model.register_buffer("turned", model.weight.data[:, 0].T, persistent=False)
    recording = record_model(model, unique({"weight": (2, 1, 3)}))
    assert not recording.passed_through
    assert [(name, view.start, view.size) for name, view in recording.regions[0]] == [("weight", (1, 0, 0), (2, 1, 3))]


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
    assert "outside" in recording.passed_through["all"]
    assert bool((memory == -1).all())


def test_tied_parameters_are_one_target() -> None:
    def make() -> Loader:
        model = Loader(by_name, a=(3, 4))
        model.b = model.a
        return model

    recording = check_recording(make, unique({"a": (3, 4)}))
    assert [name for name, _ in recording.regions[0]] == ["a"]
    assert list(check_recording(make, unique({"a": (3, 4), "b": (3, 4)})).passed_through) == ["a", "b"]
