"""Expert parallelism: each rank has some experts of each layer; FSDP2 shards everything else.

torchrun --standalone --nproc-per-node 2 examples/expert_parallel.py tiny/moe

The checkpoint has one tensor for each expert, the model one for all experts of a rank.
transformers declares how they correspond, and epload reads that.
"""

import sys

import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.distributed import DistributedConfig

import epload


def main(checkpoint: str) -> None:
    dist.init_process_group("gloo")
    world = dist.get_world_size()
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(checkpoint))
    config, _, mesh = model.prepare_distribute_model(
        DistributedConfig(ep_size=world, fsdp_size=world)
    )
    model = model.maybe_distribute_model(model, config, mesh)
    report = epload.load(model, checkpoint)

    tokens = torch.arange(64).reshape(2, 32)
    loss = model(tokens, labels=tokens).loss
    loss.backward()
    if dist.get_rank() == 0:
        print(report)
        experts = model.model.layers[0].mlp.experts.down_proj
        print(f"{len(experts.to_local())} of {len(experts)} experts on this rank")
        print(f"loss {loss.item():.4f}")
    dist.barrier()  # gloo's threads have freed what backward has sent before Python exits
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
