"""What a report says, for people, for notebooks and for experiment trackers."""

from __future__ import annotations

import io
import json
import logging
from contextlib import suppress
from dataclasses import fields
from typing import Any
from unittest import mock

import pytest
import torch

from epload import HierarchicalLoader, LoadReport, SaveReport, SyncReport, Topology
from epload.observe import progress, slow
from epload.observe.progress import Progress
from epload.report import PHASES, Phase
from support import ranks
from support.small_model import NODES, meta_net, state_for


def report(**values: object) -> LoadReport:
    made = LoadReport(readers="every", topology="Topology(4 ranks, rank 0)", **values)  # type: ignore[arg-type]
    made.phases["read"] = Phase(0.5, 463_700_000, 0.1)
    made.phases["plan"] = Phase(0.012, 0, 0.01)
    return made


def test_a_report_is_aligned_and_leaves_out_what_was_not_done() -> None:
    lines = str(report(tensors=18_867, nbytes=927_400_000, buckets=15, seconds=0.651)).splitlines()
    assert lines == [
        "loaded 18,867 tensors, 927.4 MB in 0.651 s (1.42 GB/s)",
        "  topology  Topology(4 ranks, rank 0)",
        "  mode      readers=every: each rank reads its own shards",
        "  buckets   15",
        "  plan        0.012 s",
        "  read        0.500 s      463.7 MB   0.93 GB/s",
    ]


def test_details_of_the_text() -> None:
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
    assert repr(report(missing_keys=["a"] * 99, tensors=2, seconds=1.0)) == (
        "<LoadReport: loaded 2 tensors, 0 B in 1.000 s (0 B/s)>"
    )
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


def test_time_and_bytes_of_a_block_go_to_its_phase_also_if_it_fails() -> None:
    made = LoadReport()
    with suppress(KeyError), made.timed("read") as block:
        block.nbytes = 5
        raise KeyError
    assert made.phases["read"].nbytes == 5
    assert made.phases["read"].seconds > 0
    assert made.phases["unpack"] == Phase()


# ---- logging ----


def logged(rank: int) -> list[tuple[str, str]]:
    records: list[tuple[str, str]] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append((record.levelname, record.getMessage()))  # type: ignore[method-assign]
    logging.getLogger("epload").addHandler(handler)
    logging.getLogger("epload").setLevel(logging.INFO)
    state = state_for(1)
    model = meta_net()
    with HierarchicalLoader(Topology.from_nodes(NODES), readers="every") as loader:
        loader.load(model, state)
        records.clear()
        del state["norm.bias"]
        state["stray"] = torch.ones(2)
        small = mock.patch.multiple(slow, _MIN_BYTES=1, _MIN_SECONDS=0.05)
        real = slow.pace
        late = mock.patch("epload.loading.run.pace", lambda nbytes, s: real(nbytes, s if rank != 2 else s + 0.5))
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


def test_progress_without_a_terminal_is_log_lines(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "epload")
    with mock.patch.object(progress, "_LOG_SECONDS", 0.0), Progress(4_000_000, shown=True) as bar:
        bar.update(1_000_000)
        bar.update(3_000_000)
    assert [text.split(",")[0] for text in caplog.messages] == ["25% of 4.0 MB", "100% of 4.0 MB"]
    caplog.clear()
    with mock.patch.object(progress, "_LOG_SECONDS", 0.0), Progress(4_000_000, shown=False) as bar:
        bar.update(1_000_000)
    with Progress(4_000_000, shown=True) as bar:
        bar.update(1_000_000)
    assert caplog.messages == [], "not shown, or too early"


def test_progress_in_a_terminal_is_a_bar(caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]) -> None:
    caplog.set_level(logging.INFO, "epload")
    with (
        mock.patch.object(progress, "_LOG_SECONDS", 0.0),
        mock.patch("sys.stderr.isatty", return_value=True),
        Progress(4_000_000, shown=True) as bar,
    ):
        bar.update(1_000_000)
    assert "epload" in capsys.readouterr().err
    assert caplog.messages == []


@pytest.mark.parametrize("stderr", [None, io.StringIO(), object()], ids=["none", "closed", "an object"])
def test_progress_without_a_usual_standard_error_is_logged(stderr: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "epload")
    if isinstance(stderr, io.StringIO):
        stderr.close()
    with (
        mock.patch.object(progress, "_LOG_SECONDS", 0.0),
        mock.patch("sys.stderr", stderr),
        Progress(4_000_000, shown=True) as bar,
    ):
        bar.update(1_000_000)
    assert [text.split(",")[0] for text in caplog.messages] == ["25% of 4.0 MB"]
