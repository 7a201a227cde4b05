"""FSDP2: the parameters of each layer are sharded over all ranks.

torchrun --standalone --nproc-per-node 2 examples/fsdp2.py tiny/moe
"""

import sys

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from transformers import AutoConfig, AutoModelForCausalLM

import epload


def main(checkpoint: str) -> None:
    dist.init_process_group("gloo")
    with torch.device("meta"):  # no memory yet
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(checkpoint))
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    report = epload.load(model, checkpoint)  # memory for this rank's shards alone

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
