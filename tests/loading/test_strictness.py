"""Keys and shapes that do not fit, and mistakes: one text on all ranks, which names them, and nothing has moved."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import epload
from epload import LocalModules, Mapping
from epload.mapping import Concatenate, Convert, Rename, Split, Stack, Unstack
from support import ranks
from support.checks import as_bytes, full_values, local_of
from support.failures import error_of
from support.fp8 import Tree
from support.models import Block, mesh, on_meta
from support.on_ranks import on_ranks
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


def refused(like: State, good: State, bad: State, mapping: Mapping | str = "auto", **options: Any) -> list[str]:
    """Returns the error's text and what the refused load has changed, of a model on meta and of one that holds ``good``."""
    texts = []
    for loaded in (False, True):
        model, run = sharded(like), loader()
        if loaded:
            run.load(model, only_readers(good))
        before = {name: tensor.clone() for name, tensor in parts(model).items()}
        texts.append(error_of(lambda: run.load(model, only_readers(bad), mapping=mapping, **options)))  # noqa: B023
        for name, tensor in parts(model).items():
            if tensor.is_meta is loaded or (loaded and not torch.equal(as_bytes(tensor), as_bytes(before[name]))):
                texts.append(f"{name} was changed")
    return texts


# ---- mistakes ----

EXPERTS = target(e__gate_up=(4, 6, 3), norm=(5,))


def expert(number: int) -> State:
    return values(target(**{f"e__{number}__gate": (3, 3), f"e__{number}__up": (3, 3)}))


ALL = {**expert(0), **expert(1), **expert(2), **expert(3), "norm": torch.arange(5.0)}
PLAIN = target(w=(5, 3), norm=(5,))
MISTAKES: dict[str, tuple[State, State, Mapping | str, tuple[str, ...]]] = {
    "an incomplete set of experts": (
        EXPERTS, {name: t for name, t in ALL.items() if name != "e.2.up"}, MAPPING,
        ("cannot make e.gate_up of shape [4, 6, 3]", "the checkpoint lacks 1 of 8 sources, the first is e.2.up"),
    ),
    "two keys for one region": (
        PLAIN, values(PLAIN) | {"old.w": torch.zeros(5, 3)}, MAPPING, ("w and old.w both map to the model's w",)
    ),
}  # fmt: skip


# ---- missing, unexpected, mismatched ----

LIKE = target(a=(5, 3), b=(4,), c=(2, 2), e__gate_up=(4, 6, 3))
SHORT = {name: t[:2] if name.endswith("gate") else t for name, t in ALL.items() if name != "norm"}
KEYS = (
    "1 parameter missing from the checkpoint: c\n", "1 unexpected checkpoint key: d\n",
    "strict=False ignores missing and unexpected keys",
)  # fmt: skip
SHAPES = (
    "2 mismatched shapes: b has shape [3], but [4] in the model; cannot make e.gate_up of shape [4, 6, 3] "
    "from 8 checkpoint tensors (e.0.gate, e.0.up, ..., e.3.up; shapes [2, 3], [3, 3]): the result has shape [4, 5, 3]",
    "ignore_mismatched_shapes=True skips parameters of mismatched shape",
)
OPTIONS = {(True, False): ((*KEYS, *SHAPES), ()), (False, False): (SHAPES, KEYS), (True, True): (KEYS, SHAPES)}
"""Values of strict and ignore_mismatched_shapes, with the texts that are in the error and those that are not."""


def odd() -> State:
    """``a`` fits, ``b`` and ``e.gate_up`` have another shape, ``c`` is missing, and ``d`` unexpected."""
    return {"a": values(LIKE)["a"], "b": torch.zeros(3), "d": torch.zeros(1), **SHORT}


def _refusals(rank: int) -> dict[Any, list[str]]:
    texts: dict[Any, list[str]] = {}
    for (case, (like, bad, mapping, _)), strict in product(MISTAKES.items(), (True, False)):
        texts[case, strict] = refused(like, values(like), bad, mapping, strict=strict)
    for strict, ignore in OPTIONS:
        texts[strict, ignore] = refused(
            LIKE, values(LIKE), odd(), MAPPING, strict=strict, ignore_mismatched_shapes=ignore
        )
    return texts


def test_what_does_not_fit_is_named_and_moves_nothing() -> None:
    by_rank = ranks.run(4, _refusals)
    assert all(texts == by_rank[0] for texts in by_rank)
    for case, texts in by_rank[0].items():
        expected, absent = OPTIONS.get(case) or (MISTAKES[case[0]][3], ())
        assert len(texts) == 2, f"{case}: {texts}"  # on meta and loaded, and nothing was changed
        assert texts[0] == texts[1], case
        assert texts[0].startswith("ModelMismatch"), case
        assert [part for part in expected if part not in texts[0]] == [], f"{case}: {texts[0]}"
        assert [part for part in absent if part in texts[0]] == [], f"{case}: {texts[0]}"


def keys_of(report: epload.LoadReport) -> tuple[list[str], list[str], list[str]]:
    return report.missing_keys, report.unexpected_keys, list(report.mismatched_keys)


