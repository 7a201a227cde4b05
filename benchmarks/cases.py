"""The benchmark cases. Each prepares a run, runs it, and lists what is wrong in its result."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import collectives
import epload
import peers
from epload.model.materialize import materialize
from epload.model.targets import collect
from workload import FILE, MetaModel, Reference, Size, meta_model, sharded_model, wrong_shards

PIECE = 16 << 20
"""Bytes per message when measuring a link, and per read when measuring reads."""


@dataclass
class Bench:
    """The state of one rank."""

    rank: int
    world: int
    topology: epload.Topology
    size: Size
    folders: list[Path]
    """Folders of two checkpoints. Successive loads alternate, so that a load that does nothing is detected."""
    loads: int = 0
    references: dict[Path, Reference] = field(default_factory=dict)

    def reference(self, folder: Path) -> Reference:
        if folder not in self.references:
            self.references[folder] = Reference(folder, self.rank, self.world)
        return self.references[folder]

    def next_folder(self) -> Path:
        self.loads += 1
        return self.folders[self.loads % len(self.folders)]


class Loads:
    """Loads with the peers: "meta" materializes and fills a model on meta, "reload" fills a model with storage, "library" builds
    and fills a transformers model."""

    def __init__(self, bench: Bench, case: str, entries: list[str]) -> None:
        self.bench, self.case = bench, case
        self.peers = {peer.name: peer for name in {e.partition(":")[0] for e in entries} for peer in peers.find(name)}
        self.keep: dict[str, dict[str, Any]] = {entry: {} for entry in entries}
        self.models: dict[bool, nn.Module] = {}
        """For reloads: True is epload's model, which it caches; False is for the other loaders, which may change theirs."""
        self.on_meta = MetaModel(bench.size) if case == "meta" else None

    def prepare(self, entry: str) -> Callable[[], None]:
        bench, peer = self.bench, self.peers[entry]
        self.loaded = self.job = None  # frees the last model first
        model: nn.Module = nn.Module()
        if self.on_meta is not None:
            self.on_meta.rewind()
            model = self.on_meta.model
        elif self.case == "reload":
            if peer.ours not in self.models:
                self.models[peer.ours] = sharded_model(bench.size).to_empty(device="cpu")
            model = self.models[peer.ours]
            with torch.no_grad():
                torch._foreach_zero_([local for p in model.parameters() if (local := p.to_local()).numel()])
        self.keep[entry].pop("report", None)
        self.job = peers.Job(model, self.case, bench.next_folder(), bench.rank, bench.topology, self.keep[entry])
        self.loaded = model
        peer.prepare(self.job)

        def work() -> None:
            self.loaded = peer.load(self.job) or model

        return work

    def wrong(self) -> list[str]:
        return wrong_shards(self.loaded, self.bench.reference(self.job.folder))

    def shard_bytes(self) -> int:
        """Bytes of shards that the load allocated."""
        return 0 if self.case == "reload" else sum(p.to_local().nbytes for p in self.loaded.parameters())

    def phases(self, transfer: float) -> dict[str, float]:
        """Seconds by phase on this rank. ``transfer``: seconds inside collectives called from Python."""
        report = self.job.keep.get("report")
        if report is None:
            return {**self.job.phases, "transfer": transfer}
        of = {name: phase.seconds for name, phase in report.phases.items()}
        return {
            "plan": of["plan"], "materialize": of["materialize"], "read": of["read"] + self.job.phases.get("read", 0.0),
            "transfer": of["inter_node"] + of["intra_node"], "slice": of["unpack"],
        }  # fmt: skip

    def processors(self) -> dict[str, float]:
        """CPU seconds of epload by phase on this rank."""
        report = self.job.keep.get("report")
        return {name: phase.cpu_seconds for name, phase in report.phases.items()} if report is not None else {}

    def notes(self) -> str:
        report = self.job.keep.get("report")
        return report.reason if report is not None else ""


