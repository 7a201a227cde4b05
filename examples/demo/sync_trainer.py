"""The trainer of demo_sync.py: trains under FSDP2, and sends its weights after each step.

    torchrun --standalone --nproc-per-node 2 examples/demo/sync_trainer.py FOLDER

FOLDER has the checkpoint to start from. The trainer's address is left there for the engine, and so is, for each version, what the
engine has to end up with.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM
from transformers.utils import logging

import epload

logging.disable_progress_bar()

STEPS = 3
ENGINE_RANKS = 2
ENGINE_DTYPE = torch.bfloat16
"""Tensors are converted on the way."""


def prompt() -> Tensor:
    return torch.arange(24).reshape(2, 12) * 37 % 2048


def leave_for_the_engine(model: nn.Module, path: Path) -> None:
    """Saves all weights, gathered by torch, in the engine's dtype, and a prompt's logits of a model that has them."""
    full = {
        name: t.full_tensor() if isinstance(t, DTensor) else t
        for name, t in model.state_dict().items()
    }
    if dist.get_rank() == 0:
        weights = {name: tensor.to(ENGINE_DTYPE) for name, tensor in full.items()}
        served = AutoModelForCausalLM.from_config(model.config, dtype=ENGINE_DTYPE).eval()
        served.load_state_dict(weights)
        with torch.no_grad():
            torch.save({"weights": weights, "logits": served(prompt()).logits}, path)


def main(folder: Path) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    torch.manual_seed(rank)

    # Port 0: the system chooses one. In a cluster, pass a port that the engines know, such as "trainer0:29600".
    # With delta, the engine gets what has changed since the step before: a step moves few weights to another bf16 value.
    with epload.WeightSender(
        model, "127.0.0.1:0", receivers=ENGINE_RANKS, timeout=60, delta="auto"
    ) as sender:
        if rank == 0:
            (folder / "address.new").write_text(sender.address)
            os.rename(folder / "address.new", folder / "address")
        for step in range(1, STEPS + 1):
            tokens = torch.randint(2048, (4, 32))
            loss = model(tokens, labels=tokens).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            leave_for_the_engine(model, folder / f"expected-{step}.pt")
            report = sender.send_weights(step)
            if rank == 0:
                print(f"trainer, step {step}, loss {loss.item():.3f}: {report}")
                print(
                    f"  {report.wire_bytes:,} bytes sent by this rank {report.why_full and f'({report.why_full})'}",
                    flush=True,
                )
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
