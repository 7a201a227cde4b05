"""Sources: of several sets of weights, those are loaded that transformers, diffusers and PEFT load; what is passed by mistake
is told in a sentence, the same on every rank, and changes nothing."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, Literal, get_args

import pytest
import torch
import torch.distributed.checkpoint as dcp
import transformers
from safetensors.torch import save_file
from torch import nn

import epload
from epload import Checkpoint, CheckpointError, HierarchicalLoader, LoadOptions, Mapping, ModelMismatch, OuterShard
from epload.checkpoint.file_sets import choose
from epload.checkpoint.opening import join_source
from epload.integrations.engine.model_loader import open_weights, source_of
from epload.mapping import Rename
from epload.planning.schedule import Algorithm, Readers
from epload.sync.endpoint import Deltas, Snapshots, Stages, Transports
from support import ranks
from support.checkpoints import assert_same, read_all, tensor
from support.failures import error_of, must_raise, outcome
from support.pretrained import build

State = dict[str, torch.Tensor]


def _model(seed: int = 0) -> Any:
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
        index = {"metadata": {}, "weight_map": {key: file for file, part in files.items() for key in part}}
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
    with suppress(OSError):
        return transformers.AutoModelForCausalLM.from_pretrained(folder, variant=variant or None).state_dict()
    return None


def _loaded(folder: Path, variant: str) -> State | None:
    with suppress(CheckpointError):
        epload.load(model := _model(), folder, variant=variant, progress=False)
        return model.state_dict()
    return None


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


def _small(folder: Path, *names: str) -> Path:
    folder.mkdir()
    for number, name in enumerate(names):
        save_file({"weight": tensor(number, (4, 3)), "bias": tensor(10 + number, (4,))}, folder / name)
    return folder


def test_variants_and_prefixes_are_for_folders(tmp_path: Path) -> None:
    """A prefix means the DCP checkpoint of a folder. So does ``load_state``, which takes other values than tensors from there."""
    folder = _small(tmp_path / "model", "model.safetensors", "model.fp16.safetensors")
    expected = Checkpoint.open(folder / "model.fp16.safetensors")
    assert_same(read_all(Checkpoint.open(folder, variant="fp16")), read_all(expected))
    other = read_all(Checkpoint.open(folder / "model.safetensors"))
    assert_same(read_all(Checkpoint.open(folder, expected.manifest)), other)  # of the same layout
    for source in (folder / "model.fp16.safetensors", {"w": torch.ones(1)}, expected):
        must_raise(ValueError, "variant='fp16' ", Checkpoint.open, source, variant="fp16")
    text = "expected variant to be a string, got None"
    must_raise(TypeError, text, epload.load, nn.Linear(3, 4), folder, variant=None, progress=False)
    saved = {"weight": tensor(7, (4, 3)), "bias": tensor(8, (4,))}
    torch.distributed.checkpoint.save({"app": saved, "step": 3}, checkpoint_id=str(folder), no_dist=True)
    assert_same(read_all(Checkpoint.open(folder, prefix="app")), saved)
    assert_same(read_all(Checkpoint.open(folder)), other)
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


def _state() -> State:
    return {"weight": tensor(1, (4, 3)), "bias": tensor(2, (4,))}


def _file(path: Path, content: bytes = bytes(20)) -> Path:
    path.parent.mkdir(exist_ok=True, parents=True)
    path.write_bytes(content)
    return path


LFS_POINTER = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'1' * 64}\nsize 4976698672\n".encode()


def _dcp(folder: Path) -> Path:
    dcp.save(_state(), checkpoint_id=str(folder / "dcp"), no_dist=True)
    return folder / "dcp"


def _dcp_without_metadata(folder: Path) -> Path:
    (_dcp(folder) / ".metadata").unlink()
    return folder / "dcp"


def _zero(folder: Path) -> Path:
    for name in ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt"):
        _file(folder / "global_step7" / name)
    return _file(folder / "latest", b"global_step7").parent


def _of_one_rank(name: str, offsets: list[int]) -> Callable[[Path], Path]:

    def write(folder: Path) -> Path:
        content = {"weight": {"saved_offsets": offsets}}
        save_file({"weight": tensor(1, (2, 3))}, folder / name, metadata={"DCP_SHARDING_INFO": json.dumps(content)})
        return folder

    return write


FOREIGN: dict[str, tuple[Callable[[Path], Any], str]] = {
    "config.json": (
        lambda f: _file(f / "config.json", b"{}"), r"config\.json is a JSON file, which holds no weights: pass the folder it"
    ),
    "GGUF": (
        lambda f: _file(f / "model.q4", b"GGUF\x03" + bytes(103)),
        r"model\.q4 is a GGUF file.*pass the checkpoint it was converted from",
    ),
    "DCP metadata": (lambda f: _dcp(f) / ".metadata", r"\.metadata is part of .*\(DCP\).*: pass the folder"),
    "DCP without metadata": (_dcp_without_metadata, r"dcp has files of .*\(DCP\), but no \.metadata: the job ended"),
    "DCP safetensors shard of others": (
        _of_one_rank("part.safetensors", [2, 0]),
        r"weight of shape \[4, 3\] has chunks for only 6 of its 12 elements: files are missing",
    ),
    "DeepSpeed": (_zero, r"is a DeepSpeed checkpoint.*zero_to_fp32\.py"),
    "DeepSpeed file": (
        lambda f: _zero(f) / "global_step7/mp_rank_00_model_states.pt",
        r"mp_rank_00_model_states\.pt is part of a DeepSpeed checkpoint",
    ),
    "list of files": (lambda f: [f / "a.safetensors", f / "b.safetensors"], "as one path, got a list of 2: pass the folder"),
    "absent": (lambda f: f / "nothing here", "nothing here: expected a file or a folder"),
    "user that is none": (lambda f: "~no-such-user-here/model", "no checkpoint at ~no-such-user-here"),
    "Git LFS": (
        lambda f: _file(f / "model.safetensors", LFS_POINTER), "is a Git LFS pointer in place of the file: run `git lfs pull`"
    ),
    "number": (lambda f: 3, "expected a checkpoint as a path, a dict of tensors or an epload.Checkpoint, got int"),
}  # fmt: skip


def _load_each(rank: int, sources: dict[str, Any]) -> dict[str, str]:
    loader, found = HierarchicalLoader(progress=False), {}
    model = nn.Linear(3, 4)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    for what, source in sources.items():
        found[what] = error_of(lambda: loader.load(model, source))  # noqa: B023
    assert_same(model.state_dict(), before)
    return found


def test_every_rank_hears_it(tmp_path: Path) -> None:
    sources = {}
    for number, (what, (make, _)) in enumerate(FOREIGN.items()):
        folder = tmp_path / str(number)
        folder.mkdir()
        sources[what] = make(folder)
    first, second = ranks.run(2, _load_each, sources)
    assert first == second
    for what, (_, message) in FOREIGN.items():
        assert re.search(rf"^(CheckpointError|TypeError): .*{message}", first[what]), f"{what}: {first[what]}"
        assert len(first[what].splitlines()) == 1


def test_a_job_of_one_rank_saves_whole_tensors(tmp_path: Path) -> None:
    folder = _of_one_rank("model-00001-of-00001.safetensors", [0, 0])(tmp_path)
    assert_same(read_all(Checkpoint.open(folder)), {"weight": tensor(1, (2, 3))})


def test_an_index_by_any_name_and_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    save_file(_state(), tmp_path / "model.safetensors")
    content = json.dumps({"weight_map": dict.fromkeys(_state(), "model.safetensors")}).encode()
    indices = [_file(tmp_path / name, content) for name in ("index.json", "model.safetensors.index.json", "mine.json")]
    for path in ("~", "~/model.safetensors", *indices):
        checkpoint = Checkpoint.open(path)
        assert_same(read_all(checkpoint), _state())
        assert_same(read_all(join_source(path, checkpoint.manifest)), _state())


def test_an_index_may_add_files_to_the_single_one(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Some tools add tensors to a model so, as compressed-tensors those of layers that predict tokens. Engines then read an index
    of other files, too, where transformers reads the single file."""
    added = {"mtp": tensor(3, (2,))}
    save_file(_state(), tmp_path / "model.safetensors")
    save_file(added, tmp_path / "model_mtp.safetensors")
    index = {"weight_map": dict.fromkeys(_state(), "model.safetensors") | {"mtp": "model_mtp.safetensors"}}
    for listed, expected in (index, _state() | added), ({"weight_map": {"mtp": "model_mtp.safetensors"}}, _state()):
        _file(tmp_path / "model.safetensors.index.json", json.dumps(listed).encode())
        assert_same(read_all(Checkpoint.open(tmp_path)), expected)
    must_raise(CheckpointError, "model.safetensors and an index of other files", open_weights, str(tmp_path))
    stale = {"weight_map": dict.fromkeys((*_state(), "gone"), "model.safetensors")}
    _file(tmp_path / "model.safetensors.index.json", json.dumps(stale).encode())
    for read in (Checkpoint.open, open_weights):
        assert_same(read_all(read(str(tmp_path))), _state())
    save_file(_state(), tmp_path / "model_mtp.safetensors")
    both = {"weight_map": {"weight": "model_mtp.safetensors", "bias": "model.safetensors"}}
    _file(tmp_path / "model.safetensors.index.json", json.dumps(both).encode())
    must_raise(
        CheckpointError, "weight is both in model_mtp.safetensors and in .*: one is out of date", Checkpoint.open, tmp_path
    )
    (tmp_path / "model.safetensors.index.json").unlink()
    assert not caplog.records
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        _file(tmp_path / name)
    assert_same(read_all(Checkpoint.open(tmp_path)), _state())
    assert "has an adapter beside its weights, which is not loaded" in caplog.text
    _file(tmp_path / "model.safetensors.aria2")
    must_raise(CheckpointError, r"model\.safetensors is downloaded in part, as aria2 says", Checkpoint.open, tmp_path)


