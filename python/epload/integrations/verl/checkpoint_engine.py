"""verl's checkpoint engine over epload. Tried with verl 0.9.1. In the rollout's configuration::

    checkpoint_engine:
      backend: epload
      custom_backend_module: epload.integrations.verl.checkpoint_engine
      engine_kwargs: {epload: {timeout: 600, verify: true}}

verl gives full tensors to every rank of the actor, and takes full tensors in every rank of the rollout. Each actor rank keeps an
equal part of them in host memory and sends that part, and each byte enters a node of the rollout once.
"""

from __future__ import annotations

import secrets
import socket
from collections.abc import AsyncIterator, Iterable
from contextlib import closing
from typing import Any

import ray
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry

from epload.mapping.mapping import Mapping
from epload.model.flat_state import FlatState
from epload.sync.participants import EngineRank
from epload.sync.receiver import WeightReceiver
from epload.sync.sender import WeightSender
from epload.sync.store import format_address

_TIMEOUT = 1800.0


@CheckpointEngineRegistry.register("epload")
class EploadCheckpointEngine(CheckpointEngine):  # type: ignore[misc]
    """One rank of the actor, or of the rollout. Connections are kept from step to step, until ranks of the rollout change."""

    def __init__(
        self, bucket_size: int, is_master: bool = False, timeout: float = _TIMEOUT, verify: bool = False, host: str = ""
    ) -> None:
        """
        Args:
            bucket_size: verl's; not used.
            is_master: whether this is the actor's first rank.
            timeout: as for :class:`epload.WeightSender`.
            verify: as for :class:`epload.WeightSender`.
            host: the address of the actor's first rank in the network of both jobs; what Ray uses if empty.
        """
        self._is_master = is_master
        self._options: dict[str, Any] = {"timeout": timeout, "verify": verify}
        self._host = host
        self._address = ""
        self._receivers = 0
        self._parts: _ActorParts | None = None
        self._sender: WeightSender | None = None
        self._receiver: WeightReceiver | None = None
        self._engine: EngineRank | None = None
        self._version = 0

    def prepare(self) -> dict[str, Any]:
        pending = _free_address((self._host or ray.util.get_node_ip_address()).strip("[]")) if self._is_master else ""
        return {"address": self._address, "receivers": self._receivers, "pending": pending}

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        address = metadata[0]["address"]
        # Connections were made for as many ranks of the rollout.
        current = (address, rollout_world_size)
        if not address or any((of_rank["address"], of_rank["receivers"]) != current for of_rank in metadata):
            address = metadata[0]["pending"]
        name = f"verl-{secrets.token_hex(4)}"

        def arguments(size: int, sends: bool) -> dict[str, list[Any]]:
            same = {"address": address, "sends": sends, "receivers": rollout_world_size, "name": name}
            return {"rank": list(range(size)), **{key: [value] * size for key, value in same.items()}}

        return arguments(actor_wg_world_size, True), arguments(rollout_world_size, False)

    def init_process_group(self, address: str, sends: bool, rank: int, receivers: int, name: str) -> None:
        if address == self._address:
            return
        self.close()
        # Both ends connect when they are used: verl waits here for both, and the receiver for the sender.
        self._address, self._receivers = address, receivers
        self._engine = None if sends else EngineRank(name, rank, receivers)

    def finalize(self) -> None:
        """Does nothing: connections serve the next step."""

    async def send_weights(self, weights: Iterable[tuple[str, Tensor]], global_steps: int | None = None) -> dict[str, float]:
        if not self._address:
            raise ValueError("expected init_process_group to be called before send_weights")
        if self._parts is None:
            self._parts = _ActorParts(dist.get_rank(), dist.get_world_size())
        changed = self._parts.take(weights)
        if self._sender is not None and changed:
            self._parts.forget_layout()  # the sender has the tensors of the step before, and is not given others
            raise ValueError("the actor's tensors have other names or shapes than in the step before; restart the rollout")
        if self._sender is None:
            self._sender = WeightSender(
                self._parts.model, self._address, receivers=self._receivers, mapping=Mapping(), **self._options
            )
        self._version += 1
        report = self._sender.send_weights(self._version)
        assert report is not None
        return {"epload/seconds": report.seconds, "epload/bytes": float(report.nbytes)}

    async def receive_weights(self, global_steps: int | None = None) -> AsyncIterator[tuple[str, Tensor]]:
        if self._engine is None:
            raise ValueError("expected init_process_group to be called before receive_weights")
        if self._receiver is None:
            self._receiver = WeightReceiver(None, self._address, engine=self._engine, **self._options)
        self._receiver.receive_weights()
        # verl gives engines handles of the largest tensors, which those of CPU memory are not.
        device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
        for name, tensor in self._receiver.tensors():
            yield name, tensor.to(device)

    def close(self) -> None:
        """Leaves, and frees memory."""
        for end in (self._sender, self._receiver):
            if end is not None:
                end.close()
        self._sender = self._receiver = self._parts = None
        self._address, self._receivers, self._engine = "", 0, None


class _ActorParts:
    """This rank's part of all tensors: of each the rows that FSDP2 would give it."""

    def __init__(self, rank: int, world: int) -> None:
        self._mesh = DeviceMesh("cpu", list(range(world)))
        self._rank, self._world = rank, world
        self._layout: list[tuple[str, torch.Size, torch.dtype]] = []
        self._parts: dict[str, Tensor] = {}
        self.model: nn.Module = nn.Module()

    def take(self, weights: Iterable[tuple[str, Tensor]]) -> bool:
        """Copies this rank's part out of each tensor; returns True if they are other tensors than before."""
        layout, parts = [], {}
        for name, tensor in weights:
            layout.append((name, tensor.shape, tensor.dtype))
            part = tensor.detach()
            if tensor.ndim:
                rows = -(-len(tensor) // self._world)
                part = part[min(self._rank * rows, len(part)) : min((self._rank + 1) * rows, len(part))]
            before = self._parts.get(name)
            if before is not None and (before.shape, before.dtype) == (part.shape, part.dtype):
                parts[name] = before.copy_(part)
            else:
                parts[name] = part.to("cpu", copy=True).contiguous()
        if layout == self._layout:
            return False
        self._layout, self._parts = layout, parts
        self.model = FlatState({name: self._full(parts[name], shape) for name, shape, _ in layout})
        return True

    def forget_layout(self) -> None:
        """Makes all tensors that come next other ones than before."""
        self._layout = []

    def _full(self, part: Tensor, shape: torch.Size) -> Tensor:
        if not shape:
            return part
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(part, self._mesh, [Shard(0)], run_check=False, shape=shape, stride=stride)


def _free_address(host: str) -> str:
    """Returns an address with a port that is free now."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with closing(socket.socket(family, socket.SOCK_STREAM)) as probe:
        probe.bind((host, 0))
        return format_address(host, probe.getsockname()[1])
