"""accelerate's fsdp2_load_full_state_dict, which replaces the parameters, so the model must be on meta."""

from types import SimpleNamespace

from accelerate.utils.fsdp_utils import fsdp2_load_full_state_dict
from safetensors.torch import load_file

from peers import Job

TITLE = "accelerate fsdp2_load_full_state_dict"
CASES = ("meta",)


def load(job: Job) -> None:
    with job.phase("read"):
        full = load_file(job.file) if job.rank == 0 else {}
    accelerator = SimpleNamespace(is_main_process=job.rank == 0)  # the only attribute the function uses
    fsdp2_load_full_state_dict(accelerator, job.model, full)
