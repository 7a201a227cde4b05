"""Every rank reads its own slice of each parameter with safetensors' safe_open."""

import torch
from safetensors import safe_open

from peers import Job, local_slice

TITLE = "safe_open, each rank reads its slices"


def load(job: Job) -> None:
    job.materialize()
    with torch.no_grad(), safe_open(job.file, "pt") as source:
        for name, parameter in job.model.named_parameters():
            local = parameter.to_local()
            if not local.numel():
                continue
            with job.phase("read"):
                rows = local_slice(parameter, source.get_slice(name))
            with job.phase("slice"):
                local.copy_(rows)
