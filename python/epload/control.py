"""Agreement between ranks, over the process group's key-value store, and the header that every bucket carries.

The store is used rather than a collective so that agreement costs no communicator, works in a job whose only backend is a
device's, shows up in no profile as data, and can still speak when a group has died. One round is one set and one get a rank,
and W gets on the coordinator (the topology's first rank).
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from torch.distributed.distributed_c10d import PrefixStore, Store

from epload.errors import LoadError, Told, kind_of, make_error, text_of

DEFAULT_DEADLINE = timedelta(minutes=30)
HEADER_BYTES = 64
_HEADER = struct.Struct("<8sIIQQ16s16x")
_MAGIC = b"epload01"
STATUS_OK = 0
STATUS_ABORT = 1

_made: defaultdict[tuple[int, ...], int] = defaultdict(int)


@dataclass(frozen=True)
class BucketHeader:
    """The first 64 bytes of a bucket: which one it is, of which plan, and whether its sender is well."""

    index: int
    status: int
    nbytes: int
    """Bytes that follow the header; of an aborted bucket, the length of the error's text."""
    checksum: int
    """Of the bytes that follow; 0 when not computed."""
    fingerprint: bytes
    """The first 16 bytes of the plan's fingerprint."""

    def pack(self) -> bytes:
        return _HEADER.pack(_MAGIC, self.index, self.status, self.nbytes, self.checksum, self.fingerprint)

    @classmethod
    def unpack(cls, raw: bytes | memoryview) -> BucketHeader:
        """Raises LoadError when these are not the bytes of a header."""
        magic, index, status, nbytes, checksum, fingerprint = _HEADER.unpack(raw)
        if magic != _MAGIC:
            raise LoadError(f"expected a bucket that starts with {_MAGIC!r}, got {magic!r}: the ranks are out of step")
        return cls(index, status, nbytes, checksum, fingerprint)


class Control:
    """Rounds of agreement among the ranks of one topology. Every rank calls the same rounds in the same order.

    Not thread safe: one thread of a rank runs its rounds.
    """

    def __init__(self, store: Store | None, ranks: tuple[int, ...], rank: int) -> None:
        """``store`` may be None for a single rank. Making one is itself a step that all ``ranks`` take together."""
        if store is None and len(ranks) > 1:
            raise ValueError(f"{len(ranks)} ranks cannot agree without a store; call init_process_group first")
        self.ranks = ranks
        self.rank = rank
        self.coordinator = ranks[0]
        self.deadline = DEFAULT_DEADLINE
        self.agreed: set[bytes] = set()
        """Digests of what all ranks have already found to be the same."""
        self._round = 0
        if store is not None:
            _made[ranks] += 1
            who = hashlib.blake2b(repr(ranks).encode(), digest_size=8).hexdigest()
            store = PrefixStore(f"epload/{who}/{_made[ranks]}", store)
        self._store = store

    def agree(self, what: str, view: str, decide: Callable[[Mapping[int, str]], str], patience: float = 1.0) -> str:
        """Returns, on every rank, what the coordinator's ``decide`` made of all ranks' views.

        ``patience`` multiplies the deadline, for a round that ranks come to after a deadline of their own.

        Raises:
            LoadError: a rank did not arrive within the deadline, or ``decide`` raised; the same text on every rank that
                is alive.
        """
        if self._store is None:
            return decide({self.rank: view})
        self._round += 1
        store, prefix = self._store, f"{self._round}/"
        if self.rank != self.coordinator:
            store.set(f"{prefix}{self.rank}", view)
            # Longer than the coordinator waits, so that its text is the one raised; file stores round up to whole seconds.
            limit = 1.25 * patience * self.deadline + timedelta(seconds=2)
            try:
                store.wait([f"{prefix}verdict"], limit)
            except RuntimeError as error:
                raise LoadError(
                    f"{what}: rank {self.coordinator}, which coordinates, gave no verdict within "
                    f"{limit.total_seconds():.0f} s (seen by rank {self.rank})"
                ) from error
            verdict = store.get(f"{prefix}verdict").decode()
        else:
            verdict = self._judge(store, prefix, what, view, decide, patience * self.deadline)
            store.set(f"{prefix}verdict", verdict)
            if verdict[:1] == "o":
                self._forget(store)
        if verdict[:1] == "x":
            raise make_error(*json.loads(verdict[1:]))
        return verdict[1:]

    def _judge(
        self,
        store: Store,
        prefix: str,
        what: str,
        view: str,
        decide: Callable[[Mapping[int, str]], str],
        limit: timedelta,
    ) -> str:
        others = [rank for rank in self.ranks if rank != self.rank]
        try:
            try:
                store.wait([f"{prefix}{rank}" for rank in others], limit)
            except RuntimeError as error:
                absent = [rank for rank in others if not store.check([f"{prefix}{rank}"])]
                raise LoadError(
                    f"{what}: {_ranks(absent)} did not arrive within {limit.total_seconds():.0f} s"
                ) from error
            posted = store.multi_get([f"{prefix}{rank}" for rank in others])
            heard = dict(zip(others, (text.decode() for text in posted), strict=True))
            views = {rank: view if rank == self.rank else heard[rank] for rank in self.ranks}
            return "o" + decide(views)
        except Exception as error:
            return "x" + json.dumps([kind_of(error), text_of(error)])

    def _forget(self, store: Store) -> None:
        """Deletes the keys of the round before: every rank has passed it, since all have posted to this one."""
        for rank in self.ranks:
            store.delete_key(f"{self._round - 1}/{'verdict' if rank == self.rank else rank}")

    def settle(
        self,
        what: str,
        failure: BaseException | None,
        view: Any = None,
        decide: Callable[[dict[int, Any]], Any] = lambda views: None,
        patience: float = 1.0,
    ) -> Any:
        """A round in which any rank may report that it failed: then every rank raises that error.

        ``view`` and what ``decide`` returns are JSON values. When several ranks failed, the text has each distinct message
        with the ranks that gave it.
        """
        error = None if failure is None else [kind_of(failure), text_of(failure)]

        def judge(raw: Mapping[int, str]) -> str:
            views = {rank: json.loads(text) for rank, text in raw.items()}
            failed = {rank: view["error"] for rank, view in views.items() if view["error"]}
            if failed:
                causes = {rank: error for rank, error in failed.items() if error[0] != Told.__name__} or failed
                raise make_error(next(iter(causes.values()))[0], _together(causes))
            return json.dumps(decide({rank: view["view"] for rank, view in views.items()}))

        return json.loads(self.agree(what, json.dumps({"error": error, "view": view}), judge, patience))


def _ranks(ranks: list[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


def _together(failed: Mapping[int, tuple[str, str]]) -> str:
    said: dict[str, list[int]] = {}
    for rank, (_, text) in failed.items():
        said.setdefault(text, []).append(rank)
    return "\n".join(f"{text} [{_ranks(ranks)}]" for text, ranks in said.items())
