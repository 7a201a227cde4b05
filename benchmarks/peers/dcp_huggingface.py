"""torch.distributed.checkpoint with HuggingFaceStorageReader: every rank reads its own slices."""

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import HuggingFaceStorageReader

from peers import Job

TITLE = "DCP HuggingFaceStorageReader"


def load(job: Job) -> None:
    job.materialize()
    dcp.load(job.model.state_dict(), storage_reader=HuggingFaceStorageReader(str(job.folder)))
