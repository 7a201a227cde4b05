"""The commands: what they print, and what they return. ``epload plan`` against torch's own sharding and what loads report."""

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
from typing import Any

import click
import pytest
import torch
import torch.distributed as dist
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

import epload
from epload.cli import doctor
from epload.cli.checkpoints import fold
from epload.cli.main import main
from support.failures import error_of


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    state = {"layer.weight": torch.zeros(3, 5), "steps": torch.zeros((), dtype=torch.int64)}
    save_file(state, tmp_path / "m.safetensors")
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
    shown = [" ".join(line.split(maxsplit=1)[1:]) for line in lines]
    assert shown == [str(value) for value in info.values() if value != ""]
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
    sentence = re.compile(r"(?!(Of|Also|By|In|With)\b)[A-Z].*\.", re.DOTALL)
    assert [text for text in helps if not sentence.fullmatch(text or "")] == []


def python(*arguments: str, **environment: str) -> tuple[int, str, str]:
    """Runs Python. Returns its exit status and what it prints."""
    command, environment = [sys.executable, *arguments], os.environ | environment
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("name", ["", *sorted(main.commands)])
def test_help_imports_no_torch(name: str, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise AssertionError('torch is imported')")
    path = f"{tmp_path}:{Path(epload.__file__).parents[1]}"
    status, printed, errors = python("-m", "epload", *name.split(), "--help", PYTHONPATH=path)
    assert (status, errors) == (0, "")
    assert printed.startswith("Usage: epload ")


def test_the_ops_are_there_and_what_refers_to_the_module_can_be_sent() -> None:
    """Ray pickles functions with the modules that they name."""
    for code in ("import torch, epload", "import epload, torch; epload.load"):
        assert python("-c", f"{code}; torch.ops.epload.coalesced_bcast") == (0, "", "")
    assert pickle.loads(pickle.dumps(epload)) is epload


def test_wrong_arguments_give_one_line_and_status_2() -> None:
    for arguments in ("inspect", "nonsense", "info more", "inspect x --filter ("):
        result = CliRunner().invoke(main, arguments.split())
        assert (result.exit_code, result.stdout) == (2, "")
        assert result.stderr.startswith("epload: ")
        assert result.stderr.endswith("--help'.\n")
        assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize("content", [None, b"", b"\0" * 8, b"\xff" * 64], ids=["absent", "empty", "zeros", "ones"])
def test_a_malformed_file_gives_one_line_and_status_1(content: bytes | None, checkpoint: Path) -> None:
    path = checkpoint / "bad.safetensors"
    if content is not None:
        path.write_bytes(content)
    for command in (["inspect"], ["verify"], ["diff", str(checkpoint / "m.safetensors")]):
        result = CliRunner().invoke(main, [*command, str(path)])
        assert (result.exit_code, result.stdout) == (1, "")
        assert result.stderr.startswith("epload: ")
        assert str(path) in result.stderr
        assert len(result.stderr.splitlines()) == 1


def test_as_a_process(checkpoint: Path) -> None:
    """Without colors, as its output is no terminal; and when nobody reads all of it."""
    status, printed, errors = python("-m", "epload", "inspect", str(checkpoint))
    assert (status, errors) == (0, "")
    assert "layer.weight" in printed
    assert "\x1b" not in printed
    status, printed, errors = python("-m", "epload", "inspect", str(checkpoint / "absent"))
    assert (status, printed) == (1, "")
    assert errors.startswith("epload: no checkpoint at")
    code = "import sys, epload; print([name for name in ('click', 'epload.cli') if name in sys.modules])"
    assert python("-c", code) == (0, "[]\n", ""), "importing epload imports nothing of the command line"


def unfold(name: str) -> Iterator[str]:
    """The names that a folded name stands for: the reference."""
    parts = []
    for part in re.split(r"(\{[^}]*\})", name):
        runs = [run.split("..") for run in part[1:-1].split(",")] if part.startswith("{") else []
        parts.append([str(i) for run in runs for i in range(int(run[0]), int(run[-1]) + 1)] or [part])
    return map("".join, product(*parts))


@given(st.sets(st.tuples(st.integers(0, 4), st.integers(8, 12), st.sampled_from(["", "x", "y"]))))
def test_lines_stand_for_the_names(found: set[tuple[int, int, str]]) -> None:
    names = {f"layers.{i}.experts.{j}{f'.{end}' if end else ''}": end != "x" for i, j, end in sorted(found)}
    check(names)


def check(names: Mapping[str, object]) -> list[str]:
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


def test_every_check_has_a_finding_and_a_failed_one_gives_status_1(monkeypatch: pytest.MonkeyPatch) -> None:
    result = CliRunner().invoke(main, ["doctor", "--json"])
    findings = {each["check"]: each for each in json.loads(result.stdout)["findings"]}
    assert len(findings) == 7
    assert {each["status"] for each in findings.values()} <= {"ok", "warn", "fail"}
    assert all(each["advice"] for each in findings.values() if each["status"] != "ok")
    assert result.exit_code == any(each["status"] == "fail" for each in findings.values())
    assert findings["build"]["status"] == findings["store"]["status"] == "ok"
    good, bad = ("ok", "fine", ""), ("fail", "broken", "mend it")
    monkeypatch.setattr(doctor, "CHECKS", {"a": lambda: good, "b": lambda: bad})
    result = CliRunner().invoke(main, ["doctor"])
    assert result.exit_code == 1
    rows = [line.split() for line in result.stdout.splitlines()]
    assert rows[1:3] == [["a", "ok", "fine"], ["b", "fail", "broken"]]
    assert rows[-1] == ["b", "mend", "it"]
    monkeypatch.setattr(doctor, "CHECKS", {"a": lambda: good})
    assert CliRunner().invoke(main, ["doctor"]).exit_code == 0


def test_shared_memory(tmp_path: Path) -> None:
    """A container has a limit, of which it uses a GiB."""
    memory, gib = tmp_path / "meminfo", 1 << 30
    (tmp_path / "memory.current").write_text(f"{gib}\n")
    for free, limit, status in (
        (64 << 20, "max", "warn"),
        (4 * gib, "max", "ok"),
        (4 * gib, gib, "warn"),
        (4 * gib, 3 * gib, "ok"),
    ):
        memory.write_text(f"MemTotal: 99 kB\nMemAvailable:   {free // 1024} kB\n")
        (tmp_path / "memory.max").write_text(f"{limit}\n")
        assert doctor.check_shared_memory(memory, tmp_path)[0] == status
        assert doctor.check_shared_memory(memory, tmp_path / "absent")[0] == ("warn" if free < gib else "ok")


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
    assert doctor.check_lookup(refuse)[0] == "ok", "no name is no problem, unless it takes long"
    monkeypatch.setattr(doctor, "_SLOW_LOOKUP", 0.04)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nope")
    gloo = doctor.check_gloo()
    assert gloo[0] == "fail"
    assert "nope" in gloo[1]
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    monkeypatch.setattr(doctor.socket, "gethostbyname", lambda name: "127.0.1.1")
    assert doctor.check_gloo()[0] == "warn"
    slow = doctor.check_lookup(lambda address: time.sleep(0.05))
    assert slow[0] == "warn"
    assert "/etc/hosts" in slow[2]


ROUTED = DeepseekV3Config(
    hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=4, vocab_size=64,
    n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, q_lora_rank=8, kv_lora_rank=8, qk_rope_head_dim=4,
    qk_nope_head_dim=4, v_head_dim=8, n_group=2, topk_group=1, first_k_dense_replace=0,
)  # fmt: skip
PLAIN = f"{__name__}:make_plain"
RENAMES = epload.Mapping(renames={"^layers": ""})


def make_plain() -> nn.Module:
    return nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 11))


