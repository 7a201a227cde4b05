"""Credentials, in whatever form a URL has them, are in nothing that leaves the program."""

from __future__ import annotations

import json
import logging
import pickle
import traceback
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from torch import Tensor, nn

import epload
from epload import Checkpoint, CheckpointError, LoadError, ModelMismatch
from epload.checkpoint import object_store
from epload.cli.main import main
from epload.cli.output import print_json
from epload.core.log import logger
from epload.errors import message_of, redact, redact_url
from epload.observe.trace import Event, Events, merge_events, save_trace
from support import ranks
from support.failures import error_of, must_raise

SECRET = "hunter2"
URLS = {
    "https://me:hunter2@127.0.0.1:1/a/m.safetensors?X-Amz-Signature=hunter2": "https://127.0.0.1:1/a/m.safetensors",
    "https://hunter2@host/a": "https://host/a",
    "https://host/a?sig=hunter2": "https://host/a",
    "https://host/a?token=hunter2&email=a@b": "https://host/a",
    "https://host/a#access_token=hunter2": "https://host/a",
    "https://host/a;sig=hunter2": "https://host/a;sig=...",
    "simplecache::http://user:hunter2@host/m.bin": "simplecache::http://host/m.bin",
    "zip://m.bin::https://user:hunter2@host/a.zip?sig=hunter2": "zip://host/a.zip",
    "s3://a:hunter2@one/x::http://b:hunter2@two/y": "s3://two/y",
    "s3://key:hunter2/x@bucket/a": "s3://bucket/a",
    "s3://key:12/hunter2@bucket/a": "s3://bucket/a",
    "s3://key:x?hunter2@bucket/a": "a malformed URL",
    "s3://key:12?hunter2@bucket/a": "a malformed URL",
    "s3://key:x#hunter2@bucket/a": "a malformed URL",
    "s3://key:x@hunter2@bucket/a": "s3://bucket/a",
    "s3://key:hunter2": "a malformed URL",
    "s3://key:a'hunter2@bucket": "s3://bucket",
    "s3://key:a hunter2@bucket": "s3://bucket",
    "S3://key:hunter2@bucket": "S3://bucket",
    "s3:/key:hunter2@bucket/a": "s3:/bucket/a",
    "s3:/key:hunter2/x@bucket/a": "s3:/bucket/a",
    "s3:///key:hunter2@bucket/a": "s3:///bucket/a",
    "hf://user:hunter2@org/name": "hf://org/name",
    "hf://hunter2@org/name": "hf://org/name",
    "github://hunter2/org/repo": "github://.../org/repo",
    "github://org:hunter2@main/a": "github://main/a",
    "https://[hunter2": "a malformed URL",
    "https://[::1]:hunter2/a": "a malformed URL",
}
UNCHANGED = [
    "/data/a:b@c", "org/name", "hf://org/name@main", "s3://bucket/a/b", "gs://bucket/a@1/b", "http://localhost:8080/a",
    "http://[::1]:8080/a", "file:///tmp/a", "see https://huggingface.co/docs: it has no revision v2", "s3:// is no URL",
    "layers.0.sig", "s3://bucket: no checkpoint; ask admin@example.org", "rank 3 on tcp://node7: lost, seen by user@node1",
    "http://127.0.0.1:1234: error", "see https://ui.perfetto.dev.", "file:///a@b/c", "Basic training of it",
    "expected hf://org/name or hf://org/name@revision, got 'hf://a/b/c'",
]  # fmt: skip


@pytest.mark.parametrize(("url", "shown"), URLS.items())
def test_urls(url: str, shown: str) -> None:
    assert redact_url(url) == shown
    assert redact(url) == shown
    text = redact(f"GET '{url}' failed ({url}), see https://host/b: {url}")
    assert SECRET not in text
    assert text.startswith("GET '")


def test_other_texts() -> None:
    assert [redact(text) for text in UNCHANGED] == UNCHANGED
    for text in (
        "hf_hunter2hunter2hunter2", "ghp_hunter2hunter2hunter2", "github_pat_hunter2_hunter2_hunter2",
        "Authorization: Bearer hunter2.hunter2", "AWS_SECRET_ACCESS_KEY=hunter2", "AccountKey=hunter2",
        "<Error>X-Amz-Signature=hunter2</Error>", "X-Amz-Security-Token=hunter2&a=b", "sig=hunter2", "Password=hunter2",
    ):  # fmt: skip
        assert SECRET not in redact(f"the server said: {text}.")
    for part in ("a.", "a:", "a:/", "://", "s3://a:b", "@", "x:/y:z ", "sig=", "X-Amz-"):
        redact(part * 50_000)


