"""The two jobs of a sync of small models, with every check that holds for all of them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch

import epload
from support import fakedev
from support.accelerator import DEVICE
from support.device_syncs import mapped_of, on_machine, topology_of
from support.jobs import Job, Meeting
from support.small_syncs import kill_self, many_waves, outcome, receiving, sending
from support.synced_models import build, check, write

VERSIONS = (1, 2, 3)
Context = Callable[[], AbstractContextManager[Any]]


def send(
    rank: int, meeting: Meeting, layout: str, world: int, receivers: int, nodes: Any = None, where: str = "cpu",
    machines: tuple[str, ...] = ("",) * 4, between: Callable[[torch.nn.Module], None] = lambda model: None,
    within: Context = nullcontext, dtype: torch.dtype = torch.float32, versions: Sequence[int] = VERSIONS,
    write: Callable[[torch.nn.Module, int], None] = write, snapshot: str = "none", until: str = "", **options: Any,
) -> list[epload.SyncReport]:  # fmt: skip
    """Sends versions, which ``write`` gives to a model. With a snapshot it has another one while they are sent. Leaves after the
    event ``until``."""
    with many_waves(), on_machine(machines[rank]), within():
        model = build(layout, world, dtype, where)
        topology = epload.Topology.from_nodes(nodes) if nodes else topology_of(machines, world)
        reports = []
        with sending(meeting, model, receivers, topology=topology, snapshot=snapshot, **options) as sender:
            meeting.say(f"pid-{rank}", str(os.getpid()))
            for version in versions:
                write(model, version)
                report = sender.send_weights(version, wait=snapshot == "none")
                if snapshot != "none":
                    write(model, 7 - version)
                    report = sender.wait()
                reports.append(report)
                between(model)
            if until:
                meeting.hear(until)
    return reports


def receive(
    rank: int, meeting: Meeting, layout: str, world: int, nodes: Any = None, where: str = "cpu",
    dtype: torch.dtype = torch.float32, stage: str = "host", machine: str = "", within: Context = nullcontext,
    versions: Sequence[int] = VERSIONS, check: Callable[[Any, int], None] = check, uncommitted: int = 0, after: str = "",
    until: str = "", **options: Any,
) -> list[epload.SyncReport]:  # fmt: skip
    """Receives versions, and checks what the model holds. Joins and leaves after the events ``after`` and ``until``.

    Args:
        layout: "full" takes full tensors, without a model.
        uncommitted: a version that is received and not committed.
    """
    with many_waves(), on_machine(machine), within():
        model = build(layout, world, dtype, where) if layout != "full" else None
        topology = epload.Topology.from_nodes(nodes) if nodes else None
        reports = []
        if after:
            meeting.hear(after)
        with receiving(meeting, model, topology=topology, stage=stage, **options) as receiver:
            for version in versions:
                before = receiver.version
                reports.append(receiver.receive_weights(version))
                if model is None:
                    check(dict(receiver.tensors()), version)
                    continue
                if where == DEVICE:
                    assert not mapped_of(int(meeting.hear("pid-0"))), "a sender's memory is still open"
                if stage != "none":
                    assert (receiver.version, receiver.staged) == (before, version)
                    if before is not None:
                        check(model, before)
                if version == uncommitted:
                    continue
                receiver.commit()
                assert (receiver.version, receiver.partially_updated) == (version, False)
                check(model, version)
                meeting.say(f"{machine}-{version}")
            if until:
                meeting.hear(until)
    return reports


def jobs_of(
    trainer: Any, engines: Sequence[Any], sends: Callable[..., Any], receives: Callable[..., Any], semantics: str = ""
) -> list[Job]:
    """Returns the jobs of a sync.

    Args:
        trainer: layout, number of ranks, nodes and place.
        engines: the same of each, and its stage.
        semantics: those of the fake device, whose memory other processes cannot open; empty for none.
    """
    setup = partial(fakedev.setup, semantics, shares=False) if semantics else None
    layout, world, nodes, where = trainer
    receivers = sum(count for _, count, *_ in engines)
    jobs = [Job(world, partial(sends, nodes=nodes, where=where), (layout, world, receivers), setup=setup)]
    for layout, count, nodes, where, stage in engines:
        jobs.append(Job(count, partial(receives, nodes=nodes, where=where, stage=stage), (layout, count), setup=setup))
    return jobs


def send_model(
    rank: int, meeting: Meeting, make: Callable[[], torch.nn.Module],
    change: Callable[[Any, int], None] = lambda model, version: None, versions: int = 1, receivers: int = 1, timeout: float = 30,
    **options: Any,
) -> list[str]:  # fmt: skip
    """Sends versions of any model; returns what each raised."""
    model, outcomes = make(), []
    with sending(meeting, model, receivers, timeout, **options) as sender:
        for version in range(1, versions + 1):
            with torch.no_grad():
                change(model, version)
            outcomes.append(outcome(partial(sender.send_weights, version)))
    return outcomes


def fail() -> None:
    raise RuntimeError("a broken receiver")


def engine(
    rank: int, meeting: Meeting, name: str, world: int, plan: list[str], stage: str, where: str,
    acting: Callable[[Callable[[], None]], AbstractContextManager[Any]],
) -> list[tuple[str, int | None, bool]]:  # fmt: skip
    """Receives versions, and checks that it holds a whole one or says that it does not.

    Args:
        plan: for each version what it does in the middle of it, "" for nothing.
        acting: a context in which a function is called there.

    Returns:
        What each version raised, the version then, and whether the model is partially updated.
    """

    def tell() -> None:
        meeting.say("in the second")
        control = receiver._generation.control
        while control.known_failure() is None:
            time.sleep(0.01)

    acts = {"die": kill_self, "fail": fail, "tell": tell}
    with many_waves():
        model = build("tp0" if world > 1 else "plain", world, where=where)
        outcomes = []
        with receiving(meeting, model, stage=stage) as receiver:
            meeting.say(f"{name}-{rank}-joined")
            for step in plan:
                if step == "die waiting":
                    meeting.say(f"{name}-{rank}-dies")
                    kill_self()
                with acting(acts[step]) if step else nullcontext():
                    text = outcome(receiver.receive_weights)
                if not text:
                    receiver.commit()
                if receiver.version is not None and not receiver.partially_updated:
                    check(model, receiver.version)
                outcomes.append((text, receiver.version, receiver.partially_updated))
            meeting.hear("over-0")
        return outcomes
