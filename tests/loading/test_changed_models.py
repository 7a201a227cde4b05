"""Loads again and again into a model whose tensors change between loads, or are of no use to any load."""

from __future__ import annotations

import gc
import re
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from epload import HierarchicalLoader, LoadError, Topology
from support import ranks
from support.checks import all_fine
from support.small_model import BUCKET, NODES, State, meta_net, state_for, wrong


def freed(tensor: Tensor) -> Tensor:
    tensor.untyped_storage().resize_(0)
    return tensor


UNUSABLE: dict[str, Callable[[], Tensor]] = {
    "freed": lambda: freed(torch.zeros(4)),
    "quantized": lambda: torch.quantize_per_tensor(torch.zeros(4), 0.1, 0, torch.qint8),
    "conjugate": lambda: torch.zeros(4, dtype=torch.complex64).conj(),
}


class Wrapped(Tensor):
    """Stands for another tensor, as a weight does that FSDP casts to float8 before it is gathered."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Wrapped:
        made: Wrapped = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, inner.shape, inner.stride(), inner.storage_offset(), dtype=inner.dtype, device=inner.device
        )
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        unwrapped, options = tree_map_only(cls, lambda it: it.inner, (args, kwargs or {}))
        result = func(*unwrapped, **options)
        return cls(result) if func is torch.ops.aten.detach.default else result


def wrapped(rank: int, folder: Path, readers: str) -> list[str]:
    model = plain_net()
    linear = model[2]
    assert isinstance(linear, nn.Linear)
    linear.weight = nn.Parameter(Wrapped(torch.zeros(3, 4)))
    loader = HierarchicalLoader(Topology.from_nodes(NODES), readers=readers, bucket_bytes=256)
    problems = []
    for turn in range(4):
        loader.load(model, folder / f"{turn % 2}.safetensors")
        for name, value in load_file(folder / f"{turn % 2}.safetensors").items():
            found = model.state_dict()[name]
            found = found.inner if isinstance(found, Wrapped) else found
            if not torch.equal(found, value):
                problems.append(f"turn {turn}: {name}")
    return problems


@pytest.mark.parametrize("readers", ["one", "every"])
def test_wrapped_tensors_are_filled_by_way_of_their_class(readers: str, tmp_path: Path) -> None:
    save_two(tmp_path)
    all_fine(ranks.run(4, wrapped, tmp_path, readers))


def plain_net() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))


def between_loads(rank: int, folder: Path, states: list[State], way: tuple[str, str]) -> list[str]:
    """Changes a model between loads as a training loop may; every load has to be seen in the model."""
    model = plain_net()
    loader = HierarchicalLoader(Topology.from_nodes(NODES), readers=way[0], algorithm=way[1], bucket_bytes=256)
    problems = []
    turn = 0

    def load(what: str) -> None:
        nonlocal turn
        turn += 1
        loader.load(model, folder / f"{turn % 2}.safetensors")
        found = model.state_dict()
        problems.extend(
            f"{what}: {name}" for name, value in states[turn % 2].items() if not torch.equal(found[name], value)
        )

    for again in range(3):
        load(f"load {again}")
    linear = model[2]
    assert isinstance(linear, nn.Linear)
    swapped = nn.Parameter(torch.zeros(3, 4))
    torch.utils.swap_tensors(linear.weight, swapped)
    load("swapped")
    if swapped.detach().eq(states[turn % 2]["2.weight"]).all():
        problems.append("the tensor that was swapped out was filled")
    linear.weight.data = torch.zeros(4, 3).t()
    load("other strides")
    linear.weight = nn.Parameter(torch.zeros(3, 4))
    load("a new parameter")
    alive = weakref.ref(linear.weight)
    linear.weight = nn.Parameter(torch.zeros(3, 4))
    gc.collect()
    if alive() is not None:
        problems.append("a parameter that was replaced is kept")
    model.double()
    model.float()
    load("converted there and back")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(2, 5)).sum().backward()
    optimizer.step()
    load("trained")
    if rank == 1:
        linear.bias.untyped_storage().resize_(0)
    try:
        load("freed")
        problems.append("loaded into memory that was freed")
    except LoadError as error:
        if not re.search("rank 1 could not .*2.bias.*was it freed by FSDP", str(error)):
            problems.append(str(error))
    if rank == 1:
        linear.bias.untyped_storage().resize_(12)
    load("back again")
    return problems


def save_two(folder: Path) -> list[State]:
    states = []
    for number in range(2):
        torch.manual_seed(number)
        states.append({name: torch.rand_like(t.float()).to(t.dtype) for name, t in plain_net().state_dict().items()})
        save_file(states[-1], folder / f"{number}.safetensors")
    return states


@pytest.mark.parametrize("way", [("every", "two_level"), ("one", "two_level"), ("partitioned", "striped")])
def test_models_change_between_loads(way: tuple[str, str], tmp_path: Path) -> None:
    all_fine(ranks.run(4, between_loads, tmp_path, save_two(tmp_path), way))


def odd_ones(rank: int, folder: Path, readers: str) -> list[str]:
    """Buffers that the checkpoint lacks and that no load could fill."""
    model = plain_net()
    for name, make in UNUSABLE.items():
        model.register_buffer(name, make())
    loader = HierarchicalLoader(Topology.from_nodes(NODES), readers=readers, bucket_bytes=256)
    problems = []
    for turn in range(3):
        report = loader.load(model, folder / f"{turn % 2}.safetensors", strict=False)
        if sorted(report.missing_keys) != sorted(UNUSABLE):
            problems.append(f"{report.missing_keys}")
        found = model.state_dict()
        values = load_file(folder / f"{turn % 2}.safetensors")
        problems += [f"turn {turn}: {name}" for name, value in values.items() if not torch.equal(found[name], value)]
    return problems


@pytest.mark.parametrize("readers", ["one", "every"])
def test_tensors_that_no_load_could_fill_are_left_alone(readers: str, tmp_path: Path) -> None:
    save_two(tmp_path)
    all_fine(ranks.run(4, odd_ones, tmp_path, readers))


def two_models(rank: int, folder: Path) -> list[str]:
    """One loader loads in turns from files that lie otherwise: with a header of another length, and in two parts."""
    loader = HierarchicalLoader(Topology.from_nodes(NODES), readers="every", bucket_bytes=BUCKET)
    models = [meta_net(), meta_net()]
    problems = []
    for turn in range(6):
        for number, model in enumerate(models):
            seed = (turn + number) % 3
            loader.load(model, folder / ("one.safetensors", "longer.safetensors", "parts")[seed])
            problems += [f"turn {turn}, model {number}: {text}" for text in wrong(model, state_for(seed))]
    return problems


def test_files_that_lie_otherwise_are_read_as_they_lie(tmp_path: Path) -> None:
    save_file(state_for(0), tmp_path / "one.safetensors")
    save_file(state_for(1), tmp_path / "longer.safetensors", metadata={"note": "x" * 1000})
    (tmp_path / "parts").mkdir()
    items = list(state_for(2).items())
    save_file(dict(items[: len(items) // 2]), tmp_path / "parts" / "part-0.safetensors")
    save_file(dict(items[len(items) // 2 :]), tmp_path / "parts" / "part-1.safetensors")
    all_fine(ranks.run(4, two_models, tmp_path))
