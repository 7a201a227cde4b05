"""epload: gets model weights into sharded models, fast and right."""

from epload.broadcast import coalesced_bcast
from epload.build import build_info
from epload.checkpoint import Checkpoint, Manifest
from epload.errors import CheckpointError, LoadError, ManifestMismatch, ModelMismatch
from epload.loader import HierarchicalLoader, load
from epload.mapping import Mapping, Merge, Rename
from epload.report import LoadReport
from epload.topology import Topology

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "HierarchicalLoader",
    "LoadError",
    "LoadReport",
    "Manifest",
    "ManifestMismatch",
    "Mapping",
    "Merge",
    "ModelMismatch",
    "Rename",
    "Topology",
    "build_info",
    "coalesced_bcast",
    "load",
]
