"""Reports and traces: texts for people, notebooks and experiment trackers, and events for Perfetto and torch's profiler."""

from __future__ import annotations

import io
import json
import logging
import os
import sys
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

import epload
from epload import HierarchicalLoader, LoadOptions, LoadReport, LocalModules, SaveReport, SyncReport, Topology
from epload.observe import progress, slow
from epload.observe.progress import Progress
from epload.observe.trace import ROUND, Event, Events, merge_events, save_trace
from epload.report import PHASES, Phase
from support import ranks
from support.checks import all_fine
from support.failures import Slow, must_raise
from support.small_model import BUCKET, NODES, Net, meta_net, only_readers, state_for, wrong


def report(**values: object) -> LoadReport:
    made = LoadReport(readers="every", topology="Topology(4 ranks, rank 0)", **values)  # type: ignore[arg-type]
    made.phases["read"] = Phase(0.5, 463_700_000, 0.1)
    made.phases["plan"] = Phase(0.012, 0, 0.01)
    return made


def test_a_report_is_aligned_and_leaves_out_what_was_not_done() -> None:
    assert str(report(tensors=18_867, nbytes=927_400_000, buckets=15, seconds=0.651)).splitlines() == [
        "loaded 18,867 tensors, 927.4 MB in 0.651 s (1.42 GB/s)",
        "  topology  Topology(4 ranks, rank 0)",
        "  mode      readers=every: each rank reads its own shards",
        "  buckets   15",
        "  plan        0.012 s",
        "  read        0.500 s      463.7 MB   0.93 GB/s",
    ]
    made = report()
    made.phases["unpack"] = Phase(0.02, 4_000_000_000, 0.01)
    assert "\n  unpack      0.020 s        4.0 GB" in str(made)
    assert "GB/s" not in str(made).splitlines()[-1], "a rate of buckets that pass by"
    made.phases["unpack"] = Phase(0.0001, 4_000_000_000, 0.0)  # a rank that keeps nothing
    assert "unpack" not in str(made)
    text = str(report(tensors=1, buckets=1, nbytes=12, casts=1, seconds=2.0, missing_keys=["a"]))
    assert "loaded 1 tensor, 12 B in 2.000 s (6 B/s)" in text
    assert "the dtype of 1 tensor was converted" in text
    assert "missing   1 tensor: a" in text
    text = str(report(unexpected_keys=[f"k{i}" for i in range(2_000)]))
    assert "2,000 tensors: k0, k1, k2, k3, k4 and 1,995 more" in text


def test_reports_in_one_line() -> None:
    text = "<LoadReport: loaded 2 tensors, 0 B in 1.000 s (0 B/s)>"
    assert repr(report(missing_keys=["a"] * 99, tensors=2, seconds=1.0)) == text
    assert repr(SyncReport(version=3, stage="host")).startswith("<SyncReport: received version 3: 0 tensors")
    assert report(tensors=2, seconds=1.0).summary == "loaded 2 tensors, 0 B in 1.000 s (0 B/s); readers=every"
    verified = report(tensors=2, seconds=1.0, verified=True)
    assert verified.summary == "loaded 2 tensors, 0 B in 1.000 s (0 B/s); readers=every, verified"
    assert "\n  verified  shards equal the checkpoint, which was read once more\n" in str(verified)
    saved = SaveReport(tensors=2, nbytes=2_000_000, seconds=0.5, files=1, path="a")
    assert saved.summary == "saved 2 tensors, 2.0 MB in 1 file, 0.500 s (4.0 MB/s), to a"
    assert list(saved.to_dict()["phases"]) == ["plan", "pack", "write", "sync"]


