"""A failure on one rank, whatever it is, reaches every rank in time, with one text, and the next load is right."""

from __future__ import annotations

import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.distributed.distributed_c10d import _get_default_store as default_store
from torch.distributed.fsdp import fully_shard

from epload import HierarchicalLoader, Topology
from epload.native import ops
from epload.planning import schedule
from epload.planning.waves import Wave
from epload.transfer.engine import Engine
from epload.transfer.shared_memory import BUFFERS, NodeMemory
from measure import PeakMemory
from support import ranks
from support.accelerator import WAYS
from support.failures import Filling, Raised, Slow, check_raised, raised_by
from support.on_ranks import on_ranks
from support.small_model import BUCKET, NODES, meta_net, only_readers, state_for, wrong


@contextmanager
def at_unpack(number: int, action: signal.Signals | BaseException) -> Iterator[None]:
    """This rank gets a signal, or an exception is raised, in place of the unpacking of one bucket."""
    unpack = ops.unpack

    def one(*args: Any) -> None:
        if patched.call_count != number:
            unpack(*args)
        elif isinstance(action, BaseException):
            raise action
        else:
            signal.raise_signal(action)

    with mock.patch.object(ops, "unpack", side_effect=one) as patched:
        yield


def failing_load(rank: int, culprit: int, action: Any, way: tuple[str, str], limit: float) -> tuple[Raised, list[str]]:
    """One load in which ``culprit`` does something in place of unpacking its third bucket; then, if it lives, a good one."""
    readers, algorithm = way
    options: dict[str, Any] = {"algorithm": algorithm, "bucket_bytes": BUCKET, "timeout": 60}
    loader = HierarchicalLoader(Topology.from_nodes(NODES), readers=readers, **options)
    model = meta_net()
    loader.load(model, only_readers(state_for(1), readers))
    loader._timeout = timedelta(seconds=limit)
    with at_unpack(3 if rank == culprit else -1, action):
        first = raised_by(lambda: loader.load(model, only_readers(state_for(2), readers)))
    if action in (signal.SIGKILL, signal.SIGSTOP):
        return first, []
    loader.load(model, only_readers(state_for(3), readers))
    return first, wrong(model, state_for(3))


def test_a_failure_larger_than_a_socket_takes_at_once() -> None:
    results = ranks.run(4, failing_load, 1, MemoryError("no room, " * 50_000 + "at all"), WAYS[2], 60.0)
    check_raised([first for first, _ in results], "no room, at all", seconds=15)
    assert [bad for _, bad in results] == [[]] * 4


@pytest.mark.parametrize(("victim", "way"), [(0, WAYS[0]), *((2, way) for way in WAYS[1:])])
def test_a_killed_rank_is_noticed_by_all(victim: int, way: tuple[str, str]) -> None:
    results = ranks.run(4, failing_load, victim, signal.SIGKILL, way, 60.0, dying=(victim,), tcp=way == WAYS[0])
    check_raised([s[0] for s in results if s], f"rank {victim}", seconds=15)


def all_ways(rank: int, culprit: int, action: Any) -> list[tuple[Raised, list[str]]]:
    return [failing_load(rank, culprit, action, way, 60.0) for way in WAYS]


OUT_OF_MEMORY = ["rank 3 could not", "bucket", "no room for 7 bytes", "of state dict", "raise action"]


@pytest.mark.parametrize(
    ("culprit", "action", "kind", "parts"),
    [
        (0, signal.SIGINT, "KeyboardInterrupt", ["rank 0 was interrupted (KeyboardInterrupt)", "raise_signal"]),
        (3, SystemExit(3), "SystemExit", ["rank 3 was interrupted (SystemExit)", "raise action"]),
        (3, MemoryError("no room for 7 bytes"), "LoadError", OUT_OF_MEMORY),
    ],
)
def test_what_ends_one_rank_reaches_the_others(culprit: int, action: Any, kind: str, parts: list[str]) -> None:
    """An interrupted rank raises the interrupt itself, and can load again with the rest. An error has the rank, the phase, the
    bucket, the tensors, the source and the stack."""
    for here in zip(*ranks.run(4, all_ways, culprit, action), strict=True):
        check_raised([first for rank, (first, _) in enumerate(here) if rank != culprit], *parts, seconds=30)
        assert here[culprit][0][0] == kind
        assert [bad for _, bad in here] == [[]] * 4