def make_with_options(pretrained: bool = False, **options: Any) -> nn.Module:
    """Has the signature of timm's functions."""
    assert pretrained is False
    return make_plain().to(torch.bfloat16)


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


def test_bytes_are_those_of_the_shards_in_the_models_dtype(plain: Path) -> None:
    """The model's function takes options, but no mesh."""
    owned = plan(plain, "--model", f"{__name__}:make_with_options", "--mesh", "fsdp=1")["owned"]
    assert owned == {"0": sum(tensor.numel() * 2 for tensor in make_plain().parameters())}
    owned = plan(plain, "--model", f"{__name__}:make_with_options", "--mesh", "fsdp=2")["owned"]
    assert owned == {str(i): 2 * sum(torch.chunk(t, 2)[i].numel() for t in make_plain().parameters()) for i in range(2)}


def test_what_would_fail(plain: Path, tmp_path: Path) -> None:
    state = make_plain().state_dict()
    state["extra"] = state.pop("0.bias")
    state["1.weight"] = torch.zeros(11, 6)
    save_file(state, tmp_path / "other.safetensors")
    arguments = [tmp_path / "other.safetensors", "--model", PLAIN]
    fit = plan(*arguments, status=1)["fit"]
    assert (fit["missing"], fit["unexpected"], list(fit["mismatched"])) == (["0.bias"], ["extra"], ["1.weight"])
    error = error_of(lambda: epload.load(make_plain(), tmp_path / "other.safetensors"))
    assert error == f"ModelMismatch: {fit['error']} [rank 0]"
    text = CliRunner().invoke(main, ["plan", *map(str, arguments)])
    assert "This load would fail" in text.stdout
    assert text.exit_code == 1
    save_file({f"layers{k}": v for k, v in make_plain().state_dict().items()}, tmp_path / "other.safetensors")
    assert plan(*arguments, status=1)["fit"]["error"]
    assert plan(*arguments, "--mapping", f"{__name__}:RENAMES")["fit"]["matched"] == 4


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["--mesh", "fsdp"], 1, "expected a mesh such as fsdp=8,tp=2, got 'fsdp'"),
        (["--mesh", "fsdp=3", "--nodes", "2"], 2, "expected as many ranks on each of 2 nodes"),
        (["--mesh", "ep=2"], 1, "expected mesh axes among replicate, fsdp, tp, got ep"),
        (["--mesh", "fsdp=2,replicate=2"], 1, "expected replicate before fsdp"),
        (["--mesh", "tp=2"], 1, "declares no plan for tensor parallelism"),
        (["--model", "json:nothing"], 1, "json has no 'nothing'"),
        (["--model", "string:digits"], 1, "string:digits is a str, which cannot be called"),
        (["--model", "os:getcwd"], 1, "expected os:getcwd() to return a module, got a str"),
        (["--model", f"{__name__}:make_sharded"], 1, "make_sharded() to return a model that is not sharded yet"),
        (["--model", "./nowhere"], 1, "there is no folder ./nowhere"),
        (["--mapping", "json:loads"], 1, "to be package.module:name of an epload.Mapping, got json:loads"),
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
        self.weight = nn.Parameter(torch.empty(3))
        self.register_buffer("positions", torch.empty(4), persistent=False)


class Resettable(Positions):
    """Computes the buffer by a method of its own."""

    def reset_parameters(self) -> None:
        self.positions.copy_(torch.arange(4))


def test_buffers_that_are_in_no_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    save_file({"weight": torch.zeros(3)}, path)
    fit = plan(path, "--model", f"{__name__}:Positions", status=1)["fit"]
    with torch.device("meta"):
        model = Positions()
    assert error_of(lambda: epload.load(model, path)) == f"ModelMismatch: {fit['error']} [rank 0]"
    arguments = [path, "--model", f"{__name__}:Resettable"]
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


def test_a_config_that_names_no_model(plain: Path, tmp_path: Path) -> None:
    for change in ({"hidden_size": "x"}, {"dtype": "float99"}, {"quantization_config": 3}):
        (tmp_path / "config.json").write_text(json.dumps(ROUTED.to_dict() | change, default=str))
        result = CliRunner().invoke(main, ["plan", str(plain), "--model", str(tmp_path)])
        assert (result.exit_code, result.stdout) == (1, "")
        assert f"the config.json of {tmp_path} names no model that can be built" in result.stderr
