"""Tensors of a model that share memory: one under two names is filled once, others are refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import epload
from epload import HierarchicalLoader
from epload.model import memory


class Holder(nn.Module):
    def __init__(self, **tensors: Tensor) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            setattr(self, name, nn.Parameter(tensor))


def values(model: nn.Module) -> dict[str, Tensor]:
    return {
        name: (torch.arange(tensor.numel()).reshape(tensor.shape) + 100.0 * i)
        for i, (name, tensor) in enumerate(model.state_dict().items())
    }


def test_one_memory_under_two_objects_is_one_tensor() -> None:
    base = torch.zeros(4, 3)
    for given_names in (("a", "b"), ("a",), ("b",)):
        model = Holder(a=base, b=base, c=torch.zeros(2))
        state = {name: torch.arange(12.0).reshape(4, 3) for name in given_names} | {"c": torch.ones(2)}
        report = epload.load(model, state, progress=False)
        assert report.missing_keys == []
        assert torch.equal(model.a, torch.arange(12.0).reshape(4, 3))
        assert torch.equal(model.b, model.a)


def test_memory_that_is_parted_between_loads_is_noticed() -> None:
    base = torch.zeros(4, 3)
    model = Holder(a=base, b=base)
    loader = HierarchicalLoader(progress=False)
    for _ in range(3):
        loader.load(model, {"a": torch.ones(4, 3)})
    model.b.data = torch.zeros(4, 3)
    state = {"a": torch.full((4, 3), 2.0), "b": torch.full((4, 3), 3.0)}
    loader.load(model, state)
    assert torch.equal(model.a, state["a"])
    assert torch.equal(model.b, state["b"])


REFUSED: dict[str, Callable[[Tensor], nn.Module]] = {
    "a and b share part": lambda base: Holder(a=base[:3], b=base[2:]),
    "a and b share part of": lambda base: Holder(a=base, b=base.t()),
    "a and b share part of their": lambda base: Holder(a=base, b=base.view(-1)),
    "w is expanded": lambda base: Holder(w=base.view(-1).unfold(0, 5, 2)),
}


@pytest.mark.parametrize("text", REFUSED)
def test_memory_that_is_shared_in_part_is_refused(text: str) -> None:
    model = REFUSED[text](torch.arange(12.0).reshape(4, 3))
    before = [tensor.detach().clone() for tensor in model.parameters()]
    with pytest.raises(epload.ModelMismatch, match=text):
        epload.load(model, values(model), progress=False)
    assert all(map(torch.equal, before, model.parameters()))


def test_columns_and_rows_of_one_matrix_are_apart() -> None:
    base = torch.zeros(6, 4)
    model = Holder(a=base[:3, ::2], b=base[:3, 1::2], c=base[3:4], d=base[4:].t(), e=base[:0])
    state = values(model)
    epload.load(model, state, progress=False)
    for name, tensor in model.named_parameters():
        assert torch.equal(tensor, state[name]), name


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


@settings(max_examples=300, deadline=None)
@given(
    shape=st.lists(st.integers(1, 4), min_size=1, max_size=3),
    strides=st.lists(st.integers(0, 9), min_size=3, max_size=3),
)
def test_overlaps_are_those_of_the_elements(shape: list[int], strides: list[int]) -> None:
    tensor = torch.arange(128).as_strided(shape, strides[: len(shape)])
    assert memory.has_internal_overlap(tensor) is (len(torch.unique(tensor)) < tensor.numel())
