"""One broadcast of the full tensor and one distribute_tensor for each parameter."""

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch.distributed.tensor import distribute_tensor

from peers import Job

TITLE = "broadcast + distribute_tensor per parameter"


def load(job: Job) -> None:
    job.materialize()
    source = safe_open(job.file, "pt") if job.rank == 0 else None
    with torch.no_grad():
        for name, parameter in job.model.named_parameters():
            with job.phase("read"):
                full = source.get_tensor(name) if source else torch.empty(parameter.shape, dtype=parameter.dtype)
            dist.broadcast(full, 0)
            parameter.copy_(distribute_tensor(full, parameter.device_mesh, parameter.placements))
