"""``epload inspect``, ``verify``, also with lists of digests and signatures, and ``diff``."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import model_signing
import pytest
import torch
import torch.distributed.checkpoint as dcp
from click.testing import CliRunner
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from safetensors.torch import load_file, save_file

import epload
from epload.cli.main import main


def run(*arguments: str | Path, status: int = 0) -> str:
    result = CliRunner().invoke(main, [str(argument) for argument in arguments])
    assert (result.exit_code, result.stderr) == (status, ""), result.output
    return result.stdout


def refused(*arguments: str | Path, status: int = 1) -> str:
    """Returns what a command that prints nothing else says on standard error."""
    result = CliRunner().invoke(main, [str(argument) for argument in arguments])
    assert (result.exit_code, result.stdout) == (status, ""), result.output
    return result.stderr


def run_json(*arguments: str | Path, status: int = 0) -> Any:
    return json.loads(run(*arguments, "--json", status=status))


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """The same tensors in a folder of two files, and in one torch file."""
    state = {f"layers.{i}.experts.{j}.up": torch.zeros(3, 5) for i in range(2) for j in range(3)}
    other = {"steps": torch.zeros((), dtype=torch.int64), "layers.1.norm": torch.zeros(4, dtype=torch.bfloat16)}
    save_file(state, tmp_path / "part-0.safetensors")
    save_file(other, tmp_path / "part-1.safetensors")
    (tmp_path / "torch").mkdir()
    torch.save(state | other, tmp_path / "torch" / "model.pt")
    return tmp_path


def test_inspect(checkpoint: Path) -> None:
    for name in ("", "torch/model.pt"):
        lines = [" ".join(line.split()) for line in run("inspect", checkpoint / name).splitlines()]
        assert "tensors 8 (95 elements, 376 B)" in lines
        assert sorted(lines[lines.index("tensors dtype shape name") + 1 :]) == [
            "1 bfloat16 [4] layers.1.norm", "1 int64 [] steps", "6 float32 [3, 5] layers.{0..1}.experts.{0..2}.up",
        ]  # fmt: skip
    found = run_json("inspect", checkpoint)
    assert found["files"] == {path.name: path.stat().st_size for path in checkpoint.glob("*.safetensors")}
    assert (found["count"], found["elements"], found["nbytes"]) == (8, 95, 376)
    assert found["dtypes"]["float32"] == {"tensors": 6, "nbytes": 360}
    assert {each["name"]: each["shape"] for each in found["tensors"]}["layers.1.experts.2.up"] == [3, 5]
    assert len(found["tensors"]) == 8
    some = run_json("inspect", checkpoint, "--filter", r"experts\.[12]")
    assert (some["count"], some["nbytes"]) == (4, 240)
    assert "4 of 8" in run("inspect", checkpoint, "--filter", r"experts\.[12]")
    for command in (["inspect", checkpoint], ["diff", checkpoint, checkpoint]):
        errors = refused(*command, "--filter", "nothing")
        assert "epload: --filter 'nothing' matches no tensor of" in errors
        assert "layers.0.experts.0.up" in errors


def test_inspect_says_that_an_optimizer_is_not_shown(tmp_path: Path) -> None:
    state = {"model": {"w": torch.zeros(2)}, "optim": {"w": torch.zeros(2)}, "step": 3}
    dcp.save(state, checkpoint_id=tmp_path, no_dist=True)
    text = run("inspect", tmp_path)
    assert "not shown   optim, step: no tensors of the model\n" in text
    assert "without data" not in text
    left_out = "; not read, as no tensors of a model: optim, step\n"
    assert run("verify", tmp_path).endswith("no tensor with NaN or Inf" + left_out)
    assert run("diff", tmp_path, tmp_path).endswith("1 tensor with equal values" + left_out)
    assert run("convert", tmp_path, tmp_path / "new").endswith(left_out)
    assert run_json("verify", tmp_path)["ignored"] == ["optim", "step"]
    assert run_json("diff", tmp_path, tmp_path / "new")["ignored"] == [["optim", "step"], []]


def test_a_dcp_folder_with_two_models(tmp_path: Path) -> None:
    model, other = {"w": torch.zeros(2)}, {"w": torch.ones(2), "b": torch.ones(1)}
    dcp.save({"model": model, "state_dict": other}, checkpoint_id=tmp_path / "two", no_dist=True)
    save_file(other, tmp_path / "other.safetensors")
    option = ("--prefix", "state_dict")
    for command, text, status, more in (
        ("inspect", "tensors     2 (3 elements", 0, ()),
        ("verify", "2 tensors, 12 B", 0, ()),
        ("diff", "2 tensors with equal values", 0, (tmp_path / "two",)),
        ("plan", "unexpected keys", 1, ("--model", "torch.nn:Identity")),
    ):
        assert "pass prefix='state_dict' or prefix='model'" in refused(command, tmp_path / "two", *more)
        assert text in run(command, tmp_path / "two", *more, *option, status=status)
    for paths in ((tmp_path / "two", tmp_path / "other.safetensors"), (tmp_path / "other.safetensors", tmp_path / "two")):
        assert run("diff", *paths, *option) == "2 tensors with equal values\n"
    assert "no tensor is under prefix='ema'" in refused("diff", *paths, "--prefix", "ema")
    assert "is where the model is in a DCP folder" in refused("diff", *[paths[0]] * 2, *option)


def test_a_dtype_that_torch_does_not_convert(tmp_path: Path) -> None:
    for name in ("a", "b"):
        values = torch.full((4,), ord(name), dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
        torch.save({"w": values, "v": torch.ones(3)}, tmp_path / f"{name}.pt")
    assert run("verify", tmp_path / "a.pt").endswith("no tensor with NaN or Inf\n")
    assert "2 tensors with equal values" in run("diff", tmp_path / "a.pt", tmp_path / "a.pt")
    text = refused("diff", tmp_path / "a.pt", tmp_path / "b.pt")
    assert text.startswith("epload: w differs, but torch does not convert values of float4_e2m1fn_x2")


@pytest.mark.parametrize("name", ["", "torch/model.pt"])
def test_verify_reads_everything_and_finds_nothing(name: str, checkpoint: Path) -> None:
    assert run("verify", checkpoint / name).endswith("every byte read, no tensor with NaN or Inf\n")
    assert run_json("verify", checkpoint / name)["non_finite"] == []
    path = checkpoint / name / "part-0.safetensors"
    if path.exists():
        path.write_bytes(path.read_bytes()[:-1])
        assert "is truncated" in refused("verify", path)


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.float8_e5m2]
)
def test_verify_counts_nan_and_inf(dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a tensor is read in several pieces."""
    monkeypatch.setattr("epload.verify.compare._CHUNK_ELEMENTS", 16)
    values = torch.zeros(100)
    values[[1, 50, 99]], values[[0, 98]] = float("nan"), float("-inf")
    path = tmp_path / "m.safetensors"
    save_file({"bad": values.to(dtype), "good": torch.ones(100), "whole": torch.ones(7, dtype=torch.int8)}, path)
    out = run("verify", path, status=1).splitlines()
    assert out[0] == "bad: 3 NaN and 2 Inf in 100 elements"
    assert out[1].startswith("3 tensors, ")
    assert out[1].endswith(" 1 tensor with NaN or Inf")
    assert len(out) == 2
    assert run_json("verify", path, status=1)["non_finite"] == [{"name": "bad", "nans": 3, "infs": 2, "count": 100}]


