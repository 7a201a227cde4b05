"""SGLang: live sync of running engines, and epload as its model loader. Tried with SGLang 0.5.23.

SGLang finds both by itself, through the entry point of its plugins.
"""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType

from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from epload.core.log import logger
from epload.integrations.sglang import updates
from epload.integrations.sglang.loader import SglangModelLoader
from epload.integrations.sglang.model import SglangModel
from epload.integrations.sglang.updates import EngineUpdates

__all__ = ["EngineUpdates", "SglangModel", "SglangModelLoader", "register"]

_SLOT = "sglang.private"


def register() -> None:
    """Called by SGLang in each of its processes, before it makes anything."""
    # For Engine.collective_rpc.
    Scheduler.epload_receive = lambda scheduler, **arguments: EngineUpdates.of(scheduler).receive(**arguments)
    Scheduler.epload_commit = lambda scheduler, **arguments: EngineUpdates.of(scheduler).commit(**arguments)
    updater = "managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
    for target, hook in (
        ("entrypoints.engine.Engine.collective_rpc", updates.collective_rpc),
        ("managers.scheduler.Scheduler.continue_generation", updates.continue_generation),
        (f"{updater}.update_weights_from_tensor", updates.update_weights_from_tensor),
    ):
        HookRegistry.register(f"sglang.srt.{target}", hook, HookType.AROUND)
    if _SLOT not in sys.modules:
        if importlib.util.find_spec(_SLOT) is not None:
            logger.warning("%s is installed, so that --load-format private is not epload's", _SLOT)
            return
        # SGLang has no registry of loaders; it takes the one of --load-format private from a module of this name.
        module = ModuleType(f"{_SLOT}.private_model_loader")
        module.__dict__["PrivateModelLoader"] = SglangModelLoader
        sys.modules |= {_SLOT: ModuleType(_SLOT), module.__name__: module}
