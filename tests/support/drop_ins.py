"""What the tests of drop-ins share: a sharded model, and what a call raised or left."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from support.checks import as_bytes
from support.failures import error_of
from support.gather import full_state
from support.models import Mlp, mesh, on_meta


def sharded(dtype: torch.dtype = torch.float32) -> Any:
    """Uneven and empty shards over 4 ranks, on meta."""
    model = on_meta(lambda: Mlp(7, 5, 3).to(dtype))
    return fully_shard(model, mesh=mesh(("all", 4)))


def on_rank_0(values: dict[str, Tensor]) -> dict[str, Tensor]:
    return dict(values) if dist.get_rank() == 0 else {}


def wrong(model: nn.Module, values: dict[str, Tensor]) -> list[str]:
    state = full_state(model)
    return [name for name, value in values.items() if not torch.equal(as_bytes(state[name]), as_bytes(value))]


raised = error_of


def everywhere(value: Any) -> list[Any]:
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values
