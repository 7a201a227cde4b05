"""Loads after one that has failed: what that was to fill holds no values, whatever is loaded next. Values that nothing fills are
found, an initializer cannot touch what was loaded, and tensors that share memory in part are refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForSequenceClassification

import epload
from epload import CheckpointError, LoadError, Mapping, ModelMismatch, Pieces
from epload.model import materialize
from epload.model.dtensor import local_tensors
from epload.model.memory import is_poisoned, poison
from support.checks import full_values, local_of
from support.failures import Filling
from support.findings import differing, must_be_refused
from support.models import on_meta
from support.on_ranks import on_ranks
from support.small_model import loader

POISON = 777.0
load = partial(epload.load, strict=False, progress=False)


class Unreadable(Filling):
    """But for its headers."""

    def fill(self, bucket: Tensor, pieces: Sequence[Any] | Pieces) -> None:
        raise CheckpointError("no more bytes")


def classifier() -> Any:
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    return LlamaForSequenceClassification(LlamaConfig(vocab_size=131, **sizes))


def fail(model: nn.Module, state: dict[str, Tensor]) -> None:
    """Fails once the model has storage; what this holds then is not zero, which would look like values."""
    with pytest.raises(LoadError, match="no more bytes"):
        load(model, Unreadable(state))
    for name, tensor in model.named_parameters():
        if not name.startswith("written"):
            leave_garbage(tensor)


def leave_garbage(tensor: Tensor) -> None:
    """Makes a tensor what nobody wrote, past its version; but for the elements by which epload tells that."""
    local_of(tensor.detach()).numpy().reshape(-1)[16:] = POISON


@on_ranks(2)
def test_a_retry_initializes_what_the_first_load_was_to(rank: int) -> None:
    body = {name: t.clone() for name, t in classifier().state_dict().items() if not name.startswith("score")}
    for shard in (False, True):
        model = on_meta(classifier)
        if shard:
            fully_shard(model.model.layers[0])
            fully_shard(model)
        fail(model, body)
        if shard:
            model.to_empty(device="meta")  # gives DTensors other objects
            fail(model, body)
        assert "score.weight" in load(model, body).initialized
        head = local_of(model.score.weight)
        assert not (head == POISON).any()
        assert "score.weight" not in load(model, body).initialized
        assert torch.equal(head, local_of(model.score.weight))


@on_ranks(2)
def test_a_retry_after_memory_ran_out_initializes_what_the_first_load_was_to(rank: int) -> None:
    """Plain tensors have storage before DTensors do."""
    body = {name: t.clone() for name, t in classifier().state_dict().items() if not name.startswith("score")}
    model = on_meta(classifier)
    fully_shard(model.model.layers[0])
    no_memory = mock.patch.object(materialize, "_fill_in_place", side_effect=torch.OutOfMemoryError("out of memory"))
    with no_memory, pytest.raises(LoadError, match="out of memory"):
        load(model, body)
    leave_garbage(model.score.weight)
    assert "score.weight" in load(model, body).initialized
    assert not (model.score.weight == POISON).any()


@on_ranks(2)
def test_what_a_caller_has_written_to_local_tensors_after_the_failure_is_a_value(rank: int) -> None:
    model = on_meta(Two)
    fully_shard(model)
    fail(model, A | WRITTEN)
    for tensor in local_tensors(list(model.parameters())):  # as a receiver's commit does
        tensor.fill_(3)
    assert load(model, A).missing_keys == ["written.weight"]
    assert bool((local_of(model.written.weight) == 3).all())


class Buffered(nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 2, bias=False)
        self.register_buffer("table", torch.arange(2.0), persistent=False)


def test_a_retry_computes_buffers_that_no_checkpoint_has() -> None:
    """They are on meta again, and are neither taken for values nor given to other ranks."""
    model, state = on_meta(Buffered), {"weight": torch.ones(2, 2)}

    def fill(module: Any, *_: Any) -> None:
        module.table.copy_(torch.arange(2.0))

    with pytest.raises(LoadError, match="no more bytes"):
        load(model, Unreadable(state), init_missing=fill)
    assert model.table.is_meta
    load(model, state, init_missing=fill)
    assert model.table.tolist() == [0, 1]


def test_each_load_of_a_kept_loader_computes_buffers_that_no_checkpoint_has() -> None:
    """An allocator may have given back other memory, as after an engine's sleep."""
    model = classifier()
    frequencies = model.model.rotary_emb.inv_freq
    state, expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}, frequencies.clone()
    with epload.HierarchicalLoader(progress=False) as kept:
        for _ in range(3):
            frequencies.zero_()
            assert "model.rotary_emb.inv_freq" in kept.load(model, state).initialized
            assert torch.equal(frequencies, expected)


