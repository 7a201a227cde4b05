"""Sources of weights behind one interface: files of several formats, over a byte store, and state dicts."""

from epload.checkpoint import opening
from epload.checkpoint.base import Checkpoint

Checkpoint._opener = opening
