"""Ray: the ranks are actors, which set the environment that torchrun would set.

python examples/ray_actors.py tiny/moe
"""

import os
import socket
import sys

import ray
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from transformers import AutoConfig, AutoModelForCausalLM

import epload

WORLD = 2


@ray.remote  # on GPUs: @ray.remote(num_gpus=1), and "nccl" below
class Rank:
    def address(self) -> tuple[str, int]:
        """Where the ranks meet: this actor's node, and a port that is free there."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            return ray.util.get_node_ip_address(), probe.getsockname()[1]

    def join(self, rank: int, host: str, port: int) -> None:
        os.environ |= {
            "MASTER_ADDR": host,
            "MASTER_PORT": str(port),
            "RANK": str(rank),
            "WORLD_SIZE": str(WORLD),
        }
        dist.init_process_group("gloo")

    def load(self, checkpoint: str) -> epload.LoadReport:
        with torch.device("meta"):
            self.model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(checkpoint))
        for layer in self.model.model.layers:
            fully_shard(layer)
        fully_shard(self.model)
        return epload.load(self.model, checkpoint, timeout=60)

    def loss(self) -> float:
        tokens = torch.arange(64).reshape(2, 32)
        (loss := self.model(tokens, labels=tokens).loss).backward()
        return loss.item()


def main(checkpoint: str) -> None:
    ray.init()
    ranks = [Rank.remote() for _ in range(WORLD)]
    host, port = ray.get(ranks[0].address.remote())
    ray.get([actor.join.remote(rank, host, port) for rank, actor in enumerate(ranks)])
    reports = ray.get([actor.load.remote(os.path.abspath(checkpoint)) for actor in ranks])
    losses = ray.get([actor.loss.remote() for actor in ranks])
    print(reports[0])
    print(f"loss {losses[0]:.4f}")


if __name__ == "__main__":
    main(sys.argv[1])
