"""The commands: what they print, and what they return."""

from __future__ import annotations

import json
import os
import pickle
import re
import resource
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from itertools import product
from pathlib import Path

import click
import pytest
import torch
import torch.distributed as dist
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

import epload
from epload.cli import doctor
from epload.cli.folding import fold
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


def unfold(name: str) -> Iterator[str]:
    """The names that a folded name stands for: the reference."""
    parts = [
        [str(i) for run in part[1:-1].split(",") for i in range(int(run.split("..")[0]), int(run.split("..")[-1]) + 1)]
        if part.startswith("{")
        else [part]
        for part in re.split(r"(\{[^}]*\})", name)
    ]
    return map("".join, product(*parts))


@given(st.sets(st.tuples(st.integers(0, 4), st.integers(8, 12), st.sampled_from(["", "x", "y"]))))
def test_lines_stand_for_the_names(found: set[tuple[int, int, str]]) -> None:
    names = {f"layers.{i}.experts.{j}{f'.{end}' if end else ''}": end != "x" for i, j, end in sorted(found)}
    check(names)


def check(names: Mapping[str, object]) -> list[str]:
    """Returns the lines."""
    folded = fold(names)
    assert sorted(name for line, _, _ in folded for name in unfold(line)) == sorted(names)
    for line, value, count in folded:
        assert {names[name] for name in unfold(line)} == {value}
        assert len(list(unfold(line))) == count
    return [line for line, _, _ in folded]


def test_numbers_inside_words() -> None:
    """Leading zeros and digits of other scripts are kept: the lines would otherwise stand for other names."""
    names = [f"block{i}.conv{j}_{k}" for i in range(2) for j in range(3) for k in range(1, 3)]
    assert check(dict.fromkeys(names)) == ["block{0..1}.conv{0..2}_{1..2}"]
    kept = ["layer.007.w", "layer.07.w", "layer.\u0663.w", f"layer.{'9' * 5000}.w"]
    assert check(dict.fromkeys(kept)) == kept


def test_every_check_has_a_finding() -> None:
    result = CliRunner().invoke(main, ["doctor", "--json"])
    findings = {each["check"]: each for each in json.loads(result.stdout)["findings"]}
    assert len(findings) == 6
    assert {each["status"] for each in findings.values()} <= {"ok", "warn", "fail"}
    assert all(each["advice"] for each in findings.values() if each["status"] != "ok")
    assert result.exit_code == any(each["status"] == "fail" for each in findings.values())
    assert findings["build"]["status"] == findings["store"]["status"] == "ok"


def test_a_failed_check_gives_status_1_and_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    good, bad = ("ok", "fine", ""), ("fail", "broken", "mend it")
    monkeypatch.setattr(doctor, "CHECKS", {"a": lambda: good, "b": lambda: bad})
    result = CliRunner().invoke(main, ["doctor"])
    assert result.exit_code == 1
    rows = [line.split() for line in result.stdout.splitlines()]
    assert rows[1:3] == [["a", "ok", "fine"], ["b", "fail", "broken"]]
    assert rows[-1] == ["b", "mend", "it"]
    monkeypatch.setattr(doctor, "CHECKS", {"a": lambda: good})
    assert CliRunner().invoke(main, ["doctor"]).exit_code == 0


@pytest.mark.parametrize(
    ("free", "limit", "status"),
    [(64 << 20, "max", "warn"), (4 << 30, "max", "ok"), (4 << 30, str(1 << 30), "warn"), (4 << 30, str(3 << 30), "ok")],
)
def test_shared_memory(free: int, limit: str, status: str, tmp_path: Path) -> None:
    """A container has a limit, of which it uses a GiB."""
    memory = tmp_path / "meminfo"
    memory.write_text(f"MemTotal: 99 kB\nMemAvailable:   {free // 1024} kB\n")
    (tmp_path / "memory.max").write_text(f"{limit}\n")
    (tmp_path / "memory.current").write_text(f"{1 << 30}\n")
    assert doctor.check_shared_memory(memory, tmp_path)[0] == status
    assert doctor.check_shared_memory(memory, tmp_path / "absent")[0] == ("warn" if free < 1 << 30 else "ok")


def test_what_a_machine_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object, **options: object) -> None:
        raise dist.DistNetworkError("connection refused") if options else PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(doctor.os, "memfd_create", refuse)
    monkeypatch.setattr(doctor.dist, "TCPStore", refuse)
    memory, store = doctor.check_shared_memory(), doctor.check_store()
    assert (memory[0], store[0]) == ("warn", "fail")
    assert "Operation not permitted" in memory[1]
    assert "connection refused" in store[1]
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (1000, hard))
        assert doctor.check_limits()[0] == "warn"
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_slow_lookup_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_name(address: str) -> None:
        raise OSError("no name")

    assert doctor.check_lookup(no_name)[0] == "ok"
    monkeypatch.setattr(doctor, "_SLOW_LOOKUP", 0.04)
    slow = doctor.check_lookup(lambda address: time.sleep(0.05))
    assert slow[0] == "warn"
    assert "/etc/hosts" in slow[2]
