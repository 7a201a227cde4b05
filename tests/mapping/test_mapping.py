"""Mapping: checkpoint names and layouts to boxes of the model's tensors, assembled and compared with plain torch."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod

import pytest
import torch
from torch import Tensor, nn

from epload import LocalModules, Mapping, ModelMismatch, OuterShard, load
from epload.mapping import Concatenate, Convert, Quantize, Rename, Reshape, Split, Stack, Transpose, Unstack, from_model
from epload.mapping.resolve import resolve_mapping
from epload.model.targets import collect
from support.mappings import Shapes, assemble, place, shapes_of
from support.models import on_meta
from support.pretrained import build

EXPERTS = Mapping(
    converts=(
        Convert(
            (r"experts\.(?P<index>\d+)\.gate\.weight$", r"experts\.(?P<index>\d+)\.up\.weight$"),
            ("experts.gate_up",),
            (Stack(0), Concatenate(1)),
        ),
        Convert((r"experts\.(?P<index>\d+)\.down\.weight$",), ("experts.down",), (Stack(0),)),
        Convert((r"q\.weight$", r"k\.weight$", r"v\.weight$"), ("qkv.weight",), (Concatenate(0),)),
    )
)


def tensor(number: int, *shape: int) -> Tensor:
    return torch.arange(prod(shape), dtype=torch.float64).reshape(shape) + 1000 * number


def equal(got: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return set(got) == set(expected) and all(torch.equal(got[name], value) for name, value in expected.items())


def test_a_name_whose_new_form_the_model_lacks_stays() -> None:
    mapping = Mapping(renames=(Rename("gamma", "weight"),))
    value = tensor(1, 2)
    assert equal(assemble(mapping, {"gamma": value}, {"gamma": (2,), "other": (2,)}), {"gamma": value})
    assert equal(assemble(mapping, {"gamma": value}, {"gamma": (2,), "weight": (2,)}), {"weight": value})


def test_the_base_model_comes_with_and_without_its_head() -> None:
    mapping = Mapping(base_model_prefix="model")
    w, head = tensor(1, 2), tensor(2, 3)
    for source in ("model.w", "w"):
        for target in ("model.w", "w"):
            expected = {target: w, "head": head}
            assert equal(assemble(mapping, {source: w, "head": head}, shapes_of(expected)), expected)


def one_of(convert: Convert) -> Mapping:
    return Mapping(converts=(convert,))


WHOLE = {"a": tensor(1, 3, 4), "b.c": tensor(2), "d": tensor(3, 0, 2), "experts.0.down.weight": tensor(4, 3)}
DOWNS = [tensor(i, 3, 4) for i in range(3)]
GATES, UPS = [tensor(i, 3, 4) for i in range(12)], [tensor(100 + i, 2, 4) for i in range(12)]
Q, K, V = tensor(1, 4, 3), tensor(2, 2, 3), tensor(3, 1, 3)
QKV = {"l.q.weight": Q, "l.k.weight": K, "l.v.weight": V}
# Fused in the file, gate and up interleaved by row and transposed; one module an expert in the model.
EACH = {f"l.experts.{i}.{name}": t for i in range(5) for name, t in (("gate", GATES[i]), ("up", GATES[i] + 500))}
PAIRS = {"l.experts.gate_up": torch.stack([torch.stack([t, t + 500], 1).reshape(6, 4).T for t in GATES[:5]])}
UNFUSED = Convert(
    (r"experts\.gate_up$",), (r"experts.{index}.gate", r"experts.{index}.up"),
    (Transpose(1, 2), Reshape((5, 3, 2, 4)), Transpose(1, 2), Split(1), Reshape((5, 3, 4)), Unstack(0)),
)  # fmt: skip
Case = tuple[Mapping, dict[str, Tensor], dict[str, Tensor]]
ASSEMBLED: dict[str, Case] = {
    "identity": (Mapping(), WHOLE, WHOLE),
    "targets that the model lacks": (EXPERTS, WHOLE, WHOLE),
    "what the model does not have": (EXPERTS, {**WHOLE, "stray": V, "layer.experts.0.gate.weight": Q}, {"a": WHOLE["a"]}),
    "one module an expert": (one_of(UNFUSED), PAIRS, EACH),
    "one module for each of a rank's experts": (
        one_of(UNFUSED), PAIRS, {name: t for name, t in EACH.items() if ".1." in name or ".4." in name}
    ),
    "renames": (
        Mapping(renames=(Rename(r"^transformer\.", "model."), Rename(r"\.h\.(\d+)\.", r".layers.\1."))),
        {"transformer.h.10.w": Q, "same": V}, {"model.layers.10.w": Q, "same": V},
    ),
    "stack": (
        EXPERTS, {f"l.7.experts.{i}.down.weight": DOWNS[i] for i in (2, 0, 1)}, {"l.7.experts.down": torch.stack(DOWNS)}
    ),
    "concatenation of unequal parts": (EXPERTS, QKV, {"l.qkv.weight": torch.cat([Q, K, V])}),
    "stack and concatenation": (
        EXPERTS,
        {f"l.experts.{i}.up.weight": UPS[i] for i in reversed(range(12))}
        | {f"l.experts.{i}.gate.weight": GATES[i] for i in range(12)},
        {"l.experts.gate_up": torch.stack([torch.cat(pair) for pair in zip(GATES, UPS, strict=True)])},
    ),
    "rename, then stack, of two layers": (
        Mapping((Rename("block_sparse_moe", "mlp"),), EXPERTS.converts),
        {f"{n}.block_sparse_moe.experts.{i}.down.weight": down + n for n in range(2) for i, down in enumerate(DOWNS)},
        {f"{n}.mlp.experts.down": torch.stack(DOWNS) + n for n in range(2)},
    ),
    "split into the targets' sizes": (
        one_of(Convert((r"qkv\.weight$",), ("q.weight", "k.weight", "v.weight"), (Split(0, "targets"),))),
        {"l.qkv.weight": torch.cat([Q, K, V])}, QKV,
    ),
    "split as torch.chunk does": (
        one_of(Convert(("both",), ("up", "gate"), (Split(0),))), {"both": tensor(1, 5)},
        {"up": tensor(1, 5)[:3], "gate": tensor(1, 5)[3:]},
    ),
    "a model that lacks some of the targets": (
        one_of(Convert(("both",), ("up", "gate"), (Split(0),))), {"both": tensor(1, 4)}, {"gate": tensor(1, 4)[2:]}
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", ASSEMBLED)
def test_regions_assemble_what_torch_computes(case: str) -> None:
    mapping, sources, expected = ASSEMBLED[case]
    assert equal(assemble(mapping, sources, shapes_of(expected)), expected)


def experts(count: Sequence[int], kinds: Sequence[str] = ("gate", "up"), shape: tuple[int, ...] = (2, 4)) -> Shapes:
    return {f"l.experts.{i}.{kind}.weight": shape for i in count for kind in kinds}


ANY_INDEX = Mapping(converts=(Convert((r"e\.(?P<index>[^.]+)\.w$",), ("e.w",), (Stack(-1),)),))
GATE_UP: Shapes = {"l.experts.gate_up": (3, 4, 4)}
CASES: dict[str, tuple[Mapping, Shapes, Shapes, list[str]]] = {
    "whole, wrong shape": (Mapping(), {"a": (2, 3)}, {"a": (3, 2)}, ["a ", "[2, 3]", "[3, 2]"]),
    "all wrong shapes": (
        Mapping(), {"a": (2,), "b": (2,), "c": (4,)}, {"a": (2,), "b": (3,), "c": (5,)}, ["b has shape [2]", "c has shape [4]"]
    ),
    "renamed, wrong shape": (
        Mapping(renames=(Rename("^old", "new"),)), {"old.a": (2,)}, {"new.a": (3,)}, ["old.a", "new.a", "[2]", "[3]"]
    ),
    "missing expert": (EXPERTS, experts([0, 2]), GATE_UP, ["l.experts.gate_up", "lacks 2 of 6", "experts.1.gate.weight"]),
    "missing part": (
        EXPERTS, {"a.q.weight": (2, 4), "a.v.weight": (1, 4)}, {"a.qkv.weight": (4, 4)}, ["a.qkv.weight", "k.weight"]
    ),
    "index out of range": (EXPERTS, experts([0, 1, 2, 3]), GATE_UP, ["l.experts.gate_up", "l.experts.3.", "[4, 4, 4]"]),
    "negative index": (ANY_INDEX, {"e.-1.w": (2,), "e.1.w": (2,)}, {"e.w": (2, 2)}, ["'e.-1.w'", "0 or more"]),
    "an index of 20 digits": (
        ANY_INDEX, {"e.0.w": (2,), f"e.{10**20}.w": (2,)}, {"e.w": (2, 2)}, ["lacks 99999999999999999999 of", "e.1.w"]
    ),
    "an index that is no integer": (ANY_INDEX, {"e.a.w": (2,)}, {"e.w": (1, 2)}, ["'e.a.w'", "as the index", "'a'"]),
    "a list without tensors": (
        Mapping(converts=(Convert((r"e\.(?P<index>\d+)$", "s$"), ("t",), (Stack(0), Concatenate(0))),)), {"s": (2,)},
        {"t": (2, 2)}, ["cannot make t", "at least one tensor to stack"],
    ),
    "same index twice": (
        EXPERTS, {**experts([0, 1, 2]), "l.experts.01.up.weight": (2, 4)}, GATE_UP,
        ["l.experts.1.up.weight", "l.experts.01.up.weight"],
    ),
    "two names become one": (
        Mapping(renames=(Rename("^old[.]", ""),)), {"w": (2, 4), "old.w": (2, 4)}, {"w": (2, 4)}, ["w", "old.w"]
    ),
    "whole and in parts": (
        EXPERTS, {"l.experts.gate_up": (3, 4, 4), **experts([0, 1, 2])}, GATE_UP, ["l.experts.gate_up", "l.experts.0"]
    ),
    "parts that do not fill": (EXPERTS, experts([0, 1, 2], shape=(1, 4)), GATE_UP, ["l.experts.gate_up", "[3, 2, 4]"]),
    "parts that nothing keeps apart": (
        Mapping(converts=(Convert(("a", "b"), ("ab",)),)), {"a": (2, 4), "b": (2, 4)}, {"ab": (4, 4)}, ["ab", "a, b"]
    ),
    "stacked without an index": (
        Mapping(converts=(Convert(("a", "b"), ("ab",), (Stack(),)),)), {"a": (2,), "b": (2,)}, {"ab": (2, 2)}, ["ab", "a"]
    ),
    "split equally into unequal targets": (
        Mapping(converts=(Convert(("qkv",), ("q", "k"), (Split(),)),)), {"qkv": (6, 2)}, {"q": (4, 2), "k": (2, 2)},
        ["qkv", "cannot make q", "[4, 2]", "[3, 2]"],
    ),
    "a dim that is no int": (
        Mapping(converts=(Convert(("qkv",), ("q", "k"), (Split("targets"),)),)), {"qkv": (6, 2)}, {"q": (4, 2), "k": (2, 2)},  # type: ignore[arg-type]
        ["cannot make q", "expected a dim that is an int, got 'targets'"],
    ),
    "a shift of what is no number": (
        Mapping(renames=(Rename(r"^(\w+)\.", r"\1.", shift=1),)), {"head.w": (2,)}, {"w": (2,)},
        ["source='^(\\\\w+)\\\\.'", "'head' in head.w"],
    ),
    "two rules for one target": (
        Mapping(converts=(Convert(("^a$",), ("t",)), Convert(("^b$",), ("t",)))), {"a": (2,), "b": (2,)}, {"t": (2,)}, ["a and b"]
    ),
    "a mapping that matches nothing": (
        EXPERTS, {"x.y": (2,), "z": (2,)}, {"l.experts.down": (2, 2), "z": (2,)},
        ["no rule of the mapping matches", "the model lacks 1 of the 2 keys (x.y)", "experts"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_refusals_name_the_keys(case: str) -> None:
    mapping, sources, targets, message = CASES[case]
    with pytest.raises(ModelMismatch) as caught:
        place(mapping, sources, targets)
    assert [text for text in message if text not in str(caught.value)] == [], str(caught.value)


def test_from_model_gives_what_auto_uses() -> None:
    llama = on_meta(lambda: build("llama"))
    for model in (nn.Linear(2, 2), llama, torch.compile(llama), nn.DataParallel(llama)):
        mapping = from_model(model)
        assert mapping == resolve_mapping("auto", model, collect(model).index)
        copy = pickle.loads(pickle.dumps(mapping))
        assert (copy, hash(copy)) == (mapping, hash(mapping))
        assert repr(copy) == repr(mapping)  # which the plan's fingerprint covers
    assert from_model(llama).ties == (("model.embed_tokens.weight", "lm_head.weight"),)


def test_a_plain_model_does_not_import_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.setitem(sys.modules, "transformers.conversion_mapping", None)
    assert resolve_mapping("auto", nn.Linear(1, 1), []) == Mapping()


def test_lists_and_dicts_are_taken_for_tuples() -> None:
    lists = Mapping(
        renames={"^old": "new", r"(\d+)$": r"n\1"}, aliases=[Rename("x", "y")], ties=[["a", "b"]], only=[("a", "b")],
        ignore_missing=["head"], quantize=Quantize(weights=["w"]),
        converts=[Convert(["a$"], ["b", "c"], [Split(0, [1, 2]), Reshape([3, -1])], ["s."])],
    )  # fmt: skip
    tuples = Mapping(
        renames=(Rename("^old", "new"), Rename(r"(\d+)$", r"n\1")), aliases=(Rename("x", "y"),), ties=(("a", "b"),),
        only=(("a", "b"),), ignore_missing=("head",), quantize=Quantize(weights=("w",)),
        converts=(Convert(("a$",), ("b", "c"), (Split(0, (1, 2)), Reshape((3, -1))), ("s.",)),),
    )  # fmt: skip
    assert lists == tuples
    assert (hash(lists), repr(lists)) == (hash(tuples), repr(tuples))
    state = {"old.weight": tensor(1, 3, 2), "old.bias": tensor(2, 3)}
    model = nn.ModuleDict({"new": nn.Linear(2, 3, dtype=torch.float64)})
    load(model, state, mapping=Mapping(renames={"^old": "new"}), progress=False)
    assert torch.equal(model["new"].weight, state["old.weight"])


NO_PATTERN = r"expected valid regular expressions, and targets that refer to groups they define, got (Rename|Convert)"
NOWHERE = r"as regular expressions, got '\(': missing \)"
EMPTY = "expected at least one source and one target"
MISTAKES: list[tuple[type[Exception], str, Callable[[], object]]] = [
    # a tuple of one without its comma
    (TypeError, r"ignore_missing of a Mapping .*, got 'head'; write \('head',\)", lambda: Mapping(ignore_missing="head")),
    (TypeError, r"renames of a Mapping to be a tuple of Rename, .* write \(", lambda: Mapping(renames=Rename("a", "b"))),
    (TypeError, r"renames of a Mapping to be a tuple of Rename, got \('a', 'b'\)$", lambda: Mapping(renames=("a", "b"))),
    (TypeError, "expected renames from regular expressions to strings, got 'a': 3", lambda: Mapping(renames={"a": 3})),
    (TypeError, "sources of a Convert to be a tuple of str", lambda: Convert("a$", ("b",))),
    (TypeError, "operations of a Convert", lambda: Convert(("a$",), ("b",), Concatenate(0))),
    # rules, checked when made
    (ValueError, NO_PATTERN, lambda: Rename("(a", "b")),
    (ValueError, NO_PATTERN, lambda: Rename("(a)", r"\2")),
    (ValueError, NO_PATTERN, lambda: Rename("(a)", r"\g<layer>")),
    (ValueError, NO_PATTERN, lambda: Convert(("a", "b["), ("c",))),
    (ValueError, NO_PATTERN, lambda: Convert(("(a)", "b"), (r"\1",))),
    (ValueError, EMPTY, lambda: Convert((), ("a",))),
    (ValueError, EMPTY, lambda: Convert(("a",), ())),
    (ValueError, "expected sizes to be 'targets', 'equal' or a tuple of sizes, got 'tagrets'", lambda: Split(0, "tagrets")),
    # expressions, checked where they are passed
    (ValueError, NOWHERE, lambda: Mapping(ignore_missing=("head",), ignore_unexpected=["a", "("])),
    (ValueError, NOWHERE, lambda: Mapping(ignore_missing=("head", "("))),
    (ValueError, NOWHERE, lambda: Quantize(weights=("(",))),
    (ValueError, NOWHERE, lambda: LocalModules("(")),
    (ValueError, NOWHERE, lambda: OuterShard("(", None)),  # type: ignore[arg-type]
    (ValueError, NOWHERE, lambda: load(nn.Linear(2, 2), {}, dtype={"(": torch.float32})),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "text", "make"), MISTAKES)
def test_mistakes_are_found_at_once(kind: type[Exception], text: str, make: Callable[[], object]) -> None:
    with pytest.raises(kind, match=text):
        make()


@pytest.mark.parametrize("reference", [r"\1", r"\g<1>", r"\g<n>"])
def test_a_shift_applies_however_the_number_is_written(reference: str) -> None:
    rename = Rename(r"^blocks\.(?P<n>\d+)\.(\w)", rf"layers.{reference}.\2\2", shift=-1)
    assert rename.apply(["blocks.1.w", "blocks.12.w"]) == ["layers.0.ww", "layers.11.ww"]
    with pytest.raises(ValueError, match="the number to which shift and divide apply"):
        Rename(r"^blocks\.(\d+)\.", "layers.", shift=-1)


def test_a_stage_of_a_pipeline_that_lacks_what_its_head_is_tied_to() -> None:
    ties = Mapping(ties=(("embed", "head"),))
    value = torch.rand(3, 2)
    assert torch.equal(assemble(ties, {"embed": value}, {"head": (3, 2)})["head"], value)
    both = {"embed": value, "head": value + 1}  # whose values may differ
    assert torch.equal(assemble(ties, both, {"head": (3, 2)})["head"], value + 1)


def test_rules_that_match_nothing_beside_others_are_warned_of() -> None:
    """A misspelled rule leaves a square weight as it is."""
    model = nn.Linear(2, 2, bias=False)
    mapping = Mapping(renames=(Rename("^old$", "weight"), Rename("wieght", "bias")))
    report = load(model, {"old": torch.ones(2, 2)}, mapping=mapping, progress=False)
    assert report.warnings == ["rules match no key of the checkpoint: 'wieght'; there are old"]
    unchanged = Mapping(renames=(Rename(r"^(module\.)?", ""), Rename("^old$", "weight")))  # matches, and changes nothing
    for silent in (replace(mapping, required=False), unchanged):
        report = load(model, {"old": torch.ones(2, 2)}, mapping=silent, progress=False)
        assert report.warnings == []
