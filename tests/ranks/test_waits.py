"""Every wait ends: from the first call on, a rank that is killed is named at once, and one that never came when the timeout has
passed."""

from __future__ import annotations

import errno
import logging
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from epload import HierarchicalLoader, Topology, coalesced_bcast
from epload.core import log
from epload.ranks import heartbeat
from epload.ranks.control import Control
from epload.ranks.processes import Processes
from epload.ranks.tree import Tree
from support import ranks
from support.failures import Raised, check_raised, raised_by
from support.small_model import BUCKET, NODES, meta_net, only_readers, state_for, wrong

SOON = 25.0
"""Seconds for what takes one or two on a machine with nothing else to do, and 60 or more where a timeout has to pass."""
check = partial(check_raised, seconds=SOON)


def kill(*_: Any, **__: Any) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


def new_loader(nodes: list[list[int]], **options: Any) -> HierarchicalLoader:
    return HierarchicalLoader(Topology.from_nodes(nodes), readers="one", bucket_bytes=BUCKET, timeout=60.0, **options)


def warned(rank: int, late: int) -> list[str]:
    """One rank comes once all others have said that they wait for it. Returns what these have logged."""
    store, loader, model = dist.distributed_c10d._get_default_store(), new_loader(NODES), meta_net()
    expected = rf"waited \d+ s in 'opening the checkpoint' for (rank \d, which waits for )*rank {late} to make"

    def warn(record: logging.LogRecord) -> bool:
        if re.search(expected, record.getMessage()):
            store.set(f"test/{rank}", record.getMessage())
        return True

    with mock.patch.multiple("epload.ranks.rounds", _WARN_SECONDS=0.5, _WARN_AGAIN=0.5):
        warnings = [store.get(f"test/{other}").decode() for other in range(4) if other != late] if rank == late else []
        log.logger.addFilter(warn)
        loader.load(model, only_readers(state_for(1), "one"))
        log.logger.removeFilter(warn)
    assert wrong(model, state_for(1)) == []
    return warnings


@pytest.mark.parametrize("late", [0, 1, 3])
def test_every_rank_that_waits_names_the_one_that_has_not_made_the_call(late: int) -> None:
    assert len(ranks.run(4, warned, late, limit=60)[late]) == 3


def absent(rank: int, missing: int, victim: int | None, explicit: bool) -> Raised | None:
    """One rank never comes, so that the others wait until the timeout has passed or another rank is killed."""
    store = dist.distributed_c10d._get_default_store()
    dist.barrier()
    if rank == missing:
        store.wait([f"test/{other}" for other in range(4) if other not in (missing, victim)])
        return None
    options: dict[str, Any] = {"timeout": 4.0} if victim is None else {}
    make, register = partial(Topology.from_nodes, NODES) if explicit else Topology.discover, Processes.register

    def die_when_waited_for(processes: Processes, store: dist.Store, own: int) -> None:
        register(processes, store, own)
        store.wait([f"heartbeat/{other}" for other in range(4) if other not in (missing, own)])
        kill()

    with mock.patch.object(Processes, "register", die_when_waited_for) if rank == victim else nullcontext():
        result = raised_by(lambda: make(**options))
    store.set(f"test/{rank}", "")
    return result


@pytest.mark.parametrize(
    ("missing", "victim", "explicit", "text"),
    [
        (2, None, False, "rank 2 did not arrive within 4 s"), (1, None, True, "rank 1 did not arrive within 4 s"),
        (0, None, False, "rank 0, the coordinator, made no decision"), (3, 0, False, "rank 0 has exited (process "),
        (3, 2, False, "rank 2 has exited (process "),
    ],
)  # fmt: skip
def test_a_rank_that_never_comes_or_is_killed(missing: int, victim: Any, explicit: bool, text: str) -> None:
    dying = () if victim is None else (victim,)
    check(ranks.run(4, absent, missing, victim, explicit, dying=dying, limit=60), "topology", text)


