"""A rank of either job fails or is interrupted: the culprit is named, and whoever lives holds a whole version."""

from __future__ import annotations

import os
import re
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import epload
from epload.core.log import logger
from epload.mapping import Quantize
from epload.planning.waves import Wave
from epload.ranks import single_flight
from epload.ranks.single_flight import Call
from epload.sync import changes_route, participants, store
from epload.sync.committed import CommittedTensors
from epload.sync.generation import Generation
from epload.sync.node_version import NodeVersion
from epload.sync.pulling import Puller, SenderMemory
from epload.sync.targets import ModelTarget
from epload.transfer.engine import Engine
from support import fakedev
from support.accelerator import DEVICE
from support.jobs import Job, Meeting, run
from support.quantized import fine_grained
from support.small_syncs import attempt, kill_self, many_waves, names_culprit, outcome, receiving, sending, take, trainer
from support.sync_jobs import engine, send_model
from support.synced_models import build, check, write

TIMEOUT = 60.0
"""More than a test takes, so that who waits for the other side fails it."""


@contextmanager
def acting_at(step: str, act: Callable[[], None]) -> Iterator[None]:
    """Acts before the second wave is moved; or, where versions are pulled, before the first allocation is opened, or once the
    copies are queued."""
    move, copying, opens = Engine._move, Puller.copying, SenderMemory.allocation

    def moved(self: Engine, wave: Wave) -> bool:
        if wave.index == 1:
            act()
        return move(self, wave)

    @contextmanager
    def copied(self: Puller, *args: Any) -> Iterator[None]:
        with copying(self, *args):
            act()
            yield

    def opened(self: Any, *args: Any) -> Any:
        act()
        return opens(self, *args)

    steps = {
        "moved": (Engine, "_move", moved),
        "copied": (Puller, "copying", copied),
        "opened": (SenderMemory, "allocation", opened),
    }
    with mock.patch.object(*steps[step]):
        yield


def jobs_of(
    semantics: str, stage: str, train: tuple[Any, ...], *plans: list[str], dies: bool = False, step: str = "moved"
) -> list[Job]:
    """A trainer, with arguments of ``trainer``, and engines with these plans. ``dies``: the trainer's last rank does."""
    where = DEVICE if semantics else "cpu"
    setup = partial(fakedev.setup, semantics, shares=step != "moved") if semantics else None
    receives = partial(engine, world=1, stage=stage, where=where, acting=partial(acting_at, step))
    jobs = [Job(train[0], partial(trainer, where=where, dies=dies), train, (1,) if dies else (), setup)]
    for name, plan in zip("ab", plans, strict=False):
        dying = (0,) if plan[-1].startswith("die") else ()
        jobs.append(Job(1, partial(receives, plan=plan), (name,), dying, setup))
    return jobs


@pytest.mark.parametrize(
    ("semantics", "stage", "dies", "step"),
    [
        ("", "host", True, "moved"), ("", "none", True, "moved"), ("", "none", False, "moved"), ("nccl", "none", True, "moved"),
        ("hccl", "host", True, "moved"), ("nccl", "none", False, "moved"), ("nccl", "host", True, "opened"),
        ("nccl", "none", True, "copied"), ("nccl", "none", False, "opened"), ("nccl", "host", False, "copied"),
        ("nccl", "device", False, "copied"),
    ],
)  # fmt: skip
@pytest.mark.usefixtures("fake_device")
def test_a_receiver_that_fails_is_named_and_the_others_go_on(semantics: str, stage: str, dies: bool, step: str) -> None:
    plan = ["", "die"] if dies else ["", "fail", ""]
    sent, left, other = run(jobs_of(semantics, stage, (2, 2, 3, {}), ["", "", ""], plan, step=step))
    (_, (text, seconds), _) = sent[0]
    assert [bool(error) for error, _ in sent[0]] == [False, True, False]
    if dies:
        assert names_culprit(text, "[23]")  # engines join in any order
        assert "engine" in text
    else:
        assert "a broken receiver" in text
        assert other[0][1:] == left[0][1:]
    assert text == sent[1][1][0] == left[0][1][0]
    after = (None, True) if stage == "none" else (1, False)
    assert [state for _, *state in left[0]] == [[1, False], [*after], [3, False]], "the next version repairs a torn one"
    assert seconds < 30


