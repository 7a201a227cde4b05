"""HSDP: each layer is sharded inside a group of ranks, usually a node, and groups are replicas.

torchrun --standalone --nproc-per-node 4 examples/hsdp.py tiny/moe
"""

import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoConfig, AutoModelForCausalLM

import epload


def main(checkpoint: str) -> None:
    dist.init_process_group("gloo")
    mesh = init_device_mesh(
        "cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard")
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(checkpoint))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    report = epload.load(model, checkpoint)

    tokens = torch.arange(64).reshape(2, 32)
    loss = model(tokens, labels=tokens).loss
    loss.backward()
    if dist.get_rank() == 0:
        print(report)
        print(f"loss {loss.item():.4f}")
    dist.barrier()  # gloo's threads have freed what backward has sent before Python exits
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
