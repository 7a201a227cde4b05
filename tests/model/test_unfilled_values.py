"""Values that nothing fills are found, and an initializer cannot touch what was loaded."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import epload
from epload.model.initialization import compute_missing
from epload.model.memory import is_poisoned, poison
from support import ranks
from support.checks import all_fine
from support.initialized_models import llama, loader
from support.models import on_meta


class Stray(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.empty(3, 2))
        self.v = nn.Parameter(torch.empty(5))
        self.register_buffer("table", torch.empty(4), persistent=False)


def _unfilled(rank: int) -> list[str]:
    problems = []
    for drop, texts in (
        ((), ("fills 1 tensor on meta: table.",)),
        (("v",), ("fills 2 tensors on meta: table, v.",)),
    ):
        model = on_meta(Stray)
        fully_shard(model)
        full = {"w": torch.ones(3, 2), "v": torch.ones(5)}
        state = {name: tensor for name, tensor in full.items() if name not in drop}
        try:
            loader().load(model, state if rank == 0 else None, strict=False)
            problems.append("loaded")
        except epload.ModelMismatch as error:
            if any(text not in str(error) for text in (*texts, "init_missing")):
                problems.append(str(error))
        problems += [
            f"{name} left meta" for name, t in [*model.named_parameters(), *model.named_buffers()] if not t.is_meta
        ]
        try:
            loader().load(model, state if rank == 0 else None, strict=False, init_missing=lambda *_: None)
            problems.append("loaded with a hook that does nothing")
        except epload.LoadError as error:
            if "init_missing left table" not in str(error):
                problems.append(str(error))
    return problems


def test_what_nobody_fills_is_an_error_on_all_ranks() -> None:
    all_fine(ranks.run(4, _unfilled))


def _nothing(rank: int) -> list[str]:
    problems = []
    for make in (Stray, lambda: on_meta(Stray)):
        model = make()
        fully_shard(model)
        try:
            state = {"module.w": torch.ones(3, 2), "module.v": torch.ones(5)}
            loader().load(model, state if rank == 0 else None, strict=False)
            problems.append("a load that filled nothing has succeeded")
        except epload.ModelMismatch as error:
            if "nothing to load" not in str(error) or "module.w" not in str(error):
                problems.append(str(error))
    return problems


def test_a_load_that_fills_nothing_is_an_error() -> None:
    all_fine(ranks.run(4, _nothing))


# ---- the skeleton ----


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
    state = {"a.weight": torch.rand(3, 3), "b.weight": torch.zeros(0), "a.bias": torch.rand(3), "b.bias": torch.rand(3)}
    del state["b.weight"]
    report = epload.load(model, state, progress=False)
    assert report.initialized == ["t"]
    assert torch.equal(model.a.weight, state["a.weight"])
    assert model.b.weight is model.a.weight
    assert torch.equal(model.b.bias, state["b.bias"])
    assert torch.equal(model.t, torch.full((3,), 9.0))
    assert model.scale == 0.25
    assert isinstance(model.friends[0], nn.Linear)
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


def test_nothing_is_computed_for_nothing() -> None:
    made = compute_missing(llama(), {}, {}, 0)
    assert (made.values, made.attributes) == ({}, [])
