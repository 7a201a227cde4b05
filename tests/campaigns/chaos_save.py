"""A campaign of seeded faults in saves, each judged: a reader finds the old checkpoint or the whole new one, those that live hear
the same reason in time, and nothing is left beside the folder.

    python -m campaigns.chaos_save --faults 30 --seed 0

Two nodes of two ranks replace a checkpoint of version 1; one rank has a fault.
"""

from __future__ import annotations

import os
import random
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch.distributed as dist
from safetensors.torch import load_file, save_file

import epload
from campaigns import seeds
from epload.ranks.control import Control
from epload.saving import plan
from epload.saving.folder import NewFolder
from support import ranks
from support.synced_models import LAYOUTS, SHAPES, build, values, write

TIMEOUT = 6.0
IN_TIME = 4 * TIMEOUT + 20
"""Seconds that a save may take: waits of a timeout may follow one another, and this machine may be busy."""
BASE = "base"
"""Name of the folder with version 1, beside the checkpoint."""
KINDS = ("kill", "stop", "raise", "full")
PLACES: dict[str, tuple[Any, str, int]] = {
    "round": (Control, "agree", 7),
    "write": (NewFolder, "write", 12),
    "sync": (os, "fsync", 4),
    "rename": (os, "rename", 1),
    "make": (os, "open", 4),
}
"""What is patched, and the largest number of the call in which the fault happens."""


class Fault(NamedTuple):
    kind: str
    place: str
    call: int
    victim: int
    layout: str
    in_background: bool
    has_base: bool
    """True if only what has changed since version 1 is saved."""

    @classmethod
    def of(cls, seed: int) -> Fault:
        chance = random.Random(seed)
        place = chance.choice(list(PLACES))
        victims = (0,) if place == "rename" else range(4)  # no other renames
        return cls(
            chance.choice(KINDS), place, chance.randrange(PLACES[place][2]), chance.choice(victims),
            chance.choice(LAYOUTS), chance.random() < 0.3, chance.random() < 0.5,
        )  # fmt: skip

    @property
    def dies(self) -> bool:
        return self.kind in ("kill", "stop")


def save(rank: int, fault: Fault, path: str) -> dict[str, Any]:
    topology = epload.Topology.from_nodes([[0, 1], [2, 3]])
    model = build(fault.layout, 4)
    write(model, 2)

    base = Path(path).parent / BASE if fault.has_base else None

    def once() -> str:
        options = {
            "overwrite": True, "max_shard_bytes": 1 << 15, "topology": topology, "timeout": TIMEOUT, "base": base,
        }  # fmt: skip
        try:
            if fault.in_background:
                epload.save_async(model, path, **options).wait()
            else:
                epload.save(model, path, **options)
        except (epload.LoadError, ValueError, RuntimeError, OSError) as error:
            return f"{type(error).__name__}: {error}"
        return ""

    began, (owner, name, _) = time.monotonic(), PLACES[fault.place]
    call = fault.call if rank == fault.victim else -1
    moments = seeds.Moments([(owner, name)], call, lambda *args: seeds.act(fault.kind, TIMEOUT))
    with mock.patch.object(plan, "SLOT_BYTES", 1 << 12):
        with moments:
            text = once()
        outcome = {"text": text, "seconds": time.monotonic() - began, "again": "", "happened": True}
        if not fault.dies:
            dist.barrier()  # nobody saves again before all have looked
            between = version_at(Path(path))
            dist.barrier()
            write(model, 3)
            outcome |= {"between": between, "again": once(), "happened": moments.fired or rank != fault.victim}
    return outcome


def version_at(folder: Path) -> int | None:
    """Returns the version that a reader finds; None if it is not whole, or of several versions. Collective."""
    found = {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}
    if not found:  # changes, which only epload reads
        model = build("plain", 1)
        with suppress(epload.LoadError):
            epload.load(model, folder, progress=False)
            found = {name: parameter.detach() for name, parameter in model.named_parameters()}
    if found.keys() != SHAPES.keys():
        return None
    for version in (1, 2, 3):
        if all(found[name].equal(values(name, version)) for name in SHAPES):
            return version
    return None


def judge(seed: int) -> tuple[str, str]:
    """The verdict on one fault, and why."""
    fault = Fault.of(seed)
    with tempfile.TemporaryDirectory(prefix="epload-chaos-") as folder:
        path = Path(folder) / "checkpoint"
        for old in (path, path.parent / BASE):
            old.mkdir()
            save_file({name: values(name, 1) for name in SHAPES}, old / "model.safetensors")
        dying = [fault.victim] if fault.dies else []
        try:
            answers = ranks.run(4, save, fault, str(path), dying=dying, tcp=True, limit=200)
        except ranks.RankFailed as error:
            if "was to die, but returned" not in str(error):
                return "hang" if seeds.has_hung(error) else "failed", f"{fault}\n{error}"
            answers = []  # the call never came
        version = version_at(path)
        left = [name for name in os.listdir(folder) if name not in ("checkpoint", BASE)]
        living = [answer for answer in answers if answer is not None]
        if version is None:
            return "wrong", f"{fault}: no whole checkpoint"
        texts = {answer["text"] for answer in living}
        if len(texts) > 1:
            return "differ", f"{fault}: {texts}"
        if late := [answer["seconds"] for answer in living if answer["seconds"] > IN_TIME]:
            return "late", f"{fault}: {late}"
        expected = [3] if not fault.dies else [2] if texts in ({""}, set()) else [1, 2]
        # What fails with or after the rename finds the new checkpoint there.
        after = [2] if texts == {""} else [1, 2] if fault.place in ("rename", "round", "sync") else [1]
        if wrong := [a["between"] for a in living if "between" in a and a["between"] not in after]:
            return "wrong", f"{fault}: versions {wrong} after the failure, {texts}"
        if version not in expected:
            return "wrong", f"{fault}: version {version}, {texts}"
        if failed := [answer["again"] for answer in living if answer["again"]]:
            return "failed", f"{fault}: the next save: {failed[0]}"
        if left:
            return "leak", f"{fault}: left {left}"
        return ("right" if all(answer["happened"] for answer in living) and answers else "no fault"), str(fault)


if __name__ == "__main__":
    sys.exit(seeds.run(__doc__, judge, ("right", "no fault")))
