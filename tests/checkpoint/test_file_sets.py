"""Several sets of weights in a folder: epload loads what transformers, diffusers and PEFT load, or lists the choices."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import epload
from epload import Checkpoint, CheckpointError
from epload.checkpoint.file_sets import choose
from support import ranks
from support.checkpoints import assert_same, read_all, tensor
from support.failures import must_raise, outcome
from support.pretrained import build

State = dict[str, torch.Tensor]


def _model(seed: int = 0) -> Any:
    """All elements differ by name and seed."""
    model = build("llama")
    with torch.no_grad():
        for number, parameter in zip(count(50 * seed), model.parameters(), strict=False):
            parameter.copy_(torch.arange(parameter.numel()).reshape(parameter.shape) / 4096 + number)
    return model


def _put(folder: Path, name: str, seed: int) -> None:
    """Writes what lies in a folder under this name. ``sharded VARIANT`` is what ``save_pretrained`` writes in several files."""
    path = folder / name
    path.parent.mkdir(exist_ok=True, parents=True)
    kind, _, variant = name.partition(" ")
    if kind == "sharded":
        parts = folder / "parts"
        _model(seed).save_pretrained(parts, max_shard_size="30KB", variant=variant or None)
        assert len([*parts.glob("*.safetensors")]) > 2
        for part in parts.iterdir():
            part.replace(folder / part.name)
        parts.rmdir()
    elif kind == "torch-sharded":
        state = list(_model(seed).state_dict().items())
        files = {f"pytorch_model-0000{n + 1}-of-00002.bin": dict(state[n::2]) for n in range(2)}
        for file, part in files.items():
            torch.save(part, folder / file)
        weight_map = {key: file for file, part in files.items() for key in part}
        index = {"metadata": {}, "weight_map": weight_map}
        (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    elif name == ".metadata":
        torch.distributed.checkpoint.save({"model": _model(seed).state_dict()}, checkpoint_id=str(folder), no_dist=True)
    elif name.endswith(".safetensors"):
        state = _model(seed).state_dict()
        state.pop("lm_head.weight")  # tied
        save_file(state, path, metadata={"format": "pt"})
    elif name.endswith((".bin", ".pt", ".pth")):
        torch.save(_model(seed).state_dict(), path)
    else:
        path.write_bytes(b"not for loading")


LEFTOVERS = ("optimizer.pt", "optimizer.bin", "scheduler.pt", "training_args.bin", "rng_state_0.pth", "scaler.pt")
FOLDERS: dict[str, tuple[Sequence[str], Sequence[str]]] = {
    "a variant next to one file": (["model.safetensors", "model.fp16.safetensors"], ["", "fp16", "ema"]),
    "two variants": (["pytorch_model.bin", "model.ema.safetensors", "model.non_ema.safetensors"], ["", "ema", "non_ema"]),
    "only a variant": (["model.fp16.safetensors"], ["", "fp16"]),
    "shards of a variant": (["sharded", "sharded fp16"], ["", "fp16"]),
    "a file and shards": (["model.safetensors", "sharded"], [""]),
    "shards and a torch file": (["sharded", "pytorch_model.bin"], [""]),
    "a torch file and torch shards": (["pytorch_model.bin", "torch-sharded"], [""]),
    "torch shards": (["torch-sharded"], [""]),
    "an adapter next to a torch file": (["pytorch_model.bin", "adapter_model.safetensors"], [""]),
    "other models in folders": (["pytorch_model.bin", "2_Dense/model.safetensors", "original/x.pth"], [""]),
    "leftovers of training": (["pytorch_model.bin", *LEFTOVERS], [""]),
    "Meta's format next to shards": (["sharded", "consolidated.00.pth", "original/consolidated.00.pth"], [""]),
    "other frameworks": (["pytorch_model.bin", "tf_model.h5", "flax_model.msgpack", "model.onnx"], [""]),
    "a DCP checkpoint next to one file": (["model.safetensors", ".metadata"], [""]),
}  # fmt: skip


def _judge(folder: Path, variant: str) -> State | None:
    """Returns what transformers loads; None if it raises."""
    import transformers

    try:
        return transformers.AutoModelForCausalLM.from_pretrained(folder, variant=variant or None).state_dict()
    except OSError:
        return None


def _loaded(folder: Path, variant: str) -> State | None:
    model = _model()
    try:
        epload.load(model, folder, variant=variant, progress=False)
    except CheckpointError:
        return None
    return model.state_dict()


def _folder(path: Path, files: Sequence[str]) -> Path:
    path.mkdir()
    _model().config.save_pretrained(path)
    for seed, name in enumerate(files, 1):
        _put(path, name, seed)
    return path


@pytest.mark.parametrize("what", FOLDERS)
def test_loads_what_transformers_loads(what: str, tmp_path: Path) -> None:
    files, variants = FOLDERS[what]
    folder = _folder(tmp_path / "model", files)
    for variant in variants:
        expected, loaded = _judge(folder, variant), _loaded(folder, variant)
        assert (loaded is None) == (expected is None), variant
        if loaded is not None and expected is not None:
            assert_same(loaded, expected)


def test_an_index_without_its_shards_is_no_reason_to_load_something_else(tmp_path: Path) -> None:
    folder = _folder(tmp_path / "model", ["sharded", "pytorch_model.bin"])
    next(folder.glob("model-00001-of-*")).unlink()
    for source in (folder, folder / "model.safetensors.index.json"):
        text = r"model-00001-of.*, which .*model\.safetensors\.index\.json names"
        must_raise(CheckpointError, text, Checkpoint.open, source)


def test_the_config_may_name_the_weights(tmp_path: Path) -> None:
    folder = _folder(tmp_path / "model", ["model.safetensors", "other.safetensors", "model.fp16.safetensors"])
    config = json.loads((folder / "config.json").read_text())
    for weights in ("absent", "other"):
        (folder / "config.json").write_text(json.dumps(config | {"transformers_weights": f"{weights}.safetensors"}))
        if weights == "absent":
            assert _loaded(folder, "") is None
    for load in (_judge, _loaded):
        loaded = load(folder, "")
        assert loaded is not None
        assert_same(loaded, _model(2).state_dict())
    must_raise(CheckpointError, "leaves no choice to variant='fp16'", Checkpoint.open, folder, variant="fp16")


# ---- names that transformers does not load ----

CHOSEN: dict[str, tuple[Sequence[str], str, Sequence[str]]] = {
    "diffusers, one file": (
        ["diffusion_pytorch_model.fp16.safetensors", "diffusion_pytorch_model.safetensors", "diffusion_pytorch_model.bin"],
        "", ["diffusion_pytorch_model.safetensors"],
    ),
    "diffusers, the index first": (
        ["diffusion_pytorch_model.safetensors", "diffusion_pytorch_model.safetensors.index.json"],
        "", ["diffusion_pytorch_model.safetensors.index.json"],
    ),
    "diffusers, the former index of a variant": (
        ["diffusion_pytorch_model.fp16.safetensors", "diffusion_pytorch_model.safetensors.fp16.index.json"],
        "fp16", ["diffusion_pytorch_model.safetensors.fp16.index.json"],
    ),
    "PEFT": (["adapter_model.bin", "adapter_model.safetensors", "optimizer.pt"], "", ["adapter_model.safetensors"]),
    "DCP next to an adapter": ([".metadata", "__0_0.distcp", "adapter_model.safetensors"], "", [".metadata"]),
    "shards without an index": (
        ["model-00002-of-00002.safetensors", "model-00001-of-00002.safetensors", "training_args.bin"],
        "", ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"],
    ),
    "shards from 0 on": (["w-0-of-2.bin", "w-1-of-2.bin"], "", ["w-0-of-2.bin", "w-1-of-2.bin"]),
    "a variant of another name": (["w.safetensors", "w.ema.safetensors"], "ema", ["w.ema.safetensors"]),
    "numbers without a total": (["part.00.pth", "part.01.pth"], "", ["part.00.pth", "part.01.pth"]),
    "one number": (["step-300.pt"], "", ["step-300.pt"]),
    "files of two ranks": (
        [f"shard-0000{rank}-model-0000{n}-of-00002.safetensors" for rank in (1, 2) for n in (1, 2)][:3],
        "",
        ["shard-00001-model-00001-of-00002.safetensors", "shard-00002-model-00001-of-00002.safetensors",
         "shard-00001-model-00002-of-00002.safetensors"],
    ),
}  # fmt: skip


REFUSED: dict[str, tuple[Sequence[str], str, str]] = {
    "a shard missing": (
        ["model-1-of-2.safetensors"], "",
        r"model-1-of-2\.safetensors \(expected 2 files with the numbers from 1 on; missing: 2\)",
    ),
    "many missing": (
        ["w-7-of-999999999.pt"], "", r"expected 999999999 files with the numbers from 1 on; missing: 1, 2, 3, 4, 5, 6\)",
    ),
    "two libraries": (
        ["pytorch_model.bin", "diffusion_pytorch_model.safetensors"], "",
        r"several sets of weights: pytorch_model\.bin, diffusion_pytorch_model\.safetensors; ",
    ),
    "files of ranks and of the model": (
        ["shard-00001-model-00001-of-00001.safetensors", "model.safetensors"], "",
        r"several sets of weights: model\.safetensors, shard-00001-model-00001-of-00001\.safetensors; ",
    ),
    "two steps": (["step-100.pt", "step-200.pt"], "", r"several sets of weights: step-100\.pt, step-200\.pt; "),
    "only variants": (
        ["model.fp16.safetensors", "pytorch_model.ema-1-of-1.bin"], "",
        r"of a variant only: model\.fp16\.safetensors, pytorch_model\.ema-1-of-1\.bin; pass variant='ema' or variant='fp16'",
    ),
    "no such variant": (
        ["model.safetensors", "model.ema.safetensors"], "fp16",
        r"FOLDER has no weights of variant='fp16'; it has model\.ema\.safetensors, model\.safetensors$",
    ),
    "many files": ([f"{c}.pt" for c in "abcdefghij"], "", r"a\.pt, .*, e\.pt and 5 more; pass"),
    "leftovers only": (LEFTOVERS, "", r"no checkpoint in FOLDER: expected \*\.safetensors"),
    "other files": (["tf_model.h5", "model.safetensors/", "README.md"], "", "no checkpoint in FOLDER"),
    "a pipeline of diffusers": (
        ["model_index.json", "transformer/", "vae/"], "",
        "no checkpoint in FOLDER: .*; if they are in one of its folders, pass that one: transformer/, vae/$",
    ),
}  # fmt: skip


def test_names_that_are_chosen_or_refused() -> None:
    for case, (names, variant, expected) in CHOSEN.items():
        for order in (list(names), list(reversed(names))):
            assert choose(order, "FOLDER", variant) == expected, case
    for names, variant, message in REFUSED.values():
        for order in (list(names), list(reversed(names))):
            error = must_raise(CheckpointError, message, choose, order, "FOLDER", variant)
            assert len(str(error).splitlines()) == 1


# ---- the option ----


def _small(folder: Path, *names: str) -> Path:
    folder.mkdir()
    for number, name in enumerate(names):
        save_file({"weight": tensor(number, (4, 3)), "bias": tensor(10 + number, (4,))}, folder / name)
    return folder


def test_a_variant_is_for_folders(tmp_path: Path) -> None:
    folder = _small(tmp_path / "model", "model.safetensors", "model.fp16.safetensors")
    expected = Checkpoint.open(folder / "model.fp16.safetensors")
    assert_same(read_all(Checkpoint.open(folder, variant="fp16")), read_all(expected))
    other = read_all(Checkpoint.open(folder / "model.safetensors"))
    assert_same(read_all(Checkpoint.open(folder, expected.manifest)), other)  # of the same layout
    for source in (folder / "model.fp16.safetensors", {"w": torch.ones(1)}, expected):
        must_raise(ValueError, "variant='fp16' ", Checkpoint.open, source, variant="fp16")
    text = "expected variant to be a string, got None"
    must_raise(TypeError, text, epload.load, nn.Linear(3, 4), folder, variant=None, progress=False)


def test_a_prefix_means_the_dcp_checkpoint_of_a_folder(tmp_path: Path) -> None:
    """Also for ``load_state``, which takes values that are no tensors from there."""
    folder = _small(tmp_path / "model", "model.safetensors", "model.fp16.safetensors")
    saved = {"weight": tensor(7, (4, 3)), "bias": tensor(8, (4,))}
    torch.distributed.checkpoint.save({"app": saved, "step": 3}, checkpoint_id=str(folder), no_dist=True)
    assert_same(read_all(Checkpoint.open(folder, prefix="app")), saved)
    assert_same(read_all(Checkpoint.open(folder)), read_all(Checkpoint.open(folder / "model.safetensors")))
    state: dict[str, Any] = {"app": {"weight": torch.zeros(4, 3), "bias": torch.zeros(4)}, "step": 0}
    epload.load_state(state, folder, progress=False)
    assert_same(state["app"], saved)
    assert state["step"] == 3
    text = "expected prefix= or variant=, got prefix='app' and variant='fp16'"
    must_raise(ValueError, text, Checkpoint.open, folder, prefix="app", variant="fp16")


VARIANTS: list[tuple[list[Any], str, str]] = [
    (["fp16", "fp16"], "", "^$"),
    (["", "fp16"], "ManifestMismatch", "variant=''.*variant='fp16'|variant='fp16'.*variant=''"),
    (["ema", "ema"], "CheckpointError", "no weights of variant='ema'"),
    (["", 3], "TypeError", "expected variant to be a string, got 3"),
]


def _with_variants(rank: int, folder: Path) -> list[tuple[str, str]]:
    outcomes = []
    for variants, _, _ in VARIANTS:
        model = nn.Linear(3, 4)
        before = {name: value.clone() for name, value in model.state_dict().items()}
        failure = outcome(partial(epload.load, model, folder, variant=variants[rank], progress=False))
        outcomes.append(failure or ("", ""))
        assert_same(model.state_dict(), before if failure else read_all(Checkpoint.open(folder, variant="fp16")))
    return outcomes


def test_all_ranks_load_the_same_variant_or_none_does(tmp_path: Path) -> None:
    folder = _small(tmp_path / "model", "model.safetensors", "model.fp16.safetensors")
    first, second = ranks.run(2, _with_variants, folder)
    assert first == second
    for (kind, text), (_, expected, message) in zip(first, VARIANTS, strict=True):
        assert kind == expected
        assert re.search(message, text), text
