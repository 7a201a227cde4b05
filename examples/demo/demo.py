"""Loads a Mixture-of-Experts checkpoint into an FSDP2 model on two emulated nodes, and checks the result.

    make demo                       # or: python examples/demo/demo.py, in an environment with epload and transformers

Writes a small Qwen3-MoE checkpoint with transformers, starts 4 ranks as 2 nodes x 2 under torchrun, loads the checkpoint into a
model that was built on meta and sharded, and compares its logits with those of the unsharded model in one process.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.utils import logging

import epload

logging.disable_progress_bar()

NODES = [[0, 1], [2, 3]]


def config() -> Qwen3MoeConfig:
    return Qwen3MoeConfig(
        vocab_size=2048, hidden_size=256, num_hidden_layers=8, num_attention_heads=8, num_key_value_heads=4, head_dim=32,
        intermediate_size=512, moe_intermediate_size=128, num_experts=64, num_experts_per_tok=4, dtype=torch.bfloat16,
    )  # fmt: skip


def prompt() -> Tensor:
    return torch.arange(24).reshape(2, 12) * 37 % 2048


def prepare(folder: Path) -> None:
    """Writes the checkpoint and the logits of the unsharded model in this process."""
    torch.manual_seed(0)
    torch.set_num_threads(1)  # as on the ranks; the summation order depends on it
    AutoModelForCausalLM.from_config(config(), dtype=torch.bfloat16).save_pretrained(
        folder, max_shard_size="40MB"
    )
    whole = Qwen3MoeForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    with torch.no_grad():
        torch.save(whole(prompt()).logits, folder / "logits.pt")


def sharded_model() -> nn.Module:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config(), dtype=torch.bfloat16).eval()
    for layer in model.model.layers:
        fully_shard(layer)
    return fully_shard(model)


def broadcast_each_parameter(
    model: nn.Module, whole: dict[str, Tensor], group: dist.ProcessGroup
) -> None:
    """Fills the model as loaders commonly do: rank 0 has all weights, and broadcasts one parameter at a time."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            assert isinstance(parameter, DTensor)
            dist.broadcast(whole[name], 0, group)
            shard = distribute_tensor(
                whole[name], parameter.device_mesh, parameter.placements, src_data_rank=None
            )
            parameter.copy_(shard)


def run(folder: Path) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = sharded_model()
    loader = epload.HierarchicalLoader(epload.Topology.from_nodes(NODES))
    report = loader.load(model, folder)
    with torch.no_grad():
        logits = model(prompt()).logits
    expected = torch.load(folder / "logits.pt")
    equal: list[bool] = [False] * dist.get_world_size()
    dist.all_gather_object(equal, torch.equal(logits, expected))

    dist.barrier()
    start = time.perf_counter()
    loader.load(model, folder)
    dist.barrier()
    reload_seconds = time.perf_counter() - start
    if rank == 0:
        whole = Qwen3MoeForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).state_dict()
    else:
        whole = {name: torch.empty(p.shape, dtype=p.dtype) for name, p in model.named_parameters()}
    # A group of its own, whose threads end with it, while the tensors that they may still hold are alive. With torch 2.13, one
    # that releases a tensor as late as when the interpreter exits ends the process with SIGABRT.
    group = dist.new_group()
    broadcast_each_parameter(model, whole, group)
    dist.barrier()
    start = time.perf_counter()
    broadcast_each_parameter(model, whole, group)
    dist.barrier()
    broadcast_seconds = time.perf_counter() - start
    dist.destroy_process_group(group)
    del group

    if rank == 0:
        parameters = sum(1 for _ in model.parameters())
        print(f"\nload from meta, report of rank 0:\n{report}\n")
        print(
            f"reload: {reload_seconds:.3f} s for {report.tensors} checkpoint tensors from the page cache"
        )
        print(
            f"one broadcast per parameter: {broadcast_seconds:.3f} s for {parameters} parameters already in memory "
            f"({broadcast_seconds / reload_seconds:.1f}x)"
        )
        print(f"logits equal to those of the unsharded model, per rank: {equal}")
    dist.destroy_process_group()
    if not all(equal):
        sys.exit("the logits of the sharded model differ from those of the unsharded model")


def main() -> None:
    if "RANK" in os.environ:
        run(Path(os.environ["EPLOAD_DEMO"]))
        return
    with tempfile.TemporaryDirectory(prefix="epload-demo-") as folder:
        prepare(Path(folder))
        files = sorted(Path(folder).glob("*.safetensors"))
        megabytes = sum(file.stat().st_size for file in files) / 1e6
        print(
            f"Qwen3-MoE checkpoint of {megabytes:.0f} MB in {len(files)} files, 4 ranks as nodes {NODES}"
        )
        environment = {
            **os.environ,
            "EPLOAD_DEMO": folder,
            "OMP_NUM_THREADS": "1",
            "TRANSFORMERS_VERBOSITY": "error",
        }
        torchrun = [
            sys.executable,
            *["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"],
            __file__,
        ]
        sys.exit(subprocess.run(torchrun, env=environment).returncode)


if __name__ == "__main__":
    main()
