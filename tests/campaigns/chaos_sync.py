"""A campaign of seeded faults in live weight sync, each judged: whoever lives holds one whole version, hears of a failure in
time, and leaves nothing behind.

    python -m campaigns.chaos_sync --faults 30 --seed 0

A trainer of two ranks, an engine of two and one of one sync four versions; one rank has a fault at some point of the second.
In two of three runs another engine joins late, so that those hand a version on to it; in half of them with a token, and some
that join have another one. Models are on CPU, or all on a fake accelerator with NCCL's or HCCL's semantics.
"""

from __future__ import annotations

import random
import sys
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import epload
from campaigns import seeds
from epload.ranks.control import Control
from epload.sync.changes import ReceivedChanges
from epload.sync.node_version import NodeVersion
from epload.sync.participants import ReceiverRendezvous, SenderRendezvous
from epload.transfer.engine import Engine
from epload.transfer.shards import Shards
from support import fakedev
from support.accelerator import DEVICE
from support.fakedev import build as build_fake
from support.jobs import Job, Meeting, run
from support.ranks import RankFailed
from support.small_syncs import many_waves
from support.synced_models import build, check, write

TIMEOUT = 9.0
"""More than a look-up of a name that is not answered takes, for which a TCPStore makes all others wait."""
IN_TIME = 4 * TIMEOUT + 20
"""Seconds that a call may take: waits of a timeout may follow one another, and this machine may be busy."""
VERSIONS = 4
KINDS = ("kill", "stop", "raise", "memory", "slow", "wrong version", "late", "leave")
PHASES = ("announce", "ready", "compare", "data", "commit", "changes", "apply")
HANDING_ON = "hand on"
"""The phase of a rank that hands a version on, whenever that is."""
TOKEN = "a secret of both jobs"
DELTAS = ("off", "auto", "always")
PLACES = ("cpu", *fakedev.SEMANTICS)
VICTIMS = ("trainer 0", "trainer 1", "pair 0", "pair 1", "single 0")


class Fault(NamedTuple):
    kind: str
    phase: str
    victim: str
    wave: int
    stage: str
    verify: bool
    place: str
    """One of ``PLACES``."""
    delta: str
    period: int
    """An element changes in every so many versions."""
    joins: int = 0
    """The version before which another engine joins; 0 for none."""
    pause: float = 0.0
    """Seconds from then to that version."""
    token: str = ""
    rogue: bool = False
    """True if the engine that joins has another token at first."""

    @classmethod
    def of(cls, seed: int) -> Fault:
        chance = random.Random(seed)
        kind, phase, victim = chance.choice(KINDS), chance.choice(PHASES), chance.choice(VICTIMS)
        if kind in ("wrong version", "late", "leave"):
            victim = "single 0"
        if victim.startswith("trainer") and phase in ("changes", "apply"):
            phase = "data"
        if victim == "trainer 1" and phase == "announce":  # the first rank announces
            phase = "ready"
        stage, verify = chance.choice(("host", "host", "none")), chance.choice((False, True))
        wave, place = chance.randrange(4), chance.choice(PLACES)
        delta, period = chance.choice(DELTAS), chance.choice((1, 7))
        joins, pause, token = chance.choice((0, 2, 3)), chance.uniform(0, 2), chance.choice(("", TOKEN))
        if joins and stage == "host" and kind in ("kill", "stop", "raise", "slow"):
            if victim.startswith(("pair", "single")) and chance.random() < 0.5:
                phase = HANDING_ON
            elif chance.random() < 0.3:
                victim = "joiner 0"
        rogue = bool(joins and token and chance.random() < 0.5)
        return cls(kind, phase, victim, wave, stage, verify, place, delta, period, joins, pause, token, rogue)

    @property
    def device(self) -> str:
        return "cpu" if self.place == "cpu" else DEVICE

    @property
    def dies(self) -> bool:
        return self.kind in ("kill", "stop")


