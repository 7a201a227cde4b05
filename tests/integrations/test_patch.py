"""``epload.patch``, also for frameworks that are not installed, or whose installed version lacks the function."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import FullyShardedDataParallelPlugin
from accelerate.utils import fsdp_utils
from torch import nn
from torch.distributed.checkpoint import state_dict
from torch.distributed.fsdp import fully_shard

import epload
from epload.integrations import accelerate, skyrl, veomni, verl
from epload.integrations import accelerate as our_accelerate
from epload.integrations import torch as ours
from support.checks import differences, full_values, local_of
from support.drop_ins import on_rank_0, sharded
from support.findings import differing, must_be_refused_by_all
from support.models import Mlp, Rotary, Stack, mesh, on_meta
from support.on_ranks import on_ranks

FULL = state_dict.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


def install(monkeypatch: pytest.MonkeyPatch, name: str, version: str | None = None) -> Any:
    """Installs an empty module and its parent packages."""
    parts = name.split(".")
    for i in range(1, len(parts) + 1):
        monkeypatch.setitem(sys.modules, ".".join(parts[:i]), ModuleType(parts[i - 1]))
    if version is not None:
        monkeypatch.setattr(sys.modules[parts[0]], "__version__", version, raising=False)
    return sys.modules[name]


def test_a_function_is_replaced_and_restored() -> None:
    before = state_dict.set_model_state_dict
    with epload.patch("torch"):
        assert state_dict.set_model_state_dict is ours.set_model_state_dict
        model = nn.Linear(2, 3, device="meta")
        values = {"weight": torch.randn(3, 2), "bias": torch.randn(3)}
        state_dict.set_model_state_dict(model, values, options=FULL)
        assert torch.equal(model.weight, values["weight"])
        state_dict.set_model_state_dict(model, {name: value + 1 for name, value in values.items()})  # torch's own
        assert torch.equal(model.weight, values["weight"] + 1)
    assert state_dict.set_model_state_dict is before
    with pytest.raises(ZeroDivisionError), epload.patch():
        1 / 0  # noqa: B018
    assert state_dict.set_model_state_dict is before
    with (
        pytest.raises(ValueError, match="expected frameworks among torch, accelerate, verl, skyrl, veomni, got 'nemo'"),
        epload.patch("nemo"),
    ):
        pass


@pytest.mark.parametrize(
    ("module", "replacement"),
    [
        ("accelerate.utils.fsdp_utils", accelerate.fsdp2_load_full_state_dict),
        ("verl.utils.fsdp_utils", verl.fsdp2_load_full_state_dict),
        ("skyrl_train.distributed.fsdp_utils", skyrl.fsdp2_load_full_state_dict),
        ("veomni.models.module_utils", veomni.rank0_load_and_broadcast_weights),
    ],
)
def test_modules_that_imported_the_function_by_name(
    monkeypatch: pytest.MonkeyPatch, module: str, replacement: Callable[..., Any]
) -> None:
    defining, user = install(monkeypatch, module), install(monkeypatch, "user")
    name, original = replacement.__name__, lambda: None
    setattr(defining, name, original)
    setattr(user, name, original)
    with epload.patch(module.split(".")[0].removesuffix("_train")):
        assert getattr(defining, name) is replacement
        assert getattr(user, name) is replacement
    assert getattr(defining, name) is original
    assert getattr(user, name) is original


def test_a_framework_without_the_function_or_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    before = state_dict.set_model_state_dict
    install(monkeypatch, "verl.utils.fsdp_utils", "0.9.1")
    for name in ("veomni", "veomni.models.module_utils"):
        monkeypatch.setitem(sys.modules, name, None)
    lacks = (
        r"cannot patch verl: the installed version \(0.9.1\) has no verl.utils.fsdp_utils.fsdp2_load_full_state_dict; "
        r"call epload.integrations.verl.fsdp2_load_full_state_dict .* leave verl out of epload.patch"
    )
    absent = r"cannot patch veomni: veomni\.models\.module_utils cannot be imported"
    for framework, expected in {"verl": lacks, "veomni": absent}.items():
        with pytest.raises(ImportError, match=expected), epload.patch("torch", framework):
            pass
        assert state_dict.set_model_state_dict is before
    with epload.patch():  # which skips them
        assert state_dict.set_model_state_dict is ours.set_model_state_dict


def test_later_modules_are_searched_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """SkyRL has moved its function, so a module without it does not end the search."""
    install(monkeypatch, "skyrl.backends.skyrl_train.distributed.fsdp_utils")
    later = install(monkeypatch, "skyrl_train.distributed.fsdp_utils")
    later.fsdp2_load_full_state_dict = original = lambda: None
    with epload.patch("skyrl"):
        assert later.fsdp2_load_full_state_dict is not original
    assert later.fsdp2_load_full_state_dict is original


# ---- the functions of accelerate, verl and SkyRL: as the originals, and right where those are not ----


@on_ranks(4)
def test_accelerate_fsdp2_load_full_state_dict(rank: int) -> None:
    accelerator = SimpleNamespace(is_main_process=rank == 0, device=torch.device("cpu"))
    load = partial(our_accelerate.fsdp2_load_full_state_dict, accelerator)
    values = full_values(on_meta(lambda: Mlp(7, 5, 3)))
    expected, model = sharded(), sharded()
    fsdp_utils.fsdp2_load_full_state_dict(accelerator, expected, on_rank_0(values))
    # which the original does not look at either
    assert load(model, on_rank_0(values | {"stray": torch.zeros(3)})) is model
    assert [*differences(expected, model)] == []
    assert differing(model, values) == []

    # The original raises on rank 0 only, and the others wait for its broadcast.
    last = values.popitem()[0]
    text = f"1 parameter missing from the checkpoint: {last}"
    must_be_refused_by_all(partial(load, sharded(), on_rank_0(values)), text)

    # accelerate#3898: a plain buffer has no device_mesh.
    make = partial(Stack, [{"w": (5, 3)}], buffers={"step": ((), torch.int64)})
    values = full_values(on_meta(make))
    assert differing(load(fully_shard(on_meta(make)), on_rank_0(values)), values) == []


@on_ranks(4)
def test_accelerate_prepares_a_model_through_the_patch(rank: int) -> None:
    """accelerate's own caller, which fills buffers itself once our function has loaded what it put on meta."""
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, cpu_ram_efficient_loading=True, auto_wrap_policy="no_wrap", reshard_after_forward=True
    )
    accelerator = SimpleNamespace(
        state=SimpleNamespace(fsdp_plugin=plugin), mixed_precision="no", is_main_process=rank == 0,
        device=torch.device("cpu"),
    )  # fmt: skip
    models = []
    for patched in (False, True):
        model: Any = nn.Sequential(Rotary())
        nn.init.constant_(model[0].w, 7 if rank == 0 else 0)  # the others' is empty until it is loaded
        with epload.patch("accelerate") if patched else nullcontext():
            models.append(fsdp_utils.fsdp2_prepare_model(accelerator, model))
    assert [*differences(*models)] == []
    assert torch.equal(models[1][0].inv_freq, Rotary().inv_freq)
    assert bool((local_of(models[1][0].w) == 7).all())


