"""Modules initialize with ``reset_parameters()`` what the checkpoint lacks, equally on all ranks, and nothing else."""

from __future__ import annotations

import math
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import epload
from support.checks import full_tensor
from support.drop_ins import everywhere
from support.findings import differing, must_be_refused
from support.models import on_meta
from support.on_ranks import on_ranks

FILLED = ("0.weight", "4.bias")
load = partial(epload.load, strict=False, init_missing="reset_parameters", progress=False)


class OddModule(nn.Module):
    """Its method would overwrite everything: the loaded weight, and a buffer that no checkpoint has."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(5))
        self.scale = nn.Parameter(torch.empty(5))
        self.register_buffer("table", torch.arange(5.0), persistent=False)

    def reset_parameters(self) -> None:
        for tensor in (self.weight, self.scale, self.table):
            tensor.fill_(7.0)


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5), nn.Embedding(7, 6, padding_idx=2), nn.Linear(7, 9), nn.Linear(301, 4))


def state() -> dict[str, Tensor]:
    full = net().state_dict()
    return {name: torch.arange(full[name].numel()).reshape(full[name].shape) + 0.5 for name in FILLED}


def check(model: nn.Module, report: epload.LoadReport) -> None:
    values = {name: full_tensor(parameter) for name, parameter in model.named_parameters()}
    assert [name for name, value in state().items() if not torch.equal(values[name], value)] == []
    assert sorted(report.initialized) == sorted(values.keys() - {*FILLED})
    assert bool((values["1.weight"] == 1).all())
    assert not values["1.bias"].any()
    assert not values["2.weight"][2].any(), "the row for padding"
    bounds = {"0.bias": 6, "3.weight": 7, "3.bias": 7, "4.weight": 301}
    for name, fan_in in bounds.items():  # torch's: uniform in +-1 / sqrt(fan_in) of the whole weight
        bound = 1 / math.sqrt(fan_in)
        assert bound / 3 < values[name].abs().max() <= bound, name
        assert values[name].unique().numel() >= values[name].numel() - 3, name


def tensor_parallel(model: Any) -> None:
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    parallelize_module(model, grid["tp"], {"0": ColwiseParallel(), "3": RowwiseParallel(), "4": RowwiseParallel()})
    fully_shard(model, mesh=grid["dp"])


@on_ranks(4)
def test_missing_tensors_are_those_of_torch_in_every_layout(rank: int) -> None:
    values, source = [], state()
    for parallelize, has_storage in product((fully_shard, tensor_parallel, lambda model: None), (False, True)):
        model = on_meta(net)
        parallelize(model)
        if has_storage:
            model.to_empty(device="cpu")
        torch.manual_seed(3)
        before = torch.get_rng_state()
        with CommDebugMode() as collectives:
            report = load(model, source)
        assert not collectives.get_total_counts()
        assert torch.equal(before, torch.get_rng_state()), "random numbers of the caller"
        check(model, report)
        values.append([full_tensor(parameter).flatten().tolist() for parameter in model.parameters()])
    assert all(each == values[0] for each in values), "layouts differ"
    assert all(each == values[0] for each in everywhere(values[0])), "ranks differ"


def test_what_is_filled_or_not_missing_is_kept() -> None:
    model = OddModule()
    load(model, {"weight": torch.arange(5.0)})
    assert differing(model, {"weight": torch.arange(5.0), "scale": torch.full((5,), 7.0)}) == []
    assert torch.equal(model.table, torch.arange(5.0)), "no checkpoint has it, and it is not missing"


def test_a_loader_initializes_what_each_checkpoint_lacks() -> None:
    model = on_meta(lambda: nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5)))
    source = {"0.weight": state()["0.weight"]}
    with epload.HierarchicalLoader(progress=False) as loader:
        for _ in range(2):
            report = loader.load(model, source, strict=False, init_missing="reset_parameters")
            assert sorted(report.initialized) == ["0.bias", "1.bias", "1.weight"]
            assert torch.equal(model[0].weight, source["0.weight"])
            assert 0 < model[0].bias.abs().max() <= 6**-0.5
            assert torch.equal(model[1].weight, torch.ones(5))
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.fill_(9.0)


class Plain(nn.Module):
    """Has no method of this name."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(3))


class FailingModule(Plain):
    def reset_parameters(self) -> None:
        raise RuntimeError("cannot")


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Plain, r"neither the checkpoint nor .* fills 1 tensor on meta: 1\.weight\. Their modules have no reset_para"),
        (FailingModule, r"FailingModule\.reset_parameters failed to initialize 1 \(RuntimeError: cannot\)"),
    ],
)
def test_what_no_method_fills_is_refused(kind: type[nn.Module], message: str) -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(2, 2), kind())
    state = {"0.weight": torch.ones(2, 2), "0.bias": torch.ones(2)}
    with pytest.raises(epload.ModelMismatch, match=message):
        load(model, state)
    assert model[0].weight.is_meta, "nothing has moved"


@on_ranks(2)
def test_shards_of_unknown_size_and_different_options_are_refused(rank: int) -> None:
    model, state = on_meta(lambda: nn.Sequential(nn.Linear(4, 3))), {"0.bias": torch.arange(6.0)}
    shards = epload.LoadOptions(outer_shards=[epload.OuterShard(r"0\.", init_device_mesh("cpu", (2,)))])
    hint = "Pass init_missing='reset_parameters' if their modules have that method"
    for options, *texts in (
        ({"options": shards}, "ModelMismatch", "0.weight. Their modules"),
        ({"options": shards, "init_missing": None}, "ModelMismatch", hint),
        (
            {"init_missing": "reset_parameters" if rank else None},
            "ManifestMismatch", "init_missing=reset_parameters",
        ),
    ):  # fmt: skip
        must_be_refused(partial(load, model, state, timeout=20, **options), *texts)


def test_an_adapter_starts_as_peft_has_it() -> None:
    from peft import LoraConfig, get_peft_model

    with torch.device("meta"):
        model: Any = get_peft_model(nn.Sequential(nn.Linear(4, 3)), LoraConfig(target_modules=["0"], r=2))
    load(model, {"0.weight": torch.ones(3, 4)})
    weights = {name.split(".")[-3]: bool(p.any()) for name, p in model.named_parameters() if "lora" in name}
    assert weights == {"lora_A": True, "lora_B": False}
    assert model.base_model.model[0].base_layer.bias.any()
