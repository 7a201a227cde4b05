"""``epload simulate``: a cluster from a file, the size of a checkpoint or a model, a table and a plot."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from safetensors.torch import save_file
from torch import nn
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from epload import Checkpoint
from epload.cli.main import main
from epload.planning.simulator import Cluster, predict

CLUSTER = """
[cluster]
nodes = 6
ranks = 2
link = 1e9
links = 2
storage = 2e9
{more}
[checkpoint]
{checkpoint}
"""
SIZE = "bytes = 1_000_000_000\ntensors = 100"


def make_model() -> nn.Module:
    return nn.Linear(10, 5)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def invoke(*arguments: str, more: str = "", checkpoint: str = SIZE) -> Result:
    Path("cluster.toml").write_text(CLUSTER.format(more=more, checkpoint=checkpoint))
    return CliRunner().invoke(main, ["simulate", "cluster.toml", *arguments])


def simulate(*arguments: str, **content: str) -> Any:
    result = invoke(*arguments, "--json", **content)
    assert (result.exit_code, result.stderr) == (0, ""), result.output
    return json.loads(result.stdout)


def test_seconds_are_those_of_the_simulator(folder: Path) -> None:
    found = simulate()
    assert [each["nodes"] for each in found["results"]] == [1, 2, 4, 6]
    for each in found["results"]:
        cluster = Cluster(each["nodes"], 2, link=1e9, links=2, storage=2e9)
        assert each["seconds"]["one, striped"] == predict("one/striped", 10**9, 100, cluster)
        assert each["seconds"]["flat tree"] == predict("tree", 10**9, 100, cluster)
    assert found["results"][1]["seconds"]["every"] == pytest.approx(10**9 / 2 / 2e9)  # half on each node, at 2 GB/s
    assert "flat ring" in simulate(more="on_device = true")["results"][0]["seconds"]
    assert [each["nodes"] for each in simulate("--nodes", "3", "--nodes", "2")["results"]] == [2, 3]


def test_the_table_marks_the_fastest(folder: Path) -> None:
    result = invoke("--nodes", "2")
    rows = [line.split() for line in result.stdout.splitlines()]
    assert ["every", "0.25", "*"] in rows
    assert sum("*" in row for row in rows) == 2  # and the legend


def test_sizes_of_checkpoints_and_models(folder: Path) -> None:
    save_file({"a": torch.zeros(3), "b": torch.zeros(2, dtype=torch.int8)}, folder / "m.safetensors")
    of_checkpoint = {"name": "m.safetensors", "nbytes": 14, "tensors": 2}
    assert simulate(checkpoint='path = "m.safetensors"')["checkpoint"] == of_checkpoint
    assert simulate("--checkpoint", "m.safetensors")["checkpoint"] == of_checkpoint
    name = f"{__name__}:make_model"
    assert simulate(checkpoint=f'model = "{name}"')["checkpoint"] == {"name": name, "nbytes": 220, "tensors": 2}


def test_a_transformers_model_counts_as_it_is_saved(folder: Path) -> None:
    """Experts are fused in the model and separate in checkpoints; tied weights are saved once."""
    config = Qwen3MoeConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8, num_experts=4,
        num_experts_per_tok=2, moe_intermediate_size=16, intermediate_size=32, vocab_size=61, tie_word_embeddings=True,
        dtype="bfloat16",
    )  # fmt: skip
    Qwen3MoeForCausalLM(config).to(torch.bfloat16).save_pretrained(folder / "moe")
    saved = Checkpoint.open(folder / "moe").manifest
    found = simulate("--model", "moe")["checkpoint"]
    assert (found["nbytes"], found["tensors"]) == (saved.nbytes, len(saved.names))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"more": "speed = 3"}, "got 'speed'"),
        ({"more": "hop = -1.0"}, "expected hop in [cluster] to be a positive float, got -1.0"),
        ({"more": "nodes = 2"}, "expected a TOML file"),
        ({"checkpoint": ""}, "expected path, model, or bytes and tensors in [checkpoint]"),
        ({"checkpoint": "bytes = 3"}, "expected path, model, or bytes and tensors in [checkpoint]"),
        ({"checkpoint": 'path = "absent"'}, "no checkpoint at absent"),
    ],
)
def test_a_wrong_file_gives_one_line(content: dict[str, str], message: str, folder: Path) -> None:
    result = invoke(**content)
    assert (result.exit_code, result.stdout) == (1, "")
    assert message in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_plot(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = invoke("--plot", "plot.svg")
    assert result.exit_code == 0, result.output
    assert "<svg" in (folder / "plot.svg").read_text()
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    absent = invoke("--plot", "other.svg")
    assert (absent.exit_code, absent.stderr) == (1, "epload: --plot needs matplotlib: pip install matplotlib\n")
