"""Keys and shapes that do not fit, and mistakes: one text on all ranks, which names them, and nothing has moved."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from transformers import MarianConfig, MarianMTModel

import epload
from epload import LocalModules, Mapping, ModelMismatch
from epload.mapping import Concatenate, Convert, Rename, Split, Stack, Unstack
from support.checks import as_bytes, full_values, local_of
from support.drop_ins import everywhere
from support.failures import error_of
from support.findings import differing
from support.fp8 import Tree
from support.models import Block, Tied, mesh, on_meta
from support.on_ranks import on_ranks
from support.pretrained import build
from support.recordings import tensors_of
from support.small_model import NODES, only_readers

State = dict[str, Tensor]
MAPPING = Mapping(
    (Rename(r"^old\.", ""),),
    (Convert((r"e\.(?P<index>\d+)\.gate$", r"e\.(?P<index>\d+)\.up$"), ("e.gate_up",), (Stack(0), Concatenate(1))),),
)


def target(**shapes: tuple[int, ...]) -> State:
    return {name.replace("__", "."): torch.empty(shape) for name, shape in shapes.items()}


def sharded(like: State) -> Any:
    return fully_shard(Tree(like), mesh=mesh(("all", 4)))


def loader() -> epload.HierarchicalLoader:
    return epload.HierarchicalLoader(epload.Topology.from_nodes(NODES), bucket_bytes=400, progress=False, timeout=60)


def values(like: State) -> State:
    return full_values(Tree(like))


def parts(model: nn.Module) -> State:
    return {name: local_of(tensor) for name, tensor in model.state_dict().items()}


def refused(like: State, good: State, bad: State, said: Any, unsaid: Any = (), **options: Any) -> None:
    """One text on all ranks, and nothing has moved: neither in a model on meta nor in one that holds ``good``."""
    for loaded in (False, True):
        model, run = sharded(like), loader()
        if loaded:
            run.load(model, only_readers(good))
        before = {name: tensor.clone() for name, tensor in parts(model).items()}
        texts = everywhere(error_of(partial(run.load, model, only_readers(bad), mapping=MAPPING, **options)))
        assert {*texts} == {texts[0]}
        assert texts[0].startswith("ModelMismatch")
        assert [part for part in said if part not in texts[0]] == [], texts[0]
        assert [part for part in unsaid if part in texts[0]] == [], texts[0]
        for name, tensor in parts(model).items():
            assert torch.equal(as_bytes(tensor), as_bytes(before[name])) if loaded else tensor.is_meta, name


EXPERTS, PLAIN = target(e__gate_up=(4, 6, 3), norm=(5,)), target(w=(5, 3), norm=(5,))
EACH = target(**{f"e__{number}__{part}": (3, 3) for number in range(4) for part in ("gate", "up")}, norm=(5,))
LIKE = target(a=(5, 3), b=(4,), c=(2, 2), e__gate_up=(4, 6, 3))
KEYS = (
    "1 parameter missing from the checkpoint: c\n", "1 unexpected checkpoint key: d\n",
    "strict=False ignores missing and unexpected keys",
)  # fmt: skip
SHAPES = (
    "2 mismatched shapes: b has shape [3], but [4] in the model; cannot make e.gate_up of shape [4, 6, 3] "
    "from 8 checkpoint tensors (e.0.gate, e.0.up, ..., e.3.up; shapes [2, 3], [3, 3]): the result has shape [4, 5, 3]",
    "ignore_mismatched_shapes=True skips parameters of mismatched shape",
)
LENIENT: dict[str, Any] = {"strict": False, "ignore_mismatched_shapes": True}


def odd() -> State:
    """``a`` fits, ``b`` and ``e.gate_up`` have another shape, ``c`` is missing, and ``d`` unexpected."""
    short = {name: t[:2] if name.endswith("gate") else t for name, t in values(EACH).items() if name != "norm"}
    return {"a": values(LIKE)["a"], "b": torch.zeros(3), "d": torch.zeros(1), **short}


@on_ranks(4)
def test_what_does_not_fit_is_named_and_moves_nothing(rank: int) -> None:
    incomplete = {name: t for name, t in values(EACH).items() if name != "e.2.up"}
    lacks = "cannot make e.gate_up of shape [4, 6, 3]", "the checkpoint lacks 1 of 8 sources, the first is e.2.up"
    twice, both = values(PLAIN) | {"old.w": torch.zeros(5, 3)}, ["w and old.w both map to the model's w"]
    for strict in (True, False):
        refused(EXPERTS, values(EXPERTS), incomplete, lacks, strict=strict)
        refused(PLAIN, values(PLAIN), twice, both, strict=strict)
    refused(LIKE, values(LIKE), odd(), (*KEYS, *SHAPES))
    refused(LIKE, values(LIKE), odd(), SHAPES, KEYS, strict=False)
    refused(LIKE, values(LIKE), odd(), KEYS, SHAPES, ignore_mismatched_shapes=True)


def keys_of(report: epload.LoadReport) -> tuple[list[str], list[str], list[str]]:
    return report.missing_keys, report.unexpected_keys, list(report.mismatched_keys)


@on_ranks(4)
def test_what_does_not_fit_is_listed_on_all_ranks_and_left_to_a_hook(rank: int) -> None:
    calls: list[str] = []

    def hook(module: nn.Module, path: str, names: tuple[str, ...]) -> None:
        for name in names:
            calls.append(f"{path}.{name}".removeprefix("."))
            local_of(getattr(module, name)).fill_(-1)

    good = values(LIKE)
    for init in (None, hook):
        model, run = sharded(LIKE), loader()
        run.load(model, only_readers(good))
        before = {name: tensor.clone() for name, tensor in parts(model).items()}
        report = run.load(model, only_readers(odd()), mapping=MAPPING, **LENIENT, init_missing=init)
        assert keys_of(report) == (["c"], ["d"], ["b", "e.gate_up"])
        assert re.search(r"\n  mismatched +2 tensors: b, e\.gate_up\n", str(report)), str(report)
        assert sorted(calls) == sorted(report.initialized) == ([] if init is None else ["b", "c", "e.gate_up"])
        for name, got in parts(model).items():
            expected = torch.full_like(got, -1) if init is not None and name != "a" else before[name]
            assert torch.equal(as_bytes(got), as_bytes(expected)), f"{name} is {got}, not {expected}"
    # In a strict load mismatched shapes alone are listed and skipped, if they are to be ignored.
    changed = {name: value + 1 for name, value in good.items()} | {"b": torch.zeros(3)}
    run.load(model, only_readers(good))
    report = run.load(model, only_readers(changed), ignore_mismatched_shapes=True)
    assert keys_of(report) == ([], [], ["b"])
    assert [n for n, t in parts(model).items() if not torch.equal(t, before[n] + (n != "b"))] == []
    for option in ("strict", "ignore_mismatched_shapes"):
        with pytest.raises(TypeError, match=f"expected {option} to be a bool, got 'shapes'"):
            run.load(model, only_readers(good), **{option: "shapes"})  # type: ignore[arg-type]


@on_ranks(4)
def test_what_does_not_fit_in_modules_of_each_rank(rank: int) -> None:
    model: Any = Block({f"x{rank}": (3,), f"y{rank}": (2,)})
    file = {"x0": torch.zeros(4), "x1": torch.ones(3), "x2": torch.zeros(1), "x3": torch.ones(3)}
    file |= {name: torch.ones(2) for name in ("y0", "y1", "y3")} | {"z": torch.ones(1)}
    report = loader().load(model, only_readers(file), local_modules=[LocalModules("")], **LENIENT)
    assert keys_of(report) == (["y2"], ["z"], ["x0", "x2"])
    for name in {f"x{rank}", f"y{rank}"} - {"y2", "x0", "x2"}:
        assert torch.equal(getattr(model, name), file[name]), name


# ---- one process ----


@pytest.mark.parametrize("kind", ["on meta", "reset", "hook"])
@pytest.mark.parametrize("mismatched", ["embed.weight", "head.weight"])
def test_what_one_name_fills_is_not_initialized_because_another_does_not_fit(mismatched: str, kind: str) -> None:
    state = full_values(Tied())
    values, state[mismatched] = state["embed.weight"], torch.zeros(6, 3)
    model: Any = Tied() if kind == "reset" else on_meta(Tied)
    called = []
    init: Any = {"on meta": None, "reset": "reset_parameters", "hook": lambda *args: called.append(args)}[kind]
    report = epload.load(model, state, ignore_mismatched_shapes=True, init_missing=init, progress=False)
    assert torch.equal(model.embed.weight, values)
    assert model.head.weight is model.embed.weight
    assert (report.mismatched_keys, report.initialized, called) == ([mismatched], [], [])


SPLIT = Mapping(converts=(Convert(("qkv",), ("q", "k", "v"), (Split(0),)),))
UNSTACK = Mapping(converts=(Convert((r"e\.w",), ("e.{index}",), (Unstack(0),)),))


@pytest.mark.parametrize(
    ("mapping", "state", "own", "left"),
    [
        (SPLIT, {"qkv": torch.arange(6.0)}, {"q": (2,), "k": (2,)}, ["v"]),
        (UNSTACK, {"e.w": torch.arange(8.0).reshape(4, 2)}, {"e.0": (2,), "e.2": (2,)}, ["e.1", "e.3"]),
    ],
    ids=["split", "experts"],
)
def test_parts_of_a_tensor_that_the_model_lacks_are_unexpected(
    mapping: Mapping, state: State, own: dict[str, tuple[int, ...]], left: list[str]
) -> None:
    model = Tree(target(**own)).to_empty(device="cpu")
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    with pytest.raises(ModelMismatch) as refused:
        epload.load(model, state, mapping=mapping, progress=False)
    assert refused.value.unexpected_keys == left
    assert f"{left[0]} (which a conversion makes)" in str(refused.value)
    assert not any(tensor.any() for tensor in model.state_dict().values())
    ignoring = replace(mapping, ignore_unexpected=tuple(f"^{re.escape(name)}$" for name in left))
    assert epload.load(model, state, mapping=ignoring, progress=False).ignored_keys == left
    report = epload.load(model, state, mapping=mapping, strict=False, progress=False)
    assert report.unexpected_keys == left


@pytest.mark.parametrize("pattern", ["(?i)^MTP", r"^(m)t(p)", "^(?P<a>m)"])
def test_patterns_of_ignored_keys_are_independent(pattern: str) -> None:
    state = {"w": torch.ones(2), "mtp.x": torch.ones(1), "aa": torch.ones(1)}
    mapping = Mapping(ignore_unexpected=(pattern, r"^(?P<a>a)\1$"))
    assert epload.load(Tree({"w": torch.zeros(2)}), state, mapping=mapping, progress=False).ignored_keys == [
        "mtp.x",
        "aa",
    ]


def test_what_is_no_tensor_is_said_to_be_there() -> None:
    state = {"weight": torch.ones(2, 3), "bias": np.zeros(2)}
    with pytest.raises(ModelMismatch, match=r"of these, the checkpoint has values that are no tensors .*from_numpy.*: bias"):
        epload.load(nn.Linear(3, 2), state, progress=False)


def test_a_mapping_ignores_what_it_says() -> None:
    model = nn.Linear(3, 2)
    state = {"w": torch.ones(2, 3), "bias": torch.zeros(2), "old.steps": torch.ones(1)}
    rename = (Rename("^w$", "weight"),)
    with pytest.raises(ModelMismatch, match=r"old\.steps"):
        epload.load(model, state, mapping=Mapping(rename), progress=False)
    ignoring = Mapping(rename, ignore_unexpected=(r"^old\.",), ignore_missing=("^bias$",))
    assert epload.load(model, state, mapping=ignoring, progress=False).ignored_keys == ["old.steps"]
    del state["bias"]
    assert epload.load(model, state, mapping=ignoring, progress=False).ignored_keys == ["bias", "old.steps"]


def test_load_takes_the_options_of_the_loader_and_of_its_load() -> None:
    model = nn.ParameterDict({"a": torch.zeros(3), "b": torch.zeros(2), "c": torch.zeros(1)})
    state = {"a": torch.arange(3.0), "b": torch.arange(4.0), "d": torch.zeros(1)}
    rare = epload.LoadOptions(algorithm="two_level", bucket_bytes=4096)
    report = epload.load(model, state, readers="one", verify=True, progress=False, options=rare, **LENIENT)
    assert torch.equal(model["a"].detach(), state["a"])
    assert keys_of(report) == (["c"], ["d"], ["b"])
    assert (report.readers, report.algorithm, report.verify) == ("one", "", True), "one rank sends nothing"
    for wrong in ({"deadline": 3}, {"options": {"src": 0}}):
        with pytest.raises(TypeError, match=next(iter(wrong))):
            epload.load(model, state, **wrong)  # type: ignore[arg-type]


# ---- keys that a class of transformers says to ignore ----


def marian() -> Any:
    sizes = {
        "vocab_size": 33,
        "d_model": 16,
        "max_position_embeddings": 19,
        "pad_token_id": 32,
        "decoder_start_token_id": 32,
    }
    for part in ("encoder", "decoder"):
        sizes |= {f"{part}_layers": 1, f"{part}_attention_heads": 2, f"{part}_ffn_dim": 24}
    return MarianMTModel(MarianConfig(**sizes)).eval()


EXTRA = {
    "old rotary frequencies": ("llama", {"model.layers.0.self_attn.rotary_emb.inv_freq": (4,)}),
    "old position ids": ("bert", {"bert.embeddings.position_ids": (1, 512)}),
    "an extra prediction layer": (
        "deepseek_v3",
        {"model.layers.61.eh_proj.weight": (16, 32), "model.layers.61.mlp.experts.0.gate_proj.weight": (8, 16)},
    ),
}


@pytest.mark.parametrize("case", EXTRA)
def test_keys_that_the_class_ignores_may_be_left_over(case: str, tmp_path: Path) -> None:
    kind, extra = EXTRA[case]
    whole = build(kind)
    whole.save_pretrained(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    save_file(state | {name: torch.ones(shape) for name, shape in extra.items()}, tmp_path / "model.safetensors")
    model = on_meta(partial(build, kind))
    report = epload.load(model, tmp_path, progress=False)
    assert differing(tensors_of(model), tensors_of(whole)) == []
    assert (sorted(report.ignored_keys), report.unexpected_keys, report.missing_keys) == (sorted(extra), [], [])
    assert sorted(extra)[0] in str(report)


def test_ignored_missing_keys_are_computed(tmp_path: Path) -> None:
    """Marian saves no position tables: they are sines."""
    whole, model = marian(), on_meta(marian)
    whole.save_pretrained(tmp_path)
    report = epload.load(model, tmp_path, progress=False)
    assert differing(tensors_of(model), tensors_of(whole)) == []
    tables = [f"model.{part}.embed_positions.weight" for part in ("decoder", "encoder")]
    assert (sorted(report.ignored_keys), report.missing_keys) == (tables, [])
    assert {*tables} <= {*report.initialized}


def test_other_keys_are_still_an_error() -> None:
    state = dict(build("llama").state_dict())
    del state["lm_head.weight"], state["model.layers.1.mlp.up_proj.weight"]
    state |= {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4), "model.extra.weight": torch.ones(2)}
    text = error_of(partial(epload.load, on_meta(partial(build, "llama")), state, progress=False))
    assert text.startswith("ModelMismatch"), text
    assert "model.layers.1.mlp.up_proj.weight" in text
    assert "model.extra.weight" in text
    assert "inv_freq" not in text
