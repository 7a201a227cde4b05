"""torch.distributed.checkpoint with epload's storage reader, from the same safetensors folder."""

import torch.distributed.checkpoint as dcp

from epload.integrations.dcp import StorageReader
from peers import Job

TITLE = "DCP, epload.integrations.dcp.StorageReader"


def load(job: Job) -> None:
    job.materialize()
    dcp.load(job.model.state_dict(), storage_reader=StorageReader(job.folder))