@pytest.mark.parametrize(
    "url",
    [
        "https://me:hunter2@127.0.0.1:1/a/m.safetensors?X-Amz-Signature=hunter2", "simplecache::http://user:hunter2@host/m.bin",
        "s3://key:hunter2/x@bucket/a", "s3:/key:hunter2@bucket/a", "s3://key:hunter2", "hf://user:hunter2@org/name",
        "github://hunter2/org/repo", "https://[hunter2",
    ],
)  # fmt: skip
def test_opening(url: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error and the log have the secret neither in their texts nor in those of their causes."""
    monkeypatch.setattr(object_store, "ATTEMPTS", 1)
    caplog.set_level("DEBUG", "epload")
    for call in (
        lambda: Checkpoint.open(url),
        lambda: Checkpoint.open(Path(url)),
        lambda: epload.load(nn.Linear(2, 2), url, progress=False),
        lambda: epload.load_state({"w": torch.zeros(2)}, url, progress=False),
    ):
        error = must_raise(LoadError, ".", call)
        assert SECRET not in "".join(traceback.format_exception_only(error))
        cause = error.__cause__
        assert cause is None or SECRET not in str(cause)
    assert SECRET not in caplog.text
    for command in (["inspect", url], ["verify", url], ["diff", url, url], ["convert", url, "/nonexistent/out"]):
        result = CliRunner().invoke(main, command)
        assert result.exit_code == 1
        assert SECRET not in result.output


URL = "https://user:hunter2@host/a"


def test_errors_keep_their_attributes() -> None:
    error = ModelMismatch(f"{URL} has no w", missing_keys=["w"])
    assert str(error) == "https://host/a has no w"
    assert error.missing_keys == ["w"]
    assert str(pickle.loads(pickle.dumps(CheckpointError(URL)))) == "https://host/a"
    assert str(CheckpointError()) == ""
    assert message_of(ValueError(URL)) == "https://host/a"


class Constant(Checkpoint):
    """A checkpoint of the user's own, with a source that has a secret, which may fail with it."""

    def __init__(self, fails: bool = False) -> None:
        self._fails = fails
        self._manifest = epload.Manifest(("weight",), ((2, 2),), (torch.float32,), source=URL)

    @property
    def manifest(self) -> epload.Manifest:
        return self._manifest

    def fill(self, bucket: Tensor, pieces: Sequence[epload.Piece]) -> None:
        if self._fails:
            raise RuntimeError(f"GET {URL} failed")
        bucket.zero_()


def _fail(rank: int) -> str:
    model, source = nn.Linear(2, 2, bias=False), Constant(fails=True)
    return error_of(lambda: epload.load(model, source, readers="one", progress=False))


def test_reports_and_what_a_client_says_on_another_rank() -> None:
    report = epload.load(nn.Linear(2, 2, bias=False), Constant(), progress=False)
    assert report.source == "https://host/a"
    assert SECRET not in f"{report}{report!r}{report.to_dict()}"
    first, second = ranks.run(2, _fail)
    assert first == second
    assert SECRET not in first
    assert "GET https://host/a failed" in first


def test_logs_traces_and_json(tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]) -> None:
    caplog.set_level(logging.INFO, "epload")
    logger.info("loading %s, %d ranks", URL, 2)
    logger.info("%d ranks", 2)
    assert [record.getMessage() for record in caplog.records] == ["loading https://host/a, 2 ranks", "2 ranks"]
    assert caplog.records[1].args == (2,)
    events = Events(0, spans=[Event("MainThread", "read", 0, 1, detail=URL, name=URL)])
    save_trace(merge_events([events]), tmp_path / "load.json", {})
    text = (tmp_path / "load.json").read_text()
    assert SECRET not in text
    assert text.count("https://host/a") == 2
    print_json({"source": URL, URL: [URL, 1.5]})
    shown = json.loads(capsys.readouterr().out)
    assert shown == {"source": "https://host/a", "https://host/a": ["https://host/a", 1.5]}
