"""epload builds, shards and fills a transformers model. One mesh for all layers, as transformers has it in from_pretrained."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
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
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    job.keep["report"] = epload.load(model, job.folder, topology=job.topology, readers=readers, progress=False)
    return model