def stopped_rank(rank: int, culprit: int, way: tuple[str, str]) -> Raised:
    store = default_store()
    store.set(f"test/pid/{rank}", str(os.getpid()))
    first, _ = failing_load(rank, culprit, signal.SIGSTOP, way, 3.0)
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


@on_ranks(4)
def test_a_slow_load_is_not_a_failed_one(rank: int) -> None:
    """The whole takes two timeouts, each bucket a fraction of one."""
    for readers, slow, nbytes, seconds in (("one", 0, BUCKET, 0.9), ("every", 3, BUCKET // 2, 1.3)):
        loader = HierarchicalLoader(Topology.from_nodes(NODES), readers=readers, bucket_bytes=nbytes, timeout=4)
        model, state, began = meta_net(), state_for(1), time.monotonic()
        with mock.patch("epload.ranks.heartbeat.INTERVAL", 0.2):
            loader.load(model, Slow(state, seconds) if rank == slow else only_readers(state, readers))
        assert wrong(model, state) == []
        assert rank != slow or time.monotonic() - began > 8


SAID = (
    "rank 0 .*reads bucket 0", "rank 1 waits until rank 0 has relayed wave 0",
    r"rank 2 .*passes on buckets 0 to 0, from ranks \[0\]",
)  # fmt: skip
"""The words of each rank while the first bucket is read. Threads of one rank come in any order."""


class HeldUp(Filling):
    """A state dict whose first bucket comes when all have said what they do."""

    def fill(self, bucket: torch.Tensor, pieces: Any) -> None:
        if not self.calls:
            default_store().wait([f"test/{rank}" for rank in range(len(SAID))], timedelta(seconds=60))
        super().fill(bucket, pieces)


@on_ranks(4)
def test_torchtitan_3065_a_rank_that_waits_says_for_what(rank: int) -> None:
    """A load hung for hours without a word: with EPLOAD_LOG=info each rank says whom it waits for, and for how long."""

    def hear(record: logging.LogRecord) -> bool:
        if rank < len(SAID) and re.search(SAID[rank], record.getMessage()):
            default_store().set(f"test/{rank}", "")
        return True

    logger = logging.getLogger("epload")
    logger.addFilter(hear)
    logger.setLevel(logging.INFO)
    with mock.patch("epload.ranks.heartbeat.INTERVAL", 0.1):
        loader = HierarchicalLoader(Topology.from_nodes(NODES), bucket_bytes=BUCKET)
        loader.load(meta_net(), HeldUp(state_for(1)) if rank == 0 else None)


def interrupted_after(call: Callable[..., Any], when: Callable[..., bool]) -> Callable[..., Any]:
    calls: list[Any] = []

    def wrapped(*args: Any, **options: Any) -> Any:
        result = call(*args, **options)
        if not calls and (result is not None or "last" in options) and when(*args, **options):
            calls.append(result)
            signal.raise_signal(signal.SIGINT)
        return result

    return wrapped


def late_interrupt(rank: int, culprit: int, place: str) -> tuple[Raised, list[str]]:
    """``culprit`` is interrupted when the load has succeeded: a leader before it passes that on, another rank after that."""
    loader = HierarchicalLoader(Topology.from_nodes(NODES), readers="one", bucket_bytes=BUCKET, timeout=60.0)
    model = meta_net()
    control = loader.topology.control
    name, when = {
        "ended": ("set_outcome", lambda *_, **__: True),
        "undelivered": ("_read", lambda: control._key.endswith("outcome")),
        "heard": ("agree", lambda *_, last=False, **__: last),
    }[place]
    patch = mock.patch.object(control, name, interrupted_after(getattr(control, name), when))
    with patch if rank == culprit else nullcontext():
        first = raised_by(lambda: loader.load(model, only_readers(state_for(1), "one")))
    bad = wrong(model, state_for(1))
    loader.load(model, only_readers(state_for(2), "one"))
    return first, bad + wrong(model, state_for(2))


@pytest.mark.parametrize(("culprit", "place"), [(0, "ended"), (2, "undelivered"), (3, "heard")])
def test_an_interrupt_after_the_load_is_that_ranks_alone(culprit: int, place: str) -> None:
    for rank, ((kind, _, seconds), bad) in enumerate(ranks.run(4, late_interrupt, culprit, place)):
        assert (kind, bad) == ("KeyboardInterrupt" if rank == culprit else "", [])
        assert seconds < 30


def early_stop(rank: int) -> tuple[Raised, int]:
    loader = HierarchicalLoader(Topology.from_nodes(NODES), bucket_bytes=BUCKET)
    source = Slow(state_for(1), 0.1)
    with at_unpack(1 if rank == 3 else -1, MemoryError("no room")):
        return raised_by(lambda: loader.load(meta_net(), source if rank == 0 else None)), source.calls


def test_a_failing_receiver_stops_the_reader() -> None:
    results = ranks.run(4, early_stop)
    check_raised([first for first, _ in results], "rank 3 could not unpack bucket 0", seconds=15)
    assert 1 <= results[0][1] <= 5


SCRIPT = """
import sys
from torch import distributed as dist
from epload import HierarchicalLoader, LoadError, Topology
from support.failures import Failing
from support.small_model import BUCKET, meta_net, state_for

rank, store = int(sys.argv[1]), dist.FileStore(sys.argv[2], 2)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
loader = HierarchicalLoader(Topology.from_nodes([[0], [1]]), readers="one", bucket_bytes=BUCKET, progress=False)
loader.load(meta_net(), state_for(1) if rank == 0 else None)
try:
    loader.load(meta_net(), Failing(state_for(1), OSError(5, "a bad disk"), 1) if rank == 0 else None)
except LoadError as error:
    assert "a bad disk" in str(error)
else:
    sys.exit("loaded")
sys.exit(3)
"""


def test_a_process_ends_with_its_own_status_after_a_load(tmp_path: Path) -> None:
    """A thread that closes groups after a failure must not be in native code when the interpreter ends."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(rank), str(tmp_path / "store")],
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    outputs = [process.communicate(timeout=300)[0] for process in processes]
    assert [process.returncode for process in processes] == [3] * 2, "\n".join(outputs)


def given_up(rank: int) -> str:
    """A relay that is given up lets go of its bucket: what arrives later is not written to it. Some may have been before, as
    autograd knows."""
    group = dist.new_group([0, 1])
    bucket = torch.full((1 << 20,), 7, dtype=torch.uint8)
    steps = torch.tensor([[0, 1 << 20, 1 - rank if rank == 0 else -1, -1, -1 if rank == 0 else 0, -1]])
    store = default_store()
    if rank == 0:
        memory = NodeMemory.private(0, 1)
        threading.Timer(0.5, memory.fail).start()
        kind, text, seconds = raised_by(lambda: ops.relay(bucket, steps, group.group_name, "", 1 << 16, memory.counters, 60.0))
        store.set("test/given-up", "")
        time.sleep(1.0)
        untouched = bool((bucket == 7).all())
        return f"{kind} {'given up' in text} {seconds < 10} {untouched} {bucket._version}"
    store.get("test/given-up")
    bucket.fill_(9)
    raised_by(lambda: ops.relay(bucket, steps, group.group_name, "", 1 << 16, None, 2.0))
    return ""


def test_a_relay_that_is_given_up_lets_go_of_its_bucket() -> None:
    assert ranks.run(2, given_up, dying=())[0] == "RuntimeError True True True 1"


# ---- a rank that is stopped for a while in the middle of a load: the others wait in bounded memory, and the load is right ----


MANY_BYTES = 4 << 20
LAYERS, WIDTH = 72, 768  # 170 MB of float32
STOP_AT = 12  # waves that the rank has unpacked when it stops
SECONDS = 1.5  # for which it is stopped once all others have come to a halt or the load is over
SLACK = 100 << 20  # for sockets, threads, the manifest


def waves_unpacked(folder: Path) -> list[int]:
    return [(folder / f"waves-{rank}").stat().st_size for rank in range(4)]


@contextmanager
def stopping(rank: int, victim: int, folder: Path) -> Iterator[None]:
    """The victim stops itself when it comes to wave STOP_AT; every rank writes a byte for each wave."""
    check = Engine._check

    def noted(self: Engine, wave: Wave) -> bool:
        if threading.current_thread() is threading.main_thread():  # unpacking, not relaying
            os.truncate(folder / f"waves-{rank}", wave.index)
            if rank == victim and wave.index == STOP_AT:
                os.kill(os.getpid(), signal.SIGSTOP)
        return check(self, wave)

    with mock.patch.object(Engine, "_check", noted):
        yield


def wake(victim: int, folder: Path, seen: list[list[int]]) -> None:
    """Runs next to another rank's load: lets the victim go on when the others have not moved for a while."""
    pid = int((folder / f"pid-{victim}").read_text())
    while Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "T":
        time.sleep(0.01)
    before: list[int] = []
    while before != waves_unpacked(folder) or min(before) < STOP_AT:
        before = waves_unpacked(folder)
        time.sleep(SECONDS)
    seen.append(before)
    os.kill(pid, signal.SIGCONT)


def save_layers(tmp_path: Path, *_: Any) -> None:
    save_file({f"{i}.weight": torch.full((WIDTH, WIDTH), i + 1.0) for i in range(LAYERS)}, tmp_path / "model.safetensors")


@pytest.mark.parametrize(("readers", "victim"), [("one", 0), ("partitioned", 1)])
@on_ranks(4, save_layers)
def test_others_wait_for_a_stopped_rank(rank: int, tmp_path: Path, readers: str, victim: int) -> None:
    schedule.MIN_PART_BYTES = 1 << 20  # four readers share a wave
    (tmp_path / f"pid-{rank}").write_text(str(os.getpid()))
    (tmp_path / f"waves-{rank}").touch()
    dist.barrier()
    with torch.device("meta"):
        model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)])
    for layer in (*model, model):
        fully_shard(layer)
    topology = Topology.from_nodes(NODES)
    loader = HierarchicalLoader(topology, readers=readers, bucket_bytes=MANY_BYTES, timeout=60, progress=False)
    seen: list[list[int]] = []
    waker = threading.Thread(target=wake, args=(victim, tmp_path, seen))
    if rank == (victim + 1) % 4:
        waker.start()
    with PeakMemory() as memory, stopping(rank, victim, tmp_path):
        loader.load(model, tmp_path / "model.safetensors")
    if rank == (victim + 1) % 4:
        waker.join()
        (waves,) = seen
        neighbors = next(node for node in NODES if victim in node)
        assert waves[victim] == STOP_AT
        assert all(waves[other] < STOP_AT + BUFFERS for other in neighbors), "the other rank of its node did not wait"
        assert all(STOP_AT <= count <= STOP_AT + 3 * BUFFERS for count in waves), f"other nodes did not wait: {waves}"
    shards = sum(parameter.to_local().nbytes for parameter in model.parameters())
    assert memory.above <= shards + BUFFERS * MANY_BYTES + SLACK
    assert all((parameter.to_local() == i + 1).all() for i, parameter in enumerate(model.parameters()))