@pytest.mark.parametrize(
    ("semantics", "stage", "step"),
    [
        ("", "host", "moved"), ("", "none", "moved"), ("nccl", "none", "moved"), ("hccl", "host", "moved"),
        ("nccl", "host", "opened"), ("nccl", "none", "copied"),
    ],
)  # fmt: skip
@pytest.mark.usefixtures("fake_device")
def test_a_trainer_that_is_killed_leaves_the_version_before(semantics: str, stage: str, step: str) -> None:
    sent, left = run(jobs_of(semantics, stage, (2, 1, 2, {}), ["", "tell"], dies=True, step=step))
    text = sent[0][1][0]
    assert names_culprit(text, "1") or (step != "moved" and "memory of rank 1 cannot be opened, as if it had ended" in text)
    assert left[0][1] == (text, *((1, False) if stage == "host" else (None, True)))


def test_a_receiver_that_dies_between_versions_is_left_out() -> None:
    sent, left, _ = run(jobs_of("", "host", (1, 2, 2, {2: "b-0-dies"}), ["", ""], ["", "die waiting"]))
    assert [text for text, _ in sent[0]] == ["", ""]
    assert [(text, version) for text, version, _ in left[0]] == [("", 1), ("", 2)]


def send_and_leave(rank: int, meeting: Meeting) -> str:
    model = build("fsdp", 2)
    with many_waves(), sending(meeting, model, timeout=TIMEOUT, topology=epload.Topology.from_nodes([[0], [1]])) as sender:
        write(model, 1)
        return outcome(partial(sender.send_weights, 1))


def receive_slowly(rank: int, meeting: Meeting) -> int:
    """The sender's ranks wait so long for the last round that they seldom ask how it has ended."""
    with many_waves(), acting_at("moved", partial(time.sleep, 1.0)), receiving(meeting, build("plain", 1)) as receiver:
        return take(receiver).version


def test_ranks_of_a_sender_on_other_nodes_learn_how_a_version_has_ended_before_it_is_closed() -> None:
    assert run([Job(2, send_and_leave), Job(1, receive_slowly)]) == [["", ""], [1]]


def receive_in_two_threads(rank: int, meeting: Meeting) -> tuple[str, str]:
    model = build("plain", 1)
    with many_waves(), receiving(meeting, model, timeout=TIMEOUT) as receiver:
        receiver.receive_weights()
        unpack = NodeVersion.unpack

        def receives_meanwhile(version: NodeVersion, tensors: Any) -> None:
            unpack(version, tensors)
            thread = threading.Thread(target=receiver.receive_weights)
            thread.start()
            texts.append(wait_until_refused(receiver))
            meeting.say("second")
            thread.join()

        texts: list[str] = []
        with mock.patch.object(NodeVersion, "unpack", receives_meanwhile):
            text = outcome(receiver.commit)
        assert receiver.partially_updated
        receiver.commit()
        check(model, 2)
        return text, texts[0]


def wait_until_refused(receiver: epload.WeightReceiver) -> str:
    """Returns the text of the error of a second call once another thread is in the first."""
    while not receiver._receiving.locked():
        time.sleep(0.001)
    return outcome(receiver.receive_weights)


def send_two(rank: int, meeting: Meeting) -> None:
    model = build("plain", 1)
    with many_waves(), sending(meeting, model, timeout=TIMEOUT) as sender:
        for version in (1, 2):
            if version == 2:
                meeting.hear("second")
            write(model, version)
            sender.send_weights(version)


def test_threads_that_use_one_receiver_mix_no_versions() -> None:
    _, ((committed, received),) = run([Job(1, send_two), Job(1, receive_in_two_threads)])
    assert committed == "version 1 was discarded, as another one was received meanwhile"
    assert received == "expected one call of receive_weights() at a time; another thread is in it"


def leaving(rank: int, meeting: Meeting) -> None:
    model = build("plain", 1)
    with many_waves(), mock.patch.object(participants, "_BEAT_SECONDS", 30.0), sending(meeting, model, timeout=20) as sender:
        write(model, 1)
        sender.send_weights(1)
    meeting.say("left", str(os.getpid()))