def armed(fault: Fault, now: bool) -> AbstractContextManager[Any]:
    """Returns a context in which the victim's fault happens when it comes to its phase. ``now``: False without a fault."""
    is_trainer = fault.victim.startswith("trainer")
    rendezvous = (SenderRendezvous, "announce") if is_trainer else (ReceiverRendezvous, "get_ready")
    places: dict[str, tuple[type, str, Callable[..., bool]]] = {
        "announce": (*rendezvous, lambda *args: True),
        "ready": (Control, "agree", lambda control, what, *rest: what == "getting ready"),
        "compare": (Control, "agree", lambda control, what, *rest: what == "comparing with the version before"),
        "changes": (ReceivedChanges, "apply", lambda *args: True),  # after the commit, which counts on the other ranks
        "commit": (Control, "agree", lambda control, what, *rest: what == "committing the version"),
        "apply": (NodeVersion, "unpack", lambda *args: True),
        HANDING_ON: (Shards, "pack", lambda *args: threading.current_thread().name == "epload-hand-on"),
        # From device to device, a rank has only the waves that it takes part in.
        "data": (Engine, "_move", lambda engine, wave: wave.index == min(fault.wave, len(engine._waves) - 1)),
    }
    if not now or fault.phase not in places or fault.kind not in ("kill", "stop", "raise", "memory", "slow"):
        return nullcontext()
    owner, method, applies = places[fault.phase]
    return seeds.Moments([(owner, method)], 0, lambda *args: seeds.act(fault.kind, TIMEOUT), applies=applies)


def call(step: Callable[[], Any]) -> tuple[str, float]:
    """The error's text, and the seconds that it took."""
    began = time.monotonic()
    try:
        step()
        return "", time.monotonic() - began
    except (epload.LoadError, ValueError, RuntimeError, MemoryError) as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - began


def trainer(rank: int, meeting: Meeting, fault: Fault) -> dict[str, Any]:
    mine = fault.victim == f"trainer {rank}"
    found: list[Any] = []
    with many_waves(60_000, 3.0):
        model = build("fsdp", 2, where=fault.device)
        receivers = 2 if fault.kind == "late" else 3
        sender = epload.WeightSender(
            model, ("127.0.0.1", 0), receivers=receivers, timeout=TIMEOUT, verify=fault.verify, delta=fault.delta,
            token=fault.token,
        )  # fmt: skip
        meeting.say(f"address-{rank}", sender.address)
        for version in range(1, VERSIONS + 1):
            if fault.kind == "late" and version == VERSIONS:
                meeting.hear("late")
            if version == fault.joins:
                meeting.say("join")
                time.sleep(fault.pause)
            write(model, version, fault.period)
            with armed(fault, mine and version == 2):
                found.append((version, *call(lambda v=version: sender.send_weights(v))))  # type: ignore[misc]
            if mine and version == 2 and fault.dies:
                seeds.act(fault.kind, TIMEOUT)  # it did not come to its phase
        sender.close()
        meeting.say(f"over-{rank}")
    return {"calls": found, "left": seeds.left_over()}


