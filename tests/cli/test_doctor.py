"""``epload doctor``: each check on a machine that is fit, and on one that is not."""

from __future__ import annotations

import json
import resource
import time
from pathlib import Path

import pytest
import torch.distributed as dist
from click.testing import CliRunner

from epload.cli import doctor
from epload.cli.main import main


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
