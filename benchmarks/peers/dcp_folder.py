"""torch.distributed.checkpoint's own folder of this model, saved by the same ranks: every rank reads its own chunks."""

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import DTensor

from peers import Job, local_slice
from workload import full_tensors

TITLE = "DCP folder, dcp.load"
FOLDER = "dcp"


def prepare(job: Job) -> None:
    """Saves the folder, once for each checkpoint."""
    if (job.folder / FOLDER / ".metadata").exists():
        return
    dist.barrier()
    full, state = full_tensors(job.folder), {}
    for name, parameter in job.model.state_dict().items():
        local = local_slice(parameter, full[name]).clone()
        mesh, placements = parameter.device_mesh, parameter.placements
        state[name] = DTensor.from_local(
            local, mesh, placements, run_check=False, shape=parameter.shape, stride=parameter.stride()
        )
    dcp.save({"model": state}, checkpoint_id=job.folder / FOLDER)


def load(job: Job) -> None:
    job.materialize()
    dcp.load({"model": job.model.state_dict()}, checkpoint_id=job.folder / FOLDER)