def test_diff_shows_the_largest_differences(tmp_path: Path) -> None:
    state = {f"w{'abcdefghijklmnopqrstuvwxyz'[i]}": torch.tensor([float(i)]) for i in range(26)}
    save_file(state, tmp_path / "a.safetensors")
    save_file({name: tensor * 2 for name, tensor in state.items()}, tmp_path / "b.safetensors")
    paths = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    expected = [f"values: w{letter}: 1 of 1 elements," for letter in "zyxwvutsrqponmlkjihgfedcb"]
    everything = run("diff", *paths, "--all", status=1).splitlines()
    assert [line.partition(" max")[0] for line in everything[:-1]] == expected
    shown = run("diff", *paths, status=1).splitlines()
    assert shown == [*everything[:20], "values: 5 more, which --all shows", everything[-1]]
    assert [value["largest"] for value in run_json("diff", *paths, status=1)["values"]] == [*range(25, 0, -1)]
    only = run("diff", paths[0], tmp_path / "a.safetensors", "--filter", "w[ab]")
    assert only == "2 tensors with equal values\n"


def test_diff(checkpoint: Path, tmp_path: Path) -> None:
    assert run("diff", checkpoint, checkpoint / "torch/model.pt") == "8 tensors with equal values\n"
    assert run_json("diff", checkpoint, checkpoint / "torch/model.pt")["values"] == []
    state = torch.load(checkpoint / "torch/model.pt")
    del state["layers.0.experts.1.up"], state["layers.1.experts.1.up"]
    state["extra"] = torch.zeros(1)
    state["layers.1.norm"] = state["layers.1.norm"].reshape(2, 2)
    state["steps"] = state["steps"].int()
    state["layers.0.experts.0.up"][2, 4] = -0.75
    torch.save(state, tmp_path / "other.pt")
    found = run_json("diff", checkpoint / "torch/model.pt", tmp_path / "other.pt", status=1)
    assert found["only_first"] == ["layers.0.experts.1.up", "layers.1.experts.1.up"]
    assert found["only_second"] == ["extra"]
    assert found["shapes"] == {"layers.1.norm": [["bfloat16", [4]], ["bfloat16", [2, 2]]]}
    assert found["dtypes"] == {"steps": [["int64", []], ["int32", []]]}
    value = {"name": "layers.0.experts.0.up", "differing": 1, "count": 15, "largest": 0.75, "mean": 0.05}
    assert found["values"] == [value]
    both = checkpoint / "torch/model.pt", tmp_path / "other.pt"
    assert run("diff", *both, status=1).splitlines() == [
        "only in FIRST: layers.{0..1}.experts.1.up (2 tensors)",
        "only in SECOND: extra",
        "shape: layers.1.norm [4] / [2, 2]",
        "dtype: steps int64 / int32",
        "values: layers.0.experts.0.up: 1 of 15 elements, max 0.75, mean 0.05",
        "4 tensors with equal values, 1 tensor with other values",
    ]
    assert "0.75" not in run("diff", *both, "--headers", status=1)
    for options, status in ((), 1), (("--atol", "0.75"), 0), (("--atol", "0.74"), 1), (("--rtol", "1"), 0):
        run("diff", *both, "--filter", r"layers\.0\.experts\.0", *options, status=status)