def engine(rank: int, meeting: Meeting, fault: Fault, name: str) -> dict[str, Any]:
    mine = fault.victim == f"{name} {rank}"
    found: list[Any] = []
    wrong: list[str] = []
    if mine and fault.kind == "late":
        time.sleep(0.5 * fault.wave)
    handing_on = mine and fault.phase == HANDING_ON
    with many_waves(60_000, 3.0), armed(fault, handing_on):
        model = build("tp0" if name == "pair" else "plain", 2 if name == "pair" else 1, where=fault.device)
        address, options = meeting.hear("address-0"), {"stage": fault.stage, "verify": fault.verify}
        if name == "joiner":
            meeting.hear("join")
            if fault.rogue and not call(lambda: epload.WeightReceiver(model, address, timeout=TIMEOUT, token="other"))[0]:
                wrong.append("a rogue engine was let in")
        try:
            receiver = epload.WeightReceiver(model, address, timeout=TIMEOUT, token=fault.token, **options)
        except epload.LoadError as error:
            if name != "joiner":
                raise
            # The trainer has ended before.
            if mine and fault.dies:
                seeds.act(fault.kind, TIMEOUT)
            return {"calls": [(None, str(error), 0.0)], "wrong": wrong, "left": seeds.left_over()}
        if mine and fault.kind == "late":
            meeting.say("late")
        for number in range(1, 2 * VERSIONS + 1):
            now = mine and not handing_on and number == 2
            if now and fault.kind == "leave":
                receiver.close()
                break
            asked = 77 if now and fault.kind == "wrong version" else None
            with armed(fault, now):
                text, seconds = call(lambda a=asked: receiver.receive_weights(a))  # type: ignore[misc]
                if not text:
                    text, more = call(receiver.commit)
                    seconds += more
            if now and fault.dies:
                seeds.act(fault.kind, TIMEOUT)  # it did not come to its phase
            if receiver.version is not None:
                try:
                    check(model, receiver.version, period=fault.period)
                except AssertionError as error:
                    wrong.append(f"version {receiver.version}: {error}")
            found.append((receiver.version, text, seconds))
            ended = receiver.version == VERSIONS or "store is lost" in text or "closed" in text
            if mine and fault.dies and (ended or number == VERSIONS):
                seeds.act(fault.kind, TIMEOUT)  # nobody has asked for its version, or the trainer has ended before
            if ended:
                break
        receiver.close()
    return {"calls": found, "wrong": wrong, "left": seeds.left_over()}


def judge(seed: int) -> tuple[str, str]:
    """The verdict on one fault, and why."""
    fault = Fault.of(seed)

    def dying(job: str) -> tuple[int, ...]:
        return (int(fault.victim[-1]),) if fault.dies and fault.victim.startswith(job) else ()

    setup = partial(fakedev.setup, fault.place, lazy=True) if fault.place != "cpu" else None
    if setup is not None:
        build_fake.library()
    try:
        jobs = run(
            [
                Job(2, trainer, (fault,), dying("trainer"), setup),
                Job(2, engine, (fault, "pair"), dying("pair"), setup),
                Job(1, engine, (fault, "single"), dying("single"), setup),
                *([Job(1, engine, (fault, "joiner"), dying("joiner"), setup)] if fault.joins else []),
            ],
            limit=300,
        )
    except RankFailed as error:
        return "hang" if seeds.has_hung(error) else "failed", f"{fault}\n{error}"
    answers = [answer for job in jobs for answer in job if answer is not None]
    problems = []
    for answer in answers:
        if answer.get("wrong"):
            return "wrong", f"{fault}: {answer['wrong']}"
        if answer["left"]:
            problems.append(("leak", f"{fault}: threads {answer['left']}"))
        if late := [one for one in answer["calls"] if one[-1] > IN_TIME]:
            problems.append(("late", f"{fault}: {late}"))
    sent = [answer["calls"] for answer in jobs[0] if answer is not None]
    for version, text, _ in sent[0] if sent else ():
        others = {one[1] for calls in sent for one in calls if one[0] == version}
        if len(others) > 1:
            problems.append(("differ", f"{fault}: {others}"))
        got = {answer["calls"][-1][0] for job in jobs[1:] for answer in job if answer is not None}
        if not text and version == VERSIONS and fault.kind != "leave" and VERSIONS not in got:
            problems.append(("failed", f"{fault}: the last version was sent, but the receivers hold {got}"))
    if not fault.dies and sent and sent[0][-1][1]:
        problems.append(("failed", f"{fault}: the last version was not sent: {sent[0][-1][1]}"))
    return problems[0] if problems else ("right", str(fault))


if __name__ == "__main__":
    sys.exit(seeds.run(__doc__, judge, ("right",)))
