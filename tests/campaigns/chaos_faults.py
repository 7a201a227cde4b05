"""Seeded faults: what goes wrong, on which rank, at which moment of which load; and what a rank does to make it so."""

from __future__ import annotations

import errno
import os
import random
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Lock, Thread
from typing import Any
from unittest import mock

import torch

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
    ("one", "two_level"),
    ("one", "striped"),
    ("per_node", "two_level"),
    ("partitioned", "two_level"),
    ("partitioned", "striped"),
    ("every", "two_level"),
    ("auto", "auto"),
)
_READS = ("fill", "read_regions")
_MOVES = ("relay", "coalesced_bcast")
_WRITES = ("unpack", "read")
_ALL = (*_READS, *_MOVES, "unpack", "settle")
_AT = {
    "unreadable": _READS, "truncated": _READS, "replaced": _READS, "slow reader": _READS,
    "slow link": _MOVES, "bit in bucket": _MOVES, "unpack": _WRITES, "out of memory": _WRITES, "bit in shard": _WRITES,
    "kill discovering": ("settle", "close_registry", "join_nodes"), "kill making groups": ("make", "register"),
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


class Moments:
    """Counts a rank's calls of some kinds, and does something at one of them."""

    def __init__(
        self, names: tuple[str, ...], at: int = -1, action: Callable[..., None] | None = None, after: bool = False
    ) -> None:
        """``after``: the action comes after the call, and is given its arguments."""
        self._names, self._at, self._action, self._after = names, at, action, after
        self.count = 0
        self.fired = False
        self._lock = Lock()

    def _wrap(self, inner: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            with self._lock:  # some calls come from several threads
                self.count += 1
                mine = self.count > self._at >= 0 and not self.fired and self._action is not None
                self.fired |= mine
            if mine and not self._after:
                self._action(*args)
            result = inner(*args, **kwargs)
            if mine and self._after:
                self.fired = self._action(*args) is not False
            return result

        return call

    @contextmanager
    def watched(self) -> Iterator[None]:
        owners: dict[str, Any] = dict.fromkeys(_READS, FileCheckpoint) | dict.fromkeys(_WRITES, Local)
        owners |= {"settle": Control, "join_nodes": Control, "close_registry": Processes}
        owners |= dict.fromkeys(("make", "register"), Group) | {"start": Thread}
        with ExitStack() as stack:
            for name in self._names:
                owner = owners.get(name, ops)
                stack.enter_context(mock.patch.object(owner, name, self._wrap(getattr(owner, name))))
            yield


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
def broken(fault: Fault, path: Path, calls: int, timeout: float) -> Iterator[Moments]:
    """Meanwhile the fault happens on this rank, which made ``calls`` calls in a load without it."""
    at = int(fault.moment * (len(_AT[fault.kind]) if fault.kind in ANEW else calls))
    names = moments_of(fault)

    def slow(*_: Any) -> None:
        time.sleep(0.3 * timeout)

    def truncate(*_: Any) -> None:
        os.truncate(path, int(path.stat().st_size * (0.1 + 0.8 * fault.moment)))

    def replace(*_: Any) -> None:
        content = path.read_bytes()
        replacement = path.with_name("replacement")
        replacement.write_bytes(content[:-600] + bytes(byte ^ 1 for byte in content[-600:]))
        os.replace(replacement, path)

    def stop_here(*_: Any) -> None:
        victim = os.getpid()
        if os.fork() == 0:  # wakes the victim once the others must have given it up
            time.sleep(2.5 * timeout)
            os.kill(victim, signal.SIGCONT)
            os._exit(0)
        os.kill(victim, signal.SIGSTOP)

    def kill(*_: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def interrupt(*_: Any) -> None:
        signal.raise_signal(signal.SIGINT)

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
    moments = Moments(names, at if action else -1, action, after=fault.kind in after)

    def full_disk(nbytes: int) -> Any:
        moments.fired = True
        raise OSError(errno.ENOSPC, "no space left on device")

    def bad_hook(*_: Any) -> None:
        moments.fired = True
        raise KeyError("no rule for this buffer")

    with ExitStack() as stack:
        stack.enter_context(moments.watched())
        if fault.kind == "full disk":
            stack.enter_context(mock.patch.object(shared_memory, "_make", full_disk))
        if fault.kind == "hook":
            stack.enter_context(mock.patch("epload.loading.run.fill_missing", bad_hook))
        yield moments


def moments_of(fault: Fault) -> tuple[str, ...]:
    return _AT.get(fault.kind, _ALL)
