"""Running SGLang engines and servers that take versions from a trainer in another process, against transformers' tokens."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from engine import CONFIGS, make_checkpoint

from support.jobs import session
from support.small_syncs import names_culprit

LIMIT = 240.0
"""Seconds that a scenario may take."""


def run(scenario: str, folder: Path, *numbers: int) -> Any:
    command = [sys.executable, str(Path(__file__).with_name("serving.py")), scenario, str(folder), *map(str, numbers)]
    with open(folder / "output", "w+") as output:
        with session(command, stdout=output, stderr=subprocess.STDOUT) as process:
            try:
                status = process.wait(LIMIT)
            except subprocess.TimeoutExpired:
                status = -1
        output.seek(0)
        lines = output.read().splitlines()
    replies = [line for line in lines if line.startswith("{")]
    assert [status, len(replies)] == [0, 1], "\n".join([f"{scenario} ended with {status}", *lines[-60:]])
    return json.loads(replies[-1])


def test_an_engine_serves_each_version_as_transformers_does(tmp_path: Path) -> None:
    """Two ranks. The sender waits in the middle of the second version, and dies in the fifth."""
    make_checkpoint(tmp_path, CONFIGS["large"], std=0.2)
    found = run("versions", tmp_path, 2)
    first, second, third, fourth = found["expected"][:4]
    assert len({tuple(tokens) for tokens in (first, second, third, fourth)}) == 4
    assert found["tokens"] == found["expected"]
    assert found["staged"] == first, "an engine generates with the old weights until it commits"
    assert found["meanwhile"] == [second] * 3
    assert found["labels"] == ["default"] * 2 + ["1"] * 4 + ["2"] + ["3"] * 3
    assert "expected epload_receive to be called before" in found["early"]
    assert "expected epload_commit to be called before" in found["pending"]
    assert "has not arrived within 0.1 s" in found["arriving"]
    # A request that runs while a version is committed goes on with it, and with nothing that older weights computed.
    assert found["across"] == [found["expected across"], ["2", "3"]]
    for text in found["refused"]:
        assert "expected version 7, but the sender announced 4" in text
    assert names_culprit(found["died"], "0")


def test_experts_are_as_sglang_loads_them(tmp_path: Path) -> None:
    """Two ranks, each with half of the experts, for which SGLang cannot compute on CPU."""
    make_checkpoint(tmp_path, CONFIGS["qwen3_moe"], std=0.2)
    found = run("digests", tmp_path, 2, 2)
    assert found["synced"] == found["loaded"]
    first, second, third = ([rank["model.layers.0.mlp.experts.w13_weight"] for rank in ranks] for ranks in found["synced"])
    assert len({*first, *second, *third}) == 6


def test_a_server_takes_versions_over_http(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, CONFIGS["llama"], std=0.2)
    found = run("server", tmp_path, 2)
    old, new = found["expected"]
    assert [tokens for tokens, _ in found["tokens"]] == [old, old, new, new]
    assert old != new
    assert [version for _, version in found["tokens"][2:]] == ["1", "1"]
    assert found["started"][0] is found["committed"][0] is True
    for (success, text), part in zip(
        [*found["wrong"], found["refused"]],
        ["'recieve'", "'address'", "expected weight_version='1'", "expected version 7, but the sender announced 2"],
        strict=True,
    ):
        assert not success
        assert part in text


def test_sglang_finds_the_plugin_by_its_entry_point() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    found = {point.name: point.value for point in entry_points(group="sglang.srt.plugins")}
    assert found == project["entry-points"]["sglang.srt.plugins"]
