"""Traces: events of all ranks on one clock, in a file that Perfetto opens; plots; ranges for torch's profiler."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import epload
from epload import HierarchicalLoader, LoadOptions, Topology
from epload.observe.trace import ROUND, Event, Events, merge_events, save_trace
from support import ranks
from support.checks import all_fine
from support.failures import Slow, must_raise
from support.small_model import BUCKET, NODES, Net, meta_net, only_readers, state_for, wrong


def traced(rank: int, folder: Path, readers: str) -> list[str]:
    loader = HierarchicalLoader(Topology.from_nodes(NODES), readers=readers, bucket_bytes=BUCKET)
    model = meta_net()
    state = state_for(1)
    source = Slow(state, 0.02) if rank == 0 and readers == "one" else only_readers(state, readers)
    report = loader.load(model, source, trace=rank == 2)  # whoever asks, all record
    problems = wrong(model, state)
    before = report.phases["read"].nbytes
    if report.events is None or sum(span.nbytes for span in report.events.spans if span.phase == "read") != before:
        problems.append(f"events do not count what phases do: {report.events}")
    report.trace(folder / f"{readers}.json" if rank == 0 else folder / "no" / "such" / "folder")
    report.plot(folder / f"{readers}.png" if rank == 0 else folder / "no" / "such" / "folder")
    again = loader.load(model, state if rank != 0 or readers != "one" else state_for(1))
    if again.events is not None:
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
    mode = "readers=one, algorithm=two_level"
    assert content["otherData"] == {"epload": epload.__version__, "checkpoint": "state dict", "mode": mode}
    lanes = {e["args"]["name"] for e in content["traceEvents"] if e["name"] == "thread_name" and e["pid"] == 0}
    assert {"MainThread", "epload-read", "epload-move"} <= lanes


def spans_in(file: Path) -> list[dict[str, Any]]:
    return [event for event in json.loads(file.read_text())["traceEvents"] if event["ph"] == "X"]


def test_spans_of_a_thread_nest(folder: Path) -> None:
    """Perfetto draws nothing sensible otherwise."""
    for file in folder.glob("*.json"):
        open_until: dict[tuple[int, int], list[float]] = {}
        for span in sorted(spans_in(file), key=lambda span: (span["ts"], -span["dur"])):
            ends = open_until.setdefault((span["pid"], span["tid"]), [])
            while ends and ends[-1] <= span["ts"]:
                ends.pop()
            assert not ends or span["ts"] + span["dur"] <= ends[-1] + 0.001, f"{file.name}: {span}"
            ends.append(span["ts"] + span["dur"])


def test_a_plot_is_a_picture(folder: Path) -> None:
    for readers in ("one", "every"):
        data = (folder / f"{readers}.png").read_bytes()
        assert data.startswith(b"\x89PNG")
        assert len(data) > 10_000


def test_what_a_report_of_one_rank_can_write(tmp_path: Path) -> None:
    untraced = epload.load(Net(), state_for(1))
    for write in (untraced.trace, untraced.plot):
        must_raise(ValueError, r"trace=True\) to epload.load\), or set EPLOAD_TRACE", write, tmp_path / "x.json")
    report = epload.load(Net(), state_for(1), options=LoadOptions(trace=True))
    with mock.patch.dict("sys.modules", {"matplotlib.figure": None}), pytest.raises(ImportError, match="pip install"):
        report.plot(tmp_path / "x.png")
    report.trace(tmp_path / "alone.json")
    assert {span["pid"] for span in spans_in(tmp_path / "alone.json")} == {0}
    assert [file.name for file in tmp_path.iterdir()] == ["alone.json"]


def by_environment(rank: int, folder: str) -> bool:
    if rank == 1:
        os.environ["EPLOAD_TRACE"] = "/proc/none"  # only the first rank writes
    if rank == 0:
        os.environ["EPLOAD_TRACE"] = folder
    try:
        loader = HierarchicalLoader(Topology.from_nodes(NODES[:1]), readers="every")
        reports = [loader.load(meta_net(), state_for(1)) for _ in range(2)]
        return all(report.events is not None for report in reports)
    finally:
        del os.environ["EPLOAD_TRACE"]


def test_each_load_is_traced_into_a_folder(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert ranks.run(2, by_environment, str(tmp_path / "new")) == [True, True]
    files = sorted((tmp_path / "new").iterdir())
    assert [{span["pid"] for span in spans_in(file)} for file in files] == [{0, 1}] * 2
    monkeypatch.setenv("EPLOAD_TRACE", "/proc/none")  # which is no failure
    model = Net()
    epload.load(model, state_for(1))
    assert wrong(model, state_for(1)) == []
    assert "cannot write the trace of the load to /proc/none" in caplog.text


def test_ranks_of_two_machines_are_shown_on_one_clock(tmp_path: Path) -> None:
    """The second rank's monotonic clock is 1000 ahead. It enters the second round last."""

    def rounds(*begins: int) -> list[Event]:
        return [Event("MainThread", ROUND, begin, begin + 100, 0, str(i)) for i, begin in enumerate(begins)]

    save_trace(
        merge_events([Events(0, 0, 5000, rounds(1, 201)), Events(1, 1, 4000, rounds(1000, 1221))]),
        tmp_path / "x.json",
        {},
    )
    times = [(span["pid"], span["ts"], span["args"].get("waits_for")) for span in spans_in(tmp_path / "x.json")]
    assert times == [(0, 0.001, None), (0, 0.201, [1]), (1, 0.0, [0]), (1, 0.221, None)]


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