def busy(rank: int, meeting: Meeting, stage: Any) -> tuple[str, str]:
    """Uses a version until its sender's process and its own threads have ended. Returns what the next call says, and what native
    code has written meanwhile."""
    with tempfile.TemporaryFile("w+") as log, many_waves():  # whose beats are more frequent
        receiver = epload.WeightReceiver(build("plain", 1), meeting.hear("address"), timeout=20, stage=stage)
        receiver.receive_weights()
        if stage == "host":
            receiver.commit()
        stderr = os.dup(2)
        os.dup2(log.fileno(), 2)
        sender = Path("/proc", meeting.hear("left"))
        while sender.exists():
            time.sleep(0.01)
        receiver._holder._thread.join(60)
        assert receiver._rendezvous._ended, "the sender has not waited"
        text = outcome(receiver.receive_weights)
        receiver.close()
        os.dup2(stderr, 2)
        log.seek(0)
        return text, log.read()


@pytest.mark.parametrize("stage", ["host", "none"])
def test_an_engine_that_is_busy_learns_that_the_sender_was_closed(stage: str) -> None:
    _, ((text, written),) = run([Job(1, leaving), Job(1, busy, (stage,))])
    assert not re.search("TCPStore|epload", written), written
    assert text == "the sender has been closed, and sends no more versions"


MISFITS = {
    "version": "expected version 7, but the sender announced 1",
    "shape": r"head has shape \[16, 41\]",
    "names": "only the receiver has 1 tensor: extra",
    "verify": "expected the same verify=",
}


def ask(rank: int, meeting: Meeting) -> list[str]:
    texts = []
    for kind in MISFITS:
        model = build("plain", 1)
        if kind in ("shape", "names"):
            setattr(model, "head" if kind == "shape" else "extra", torch.nn.Parameter(torch.zeros(4, 4)))
        with receiving(meeting, model, timeout=20, verify=kind == "verify") as receiver:
            texts.append(outcome(lambda: receiver.receive_weights(7 if kind == "version" else None)))  # noqa: B023
        assert not any(parameter.any() for parameter in model.parameters())
    return texts


def test_what_does_not_fit_is_refused_in_both_jobs() -> None:
    sends = partial(send_model, versions=len(MISFITS))
    for (texts,) in run([Job(1, sends, (partial(build, "plain", 1), write)), Job(1, ask)]):
        for expected, text in zip(MISFITS.values(), texts, strict=True):
            assert re.search(expected, text), text


def sender(address: Any = ("127.0.0.1", 0), receivers: int = 1, timeout: float = 2) -> epload.WeightSender:
    return epload.WeightSender(build("plain", 1), address, receivers=receivers, timeout=timeout)


def test_too_few_descriptors_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    sender(receivers=10_000_000).close()
    assert "10000000 receiving ranks need at least 40000256 file descriptors" in caplog.text
    caplog.clear()
    sender().close()
    assert "descriptors" not in caplog.text


def test_receivers_that_do_not_come_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    soon = mock.patch.object(participants, "_WARN_SECONDS", 0.0)
    with soon, caplog.at_level("WARNING"), sender(receivers=3, timeout=1) as alone:
        texts = [outcome(lambda: alone.send_weights(1)), *caplog.messages]
    assert [re.search(r"0 receiving ranks ready after \d s, expected 3", text) is not None for text in texts] == [True] * 2


def test_addresses_that_cannot_be_used(caplog: pytest.LogCaptureFixture) -> None:
    with socket.socket() as taken:  # which does not listen
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        with pytest.raises(epload.LoadError, match=f"cannot serve 127.0.0.1:{port}"):
            sender(("127.0.0.1", port))
        with pytest.raises(epload.LoadError, match="no sender answers"):
            epload.WeightReceiver(build("plain", 1), ("127.0.0.1", port), timeout=0.5)
    began = time.monotonic()
    with pytest.raises(epload.LoadError, match=r"cannot serve 192\.0\.2\.1:29600"), caplog.at_level("WARNING"):
        sender("192.0.2.1:29600")
    assert "192.0.2.1 is no address of this machine" in caplog.text
    assert time.monotonic() - began < 30  # torch's own would be 60


