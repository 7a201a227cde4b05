"""Tensor parallelism: torch's parallelize_module shards the matrices of each layer.

torchrun --standalone --nproc-per-node 2 examples/tensor_parallel.py tiny/dense
"""

import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import AutoConfig, AutoModelForCausalLM

import epload

PLAN = {
    "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
    "model.layers.*.self_attn.q_proj": ColwiseParallel(),
    "model.layers.*.self_attn.k_proj": ColwiseParallel(),
    "model.layers.*.self_attn.v_proj": ColwiseParallel(),
    "model.layers.*.self_attn.o_proj": RowwiseParallel(),
    "model.layers.*.mlp.gate_proj": ColwiseParallel(),
    "model.layers.*.mlp.up_proj": ColwiseParallel(),
    "model.layers.*.mlp.down_proj": RowwiseParallel(),
    "lm_head": ColwiseParallel(output_layouts=Replicate()),
}


def main(checkpoint: str) -> None:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(checkpoint))
    parallelize_module(model, mesh, PLAN)
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
