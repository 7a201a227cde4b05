"""Agreement rounds."""

from __future__ import annotations

from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from typing import Any
from unittest import mock

import torch.distributed as dist

from epload.errors import CheckpointError, LoadError, ManifestMismatch, ModelMismatch, RankExited
from epload.ranks.control import Control
from epload.ranks.rendezvous import rendezvous
from support import ranks
from support.failures import raised


def make_control(rank: int, members: tuple[int, ...], node: str = "") -> Control:
    store = dist.group.WORLD.get_group_store()
    control, _ = rendezvous(store, members, rank, timedelta(minutes=1), None, None, lambda views: None, node)
    return control


CASES: list[tuple[dict[int, Exception], str, tuple[str, ...]]] = [
    ({1: CheckpointError("file x is short")}, "CheckpointError", ("file x is short [rank 1]",)),
    ({0: ValueError("bad src")}, "ValueError", ("bad src [rank 0]",)),
    ({2: TypeError("a DTensor")}, "TypeError", ("a DTensor [rank 2]",)),
    ({0: ModelMismatch("no key"), 2: ModelMismatch("no key")}, "ModelMismatch", ("no key [ranks 0, 2]",)),
    ({1: ManifestMismatch("one"), 2: ManifestMismatch("two")}, "ManifestMismatch", ("one [rank 1]\ntwo [rank 2]",)),
    ({1: MemoryError("no room")}, "MemoryError", ("no room",)),
    ({2: OSError(2, "gone", "model.bin")}, "LoadError", ("FileNotFoundError", "model.bin")),
    ({1: KeyError("lost")}, "LoadError", ("KeyError",)),
    ({0: LoadError("a"), 1: LoadError("b"), 2: LoadError("a")}, "LoadError", ("a [ranks 0, 2]\nb [rank 1]",)),
    ({2: CheckpointError('text with "quotes", \n a line break and ünïcode')}, "CheckpointError", ("ünïcode",)),
]
"""Errors by rank; class and parts of the text that all raise."""


def settle_errors(rank: int) -> list[tuple[str, str]]:
    control = make_control(rank, (0, 1, 2))
    assert control.agree("first", None, rank, lambda views: sum(views.values())) == 3
    seen = [raised(partial(control.agree, "check", errors.get(rank))) for errors, _, _ in CASES]

    def broken(views: dict[int, object]) -> object:
        raise ManifestMismatch(f"ranks {sorted(views)} differ")

    seen.append(raised(lambda: control.agree("reduce", None, rank, broken)))
    assert control.agree("after", None, {"rank": rank}, lambda views: views[2]["rank"]) == 2
    return seen


def test_errors_of_some_reach_all() -> None:
    views = ranks.run(3, settle_errors)
    assert views[0] == views[1] == views[2]
    *seen, reduced = views[0]
    for (_, expected, parts), (kind, text) in zip(CASES, seen, strict=True):
        assert kind == expected, text
        assert [part for part in parts if part not in text] == [], text
    assert reduced == ("ManifestMismatch", "ranks [0, 1, 2] differ")


def late_to_refused_loads(rank: int) -> list[str]:
    """Each rank is a node. Rank 2 comes to a load that rank 1 has refused when the others have failed in two loads after it."""
    store = dist.group.WORLD.get_group_store()
    control = make_control(rank, (0, 1, 2), node=str(rank))
    control.agree("all here", None)
    refusing = (1, 0, 0)
    if rank == 2:
        store.wait(["test/others-failed"], timedelta(seconds=60))
    texts = []
    for load, refuses in enumerate(refusing):
        if rank == refuses:
            texts.append(control.refuse(control.next_load(), LoadError(f"refused {load}")).text)
        else:
            control.begin(timedelta(minutes=1))
            texts.append(raised(lambda: control.agree("turn", None))[1])
    if rank == 1:
        store.set("test/others-failed", "")
    control.begin(timedelta(minutes=1))
    control.agree("turn", None)
    return texts


def test_a_late_rank_hears_why_a_load_was_refused() -> None:
    assert ranks.run(3, late_to_refused_loads) == [["refused 0", "refused 1", "refused 2"]] * 3


def notices_late(rank: int) -> int:
    """A rank that gives up, or sees another one end, while the last round is decided has succeeded like the others."""
    control = make_control(rank, (0, 1))
    control.begin(timedelta(seconds=20))
    wait = control._wait

    def wait_in_vain(*args: Any) -> Any:
        wait(*args)
        raise RankExited(0, 1)

    with control.guard(), mock.patch.object(control, "_wait", wait_in_vain) if rank == 1 else nullcontext():
        decision: int = control.agree("the last round", None, rank + 1, lambda views: sum(views.values()), last=True)
    control.end()
    return decision


def test_a_decision_counts_on_all_ranks() -> None:
    assert ranks.run(2, notices_late) == [3, 3]