def test_another_version_of_epload_or_of_the_weights_is_refused() -> None:
    with sender(timeout=30) as trainer:
        with (
            mock.patch.object(store, "PROTOCOL", store.PROTOCOL + 1),
            pytest.raises(epload.LoadError, match="install the same version in both jobs"),
        ):
            epload.WeightReceiver(build("plain", 1), trainer.address, timeout=30)
        trainer._version = 3
        for version in (2, 3):
            with pytest.raises(ValueError, match=f"to be greater than 3, the last one sent, got {version}"):
                trainer.send_weights(version)


def test_addresses() -> None:
    for address in ("trainer0:29600", "[::1]:29600", "10.0.0.1:1", ("::1", 29600)):
        host, port = address.rsplit(":", 1) if isinstance(address, str) else address
        assert store.parse_address(address) == (host.strip("[]"), int(port))
    for address in ("::1:29500", "trainer0", "trainer0:", ":29600", "a:b", "a:-1", "a:65536", ("a", 70000)):
        with pytest.raises(ValueError, match="expected an address such as"):
            store.parse_address(address)


def troubled_trainer(rank: int, meeting: Meeting, kind: str) -> list[tuple[str, float, list[str]]]:
    """Sends versions; at the second, one rank's other thread is in a load, or its copy of what was sent fails."""
    with many_waves():
        model, outcomes = build("fsdp", 2), []
        with sending(meeting, model, timeout=TIMEOUT, delta="always" if kind == "copy" else "off") as sender:
            other = Call("load()", sender.topology, object(), threading.Thread())
            troubles: Any = {
                ("load", 0): mock.patch.object(single_flight, "_current", other),
                ("copy", 1): mock.patch.object(CommittedTensors, "commit", side_effect=MemoryError("no room")),
            }
            for version in range(1, 5):
                write(model, version)
                began = time.monotonic()
                trouble = troubles.get((kind, rank), nullcontext()) if version == 2 else nullcontext()
                with trouble, mock.patch.object(logger, "warning") as warn:
                    text, report = attempt(partial(sender.send_weights, version))
                    assert report is None or {*report.warnings} <= {call.args[-1] for call in warn.mock_calls}
                outcomes.append((text, time.monotonic() - began, report.warnings if report else []))
        return outcomes


def receive_all(rank: int, meeting: Meeting) -> int:
    model = build("plain", 1)
    with many_waves(), receiving(meeting, model, timeout=TIMEOUT) as receiver:
        while receiver.version != 4:
            with suppress(epload.LoadError):
                take(receiver)
                check(model, receiver.version)
    return 4


@pytest.mark.parametrize("kind", ["load", "copy"])
def test_ranks_of_a_sender_go_on_together_after_trouble_of_one(kind: str) -> None:
    sent, received = run([Job(2, troubled_trainer, (kind,)), Job(1, receive_all)])
    assert received == [4]
    for of_rank in sent:
        failed = ["order" in text for text, _, _ in of_rank]
        assert failed == [False, kind == "load", False, False], of_rank
        assert all(seconds < 30 for _, seconds, _ in of_rank), of_rank
    if kind == "copy":
        assert "the next version is sent in full: the copy of this one has failed" in sent[1][1][2][0]


def sender_of_three(rank: int, meeting: Meeting) -> list[str]:
    model, errors = build("plain", 1), []
    with sending(meeting, model) as sender:
        for version in (1, 2, 3):
            write(model, version)
            try:
                sender.send_weights(version)
            except epload.LoadError as error:
                errors.append(f"{version}: {error}")
    return errors


def receiver_that_frees_its_model(rank: int, meeting: Meeting) -> None:
    model = build("plain", 1)
    with receiving(meeting, model, stage="none") as receiver:
        take(receiver)
        model.to("meta")
        with pytest.raises(epload.LoadError, match="is on meta; give the model storage first"):
            take(receiver)
        model.to_empty(device="cpu")
        take(receiver)
        check(model, 3)


