"""transformers builds, shards and fills its own model: from_pretrained with a DistributedConfig."""

import torch
import torch.distributed as dist
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig
from transformers.utils import logging

from peers import Job

TITLE = "transformers from_pretrained(distributed_config=)"
CASES = ("library",)
logging.disable_progress_bar()


def load(job: Job) -> nn.Module:
    config = DistributedConfig(fsdp_size=dist.get_world_size())
    return AutoModelForCausalLM.from_pretrained(job.folder, dtype=torch.bfloat16, distributed_config=config)
