"""``epload plan``: what it says of ranks that do not run, against torch's own sharding and what loads of one rank report."""

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
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

import epload
from epload.cli.main import main

ROUTED = DeepseekV3Config(
    hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=4, vocab_size=64,
    n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, q_lora_rank=8, kv_lora_rank=8, qk_rope_head_dim=4,
    qk_nope_head_dim=4, v_head_dim=8, n_group=2, topk_group=1, first_k_dense_replace=0,
)  # fmt: skip
PLAIN = f"{__name__}:make_plain"


def make_plain() -> nn.Module:
    """Sizes that divide unevenly."""
    return nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 11))


def make_sharded() -> nn.Module:
    return fully_shard(make_plain())


def make_parallel(mesh: Any) -> nn.Module:
    return parallelize_module(make_plain(), mesh["model"], {"0": ColwiseParallel(), "1": RowwiseParallel()})


def plan(*arguments: str | Path, status: int = 0) -> Any:
    result = CliRunner().invoke(main, ["plan", *map(str, arguments), "--json"])
    assert (result.exit_code, result.stderr) == (status, ""), result.output
    assert not dist.is_initialized()
    return json.loads(result.stdout)


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    save_file(make_plain().state_dict(), tmp_path / "m.safetensors")
    return tmp_path / "m.safetensors"


def test_one_rank_is_what_loads_report(plain: Path) -> None:
    found = plan(plain, "--model", PLAIN)
    for mode in found["modes"]:
        with epload.HierarchicalLoader(readers=mode["readers"]) as loader:
            report = loader.load(make_plain(), plain)
        assert (found["nbytes"], found["tensors"], mode["buckets"]) == (report.nbytes, report.tensors, report.buckets)
        assert mode["staging"] == report.peak_staging
        assert mode["read"] == report.nbytes
    assert found["owned"] == {"0": found["nbytes"]}
    assert [mode["readers"] for mode in found["modes"] if mode["staging"] == 0] == ["every"]
    with epload.HierarchicalLoader() as loader:
        report = loader.load(make_plain(), plain)
    assert (found["choice"], found["reason"]) == (report.readers, report.reason)


@pytest.mark.parametrize("mesh", ["fsdp=3", "replicate=2,fsdp=2", "fsdp=8"])
def test_bytes_of_each_rank_are_those_of_torchs_chunks(mesh: str, plain: Path) -> None:
    found = plan(plain, "--model", PLAIN, "--mesh", mesh)
    shards = int(mesh[-1])
    expected = []
    for number in range(found["world"]):
        chunks = [torch.chunk(tensor, shards) for tensor in make_plain().state_dict().values()]
        expected.append(sum(parts[number % shards].nbytes for parts in chunks if number % shards < len(parts)))
    assert list(found["owned"].values()) == expected
    assert [mode["read"] for mode in found["modes"] if mode["readers"] == "every"] == [sum(expected)]


def test_tensor_parallel_plan_of_transformers(tmp_path: Path) -> None:
    """Weights that the plan shards are kept once by the ranks together, the others by each."""
    config = Qwen3MoeConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8, num_experts=4,
        num_experts_per_tok=2, moe_intermediate_size=16, intermediate_size=32, vocab_size=61,
    )  # fmt: skip
    Qwen3MoeForCausalLM(config).save_pretrained(tmp_path)
    found = plan(tmp_path, "--mesh", "fsdp=2,tp=2")
    replicated = 2 * (2 * 32 + 4 * 32 + 2 * 8) * 4 + 32 * 4  # norms and router of two layers, and the last norm
    assert sum(found["owned"].values()) == found["nbytes"] + replicated
    assert found["fit"]["error"] == ""


def test_a_function_parallelizes_by_itself(plain: Path) -> None:
    owned = plan(plain, "--model", f"{__name__}:make_parallel", "--mesh", "model=2")["owned"]
    columns = [3, 2]  # of 5, which the second layer's rows share; its bias is whole on both
    assert list(owned.values()) == [4 * (n * 7 + n + 11 * n + 11) for n in columns]


