"""``epload plan``: what it says of ranks that do not run, against torch's own sharding and what a load of one rank does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from click.testing import CliRunner
from safetensors.torch import save_file
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

import epload
from epload.cli.main import main
from support import ranks


def make_plain() -> nn.Module:
    """Sizes that divide unevenly."""
    return nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 11))


def make_parallel(mesh: Any) -> nn.Module:
    return parallelize_module(make_plain(), mesh["model"], {"0": ColwiseParallel(), "1": RowwiseParallel()})


def plan(*arguments: str | Path, status: int = 0) -> Any:
    result = CliRunner().invoke(main, ["plan", *map(str, arguments), "--json"])
    assert (result.exit_code, result.stderr) == (status, ""), result.output
    assert not dist.is_initialized()
    return json.loads(result.stdout)


@pytest.fixture
def moe(tmp_path: Path) -> Path:
    config = Qwen3MoeConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8, num_experts=4,
        num_experts_per_tok=2, moe_intermediate_size=16, intermediate_size=32, vocab_size=61,
    )  # fmt: skip
    Qwen3MoeForCausalLM(config).save_pretrained(tmp_path)
    return tmp_path


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    save_file(make_plain().state_dict(), tmp_path / "m.safetensors")
    return tmp_path / "m.safetensors"


def test_one_rank_is_what_a_load_reports(moe: Path) -> None:
    found = plan(moe)
    with torch.device("meta"):
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig.from_pretrained(moe))
    report = epload.load(model, moe)
    assert (found["nbytes"], found["tensors"]) == (report.nbytes, report.tensors)
    assert found["owned"] == {"0": report.nbytes}
    assert [mode["buckets"] for mode in found["modes"] if mode["readers"] == "every"] == [report.buckets]
    assert found["fit"]["error"] == ""


@pytest.mark.parametrize("mesh", ["fsdp=3", "fsdp=2", "replicate=2,fsdp=2", "fsdp=8"])
def test_bytes_of_each_rank_are_those_of_torchs_chunks(mesh: str, plain: Path) -> None:
    found = plan(plain, "--model", f"{__name__}:make_plain", "--mesh", mesh)
    shards = int(mesh[-1])
    expected = []
    for number in range(found["world"]):
        chunks = [torch.chunk(tensor, shards) for tensor in make_plain().state_dict().values()]
        expected.append(sum(parts[number % shards].nbytes for parts in chunks if number % shards < len(parts)))
    assert list(found["owned"].values()) == expected


def test_tensor_parallel_plan_of_transformers(moe: Path) -> None:
    """Weights that the plan shards are kept once by the ranks together, the others by each."""
    whole = plan(moe)["nbytes"]
    both = plan(moe, "--mesh", "tp=2")["owned"]
    replicated = 2 * (2 * 32 + 4 * 32 + 2 * 8) * 4 + 32 * 4  # norms and router of two layers, and the last norm
    assert sum(both.values()) == whole + replicated
    assert sum(plan(moe, "--mesh", "fsdp=2,tp=2")["owned"].values()) == whole + replicated


def test_a_function_parallelizes_by_itself(plain: Path) -> None:
    arguments = [plain, "--model", f"{__name__}:make_parallel", "--mesh", "model=2"]
    owned = plan(*arguments)["owned"]
    columns = [3, 2]  # of 5, which the second layer's rows share; its bias is whole on both
    assert list(owned.values()) == [4 * (n * 7 + n + 11 * n + 11) for n in columns]


def test_links_carry_the_bytes_of_other_nodes(moe: Path) -> None:
    found = plan(moe, "--mesh", "fsdp=4", "--nodes", "2", "--readers", "one", "--readers", "per_node")
    one, per_node = found["modes"]
    assert one["received"] == [0, one["sent"][0]]
    assert one["received"][1] >= found["nbytes"]
    assert per_node["received"] == per_node["sent"] == [0, 0]


def test_prediction_and_choice_follow_the_assumed_rates(tmp_path: Path) -> None:
    """A slow store, fast links and ranks that keep everything: each byte should be read once."""
    torch.save({"0.weight": torch.empty(20_000_000), "0.bias": torch.empty(1)}, tmp_path / "m.pt")
    arguments = [tmp_path / "m.pt", "--model", f"{__name__}:make_long", "--mesh", "replicate=4,fsdp=1", "--nodes", "4"]
    slow = plan(*arguments, "--storage", "0.01", "--link", "10")
    assert slow["choice"] == "partitioned"
    assert "(at the assumed rates)" in slow["reason"]
    seconds = {mode["readers"]: mode["seconds"] for mode in slow["modes"]}
    assert seconds["partitioned"] < min(seconds[name] for name in ("one", "per_node", "every"))
    assert seconds["every"] == pytest.approx(slow["nbytes"] / 0.01e9)
    fast = plan(*arguments, "--storage", "100", "--link", "0.001")
    assert fast["choice"] == "every"


class Long(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.empty(20_000_000)), nn.Parameter(torch.empty(1))


def make_long() -> nn.Module:
    return nn.Sequential(Long())


def test_what_would_fail(plain: Path, tmp_path: Path) -> None:
    state = make_plain().state_dict()
    state["extra"] = state.pop("0.bias")
    state["1.weight"] = torch.zeros(11, 6)
    save_file(state, tmp_path / "other.safetensors")
    arguments = [tmp_path / "other.safetensors", "--model", f"{__name__}:make_plain"]
    fit = plan(*arguments, status=1)["fit"]
    assert (fit["missing"], fit["unexpected"], list(fit["mismatched"])) == (["0.bias"], ["extra"], ["1.weight"])
    with pytest.raises(epload.ModelMismatch) as caught:
        epload.load(make_plain(), tmp_path / "other.safetensors")
    assert str(caught.value) == f"{fit['error']} [rank 0]"
    text = CliRunner().invoke(main, ["plan", *map(str, arguments)])
    assert "This load would fail" in text.stdout
    assert text.exit_code == 1


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["--mesh", "fsdp"], 1, "expected a mesh such as fsdp=8,tp=2, got 'fsdp'"),
        (["--mesh", "fsdp=3", "--nodes", "2"], 2, "expected as many ranks on each of 2 nodes"),
        (["--mesh", "ep=2"], 1, "expected mesh axes among replicate, fsdp, tp, got ep"),
        (["--mesh", "tp=2"], 1, "declares no plan for tensor parallelism"),
        (["--link", "0"], 2, "expected rates above 0"),
        (["--model", "json:nothing"], 1, "json has no 'nothing'"),
    ],
)
def test_wrong_arguments(arguments: list[str], status: int, message: str, plain: Path) -> None:
    model = [] if "--model" in arguments else ["--model", f"{__name__}:make_plain"]
    result = CliRunner().invoke(main, ["plan", str(plain), *model, *arguments])
    assert (result.exit_code, result.stdout) == (status, "")
    assert message in result.stderr
    assert not dist.is_initialized()


def load_really(rank: int, path: str, readers: str) -> tuple[int, int, int]:
    """On two nodes of one rank. Returns buckets, bytes of staging buffers, and bytes of this rank's shards."""
    with torch.device("meta"):
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig.from_pretrained(path))
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    with epload.HierarchicalLoader(epload.Topology.from_nodes([[0], [1]]), readers=readers) as loader:
        report = loader.load(model, path)
    return report.buckets, report.peak_staging, sum(p.to_local().nbytes for p in model.parameters())


def test_a_real_load_is_as_planned(moe: Path) -> None:
    found = plan(moe, "--mesh", "fsdp=2", "--nodes", "2")
    assert len(found["modes"]) == 4
    for mode in found["modes"]:
        loads = ranks.run(2, load_really, str(moe), mode["readers"])
        assert [buckets for buckets, _, _ in loads] == [mode["buckets"]] * 2
        assert [nbytes for _, _, nbytes in loads] == list(found["owned"].values())
        if mode["readers"] != "every":
            assert mode["staging"] == pytest.approx(loads[0][1], abs=2 * 4096)
