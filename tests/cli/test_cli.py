"""The command line, run in this process and once as a module."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import epload
from epload.cli.main import main


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    state = {"layer.weight": torch.zeros(3, 5, dtype=torch.bfloat16), "steps": torch.zeros((), dtype=torch.int64)}
    save_file(state, tmp_path / "model.safetensors")
    torch.save(state, tmp_path / "model.pt")
    return tmp_path


@pytest.mark.parametrize("name", ["", "model.safetensors", "model.pt"])
def test_inspect_lists_the_tensors(name: str, checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(checkpoint / name)]) == 0
    output = capsys.readouterr()
    rows = {line.split()[-1]: line.split() for line in output.out.splitlines()[:-1]}
    assert rows == {"layer.weight": ["bfloat16", "[3,", "5]", "layer.weight"], "steps": ["int64", "[]", "steps"]}
    assert output.out.splitlines()[-1] == "2 tensors, 0.000 GB"
    assert output.err == ""


def test_info_prints_versions(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info"]) == 0
    output = dict(line.split(": ", 1) for line in capsys.readouterr().out.splitlines())
    assert output["torch_version"].split("+")[0] == torch.__version__.split("+")[0]
    assert output == {key: str(value) for key, value in epload.build_info().items()}


@pytest.mark.parametrize("content", [None, b"", b"\0" * 8, b"\xff" * 64], ids=["absent", "empty", "zeros", "ones"])
def test_a_malformed_file_gives_one_line_and_status_1(
    content: bytes | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "bad.safetensors"
    if content is not None:
        path.write_bytes(content)
    assert main(["inspect", str(path)]) == 1
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith("epload: ")
    assert str(path) in output.err
    assert len(output.err.splitlines()) == 1


@pytest.mark.parametrize("arguments", [[], ["inspect"], ["nonsense"], ["info", "more"]])
def test_wrong_arguments_are_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert "usage: epload" in capsys.readouterr().err


def test_as_a_module(checkpoint: Path) -> None:
    command = [sys.executable, "-m", "epload", "inspect"]
    good = subprocess.run([*command, str(checkpoint)], capture_output=True, text=True, timeout=60)
    assert (good.returncode, good.stderr) == (0, "")
    assert "layer.weight" in good.stdout
    bad = subprocess.run([*command, str(checkpoint / "absent")], capture_output=True, text=True, timeout=60)
    assert (bad.returncode, bad.stdout) == (1, "")
    assert bad.stderr.startswith("epload: no checkpoint at")


@pytest.mark.parametrize("name", ["", "model.safetensors", "model.pt"])
def test_verify_reads_everything_and_finds_nothing(
    name: str, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", str(checkpoint / name)]) == 0
    assert capsys.readouterr().out.endswith("every byte read, no tensor with NaN or Inf\n")


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.float8_e5m2]
)
def test_verify_counts_nan_and_inf(
    dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also where a tensor is read in several pieces."""
    monkeypatch.setattr("epload.verify.audit._CHUNK_BYTES", 64)
    values = torch.zeros(100)
    values[[1, 50, 99]], values[[0, 98]] = float("nan"), float("-inf")
    save_file(
        {"bad": values.to(dtype), "good": torch.ones(100), "whole": torch.ones(7, dtype=torch.int8)},
        tmp_path / "m.safetensors",
    )
    assert main(["verify", str(tmp_path / "m.safetensors")]) == 1
    out = capsys.readouterr().out.splitlines()
    assert out[0] == "bad: 3 NaN and 2 Inf in 100 elements"
    assert out[1].startswith("3 tensors, ")
    assert out[1].endswith(" 1 tensor with NaN or Inf")
    assert len(out) == 2


def test_verify_names_a_malformed_file(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = checkpoint / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    assert main(["verify", str(path)]) == 1
    output = capsys.readouterr()
    assert "is truncated" in output.err
    assert output.out == ""
