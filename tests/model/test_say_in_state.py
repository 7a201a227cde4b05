"""Modules with a say in their state that a walk over parameters does not see: hooks before state_dict, attributes, subclasses."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import epload
from epload import HierarchicalLoader, ModelMismatch


class Pending(nn.Linear):
    """Writes what is pending before its state is read."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.register_state_dict_pre_hook(self.write)

    @staticmethod
    def write(module: nn.Module, prefix: str, keep_vars: bool) -> None:
        nn.init.constant_(module.weight, 5)


def test_a_hook_before_the_state_is_read_runs(tmp_path: Path) -> None:
    epload.save(nn.Sequential(Pending()), tmp_path / "new")
    assert load_file(tmp_path / "new" / "model.safetensors")["0.weight"].tolist() == [[5, 5], [5, 5]]


class Rotary(nn.Module):
    """Keeps tensors in a list, which its initializer makes."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(3))
        self.register_buffer("inv", torch.ones(3), persistent=False)
        self.tensors = [self.w]

    def _init_weights(self, module: nn.Module) -> None:
        module.inv.fill_(1)
        module.tensors = [module.w]


def test_an_initializer_does_not_leave_stand_ins_in_attributes() -> None:
    model = Rotary()
    epload.load(model, {"w": torch.full((3,), 2.0)}, progress=False)
    assert model.tensors[0] is model.w
    assert model.w.tolist() == [2, 2, 2]


class Weight(nn.Parameter):
    """A parameter of a library, without a dispatch of its own."""


def test_parameters_of_a_subclass_that_overlap_are_refused() -> None:
    memory, model = torch.zeros(6), nn.Module()
    model.a, model.b = Weight(memory[:4]), Weight(memory[2:])
    with pytest.raises(ModelMismatch, match="share part of their memory"):
        epload.load(model, {"a": torch.ones(4), "b": torch.full((4,), 2.0)}, progress=False)


def custom(*args: object) -> None:
    raise AssertionError("a load fills in place")


class Custom(nn.Linear):
    _load_from_state_dict = custom  # type: ignore[assignment]


def change_class(module: nn.Module) -> None:
    module.__class__ = Custom


@pytest.mark.parametrize("change", [lambda module: setattr(module, "_load_from_state_dict", custom), change_class])
def test_custom_loading_that_comes_between_two_loads_is_seen(change: Callable[[nn.Module], None]) -> None:
    model: nn.Module = nn.Sequential(nn.Linear(2, 2))
    state: dict[str, Tensor] = {name: torch.ones_like(tensor) for name, tensor in model.state_dict().items()}
    with HierarchicalLoader(progress=False) as loader:
        for _ in range(2):
            loader.load(model, state)
        change(model[0])
        with pytest.raises(ModelMismatch, match="_load_from_state_dict of its own"):
            loader.load(model, state)