def test_a_receiver_without_storage_is_no_mistake_of_the_sender() -> None:
    (errors,), _ = run([Job(1, sender_of_three), Job(1, receiver_that_frees_its_model)])
    assert len(errors) == 1
    assert errors[0].startswith("2: ")
    assert "is on meta" in errors[0]


class InterruptedOnce:
    """:meth:`Generation.sync`, but interrupted in place of its second call."""

    calls = 0
    sync = Generation.sync

    def __get__(self, generation: Generation, owner: type) -> Callable[..., None]:
        self.calls += 1
        if self.calls == 2:
            raise KeyboardInterrupt
        return partial(InterruptedOnce.sync, generation)


def outcome_or_interrupt(step: Callable[[], Any]) -> str:
    try:
        return outcome(step)
    except KeyboardInterrupt:
        return "interrupted"


def interrupted_sender(rank: int, meeting: Meeting, sync: Any) -> list[str]:
    model, outcomes = build("plain", 1), []
    with sending(meeting, model, timeout=TIMEOUT) as sender, mock.patch.object(Generation, "sync", sync):
        for version in (1, 2, 3):
            write(model, version)
            outcomes.append(outcome_or_interrupt(partial(sender.send_weights, version)))
    return outcomes


def interrupted_receiver(rank: int, meeting: Meeting, sync: Any) -> list[str]:
    model = build("plain", 1)
    with receiving(meeting, model, timeout=TIMEOUT) as receiver, mock.patch.object(Generation, "sync", sync):
        outcomes = [outcome_or_interrupt(partial(take, receiver)) for _ in range(3)]
        check(model, 3)
    return outcomes


@pytest.mark.parametrize("of_sender", [True, False])
def test_nobody_waits_for_a_rank_that_is_interrupted_before_a_version(of_sender: bool) -> None:
    syncs = [InterruptedOnce(), Generation.sync]
    jobs = [Job(1, interrupted_sender, (syncs[not of_sender],)), Job(1, interrupted_receiver, (syncs[of_sender],))]
    (sent,), (received,) = run(jobs)
    own, others = (sent, received) if of_sender else (received, sent)
    assert own == ["", "interrupted", ""]
    assert others[::2] == ["", ""]
    # A receiver that has not read the start yet hears that the version is canceled.
    assert re.search(r"was interrupted before the version \(KeyboardInterrupt\)|canceled version 2: KeyboardInterrupt", others[1])


def hasty(rank: int, meeting: Meeting) -> str:
    """Is interrupted while a version is compared, and changes the model at once."""
    model, changed, compare = build("plain", 1), threading.Event(), changes_route.compare

    def interrupts(*arguments: Any) -> Any:
        os.kill(os.getpid(), signal.SIGINT)
        for _ in range(100):  # a signal that comes just before a thread begins to wait does not wake it; the next one does
            if changed.wait(0.3):
                return compare(*arguments)
            os.kill(os.getpid(), signal.SIGUSR1)
        raise AssertionError("the model has not changed")

    signal.signal(signal.SIGUSR1, lambda *_: None)

    with sending(meeting, model, timeout=TIMEOUT, snapshot="host", delta="always") as sender:
        write(model, 1)
        sender.send_weights(1)
        write(model, 2)
        with mock.patch.object(changes_route, "compare", interrupts), pytest.raises(KeyboardInterrupt):
            sender.send_weights(2, wait=False)
        write(model, 3)
        changed.set()
        failed = outcome(sender.wait)
        sender.send_weights(4, wait=False)
        write(model, 5)
        sender.wait()
        return failed


def patient(rank: int, meeting: Meeting) -> tuple[str, int | None]:
    model = build("plain", 1)
    with receiving(meeting, model, timeout=TIMEOUT) as receiver:
        take(receiver)
        text, _ = attempt(receiver.receive_weights)
        check(model, 1)
        take(receiver)
        check(model, 3)  # which version 4 has
        return text, receiver.version


def test_a_model_that_changes_after_an_interrupt_is_no_version() -> None:
    (failed,), ((text, version),) = run([Job(1, hasty), Job(1, patient)])
    for error in (failed, text):
        assert "interrupted before the weights were copied" in error
    assert version == 4


