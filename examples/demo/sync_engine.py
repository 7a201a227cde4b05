"""The inference engine of demo_sync.py: a tensor-parallel model that takes the trainer's weights, version after version.

torchrun --standalone --nproc-per-node 2 examples/demo/sync_engine.py FOLDER
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from sync_trainer import ENGINE_DTYPE, STEPS, prompt
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig
from transformers.utils import logging

import epload

logging.disable_progress_bar()


def address_in(folder: Path) -> str:
    """Waits for the trainer's address. In a cluster it is known before."""
    while not (folder / "address").exists():
        time.sleep(0.1)
    return (folder / "address").read_text()


def same_shards(model: nn.Module, weights: dict[str, Tensor]) -> bool:
    """Whether each shard is, bit for bit, what torch makes of the full tensor."""
    for name, tensor in model.state_dict().items():
        full = weights.pop(name)
        if isinstance(tensor, DTensor):
            full = distribute_tensor(
                full, tensor.device_mesh, tensor.placements, src_data_rank=None
            ).to_local()
            tensor = tensor.to_local()
        if not torch.equal(tensor.view(torch.int16), full.view(torch.int16)):
            return False
    return not weights


def main(folder: Path) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    config = DistributedConfig(tp_size=dist.get_world_size())
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=ENGINE_DTYPE, distributed_config=config
    ).eval()
    failed = False

    with epload.WeightReceiver(model, address_in(folder), timeout=60) as receiver:
        for version in range(1, STEPS + 1):
            # Into host memory: until commit(), the model may go on with the old weights.
            report = receiver.receive_weights()
            began = time.perf_counter()
            receiver.commit()
            seconds = time.perf_counter() - began

            expected = torch.load(folder / f"expected-{version}.pt")
            with torch.no_grad():
                logits = model(prompt()).logits
            off = (logits - expected["logits"]).abs().max().item()
            found = [
                receiver.version == version,
                same_shards(model, expected["weights"]),
                off <= 0.05,
            ]
            of_ranks = [found] * dist.get_world_size()
            dist.all_gather_object(of_ranks, found)
            failed = failed or not all(map(all, of_ranks))
            if rank == 0:
                equal = [same for _, same, _ in of_ranks]
                print(f"engine, {report}\n  commit in {seconds:.3f} s")
                print(
                    f"  version {receiver.version}; shards equal to the trainer's, per rank: {equal}; logits off by {off:.1e}",
                    flush=True,
                )
    dist.destroy_process_group()
    if failed:
        sys.exit("the engine's model differs from the trainer's")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
