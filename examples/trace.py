"""A trace of all ranks for Perfetto, and the report as text and as numbers.

torchrun --standalone --nproc-per-node 2 examples/trace.py tiny/moe load.json
"""

import sys

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from transformers import AutoConfig, AutoModelForCausalLM

import epload


def main(checkpoint: str, path: str) -> None:
    dist.init_process_group("gloo")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(checkpoint))
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    report = epload.load(model, checkpoint, options=epload.LoadOptions(trace=True))

    report.trace(path)  # open it with https://ui.perfetto.dev
    tokens = torch.arange(64).reshape(2, 32)
    loss = model(tokens, labels=tokens).loss
    loss.backward()
    if dist.get_rank() == 0:
        print(report)
        for name, value in report.scalars().items():  # for W&B, TensorBoard
            print(f"{name} = {value:.6g}")
        print(f"loss {loss.item():.4f}")
    dist.barrier()  # gloo's threads have freed what backward has sent before Python exits
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
