"""Traces: events of all ranks on one clock, in a file that Perfetto opens; plots; ranges for torch's profiler."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import epload
from epload import HierarchicalLoader, LoadOptions, Topology
from epload.observe import events as events_module
from epload.observe.events import ROUND, Event, Events
from epload.observe.trace import Trace
from support import ranks
from support.checks import all_fine
from support.failures import Slow
from support.small_model import BUCKET, NODES, Net, meta_net, only_readers, state_for, wrong

AHEAD = 10**15
"""Nanoseconds by which the clock of another machine is ahead: 11 days."""


def traced(rank: int, folder: Path, readers: str) -> list[str]:
    loader = HierarchicalLoader(Topology.from_nodes(NODES), readers=readers, bucket_bytes=BUCKET)
    model = meta_net()
    state = state_for(1)
    source = Slow(state, 0.02) if rank == 0 and readers == "one" else only_readers(state, readers)
    report = loader.load(model, source, trace=rank == 2)  # whoever asks, all record
    problems = wrong(model, state)
    before = report.phases["read"].nbytes
    if (
        report.recorder.events is None
        or sum(span.nbytes for span in report.recorder.events.spans if span.phase == "read") != before
    ):
        problems.append(f"events do not count what phases do: {report.recorder.events}")
    report.trace(folder / f"{readers}.json" if rank == 0 else folder / "no" / "such" / "folder")
    report.plot(folder / f"{readers}.png" if rank == 0 else folder / "no" / "such" / "folder")
    again = loader.load(model, state if rank != 0 or readers != "one" else state_for(1))
    if again.recorder.events is not None:
        problems.append("a load that nobody asked to trace is traced")
    return problems


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("traces")
    for readers in ("one", "every"):
        all_fine(ranks.run(4, traced, folder, readers))
    return folder


def test_a_trace_has_what_each_rank_did(folder: Path) -> None:
    content = json.loads((folder / "one.json").read_text())
    names = {event["pid"]: event["args"]["name"] for event in content["traceEvents"] if event["name"] == "process_name"}
    assert names == {0: "rank 0 (node 0)", 1: "rank 1 (node 0)", 2: "rank 2 (node 1)", 3: "rank 3 (node 1)"}
    spans = [event for event in content["traceEvents"] if event["ph"] == "X"]
    phases = {rank: {event["cat"] for event in spans if event["pid"] == rank} for rank in range(4)}
    assert {"read", "inter_node", "unpack", "wait", "round"} <= phases[0]
    assert "read" not in phases[1] | phases[2] | phases[3]
    assert "inter_node" in phases[2]
    assert "inter_node" not in phases[1] | phases[3]
    waits = [event["args"] for event in spans if event["cat"] == "wait" and event["pid"] == 1]
    assert {"rank 0 has relayed wave 0"} <= {args["detail"] for args in waits}
    assert all(args["waits_for"] == [0] for args in waits if args["detail"].startswith("rank 0 has relayed"))
    moved = next(e for e in spans if e["cat"] == "inter_node" and e["pid"] == 2)
    assert "from ranks [0]" in moved["args"]["detail"]
    assert moved["args"]["bytes"] > 0
    lanes = {e["args"]["name"] for e in content["traceEvents"] if e["name"] == "thread_name" and e["pid"] == 0}
    assert {"MainThread", "epload-read", "epload-move"} <= lanes


def test_spans_of_a_thread_nest(folder: Path) -> None:
    """Perfetto draws nothing sensible otherwise."""
    for file in folder.glob("*.json"):
        for events in Trace.load(file).ranks:
            for lane in {span.lane for span in events.spans}:
                open_until: list[int] = []
                spans = [span for span in events.spans if span.lane == lane]
                for span in sorted(spans, key=lambda span: (span.begin, -span.end)):
                    while open_until and open_until[-1] <= span.begin:
                        open_until.pop()
                    assert not open_until or span.end <= open_until[-1], f"{file.name}: {span}"
                    open_until.append(span.end)


def test_a_plot_is_a_picture(folder: Path) -> None:
    for readers in ("one", "every"):
        data = (folder / f"{readers}.png").read_bytes()
        assert data.startswith(b"\x89PNG")
        assert len(data) > 10_000


def test_a_trace_is_what_was_saved(folder: Path, tmp_path: Path) -> None:
    assert all((folder / f"{readers}.png").read_bytes().startswith(b"\x89PNG") for readers in ("one", "every"))
    trace = Trace.load(folder / "one.json")
    trace.save(tmp_path / "again.json")
    assert Trace.load(tmp_path / "again.json") == trace
    (tmp_path / "other.json").write_text('{"traceEvents": []}')
    (tmp_path / "text.json").write_text("no JSON")
    for name in ("other", "text"):
        with pytest.raises(ValueError, match=r"expected a trace that epload has written, got .*json"):
            Trace.load(tmp_path / f"{name}.json")


def test_what_a_report_of_one_rank_can_write(tmp_path: Path) -> None:
    untraced = epload.load(Net(), state_for(1))
    for write in (untraced.trace, untraced.plot):
        with pytest.raises(ValueError, match=r"trace=True\) to epload.load\), or set EPLOAD_TRACE"):
            write(tmp_path / "x.json")
    report = epload.load(Net(), state_for(1), options=LoadOptions(trace=True))
    with mock.patch.dict("sys.modules", {"matplotlib.figure": None}), pytest.raises(ImportError, match="pip install"):
        report.plot(tmp_path / "x.png")
    report.trace(tmp_path / "alone.json")
    assert [events.rank for events in Trace.load(tmp_path / "alone.json").ranks] == [0]
    assert [file.name for file in tmp_path.iterdir()] == ["alone.json"]


def by_environment(rank: int, folder: str) -> bool:
    if rank == 1:
        os.environ["EPLOAD_TRACE"] = "/proc/none"  # only the first rank writes
    if rank == 0:
        os.environ["EPLOAD_TRACE"] = folder
    try:
        loader = HierarchicalLoader(Topology.from_nodes(NODES[:1]), readers="every")
        reports = [loader.load(meta_net(), state_for(1)) for _ in range(2)]
        return all(report.recorder.events is not None for report in reports)
    finally:
        del os.environ["EPLOAD_TRACE"]


def test_each_load_is_traced_into_a_folder(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert ranks.run(2, by_environment, str(tmp_path / "new")) == [True, True]
    files = sorted((tmp_path / "new").iterdir())
    assert [len(Trace.load(file).ranks) for file in files] == [2, 2]
    monkeypatch.setenv("EPLOAD_TRACE", "/proc/none")  # which is no failure
    model = Net()
    epload.load(model, state_for(1))
    assert wrong(model, state_for(1)) == []
    assert "cannot write the trace of the load to /proc/none" in caplog.text


# ---- one clock ----


def events_of(rank: int, clock: str, *rounds: tuple[int, int]) -> Events:
    spans = [Event("MainThread", ROUND, begin, end, 0, str(i)) for i, (begin, end) in enumerate(rounds)]
    return Events(rank, 0, clock, spans)


def test_another_machines_clock_is_known_from_rounds(tmp_path: Path) -> None:
    """Rank 1's clock is 1000 ahead. It comes to the second round just before it is decided, and hears of it soon after."""
    first = events_of(0, "a", (0, 110), (200, 310))
    first.decided = {"0": 100, "1": 300}
    other = events_of(1, "b", (1020, 1150), (1296, 1308))
    trace = Trace.merge([first, other])
    assert trace.accuracy[1] == pytest.approx(6e-9)
    assert trace.ranks[1].spans[1].begin == pytest.approx(296, abs=6)
    unknown = Trace.merge([events_of(0, "a", (0, 110)), events_of(1, "b", (5000, 5100))])
    assert unknown.accuracy == {0: 0.0, 1: math.inf}
    unknown.save(tmp_path / "x.json")
    assert "Infinity" not in (tmp_path / "x.json").read_text()
    assert Trace.load(tmp_path / "x.json").accuracy == unknown.accuracy
    same = Trace.merge([first, events_of(1, "a", (20, 120), (296, 308))])
    assert same.accuracy == {0: 0.0, 1: 0.0}
    assert same.ranks[1].spans[0].begin == 20


