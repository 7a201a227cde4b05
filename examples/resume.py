"""Resuming: a job saves its model and its optimizer, and another goes on from there, bit for bit.

torchrun --standalone --nproc-per-node 2 examples/resume.py tiny/moe tiny/step-2
"""

import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard
from transformers import AutoConfig, AutoModelForCausalLM

import epload


def start(weights: str) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(weights))
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    epload.load(model, weights)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> list[float]:
    tokens, losses = torch.arange(64).reshape(2, 32), []
    for _ in range(steps):
        loss = model(tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main(checkpoint: str, folder: str) -> None:
    dist.init_process_group("gloo")
    model, optimizer = start(checkpoint)
    first, _ = train(model, optimizer, 2)
    epload.save(model, f"{folder}/model", overwrite=True)
    dcp.save(get_optimizer_state_dict(model, optimizer), checkpoint_id=f"{folder}/optimizer")
    expected = train(model, optimizer, 3)[-1]

    model, optimizer = start(f"{folder}/model")  # in another job, of any number of ranks
    state = get_optimizer_state_dict(model, optimizer)
    epload.load_state(state, f"{folder}/optimizer")  # in place
    set_optimizer_state_dict(model, optimizer, state)
    resumed = train(model, optimizer, 3)[-1]
    if dist.get_rank() == 0:
        print(f"loss {first:.4f}, {expected:.4f} after 4 steps, {resumed:.4f} if resumed after 2")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
