"""The store of a sync: who knows its token, and participants of a version, where ranks leave and join again."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import closing, nullcontext, suppress
from datetime import timedelta
from functools import partial
from typing import Any
from unittest import mock
from unittest.mock import Mock, patch

import pytest
from torch.distributed import TCPStore

import epload
from epload import Topology
from epload.errors import LoadError, WaitTimeout
from epload.ranks.control import Control
from epload.sync.handing_on import WAITING, Offers
from epload.sync.liveness import Participant
from epload.sync.participants import EngineRank, Engines, ReceiverRendezvous, SenderRendezvous, Start, add_rank, read_engines
from epload.sync.store import connect, serve
from epload.sync.token import listen, serve_front
from support import jobs
from support.jobs import Job, Meeting
from support.small_syncs import many_waves, outcome, receiving, sending, take
from support.synced_models import build, check, write

LIMIT, SOON = timedelta(seconds=20), timedelta(seconds=1)
TOKEN = "a secret of both jobs"


def send(rank: int, meeting: Meeting, world: int) -> None:
    model = build("fsdp", world)
    with many_waves(), sending(meeting, model, 2, timeout=30, token=TOKEN) as sender:
        meeting.hear("attacked")
        for version in (1, 2):
            write(model, version)
            sender.send_weights(version)


def receive(rank: int, meeting: Meeting) -> None:
    model = build("tp0", 2)
    with many_waves(), receiving(meeting, model, timeout=30, token=TOKEN) as receiver:
        for version in (1, 2):
            take(receiver, version)
            check(model, version)


def attack(rank: int, meeting: Meeting) -> tuple[list[str], bytes]:
    """Returns what those get that do not know the token: other engines, and a raw socket that repeats what it has seen."""
    address = meeting.hear("address")
    host, port = address.split(":")
    joins = partial(epload.WeightReceiver, build("plain", 1), address, timeout=10)
    errors = [outcome(partial(joins, token=token)) for token in ("", "another", TOKEN + " ")]
    with closing(socket.create_connection((host, int(port)), 10)) as connection:
        greeting = connection.recv(1000)
        connection.sendall(b"\0" * 64)
        rest = connection.recv(1000)
    errors.append(outcome(lambda: TCPStore(host, int(port), None, False, SOON).set("receivers", "99")))
    with closing(socket.create_connection((host, int(port)), 10)) as connection:
        assert connection.recv(1000) != greeting
    meeting.say("attacked")
    return errors, rest


def test_jobs_with_the_same_token_sync_and_others_get_nothing() -> None:
    *_, (((none, *others, raw), rest),) = jobs.run([Job(2, send, (2,)), Job(2, receive), Job(1, attack)])
    assert "asks for a token: pass the argument token, or set EPLOAD_SYNC_TOKEN" in none
    assert ["has another token" in text for text in others] == [True] * 2
    assert raw
    assert rest == bytes(32), "a proof, or more"


def test_a_store_behind_a_front_does_not_listen_where_others_reach_it() -> None:
    """Its own port is on the loopback interface; many clients use it, and closing the front ends their connections."""
    served = serve(("127.0.0.1", 0), LIMIT, TOKEN)
    clients = [connect(("127.0.0.1", served.port), LIMIT, TOKEN) for _ in range(5)]
    for number, client in enumerate(clients):
        client.set(f"key {number}", "x" * 100_000 * number)
    assert [len(served.store.get(f"key {number}")) for number in range(5)] == [100_000 * number for number in range(5)]
    assert served.store.port != served.port
    served.close()
    with pytest.raises(LoadError, match="no sender answers"):
        connect(("127.0.0.1", served.port), SOON, TOKEN)


def test_the_store_of_another_sender_is_not_used() -> None:
    """The name may still lead to the process before."""
    first = serve(("127.0.0.1", 0), LIMIT, "")
    with patch("epload.sync.store.TCPStore", return_value=first.store), pytest.raises(LoadError, match="to another sender"):
        serve(("127.0.0.1", 0), LIMIT, "")


def test_a_receiver_says_why_it_does_not_connect(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr("epload.sync.store._WARN_SECONDS", 0.0)
    refused, full = ConnectionRefusedError(111, "Connection refused"), OSError(24, "Too many open files")
    with (
        patch("socket.create_connection", side_effect=[refused, refused, refused, refused, full]),
        pytest.raises(LoadError, match=r"no connection to .*Too many open files; raise the limit"),
    ):
        connect(("127.0.0.1", 1), LIMIT)
    assert caplog.text.count("waits for a sender at 127.0.0.1:1: ") == 1


def test_a_token_against_a_sender_without_one_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("epload.sync.token._HANDSHAKE_SECONDS", 0.5)
    served = serve(("127.0.0.1", 0), LIMIT, "")
    with pytest.raises(LoadError, match="asks for no token, but this job has one"):
        connect(("127.0.0.1", served.port), LIMIT, TOKEN)


def test_the_environment_has_the_token_and_a_silent_client_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EPLOAD_SYNC_TOKEN", TOKEN)
    served = serve(("127.0.0.1", 0), LIMIT)
    soon = patch("epload.sync.token._HANDSHAKE_SECONDS", 0.5)
    with soon, closing(socket.create_connection(("127.0.0.1", served.port), 10)) as silent:
        silent.settimeout(9)
        with suppress(ConnectionError):
            while silent.recv(1000):
                pass
    client = connect(("127.0.0.1", served.port), LIMIT)
    client.set("key", "value")
    assert served.store.get("key") == b"value"
    served.close()


def test_an_address_that_others_reach_warns_without_a_token(caplog: pytest.LogCaptureFixture) -> None:
    serve(("0.0.0.0", 0), LIMIT, "")
    assert "whoever can connect to 0.0.0.0 can receive the weights" in caplog.text
    caplog.clear()
    serve(("127.0.0.1", 0), LIMIT, "")
    assert caplog.text == ""


def own_address() -> str:
    """Returns an address of this machine that is not of its loopback interface; empty if it has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, suppress(OSError):
        probe.connect(("192.0.2.1", 9))  # an address for documentation, to which nothing is sent
        return str(probe.getsockname()[0])
    return ""