def test_a_report_is_numbers_and_json_with_every_field() -> None:
    made = report(tensors=7, nbytes=1000, seconds=0.5, missing_keys=["a", "b"])
    scalars = made.scalars()
    assert scalars["epload/bytes_per_second"] == 2000
    assert scalars["epload/missing_keys"] == 2
    assert scalars["epload/read/nbytes"] == 463_700_000
    assert "epload/unpack/seconds" not in scalars
    assert all(type(value) in (int, float) for value in scalars.values())
    assert report().scalars(prefix="")["read/seconds"] == 0.5
    content = json.loads(json.dumps(made.to_dict()))
    assert set(content) == {each.name for each in fields(LoadReport)}
    assert set(content["phases"]) == set(PHASES)
    made = LoadReport()  # time and bytes of a block go to its phase also if it fails
    with suppress(KeyError), made.timed("read") as block:
        block.nbytes = 5
        raise KeyError
    assert made.phases["read"].nbytes == 5
    assert made.phases["read"].seconds > 0
    assert made.phases["unpack"] == Phase()


def listen() -> list[tuple[str, str]]:
    """Returns a list to which the log's records are added."""
    records: list[tuple[str, str]] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append((record.levelname, record.getMessage()))  # type: ignore[method-assign]
    logging.getLogger("epload").addHandler(handler)
    logging.getLogger("epload").setLevel(logging.INFO)
    return records


def logged(rank: int) -> list[tuple[str, str]]:
    records = listen()
    state = state_for(1)
    model = meta_net()
    with HierarchicalLoader(Topology.from_nodes(NODES), readers="every") as loader:
        loader.load(model, state)
        records.clear()
        del state["norm.bias"]
        state["stray"] = torch.ones(2)
        small = mock.patch.multiple(slow, _MIN_BYTES=1, _MIN_SECONDS=60)
        real = slow.pace
        late = mock.patch("epload.loading.run.pace", lambda nbytes, s: real(nbytes, s + 1000 * (rank == 2)))
        with small, late, mock.patch.object(progress, "_LOG_SECONDS", 0.0):
            loader.load(model, state, strict=False)
    return records


def test_a_load_says_what_it_does_on_one_rank() -> None:
    first, *others = ranks.run(4, logged)
    assert others == [[], [], []]
    texts = [text for level, text in first if level == "INFO"]
    assert texts[0] == "loading a dict into FSDPNet, on 4 ranks of 2 nodes"
    assert texts[1] == "readers=every"
    assert any("% of 0.0 MB, " in text for text in texts[2:-1]), "standard error is no terminal"
    assert texts[-1].startswith("loaded 13 tensors, ")
    assert texts[-1].endswith("; readers=every")
    warned = [text for level, text in first if level == "WARNING"]
    assert warned[0].startswith("read slower than the median rank: rank 2 ")
    assert warned[1:] == [
        "not filled, keep their values: 1 tensor: norm.bias",
        "not loaded, as the model lacks them: 1 tensor: stray",
    ]


