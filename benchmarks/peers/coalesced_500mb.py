"""Broadcasts batches of 500 MB with dist._broadcast_coalesced; each rank keeps its slices."""

import torch
import torch.distributed as dist
from safetensors import safe_open

from peers import Job, local_slice

TITLE = "dist._broadcast_coalesced, 500 MB batches + local slices"
BATCH = 500_000_000


def load(job: Job) -> None:
    job.materialize()
    source = safe_open(job.file, "pt") if job.rank == 0 else None
    batch, nbytes = {}, 0
    parameters = dict(job.model.named_parameters())
    last = next(reversed(parameters))
    for name, parameter in parameters.items():
        with job.phase("read"):
            full = source.get_tensor(name) if source else torch.empty(parameter.shape, dtype=parameter.dtype)
        batch[name] = full
        nbytes += full.nbytes
        if nbytes >= BATCH or name == last:
            dist._broadcast_coalesced(dist.group.WORLD, list(batch.values()), BATCH, 0)
            with job.phase("slice"), torch.no_grad():
                for arrived, tensor in batch.items():
                    parameters[arrived].to_local().copy_(local_slice(parameters[arrived], tensor))
            batch, nbytes = {}, 0
