"""epload loads model weights into sharded PyTorch models."""

from epload.broadcast import coalesced_bcast
from epload.checkpoint.base import Checkpoint
from epload.checkpoint.manifest import Manifest
from epload.core.pieces import Piece, Pieces
from epload.errors import CheckpointError, LoadError, ManifestMismatch, ModelMismatch
from epload.integrations import patch
from epload.integrations.engine import EngineModel
from epload.load import load, load_state
from epload.loading.loader import HierarchicalLoader
from epload.loading.request import LoadOptions
from epload.mapping import Mapping
from epload.model.expert_parallel import LocalModules, OuterShard
from epload.native.info import VERSION, build_info
from epload.ranks.topology import Topology
from epload.report import LoadReport, SaveReport
from epload.save import save, save_async
from epload.saving.convert import convert
from epload.saving.run import PendingSave
from epload.sync.participants import EngineRank
from epload.sync.receiver import WeightReceiver
from epload.sync.report import SyncReport
from epload.sync.sender import WeightSender

__version__ = VERSION

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "EngineModel",
    "EngineRank",
    "HierarchicalLoader",
    "LoadError",
    "LoadOptions",
    "LoadReport",
    "LocalModules",
    "Manifest",
    "ManifestMismatch",
    "Mapping",
    "ModelMismatch",
    "OuterShard",
    "PendingSave",
    "Piece",
    "Pieces",
    "SaveReport",
    "SyncReport",
    "Topology",
    "WeightReceiver",
    "WeightSender",
    "__version__",
    "build_info",
    "coalesced_bcast",
    "convert",
    "load",
    "load_state",
    "patch",
    "save",
    "save_async",
]
