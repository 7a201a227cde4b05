"""Loads a real Mixture-of-Experts checkpoint into an FSDP2 model over two emulated nodes, and proves that it is right.

    make demo                       # or: python examples/demo.py, in an environment with epload and transformers

Writes a small Qwen3-MoE checkpoint with the transformers library, starts 4 ranks as 2 nodes x 2 under torchrun, loads the
checkpoint into a model that was built on meta and sharded, and compares logits with those of the whole model in one process.
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
    """Writes the checkpoint and the logits that the whole model gives in this one process."""
    torch.manual_seed(0)
    torch.set_num_threads(1)  # as on the ranks: the order of a sum's terms depends on it
    AutoModelForCausalLM.from_config(config(), dtype=torch.bfloat16).save_pretrained(folder, max_shard_size="40MB")
    whole = Qwen3MoeForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    with torch.no_grad():
        torch.save(whole(prompt()).logits, folder / "logits.pt")


def sharded_model() -> nn.Module:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config(), dtype=torch.bfloat16).eval()
    for layer in model.model.layers:
        fully_shard(layer)
    return fully_shard(model)


def broadcast_each_parameter(model: nn.Module, whole: dict[str, Tensor]) -> None:
    """What loaders commonly do once the first rank has the whole model in memory: one broadcast and one slicing each."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            assert isinstance(parameter, DTensor)
            full = whole[name] if whole else torch.empty(parameter.shape, dtype=parameter.dtype)
            dist.broadcast(full, 0)
            parameter.copy_(distribute_tensor(full, parameter.device_mesh, parameter.placements))


def run(folder: Path) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = sharded_model()
    loader = epload.HierarchicalLoader(epload.Topology.from_nodes(NODES))
    report = loader.load(model, folder)
    with torch.no_grad():
        logits = model(prompt()).logits
    expected = torch.load(folder / "logits.pt")
    same = bool(torch.equal(logits, expected))
    verdicts: list[bool] = [False] * dist.get_world_size()
    dist.all_gather_object(verdicts, same)

    dist.barrier()
    began = time.perf_counter()
    loader.load(model, folder)
    dist.barrier()
    ours = time.perf_counter() - began
    whole = Qwen3MoeForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).state_dict() if rank == 0 else {}
    broadcast_each_parameter(model, whole)
    dist.barrier()
    began = time.perf_counter()
    broadcast_each_parameter(model, whole)
    dist.barrier()
    theirs = time.perf_counter() - began

    if rank == 0:
        parameters = sum(1 for _ in model.parameters())
        print(f"\nfrom meta, as seen by rank 0:\n{report}\n")
        print(f"again, everything warm: {ours:.3f} s  epload, {report.tensors} checkpoint tensors from disk cache")
        print(
            f"{theirs:29.3f} s  one broadcast each for {parameters} parameters already in memory ({theirs / ours:.1f}x)"
        )
        print(f"logits equal to the single-process model's, on each of 4 ranks: {verdicts}")
    dist.destroy_process_group()
    if not all(verdicts):
        sys.exit("the sharded model's logits differ from the single-process model's")


def main() -> None:
    if "RANK" in os.environ:
        run(Path(os.environ["EPLOAD_DEMO"]))
        return
    with tempfile.TemporaryDirectory(prefix="epload-demo-") as folder:
        prepare(Path(folder))
        files = sorted(Path(folder).glob("*.safetensors"))
        megabytes = sum(file.stat().st_size for file in files) / 1e6
        print(f"a Qwen3-MoE checkpoint of {megabytes:.0f} MB in {len(files)} files, 4 ranks as nodes {NODES}")
        environment = {**os.environ, "EPLOAD_DEMO": folder, "OMP_NUM_THREADS": "1", "TRANSFORMERS_VERBOSITY": "error"}
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4", __file__]
        sys.exit(subprocess.run(torchrun, env=environment).returncode)


if __name__ == "__main__":
    main()
