"""Stores that answer late, as a name server that does not answer holds up a TCPStore, and a port that is used again."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from unittest import mock

import torch.distributed as dist
from torch.distributed import HashStore
from torch.distributed.distributed_c10d import PrefixStore

import epload
from epload.ranks.rendezvous import rendezvous
from epload.sync import store
from epload.sync.liveness import LEASE_SECONDS, LEFT, Liveness, Participant
from epload.sync.participants import ReceiverRendezvous
from support.failures import must_raise
from support.jobs import Job, Meeting, run
from support.small_syncs import outcome, receiving, sending, take
from support.synced_models import build, check, write

LATE_NAMES = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <netdb.h>
#include <unistd.h>
typedef int function(const struct sockaddr *, socklen_t, char *, socklen_t, char *, socklen_t, int);
int getnameinfo(const struct sockaddr *a, socklen_t an, char *h, socklen_t hn, char *s, socklen_t sn, int flags) {
  if (!(flags & NI_NUMERICHOST)) usleep(3500000);
  return ((function *)dlsym(RTLD_NEXT, "getnameinfo"))(a, an, h, hn, s, sn, flags | NI_NUMERICHOST);
}
"""
CONNECT = """
import sys
from datetime import timedelta
from epload.ranks.connection import connect_again
from epload.sync import store
connection = store.connect(sys.argv[1], timedelta(seconds=60))
connect_again(connection).set("heard", "yes")
"""