def again_after_a_failure(rank: int) -> list[str]:
    """Ranks do not join a rendezvous that failed, on whichever rank."""
    failed = raised_by(lambda: Topology.from_nodes([[0, 1]] if rank == 0 else [[0], [1]]))
    tensor = torch.tensor([rank])
    coalesced_bcast([tensor], 1, Topology.from_nodes([[0, 1]]))
    return [failed[0], str(tensor.item())]


def test_ranks_meet_again_after_a_failure() -> None:
    assert ranks.run(2, again_after_a_failure, limit=50) == [["ManifestMismatch", "1"]] * 2


def replaced(rank: int) -> list[int]:
    """A process that takes the place of a rank has made no topology yet, while the others have made some."""
    others = dist.new_group([0, 2])
    if rank != 1:
        for _ in range(2):
            Topology.from_nodes([[0], [2]], others)
    seen = []
    for turn in range(2):
        tensor = torch.tensor([10 * turn + rank])
        coalesced_bcast([tensor], 2, Topology.from_nodes([[0, 1], [2]]))
        seen.append(int(tensor))
    return seen


def test_a_replaced_rank_meets_the_others() -> None:
    assert ranks.run(3, replaced, limit=40) == [[2, 12]] * 3


def fork_a_child() -> None:
    """It sleeps, and holds all of this rank's connections to other ranks and to the store; not that to the test."""
    if os.fork() != 0:
        return
    for entry in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            link = socket.socket(fileno=int(entry))
            if link.family != socket.AF_UNIX:
                link.detach()
            link.close()
    time.sleep(60)
    os._exit(0)


@contextmanager
def at(step: str, action: Callable[..., Any]) -> Iterator[None]:
    """``action`` is called when this rank comes to a step of a load."""
    agree = Control.agree

    def settle_or_act(self: Control, what: str, *args: Any, **options: Any) -> Any:
        if what == step:
            action()
        return agree(self, what, *args, **options)

    acting = {"side_effect": lambda *_: action()} if step == "making groups" else {}
    gloo = mock.Mock(wraps=dist.ProcessGroupGloo, **acting)
    with (
        mock.patch.object(Control, "agree", settle_or_act),
        mock.patch.object(dist, "ProcessGroupGloo", gloo),
        mock.patch.object(dist.distributed_c10d, "ProcessGroupGloo", gloo),
    ):
        yield


STEPS = (
    "opening the checkpoint", "making groups", "planning", "sharing memory", "materializing the model",
    "the digests", "verification", "the transfer",
)  # fmt: skip


def killed_at(rank: int, victim: int, step: str, nodes: list[list[int]], forks: bool = False) -> Raised | None:
    loader = new_loader(nodes, verify=True)
    if rank == victim and forks:
        fork_a_child()
    with at(step.removesuffix(" of a broadcast"), kill) if rank == victim else nullcontext():
        if step.endswith("broadcast"):
            return raised_by(lambda: coalesced_bcast([torch.zeros(3)], 0, loader.topology))
        return raised_by(lambda: loader.load(meta_net(), only_readers(state_for(1), "one")))


@pytest.mark.parametrize(
    ("victim", "step", "nodes"),
    [
        *((2, step, NODES) for step in STEPS), *((0, step, NODES) for step in STEPS[1::2]), (3, "planning", NODES),
        (1, "making groups", [[0], [1], [2]]), (1, "making groups of a broadcast", NODES),
    ],
)  # fmt: skip
def test_a_rank_killed_at_a_step_is_named(victim: int, step: str, nodes: list[list[int]]) -> None:
    """The coordinator is named, too, as are a rank whose child keeps its connections, and one that is alone in its node, with
    which nobody shares buffers: others of its machine watch its process."""
    world = sum(map(len, nodes))
    check(ranks.run(world, killed_at, victim, step, nodes, victim == 3, dying=(victim,), limit=80), f"rank {victim}")