class Collectives:
    """Broadcasts one list of tensors from rank 0, without a model, to measure coalescing and hierarchy separately."""

    def __init__(self, bench: Bench, case: str, entries: list[str]) -> None:
        self.bench = bench
        self.full = {folder: list(bench.reference(folder).full.values()) for folder in bench.folders}
        self.tensors = [torch.zeros_like(t) for t in self.full[bench.folders[0]]]
        self.made: dict[str, collectives.Collective] = {}

    def prepare(self, entry: str) -> Callable[[], None]:
        bench = self.bench
        self.folder = bench.next_folder()
        if entry not in self.made:
            self.made[entry] = collectives.COLLECTIVES[entry](bench.topology)
        if bench.rank == 0:
            torch._foreach_copy_(self.tensors, self.full[self.folder])
        else:
            torch._foreach_zero_(self.tensors)
        return lambda: self.made[entry](self.tensors)

    def wrong(self) -> list[str]:
        pairs = zip(self.tensors, self.full[self.folder], strict=True)
        return [f"tensor {i}" for i, (got, want) in enumerate(pairs) if not torch.equal(got, want)]


class Floor:
    """Broadcasts the checkpoint's bytes in flat buckets from warm, reused buffers. The last bucket is checked."""

    def __init__(self, bench: Bench, case: str, entries: list[str]) -> None:
        self.bench = bench
        self.nbytes = sum(t.nbytes for t in meta_model(bench.size).state_dict().values())
        self.groups = collectives.Groups(bench.topology)
        self.buffers: dict[str, Tensor] = {}

    def prepare(self, entry: str) -> Callable[[], None]:
        algorithm, mebibytes = entry.split()[:2]
        self.bench.loads += 1
        buffer = self.buffers.setdefault(entry, torch.empty(int(mebibytes) << 20, dtype=torch.uint8))
        self.buffer = buffer.fill_(self.bench.loads % 251 if self.bench.rank == 0 else 251)

        def work() -> None:
            for begin in range(0, self.nbytes, buffer.numel()):
                self.groups.broadcast(buffer[: self.nbytes - begin], algorithm)

        return work

    def wrong(self) -> list[str]:
        sent = self.buffer[: self.nbytes]
        return [] if bool((sent == self.bench.loads % 251).all()) else ["the bucket"]


class Materialize:
    """Allocates storage for a model on meta, with epload and with Module.to_empty."""

    def __init__(self, bench: Bench, case: str, entries: list[str]) -> None:
        self.on_meta = MetaModel(bench.size)
        self.model = self.on_meta.model

    def prepare(self, entry: str) -> Callable[[], None]:
        self.on_meta.rewind()
        if entry == "to_empty":
            return lambda: void(self.model.to_empty(device="cpu"))
        targets = collect(self.model)
        return lambda: void(materialize(self.model, targets, torch.device("cpu")))

    def wrong(self) -> list[str]:
        return [name for name, parameter in self.model.named_parameters() if parameter.is_meta]


class Rates:
    """Measures the simulator's inputs, each alone: a link, and reads by all ranks at once."""

    def __init__(self, bench: Bench, case: str, entries: list[str]) -> None:
        self.bench = bench
        self.buffer = torch.ones(PIECE, dtype=torch.uint8)
        self.target = torch.ones(PIECE, dtype=torch.uint8)

    def prepare(self, entry: str) -> Callable[[], None]:
        return {"link": self._link, "read": self._read}[entry]

    def _link(self) -> None:
        """The leader of every second node sends to the leader of the next node."""
        leaders = self.bench.topology.leaders(0)
        if self.bench.rank in leaders[: len(leaders) // 2 * 2]:
            at = leaders.index(self.bench.rank)
            if at % 2 == 0:
                dist.send(self.buffer, leaders[at + 1])
            else:
                dist.recv(self.target, leaders[at - 1])

    def _read(self) -> None:
        """Each rank reads the whole checkpoint into a warm buffer."""
        with open(self.bench.folders[0] / FILE, "rb", buffering=0) as file:
            while file.readinto(self.buffer.numpy()):
                pass

    def wrong(self) -> list[str]:
        return []


def void(_: object) -> None:
    """Discards a value."""


CASES: dict[str, Callable[[Bench, str, list[str]], Any]] = {
    "floor": Floor, "collective": Collectives, "rates": Rates, "reload": Loads, "meta": Loads, "library": Loads,
    "materialize": Materialize,
}  # fmt: skip
