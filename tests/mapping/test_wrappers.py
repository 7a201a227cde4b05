"""Wrappers that give tensors other names: DDP, torch.compile and PEFT, around a model, in one another, around a module of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import epload
from epload import Mapping
from epload.mapping import Rename
from epload.mapping.place import place
from support.checks import full_values
from support.findings import differing
from support.on_ranks import on_ranks
from support.pretrained import small_llama


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 5)
        self.module = nn.Linear(5, 2)  # called as a wrapper's
        self.register_buffer("step", torch.zeros(2))


WRAPPED: dict[str, Callable[[nn.Module], Any]] = {
    "ddp": DistributedDataParallel,
    "ddp of compiled": lambda model: DistributedDataParallel(torch.compile(model)),
    "compiled ddp": lambda model: torch.compile(DistributedDataParallel(model)),
    "ddp of ddp": lambda model: DistributedDataParallel(DistributedDataParallel(model)),
    "data parallel": nn.DataParallel,
}


@on_ranks(2)
def test_a_wrapped_model_or_module_is_loaded_by_its_own_names(rank: int) -> None:
    whole = full_values(Net())
    as_saved_from_ddp = {f"module.{key}": value for key, value in whole.items()}
    for name, wrap in WRAPPED.items():
        plain = Net()
        wrapper = wrap(plain)
        for source in (whole, as_saved_from_ddp):
            report = epload.load(wrapper, source, progress=False)
            assert differing(plain, whole) == [], name
            assert (report.tensors, report.missing_keys, report.unexpected_keys) == (len(whole), [], []), name
            plain.load_state_dict({key: torch.zeros_like(value) for key, value in whole.items()})

    plain, linear = Net(), nn.Linear(2, 2)
    model = torch.compile(nn.Sequential(DistributedDataParallel(plain), torch.compile(linear)))
    of_linear = {"weight": torch.eye(2), "bias": torch.ones(2)}
    parts = {"0": whole, "1": of_linear}
    source = {f"{i}.{name}": value for i, part in parts.items() for name, value in part.items()}
    epload.load(model, source, progress=False)
    assert differing(plain, whole) + differing(linear, of_linear) == []


# ---- ties between more than two ----


def test_one_value_under_many_names() -> None:
    """Pairs in any order; what the checkpoint holds is never replaced, and other shapes are no ties."""
    pairs = (("c", "d"), ("b", "c"), ("a", "b"), ("a", "odd"))
    shapes = {"a": (2,), "b": (2,), "c": (2,), "d": (2,), "odd": (3,)}
    (places,) = place(Mapping(ties=pairs), ["a"], [(2,)], shapes)
    assert sorted(name for name, _ in places) == ["a", "b", "c", "d"]
    first, second = place(Mapping(ties=pairs), ["a", "c"], [(2,), (2,)], shapes)
    assert sorted(name for name, _ in first) == ["a"]
    assert sorted(name for name, _ in second) == ["b", "c", "d"]


# ---- the way out, where names have another prefix ----


@pytest.mark.parametrize("prefix", ["module.", "base_model.model.", "a+b."])
@pytest.mark.parametrize("added", [True, False], ids=["in the checkpoint", "in the model"])
def test_the_error_for_another_prefix_gives_a_mapping_that_works(prefix: str, added: bool, tmp_path: Path) -> None:
    plain = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
    model: nn.Module = plain
    for part in reversed(prefix[:-1].split(".")) if not added else ():
        outer = nn.Module()
        outer.register_module(part, model)
        model = outer
    whole = full_values(plain)
    stored = {f"{prefix}{name}" if added else name: value for name, value in whole.items()}
    save_file(stored, tmp_path / "model.safetensors")
    with pytest.raises(epload.ModelMismatch) as caught:
        epload.load(model, tmp_path, progress=False)
    message, _, way = str(caught.value).removesuffix(" [rank 0]").partition("pass mapping=")
    assert "4 of 4 unexpected keys match the model" in message
    epload.load(model, tmp_path, mapping=eval(way, {"epload": epload}), progress=False)
    assert differing(plain, whole) == []


def test_the_hint_for_a_model_with_rules_keeps_them(tmp_path: Path) -> None:
    model, other = small_llama(), small_llama()
    save_file({f"module.{n}": t for n, t in other.state_dict().items()}, tmp_path / "model.safetensors")
    with pytest.raises(epload.ModelMismatch) as caught:
        epload.load(model, tmp_path, progress=False)
    rules, mapping = str(caught.value).removesuffix(" [rank 0]").partition("rules = ")[2].split(", then pass mapping=")
    names: dict[str, Any] = {"epload": epload, "dataclasses": dataclasses, "model": model}
    names["rules"] = eval(rules, names)
    epload.load(model, tmp_path, mapping=eval(mapping, names), progress=False)
    assert differing(model, other) == []


def test_a_rename_of_ours_reaches_a_wrapped_model() -> None:
    """Rules speak of the model's names as they are where a mapping is given: wrappers and all."""
    model: Any = torch.compile(nn.Linear(3, 5))
    whole = {"w.weight": torch.ones(5, 3), "w.bias": torch.ones(5)}
    epload.load(model, whole, mapping=Mapping(renames=(Rename(r"^w\.", "_orig_mod."),)), progress=False)
    assert bool((model.weight == 1).all())