def test_a_conversion_to_another_dtype_is_equal_within_a_tolerance(tmp_path: Path) -> None:
    save_file({"w": torch.tensor([1.0, 1.001, -3.3])}, tmp_path / "m.safetensors")
    run("convert", tmp_path / "m.safetensors", tmp_path / "bf16", "--dtype", "bf16")
    text = run("diff", tmp_path / "m.safetensors", tmp_path / "bf16", status=1)
    assert "values: w: 2 of 3 elements" in text
    assert "1 tensor with equal values" in run("diff", tmp_path / "m.safetensors", tmp_path / "bf16", "--rtol", "0.01")
    run("diff", tmp_path / "m.safetensors", tmp_path / "bf16", "--rtol", "0.0001", status=1)
    run("convert", tmp_path / "bf16", tmp_path / "f32", "--dtype", "fp32")
    assert "dtype: w bfloat16 / float32" in run("diff", tmp_path / "bf16", tmp_path / "f32", status=1)
    assert "dtype (allowed): w bfloat16" in run("diff", tmp_path / "bf16", tmp_path / "f32", "--rtol", "0")


def test_renames(tmp_path: Path) -> None:
    save_file({"a.b": torch.zeros(3), "c.b=d": torch.ones(3)}, tmp_path / "m.safetensors")
    arguments = ["convert", tmp_path / "m.safetensors", tmp_path / "new", "--rename", r"(?<=a)\.(?=b)=_"]
    assert "rules match no key of the checkpoint: 'nosuch'; there are" in refused(*arguments, "--rename", "nosuch=x")
    assert not (tmp_path / "new").exists()
    run(*arguments, "--rename", r"^c\.(?!x)=c=")
    assert sorted(load_file(tmp_path / "new" / "model.safetensors")) == ["a_b", "c=b=d"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint of two files with an index, a list of digests and a file that is no part of it."""
    (tmp_path / "config.json").write_text("{}")
    state = {"a": torch.arange(1000), "b": torch.arange(2000)}
    epload.save(state, tmp_path / "c", max_shard_bytes=16000, files=[tmp_path / "config.json"], checksums=True)
    return tmp_path / "c"


def sha256sum(folder: Path) -> Path:
    names = sorted(path.name for path in folder.iterdir())
    listed = folder.parent / "SHA256SUMS"
    listed.write_bytes(subprocess.run(["sha256sum", *names], cwd=folder, capture_output=True, check=True).stdout)
    return listed


def change_byte(path: Path) -> None:
    """Changes the last byte of a file, or of JSON one that means nothing."""
    content = path.read_bytes()
    changed = content.replace(b" ", b"\n", 1) if b" " in content[:9] else content[:-1] + bytes([content[-1] ^ 1])
    path.write_bytes(changed)


@pytest.mark.parametrize("kind", ["list", "published"])
@pytest.mark.parametrize("name", ["model-00002-of-00002.safetensors", "model.safetensors.index.json", "config.json"])
def test_all_files_are_compared(kind: str, name: str, folder: Path) -> None:
    given = sha256sum(folder) if kind == "list" else kind
    output = run("verify", folder, "--checksums", given)
    assert f"{5 if kind == 'list' else 4} files" in output
    assert run_json("verify", folder, "--checksums", given)["checksums"] in output
    change_byte(folder / name)
    assert f"{folder / name} is not the file" in refused("verify", folder, "--checksums", given)


def test_a_copy_of_a_file_in_another_folder_is_compared_too(folder: Path) -> None:
    name = "model-00002-of-00002.safetensors"
    (folder / "copy").mkdir()
    shutil.copy(folder / name, folder / "copy" / name)
    listed = folder.parent / "SHA256SUMS"
    names = [path.relative_to(folder) for path in sorted(folder.rglob("*")) if path.is_file()]
    listed.write_bytes(subprocess.run(["sha256sum", *names], cwd=folder, capture_output=True, check=True).stdout)
    run("verify", folder, "--checksums", listed)
    change_byte(folder / "copy" / name)
    assert f"{folder / 'copy' / name} is not the file" in refused("verify", folder, "--checksums", listed)


def test_a_listed_file_that_is_gone_or_in_another_folder(folder: Path, tmp_path: Path) -> None:
    listed = sha256sum(folder)
    good = listed.read_text()
    for lines, text in (
        (good.replace("config.json", "absent"), "absent, which"),
        (f"{good}{'0' * 64}  {tmp_path / 'other'}\n", f"names {tmp_path / 'other'}, which is not in {folder}"),
    ):
        listed.write_text(lines)
        assert text in refused("verify", folder, "--checksums", listed)


def test_convert_writes_the_list_and_says_its_digest(folder: Path, tmp_path: Path) -> None:
    digest = run("convert", folder, tmp_path / "d", "--checksums").strip().rpartition("; ")[2]
    run("verify", tmp_path / "d", "--checksums", digest)
    errors = refused("verify", tmp_path / "d", "--checksums", "sha256:" + "0" * 64)
    assert "is not the one that was asked for" in errors


def key_pair(folder: Path, name: str) -> tuple[Path, Path]:
    key = ec.generate_private_key(ec.SECP256R1())
    private, public = folder / f"{name}.key", folder / f"{name}.pub"
    pem, plain = serialization.Encoding.PEM, serialization.NoEncryption()
    private.write_bytes(key.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain))
    public.write_bytes(key.public_key().public_bytes(pem, serialization.PublicFormat.SubjectPublicKeyInfo))
    return private, public


@pytest.mark.parametrize("change", ["", "a bit", "a file"])
def test_signatures(change: str, folder: Path, tmp_path: Path) -> None:
    private, public = key_pair(tmp_path, "author")
    _, other = key_pair(tmp_path, "other")
    bundle = tmp_path / "model.sig"
    model_signing.signing.Config().use_elliptic_key_signer(private_key=private).sign(folder, bundle)
    if change == "a bit":
        change_byte(folder / "config.json")
    elif change:
        (folder / "new").touch()
    words = ["verify", folder, "--signature", bundle, "--public-key"]
    if not change:
        assert f"is a signature by the key {public} of {folder}" in run(*words, public)
    else:
        assert "is no signature of" in refused(*words, public)
    assert "is no signature of" in refused(*words, other)
    (folder / "epload-delta.json").touch()
    assert "which its signature does not cover" in refused(*words, public)


@pytest.mark.parametrize(
    "words",
    ["--signature FILE", "--signature FILE --identity a", "--public-key FILE",
     "--signature FILE --public-key FILE --identity a --identity-provider b"],
)  # fmt: skip
def test_options_that_do_not_say_who_has_signed(words: str, folder: Path) -> None:
    file = str(folder / "config.json")
    assert "expected --" in refused("verify", folder, *words.replace("FILE", file).split(), status=2)
