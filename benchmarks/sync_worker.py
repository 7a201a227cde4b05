"""One rank of bench_sync.py: a trainer's or a rollout job's. Each job has a default group of its own.

Every version has other values, which each rank computes for itself: 13 random bits for each element, and the version on top; or,
for peers that send what has changed, a fiftieth of the elements changes, or one step of AdamW is taken. A rollout rank counts a
version only if its shards are equal bit for bit.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import epload
import sync_peers
from epload.core import garbage_collection
from epload.mapping.mapping import Mapping
from epload.model.targets import collect
from epload.planning.exchange import plan_exchange
from epload.planning.holdings import Holdings, holdings_of_targets
from epload.planning.plan import make_plan
from epload.planning.schedule import SYNC_WAVE_BYTES
from epload.planning.streams import Members
from epload.saving.catalog import catalog
from epload.sync.targets import ModelTarget
from measure import link_bytes
from simulator import waves
from sync_peers import SyncJob, box_of, cut, local
from worker import Worker, main
from workload import Size, meta_model, sharded_model

ROWS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "embed_tokens", "lm_head")
"""Sharded along dim 0 by tensor parallelism."""
COLUMNS = ("o_proj", "down_proj")
"""Along dim 1. Norms are on every rank."""
LARGEST = 1 << 13
STEP = 257
PERIOD = 50
"""An element changes in every so many versions, where 2 % of them change in each."""
LEARNING_RATE, STEPS = 1e-6, 3


class SyncWorker(Worker):
    counts_slow_first = False

    def __init__(self, folder: Path) -> None:
        self.read(folder)
        plan = self.plan
        self.rank, self.world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.each = plan["ranks"]
        self.interface = plan["interface"]
        limit = timedelta(seconds=plan["limit"])
        address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = dist.TCPStore(*address, self.world, self.rank == 0, limit)
        self.senders = plan["trainers"] * self.each
        self.sends = self.rank < self.senders
        job, first, world = ("trainer", 0, self.senders) if self.sends else ("rollout", self.senders, self.world - self.senders)
        dist.init_process_group(
            "gloo", store=dist.PrefixStore(job, store), rank=self.rank - first, world_size=world, timeout=limit
        )
        self.topology = epload.Topology.from_nodes([list(node) for node in self.nodes_of(0, world)])
        self.span = sync_peers.Span(dist.PrefixStore("span", store), self.rank, self.world, plan["limit"])
        self.nodes = self.nodes_of(self.senders, self.world)
        self.values = Values(Size(**plan["size"]), self.sends, len(self.nodes))

    def nodes_of(self, first: int, end: int) -> tuple[tuple[int, ...], ...]:
        """Ranks from ``first`` to ``end`` by node."""
        return tuple(tuple(range(begin, begin + self.each)) for begin in range(first, end, self.each))

    def make_case(self, case: str, entries: list[str]) -> Any:
        return {"sync": Syncs, "plan": Planning}[case](self)

    def measure(self, instance: Any, case: str, entry: str) -> dict[str, Any]:
        with garbage_collection.paused():
            work = instance.prepare(entry)
        self.span.barrier()
        before = link_bytes(self.interface)
        self.span.barrier()
        began, busy = perf_counter(), os.times()
        work()
        seconds, now = perf_counter() - began, os.times()
        self.span.barrier()  # no rank reads the counters while bytes are in flight
        after = link_bytes(self.interface)
        with garbage_collection.paused():
            wrong = instance.wrong()
        if wrong:
            raise RuntimeError(f"wrong result: {len(wrong)} differ from the trainer, the first {wrong[0]}")
        mine = {
            "seconds": seconds, "moved": [after[0] - before[0], after[1] - before[1]],
            "phases": {**instance.phases(seconds), "send" if self.sends else "receive": seconds},
            "cpu": {"user": now.user - busy.user, "system": now.system - busy.system},
        }  # fmt: skip
        everyones = self.span.exchange(mine)
        names = list(dict.fromkeys(name for one in everyones for name in one["phases"]))
        return {
            "case": case, "entry": entry, "seconds": max(one["seconds"] for one in everyones),
            "phases": {name: max(one["phases"].get(name, 0.0) for one in everyones) for name in names},
            "peak": None,
            "cpu": {name: sum(one["cpu"][name] for one in everyones) for name in everyones[0]["cpu"]},
            "links": [one["moved"] for one in everyones[:: self.each]],
            "note": "",
        }  # fmt: skip


class Values:
    """A model of this rank's job, and the values of its local tensors in each version."""

    def __init__(self, size: Size, sends: bool, nodes: int) -> None:
        self.model = sharded_model(size).to_empty(device="cpu") if sends else tensor_parallel_model(size, nodes)
        named = dict(self.model.named_parameters())
        self.names = list(named)
        self.tensors = [local(parameter).view(torch.int16) for parameter in named.values()]
        self._parameters = list(named.values())
        self._base = self._random(LARGEST, 0)
        self._phases: list[Tensor] = []
        self._trained: list[list[Tensor]] = []

    def _random(self, limit: int, seed: int) -> list[Tensor]:
        generator, tensors = torch.Generator(), []
        for number, parameter in enumerate(self._parameters):
            generator.manual_seed(number + seed)
            full = torch.randint(0, limit, parameter.shape, dtype=torch.int16, generator=generator)
            tensors.append(cut(full, *box_of(parameter)).clone())
        return tensors

    def of_version(self, version: int, changes: str) -> list[Tensor]:
        """``changes``: "all", "2 %" or "adamw"; what differs from the version before."""
        if changes == "2 %":
            self._phases = self._phases or self._random(PERIOD, 1 << 20)
            return [base + (version + phase) // PERIOD * STEP for base, phase in zip(self._base, self._phases, strict=True)]
        if changes == "adamw":
            self._trained = self._trained or list(zip(*map(self._train, range(len(self._parameters))), strict=True))
            return self._trained[abs((version + STEPS) % (2 * STEPS) - STEPS)]  # forth and back, a step a version
        return [base + version * STEP % LARGEST for base in self._base]

    def _train(self, number: int) -> list[Tensor]:
        """bf16 weights before and after each step with an fp32 master and random gradients."""
        generator, parameter = torch.Generator().manual_seed(number), self._parameters[number]
        box = box_of(parameter)
        weights = 0.02 * torch.randn(parameter.shape, generator=generator)
        master = nn.Parameter(cut(weights, *box).bfloat16().float())
        optimizer = torch.optim.AdamW([master], lr=LEARNING_RATE)
        states = []
        for _ in range(STEPS + 1):
            states.append(master.detach().bfloat16().view(torch.int16))
            master.grad = cut(torch.randn(parameter.shape, generator=generator), *box).contiguous()
            optimizer.step()
        return states

    def write(self, version: int, changes: str) -> None:
        with torch.no_grad():
            torch._foreach_copy_(self.tensors, self.of_version(version, changes))

    def wrong(self, version: int, changes: str) -> list[str]:
        expected = self.of_version(version, changes)
        return [
            name for name, found, want in zip(self.names, self.tensors, expected, strict=True) if not torch.equal(found, want)
        ]


def tensor_parallel_model(size: Size, nodes: int) -> nn.Module:
    """Sharded over the ranks of a node, replicated over nodes; filled with zeros."""
    mesh = init_device_mesh("cpu", (nodes, dist.get_world_size() // nodes), mesh_dim_names=("replica", "tp"))
    model = meta_model(size)
    for prefix, module in model.named_modules():
        leaf = prefix.rpartition(".")[2]
        for name, full in list(module.named_parameters(recurse=False)):
            parameter: Tensor = torch.zeros(full.shape, dtype=full.dtype)
            if leaf in ROWS + COLUMNS:
                dim = int(leaf in COLUMNS)
                part = torch.zeros(full.shape, dtype=full.dtype).chunk(mesh.size(1), dim)[mesh.get_local_rank(1)]
                placements = [Replicate(), Shard(dim)]
                parameter = DTensor.from_local(
                    part.clone(), mesh, placements, run_check=False, shape=full.shape, stride=full.stride()
                )
            setattr(module, name, nn.Parameter(parameter, requires_grad=False))
    return model


class Syncs:
    """Versions through each peer in turn."""

    def __init__(self, worker: SyncWorker) -> None:
        self._worker = worker
        self._version = 0
        self._own_versions: Counter[str] = Counter()
        """Number of versions of each peer."""
        self._keep: dict[str, dict[str, Any]] = {}
        self._first: dict[str, float] = {}
        self._peers = {peer.name: peer for name in sync_peers.names() for peer in sync_peers.find(name)}
        self._exit = ExitStack()

    def prepare(self, entry: str) -> Callable[[], None]:
        worker = self._worker
        self._version += 1
        self.entry, self.peer = entry, self._peers[entry]
        self._own_versions[entry] += 1
        self._values = self._version if self.peer.changes == "all" else self._own_versions[entry], self.peer.changes
        if worker.sends:
            worker.values.write(*self._values)
        self.job = SyncJob(
            worker.values.model, self._version, entry, worker.span, worker.senders, worker.topology,
            os.environ["MASTER_ADDR"], worker.nodes, self._keep.setdefault(entry, {}), self._exit,
        )  # fmt: skip
        self._keep[entry].pop("report", None)
        if self.peer.prepare is not None:
            self.peer.prepare(self.job)

        def work() -> None:
            self.said = (self.peer.send if worker.sends else self.peer.receive)(self.job)

        return work

    def wrong(self) -> list[str]:
        if self._worker.sends:
            return []
        if not self.peer.fills:
            self._worker.values.write(*self._values)
            return list(self.said)
        if self.peer.commit is not None:
            self.peer.commit(self.job)
        return self._worker.values.wrong(*self._values)

    def phases(self, seconds: float) -> dict[str, float]:
        """Of this rank. ``seconds``: of this version."""
        found = {"first": self._first.setdefault(self.entry, seconds), **self.job.phases}
        report = self.job.keep.get("report")
        if report is not None:
            side = "send" if self._worker.sends else "receive"
            found |= {f"{side}: {name}": phase.seconds for name, phase in report.phases.items() if phase.seconds}
            found[f"{side}: CPU of read"] = report.phases["read"].cpu_seconds
        return found

    def close(self) -> None:
        """The rollout job first."""
        if not self._worker.sends:
            self._exit.close()
        self._worker.span.barrier()
        self._exit.close()


class Planning:
    """The plan of a first sync, and that of a load of the same model, on each rank at the same time."""

    def __init__(self, worker: SyncWorker) -> None:
        self._rank = worker.rank
        model, span = worker.values.model, worker.span
        self._targets = collect(model)
        if worker.sends:
            manifest, placed, *_ = catalog(model, self._targets, "auto", None)
            self._holdings = holdings_of_targets(manifest.shapes, self._targets, placed)
        self._manifest = span.exchange(manifest if worker.rank == 0 else None)[0]
        if not worker.sends:
            self._holdings = ModelTarget(model, "auto", True).holdings(self._manifest)
        encoded = span.exchange(self._holdings.encode())
        made = {each: Holdings.decode(*each) for each in set(encoded)}
        shared = {columns: holdings.class_of for (columns, _), holdings in made.items()}  # as epload has it, one for equal ranks
        made = {each: replace(holdings, class_of=shared[each[0]]) for each, holdings in made.items()}
        self._of_ranks = {rank: made[each] for rank, each in enumerate(encoded)}
        trainers = worker.nodes_of(0, worker.senders)
        self._members = Members(trainers, worker.nodes)
        wave, per_wave = waves(self._manifest.nbytes, trainers, "one")
        self._bucket_bytes = wave // per_wave

    def prepare(self, entry: str) -> Callable[[], None]:
        return {"plan_exchange": self._exchange, "make_plan": self._load}[entry]

    def _exchange(self) -> None:
        plan_exchange(self._manifest, self._members, self._of_ranks, self._rank, self._holdings, SYNC_WAVE_BYTES)

    def _load(self) -> None:
        make_plan(self._manifest, self._targets, Mapping(), self._bucket_bytes)

    def wrong(self) -> list[str]:
        return []

    def phases(self, seconds: float) -> dict[str, float]:
        return {}


if __name__ == "__main__":
    main(SyncWorker)