def killed_with_a_name_that_is_no_text(rank: int) -> Raised | None:
    Path("/proc/self/comm").write_bytes("epload::训练任务".encode()[:15])
    return killed_at(rank, 2, "planning", NODES)


def test_a_rank_is_named_whatever_its_process_is_called() -> None:
    check(ranks.run(4, killed_with_a_name_that_is_no_text, dying=(2,), limit=80), "rank 2")


def store_dies(rank: int, step: str) -> Raised | None:
    """Rank 0 hosts the store, as without a launcher."""
    host = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port = [host.port]
    dist.broadcast_object_list(port)
    dist.barrier()  # else a rank may close its connections while others still make theirs
    dist.destroy_process_group()
    store = host if rank == 0 else dist.TCPStore("127.0.0.1", port[0], is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=4)
    loader = new_loader(NODES)
    model = meta_net()
    loader.load(model, only_readers(state_for(1), "one"))
    with at(step, kill) if rank == 0 else nullcontext():
        return raised_by(lambda: loader.load(model, only_readers(state_for(2), "one")))


@pytest.mark.parametrize("step", ["opening the checkpoint", "the transfer"])
def test_a_store_whose_host_dies_is_lost_for_all(step: str) -> None:
    for kind, text, seconds in ranks.run(4, store_dies, step, dying=(0,), limit=80)[1:]:
        assert kind == "LoadError", text
        assert "store is lost" in text or "rank 0 has exited" in text, text
        assert seconds < SOON


def no_more(what: str) -> Any:
    """No more of the threads with this name, or no more open files."""
    start = threading.Thread.start

    def start_others(self: threading.Thread) -> None:
        if self.name == what:
            raise RuntimeError("can't start new thread")
        start(self)

    if what == "files":
        return mock.patch.object(os, "eventfd", side_effect=OSError(errno.EMFILE, os.strerror(errno.EMFILE)))
    return mock.patch.object(threading.Thread, "start", start_others)


def cannot_start(rank: int, culprit: int, what: str) -> tuple[Raised, list[str]]:
    loader, model = new_loader(NODES), meta_net()
    control = loader.topology.control
    os.close(control.wake_fd)
    control.wake_fd = -1  # made anew by the load
    with no_more(what) if rank == culprit else nullcontext():
        first = raised_by(lambda: loader.load(model, only_readers(state_for(1), "one")))
    loader.load(model, only_readers(state_for(2), "one"))
    left = [thread.name for thread in threading.enumerate() if thread.name.startswith("epload-")]
    return first, wrong(model, state_for(2)) + left


@pytest.mark.parametrize(
    ("culprit", "what", "text", "hint"),
    [
        (0, "epload-watch", "rank 0 cannot watch over the other ranks", "ulimit -u"),
        (3, "files", "rank 3 cannot watch over the other ranks", "ulimit -n"),
        (2, "epload-move", "cannot start thread epload-move", "ulimit -u"),
    ],
)
def test_a_rank_without_threads_or_files_fails_the_load_for_all(culprit: int, what: str, text: str, hint: str) -> None:
    results = ranks.run(4, cannot_start, culprit, what, limit=80)
    check([first for first, _ in results], text, hint)
    assert [bad for _, bad in results] == [[]] * 4, "the next load is right"


@pytest.mark.parametrize("nodes", [1, 24])
def test_a_post_that_came_late_holds_back_no_later_one(nodes: int) -> None:
    """Beats come once in a second, but for some milliseconds, and each node posts at every one or, if there are 24, third one."""
    now, store = 1000.0, mock.Mock()
    beats = heartbeat.Heartbeats(lambda: store, Tree([[node] for node in range(nodes)], 0))
    with mock.patch.object(heartbeat, "time", SimpleNamespace(monotonic=lambda: now, time=lambda: now)):
        for second in range(30):
            now = 1000.0 + second + 0.02 * (second % 2 == 0)
            beats.beat((1, 1, 1), 0, "")
            beats.post((1, 1, 1), False)
    assert store.set.call_count == 30 / beats.interval
