"""epload builds, shards and fills a transformers model."""

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from transformers import AutoConfig, AutoModelForCausalLM

import epload
from peers import Job

TITLE = "epload into a transformers model,"
CASES = ("library",)
MODES = {readers: {"readers": readers} for readers in ("one", "auto")}


def load(job: Job, readers: str) -> nn.Module:
    with job.phase("model"):
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(job.folder), dtype=torch.bfloat16)
        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
    job.keep["report"] = epload.load(model, job.folder, topology=job.topology, readers=readers, progress=False)
    return model