def test_an_engine_that_reads_from_modelscope_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert source_of("org/name", "main", "VLLM_USE_MODELSCOPE") == "hf://org/name@main"
    monkeypatch.setenv("VLLM_USE_MODELSCOPE", "True")
    must_raise(ValueError, "does not read from ModelScope", source_of, "org/name", None, "VLLM_USE_MODELSCOPE")
    assert source_of(str(tmp_path), None, "VLLM_USE_MODELSCOPE") == str(tmp_path)


def _linear() -> nn.Module:
    return nn.Linear(3, 4)


ARGUMENTS: dict[str, tuple[Callable[[], Any], dict[str, Any], str]] = {
    "dtype": (_linear, {"dtype": 16}, r"expected dtype to be a floating-point dtype, .*bfloat16, fp64.*, got 16"),
    "dtypes": (_linear, {"dtype": {"weight": 2.5}}, r"expected dtype\['weight'\] to be .*, got 2\.5"),
    "patterns": (_linear, {"dtype": {0: "bf16"}}, "expected the keys of dtype as regular expressions, got 0"),
    "progress": (_linear, {"progress": "bar"}, "expected progress to be a bool, got 'bar'; pass progress=True to show it"),
    "bucket_bytes": (
        _linear, {"options": LoadOptions(bucket_bytes="500MB")}, r"bucket_bytes to be a number of bytes as an int.*got '500MB'"
    ),
    "timeout": (_linear, {"timeout": "5 minutes"}, "timeout to be a number of seconds or a timedelta, got '5 minutes'"),
    "model": (_state, {}, r"expected model to be a torch\.nn\.Module, got a dict"),
    "class": (lambda: nn.Linear, {}, r"expected model to be a torch\.nn\.Module, got the class Linear"),
    "outer_shards": (
        _linear, {"options": LoadOptions(outer_shards=OuterShard("w", None))}, "outer_shards to be a list of epload.Out"
    ),
    "local_modules": (_linear, {"options": LoadOptions(local_modules="0")}, "local_modules to be a list of .*, got '0'"),
    "bool": (_linear, {"timeout": True}, "timeout to be a number of seconds or a timedelta, got True"),
    "hook": (
        _linear, {"init_missing": "zeros"}, "expected init_missing to be a function, or 'reset_parameters', got 'zeros'"
    ),
}  # fmt: skip


