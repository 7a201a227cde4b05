"""Loads as torchtitan does: a parallelized model, into which DCP loads Hugging Face weights.

torchrun --standalone --nproc-per-node 2 examples/torchtitan_like.py tiny/dense
"""

import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import AutoConfig, AutoModelForCausalLM

from epload.integrations.dcp import StorageReader


def parallelize(model: torch.nn.Module, mesh: torch.distributed.DeviceMesh) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)


def main(checkpoint: str) -> None:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp_shard",))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(checkpoint))
    parallelize(model, mesh)
    model.to_empty(device="cpu")
    with torch.no_grad():
        model.init_weights()  # buffers, and what a checkpoint may lack
    state = model.state_dict()
    dcp.load(
        state, storage_reader=StorageReader(checkpoint)
    )  # in place of HuggingFaceStorageReader

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tokens = torch.arange(64).reshape(2, 32)
    losses = []
    for _ in range(3):
        loss = model(tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    if dist.get_rank() == 0:
        print(f"loss {losses[0]:.4f}, {losses[-1]:.4f} after {len(losses) - 1} steps")
    dist.barrier()  # gloo's threads have freed what backward has sent before Python exits
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
