"""Checkpoints of torch.distributed.checkpoint (DCP): tensors in parts, which the ranks of the saving job wrote."""

from epload.checkpoint.dcp.chunked import of_metadata, of_shards
from epload.checkpoint.dcp.metadata import FILE, MAX_BYTES, SUFFIX, read_metadata
from epload.checkpoint.dcp.selection import ROOT

__all__ = ["FILE", "MAX_BYTES", "ROOT", "SUFFIX", "of_metadata", "of_shards", "read_metadata"]
