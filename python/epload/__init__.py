"""epload loads model weights into sharded PyTorch models.

``import epload`` alone is quick: torch, the native library with its ops and all else are imported when a name is first used. In a
process that has imported torch before, the ops are there at once.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from epload.broadcast import coalesced_bcast as coalesced_bcast
    from epload.checkpoint.base import Checkpoint as Checkpoint
    from epload.checkpoint.manifest import Manifest as Manifest
    from epload.core.pieces import Piece as Piece
    from epload.core.pieces import Pieces as Pieces
    from epload.errors import CheckpointError as CheckpointError
    from epload.errors import LoadError as LoadError
    from epload.errors import ManifestMismatch as ManifestMismatch
    from epload.errors import ModelMismatch as ModelMismatch
    from epload.integrations import patch as patch
    from epload.integrations.engine import EngineModel as EngineModel
    from epload.load import load as load
    from epload.load import load_state as load_state
    from epload.loading.loader import HierarchicalLoader as HierarchicalLoader
    from epload.loading.request import LoadOptions as LoadOptions
    from epload.mapping import Mapping as Mapping
    from epload.model.expert_parallel import LocalModules as LocalModules
    from epload.model.expert_parallel import OuterShard as OuterShard
    from epload.native.info import __version__ as __version__
    from epload.native.info import build_info as build_info
    from epload.ranks.topology import Topology as Topology
    from epload.report import LoadReport as LoadReport
    from epload.report import SaveReport as SaveReport
    from epload.save import save as save
    from epload.save import save_async as save_async
    from epload.saving.convert import convert as convert
    from epload.saving.run import PendingSave as PendingSave
    from epload.sync.participants import EngineRank as EngineRank
    from epload.sync.receiver import WeightReceiver as WeightReceiver
    from epload.sync.report import SyncReport as SyncReport
    from epload.sync.sender import WeightSender as WeightSender

_MODULES = {
    "coalesced_bcast": "epload.broadcast",
    "Checkpoint": "epload.checkpoint.base",
    "Manifest": "epload.checkpoint.manifest",
    "Piece": "epload.core.pieces",
    "Pieces": "epload.core.pieces",
    "CheckpointError": "epload.errors",
    "LoadError": "epload.errors",
    "ManifestMismatch": "epload.errors",
    "ModelMismatch": "epload.errors",
    "patch": "epload.integrations",
    "EngineModel": "epload.integrations.engine",
    "load": "epload.load",
    "load_state": "epload.load",
    "HierarchicalLoader": "epload.loading.loader",
    "LoadOptions": "epload.loading.request",
    "Mapping": "epload.mapping",
    "LocalModules": "epload.model.expert_parallel",
    "OuterShard": "epload.model.expert_parallel",
    "__version__": "epload.native.info",
    "build_info": "epload.native.info",
    "Topology": "epload.ranks.topology",
    "LoadReport": "epload.report",
    "SaveReport": "epload.report",
    "save": "epload.save",
    "save_async": "epload.save",
    "convert": "epload.saving.convert",
    "PendingSave": "epload.saving.run",
    "EngineRank": "epload.sync.participants",
    "WeightReceiver": "epload.sync.receiver",
    "SyncReport": "epload.sync.report",
    "WeightSender": "epload.sync.sender",
}
"""The module that defines each name."""
__all__ = list(_MODULES)


def __getattr__(name: str) -> Any:
    """Imports all public names when one of them, or a package such as ``epload.mapping``, is first used."""
    if name not in _MODULES and (name.startswith("_") or find_spec(f"{__name__}.{name}") is None):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals().update({public: getattr(import_module(module), public) for public, module in _MODULES.items()})
    return globals()[name] if name in _MODULES else import_module(f"{__name__}.{name}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _Package(ModuleType):
    """Makes ``epload.load`` and ``epload.save`` stay functions when the modules of these names are imported."""

    def __setattr__(self, name: str, value: object) -> None:
        if name in _MODULES and isinstance(value, ModuleType):
            value = getattr(value, name)
        super().__setattr__(name, value)

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        """Lets cloudpickle, as Ray uses it, send what refers to this module; it knows plain modules only."""
        return import_module, (self.__name__,)


sys.modules[__name__].__class__ = _Package
if "torch" in sys.modules:
    import_module("epload.native.ops")