def elsewhere(rank: int, file: Path) -> list[str]:
    """Rank 1 is on another machine, whose clock is 11 days ahead."""
    if rank == 1:
        real = events_module.monotonic_ns
        ahead = lambda: real() + AHEAD  # noqa: E731
        patches = [
            mock.patch.object(events_module, "monotonic_ns", ahead),
            mock.patch("epload.observe.phases.monotonic_ns", ahead),
            mock.patch("epload.ranks.rounds.monotonic_ns", ahead),
            mock.patch.object(events_module, "clock_identity", return_value="another machine"),
        ]
        for patch in patches:
            patch.start()
    loader = HierarchicalLoader(Topology.from_nodes([[0], [1]]), readers="one", bucket_bytes=BUCKET)
    model = meta_net()
    source = Slow(state_for(1), 0.01) if rank == 0 else None
    loader.load(model, source)
    report = loader.load(
        model, source, trace=rank == 1
    )  # a reload has few rounds, and the first of them is not recorded here
    report.trace(file)
    return wrong(model, state_for(1))


def test_ranks_of_two_machines_are_shown_on_one_clock(tmp_path: Path) -> None:
    all_fine(ranks.run(2, elsewhere, tmp_path / "two.json"))
    trace = Trace.load(tmp_path / "two.json")
    assert 0 < trace.accuracy[1] < 5
    here, there = trace.ranks
    error = int(trace.accuracy[1] * 1e9) + 1
    read = min(span.begin for span in here.spans if span.phase == "read")
    unpacked = min(span.begin for span in there.spans if span.phase == "unpack")
    assert unpacked >= read - error
    assert trace.end - trace.begin < 120 * 1e9, "11 days are gone"


# ---- rates ----


# ---- torch's profiler ----


def profiled(rank: int) -> set[str]:
    threads = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    loader = HierarchicalLoader(Topology.from_nodes(NODES[:1]), readers="one", bucket_bytes=BUCKET)
    with profile(activities=[ProfilerActivity.CPU], experimental_config=threads) as seen:
        loader.load(meta_net(), only_readers(state_for(1)))
    return {event.name for event in seen.events() if event.name.startswith("epload::")}


def test_torchs_profiler_shows_phases() -> None:
    reader, other = ranks.run(2, profiled)
    assert {"epload::plan", "epload::read", "epload::unpack"} <= reader
    assert {"epload::plan", "epload::unpack", "epload::wait"} <= other
    with mock.patch("torch.profiler.record_function", side_effect=AssertionError):
        epload.load(Net(), state_for(1))  # not profiled: no ranges are made


# ---- failures ----
