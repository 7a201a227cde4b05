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
import json
import os
import random
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from safetensors.torch import save
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from epload import HierarchicalLoader, Topology
from epload.checkpoint.base import Checkpoint
from epload.checkpoint.file_checkpoint import FileCheckpoint
from epload.checkpoint.state_dict import StateDictCheckpoint
from epload.loading import run as run_module
from epload.transfer import direct_read
from epload.verify import digests
from support import ranks

WORLD = 4
NODES = [[0, 1], [2, 3]]
READERS = ("one", "per_node", "partitioned", "every", "auto")
HOWS = ("rename", "truncate", "in place")
FILES = ("first", "later", "index")
MOMENTS = (
    "before opening",
    "after opening",
    "before joining",
    "read",
    "before proof",
    "in proof",
    "at the end",
    "timer",
)
_LAYERS, _FILES = 9, 3
_BUCKET = 6000
_SECONDS = 0.3
"""About as long as a load here takes."""
_READ = (FileCheckpoint, StateDictCheckpoint)

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
    """Of a moment that comes several times, which; of a timer, hundredths of a load."""
    verify: bool = False
    same_header: bool = True
    container: str = "safetensors"
    seed: int = 0

    @classmethod
    def of(cls, seed: int) -> Run:
        draw = random.Random(seed)
        readers, container = draw.choice(READERS), draw.choice(("safetensors", "safetensors", "torch"))
        moment = draw.choice([each for each in MOMENTS if each != "before joining" or readers != "one"])
        verify = "proof" in moment or draw.random() < 0.5
        return cls(
            readers, draw.choice(HOWS), draw.choice((*FILES[:2], *FILES)), moment, draw.choice(_actors(readers, moment)),
            draw.randrange(100) if moment == "timer" else draw.randrange(4), verify, draw.random() < 0.7, container, seed,
        )  # fmt: skip


@dataclass(frozen=True)
class Outcome:
    """Of one run, on one rank."""

    fired: bool
    kind: str
    text: str
    holds: str
    """What the model holds after a load that raised nothing: "old", "new" or neither."""
    again: str
    """What came of a load without a replacement: empty if it was right."""


def _actors(readers: str, moment: str) -> Sequence[int]:
    if moment in ("before opening", "after opening"):
        return (0,)
    if readers == "one" and moment in ("read", "in proof"):
        return (0,)
    if moment == "before joining":
        return (2,) if readers == "per_node" else (1, 2, 3)
    return (0, 2) if readers == "per_node" and moment in ("read", "in proof") else range(WORLD)


# ---- the checkpoint ----


def state_of(version: int) -> State:
    """Every element unique, within a version and between versions."""
    state = {}
    for layer in range(_LAYERS):
        for name, shape in (("weight", (61, 37)), ("bias", (61,))):
            begin = (version * _LAYERS + layer) * 10_000 + (5000 if name == "bias" else 0)
            count = shape[0] * (shape[1] if len(shape) > 1 else 1)
            state[f"{layer}.{name}"] = torch.arange(begin, begin + count, dtype=torch.float32).view(shape)
    return state


def _file_of(name: str, container: str) -> str:
    number = int(name.split(".")[0]) * _FILES // _LAYERS
    return f"model-{number}.safetensors" if container == "safetensors" else f"pytorch_model-{number}.bin"


def _index_name(container: str) -> str:
    return "model.safetensors.index.json" if container == "safetensors" else "pytorch_model.bin.index.json"


def _content(state: State, container: str) -> bytes:
    if container == "safetensors":
        return save(state)
    with tempfile.NamedTemporaryFile() as file:
        torch.save(state, file.name)
        return Path(file.name).read_bytes()


def contents(state: State, container: str) -> dict[str, bytes]:
    """Of the files of a checkpoint, the index among them, by name."""
    place = {name: _file_of(name, container) for name in state}
    made = {
        file: _content({name: state[name].clone() for name, where in place.items() if where == file}, container)
        for file in sorted(set(place.values()))
    }
    return {**made, _index_name(container): json.dumps({"weight_map": place}).encode()}


