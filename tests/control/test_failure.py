"""A failure on one rank, whatever it is, reaches every rank in time, with one text, and the next load is right."""

from __future__ import annotations

import logging
import os
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
from epload.control.failure import FailureStore
from epload.control.heartbeat import Heartbeats
from epload.native import ops
from epload.staging.board import Board
from support import ranks
from support.failures import Raised, Slow, check_told, told
from support.small_model import BUCKET, NODES, meta_net, only_readers, state_for, wrong

WAYS = (
    ("one", "two_level"),
    ("one", "striped"),
    ("one", "flat"),
    ("per_node", "two_level"),
    ("partitioned", "two_level"),
    ("partitioned", "striped"),
    ("every", "two_level"),
)


@contextmanager
def at_unpack(number: int, action: Callable[[], None]) -> Iterator[None]:
    """``action`` is called in place of the unpacking of one bucket."""
    calls = 0
    unpack = ops.unpack_bound

    def one(*args: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == number:
            action()
        else:
            unpack(*args)

    with mock.patch.object(ops, "unpack_bound", side_effect=one):
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
        first = told(lambda: loader.load(model, only_readers(state_for(2), readers)))
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


@pytest.mark.parametrize("way", [way for way in WAYS if way[1] != "flat"], ids="-".join)
def test_a_killed_rank_is_noticed_by_all(way: tuple[str, str]) -> None:
    """Within seconds, though the timeout is a minute: its neighbors see the process end or the connection close."""
    said = ranks.run(4, failing_load, 2, kill, way, 60.0, dying=(2,))
    check_told([s[0] for s in said if s], "rank 2", seconds=15)


def test_a_killed_rank_of_a_job_with_a_tcp_store() -> None:
    said = ranks.run(4, failing_load, 2, kill, WAYS[0], 60.0, dying=(2,), tcp=True)
    check_told([s[0] for s in said if s], "rank 2", seconds=15)


def test_an_interrupt_in_a_job_with_a_tcp_store() -> None:
    said = ranks.run(4, failing_load, 3, interrupt, WAYS[4], 60.0, tcp=True)
    check_told([first for first, _ in said[:3]], "rank 3 was interrupted (KeyboardInterrupt)", seconds=15)
    assert said[3][0][0] == "KeyboardInterrupt"
    assert [bad for _, bad in said] == [[]] * 4


def test_a_killed_rank_flat() -> None:
    """gloo's broadcast cannot be called off: within its timeout, which is the timeout."""
    said = ranks.run(4, failing_load, 2, kill, ("one", "flat"), 6.0, dying=(2,))
    check_told([s[0] for s in said if s], "rank", seconds=16)


@pytest.mark.parametrize("way", [WAYS[0], WAYS[3], WAYS[6]], ids="-".join)
def test_a_killed_source_is_noticed_by_all(way: tuple[str, str]) -> None:
    said = ranks.run(4, failing_load, 0, kill, way, 60.0, dying=(0,))
    check_told([s[0] for s in said if s], "rank 0", seconds=15)


def all_ways(rank: int, culprit: int, action: Callable[[], None]) -> list[tuple[Raised, list[str]]]:
    return [failing_load(rank, culprit, action, way, 6.0 if way[1] == "flat" else 60.0) for way in WAYS]


@pytest.mark.parametrize("culprit", [0, 3])
@pytest.mark.parametrize(("action", "kind"), [(interrupt, "KeyboardInterrupt"), (leave, "SystemExit")])
def test_an_interrupt_reaches_the_others(culprit: int, action: Callable[[], None], kind: str) -> None:
    """The interrupted rank raises the interrupt itself, and can load again with the rest."""
    said = ranks.run(4, all_ways, culprit, action)
    for at, way in enumerate(WAYS):
        here = [texts[at] for texts in said]
        check_told(
            [first for rank, (first, _) in enumerate(here) if rank != culprit],
            f"rank {culprit} was interrupted ({kind})",
            "raise" if action is leave else "signal",
            seconds=30,
        )
        assert here[culprit][0][0] == kind, way
        assert [bad for _, bad in here] == [[]] * 4, way


def interrupted_after(call: Callable[..., Any], when: Callable[..., bool] = lambda **_: True) -> Callable[..., Any]:
    def wrapped(*args: Any, **options: Any) -> Any:
        result = call(*args, **options)
        if when(**options):
            interrupt()
        return result

    return wrapped


def late_interrupt(rank: int, culprit: int, place: str, way: tuple[str, str]) -> tuple[Raised, list[str]]:
    """``culprit`` is interrupted when the load has ended well: as coordinator before it has said so, else when it has heard."""
    readers, algorithm = way
    loader = HierarchicalLoader(
        Topology.from_nodes(NODES), readers=readers, algorithm=algorithm, bucket_bytes=BUCKET, timeout=60.0
    )
    model = meta_net()
    control = loader._control
    assert control.messages is not None
    assert control.rounds is not None
    messages, rounds = control.messages, control.rounds
    post = messages.post

    def interrupted_post(key: str, text: str) -> None:
        if rounds.final is not None:
            messages.post = post  # type: ignore[method-assign]  # once
            interrupt()
        post(key, text)

    patches = {
        "ended": mock.patch.object(FailureStore, "end", interrupted_after(FailureStore.end)),
        "unsaid": mock.patch.object(messages, "post", interrupted_post),
        "heard": mock.patch.object(control, "settle", interrupted_after(control.settle, lambda last=False, **_: last)),
    }
    with patches[place] if rank == culprit else nullcontext():
        first = told(lambda: loader.load(model, only_readers(state_for(1), readers)))
    bad = wrong(model, state_for(1))
    loader.load(model, only_readers(state_for(2), readers))
    return first, bad + wrong(model, state_for(2))


@pytest.mark.parametrize("way", WAYS[:3], ids="-".join)
@pytest.mark.parametrize(("culprit", "place"), [(0, "ended"), (0, "unsaid"), (3, "heard")])
def test_an_interrupt_after_the_load_is_that_ranks_alone(culprit: int, place: str, way: tuple[str, str]) -> None:
    """The others have loaded, and all can load again, with the groups and memory that they have."""
    said = ranks.run(4, late_interrupt, culprit, place, way)
    kinds = [kind for (kind, *_), _ in said]
    assert kinds == ["KeyboardInterrupt" if rank == culprit else "" for rank in range(4)], said
    assert max(took for (*_, took), _ in said) < 30, said
    assert [bad for _, bad in said] == [[]] * 4


def test_out_of_memory_in_unpack_reaches_all() -> None:
    """With the rank, the phase, the bucket, the tensors, the source and the stack."""
    said = ranks.run(4, all_ways, 3, run_out_of_memory)
    for at, way in enumerate(WAYS):
        here = [texts[at] for texts in said]
        parts = ("rank 3 could not", "bucket", "no room for 7 bytes", "of state dict", "run_out_of_memory")
        check_told([first for first, _ in here], *parts, seconds=25)
        assert [bad for _, bad in here] == [[]] * 4, way


def stopped_rank(rank: int, culprit: int, way: tuple[str, str]) -> Raised:
    store = dist.distributed_c10d._get_default_store()
    store.set(f"test/pid/{rank}", str(os.getpid()))
    first, _ = failing_load(rank, culprit, stop, way, 3.0)
    if rank == (culprit + 1) % 4:
        time.sleep(1)
        os.kill(int(store.get(f"test/pid/{culprit}")), signal.SIGCONT)
    return first


@pytest.mark.parametrize("way", [WAYS[0], WAYS[3], WAYS[4], WAYS[6]], ids="-".join)
def test_a_stopped_rank_is_named_when_the_timeout_has_passed(way: tuple[str, str]) -> None:
    """And when it wakes, it raises what the others have raised."""
    said = ranks.run(4, stopped_rank, 2, way)
    check_told(said[:2] + said[3:], "rank 2", seconds=3 * 2.5 + 10)
    if way[0] != "every":
        assert "rank 2" in said[0][1].split("silent")[0].splitlines()[-1], said[0][1]
    check_told(said, seconds=60)


def slow_load(rank: int) -> list[str]:
    """The whole takes several timeouts, each bucket much less than one."""
    said = []
    for readers, slow in (("one", 0), ("per_node", 2), ("every", 3)):
        loader = HierarchicalLoader(Topology.from_nodes(NODES), readers=readers, bucket_bytes=BUCKET, timeout=1.0)
        model = meta_net()
        state = state_for(1)
        source = Slow(state, 0.5) if rank == slow else only_readers(state, readers)
        first = told(lambda loader=loader, model=model, source=source: loader.load(model, source))
        said += [f"{readers}: {first}"] if first[0] else [f"{readers}: {text}" for text in wrong(model, state)]
        if rank == slow and first[2] < 2.2:
            said.append(f"{readers}: took only {first[2]:.1f} s")
    return said


def test_a_slow_load_is_not_a_failed_one() -> None:
    assert ranks.run(4, slow_load) == [[]] * 4


def early_stop(rank: int) -> tuple[Raised, int]:
    loader = HierarchicalLoader(Topology.from_nodes(NODES), bucket_bytes=BUCKET)
    source = Slow(state_for(1), 0.1)
    with at_unpack(1 if rank == 3 else -1, run_out_of_memory):
        return told(lambda: loader.load(meta_net(), source if rank == 0 else None)), source.calls


def test_a_failing_receiver_stops_the_reader() -> None:
    """It reads the buckets that were under way, and no more of the dozen."""
    said = ranks.run(4, early_stop)
    check_told([first for first, _ in said], "rank 3 could not unpack bucket 0", seconds=15)
    assert 1 <= said[0][1] <= 5


def given_up(rank: int) -> str:
    """A relay that is given up lets go of its bucket: what arrives later is not written to it."""
    group = dist.new_group([0, 1])
    bucket = torch.full((1 << 20,), 7, dtype=torch.uint8)
    steps = torch.tensor([[0, 1 << 20, 1 - rank if rank == 0 else -1, -1, -1 if rank == 0 else 0, -1]])
    store = dist.distributed_c10d._get_default_store()
    if rank == 0:
        board = Board.alone()
        threading.Timer(0.5, board.fail).start()
        kind, text, seconds = told(lambda: ops.relay(bucket, steps, group.group_name, "", 1 << 16, board.words, 60.0))
        store.set("test/given-up", "")
        time.sleep(1.0)
        untouched = bool((bucket == 7).all())
        return f"{kind} {'given up' in text} {seconds < 10} {untouched}"
    store.get("test/given-up")
    bucket.fill_(9)
    told(lambda: ops.relay(bucket, steps, group.group_name, "", 1 << 16, None, 2.0))
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
    with mock.patch("epload.control.heartbeat.INTERVAL", 0.1):
        loader = HierarchicalLoader(Topology.from_nodes(NODES), bucket_bytes=BUCKET)
        source = Slow(state_for(1), 0.0)
        source.first = 2.0
        loader.load(meta_net(), source if rank == 0 else None)
    return lines


def test_torchtitan_3065_a_rank_that_waits_says_for_what() -> None:
    """A load hung for hours without a word: with EPLOAD_LOG=info each rank says whom it waits for, and for how long."""
    said = ranks.run(4, waiting_load)
    assert "rank 0 reads bucket 0" in " ".join(said[0])
    assert "rank 1 waits until rank 0 has relayed wave 0" in " ".join(said[1])
    assert "passes on buckets 0 to 0, from ranks [0]" in " ".join(said[2])


def test_heartbeats_show_which_ranks_are_silent() -> None:
    store = dist.HashStore()
    heartbeats = [Heartbeats(store, rank) for rank in range(3)]
    for _ in range(2):
        for each in heartbeats:
            each.post(1, 0, "reads bucket 4")
    text = heartbeats[0].describe([0, 1, 2, 3], {1: 4711}, "reads bucket 5", find_silent=True)
    assert "rank 0: reads bucket 5\n" in text
    assert "rank 1: reads bucket 4, process ended" in text
    assert "rank 2: reads bucket 4, silent" in text
    assert "rank 3: no heartbeat received" in text
