"""``patch()`` with frameworks that are not installed, or whose installed version lacks the function."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
from torch.distributed.checkpoint import state_dict

import epload
from epload.integrations import torch as ours


def install(monkeypatch: pytest.MonkeyPatch, name: str, version: str | None = None) -> ModuleType:
    """Installs an empty module and its parent packages."""
    parts = name.split(".")
    for i in range(1, len(parts) + 1):
        monkeypatch.setitem(sys.modules, ".".join(parts[:i]), ModuleType(parts[i - 1]))
    if version is not None:
        monkeypatch.setattr(sys.modules[parts[0]], "__version__", version, raising=False)
    return sys.modules[name]


def test_a_framework_without_the_function_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    before = state_dict.set_model_state_dict
    install(monkeypatch, "verl.utils.fsdp_utils", "0.9.1")
    wanted = (
        r"cannot patch verl: the installed version \(0.9.1\) has no verl.utils.fsdp_utils.fsdp2_load_full_state_dict; "
        r"call epload.integrations.verl.fsdp2_load_full_state_dict .* leave verl out of epload.patch"
    )
    with pytest.raises(ImportError, match=wanted), epload.patch("torch", "verl"):
        pass
    assert state_dict.set_model_state_dict is before


def test_the_default_skips_a_framework_without_the_function(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("accelerate.utils.fsdp_utils", "verl.utils.fsdp_utils", "veomni.models.module_utils"):
        install(monkeypatch, name)
    before = state_dict.set_model_state_dict
    with epload.patch():
        assert state_dict.set_model_state_dict is ours.set_model_state_dict
    assert state_dict.set_model_state_dict is before


def test_later_modules_are_searched_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """SkyRL has moved its function, so a module without it does not end the search."""
    install(monkeypatch, "skyrl.backends.skyrl_train.distributed.fsdp_utils")
    later = install(monkeypatch, "skyrl_train.distributed.fsdp_utils")
    later.fsdp2_load_full_state_dict = original = lambda: None  # type: ignore[attr-defined]
    with epload.patch("skyrl"):
        assert later.fsdp2_load_full_state_dict is not original
    assert later.fsdp2_load_full_state_dict is original


def test_a_framework_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "veomni.models.module_utils", None)
    monkeypatch.setitem(sys.modules, "veomni", None)
    wanted = r"cannot patch veomni: veomni\.models\.module_utils cannot be imported"
    with pytest.raises(ImportError, match=wanted), epload.patch("veomni"):
        pass