class Stage(nn.Module):
    """Only rank 1's has a buffer that no checkpoint fills."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.register_parameter(f"w{rank}", nn.Parameter(torch.zeros(3)))
        if rank == 1:
            self.register_buffer("mask", torch.ones(3), persistent=False)


def logged_by_stage(rank: int) -> list[tuple[str, str]]:
    records = listen()
    with HierarchicalLoader(progress=False) as loader:
        loader.load(Stage(rank), {"w0": torch.ones(3), "w1": torch.ones(3)}, local_modules=[LocalModules("")])
    return records


def test_a_rank_with_modules_of_its_own_logs_its_warnings() -> None:
    first, second = ranks.run(2, logged_by_stage)
    assert {level for level, _ in first} == {"INFO"}
    [(level, text)] = second
    assert level == "WARNING"
    assert "non-persistent buffers are in no checkpoint, and the model cannot compute 1 tensor: mask" in text


def test_progress_is_a_bar_in_a_terminal_and_else_log_lines(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.INFO, "epload")
    with Progress(4_000_000, shown=True) as bar:
        bar.update(1_000_000)
    assert caplog.messages == [], "too early"
    closed = io.StringIO()
    closed.close()
    terminal = mock.Mock(wraps=sys.stderr, isatty=lambda: True)
    for stderr, shown in (
        (sys.stderr, True), (None, True), (closed, True), (object(), True), (sys.stderr, False), (terminal, True),
    ):  # fmt: skip
        caplog.clear()
        late, other = mock.patch.object(progress, "_LOG_SECONDS", 0.0), mock.patch("sys.stderr", stderr)
        with late, other, Progress(4_000_000, shown=shown) as bar:
            bar.update(1_000_000)
            bar.update(3_000_000)
        expected = ["25% of 4.0 MB", "100% of 4.0 MB"] if shown and stderr is not terminal else []
        assert [text.split(",")[0] for text in caplog.messages] == expected
        assert ("epload" in capsys.readouterr().err) == (stderr is terminal)


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


def test_a_plot_is_a_picture_and_spans_of_a_thread_nest(folder: Path) -> None:
    """Perfetto draws nothing sensible otherwise."""
    for file in folder.glob("*.json"):
        data = file.with_suffix(".png").read_bytes()
        assert data.startswith(b"\x89PNG")
        assert len(data) > 10_000
        open_until: dict[tuple[int, int], list[float]] = {}
        for span in sorted(spans_in(file), key=lambda span: (span["ts"], -span["dur"])):
            ends = open_until.setdefault((span["pid"], span["tid"]), [])
            while ends and ends[-1] <= span["ts"]:
                ends.pop()
            assert not ends or span["ts"] + span["dur"] <= ends[-1] + 0.001, f"{file.name}: {span}"
            ends.append(span["ts"] + span["dur"])


def test_what_a_report_of_one_rank_can_write(tmp_path: Path) -> None:
    untraced = epload.load(Net(), state_for(1))
    for write in (untraced.trace, untraced.plot):
        must_raise(ValueError, r"trace=True\) to epload.load\), or set EPLOAD_TRACE", write, tmp_path / "x.json")
    report = epload.load(Net(), state_for(1), options=LoadOptions(trace=True))
    with mock.patch.dict("sys.modules", {"matplotlib.figure": None}):
        must_raise(ImportError, "pip install", report.plot, tmp_path / "x.png")
    report.trace(tmp_path / "alone.json")
    assert {span["pid"] for span in spans_in(tmp_path / "alone.json")} == {0}
    assert [file.name for file in tmp_path.iterdir()] == ["alone.json"]


def observed(rank: int, folder: str) -> set[str]:
    """Returns what torch's profiler shows of a load."""
    threads = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    loader = HierarchicalLoader(Topology.from_nodes(NODES[:1]), readers="one", bucket_bytes=BUCKET)
    with profile(activities=[ProfilerActivity.CPU], experimental_config=threads) as seen:
        loader.load(meta_net(), only_readers(state_for(1)))
    os.environ["EPLOAD_TRACE"] = "/proc/none" if rank else folder  # only the first rank writes
    loader = HierarchicalLoader(Topology.from_nodes(NODES[:1]), readers="every")
    reports = [loader.load(meta_net(), state_for(1)) for _ in range(2)]
    assert all(report.events is not None for report in reports)
    return {event.name for event in seen.events() if event.name.startswith("epload::")}


def test_each_load_is_traced_into_a_folder_or_shown_by_torchs_profiler(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with mock.patch("torch.profiler.record_function", side_effect=AssertionError):
        epload.load(Net(), state_for(1))  # not profiled: no ranges are made
    reader, other = ranks.run(2, observed, str(tmp_path / "new"))
    assert {"epload::plan", "epload::read", "epload::unpack"} <= reader
    assert {"epload::plan", "epload::unpack", "epload::wait"} <= other
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

    events = [Events(0, 0, 5000, rounds(1, 201)), Events(1, 1, 4000, rounds(1000, 1221))]
    save_trace(merge_events(events), tmp_path / "x.json", {})
    times = [(span["pid"], span["ts"], span["args"].get("waits_for")) for span in spans_in(tmp_path / "x.json")]
    assert times == [(0, 0.001, None), (0, 0.201, [1]), (1, 0.0, [0]), (1, 0.221, None)]