def test_keys_are_shown_as_they_were_renamed() -> None:
    state = {f"old.{name}": value for name, value in _state().items()}
    one_rule = r"2 unexpected checkpoint keys: old\.weight \(renamed to odd\.weight\), old\.bias \(ren"
    two_rules = r"mapping rules that match no checkpoint key: '\^never\\\\\.'"
    for new, *others, text in (("odd.", one_rule), ("odd.", r"^never\.", two_rules), ("", r"^never\.", "")):
        rules = Mapping(renames=(Rename(r"^old\.", new), *(Rename(other, "c.") for other in others)))
        if text:
            must_raise(ModelMismatch, text, epload.load, _linear(), state, mapping=rules, progress=False)
        else:
            epload.load(_linear(), state, mapping=rules, progress=False)


def _arguments(rank: int) -> dict[str, str]:
    """The others hear of what is wrong on one rank only."""
    texts = {}
    for argument, (make, options, _) in ARGUMENTS.items():
        model, others = (make(), options) if rank else (_linear(), {})
        options = {"progress": False, **others}
        error = error_of(lambda: epload.load(model, _state(), **options))  # noqa: B023
        texts[argument] = error.removesuffix(" [rank 1]")  # which it says of itself, or not
    return texts


def test_every_rank_hears_of_an_argument_of_another_type() -> None:
    first, second = ranks.run(2, _arguments)
    assert first == second
    for argument, text in first.items():
        assert re.search(f"^TypeError: .*{ARGUMENTS[argument][2]}", text), text