def test_what_would_fail(plain: Path, tmp_path: Path) -> None:
    state = make_plain().state_dict()
    state["extra"] = state.pop("0.bias")
    state["1.weight"] = torch.zeros(11, 6)
    save_file(state, tmp_path / "other.safetensors")
    arguments = [tmp_path / "other.safetensors", "--model", PLAIN]
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
        (["--model", "json:nothing"], 1, "json has no 'nothing'"),
        (["--model", "string:digits"], 1, "string:digits is a str, which cannot be called"),
        (["--model", "os:getcwd"], 1, "expected os:getcwd() to return a module, got a str"),
        (
            ["--model", f"{__name__}:make_sharded"],
            1,
            "make_sharded() to return a model that is not sharded yet: --mesh",
        ),
        (["--model", "./nowhere"], 1, "there is no folder ./nowhere"),
        (
            ["--mapping", "json:loads"],
            1,
            "expected --mapping to be package.module:name of an epload.Mapping, got json:loads",
        ),
        (["--mapping", "renames"], 1, "expected --mapping to be package.module:name of an epload.Mapping, got renames"),
    ],
)
def test_wrong_arguments(arguments: list[str], status: int, message: str, plain: Path) -> None:
    model = [] if "--model" in arguments else ["--model", PLAIN]
    result = CliRunner().invoke(main, ["plan", str(plain), *model, *arguments])
    assert (result.exit_code, result.stdout) == (status, "")
    assert message in result.stderr
    assert not dist.is_initialized()


def test_links_carry_the_bytes_of_other_nodes(plain: Path) -> None:
    found = plan(plain, "--model", PLAIN, "--mesh", "fsdp=4", "--nodes", "2")
    modes = {mode["readers"]: mode for mode in found["modes"]}
    assert modes["one"]["received"] == [0, modes["one"]["sent"][0]]
    assert modes["one"]["received"][1] >= found["nbytes"] == modes["one"]["read"]
    assert modes["per_node"]["read"] == 2 * found["nbytes"]
    for readers in ("per_node", "every"):
        assert modes[readers]["received"] == modes[readers]["sent"] == [0, 0]


class Positions(nn.Module):
    """Has a buffer that is in no checkpoint, and that nothing computes from its class."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.register_buffer("positions", torch.arange(4) * 1.0, persistent=False)


def test_a_buffer_that_nothing_computes_fails_as_the_load_does(tmp_path: Path) -> None:
    save_file({f"linear.{k}": v for k, v in nn.Linear(3, 2).state_dict().items()}, tmp_path / "m.safetensors")
    fit = plan(tmp_path / "m.safetensors", "--model", f"{__name__}:Positions", status=1)["fit"]
    with torch.device("meta"):
        model = Positions()
    with pytest.raises(epload.ModelMismatch) as caught:
        epload.load(model, tmp_path / "m.safetensors")
    assert str(caught.value) == f"{fit['error']} [rank 0]"


class Resettable(nn.Module):
    """Has a buffer that its own method computes."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(3))
        self.register_buffer("positions", torch.empty(4), persistent=False)

    def reset_parameters(self) -> None:
        self.positions.copy_(torch.arange(4))


def test_what_modules_initialize_themselves(tmp_path: Path) -> None:
    save_file({"weight": torch.zeros(3)}, tmp_path / "m.safetensors")
    arguments = [tmp_path / "m.safetensors", "--model", f"{__name__}:Resettable"]
    assert "Pass init_missing='reset_parameters'" in plan(*arguments, status=1)["fit"]["error"]
    assert not plan(*arguments, "--init-missing", "reset_parameters")["fit"]["error"]


def make_router(mesh: Any) -> nn.Module:
    model = DeepseekV3ForCausalLM(ROUTED)
    return fully_shard(model.to(torch.bfloat16), mesh=mesh)


def test_a_router_that_stays_in_float32(tmp_path: Path) -> None:
    DeepseekV3ForCausalLM(ROUTED).to(torch.bfloat16).save_pretrained(tmp_path)
    fit = plan(tmp_path, "--model", f"{__name__}:make_router", status=1)["fit"]
    assert "from_pretrained keeps model.layers.0.mlp.gate.weight in torch.float32, but fully_shard" in fit["error"]
    assert not plan(tmp_path, "--mesh", "fsdp=2")["fit"]["error"]  # routers are sharded on their own


@pytest.mark.parametrize("change", [{"hidden_size": "x"}, {"dtype": "float99"}, {"quantization_config": 3}])
def test_a_config_that_names_no_model(change: dict[str, Any], plain: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(ROUTED.to_dict() | change, default=str))
    result = CliRunner().invoke(main, ["plan", str(plain), "--model", str(tmp_path)])
    assert (result.exit_code, result.stdout) == (1, "")
    assert f"the config.json of {tmp_path} names no model that can be built" in result.stderr


RENAMES = epload.Mapping(renames={"^layers": ""})


def test_a_mapping_of_ones_own(tmp_path: Path) -> None:
    save_file({f"layers{k}": v for k, v in make_plain().state_dict().items()}, tmp_path / "m.safetensors")
    arguments = [tmp_path / "m.safetensors", "--model", PLAIN]
    assert plan(*arguments, status=1)["fit"]["error"]
    assert plan(*arguments, "--mapping", f"{__name__}:RENAMES")["fit"]["matched"] == 4
