"""The GPU check, rehearsed without a GPU: its parts run, in processes of their own, and one that fails stops no other."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import workload
from gpu_parts import loads

CHECK = Path(__file__).parents[2] / "benchmarks" / "gpu_check.py"


def check(out: Path, *words: str) -> tuple[int, dict[str, Any], str]:
    """Exit status, rows by part, and what was printed."""
    command = [sys.executable, str(CHECK), f"--out={out}", "--checkpoint-gb=0.01", "--layers=1", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=480, check=False)
    results = json.loads((out / "gpu.json").read_text()) if (out / "gpu.json").exists() else {}
    return done.returncode, results, done.stdout + done.stderr


@pytest.mark.usefixtures("fake_device")
def test_a_rehearsal(tmp_path: Path) -> None:
    """Of the parts that do not take long; "load" ends with an error unless every bit is that of the file."""
    status, results, output = check(tmp_path, "--device=cpu", "--parts=page_cache,load,build")
    assert status == 0, output
    assert list(results) == ["machine", "page_cache", "load"], "a GPU's parts are left out"
    rows = {row["what"]: row for part in results.values() for row in part}
    assert not [row for row in rows.values() if "not_run" in row]
    assert rows["load, compared with the file"]["wrong"] == 0
    for what in ("pieces, 1 threads x 2 x 1024 KiB", "load, from meta"):
        assert rows[what]["GB_s"] > 0
        assert what in (tmp_path / "gpu.md").read_text()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_machine_without_a_gpu(tmp_path: Path) -> None:
    status, results, output = check(tmp_path, "--parts=op")
    assert status == 1
    assert list(results) == ["machine"], "no part runs"
    about = {row["what"]: row for row in results["machine"]}
    assert about["machine"]["cpus"] > 0
    assert "--device cpu" in about["torch"]["not_run"]
    assert "NOT RUN, all or in part: machine, op" in output


def test_a_part_that_fails_stops_no_other(tmp_path: Path) -> None:
    """No directory for the checkpoint can be made below a file."""
    (tmp_path / "file").touch()
    status, results, _ = check(tmp_path, "--device=cpu", f"--work={tmp_path / 'file'}", "--parts=page_cache,load")
    assert status == 1
    assert [list(results[part][0]) for part in ("page_cache", "load")] == [["what", "not_run"]] * 2


def test_an_unknown_part(tmp_path: Path) -> None:
    status, results, output = check(tmp_path, "--parts=kernel")
    assert (status, results) == (2, {})
    assert "expected parts among build, load" in output


def test_real_sizes_are_written_and_loaded(tmp_path: Path) -> None:
    """Does on CPU, and small, what the part does where there is a GPU with the memory."""
    size = workload.Size(layers=2, experts=4, hidden=384, intermediate=64, vocabulary=9000)
    workload.write_checkpoint(tmp_path, size, seed=1, varied=True)
    blocks = (tmp_path / workload.FILE).read_bytes()
    assert blocks[1000 : 1 << 20] != blocks[1000 + (16 << 20) :][: (1 << 20) - 1000]
    rows = list(loads.loads("real size", size, tmp_path, torch.device("cpu")))
    assert rows[-1] == {"what": "real size, compared with the file", "wrong": 0}
    model = workload.meta_model(size).to_empty(device="cpu")
    with pytest.raises(RuntimeError, match="differ from the file"):
        loads.check(model, tmp_path, "a check that can fail")
    assert sum(tensor.nbytes for tensor in workload.meta_model(loads.REAL).state_dict().values()) == pytest.approx(
        61.06e9, rel=1e-3
    )
