"""LoRA: a PEFT model under FSDP2. The checkpoint fills the base weights, PEFT the adapters.

torchrun --standalone --nproc-per-node 2 examples/lora_peft.py tiny/dense
"""

import sys

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch.distributed.fsdp import fully_shard
from transformers import AutoConfig, AutoModelForCausalLM

import epload


def main(checkpoint: str) -> None:
    dist.init_process_group("gloo")
    with torch.device("meta"):
        base = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(checkpoint))
        model = get_peft_model(base, LoraConfig(r=8, target_modules=["q_proj", "v_proj"]))
    for layer in base.model.layers:
        fully_shard(layer)
    fully_shard(model)
    report = epload.load(model, checkpoint, strict=False)  # the checkpoint has no adapters
    if others := [name for name in report.missing_keys if ".lora_" not in name]:
        raise ValueError(f"the checkpoint lacks {others}")

    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2)
    tokens = torch.arange(64).reshape(2, 32)
    losses = []
    for _ in range(3):
        loss = model(tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    if dist.get_rank() == 0:
        print(report)
        print(f"loss {losses[0]:.4f}, {losses[-1]:.4f} after {len(losses) - 1} steps")
    dist.barrier()  # gloo's threads have freed what backward has sent before Python exits
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