def test_some_tensors_are_not_filled_where_others_hold_no_values(tmp_path: Path) -> None:
    only = Mapping(only=(("a.weight", "a.weight"),))
    model = on_meta(Two)
    with pytest.raises(ModelMismatch, match=r"others hold no values yet: written\.weight"):
        load(model, A, mapping=only)
    fail(model, A | WRITTEN)
    with pytest.raises(ModelMismatch, match=r"others hold no values yet: written\.weight"):
        load(model, A, mapping=only)
    load(model, A | WRITTEN)
    with pytest.raises(ModelMismatch, match="only= of the mapping names tensors that the model lacks: nope"):
        load(model, A, mapping=Mapping(only=(("a.weight", "nope"),)))
    load(model, {"a.weight": torch.zeros(2, 2)}, mapping=only)
    assert not model.a.weight.any()
    both = {"a.weight": torch.ones(2, 2), "written.weight": torch.zeros_like(model.written.weight)}
    kept = model.written.weight.detach().clone()
    assert load(model, both, mapping=only).unexpected_keys == ["written.weight"]
    assert model.a.weight.all()
    assert torch.equal(model.written.weight, kept)
    with pytest.raises(ValueError, match="expected a mapping without only="):
        epload.save(model, tmp_path / "part", mapping=only)


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(2, 2, bias=False)
        self.written = nn.Linear(2, 2, bias=False)


A, WRITTEN = {"a.weight": torch.ones(2, 2)}, {"written.weight": torch.ones(2, 2)}


def test_another_checkpoint_does_not_leave_what_the_first_was_to_fill() -> None:
    model = on_meta(Two)
    fail(model, A | WRITTEN)
    with pytest.raises(ModelMismatch, match=r"fills 1 tensor .*: a\.weight"):
        load(model, WRITTEN)
    load(model, A | WRITTEN)
    load(model, {"a.weight": torch.zeros(2, 2)})
    assert model.written.weight.tolist() == [[1, 1], [1, 1]]


def test_tensors_of_other_strides_hold_no_values_after_a_failed_load_either() -> None:
    state = {"weight": torch.arange(72.0).reshape(4, 2, 3, 3), "bias": torch.ones(4)}
    for late in (False, True):
        model = on_meta(lambda: nn.Conv2d(2, 4, 3))
        model = model if late else model.to(memory_format=torch.channels_last)
        fail(model, state)
        model = model.to(memory_format=torch.channels_last)
        if not late:
            with pytest.raises(ModelMismatch, match="weight"):
                load(model, {"bias": torch.ones(4)})
        load(model, state)
        assert torch.equal(model.weight, state["weight"])


def test_what_a_caller_has_written_after_the_failure_is_a_value() -> None:
    writes: list[Callable[[nn.Parameter], object]] = [lambda w: nn.init.constant_(w, 3), lambda w: w.data.fill_(3)]
    for write in writes:
        model = on_meta(Two)
        fail(model, A | WRITTEN)
        write(model.written.weight)
        assert load(model, A).missing_keys == ["written.weight"]
        assert model.written.weight.tolist() == [[3, 3], [3, 3]]


@pytest.mark.parametrize("hook", [lambda module, path, names: None, None])
def test_a_hook_that_leaves_tensors_unfilled_is_not_right_the_second_time(hook: Callable[..., None] | None) -> None:
    model = on_meta(Two)
    with pytest.raises(LoadError, match=r"init_missing left written\.weight unfilled"):
        load(model, A, init_missing=lambda *_: None)
    with pytest.raises(LoadError, match=r"written\.weight"):
        load(model, A, init_missing=hook)


