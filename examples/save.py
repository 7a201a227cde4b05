"""Saving: training goes on while ranks write a checkpoint that from_pretrained reads.

torchrun --standalone --nproc-per-node 2 examples/save.py tiny/moe tiny/step-1
"""

import sys

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from transformers import AutoConfig, AutoModelForCausalLM

import epload


def main(checkpoint: str, folder: str) -> None:
    dist.init_process_group("gloo")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(checkpoint))
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    epload.load(model, checkpoint)

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tokens = torch.arange(64).reshape(2, 32)
    losses, pending = [], None
    for step in range(3):
        loss = model(tokens, labels=tokens).loss
        losses.append(loss.item())
        if step == 1:  # returns when this rank's shards are copied
            pending = epload.save_async(model, folder, overwrite=True)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    report = pending.wait()  # on every rank, before the process ends

    if dist.get_rank() == 0:
        print(report)
        saved = AutoModelForCausalLM.from_pretrained(folder).to(tokens.device)
        again = saved(tokens, labels=tokens).loss.item()
        print(f"loss {losses[0]:.4f}, {losses[1]:.4f} when saved, {again:.4f} of the saved model")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
