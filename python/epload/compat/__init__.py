"""Loaders that people call today, with the same signatures: switch the import, or :func:`epload.patch` the original.

Each gives what the original gives where that is right, with these differences: a mistake is raised on every rank and before
anything moves; parameters keep the dtype of the model and their ties; nothing goes through ``distribute_tensor``.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from epload.compat import accelerate, skyrl, torch, veomni, verl

_PLACES: dict[str, tuple[tuple[str, ...], Callable[..., Any]]] = {
    "torch": (("torch.distributed.checkpoint.state_dict",), torch.set_model_state_dict),
    "accelerate": (("accelerate.utils.fsdp_utils",), accelerate.fsdp2_load_full_state_dict),
    "verl": (("verl.utils.fsdp_utils",), verl.fsdp2_load_full_state_dict),
    "skyrl": (
        ("skyrl.backends.skyrl_train.distributed.fsdp_utils", "skyrl_train.distributed.fsdp_utils"),
        skyrl.fsdp2_load_full_state_dict,
    ),
    "veomni": (("veomni.models.module_utils",), veomni.rank0_load_and_broadcast_weights),
}
"""Where the original is defined (the first module that there is), and what stands in for it under the same name."""


@contextmanager
def patch(*frameworks: str) -> Iterator[None]:
    """Within it, calls of the frameworks' own loading functions come here; for a framework that offers no hook.

    The function is replaced where it is defined and in every module that has imported it by name.

    Args:
        frameworks: among ``"torch"``, ``"accelerate"``, ``"verl"``, ``"skyrl"``, ``"veomni"``. If none is given, all of these
            that are installed and have the function.

    Raises:
        ValueError: another name.
        ImportError: a framework that is named is not installed, or the installed version lacks the function.
    """
    for name in frameworks:
        if name not in _PLACES:
            raise ValueError(f"expected frameworks among {', '.join(_PLACES)}, got {name!r}")
    replaced: list[tuple[ModuleType, str, object]] = []
    try:
        for name in frameworks or _PLACES:
            modules, ours = _PLACES[name]
            try:
                original = _original(name, modules, ours.__name__)
            except ImportError:
                if frameworks:
                    raise
                continue
            for module in list(sys.modules.values()):
                if getattr(module, "__dict__", {}).get(ours.__name__) is original:
                    replaced.append((module, ours.__name__, original))
                    setattr(module, ours.__name__, ours)
        yield
    finally:
        for module, function, original in reversed(replaced):
            setattr(module, function, original)


def _original(framework: str, modules: tuple[str, ...], function: str) -> object:
    """The framework's function, from the first of its modules that there is.

    Raises:
        ImportError: there is none.
    """
    for number, name in enumerate(modules, 1):
        try:
            module = importlib.import_module(name)
        except ImportError as error:
            if number < len(modules):
                continue
            raise ImportError(
                f"cannot patch {framework}: {name} cannot be imported ({error}); install {framework}, or leave it out of "
                "epload.patch(...)",
                name=name,
            ) from error
        if hasattr(module, function):
            return getattr(module, function)
    version = getattr(sys.modules.get(framework), "__version__", "of unknown number")
    raise ImportError(
        f"cannot patch {framework}: the installed version ({version}) has no {modules[-1]}.{function}; call "
        f"epload.compat.{framework}.{function} in place of what replaced it, or leave {framework} out of epload.patch(...)",
        name=modules[-1],
    )