def write(path: Path, content: bytes, how: str) -> None:
    """As somebody does who saves a checkpoint over another."""
    if how == "rename":
        beside = path.with_name(f".{path.name}.new")
        beside.write_bytes(content)
        os.replace(beside, path)
    elif how == "truncate":
        path.write_bytes(content)
    else:
        with open(path, "r+b") as file:
            file.write(content)
            file.truncate()


# ---- one rank ----


class _Once:
    """Does something before or after the nth call of functions."""

    def __init__(self, action: Callable[[], None], nth: int = 0, after: bool = False) -> None:
        self._action, self._nth, self._after = action, nth, after
        self._calls = 0
        self._lock = threading.Lock()
        self.fired = False

    def __call__(self, inner: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            with self._lock:
                mine = self._calls == self._nth
                self._calls += 1
                if mine and not self._after:
                    self.act()
            result = inner(*args, **options)
            if mine and self._after:
                self.act()
            return result

        return call

    def act(self) -> None:
        self._action()
        self.fired = True


@contextmanager
def _meanwhile(run: Run, rank: int, action: Callable[[], None]) -> Iterator[_Once]:
    """On the acting rank, the action happens at the run's moment."""
    once = _Once(action, run.nth if run.moment in ("read", "in proof") else 0, run.moment == "after opening")
    if rank != run.actor:
        yield once
        return
    if run.moment == "timer":
        timer = threading.Timer(_SECONDS * run.nth / 100, once.act)
        timer.start()
        yield once
        timer.join()
        return
    places: list[tuple[Any, str]] = {
        "before opening": [(Checkpoint, "open")],
        "after opening": [(Checkpoint, "open")],
        "before joining": [(Checkpoint, "join")],
        "read": [(kind, name) for kind in _READ for name in ("fill", "read_regions")],
        "before proof": [(run_module, "_prove")],
        "in proof": [(digests, "_origins")],
        "at the end": [(run_module, "fill_missing")],
    }[run.moment]
    with ExitStack() as stack:
        for owner, name in places:
            wrapped = once(getattr(owner, name))
            stack.enter_context(
                mock.patch.object(owner, name, staticmethod(wrapped) if owner is Checkpoint else wrapped)
            )
        yield once


def _subclasses(kind: type) -> Iterator[type]:
    for sub in kind.__subclasses__():
        yield sub
        yield from _subclasses(sub)


class Rank:
    """Runs its part of one load after another, with loaders that it keeps."""

    def __init__(self, rank: int, folder: Path) -> None:
        self._rank = rank
        self._folder = folder
        self._topology = Topology.from_nodes(NODES)
        self._mesh = init_device_mesh("cpu", (WORLD,))
        self._loaders: dict[tuple[str, str], HierarchicalLoader] = {}

    def run(self, run: Run, number: int) -> Outcome:
        old, new = state_of(2 * number), state_of(2 * number + 1)
        if not run.same_header:
            new = {name: value.double() for name, value in new.items()}
        folder = self._folder / str(number)
        before, after = contents(old, run.container), contents(new, run.container)
        victims = [name for name in before if not name.endswith(".json")]
        victim = {"first": victims[0], "later": victims[-1], "index": _index_name(run.container)}[run.file]
        replacement = after[victim] if run.file != "index" else before[victim] + b"\n"
        if self._rank == 0:
            folder.mkdir()
            for name, content in before.items():
                (folder / name).write_bytes(content)
        dist.barrier()
        held = {**old, **{name: new[name].float() for name in new if _file_of(name, run.container) == victim}}
        with _meanwhile(run, self._rank, lambda: write(folder / victim, replacement, run.how)) as once:
            model, error = self._load(run, folder)
        holds = ""
        if error is None:
            holds = "old" if self._equal(model, old) else "new" if self._equal(model, held) else "neither"
        dist.barrier()
        now = held if self._anywhere(once.fired) else old
        model, refused = self._load(run, folder)
        again = str(refused) if refused is not None else "" if self._equal(model, now) else "wrong values"
        dist.barrier()
        return Outcome(once.fired, type(error).__name__ if error is not None else "", str(error or ""), holds, again)

    def _load(self, run: Run, folder: Path) -> tuple[nn.Module, Exception | None]:
        with torch.device("meta"):
            model = nn.Sequential(*[nn.Linear(37, 61) for _ in range(_LAYERS)])
        fully_shard(model, mesh=self._mesh)
        key = run.readers, run.verify
        if key not in self._loaders:
            self._loaders[key] = HierarchicalLoader(
                self._topology,
                readers=run.readers,
                verify=run.verify,
                bucket_bytes=_BUCKET,
                timeout=30,
                progress=False,
            )
        try:
            self._loaders[key].load(model, folder)
        except Exception as error:
            return model, error
        return model, None

    def _equal(self, model: nn.Module, state: State) -> bool:
        def part(value: Tensor) -> Tensor:
            return (*value.chunk(WORLD), *[value[:0]] * WORLD)[self._rank]

        return all(
            torch.equal(value.to_local(), part(state[name]))  # type: ignore[operator]
            for name, value in model.state_dict().items()
        )

    def _anywhere(self, fired: bool) -> bool:
        seen = torch.tensor(int(fired))
        dist.all_reduce(seen)
        return bool(seen)


def rank_main(rank: int, folder: str, runs: Sequence[Run]) -> list[Outcome]:
    direct_read.READ_BYTES = 1  # each wave of the small model is a call
    job = Rank(rank, Path(folder))
    return [job.run(run, number) for number, run in enumerate(runs)]


# ---- judging ----


def judged(run: Run, outcomes: Sequence[Outcome]) -> tuple[str, str]:
    """ "right", "refused" or "wrong"; and why it is wrong."""
    if problems := [outcome.again for outcome in outcomes if outcome.again]:
        return "wrong", f"a load without a replacement: {problems[0]}"
    if len({(outcome.kind, outcome.text) for outcome in outcomes}) > 1:
        return "wrong", f"ranks differ: {[(outcome.kind, outcome.text) for outcome in outcomes]}"
    first = outcomes[0]
    if first.kind:
        if first.kind != "CheckpointError" or str(_named(run)) not in first.text:
            return "wrong", f"{first.kind}: {first.text}"
        return "refused", ""
    held = {outcome.holds for outcome in outcomes}
    if len(held) > 1 or held == {"neither"}:
        return "wrong", f"the ranks hold {[outcome.holds for outcome in outcomes]}"
    return "right", ""


def _named(run: Run) -> str:
    if run.file == "index":
        return _index_name(run.container)
    return _file_of("0." if run.file == "first" else f"{_LAYERS - 1}.", run.container)


def outcomes_of(runs: Sequence[Run], limit: float) -> list[list[Outcome]]:
    """Of each run, on each rank. ``limit``: seconds for all of them."""
    with tempfile.TemporaryDirectory(prefix="epload-replaced-") as folder:
        by_rank = ranks.run(WORLD, rank_main, folder, list(runs), limit=limit)
    return [list(of_run) for of_run in zip(*by_rank, strict=True)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    runs = [Run.of(seed) for seed in range(options.seed, options.seed + options.runs)]
    began = time.monotonic()
    counts = {"right": 0, "refused": 0, "wrong": 0}
    replaced = 0
    for run, outcomes in zip(runs, outcomes_of(runs, limit=60 + 20 * len(runs)), strict=True):
        verdict, why = judged(run, outcomes)
        counts[verdict] += 1
        replaced += any(outcome.fired for outcome in outcomes)
        if why:
            print(f"{run}\n    {why}")
    good = counts["right"] + counts["refused"]
    print(
        f"{good} of {len(runs)} right or refused: {counts['right']} right, {counts['refused']} refused; "
        f"{replaced} replaced during the load; seeds {options.seed} to {options.seed + options.runs - 1}, "
        f"{time.monotonic() - began:.0f} s"
    )
    return 0 if good == len(runs) else 1


if __name__ == "__main__":
    sys.exit(main())
