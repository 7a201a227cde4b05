"""Loads checkpoints that are replaced or overwritten meanwhile, and judges each load: right, or refused on every rank.

    python -m campaigns.replaced --runs 100 --seed 0

What happens follows from the seed: which file is replaced (the first, a later one, the index), how (another file is renamed over
it, it is truncated and written again, it is overwritten in place), by what (the same header with other values, or another
header), at which moment of the load and on which rank, and how the load reads and verifies. A load is right if all ranks hold
what the files held before, or all hold what they hold afterwards; it is refused if all raise one CheckpointError that names the
file. After each, a load without a replacement must be right.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from campaigns import seeds
from epload import Checkpoint, HierarchicalLoader, Topology
from epload.checkpoint.file_checkpoint import FileCheckpoint
from epload.checkpoint.state_dict import StateDictCheckpoint
from epload.loading import inputs
from support import ranks
from support.readers import small_waves
from support.small_model import local_of

WORLD = 4
READERS = ("one", "per_node", "partitioned", "every", "auto")
HOWS = ("rename", "truncate", "in place")
FILES = ("first", "later", "index")
MOMENTS = ("before opening", "after opening", "before joining", "read", "at the end", "timer")
SUFFIX = {"safetensors": ("model", ".safetensors"), "torch": ("pytorch_model", ".bin")}
_LAYERS, _FILES = 9, 3
_SECONDS = 0.3
"""About as long as a load here takes."""

State = dict[str, Tensor]


@dataclass(frozen=True)
class Run:
    """One load and what happens to its checkpoint."""

    readers: str
    how: str
    file: str
    moment: str
    actor: int = 0
    """The rank in whose load the moment is."""
    nth: int = 0
    """Number of the read before which it happens; of a timer, hundredths of a load."""
    verify: bool = False
    same_header: bool = True
    container: str = "safetensors"
    seed: int = 0

    @classmethod
    def of(cls, seed: int) -> Run:
        draw = random.Random(seed)
        readers, container = draw.choice(READERS), draw.choice(("safetensors", "safetensors", "torch"))
        moment = draw.choice([name for name in MOMENTS if name != "before joining" or readers != "one"])
        actors: Sequence[int] = range(WORLD)
        if "opening" in moment or (readers == "one" and moment == "read"):
            actors = (0,)
        elif readers == "per_node" and moment in ("read", "before joining"):
            actors = (2,)
        elif moment == "before joining":
            actors = (1, 2, 3)
        return cls(
            readers, draw.choice(HOWS), draw.choice((*FILES[:2], *FILES)), moment, draw.choice(actors),
            draw.randrange(100 if moment == "timer" else 4), draw.random() < 0.5, draw.random() < 0.7, container, seed,
        )  # fmt: skip

    def name_of(self, number: int) -> str:
        stem, suffix = SUFFIX[self.container]
        return f"{stem}-{number}{suffix}"

    @property
    def index(self) -> str:
        return f"{''.join(SUFFIX[self.container])}.index.json"

    @property
    def victim(self) -> str:
        """The name of the file that is replaced."""
        return self.index if self.file == "index" else self.name_of(0 if self.file == "first" else _FILES - 1)


@dataclass(frozen=True)
class Outcome:
    """The outcome of one run on one rank."""

    fired: bool
    error: tuple[str, str]
    """Class and text, or empty."""
    holds: str
    """The values in the model after a load that raised nothing: "old", "new" or neither."""
    again: str
    """The error of a load without a replacement; empty if it was right."""


# ---- the checkpoint ----


def state_of(version: int) -> State:
    """Every element unique, within a version and between versions."""
    state = {}
    for layer in range(_LAYERS):
        for number, (name, shape) in enumerate((("weight", (61, 37)), ("bias", (61,)))):
            begin = (version * _LAYERS + layer) * 10_000 + 5000 * number
            state[f"{layer}.{name}"] = torch.arange(begin, begin + torch.Size(shape).numel()).float().view(shape)
    return state


def contents(run: Run, state: State) -> dict[str, bytes]:
    """The contents of the files of a checkpoint, the index among them, by name."""
    place = {name: run.name_of(int(name.partition(".")[0]) * _FILES // _LAYERS) for name in state}
    files = {run.index: json.dumps({"weight_map": place}).encode()}
    for file in place.values():
        part = {name: state[name].clone() for name, where in place.items() if where == file}
        if run.container == "safetensors":
            files[file] = save(part)
        else:
            torch.save(part, buffer := io.BytesIO())
            files[file] = buffer.getvalue()
    return files


def write(path: Path, content: bytes, how: str) -> None:
    """Writes as somebody does who saves a checkpoint over another."""
    if how == "rename":
        other = path.with_name(f".{path.name}.new")
        other.write_bytes(content)
        os.replace(other, path)
    elif how == "truncate":
        path.write_bytes(content)
    else:
        with open(path, "r+b") as file:
            file.write(content)
            file.truncate()


# ---- one rank ----


@contextmanager
def _meanwhile(run: Run, action: Callable[[], None]) -> Iterator[None]:
    """Makes the action happen at the run's moment, unless that is "at the end"."""
    if run.moment == "timer":
        timer = threading.Timer(_SECONDS * run.nth / 100, action)
        timer.start()
        yield
        timer.join()
        return
    reads = [(kind, name) for kind in (FileCheckpoint, StateDictCheckpoint) for name in ("fill", "read_regions")]
    opening: list[tuple[Any, str]] = [(inputs, "join_source") if run.moment == "before joining" else (Checkpoint, "open")]
    places = [] if run.moment == "at the end" else reads if run.moment == "read" else opening
    at, after = run.nth if run.moment == "read" else 0, run.moment == "after opening"
    with seeds.Moments(places, at, lambda *_: action(), after):
        yield


