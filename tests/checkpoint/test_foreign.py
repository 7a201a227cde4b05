"""What is passed by mistake: each says in a sentence what it is and what to do, the same on every rank, and changes nothing."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn

import epload
from epload import Checkpoint, HierarchicalLoader, LoadOptions, Mapping, ModelMismatch
from epload.checkpoint.opening import join_source
from epload.mapping import Rename
from epload.planning.algorithms import Algorithm
from epload.planning.schedule import Readers
from epload.sync.endpoint import Deltas, Snapshots, Stages, Transports
from support import ranks
from support.checkpoints import assert_same, read_all, tensor
from support.failures import error_of, must_raise

State = dict[str, torch.Tensor]


def _state() -> State:
    return {"weight": tensor(1, (4, 3)), "bias": tensor(2, (4,))}


def _saved(path: Path, value: Any) -> Path:
    path.parent.mkdir(exist_ok=True, parents=True)
    torch.save(value, path)
    return path


def _config(folder: Path) -> Path:
    save_file(_state(), folder / "model.safetensors")
    (folder / "config.json").write_text('{"model_type": "llama"}')
    return folder / "config.json"


def _gguf(folder: Path) -> Path:
    (folder / "model.q4").write_bytes(b"GGUF\x03\x00\x00\x00" + bytes(100))
    return folder / "model.q4"


def _dcp(folder: Path) -> Path:
    dcp.save(_state(), checkpoint_id=str(folder / "dcp"), no_dist=True)
    return folder / "dcp"


def _dcp_without_metadata(folder: Path) -> Path:
    (_dcp(folder) / ".metadata").unlink()
    return folder / "dcp"


def _zero_step(folder: Path) -> Path:
    _saved(folder / "global_step7" / "mp_rank_00_model_states.pt", {"module": _state()})
    return _saved(folder / "global_step7" / "zero_pp_rank_0_mp_rank_00_optim_states.pt", {}).parent


def _zero(folder: Path) -> Path:
    _zero_step(folder)
    (folder / "latest").write_text("global_step7")
    return folder


def _pointer(name: str) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        text = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'1' * 64}\nsize 4976698672\n"
        (folder / name).write_text(text)
        return folder / name

    return write


def _of_one_rank(name: str, offsets: list[int]) -> Callable[[Path], Path]:
    """As torch.distributed.checkpoint's HuggingFaceStorageWriter saves it."""

    def write(folder: Path) -> Path:
        content = {"weight": {"saved_offsets": offsets}}
        save_file({"weight": tensor(1, (2, 3))}, folder / name, metadata={"DCP_SHARDING_INFO": json.dumps(content)})
        return folder

    return write


FOREIGN: dict[str, tuple[Callable[[Path], Any], str]] = {
    "config.json": (_config, r"config\.json is a JSON file, which holds no weights: pass the folder it is in"),
    "GGUF": (_gguf, r"model\.q4 is a GGUF file.*pass the checkpoint it was converted from"),
    "DCP metadata": (lambda f: _dcp(f) / ".metadata", r"\.metadata is part of .*\(DCP\).*: pass the folder"),
    "DCP without metadata": (_dcp_without_metadata, r"dcp has files of .*\(DCP\), but no \.metadata: the job ended"),
    "DCP safetensors shard of others": (
        _of_one_rank("part.safetensors", [2, 0]),
        r"weight of shape \[4, 3\] has chunks for only 6 of its 12 elements: files are missing",
    ),
    "DeepSpeed": (_zero, r"is a DeepSpeed checkpoint.*zero_to_fp32\.py"),
    "DeepSpeed file": (
        lambda f: _zero_step(f) / "mp_rank_00_model_states.pt", r"mp_rank_00_model_states\.pt is part of a DeepSpeed checkpoint"
    ),
    "list of files": (lambda f: [f / "a.safetensors", f / "b.safetensors"], "as one path, got a list of 2: pass the folder"),
    "absent": (lambda f: f / "nothing here", "nothing here: expected a file or a folder"),
    "user that is none": (lambda f: "~no-such-user-here/model", "no checkpoint at ~no-such-user-here"),
    "Git LFS": (_pointer("model.safetensors"), "is a Git LFS pointer in place of the file: run `git lfs pull`"),
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
    """With the key that in other files stands for parts."""
    folder = _of_one_rank("model-00001-of-00001.safetensors", [0, 0])(tmp_path)
    assert_same(read_all(Checkpoint.open(folder)), {"weight": tensor(1, (2, 3))})


@pytest.mark.parametrize("name", ["index.json", "model.safetensors.index.json", "mine.json"])
def test_an_index_by_any_name(name: str, tmp_path: Path) -> None:
    save_file(_state(), tmp_path / "a.safetensors")
    (tmp_path / name).write_text(json.dumps({"weight_map": dict.fromkeys(_state(), "a.safetensors")}))
    checkpoint = Checkpoint.open(tmp_path / name)
    assert_same(read_all(checkpoint), _state())
    assert_same(read_all(join_source(tmp_path / name, checkpoint.manifest)), _state())


def test_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    save_file(_state(), tmp_path / "model.safetensors")
    for path in ("~", "~/model.safetensors"):
        checkpoint = Checkpoint.open(path)
        assert_same(read_all(checkpoint), _state())
        assert_same(read_all(join_source(path, checkpoint.manifest)), _state())


# ---- the other arguments ----


def _linear() -> nn.Module:
    return nn.Linear(3, 4)


ARGUMENTS: dict[str, tuple[Callable[[], Any], dict[str, Any], str]] = {
    "dtype": (_linear, {"dtype": 16}, r"expected dtype to be a floating-point dtype, .*bfloat16, fp64.*, got 16"),
    "dtypes": (_linear, {"dtype": {"weight": 2.5}}, r"expected dtype\['weight'\] to be .*, got 2\.5"),
    "patterns": (_linear, {"dtype": {0: "bf16"}}, "expected the keys of dtype as regular expressions, got 0"),
    "verify": (_linear, {"verify": "full"}, "expected verify to be a bool, got 'full'; pass verify=True to prove"),
    "progress": (_linear, {"progress": "bar"}, "expected progress to be a bool, got 'bar'; pass progress=True to show it"),
    "bucket_bytes": (
        _linear, {"options": LoadOptions(bucket_bytes="500MB")}, r"bucket_bytes to be a number of bytes as an int.*got '500MB'"
    ),
    "timeout": (_linear, {"timeout": "5 minutes"}, "timeout to be a number of seconds or a timedelta, got '5 minutes'"),
    "model": (_state, {}, r"expected model to be a torch\.nn\.Module, got a dict"),
    "class": (lambda: nn.Linear, {}, r"expected model to be a torch\.nn\.Module, got the class Linear"),
    "hook": (
        _linear, {"init_missing": "zeros"}, "expected init_missing to be a function, or 'reset_parameters', got 'zeros'"
    ),
}  # fmt: skip


# ---- renames ----


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
        texts[argument] = error_of(lambda: epload.load(model, _state(), **options))  # noqa: B023
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
