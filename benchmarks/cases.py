"""What is timed: for each case, what to prepare, what to run, and what of its result is wrong."""

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
"""Bytes that a rank sends to measure a link, and reads at a time to measure reading."""
STORE_KEYS = 1000


@dataclass
class Bench:
    """One rank's surroundings."""

    rank: int
    world: int
    topology: epload.Topology
    size: Size
    folders: list[Path]
    """Of two checkpoints. Successive loads alternate, so that one that does nothing is found out."""
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
    """Peers, in the cases "meta" (a model on meta, everything inside), "reload" (a model that has storage and other values) and
    "library" (nothing; a transformers model comes out)."""

    def __init__(self, bench: Bench, case: str, entries: list[str]) -> None:
        self.bench, self.case = bench, case
        self.peers = {peer.name: peer for name in {e.partition(":")[0] for e in entries} for peer in peers.find(name)}
        self.keep: dict[str, dict[str, Any]] = {entry: {} for entry in entries}
        self.models: dict[bool, nn.Module] = {}
        """For reloads: one for epload, which remembers it, and one for the others, which may change it."""
        self.on_meta = MetaModel(bench.size) if case == "meta" else None

    def prepare(self, entry: str) -> Callable[[], None]:
        bench, peer = self.bench, self.peers[entry]
        self.loaded = self.job = None  # two models of this size are one too many
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

        def work() -> None:
            self.loaded = peer.load(self.job) or model

        return work

    def wrong(self) -> list[str]:
        return wrong_shards(self.loaded, self.bench.reference(self.job.folder))

    def shard_bytes(self) -> int:
        """That came into being in the load."""
        return 0 if self.case == "reload" else sum(p.to_local().nbytes for p in self.loaded.parameters())

    def phases(self, transfer: float) -> dict[str, float]:
        """Seconds by phase on this rank. ``transfer``: inside collectives that Python called."""
        report = self.job.keep.get("report")
        if report is None:
            return {**self.job.phases, "transfer": transfer}
        of = {name: phase.seconds for name, phase in report.phases.items()}
        return {
            "plan": of["plan"], "materialize": of["materialize"], "read": of["read"] + self.job.phases.get("read", 0.0),
            "transfer": of["inter_node"] + of["intra_node"], "slice": of["unpack"],
        }  # fmt: skip

    def processors(self) -> dict[str, float]:
        """Seconds on a processor by phase on this rank, of epload."""
        report = self.job.keep.get("report")
        return {name: phase.cpu_seconds for name, phase in report.phases.items()} if report is not None else {}

    def notes(self) -> str:
        report = self.job.keep.get("report")
        return report.reason if report is not None else ""


class Collectives:
    """One list of tensors broadcast from rank 0 to all, no model: what coalescing and hierarchy gain, each alone."""

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
    """The raw broadcast of the checkpoint's bytes in flat buckets, from warm reused buffers: the last bucket is compared."""

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
    """epload's materialize and Module.to_empty: storage for a model on meta."""

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
    """What the simulator takes as given, each measured alone: a link, reading with all ranks at once, the store."""

    def __init__(self, bench: Bench, case: str, entries: list[str]) -> None:
        self.bench = bench
        self.buffer = torch.ones(PIECE, dtype=torch.uint8)
        self.target = torch.ones(PIECE, dtype=torch.uint8)

    def prepare(self, entry: str) -> Callable[[], None]:
        return {"link": self._link, "read": self._read, "store": self._store}[entry]

    def _link(self) -> None:
        """The leader of every second node sends to the next one's."""
        leaders = self.bench.topology.leaders(0)
        if self.bench.rank in leaders[: len(leaders) // 2 * 2]:
            at = leaders.index(self.bench.rank)
            if at % 2 == 0:
                dist.send(self.buffer, leaders[at + 1])
            else:
                dist.recv(self.target, leaders[at - 1])

    def _read(self) -> None:
        """Each rank the whole checkpoint, into a buffer that it has used before."""
        with open(self.bench.folders[0] / FILE, "rb", buffering=0) as file:
            while file.readinto(self.buffer.numpy()):
                pass

    def _store(self) -> None:
        """What one rank more costs a round of agreement: a key set and a key deleted, STORE_KEYS times."""
        if self.bench.rank == 0:
            store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            for key in range(STORE_KEYS):
                store.set(str(key), "x" * 64)
            for key in range(STORE_KEYS):
                store.delete_key(str(key))

    def wrong(self) -> list[str]:
        return []


def void(_: object) -> None:
    """Drops a value."""


CASES: dict[str, Callable[[Bench, str, list[str]], Any]] = {
    "floor": Floor, "collective": Collectives, "rates": Rates, "reload": Loads, "meta": Loads, "library": Loads,
    "materialize": Materialize,
}  # fmt: skip