# ---- values that nothing fills ----

strictly = partial(epload.load, progress=False)


class Stray(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.empty(3, 2))
        self.v = nn.Parameter(torch.empty(5))
        self.register_buffer("table", torch.empty(4), persistent=False)


@on_ranks(4)
def test_what_nobody_fills_is_an_error_on_all_ranks(rank: int) -> None:
    for drop, text in ((), "fills 1 tensor on meta: table."), (("v",), "fills 2 tensors on meta: table, v."):
        model = on_meta(Stray)
        fully_shard(model)
        full = {"w": torch.ones(3, 2), "v": torch.ones(5)}
        state = {name: tensor for name, tensor in full.items() if name not in drop} if rank == 0 else None
        load = partial(loader().load, model, state, strict=False)
        must_be_refused(load, "ModelMismatch", text, "init_missing")
        assert [f"{name} left meta" for name, t in [*model.named_parameters(), *model.named_buffers()] if not t.is_meta] == []
        load = partial(loader().load, model, state, strict=False, init_missing=lambda *_: None)
        must_be_refused(load, "init_missing left table")


def test_what_a_hook_fills_is_not_warned_of_and_attributes_that_stay_on_meta_are() -> None:
    state = {"w": torch.ones(3, 2), "v": torch.ones(5)}
    for warns in (False, True):
        model = on_meta(Stray)
        if warns:
            empty = torch.empty(2, device="meta")
            model.frequencies, model.by_axis = [empty, None], {"x": empty.clone()}
        report = strictly(model, state, init_missing=lambda module, *_: module.table.fill_(3))
        assert torch.equal(model.table, torch.full((4,), 3.0))
        said = ["no load fills them: 2 tensors: frequencies, by_axis. Set" in warning for warning in report.warnings]
        assert said == [True] * warns
    assert not any("no load fills" in warning for warning in strictly(model, state, strict=False).warnings), "said once"


# ---- initializers ----


