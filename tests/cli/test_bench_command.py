"""``epload bench``, with real ranks; and that it notices wrong weights."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from click.testing import CliRunner
from safetensors.torch import save_file
from torch import nn

from epload.cli.bench import command as bench
from epload.cli.bench import worker as bench_worker
from epload.cli.main import main


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """Uneven sizes, and what FSDP does not shard."""
    state = {f"layers.{i}.weight": torch.arange(35.0).reshape(7, 5) + 100 * i for i in range(3)}
    state |= {"steps": torch.tensor(3), "layers.1.scale": torch.tensor([5, 2], dtype=torch.uint8)}
    save_file(state | {"norm": torch.arange(3).bfloat16()}, tmp_path / "m.safetensors")
    return tmp_path / "m.safetensors"


@pytest.fixture
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield
    dist.destroy_process_group()


def test_every_loader_with_two_ranks(checkpoint: Path) -> None:
    arguments = ["bench", str(checkpoint), "--repeat", "2", "--readers", "auto", "--readers", "one", "--json"]
    result = CliRunner().invoke(main, arguments)
    assert (result.exit_code, result.stderr) == (0, ""), result.output
    found = json.loads(result.stdout)
    assert (found["nproc"], found["nbytes"]) == (2, 3 * 35 * 4 + 8 + 2 + 6)
    assert list(found["results"]) == ["epload auto", "epload one", *bench_worker.PEERS]
    for each in found["results"].values():
        assert each["equal"]
        assert len(each["seconds"]) == 2
        assert min(each["seconds"]) > 0


@pytest.mark.parametrize("name", list(bench_worker.PEERS))
def test_wrong_weights_are_noticed(name: str, checkpoint: Path, alone: None) -> None:
    model = bench_worker.make_model(bench_worker.Checkpoint.open(checkpoint).manifest)
    bench_worker.epload_with("every")(model, str(checkpoint))
    expected = bench_worker.digests(model)
    loader = bench_worker.PEERS[name]

    def corrupted(model: nn.Module, path: str) -> str:
        note = loader(model, path)
        model.get_buffer("layers.1.scale")[1] ^= 1
        return note

    assert bench_worker.measure(str(checkpoint), loader, 1, expected)["equal"]
    assert not bench_worker.measure(str(checkpoint), corrupted, 1, expected)["equal"]


def test_a_loader_that_fails_is_listed(tmp_path: Path) -> None:
    """gloo has no broadcast of fp8, so that torch's own loader fails."""
    save_file({"a": torch.ones(4), "b": torch.ones(4).to(torch.float8_e4m3fn)}, tmp_path / "m.safetensors")
    arguments = ["bench", str(tmp_path / "m.safetensors"), "--nproc", "2", "--repeat", "1", "--readers", "every"]
    result = CliRunner().invoke(main, arguments)
    assert (result.exit_code, result.stderr) == (0, ""), result.output
    last = result.stdout.splitlines()[-1]
    assert last.startswith("torch set_model_state_dict")
    assert last.endswith("failed: gloo has no broadcast of float8_e4m3fn")


def test_wrong_weights_give_status_1(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def measured(*arguments: Any) -> dict[str, Any]:
        return {
            name: {"seconds": [1.0], "median": 1.0, "equal": name == "good", "note": ""} for name in ("good", "bad")
        }

    monkeypatch.setattr(bench, "_run", measured)
    result = CliRunner().invoke(main, ["bench", str(checkpoint)])
    assert result.exit_code == 1
    rows = [line.split() for line in result.stdout.splitlines()]
    assert ["bad", "1.000", "1.000", "1.000", "WRONG", "WEIGHTS"] in rows
    assert ["good", "1.000", "1.000", "1.000"] in rows


def test_a_failed_rank_gives_one_line(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(2), "a.b": torch.zeros(2)}, tmp_path / "m.safetensors")
    result = CliRunner().invoke(main, ["bench", str(tmp_path / "m.safetensors"), "--nproc", "1"])
    assert (result.exit_code, result.stdout) == (1, "")
    assert "bench makes a model of the checkpoint's names, and a.b cannot be one" in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_too_little_memory(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "_MEMORY", tmp_path / "meminfo")
    (tmp_path / "meminfo").write_text("MemTotal:       9 kB\nMemAvailable:       0 kB\n")
    result = CliRunner().invoke(main, ["bench", str(checkpoint)])
    assert (result.exit_code, result.stdout) == (1, "")
    assert "bench holds the weights twice, 872 B, and 0 B of memory are available" in result.stderr


def test_ranks_end_with_the_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begin = time.monotonic()
    with pytest.raises(bench.click.ClickException, match=r"did not end in 0.5 s"):
        bench._wait(["sleep", "60"], {"PATH": "/usr/bin:/bin"}, 0.5)
    assert time.monotonic() - begin < 30
