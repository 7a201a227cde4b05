"""epload as a backend of verl's checkpoint engine: verl's own registry and manager, in Ray actors."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import torch
import torch.distributed as dist
from torch import Tensor
from verl.checkpoint_engine.base import CheckpointEngineManager, CheckpointEngineRegistry
from verl.utils.import_utils import import_external_libs

from support.engines import unique

MODULE = "epload.integrations.verl.checkpoint_engine"
SHAPES: dict[str, tuple[int, ...]] = {
    "embed.weight": (37, 16), "layers.0.weight": (3, 5), "layers.0.bias": (1,), "layers.1.weight": (8, 2, 3), "scale": (),
    "empty": (0, 4), "head": (300, 70),
}  # fmt: skip


def weights(step: int) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in unique(SHAPES).items():
        yield name, (tensor + step).to(torch.bfloat16 if name == "head" else torch.float32)


@ray.remote(num_cpus=0)
class Worker:
    """What verl's workers do with their checkpoint engine."""

    def __init__(self, actor: bool, rank: int, world: int, store: str, options: dict[str, Any]) -> None:
        if actor:
            dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
        import_external_libs(MODULE)
        self._options = {**options, "is_master": rank == 0} if actor else options
        self.restart()

    def restart(self) -> None:
        """As a new process in place of this one; to start one takes seconds."""
        self._engine = CheckpointEngineRegistry.new("epload", bucket_size=1 << 20, **self._options)

    def execute_checkpoint_engine(self, method: str, **arguments: Any) -> Any:
        return getattr(self._engine, method)(**arguments)

    async def send(self, step: int) -> Any:
        return await self._engine.send_weights(weights(step), global_steps=step)

    async def receive(self, step: int) -> list[str]:
        expected = dict(weights(step))
        wrong = []
        async for name, tensor in self._engine.receive_weights(global_steps=step):
            value = expected.pop(name)
            if (tensor.dtype, tensor.shape) != (value.dtype, value.shape) or not torch.equal(tensor, value):
                wrong.append(name)
        return wrong + [f"{name} is missing" for name in expected if 0 not in expected[name].shape]


class Group:
    """As much of verl's RayWorkerGroup as its manager uses."""

    def __init__(self, workers: list[Any]) -> None:
        self.workers = workers
        self.world_size = len(workers)

    def execute_checkpoint_engine(self, method: list[str], **arguments: list[Any]) -> list[Any]:
        return [
            worker.execute_checkpoint_engine.remote(method[i], **{name: values[i] for name, values in arguments.items()})
            for i, worker in enumerate(self.workers)
        ]


def step(manager: CheckpointEngineManager, actors: Group, rollout: Group, number: int) -> None:
    """What CheckpointEngineManager.update_weights does between pausing and resuming the rollout."""
    manager.build_process_group(rollout)
    sent = [worker.send.remote(number) for worker in actors.workers]
    received = [worker.receive.remote(number) for worker in rollout.workers]
    assert ray.get(received, timeout=100) == [[]] * rollout.world_size
    assert all(report["epload/bytes"] > 0 for report in ray.get(sent, timeout=100))
    ray.get([*actors.execute_checkpoint_engine(["finalize"] * actors.world_size)])


def test_each_step_arrives_in_every_rank_of_the_rollout(cluster: str, tmp_path: Path) -> None:
    options = {"timeout": 60.0, "verify": True, "host": "127.0.0.1"}
    actors = Group([Worker.remote(True, rank, 2, str(tmp_path / "store"), options) for rank in range(2)])
    rollout = [Worker.remote(False, rank, 2, "", options) for rank in range(2)]
    config = SimpleNamespace(backend="epload", custom_backend_module=MODULE)
    manager = CheckpointEngineManager(config, actors, [])
    step(manager, actors, Group(rollout[:1]), 1)
    addresses = [found["address"] for found in ray.get(actors.execute_checkpoint_engine(["prepare"] * 2))]
    step(manager, actors, Group(rollout[:1]), 2)
    assert [found["address"] for found in ray.get(actors.execute_checkpoint_engine(["prepare"] * 2))] == addresses
    # A replica is added, another one replaced, one removed.
    step(manager, actors, Group(rollout), 3)
    ray.get(rollout[1].restart.remote(), timeout=100)
    step(manager, actors, Group(rollout), 4)
    step(manager, actors, Group(rollout[1:]), 5)


@pytest.mark.parametrize(("size", "kept"), [(4, True), (2, False), (5, False)])
def test_connections_are_kept_for_as_many_ranks_alone(size: int, kept: bool) -> None:
    import_external_libs(MODULE)
    engine = CheckpointEngineRegistry.get("epload")
    known = {"address": "here:1", "receivers": 4, "pending": ""}
    metadata = [{**known, "pending": "here:2"}, *[known] * (1 + size)]
    for arguments in engine.build_topology(2, size, metadata):
        assert set(arguments["address"]) == {"here:1" if kept else "here:2"}


def test_other_tensors_are_refused_each_time(tmp_path: Path) -> None:
    """The sender has the tensors of the first step: it must not send those again as the next step's."""
    import_external_libs(MODULE)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        engine = CheckpointEngineRegistry.new("epload", bucket_size=1 << 20, is_master=True)
        engine._address, engine._sender = "127.0.0.1:1", object()
        for _ in range(2):
            with pytest.raises(ValueError, match="restart the rollout"):
                asyncio.run(engine.send_weights(weights(1)))
    finally:
        dist.destroy_process_group()