@cache
def _loader(readers: str, verify: bool) -> HierarchicalLoader:
    topology = Topology.from_nodes([[0, 1], [2, 3]])
    return HierarchicalLoader(topology, readers=readers, verify=verify, bucket_bytes=6000, timeout=30, progress=False)


def _load(run: Run, folder: Path, at_the_end: Callable[[], None]) -> tuple[nn.Module, tuple[str, str]]:
    with torch.device("meta"):
        model = nn.Sequential(*[nn.Linear(37, 61) for _ in range(_LAYERS)])
        model.register_buffer("scratch", torch.zeros(2), persistent=False)
    fully_shard(model, mesh=init_device_mesh("cpu", (WORLD,)))

    def fill(module: nn.Module, path: str, names: tuple[str, ...]) -> None:
        module.scratch.zero_()
        at_the_end()

    try:
        _loader(run.readers, run.verify).load(model, folder, init_missing=fill)
    except Exception as error:
        return model, (type(error).__name__, str(error))
    return model, ("", "")


def _equal(model: nn.Module, state: State) -> bool:
    shards = model.state_dict()
    return all(torch.equal(shards[name].to_local(), local_of(value, shards[name])) for name, value in state.items())


def _on_rank(rank: int, folder: Path, run: Run, number: int) -> Outcome:
    old, new = state_of(2 * number), state_of(2 * number + 1)
    if not run.same_header:
        new = {name: value.double() for name, value in new.items()}
    folder = folder / str(number)
    before, after = contents(run, old), contents(run, new)
    content = after[run.victim] if run.file != "index" else before[run.victim] + b"\n"
    if rank == 0:
        folder.mkdir()
        for name, raw in before.items():
            (folder / name).write_bytes(raw)
    dist.barrier()
    place = json.loads(before[run.index])["weight_map"]
    mixed = {name: new[name].float() if place[name] == run.victim else value for name, value in old.items()}
    fired = torch.tensor(0)

    def act() -> None:
        write(folder / run.victim, content, run.how)
        fired.fill_(1)

    acts = rank == run.actor
    with _meanwhile(run, act) if acts else nullcontext():
        model, error = _load(run, folder, act if acts and run.moment == "at the end" else lambda: None)
    holds = "" if error[0] else "old" if _equal(model, old) else "new" if _equal(model, mixed) else "neither"
    dist.all_reduce(fired)
    model, refused = _load(run, folder, lambda: None)
    right = not refused[0] and _equal(model, mixed if fired else old)
    again = "" if right else refused[1] or "wrong values"
    dist.barrier()
    return Outcome(bool(fired), error, holds, again)


def rank_main(rank: int, folder: str, runs: Sequence[Run]) -> list[Outcome]:
    small_waves()
    return [_on_rank(rank, Path(folder), run, number) for number, run in enumerate(runs)]


# ---- judging ----


def judged(run: Run, outcomes: Sequence[Outcome]) -> tuple[str, str]:
    """Returns "right", "refused" or "wrong", and why it is wrong."""
    if problems := [outcome.again for outcome in outcomes if outcome.again]:
        return "wrong", f"a load without a replacement: {problems[0]}"
    if len({outcome.error for outcome in outcomes}) > 1:
        return "wrong", f"ranks differ: {[outcome.error for outcome in outcomes]}"
    kind, text = outcomes[0].error
    if kind:
        return ("refused", "") if kind == "CheckpointError" and run.victim in text else ("wrong", f"{kind}: {text}")
    holds = {outcome.holds for outcome in outcomes}
    return ("right", "") if holds in ({"old"}, {"new"}) else ("wrong", f"the ranks hold {sorted(holds)}")


def outcomes_of(runs: Sequence[Run], limit: float) -> list[list[Outcome]]:
    """Returns the outcomes of each run on each rank. ``limit``: seconds for all of them."""
    with tempfile.TemporaryDirectory(prefix="epload-replaced-") as folder:
        by_rank = ranks.run(WORLD, rank_main, folder, list(runs), limit=limit)
    return [list(of_run) for of_run in zip(*by_rank, strict=True)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    runs, began, counts = [Run.of(options.seed + i) for i in range(options.runs)], time.monotonic(), Counter[str]()
    for run, outcomes in zip(runs, outcomes_of(runs, limit=60 + 20 * len(runs)), strict=True):
        verdict, why = judged(run, outcomes)
        counts.update([verdict] + ["replaced meanwhile"] * outcomes[0].fired)
        if why:
            print(f"{run}\n    {why}")
    shown = ", ".join(f"{count} {what}" for what, count in counts.items())
    print(f"{len(runs)} loads from seed {options.seed} on: {shown}; {time.monotonic() - began:.0f} s")
    return int(counts["wrong"] > 0)


if __name__ == "__main__":
    sys.exit(main())