class Careless(nn.Module):
    """Its initializer writes wherever it can, by every way there is."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(3, 3)
        self.b = nn.Linear(3, 3)
        self.b.weight = self.a.weight
        self.register_buffer("t", torch.arange(3.0), persistent=False)
        self.friends = [self.a]

    def _init_weights(self, module: nn.Module) -> None:
        for each in (self.a, self.b, self.friends[0], *self.children(), self.get_submodule("a")):
            each.weight.data.fill_(7)
            nn.init.constant_(each.bias, 8)
        if module is self:
            self.t = torch.full((3,), 9.0)
            self.scale = 0.25


def test_an_initializer_cannot_touch_what_was_loaded() -> None:
    model = on_meta(Careless)
    state = {"a.weight": torch.rand(3, 3), "a.bias": torch.rand(3), "b.bias": torch.rand(3)}
    assert strictly(model, state).initialized == ["t"]
    assert differing(model, {**state, "b.weight": state["a.weight"]}) == []
    assert model.b.weight is model.a.weight
    assert torch.equal(model.t, torch.full((3,), 9.0))
    assert model.scale == 0.25
    assert model.friends[0] is model.a


class Failing(Stray):
    def _init_weights(self, module: nn.Module) -> None:
        raise KeyError("rope")


def test_an_initializer_that_fails_is_named() -> None:
    model = on_meta(Failing)
    with pytest.raises(epload.ModelMismatch, match=r"Failing\._init_weights failed .* \(KeyError: 'rope'\).* table"):
        epload.load(model, {"w": torch.ones(3, 2), "v": torch.ones(5)}, progress=False)
    assert model.w.is_meta


DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn, torch.complex64]
DTYPES += [torch.int64, torch.int32, torch.int16, torch.uint8, torch.int8, torch.bool]


@pytest.mark.parametrize("dtype", DTYPES)
def test_marked_memory_is_found_however_little_is_left(dtype: torch.dtype) -> None:
    tensor = torch.empty(7, 6, dtype=dtype).t()[::2]
    poison(tensor)
    assert is_poisoned(tensor)
    tensor.data[:2].zero_()
    assert is_poisoned(tensor) is (dtype not in (torch.uint8, torch.int8))
    tensor.copy_(torch.ones(()).to(dtype).expand(tensor.shape))
    assert not is_poisoned(tensor)
    assert not is_poisoned(torch.empty(0, 3, dtype=dtype))


# ---- tensors that share memory ----


class Holder(nn.Module):
    def __init__(self, **tensors: Tensor) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            setattr(self, name, nn.Parameter(tensor))


def test_one_memory_under_two_objects_is_one_tensor() -> None:
    value = torch.arange(12.0).reshape(4, 3)
    for given_names in ("ab", "a", "b"):
        base = torch.zeros(4, 3)
        model = Holder(a=base, b=base, c=torch.zeros(2))
        state = dict.fromkeys(given_names, value) | {"c": torch.ones(2)}
        assert strictly(model, state).missing_keys == []
        assert differing(model, {"a": value, "b": value, "c": torch.ones(2)}) == []


def test_memory_that_is_parted_between_loads_is_noticed() -> None:
    base = torch.zeros(4, 3)
    model = Holder(a=base, b=base)
    loader = epload.HierarchicalLoader(progress=False)
    for _ in range(2):
        loader.load(model, {"a": torch.ones(4, 3)})
    model.b.data = torch.zeros(4, 3)
    state = {"a": torch.full((4, 3), 2.0), "b": torch.full((4, 3), 3.0)}
    loader.load(model, state)
    assert differing(model, state) == []


REFUSED: dict[str, Callable[[Tensor], nn.Module]] = {
    "a and b share part": lambda base: Holder(a=base[:3], b=base[2:]),
    "a and b share part of": lambda base: Holder(a=base, b=base.t()),
    "a and b share part of their": lambda base: Holder(a=base, b=base.view(-1)),
    "w is expanded": lambda base: Holder(w=base.view(-1).unfold(0, 5, 2)),
    "w is a lazy conjugate or negation": lambda base: Holder(w=torch.complex(base, base).conj()),
}


@pytest.mark.parametrize("text", REFUSED)
def test_memory_that_is_shared_in_part_is_refused(text: str) -> None:
    model = REFUSED[text](torch.arange(12.0).reshape(4, 3))
    before = [tensor.detach().clone() for tensor in model.parameters()]
    must_be_refused(partial(strictly, model, full_values(model)), "ModelMismatch", text)
    assert all(map(torch.equal, before, model.parameters()))


def test_columns_and_rows_of_one_matrix_are_apart() -> None:
    base = torch.zeros(6, 4)
    model = Holder(a=base[:3, ::2], b=base[:3, 1::2], c=base[3:4], d=base[4:].t(), e=base[:0])
    state = full_values(model)
    strictly(model, state)
    assert differing(model, state) == []


def test_a_buffer_that_is_saved_under_one_of_its_names() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            table = torch.zeros(3)
            self.register_buffer("saved", table)
            self.register_buffer("unsaved", table, persistent=False)

    with torch.device("meta"):
        model = Twice()
    epload.load(model, {"saved": torch.arange(3.0)}, progress=False)
    assert torch.equal(model.unsaved, torch.arange(3.0))
    assert model.unsaved is model.saved


class KeepsTensor(nn.Module):
    """Has a tensor that is an attribute only."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 2)
        self.scale = torch.ones(2)


@pytest.mark.parametrize(
    ("make", "warns"),
    [
        (KeepsTensor, True),
        (lambda: nn.LSTM(3, 2, 2), False),
        (lambda: nn.utils.spectral_norm(nn.Linear(3, 2)), False),
        (lambda: nn.utils.weight_norm(nn.Linear(3, 2)), False),
    ],
    ids=["attribute", "LSTM", "spectral norm", "weight norm"],
)
@pytest.mark.filterwarnings("ignore:.*weight_norm")
def test_attributes_that_no_forward_sets_are_warned_of(make: Callable[[], nn.Module], warns: bool) -> None:
    source = make().eval()
    with torch.device("meta"):
        model = make().eval()
    warnings = strictly(model, source.state_dict()).warnings
    assert ["still on meta" in text for text in warnings] == ["1 tensor: scale. " in text for text in warnings]
    assert bool(warnings) == warns
    if not warns:
        given = torch.rand(4, 3)
        assert str(model(given)) == str(source(given))
