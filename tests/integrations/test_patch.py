"""``epload.patch``, also for frameworks that are not installed, or whose installed version lacks the function."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint import state_dict

import epload
from epload.integrations import accelerate, skyrl, veomni, verl
from epload.integrations import torch as ours

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


def test_a_framework_without_the_function_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    before = state_dict.set_model_state_dict
    install(monkeypatch, "verl.utils.fsdp_utils", "0.9.1")
    expected = (
        r"cannot patch verl: the installed version \(0.9.1\) has no verl.utils.fsdp_utils.fsdp2_load_full_state_dict; "
        r"call epload.integrations.verl.fsdp2_load_full_state_dict .* leave verl out of epload.patch"
    )
    with pytest.raises(ImportError, match=expected), epload.patch("torch", "verl"):
        pass
    assert state_dict.set_model_state_dict is before
    with epload.patch():  # which skips it
        assert state_dict.set_model_state_dict is ours.set_model_state_dict


def test_later_modules_are_searched_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """SkyRL has moved its function, so a module without it does not end the search."""
    install(monkeypatch, "skyrl.backends.skyrl_train.distributed.fsdp_utils")
    later = install(monkeypatch, "skyrl_train.distributed.fsdp_utils")
    later.fsdp2_load_full_state_dict = original = lambda: None
    with epload.patch("skyrl"):
        assert later.fsdp2_load_full_state_dict is not original
    assert later.fsdp2_load_full_state_dict is original


def test_a_framework_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "veomni.models.module_utils", None)
    monkeypatch.setitem(sys.modules, "veomni", None)
    before = state_dict.set_model_state_dict
    expected = r"cannot patch veomni: veomni\.models\.module_utils cannot be imported"
    with pytest.raises(ImportError, match=expected), epload.patch("torch", "veomni"):
        pass
    assert state_dict.set_model_state_dict is before
