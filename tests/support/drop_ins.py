"""What the tests of drop-ins share: a sharded model, and what a call raised or left."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import fully_shard

from support.models import Mlp, mesh, on_meta


def sharded(dtype: torch.dtype = torch.float32) -> Any:
    """Uneven and empty shards over 4 ranks, on meta."""
    model = on_meta(lambda: Mlp(7, 5, 3).to(dtype))
    return fully_shard(model, mesh=mesh(("all", 4)))


def on_rank_0(values: dict[str, Tensor]) -> dict[str, Tensor]:
    return dict(values) if dist.get_rank() == 0 else {}


def everywhere(value: Any) -> list[Any]:
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values