@pytest.mark.parametrize("token", ["", TOKEN])
@pytest.mark.parametrize(("host", "is_local"), [("127.0.0.1", True), ("localhost", True), ("::1", True), ("0.0.0.0", False)])
def test_a_sender_at_the_loopback_interface_is_reached_from_there_alone(host: str, is_local: bool, token: str) -> None:
    served = serve((host, 0), LIMIT, token)
    connect((host, served.port), LIMIT, token).set("key", "value")
    assert served.store.get("key") == b"value"
    if address := own_address():
        with nullcontext() if not is_local else pytest.raises(ConnectionRefusedError):
            socket.create_connection((address, served.port), 5).close()


@pytest.mark.parametrize("token", ["", TOKEN])
def test_a_port_in_use_is_an_error_under_torchrun_too(token: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its agent has a store, which a TCPStore at the same port would share."""
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    agents = TCPStore("127.0.0.1", 0, None, True, LIMIT, wait_for_workers=False)
    with pytest.raises(LoadError, match=r"cannot serve.*pass a name of the machine of its first rank, and another port"):
        serve(("127.0.0.1", agents.port), LIMIT, token)


def test_a_token_of_another_type_is_refused() -> None:
    with pytest.raises(TypeError, match="expected token to be a str, got a int"):
        epload.WeightReceiver(build("plain", 1), "127.0.0.1:1", token=5)  # type: ignore[arg-type]


def all_ready(sender: SenderRendezvous, number: int, *ranks: ReceiverRendezvous) -> bool:
    sender.announce(number)
    for rank in ranks:
        rank.get_ready(LIMIT)
    return gather(sender) == tuple(rank.participant for rank in ranks)


def joined(port: int, rank: int, engine: str = "engine", size: int = 2) -> ReceiverRendezvous:
    stores = (connect(("127.0.0.1", port), LIMIT) for _ in range(2))
    return ReceiverRendezvous(*stores, EngineRank(engine, rank, size), LIMIT)


@pytest.fixture
def rendezvous() -> Iterator[tuple[SenderRendezvous, int]]:
    with many_waves():
        server = serve(("127.0.0.1", 0), LIMIT)
        yield SenderRendezvous(server.store, expected=2), server.port


def gather(sender: SenderRendezvous, timeout: timedelta = LIMIT) -> tuple[Participant, ...]:
    return sender.gather(1, timeout, lambda: None)


def fail(sender: SenderRendezvous, number: int, *ranks: ReceiverRendezvous) -> None:
    """A version fails, and those that were ready for it join again."""
    sender.start(Start(failed="a version that failed"))
    for rank in ranks:
        with pytest.raises(LoadError, match="a version that failed"):
            rank.wait_for_start(number, LIMIT)
        rank.join_again()


def test_a_rank_that_was_replaced_takes_part_no_more(rendezvous: tuple[SenderRendezvous, int]) -> None:
    sender, port = rendezvous
    first, second = joined(port, 0), joined(port, 1)
    assert all_ready(sender, 1, first, second)
    fail(sender, 1, first, second)

    second.close()
    sender.announce(2)
    first.get_ready(LIMIT)
    with pytest.raises(WaitTimeout, match="0 receiving ranks ready"):
        gather(sender, SOON)
    fail(sender, 2, first)

    restarted = joined(port, 1)
    assert all_ready(sender, 3, first, restarted)
    for rank in (first, restarted):
        rank.close()


def test_engines_of_one_name_are_named(rendezvous: tuple[SenderRendezvous, int]) -> None:
    sender, port = rendezvous
    ranks = [joined(port, 0, "rollout", 1) for _ in "ab"]
    sender.announce(1)
    for rank in ranks:
        rank.get_ready(LIMIT)
    with pytest.raises(
        WaitTimeout, match=r"1 receiving rank ready .*(process .*){2}are rank 0 of engine rollout: .* a name of its"
    ):
        gather(sender, SOON)
    for rank in ranks:
        rank.close()


def test_an_engine_that_was_silent_is_waited_for_once_it_is_heard(rendezvous: tuple[SenderRendezvous, int]) -> None:
    sender, port = rendezvous
    first, second = (joined(port, 0, engine, 1) for engine in "ab")
    assert all_ready(sender, 1, first, second)
    fail(sender, 1, first, second)

    beats, second._beats = second._beats, Mock()
    assert all_ready(sender, 2, first)
    fail(sender, 2, first)

    beat, second._beats = sender._receivers.get(second._key), beats
    while sender._receivers.get(second._key) == beat:
        time.sleep(0.01)
    sender.announce(3)
    first.get_ready(LIMIT)
    with pytest.raises(WaitTimeout, match="engine b: 0 of 1 ranks called receive_weights"):
        gather(sender, SOON)
    second.get_ready(LIMIT)
    assert gather(sender) == (first.participant, second.participant)
    for rank in (first, second):
        rank.close()


def test_an_engine_that_begins_to_wait_as_the_next_version_is_announced_counts_for_the_one_after() -> None:
    waiting = [Participant(name, 0, 1, "", number) for number, name in enumerate("ab")]
    store = serve(("127.0.0.1", 0), LIMIT).store
    offers = Offers(lambda: store)

    def read(*args: Any) -> Engines:
        found = read_engines(*args)
        add_rank(store, WAITING, waiting[1])
        return found

    add_rank(store, WAITING, waiting[0])
    with patch("epload.sync.handing_on.read_engines", read):
        assert list(offers.withdraw(store)) == ["a"]
    assert "b" in offers.withdraw(store)
    assert offers.withdraw(store) == {}
    add_rank(store, WAITING, waiting[0])
    assert list(offers.withdraw(store)) == ["a"]


def test_an_engine_that_is_started_again_with_fewer_ranks_is_complete() -> None:
    store = serve(("127.0.0.1", 0), LIMIT).store
    sender = SenderRendezvous(store, 2)
    key = f"ready/{sender.announce(1)}"
    for number, (rank, size) in enumerate([(2, 4), (3, 4), (0, 2), (1, 2)]):
        store.set(f"alive/{number}", "0")
        add_rank(store, key, Participant("rollout", rank, size, "", number))
    assert [rank.number for rank in sender.ready_engines()[1]["rollout"]] == [2, 3]


def test_a_rank_that_gave_up_before_the_start_comes_to_the_same_version(rendezvous: tuple[SenderRendezvous, int]) -> None:
    """The sender counts on it while it waits for another."""
    sender, port = rendezvous
    first, second = joined(port, 0), joined(port, 1)
    sender.announce(1)
    assert first.get_ready(LIMIT) == (1, 1)
    with pytest.raises(WaitTimeout, match="did not begin to send it"):
        first.wait_for_start(1, SOON)
    second.get_ready(LIMIT)
    sender.start(Start(1, participants=str(len(gather(sender)))))
    assert first.get_ready(LIMIT) == (1, 1)
    assert first.wait_for_start(1, LIMIT).participants == "2"
    sender.announce(2)
    assert first.get_ready(LIMIT) == (2, 2)

    with pytest.raises(WaitTimeout):
        first.wait_for_start(2, SOON)
    sender.start(Start(1, participants="of a version that fails"))
    sender.announce(3)
    assert first.get_ready(LIMIT) == (3, 3), "a version has ended when another one is announced"
    with pytest.raises(WaitTimeout):
        first.wait_for_start(3, SOON)
    sender.start(Start(1, participants="of a version that fails"))
    sender.start(Start(failed="a version that failed"))
    assert first.get_ready(LIMIT) == (3, 3)
    with pytest.raises(LoadError, match="a version that failed"):
        first.wait_for_start(3, LIMIT)
    sender.announce(4)
    assert first.get_ready(LIMIT) == (4, 4)
    for rank in (first, second):
        rank.close()


def is_served(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 5).close()
    except ConnectionRefusedError:
        return False
    return True


def test_a_front_that_is_closed_at_once_lets_go_of_its_port() -> None:
    for _ in range(50):
        listener = listen("127.0.0.1", 0)
        front = serve_front(listener, 1, TOKEN)
        front.close()
        assert not is_served(front.port)


def test_a_sender_that_could_not_be_made_lets_go_of_its_port() -> None:
    topology, ports = Topology.from_nodes([[0]]), []

    def fail(control: Control, what: str, failure: Any, port: int, reduce: Any) -> None:
        ports.append(port)
        raise KeyboardInterrupt

    with mock.patch.object(Control, "agree", fail), pytest.raises(KeyboardInterrupt):
        epload.WeightSender(build("plain", 1), ("127.0.0.1", 0), receivers=1, token=TOKEN, topology=topology)
    assert not is_served(*ports)