@on_ranks(4)
def test_verl_and_skyrl_fsdp2_load_full_state_dict(rank: int) -> None:
    """verl's and SkyRL's are torch's with strict keys, then every buffer from rank 0."""
    values = full_values(on_meta(Rotary))
    for load in (verl.fsdp2_load_full_state_dict, skyrl.fsdp2_load_full_state_dict):
        for real in (True, False):  # rank 0 has loaded the model; the others have it on meta, or for real
            model: Any = Rotary() if rank == 0 or real else on_meta(Rotary)
            if rank and real:
                model.inv_freq.zero_()
            fully_shard(model, mesh=mesh(("all", 4)))
            returned = load(model, on_rank_0(values), cpu_offload=None)
            assert differing(model, values) == []
            assert torch.equal(model.inv_freq, Rotary().inv_freq), f"inv_freq is not rank 0's: {model.inv_freq}"
            assert returned is (model if load is skyrl.fsdp2_load_full_state_dict else None), f"returned {returned}"
        for odd, text in (
            (values | {"stray": torch.ones(1)}, "unexpected checkpoint key: stray"),
            ({}, "missing from the checkpoint: w"),
        ):
            model = fully_shard(Rotary() if rank == 0 else on_meta(Rotary), mesh=mesh(("all", 4)))
            must_be_refused_by_all(partial(load, model, on_rank_0(odd)), text)
            assert model.w.is_meta == (rank > 0), f"{text}: something has moved"
        hollow = fully_shard(on_meta(Rotary), mesh=mesh(("all", 4)))  # nobody has the buffer
        must_be_refused_by_all(partial(load, hollow, on_rank_0(values)), "fills 1 tensor on meta: inv_freq")


class TwoTables(nn.Module):
    """Makes its buffers in the order of a set, which differs from process to process."""

    def __init__(self, names: list[str]) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(3))
        for name in names:
            self.register_buffer(name, torch.full((2,), float(len(name))), persistent=False)


@on_ranks(2)
def test_buffers_of_one_shape_stay_apart_whatever_the_order_in_which_ranks_make_them(rank: int) -> None:
    for load in (verl.fsdp2_load_full_state_dict, skyrl.fsdp2_load_full_state_dict):
        model: Any = TwoTables(["full", "sliding"] if rank == 0 else ["sliding", "full"])
        load(model, {"w": torch.ones(3)} if rank == 0 else {})
        assert (model.full.tolist(), model.sliding.tolist()) == ([4.0] * 2, [7.0] * 2)
