"""Seeded faults: what goes wrong, on which rank, at which moment of which load; and what a rank does to make it so."""

from __future__ import annotations

import errno
import os
import random
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import Any
from unittest import mock

import torch

from campaigns import seeds
from epload.checkpoint.file_checkpoint import FileCheckpoint
from epload.native import ops
from epload.ranks.control import Control
from epload.ranks.groups import Group
from epload.ranks.processes import Processes
from epload.transfer import shared_memory
from epload.transfer.local import Local

WORLD = 4
HARMLESS = ("none", "slow reader", "slow link", "full disk")
KINDS = (
    *HARMLESS, "unreadable", "truncated", "unpack", "out of memory", "hook", "interrupt", "kill", "stop", "mismatch",
    "bit in shard", "bit in bucket", "replaced", "kill discovering", "kill making groups", "no threads",
    "two threads",
)  # fmt: skip
ANEW = ("kill discovering", "kill making groups")
"""Kinds that happen before data moves, to a topology of their own."""
REGRESSIONS = (4435, 2474, 26843)
"""Seeds of faults that were once judged wrong, each replayed by ``make chaos``: two failures of discovery under two texts, and a
thread that had done its work but not ended."""
_RARE = {"none": 0.5}
WAYS = (
    ("one", "two_level"), ("one", "striped"), ("per_node", "two_level"), ("partitioned", "two_level"),
    ("partitioned", "striped"), ("every", "two_level"), ("auto", "auto"),
)  # fmt: skip
_READS = ("fill", "read_regions")
_MOVES = ("relay", "coalesced_bcast")
_WRITES = ("unpack", "read")
_ALL = (*_READS, *_MOVES, "unpack", "agree")
_OWNERS: dict[str, Any] = {
    **dict.fromkeys(_READS, FileCheckpoint), **dict.fromkeys(_WRITES, Local), **dict.fromkeys(("make", "register"), Group),
    "agree": Control, "join_nodes": Control, "close_registry": Processes, "start": Thread,
}  # fmt: skip
"""Owners of the calls, where they are not native ops."""
_AT = {
    "unreadable": _READS, "truncated": _READS, "replaced": _READS, "slow reader": _READS,
    "slow link": _MOVES, "bit in bucket": _MOVES, "unpack": _WRITES, "out of memory": _WRITES, "bit in shard": _WRITES,
    "kill discovering": ("agree", "close_registry", "join_nodes"), "kill making groups": ("make", "register"),
    "no threads": ("start",),
}  # fmt: skip
"""Calls at which a kind of fault may happen; the others at any."""


@dataclass(frozen=True)
class Fault:
    seed: int
    kind: str
    victim: int
    moment: float
    """0 to 1: how far through the victim's calls."""
    way: tuple[str, str]
    bucket_bytes: int
    verify: bool

    @classmethod
    def of(cls, seed: int) -> Fault:
        draw = random.Random(seed)
        kind = draw.choices(KINDS, [_RARE.get(kind, 1.0) for kind in KINDS])[0]
        verify = kind in ("bit in shard", "bit in bucket") or draw.random() < 0.5
        way = draw.choice([way for way in WAYS if _victims(kind, way)])
        victim, moment = draw.choice(_victims(kind, way)), draw.random()
        return cls(seed, kind, victim, moment, way, draw.choice((256, 512)), verify)

    def __str__(self) -> str:
        where = f"rank {self.victim} at {self.moment:.2f} of {'-'.join(self.way)}"
        return f"seed {self.seed}: {self.kind}, {where}, buckets of {self.bucket_bytes}, verify={self.verify}"


def _victims(kind: str, way: tuple[str, str]) -> Sequence[int]:
    """Ranks of two nodes of two to which a kind of fault can happen."""
    readers, algorithm = way
    everyone, leaders = range(WORLD), (0, 2)
    if kind in ("bit in bucket", "full disk") and readers in ("every", "auto"):
        return ()
    if kind == "bit in bucket":
        return () if readers == "per_node" else leaders if algorithm == "two_level" else everyone
    if kind == "full disk":
        return leaders
    if _AT.get(kind) == _READS:
        return {"one": (0,), "per_node": leaders}.get(readers, everyone)
    return everyone


def _flip_in(local: Local, of: int | range, *_: Any) -> bool:
    """In what was taken out of a bucket, or some buckets."""
    for regions in local.regions(range(of, of + 1) if isinstance(of, int) else of):
        for tensor in regions.targets:
            if tensor.numel() and tensor.is_contiguous():
                tensor.detach().view(-1).view(torch.uint8)[0] ^= 1
                return True
    return False


def _flip_payload(*args: Any) -> bool:
    data = args[0][0] if isinstance(args[0], list) else args[0]
    if bytes(data[:8].tolist()) != b"epload01":
        return False  # the manifest
    data[64] ^= 1
    return True


def _raise(kind: type[Exception], *args: Any) -> Callable[..., None]:
    def action(*_: Any) -> None:
        raise kind(*args)

    return action


@contextmanager
def broken(fault: Fault, path: Path, calls: int, timeout: float) -> Iterator[seeds.Moments]:
    """Meanwhile the fault happens on this rank, which made ``calls`` calls in a load without it."""
    at = int(fault.moment * (len(_AT[fault.kind]) if fault.kind in ANEW else calls))

    def truncate(*_: Any) -> None:
        os.truncate(path, int(path.stat().st_size * (0.1 + 0.8 * fault.moment)))

    def replace(*_: Any) -> None:
        content = path.read_bytes()
        replacement = path.with_name("replacement")
        replacement.write_bytes(content[:-600] + bytes(byte ^ 1 for byte in content[-600:]))
        os.replace(replacement, path)

    def stop_here(*_: Any) -> None:
        seeds.stop(2.5 * timeout, signal.SIGCONT)  # once the others must have given this rank up

    def interrupt(*_: Any) -> None:
        signal.raise_signal(signal.SIGINT)

    slow, kill = (lambda *_, kind=kind: seeds.act(kind, timeout) for kind in ("slow", "kill"))
    before: dict[str, Callable[..., None]] = {
        "slow reader": slow, "slow link": slow, "truncated": truncate, "replaced": replace,
        "stop": stop_here, "kill": kill, "kill discovering": kill, "kill making groups": kill, "interrupt": interrupt,
        "no threads": _raise(RuntimeError, "can't start new thread"),
        "unreadable": _raise(OSError, errno.EIO, "the disk is on fire"), "unpack": _raise(RuntimeError, "cannot unpack"),
        "out of memory": _raise(MemoryError, "no room"),
    }  # fmt: skip
    after: dict[str, Callable[..., Any]] = {
        "bit in shard": _flip_in, "bit in bucket": _flip_payload,
    }  # fmt: skip
    action = before.get(fault.kind) or after.get(fault.kind)
    moments = seeds.Moments(places_of(fault), at if action else -1, action, after=fault.kind in after)

    def full_disk(nbytes: int) -> Any:
        moments.fired = True
        raise OSError(errno.ENOSPC, "no space left on device")

    def bad_hook(*_: Any) -> None:
        moments.fired = True
        raise KeyError("no rule for this buffer")

    with ExitStack() as stack:
        stack.enter_context(moments)
        if fault.kind == "full disk":
            stack.enter_context(mock.patch.object(shared_memory, "_make", full_disk))
        if fault.kind == "hook":
            stack.enter_context(mock.patch("epload.loading.run.fill_missing", bad_hook))
        yield moments


def places_of(fault: Fault) -> list[tuple[Any, str]]:
    return [(_OWNERS.get(name, ops), name) for name in _AT.get(fault.kind, _ALL)]