def leave_while_sending(rank: int, meeting: Meeting) -> str:
    model = build("plain", 1)
    with suppress(ZeroDivisionError), sending(meeting, model, timeout=TIMEOUT, snapshot="host") as sender:
        sender.send_weights(1, wait=False)
        if rank == 0:
            raise ZeroDivisionError
        return outcome(sender.wait)
    return ""


@pytest.mark.parametrize("world", [1, 2])
def test_an_error_beside_a_send_ends_it(world: int) -> None:
    """Nobody receives, for which it would wait until its timeout."""
    began = time.monotonic()
    ((_, *others),) = run([Job(world, leave_while_sending)])
    assert time.monotonic() < began + TIMEOUT
    assert all("rank 0 has left its WeightSender by ZeroDivisionError" in text for text in others)


def die_while_reading(rank: int, meeting: Meeting) -> None:
    dying = mock.patch.object(ModelTarget, "holdings", side_effect=lambda *_: kill_self())
    with many_waves(), dying, receiving(meeting, build("plain", 1), engine=epload.EngineRank("dying")) as receiver:
        receiver.receive_weights()


def receive_beside(rank: int, meeting: Meeting) -> list[str]:
    model = build("plain", 1)
    with many_waves(), receiving(meeting, model, engine=epload.EngineRank("living")) as receiver:
        outcomes = [outcome(partial(receiver.receive_weights, version)) for version in (1, 2)]
        receiver.commit()
    check(model, 2)
    return outcomes


def send_beside(rank: int, meeting: Meeting) -> tuple[list[str], float]:
    model = build("fsdp", 2)
    with many_waves(), sending(meeting, model, 2, timeout=60) as sender:
        began, outcomes = time.monotonic(), []
        for version in (1, 2):
            write(model, version)
            outcomes.append(outcome(partial(sender.send_weights, version)))
        return outcomes, time.monotonic() - began


def test_nobody_waits_for_an_engine_that_dies_before_it_takes_part() -> None:
    """It dies after it has said that it is ready, and before others know its process."""
    sent, _, ((failed, received),) = run([Job(2, send_beside), Job(1, die_while_reading, dying=(0,)), Job(1, receive_beside)])
    for (first, second), seconds in sent:
        assert re.search("rank 0 of engine dying .* has left or is silent", first)
        assert second == ""
        assert seconds < 30
    assert "has left or is silent" in failed
    assert received == ""


def send_after_a_failure(rank: int, meeting: Meeting, options: dict[str, Any]) -> str:
    model = build("plain", 1)
    with sending(meeting, model, timeout=TIMEOUT, **options) as sender:
        write(model, 1)
        sender.send_weights(1)
        meeting.hear("waits")
        model.to("meta")
        text = outcome(partial(sender.send_weights, 2))
        model.to_empty(device="cpu")
        write(model, 2)
        sender.send_weights(2)
        model.to("meta")
        assert "is on meta" in outcome(partial(sender.send_weights, 3))
        began = time.monotonic()
    assert time.monotonic() - began < 4, "nobody acknowledges a version that was not sent"
    return text


def receive_after_a_failure(rank: int, meeting: Meeting) -> str:
    with receiving(meeting, None, timeout=TIMEOUT) as receiver:
        receiver.receive_weights()
        meeting.say("waits")
        text = outcome(partial(receiver.receive_weights, 2))
        assert not receiver.sender_has_ended()
        receiver.receive_weights(2)
        while not receiver.sender_has_ended():
            time.sleep(0.05)
    return text


@pytest.mark.parametrize(
    "options", [{}, {"mapping": Quantize(fine_grained((16, 16)), weights=("^big$",))}], ids=["", "quantized"]
)
def test_a_sender_that_cannot_read_its_model_tells_those_that_wait_for_the_version(options: dict[str, Any]) -> None:
    """They may do nothing else until then, as an engine that a trainer has made wait."""
    (sent,), (received,) = run([Job(1, send_after_a_failure, (options,)), Job(1, receive_after_a_failure)])
    assert "is on meta; give the model storage first" in sent
    assert received.startswith("the sender canceled version 2: ")
    assert "is on meta" in received