def _lenient(rank: int) -> list[str]:
    problems: list[str] = []
    calls: list[tuple[str, ...]] = []

    def hook(module: nn.Module, path: str, names: tuple[str, ...]) -> None:
        calls.extend((path, name) for name in names)
        for name in names:
            local_of(getattr(module, name)).fill_(-1)

    good = values(LIKE)
    for init in (None, hook):
        model, run = sharded(LIKE), loader()
        run.load(model, only_readers(good))
        before = {name: tensor.clone() for name, tensor in parts(model).items()}
        calls.clear()
        lenient = {"strict": False, "ignore_mismatched_shapes": True}
        report = run.load(model, only_readers(odd()), mapping=MAPPING, **lenient, init_missing=init)
        if keys_of(report) != (["c"], ["d"], ["b", "e.gate_up"]) or not re.search(
            r"\n  mismatched +2 tensors: b, e\.gate_up\n", str(report)
        ):
            problems.append(str(report))
        left = [] if init is None else [("", "b"), ("", "c"), ("e", "gate_up")]
        if sorted(calls) != left or sorted(report.initialized) != [".".join(p for p in c if p) for c in left]:
            problems.append(f"{calls} {report.initialized}")
        for name, got in parts(model).items():
            expected = torch.full_like(got, -1) if init is not None and name != "a" else before[name]
            if not torch.equal(as_bytes(got), as_bytes(expected)):
                problems.append(f"{name} is {got} where {expected} was expected")
    # In a strict load mismatched shapes alone are listed and skipped, if they are to be ignored.
    changed = {name: value + 1 for name, value in good.items()} | {"b": torch.zeros(3)}
    run.load(model, only_readers(good))
    report = run.load(model, only_readers(changed), ignore_mismatched_shapes=True)
    problems += [] if keys_of(report) == ([], [], ["b"]) else [str(report)]
    problems += [n for n, t in parts(model).items() if not torch.equal(t, before[n] + (n != "b"))]
    for option in ("strict", "ignore_mismatched_shapes"):
        with pytest.raises(TypeError, match=f"expected {option} to be a bool, got 'shapes'"):
            run.load(model, only_readers(good), **{option: "shapes"})  # type: ignore[arg-type]
    return problems


def _local(rank: int) -> list[str]:
    """Loads modules that each rank has of its own."""
    model = Block({f"x{rank}": (3,), f"y{rank}": (2,)})
    file = {"x0": torch.zeros(4), "x1": torch.ones(3), "x2": torch.zeros(1), "x3": torch.ones(3), "y0": torch.ones(2)}
    file |= {"y1": torch.ones(2), "y3": torch.ones(2), "z": torch.ones(1)}
    lenient = {"strict": False, "ignore_mismatched_shapes": True}
    report = loader().load(model, only_readers(file), local_modules=[LocalModules("")], **lenient)
    problems = [] if keys_of(report) == (["y2"], ["z"], ["x0", "x2"]) else [str(report)]
    for name in (f"x{rank}", f"y{rank}"):
        if name not in ("y2", "x0", "x2") and not torch.equal(getattr(model, name), file[name]):
            problems.append(f"{name} is wrong")
    return problems


@on_ranks(4)
def test_what_does_not_fit_is_listed_on_all_ranks_and_left_to_a_hook(rank: int) -> list[str]:
    return _lenient(rank) + _local(rank)


# ---- one process ----


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(4, 2)
        self.head = nn.Linear(2, 4, bias=False)
        self.head.weight = self.embed.weight


@pytest.mark.parametrize("kind", ["on meta", "reset", "hook"])
@pytest.mark.parametrize("mismatched", ["embed.weight", "head.weight"])
def test_what_one_name_fills_is_not_initialized_because_another_does_not_fit(mismatched: str, kind: str) -> None:
    values = torch.arange(8.0).reshape(4, 2)
    state = {"embed.weight": values, "head.weight": values} | {mismatched: torch.zeros(6, 2)}
    model: Any = Tied() if kind == "reset" else on_meta(Tied)
    called = []
    init: Any = {"on meta": None, "reset": "reset_parameters", "hook": lambda *args: called.append(args)}[kind]
    report = epload.load(model, state, ignore_mismatched_shapes=True, init_missing=init, progress=False)
    assert torch.equal(model.embed.weight, values)
    assert model.head.weight is model.embed.weight
    assert (report.mismatched_keys, report.initialized, called) == ([mismatched], [], [])


SPLIT = Mapping(converts=(Convert(("qkv",), ("q", "k", "v"), (Split(0),)),))
EACH = Mapping(converts=(Convert((r"e\.w",), ("e.{index}",), (Unstack(0),)),))


@pytest.mark.parametrize(
    ("mapping", "state", "own", "left"),
    [
        (SPLIT, {"qkv": torch.arange(6.0)}, {"q": (2,), "k": (2,)}, ["v"]),
        (EACH, {"e.w": torch.arange(8.0).reshape(4, 2)}, {"e.0": (2,), "e.2": (2,)}, ["e.1", "e.3"]),
    ],
    ids=["split", "experts"],
)
def test_parts_of_a_tensor_that_the_model_lacks_are_unexpected(
    mapping: Mapping, state: State, own: dict[str, tuple[int, ...]], left: list[str]
) -> None:
    model = Tree(target(**own)).to_empty(device="cpu")
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    with pytest.raises(epload.ModelMismatch) as refused:
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
    model = Tree({"w": torch.zeros(2)}).to_empty(device="cpu")
    state = {"w": torch.ones(2), "mtp.x": torch.ones(1), "aa": torch.ones(1)}
    mapping = Mapping(ignore_unexpected=(pattern, r"^(?P<a>a)\1$"))
    assert epload.load(model, state, mapping=mapping, progress=False).ignored_keys == ["mtp.x", "aa"]
