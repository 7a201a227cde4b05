"""The command line as a whole: help, versions, errors and exit codes; in this process, and as real ones."""

from __future__ import annotations

import json
import os
import pickle
import re
import subprocess
import sys
from pathlib import Path

import click
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import save_file

import epload
from epload.cli.main import main


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    save_file(
        {"layer.weight": torch.zeros(3, 5), "steps": torch.zeros((), dtype=torch.int64)}, tmp_path / "m.safetensors"
    )
    return tmp_path


def test_help_version_and_info() -> None:
    result = CliRunner().invoke(main, [])
    assert (result.exit_code, result.stderr) == (0, "")
    for name in main.commands:
        assert f"\n  {name} " in result.stdout
    result = CliRunner().invoke(main, ["--version"])
    assert (result.exit_code, result.stdout) == (0, f"epload, version {epload.__version__}\n")
    info = epload.build_info()
    lines = CliRunner().invoke(main, ["info"]).stdout.splitlines()
    assert [" ".join(line.split(maxsplit=1)[1:]) for line in lines] == [
        str(value) for value in info.values() if value != ""
    ]
    assert json.loads(CliRunner().invoke(main, ["info", "--json"]).stdout) == info


@pytest.mark.parametrize("name", sorted(main.commands))
def test_every_command_has_help_and_json(name: str) -> None:
    command = main.commands[name]
    assert "--json" in [option for parameter in command.params for option in parameter.opts]
    result = CliRunner().invoke(main, [name, "--help"])
    assert (result.exit_code, result.stderr) == (0, "")
    assert command.get_short_help_str(200) in " ".join(result.stdout.split())
    paragraphs = re.split(r"\n\n *", command.help.strip())
    helps = [p.help for p in command.params if isinstance(p, click.Option)] + paragraphs
    fragments = [
        text for text in helps if not re.fullmatch(r"(?!(Of|Also|By|In|With)\b)[A-Z].*\.", text or "", re.DOTALL)
    ]
    assert fragments == []


def without_torch(arguments: list[str], tmp_path: Path) -> tuple[int, str, str]:
    """Runs the command where an import of torch fails. Returns its exit status and what it prints."""
    (tmp_path / "torch.py").write_text("raise AssertionError('torch is imported')")
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{Path(epload.__file__).parents[1]}"}
    command = [sys.executable, "-m", "epload", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("name", ["", *sorted(main.commands)])
def test_help_imports_no_torch(name: str, tmp_path: Path) -> None:
    status, printed, errors = without_torch([*name.split(), "--help"], tmp_path)
    assert (status, errors) == (0, "")
    assert printed.startswith("Usage: epload ")


@pytest.mark.parametrize("code", ["import torch, epload", "import epload, torch; epload.load"])
def test_the_ops_are_there(code: str) -> None:
    code = f"{code}; torch.ops.epload.coalesced_bcast"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


def test_what_refers_to_the_module_can_be_sent() -> None:
    """Ray pickles functions with the modules that they name."""
    assert pickle.loads(pickle.dumps(epload)) is epload


@pytest.mark.parametrize("arguments", [["inspect"], ["nonsense"], ["info", "more"], ["inspect", "x", "--filter", "("]])
def test_wrong_arguments_give_one_line_and_status_2(arguments: list[str]) -> None:
    result = CliRunner().invoke(main, arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("epload: ")
    assert result.stderr.endswith("--help'.\n")
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize("content", [None, b"", b"\0" * 8, b"\xff" * 64], ids=["absent", "empty", "zeros", "ones"])
@pytest.mark.parametrize(
    "command", [["inspect"], ["verify"], ["diff", "m.safetensors"]], ids=lambda command: command[0]
)
def test_a_malformed_file_gives_one_line_and_status_1(
    command: list[str], content: bytes | None, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(checkpoint)
    path = checkpoint / "bad.safetensors"
    if content is not None:
        path.write_bytes(content)
    result = CliRunner().invoke(main, [*command, str(path)])
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith("epload: ")
    assert str(path) in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_as_a_process(checkpoint: Path) -> None:
    """Without colors, as its output is no terminal; and when nobody reads all of it."""
    command = [sys.executable, "-m", "epload", "inspect"]
    good = subprocess.run([*command, str(checkpoint)], capture_output=True, text=True, timeout=60)
    assert (good.returncode, good.stderr) == (0, "")
    assert "layer.weight" in good.stdout
    assert "\x1b" not in good.stdout
    bad = subprocess.run([*command, str(checkpoint / "absent")], capture_output=True, text=True, timeout=60)
    assert (bad.returncode, bad.stdout) == (1, "")
    assert bad.stderr.startswith("epload: no checkpoint at")
    code = "import sys, epload; print([name for name in ('click', 'epload.cli') if name in sys.modules])"
    library = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert library.stdout == "[]\n", "importing epload imports nothing of the command line"