@pytest.mark.parametrize("dtype", [torch.int8, "int8", "bf61", "torch", {"weight": torch.int8}])
def test_a_dtype_of_no_weights_names_the_argument(dtype: Any, tmp_path: Path) -> None:
    save_file(_state(), tmp_path / "m.safetensors")
    for call in (
        lambda: epload.load(_linear(), _state(), dtype=dtype, progress=False),
        lambda: epload.save(_linear(), tmp_path / "saved", dtype=dtype),
        lambda: epload.convert(tmp_path / "m.safetensors", tmp_path / "converted", dtype=dtype),
    ):
        kinds = (ValueError, TypeError) if isinstance(dtype, dict) else (ValueError,)
        must_raise(kinds, r"expected dtype.* to be a floating-point dtype, such as torch\.bfloat16, or one of", call)
    assert os.listdir(tmp_path) == ["m.safetensors"]


def test_types_and_messages_have_the_same_choices() -> None:
    for name, literals in (("readers", [Readers]), ("algorithm", [Literal["auto"], Algorithm])):
        choices = [choice for literal in literals for choice in get_args(literal)]
        text = f"expected {name} to be one of {', '.join(choices)}, got 'none'"
        must_raise(ValueError, text, HierarchicalLoader, **{name: "none"})
        for choice in choices:
            HierarchicalLoader(**{name: choice}).close()
    for name, literal in (("snapshot", Snapshots), ("delta", Deltas), ("transport", Transports)):
        text = f"expected {name} to be one of {', '.join(get_args(literal))}, got 'x'"
        must_raise(ValueError, text, epload.WeightSender, _linear(), "127.0.0.1:0", receivers=1, **{name: "x"})
    receive = partial(epload.WeightReceiver, _linear(), "127.0.0.1:1")
    must_raise(ValueError, f"expected stage to be one of {', '.join(get_args(Stages))}, got 'x'", receive, stage="x")
    for make in (receive, partial(epload.WeightSender, _linear(), "127.0.0.1:1", receivers=1)):
        must_raise(TypeError, "expected progress to be a bool, got 1", make, progress=1)
    text = "expected progress to be a function of a number of bytes, got True"
    must_raise(TypeError, text, epload.convert, "m", "n", progress=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, "bfloat16", "torch.bfloat16", "bf16"])
def test_a_dtype_is_passed_by_itself_or_by_name(dtype: Any, tmp_path: Path) -> None:
    save_file(_state(), tmp_path / "m.safetensors")
    with torch.device("meta"):
        one, some = _linear(), _linear()
    epload.load(one, _state(), dtype=dtype, progress=False)
    epload.load(some, _state(), dtype={"weight": dtype}, progress=False)
    epload.save(_linear(), tmp_path / "saved", dtype=dtype)
    epload.convert(tmp_path / "m.safetensors", tmp_path / "converted", dtype=dtype)
    assert torch.equal(one.weight, _state()["weight"].bfloat16())
    assert (one.bias.dtype, some.weight.dtype, some.bias.dtype) == (torch.bfloat16, torch.bfloat16, torch.float32)
    for folder in ("saved", "converted"):
        assert {*epload.Checkpoint.open(tmp_path / folder).manifest.dtypes} == {torch.bfloat16}
