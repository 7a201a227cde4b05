"""Needs an accelerator: accelerate with FSDP2, whose weights epload distributes from rank 0.

torchrun --standalone --nproc-per-node 2 examples/accelerate_fsdp2.py tiny/moe
"""

import sys

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from transformers import AutoModelForCausalLM

import epload


def main(checkpoint: str) -> None:
    if not torch.accelerator.is_available():
        sys.exit(
            "accelerate_fsdp2.py needs an accelerator, and torch finds none: accelerate shards "
            "models on accelerators only."
        )
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", cpu_ram_efficient_loading=True
    )
    accelerator = Accelerator(fsdp_plugin=plugin)
    model = AutoModelForCausalLM.from_pretrained(checkpoint)  # weights on rank 0 only
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with epload.patch("accelerate"):
        model, optimizer = accelerator.prepare(model, optimizer)

    tokens = torch.arange(64, device=accelerator.device).reshape(2, 32)
    losses = []
    for _ in range(3):
        loss = model(tokens, labels=tokens).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    accelerator.print(f"{type(model).__name__} on {accelerator.num_processes} ranks")
    accelerator.print(f"loss {losses[0]:.4f}, {losses[-1]:.4f} after {len(losses) - 1} steps")
    accelerator.end_training()


if __name__ == "__main__":
    main(sys.argv[1])
