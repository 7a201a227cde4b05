"""Checkpoints of every format, rewritten as safetensors files."""

from __future__ import annotations

import json
import os
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
from click.testing import CliRunner
from safetensors import safe_open
from safetensors.torch import save_file

import epload
from epload.cli.main import main
from epload.mapping import Quantize
from epload.saving import rewrite as converting
from support import ranks
from support.checkpoints import index, read_folder
from support.failures import error_of, must_raise
from support.findings import differing
from support.fp8 import Tree

STATE = {
    "model.a": torch.arange(35.0).reshape(5, 7),
    "model.b": torch.arange(6).to(torch.float8_e4m3fn),
    "model.c": torch.tensor(3),
    "model.d": torch.linspace(-1, 1, 64, dtype=torch.float64),
    "model.e": torch.empty(0, 3, dtype=torch.bfloat16),
}
NARROW = {name: tensor.bfloat16() if name[-1] in "ade" else tensor for name, tensor in STATE.items()}


def save_dcp(state: dict[str, torch.Tensor], path: Path) -> None:
    dcp.save({"model": dict(state)}, checkpoint_id=path, no_dist=True)


@pytest.mark.parametrize(("kind", "chunk"), [("safetensors", 5), ("torch", 2 << 20), ("dcp", 5), ("dcp", 2 << 20), ("dict", 5)])
def test_every_format(kind: str, chunk: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(converting, "_CHUNK_ELEMENTS", chunk)
    save = {"safetensors": save_file, "torch": torch.save, "dcp": save_dcp, "dict": None}[kind]
    source: Any = tmp_path / f"m.{'pt' if kind == 'torch' else kind}" if save else STATE
    if save:
        save(STATE, source)
    report = epload.convert(source, tmp_path / "new", max_shard_bytes=200)
    assert differing(read_folder(tmp_path / "new"), STATE) == []
    assert report.files > 1
    assert epload.Checkpoint.open(tmp_path / "new").manifest.nbytes == report.nbytes


def test_what_headers_say_is_kept_if_files_agree(tmp_path: Path) -> None:
    """diffusers stores the strength of LoRA layers there, torchao how weights are packed."""
    (source := tmp_path / "source").mkdir()
    for number, name in enumerate("ab", 1):
        metadata = {"format": "np", "lora": "32", f"{name}._data": "int8", "differs": name, "DCP_VERSION": "1.0"}
        save_file({name: torch.ones(2)}, source / f"model-{number:05}-of-00002.safetensors", metadata)
    weight_map = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    index(source, {"metadata": {}, "weight_map": weight_map})
    for limit in (8, 100):
        epload.convert(source, tmp_path / f"{limit}", max_shard_bytes=limit)
        files = sorted((tmp_path / f"{limit}").glob("*.safetensors"))
        assert len(files) == (2 if limit == 8 else 1)
        for file in files:
            with safe_open(file, "pt") as opened:
                assert opened.metadata() == {"format": "pt", "lora": "32", "a._data": "int8", "b._data": "int8"}


def test_arguments_are_those_of_a_save_and_the_source_may_not_change(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    save_file(STATE, path)
    for options, text in (
        ({"progress": lambda _: os.utime(path)}, "while it was converted"),
        ({"max_shard_bytes": 0}, "expected max_shard_bytes to be a number of bytes, at least 1, got 0"),
        ({"max_shard_bytes": "5GB"}, "got '5GB'"),
        ({"dtype": "float8_e4m3fn"}, "expected dtype to have at least 16 bits, got float8_e4m3fn"),
        ({"quantize": "fp8"}, "expected quantize to be a Quantize, got 'fp8'"),
        ({"renames": [("a", "b")]}, r"expected renames of a Mapping to be a tuple of Rename, got \(\('a', 'b'\),\)"),
        ({"files": [tmp_path / "tokenizer.json"]}, "expected files= to name files to be copied, but .*tokenizer.json"),
    ):
        must_raise((ValueError, TypeError, epload.CheckpointError), text, epload.convert, path, tmp_path / "new", **options)
    assert os.listdir(tmp_path) == ["m.safetensors"]


def test_what_is_read_is_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    epload.save(STATE, tmp_path / "run" / "base")
    changed = STATE | {"d": torch.full((3,), 9.0)}
    epload.save(changed, tmp_path / "run" / "delta", base=tmp_path / "run" / "base")
    for name in ("weights.pt", "optimizer.pt"):
        torch.save(STATE, tmp_path / "run" / "base" / name)
    files = sorted(tmp_path.rglob("*"))
    monkeypatch.chdir(tmp_path / "run")
    for source, path, text in (
        ("delta", "", "expected the path of a folder to write, got an empty one"),
        ("delta", "base", "run/base cannot be replaced: .*run/base, from which .* is read, would be deleted"),
        ("delta", "delta", "delta cannot be replaced: .*run/delta, from which the checkpoint is read"),
        ("delta", "..", "cannot be replaced: .*run/delta, from which the checkpoint is read"),
        ("base", "base", "run/base cannot be replaced"),
        ("base/weights.pt", "base", "run/base cannot be replaced"),
        (STATE, "../run", "run is the current directory, or contains it, and overwrite=True replaces"),
    ):
        must_raise(ValueError, text, epload.convert, source, path, overwrite=True)
    assert sorted(tmp_path.rglob("*")) == files


def test_an_adapter_is_one_file_that_peft_finds(tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    torch.save(STATE, tmp_path / "old" / "adapter_model.bin")
    epload.convert(tmp_path / "old", tmp_path / "new")
    assert os.listdir(tmp_path / "new") == ["adapter_model.safetensors"]
    text = "PEFT reads an adapter from one file; pass a larger max_shard_bytes"
    must_raise(ValueError, text, epload.convert, tmp_path / "old", tmp_path / "other", max_shard_bytes=8)


def test_the_declared_modules_have_their_new_names(tmp_path: Path) -> None:
    state = {f"wrap.{name}.weight": torch.ones(4, 4, dtype=torch.bfloat16) for name in ("up", "down")}
    rule = Quantize(weights=[r"up\.weight$"])
    epload.convert(state, tmp_path / "new", renames={r"^wrap\.": ""}, quantize=rule)
    config = json.loads((tmp_path / "new" / "config.json").read_text())
    assert config["quantization_config"]["modules_to_not_convert"] == ["down"]
    assert read_folder(tmp_path / "new")["up.weight"].dtype == torch.float8_e4m3fn


def test_the_command(tmp_path: Path) -> None:
    save_file(STATE, tmp_path / "m.safetensors")
    (tmp_path / "config.json").write_text("{}")
    arguments = ["convert", str(tmp_path / "m.safetensors"), str(tmp_path / "new"), "--dtype", "bf16", "--json"]
    arguments += ["--rename", r"^model\.=", "--rename", "^a$=first", "--file", str(tmp_path / "config.json")]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout)["tensors"] == len(STATE)
    short = {name.removeprefix("model."): each for name, each in NARROW.items()}
    expected = {"first" if name == "a" else name: each for name, each in short.items()}
    assert differing(read_folder(tmp_path / "new"), expected) == []
    assert sorted(os.listdir(tmp_path / "new")) == ["config.json", "model.safetensors"]
    for more, status, text in (
        ([], 1, "exists and is not empty; pass another path, or --overwrite, which replaces"),
        (["--overwrite", "--rename", r"model\..*=x"], 1, "several tensors the name x"),
        (["--overwrite", "--rename", "x"], 2, "expected PATTERN=TEXT"),
        (["--overwrite", "--dtype", "int8"], 2, "'int8' is not one of 'float64', 'float32', "),
    ):
        result = CliRunner().invoke(main, [*arguments[:3], *more])
        assert (result.exit_code, text in result.stderr) == (status, True), result.stderr
    assert differing(read_folder(tmp_path / "new"), expected) == [], "it is still there"
    assert sorted(os.listdir(tmp_path)) == ["config.json", "m.safetensors", "new"]


U8, F16, F32, FP8 = torch.uint8, torch.float16, torch.float32, torch.float8_e4m3fn
QUANTIZED = {
    "fp8": {"w.weight": torch.ones(6, 4).to(torch.float8_e4m3fn), "w.weight_scale_inv": torch.rand(6, 1)},
    "fp8 of DeepSeek": {"w.weight": torch.ones(6, 4).to(torch.float8_e4m3fn), "w.scale": torch.rand(6, 1)},
    "e5m2": {"w": torch.ones(6, 4).to(torch.float8_e5m2), "w_scale": torch.rand(6, 1)},
    "MXFP8": {"w.weight": torch.ones(6, 4).to(torch.float8_e4m3fn), "w.weight_scale": torch.ones(6, 1, dtype=U8)},
    "int8": {"w.weight": torch.ones(6, 4, dtype=torch.int8), "w.weight_scale": torch.rand(6, 1)},
    "GPTQ": {"w.qweight": torch.ones(2, 4, dtype=torch.int32), "w.scales": torch.rand(1, 4, dtype=F16)},
    "HQQ": {"w.W_q": torch.ones(2, 4, dtype=U8), "w.scale": torch.rand(2, 1), "w.zero": torch.rand(2, 1)},
    "bitsandbytes": {"w.weight": torch.ones(8, 1, dtype=U8), "w.weight.absmax": torch.rand(3)},
    "quanto": {"w.weight._data": torch.ones(2, 4, dtype=torch.int8), "w.weight._scale": torch.rand(2, 1)},
    "AQLM": {"w.codes": torch.ones(2, 4, 1, dtype=torch.int8), "w.codebooks": torch.rand(1, 9, 1, 4)},
    "EETQ": {"w.weight": torch.ones(4, 6, dtype=torch.int8), "w.weight_scales": torch.rand(6)},
    "NVFP4": {"w.weight": torch.ones(4, 6, dtype=U8), "w.weight_scale_2": torch.rand(())},
}


@pytest.mark.parametrize("case", QUANTIZED)
def test_quantized_weights_are_copied_and_not_cast(case: str, tmp_path: Path) -> None:
    """Their scales, rounded, would be those of other weights."""
    state = {"norm": torch.arange(3.0), **QUANTIZED[case]}
    for dtype in (torch.bfloat16, F32):
        text = r"w\S* is quantized \(.* leave out the dtype"
        must_raise(ValueError, text, epload.convert, state, tmp_path / "new", dtype=dtype)
    assert os.listdir(tmp_path) == []
    epload.convert(state, tmp_path / "new")
    assert differing(read_folder(tmp_path / "new"), state) == []
    if case in ("fp8", "int8", "EETQ"):  # that a model can hold
        model = Tree(state)
        epload.load(model, state, progress=False)
        must_raise(ValueError, r"w\.weight is quantized", epload.save, model, tmp_path / "saved", dtype=torch.bfloat16)
        epload.save(model, tmp_path / "saved")
        assert differing(read_folder(tmp_path / "saved"), state) == []


def convert_together(rank: int, source: str, target: str) -> tuple[str, int, list[str]]:
    topology = epload.Topology.from_nodes([[0, 1], [2]])
    options = {"max_shard_bytes": 300, "topology": topology, "timeout": 30}
    with mock.patch.object(converting, "_CHUNK_ELEMENTS", 4):  # so that a tensor has several chunks
        report = epload.convert(source, target, dtype=torch.bfloat16, **options)
    state, own, old = {"w": torch.full((2,), float(rank))}, f"{source}-{rank}.safetensors", f"{source}-{rank}.bin"
    save_file(state, own)
    torch.save(state, old, _use_new_zipfile_serialization=False)
    epload.convert(old, f"{target}-old", **options)  # has no locations of tensors that ranks could compare
    calls: list[tuple[str, str, dict[str, Any]]] = [
        (source, target, {}),
        (source, f"{target}-2", {"dtype": torch.float16} if rank == 1 else {}),
        (source, f"{target}-{rank}", {}),
        (own, f"{target}-3", {}),
    ]
    errors = [error_of(partial(epload.convert, *paths, **more, **options)) for *paths, more in calls]
    for path in (own, old):
        os.unlink(path)
    return str(report), report.written, errors


def test_ranks_divide_the_work(tmp_path: Path) -> None:
    save_file(STATE, tmp_path / "m.safetensors")
    results = ranks.run(3, convert_together, str(tmp_path / "m.safetensors"), str(tmp_path / "new"))
    assert differing(read_folder(tmp_path / "new"), NARROW) == []
    written = [each for _, each, _ in results]
    assert sum(written) == sum(tensor.nbytes for tensor in read_folder(tmp_path / "new").values()), "each byte once"
    assert all(written)
    assert results[0][2] == results[1][2] == results[2][2]
    exists, *different = results[0][2]
    assert exists.startswith(f"ValueError: {tmp_path}/new exists and is not empty")
    for text in different:  # options, paths, or values
        assert text.startswith("ValueError: ranks 0 and 1 convert different checkpoints")
    assert sorted(os.listdir(tmp_path)) == ["m.safetensors", "new", "new-old"]
    assert differing(read_folder(tmp_path / "new-old"), {"w": torch.zeros(2)}) == [], "that of the first rank"


def convert_slowly(rank: int, source: str, target: str, dies: bool) -> tuple[str, float]:
    """Rank 1 is slower than the timeout, or is killed while both are slow."""

    def wait(_: int) -> None:
        if dies and rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if rank == 1 or dies:
            time.sleep(0.4 if dies else 0.8)

    topology = epload.Topology.from_nodes([[0], [1]])
    began = time.monotonic()
    with mock.patch.object(converting, "_CHUNK_ELEMENTS", 1000), mock.patch("epload.ranks.heartbeat.INTERVAL", 0.1):
        options = {"topology": topology, "timeout": 20 if dies else 8, "progress": wait}
        error = error_of(lambda: epload.convert(source, target, **options))
    return error, time.monotonic() - began


def test_a_slow_rank_is_waited_for_and_a_killed_one_is_not(tmp_path: Path) -> None:
    source, target = tmp_path / "m.safetensors", tmp_path / "new"
    save_file({"v": torch.zeros(50_000), "w": torch.zeros(50_000)}, source)
    (error, seconds), _ = ranks.run(2, convert_slowly, str(source), str(target), True, dying=[1], tcp=True)
    assert "rank 1 has exited" in error
    assert seconds < 15, "its own part takes 20 s"
    assert os.listdir(tmp_path) == ["m.safetensors"]
    save_file({"v": torch.zeros(15_000), "w": torch.zeros(15_000)}, source)
    (error, _), (_, seconds) = ranks.run(2, convert_slowly, str(source), str(target), False)
    assert error == ""
    assert seconds > 8, "it was slower than the timeout"
