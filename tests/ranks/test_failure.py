"""A failure on one rank, whatever it is, reaches every rank in time, with one text, and the next load is right."""

from __future__ import annotations

import logging
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from epload import HierarchicalLoader, Topology
from epload.native import ops
from epload.transfer.shared_memory import NodeMemory
from support import ranks
from support.failures import Raised, Slow, check_raised, raised_by
from support.small_model import BUCKET, NODES, meta_net, only_readers, state_for, wrong

WAYS = (
    ("one", "two_level"),
    ("one", "striped"),
    ("per_node", "two_level"),
    ("partitioned", "two_level"),
    ("partitioned", "striped"),
    ("every", "two_level"),
)


@contextmanager
def at_unpack(number: int, action: Callable[[], None]) -> Iterator[None]:
    """``action`` is called in place of the unpacking of one bucket."""
    calls = 0
    unpack = ops.unpack

    def one(*args: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == number:
            action()
        else:
            unpack(*args)

    with mock.patch.object(ops, "unpack", side_effect=one):
        yield


def failing_load(
    rank: int, culprit: int, action: Callable[[], None], way: tuple[str, str], timeout: float
) -> tuple[Raised, list[str]]:
    """One load in which ``culprit`` does something in place of unpacking its third bucket; then, if it lives, a good one."""
    readers, algorithm = way
    loader = HierarchicalLoader(
        Topology.from_nodes(NODES), readers=readers, algorithm=algorithm, bucket_bytes=BUCKET, timeout=timeout
    )
    model = meta_net()
    loader.load(model, only_readers(state_for(1), readers))
    with at_unpack(3 if rank == culprit else -1, action):
        first = raised_by(lambda: loader.load(model, only_readers(state_for(2), readers)))
    if action in (kill, stop):
        return first, []
    loader.load(model, only_readers(state_for(3), readers))
    return first, wrong(model, state_for(3))


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def interrupt() -> None:
    signal.raise_signal(signal.SIGINT)


def leave() -> None:
    raise SystemExit(3)


def run_out_of_memory() -> None:
    raise MemoryError("no room for 7 bytes")


def complain_at_length() -> None:
    raise MemoryError("no room, " * 50_000 + "at all")


def test_a_failure_larger_than_a_socket_takes_at_once() -> None:
    results = ranks.run(4, failing_load, 1, complain_at_length, WAYS[2], 60.0)
    check_raised([first for first, _ in results], "no room, at all", seconds=15)
    assert [bad for _, bad in results] == [[]] * 4


@pytest.mark.parametrize(("victim", "way"), [(0, WAYS[0]), *((2, way) for way in WAYS[1:])])
def test_a_killed_rank_is_noticed_by_all(victim: int, way: tuple[str, str]) -> None:
    """Within seconds, though the timeout is a minute: its neighbors see the process end or the connection close."""
    results = ranks.run(4, failing_load, victim, kill, way, 60.0, dying=(victim,), tcp=way == WAYS[0])
    check_raised([s[0] for s in results if s], f"rank {victim}", seconds=15)


def all_ways(rank: int, culprit: int, action: Callable[[], None]) -> list[tuple[Raised, list[str]]]:
    return [failing_load(rank, culprit, action, way, 60.0) for way in WAYS]


@pytest.mark.parametrize(("culprit", "action", "kind"), [(0, interrupt, "KeyboardInterrupt"), (3, leave, "SystemExit")])
def test_an_interrupt_reaches_the_others(culprit: int, action: Callable[[], None], kind: str) -> None:
    """The interrupted rank raises the interrupt itself, and can load again with the rest."""
    results = ranks.run(4, all_ways, culprit, action)
    for at, way in enumerate(WAYS):
        here = [texts[at] for texts in results]
        check_raised(
            [first for rank, (first, _) in enumerate(here) if rank != culprit],
            f"rank {culprit} was interrupted ({kind})",
            "raise" if action is leave else "signal",
            seconds=30,
        )
        assert here[culprit][0][0] == kind, way
        assert [bad for _, bad in here] == [[]] * 4, way


def test_out_of_memory_in_unpack_reaches_all() -> None:
    """The error has the rank, the phase, the bucket, the tensors, the source and the stack."""
    results = ranks.run(4, all_ways, 3, run_out_of_memory)
    for at, way in enumerate(WAYS):
        here = [texts[at] for texts in results]
        parts = ("rank 3 could not", "bucket", "no room for 7 bytes", "of state dict", "run_out_of_memory")
        check_raised([first for first, _ in here], *parts, seconds=25)
        assert [bad for _, bad in here] == [[]] * 4, way


def stopped_rank(rank: int, culprit: int, way: tuple[str, str]) -> Raised:
    store = dist.distributed_c10d._get_default_store()
    store.set(f"test/pid/{rank}", str(os.getpid()))
    first, _ = failing_load(rank, culprit, stop, way, 3.0)
    if rank == (culprit + 1) % 4:
        time.sleep(1)
        os.kill(int(store.get(f"test/pid/{culprit}")), signal.SIGCONT)
    return first


@pytest.mark.parametrize("way", [WAYS[0], WAYS[3], WAYS[5]], ids="-".join)
def test_a_stopped_rank_is_named_when_the_timeout_has_passed(way: tuple[str, str]) -> None:
    """And when it wakes, it raises what the others have raised."""
    results = ranks.run(4, stopped_rank, 2, way)
    check_raised(results[:2] + results[3:], "rank 2", seconds=3 * 2.5 + 10)
    if way[0] != "every":
        assert "rank 2" in results[0][1].split("silent")[0].splitlines()[-1], results[0][1]
    check_raised(results, seconds=60)


def slow_load(rank: int) -> list[str]:
    """The whole takes several timeouts, each bucket half of one."""
    problems = []
    for readers, slow in (("one", 0), ("every", 3)):
        loader = HierarchicalLoader(Topology.from_nodes(NODES), readers=readers, bucket_bytes=BUCKET, timeout=1.6)
        model = meta_net()
        state = state_for(1)
        source = Slow(state, 0.8) if rank == slow else only_readers(state, readers)
        first = raised_by(lambda loader=loader, model=model, source=source: loader.load(model, source))
        problems += [f"{readers}: {first}"] if first[0] else [f"{readers}: {text}" for text in wrong(model, state)]
        if rank == slow and first[2] < 3.3:
            problems.append(f"{readers}: took only {first[2]:.1f} s")
    return problems


def test_a_slow_load_is_not_a_failed_one() -> None:
    assert ranks.run(4, slow_load) == [[]] * 4


def given_up(rank: int) -> str:
    """A relay that is given up lets go of its bucket: what arrives later is not written to it."""
    group = dist.new_group([0, 1])
    bucket = torch.full((1 << 20,), 7, dtype=torch.uint8)
    steps = torch.tensor([[0, 1 << 20, 1 - rank if rank == 0 else -1, -1, -1 if rank == 0 else 0, -1]])
    store = dist.distributed_c10d._get_default_store()
    if rank == 0:
        memory = NodeMemory.private(0, 1)
        threading.Timer(0.5, memory.fail).start()
        kind, text, seconds = raised_by(
            lambda: ops.relay(bucket, steps, group.group_name, "", 1 << 16, memory.counters, 60.0)
        )
        store.set("test/given-up", "")
        time.sleep(1.0)
        untouched = bool((bucket == 7).all())
        return f"{kind} {'given up' in text} {seconds < 10} {untouched}"
    store.get("test/given-up")
    bucket.fill_(9)
    raised_by(lambda: ops.relay(bucket, steps, group.group_name, "", 1 << 16, None, 2.0))
    return ""


def test_a_relay_that_is_given_up_lets_go_of_its_bucket() -> None:
    assert ranks.run(2, given_up, dying=())[0] == "RuntimeError True True True"


def waiting_load(rank: int) -> list[str]:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("epload")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    with mock.patch("epload.ranks.heartbeat.INTERVAL", 0.1):
        loader = HierarchicalLoader(Topology.from_nodes(NODES), bucket_bytes=BUCKET)
        source = Slow(state_for(1), 0.0)
        source.first = 2.0
        loader.load(meta_net(), source if rank == 0 else None)
    return lines


def test_torchtitan_3065_a_rank_that_waits_says_for_what() -> None:
    """A load hung for hours without a word: with EPLOAD_LOG=info each rank says whom it waits for, and for how long."""
    results = ranks.run(4, waiting_load)
    # Threads of one rank come in any order.
    assert any(re.search(r"rank 0 .*reads bucket 0", line) for line in results[0])
    assert "rank 1 waits until rank 0 has relayed wave 0" in " ".join(results[1])
    assert "passes on buckets 0 to 0, from ranks [0]" in " ".join(results[2])


def interrupted_after(call: Callable[..., Any], when: Callable[..., bool] = lambda *_: True) -> Callable[..., Any]:
    calls = 0

    def wrapped(*args: Any, **options: Any) -> Any:
        nonlocal calls
        result = call(*args, **options)
        if result is not None or "last" in options:
            calls += when(*args, **options)
            if calls == 1 and when(*args, **options):
                interrupt()
        return result

    return wrapped


def late_interrupt(rank: int, culprit: int, place: str) -> tuple[Raised, list[str]]:
    """``culprit`` is interrupted when the load has succeeded: a leader before it passes that on, another rank after that."""
    loader = HierarchicalLoader(Topology.from_nodes(NODES), readers="one", bucket_bytes=BUCKET, timeout=60.0)
    model = meta_net()
    control = loader.topology.control
    patches = {
        "ended": mock.patch.object(control, "set_outcome", interrupted_after(control.set_outcome)),
        "undelivered": mock.patch.object(
            control, "_read", interrupted_after(control._read, lambda: control._key.endswith("outcome"))
        ),
        "heard": mock.patch.object(
            control, "agree", interrupted_after(control.agree, lambda *_, last=False, **__: last)
        ),
    }
    with patches[place] if rank == culprit else nullcontext():
        first = raised_by(lambda: loader.load(model, only_readers(state_for(1), "one")))
    bad = wrong(model, state_for(1))
    loader.load(model, only_readers(state_for(2), "one"))
    return first, bad + wrong(model, state_for(2))


@pytest.mark.parametrize(("culprit", "place"), [(0, "ended"), (2, "undelivered"), (3, "heard")])
def test_an_interrupt_after_the_load_is_that_ranks_alone(culprit: int, place: str) -> None:
    """The others have loaded, and all can load again, with the groups and memory that they have."""
    results = ranks.run(4, late_interrupt, culprit, place)
    kinds = [kind for (kind, *_), _ in results]
    assert kinds == ["KeyboardInterrupt" if rank == culprit else "" for rank in range(4)], results
    assert max(took for (*_, took), _ in results) < 30, results
    assert [bad for _, bad in results] == [[]] * 4


def early_stop(rank: int) -> tuple[Raised, int]:
    loader = HierarchicalLoader(Topology.from_nodes(NODES), bucket_bytes=BUCKET)
    source = Slow(state_for(1), 0.1)
    with at_unpack(1 if rank == 3 else -1, run_out_of_memory):
        return raised_by(lambda: loader.load(meta_net(), source if rank == 0 else None)), source.calls


def test_a_failing_receiver_stops_the_reader() -> None:
    """It reads the buckets that were under way, and no more of the dozen."""
    results = ranks.run(4, early_stop)
    check_raised([first for first, _ in results], "rank 3 could not unpack bucket 0", seconds=15)
    assert 1 <= results[0][1] <= 5
