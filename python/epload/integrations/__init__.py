"""Drop-in replacements for other libraries' loading functions: import them instead, or :func:`epload.patch` the originals.

They have the signatures of the originals and load the same values, with these differences. Errors are raised on every rank,
before anything moves. Parameters keep the model's dtype and their ties. No tensor goes through ``distribute_tensor``.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from epload.integrations import accelerate, skyrl, torch, veomni, verl

_REPLACEMENTS: dict[str, tuple[Callable[..., Any], tuple[str, ...]]] = {
    "torch": (torch.set_model_state_dict, ("torch.distributed.checkpoint.state_dict",)),
    "accelerate": (accelerate.fsdp2_load_full_state_dict, ("accelerate.utils.fsdp_utils",)),
    "verl": (verl.fsdp2_load_full_state_dict, ("verl.utils.fsdp_utils",)),
    "skyrl": (
        skyrl.fsdp2_load_full_state_dict,
        ("skyrl.backends.skyrl_train.distributed.fsdp_utils", "skyrl_train.distributed.fsdp_utils"),
    ),
    "veomni": (veomni.rank0_load_and_broadcast_weights, ("veomni.models.module_utils",)),
}
"""The replacement of each framework's function of the same name, and the modules that may define the original."""


@contextmanager
def patch(*frameworks: str) -> Iterator[None]:
    """Context manager that replaces the loading functions of frameworks by epload's, for frameworks that offer no hook.

    Each function is replaced in the module that defines it and in every module that has imported it by name. Not thread-safe.

    Args:
        frameworks: any of ``"torch"``, ``"accelerate"``, ``"verl"``, ``"skyrl"`` and ``"veomni"``. Default: all of them that
            are installed and have the function.

    Raises:
        ValueError: a name is none of these.
        ImportError: a framework that was named is not installed, or the installed version lacks the function.

    Example::

        with epload.patch("accelerate"):
            model = accelerator.prepare(model)
    """
    for name in frameworks:
        if name not in _REPLACEMENTS:
            raise ValueError(f"expected frameworks among {', '.join(_REPLACEMENTS)}, got {name!r}")
    replaced: list[tuple[Any, str, object]] = []
    try:
        for name in frameworks or _REPLACEMENTS:
            replacement, modules = _REPLACEMENTS[name]
            try:
                original = _original(name, modules, replacement.__name__)
            except ImportError:
                if frameworks:
                    raise
                continue
            for module in list(sys.modules.values()):
                if getattr(module, "__dict__", {}).get(replacement.__name__) is original:
                    replaced.append((module, replacement.__name__, original))
                    setattr(module, replacement.__name__, replacement)
        yield
    finally:
        for module, function, original in reversed(replaced):
            setattr(module, function, original)


def _original(framework: str, modules: tuple[str, ...], function: str) -> object:
    """Returns a framework's function, from the first of the modules that has it. Raises ImportError if none has."""
    problem = ""
    for name in modules:
        try:
            module = importlib.import_module(name)
        except ImportError as error:
            problem = f"{name} cannot be imported ({error}); install {framework}"
            continue
        if hasattr(module, function):
            return getattr(module, function)
        version = getattr(sys.modules.get(framework), "__version__", "unknown")
        problem = (
            f"the installed version ({version}) has no {name}.{function}; call epload.integrations.{framework}.{function} "
            "directly"
        )
    raise ImportError(f"cannot patch {framework}: {problem}, or leave {framework} out of epload.patch(...)", name=modules[-1])
