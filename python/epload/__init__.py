"""epload: gets model weights into sharded models, fast and right."""

from epload.broadcast import coalesced_bcast
from epload.build import build_info
from epload.checkpoint import Checkpoint
from epload.compat import patch
from epload.errors import CheckpointError, LoadError, ManifestMismatch, ModelMismatch
from epload.loader import HierarchicalLoader, load
from epload.manifest import Manifest
from epload.mapping import Mapping
from epload.operations import Concatenate, Reshape, Split, Stack, Transpose, Unstack
from epload.parts import LocalModules, OuterShard
from epload.report import LoadReport
from epload.rules import Convert, Rename
from epload.topology import Topology

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "Concatenate",
    "Convert",
    "HierarchicalLoader",
    "LoadError",
    "LoadReport",
    "LocalModules",
    "Manifest",
    "ManifestMismatch",
    "Mapping",
    "ModelMismatch",
    "OuterShard",
    "Rename",
    "Reshape",
    "Split",
    "Stack",
    "Topology",
    "Transpose",
    "Unstack",
    "build_info",
    "coalesced_bcast",
    "load",
    "patch",
]