def test_a_receiver_connects_while_names_are_looked_up_for_seconds(tmp_path: Path) -> None:
    source, library = tmp_path / "names.c", tmp_path / "names.so"
    source.write_text(LATE_NAMES)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True, timeout=60)
    served = store.serve("127.0.0.1:0", timedelta(seconds=60), None)
    environment = {**os.environ, "LD_PRELOAD": str(library), "PYTHONPATH": os.pathsep.join(sys.path)}
    arguments = [sys.executable, "-c", CONNECT, f"127.0.0.1:{served.port}"]
    result = subprocess.run(arguments, env=environment, timeout=90, capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (0, "")
    assert served.store.get("heard") == b"yes"


def test_a_rank_that_comes_late_to_a_generation_that_has_failed_does_not_wait() -> None:
    store, decide = HashStore(), mock.Mock(return_value=1)

    def meet(rank: int, check: Callable[[], None]) -> str:
        limit = timedelta(seconds=60)
        own = PrefixStore("generation/3", store)
        return outcome(lambda: rendezvous(own, (0, 1, 2), rank, limit, None, rank, decide, "", "generation/3", check))

    lost = mock.Mock(side_effect=epload.LoadError("rank 1 has left"))
    assert "rank 1 has left" in meet(0, lost)
    began = time.monotonic()
    assert "the other ranks have given up" in meet(2, lambda: None)
    assert time.monotonic() - began < 30
    decide.assert_not_called()


def test_a_receiver_is_silent_if_two_looks_find_an_old_beat() -> None:
    beats = HashStore()
    liveness, receiver = Liveness(beats), Participant("engine", 0, 1, "process 1 on host", 7)

    def is_lost(now: float) -> bool:
        liveness.look([receiver], now)
        return receiver.number in liveness.lost

    beats.set("alive/7", "1")
    assert not is_lost(100.0)
    assert not is_lost(101 + LEASE_SECONDS), "the store may have answered nobody meanwhile"
    beats.set("alive/7", "2")
    assert not is_lost(103 + LEASE_SECONDS)
    assert not is_lost(104 + 2 * LEASE_SECONDS)
    assert is_lost(106 + 2 * LEASE_SECONDS)
    beats.set("alive/7", "3")
    assert not is_lost(107 + 2 * LEASE_SECONDS)
    beats.set("alive/7", LEFT)
    assert is_lost(108 + 2 * LEASE_SECONDS)


AT_EXIT = """
import atexit, threading
from datetime import timedelta
from epload.ranks import groups
from epload.sync.store import tell

class Group:
    on_devices = True
    def abort(self):
        print("aborted", flush=True)

def refuse(thread):
    raise RuntimeError("can't create new thread at interpreter shutdown")

group = Group()
groups._at_exit()
groups._with_devices.add(group)
atexit.register(lambda: tell(lambda: print("left", flush=True), timedelta(seconds=5)))
atexit.register(lambda: setattr(threading.Thread, "start", refuse))
"""


def test_at_exit_groups_are_aborted_and_receivers_leave_without_new_threads() -> None:
    """Python 3.12 starts none in functions that are called at exit."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    result = subprocess.run([sys.executable, "-c", AT_EXIT], env=environment, timeout=60, capture_output=True, text=True)
    assert (result.returncode, result.stdout, result.stderr) == (0, "left\naborted\n", "")


def send_with_one_after_another(rank: int, meeting: Meeting) -> None:
    """The garbage collector is off, as in training loops that call it themselves now and then."""
    gc.disable()
    model, address = build("fsdp", 2), "127.0.0.1:0"
    for version in (1, 2, 3):
        write(model, version)
        with epload.WeightSender(model, address, receivers=1, timeout=60) as sender:
            address = sender.address
            meeting.say(f"address-{version}", address)
            sender.send_weights(version)


def receive_with_one_after_another(rank: int, meeting: Meeting) -> None:
    model = build("plain", 1)
    for version in (1, 2, 3):
        with receiving(meeting, model, where=f"address-{version}") as receiver:
            take(receiver)
            check(model, version)


def test_a_sender_that_was_closed_leaves_its_port_to_the_next() -> None:
    run([Job(2, send_with_one_after_another), Job(1, receive_with_one_after_another)])


def test_a_receiver_that_is_collected_in_a_thread_of_its_own_leaves() -> None:
    """The garbage collector runs in any thread; a thread cannot wait for itself."""
    beats = HashStore()
    rendezvous = ReceiverRendezvous(beats, beats, epload.EngineRank("engine"), timedelta(seconds=20))
    with mock.patch.object(rendezvous, "_thread", threading.current_thread()):
        rendezvous.close()
    assert beats.get(f"alive/{rendezvous.participant.number}") == LEFT


def receive_from_two(rank: int, meeting: Meeting) -> None:
    """Each version by a thread of its own, which come to the senders in different orders on the two ranks."""
    models = [build("tp0", 2) for _ in "ab"]
    receivers = [
        epload.WeightReceiver(model, meeting.hear(name), timeout=60, engine=epload.EngineRank(f"engine {name}", rank, 2))
        for name, model in zip("ab", models, strict=True)
    ]
    first, last = receivers if rank == 0 else receivers[::-1]
    thread = threading.Thread(target=take, args=(first,))
    thread.start()
    meeting.say(f"waits-{rank}")
    time.sleep(0.5)
    take(last)
    thread.join()
    for version, (model, receiver) in enumerate(zip(models, receivers, strict=True), 1):
        check(model, version)
        receiver.close()


UNCLOSED = """
import threading, epload, epload.core.threads, torch
epload.core.threads._EXIT_SECONDS = 300.0
model = torch.nn.Linear(2, 3)
sender = epload.WeightSender(torch.nn.Linear(2, 3), "127.0.0.1:0", receivers=1)
receiver = epload.WeightReceiver(model, sender.address, engine=epload.EngineRank("engine"))
sending = threading.Thread(target=sender.send_weights, args=(1,))
sending.start()
receiver.receive_weights()
sending.join()
"""


def test_a_process_ends_at_once_without_close() -> None:
    """Its threads end, and are not waited for."""
    subprocess.run([sys.executable, "-c", UNCLOSED], check=True, timeout=120)


def send_one(rank: int, meeting: Meeting, name: str, version: int) -> None:
    model = build("plain", 1)
    write(model, version)
    with sending(meeting, model, 2, where=name) as sender:
        for other in range(2):
            meeting.hear(f"waits-{other}")
        sender.send_weights(version)


def test_an_engine_receives_from_two_senders_at_once() -> None:
    run([Job(1, send_one, ("a", 1)), Job(1, send_one, ("b", 2)), Job(2, receive_from_two)])


def receive_without_groups(rank: int, meeting: Meeting, folder: Path) -> None:
    model = build("plain", 1)
    engine = epload.EngineRank("engine", rank, 2)
    with receiving(meeting, model, stage="none", engine=engine, node=str(rank)) as receiver:
        take(receiver)
        dist.destroy_process_group()
        meeting.say(f"has-none-{rank}")
        take(receiver)
    check(model, 2)
    dist.init_process_group("gloo", init_method=f"file://{folder}/again", rank=rank, world_size=2)


def send_two(rank: int, meeting: Meeting) -> None:
    model = build("plain", 1)
    with sending(meeting, model, 2) as sender:
        for version in (1, 2):
            write(model, version)
            sender.send_weights(version)
            meeting.hear("has-none-0")
            meeting.hear("has-none-1")


def test_a_job_that_destroys_its_groups_goes_on_receiving(tmp_path: Path) -> None:
    """torch forgets the names of all groups then, also of those that it has not made."""
    run([Job(1, send_two), Job(2, receive_without_groups, (tmp_path,))])


def send_and_receive(rank: int, meeting: Meeting) -> None:
    """The trainer's process has an engine, too: each is in a thread of its own."""
    trained, model = build("plain", 1), build("plain", 1)
    with sending(meeting, trained, 2) as sender, receiving(meeting, model) as receiver, ThreadPoolExecutor(1) as pool:
        for version in (1, 2):
            write(trained, version)
            sent = pool.submit(sender.send_weights, version)
            take(receiver)
            sent.result()
            check(model, version)
        must_raise(TypeError, "expected version to be an int of at least 0, got '3'", receiver.receive_weights, "3")
        receiver.close()
        must_raise(ValueError, "expected an open WeightReceiver, got one that was closed", receiver.commit)


def receive_beside(rank: int, meeting: Meeting) -> None:
    model = build("plain", 1)
    with receiving(meeting, model) as receiver:
        for version in (1, 2):
            take(receiver)
            check(model, version)


def test_a_sender_and_a_receiver_in_one_process() -> None:
    run([Job(1, send_and_receive), Job(1, receive_beside)])
