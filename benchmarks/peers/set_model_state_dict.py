"""torch.distributed.checkpoint.state_dict.set_model_state_dict with broadcast_from_rank0."""

from safetensors.torch import load_file
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

from peers import Job

TITLE = "torch set_model_state_dict(broadcast_from_rank0)"


def load(job: Job) -> None:
    job.materialize()
    with job.phase("read"):
        full = load_file(job.file) if job.rank == 0 else {}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(job.model, full, options=options)
