"""Keys and shapes that do not fit, and mistakes: one text on all ranks, which names them, and nothing has moved."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import epload
from epload import LocalModules, Mapping, ModelMismatch
from epload.mapping import Concatenate, Convert, Rename, Stack
from support import ranks
from support.checks import all_fine, as_bytes, full_values, local_of
from support.fp8 import Tree
from support.models import Block, mesh
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


def refused(like: State, good: State, bad: State, mapping: Mapping | str = "auto", **options: Any) -> Iterator[str]:
    """The error's text, from a model on meta and from one that holds ``good``; then whatever the refused load changed."""
    for loaded in (False, True):
        model, run = sharded(like), loader()
        if loaded:
            run.load(model, only_readers(good))
        before = {name: tensor.clone() for name, tensor in parts(model).items()}
        try:
            run.load(model, only_readers(bad), mapping=mapping, **options)
            yield "loaded"
        except ModelMismatch as error:
            yield str(error)
        for name, tensor in parts(model).items():
            if tensor.is_meta is loaded or (loaded and not torch.equal(as_bytes(tensor), as_bytes(before[name]))):
                yield f"{name} was changed"


# ---- mistakes ----

EXPERTS = target(e__gate_up=(4, 6, 3), norm=(5,))


def expert(number: int) -> State:
    return values(target(**{f"e__{number}__gate": (3, 3), f"e__{number}__up": (3, 3)}))


ALL = {**expert(0), **expert(1), **expert(2), **expert(3), "norm": torch.arange(5.0)}
PLAIN = target(w=(5, 3), norm=(5,))
MISTAKES: dict[str, tuple[State, State, Mapping | str, tuple[str, ...]]] = {
    "an incomplete set of experts": (
        EXPERTS, {name: t for name, t in ALL.items() if name != "e.2.up"}, MAPPING,
        ("cannot make e.gate_up of shape [4, 6, 3]", "the checkpoint lacks 1 of 8, the first is e.2.up"),
    ),
    "an expert index out of range": (
        EXPERTS, ALL | expert(4), MAPPING, ("cannot make e.gate_up", "the result has shape [5, 6, 3]")
    ),
    "a scale without its weight": (
        PLAIN, {**values(PLAIN), "v_scale_inv": torch.ones(1, 1)}, "auto",
        ("v_scale_inv is a scale without a weight: v is not in the checkpoint",),
    ),
    "two keys for one region": (
        PLAIN, values(PLAIN) | {"old.w": torch.zeros(5, 3)}, MAPPING, ("w and old.w both map to the model's w",)
    ),
    "a mapping that matches nothing": (
        PLAIN, {"x.w": torch.zeros(5, 3), "norm": torch.zeros(5)}, MAPPING,
        ("no rule of the mapping matches any checkpoint key", "the model lacks 1 of the 2 keys (x.w)", r"'^old\\.'"),
    ),
}  # fmt: skip


def _mistakes(rank: int) -> list[list[str]]:
    problems = []
    for like, bad, mapping, _ in MISTAKES.values():
        for strict in (True, False):
            problems.append(list(refused(like, values(like), bad, mapping, strict=strict)))
    return problems


def test_mistakes_are_named_and_move_nothing() -> None:
    by_rank = ranks.run(4, _mistakes)
    assert all(messages == by_rank[0] for messages in by_rank)
    cases = [case for case in MISTAKES for _ in (True, False)]
    for case, messages in zip(cases, by_rank[0], strict=True):
        assert len(messages) == 2, f"{case}: {messages}"  # on meta and loaded, and nothing was changed
        assert messages[0] == messages[1], case
        assert [text for text in MISTAKES[case][3] if text not in messages[0]] == [], f"{case}: {messages[0]}"


# ---- missing, unexpected, mismatched ----

LIKE = target(a=(5, 3), b=(4,), c=(2, 2), e__gate_up=(4, 6, 3))
SHORT = {name: t[:2] if name.endswith("gate") else t for name, t in ALL.items() if name != "norm"}


def odd() -> State:
    """``a`` fits, ``b`` and ``e.gate_up`` have another shape, ``c`` is missing, and ``d`` unexpected."""
    return {"a": values(LIKE)["a"], "b": torch.zeros(3), "d": torch.zeros(1), **SHORT}


def _error(rank: int) -> list[list[str]]:
    return [
        list(refused(LIKE, values(LIKE), odd(), MAPPING, strict=strict, ignore_mismatched_shapes=ignore))
        for strict, ignore in ((True, False), (False, False), (True, True))
    ]


def test_an_error_has_all_keys_that_do_not_fit() -> None:
    by_rank = ranks.run(4, _error)
    assert all(messages == by_rank[0] for messages in by_rank)
    keys = (
        "1 parameter missing from the checkpoint: c\n", "1 unexpected checkpoint key: d\n",
        "strict=False ignores missing and unexpected keys",
    )  # fmt: skip
    shapes = (
        "2 mismatched shapes: b has shape [3] in the checkpoint but [4] in the model; cannot make e.gate_up of shape [4, 6, 3] "
        "from 8 checkpoint tensors (e.0.gate, e.0.up, ..., e.3.up; shapes [2, 3], [3, 3]): the result has shape [4, 5, 3]",
        "ignore_mismatched_shapes=True skips parameters of mismatched shape",
    )
    for messages, texts, absent in zip(by_rank[0], ((*keys, *shapes), shapes, keys), ((), keys, shapes), strict=True):
        assert len(messages) == 2, messages
        for text in messages:
            assert [t for t in texts if t not in text] == [], text
            assert [t for t in absent if t in text] == [], text


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
        calls.clear()
        lenient = {"strict": False, "ignore_mismatched_shapes": True}
        report = run.load(model, only_readers(odd()), mapping=MAPPING, **lenient, init_missing=init)
        keys = (report.missing_keys, report.unexpected_keys, report.mismatched_keys)
        if keys != (["c"], ["d"], ["b", "e.gate_up"]) or not re.search(
            r"\n  mismatched +2 tensors: b, e\.gate_up\n", str(report)
        ):
            problems.append(str(report))
        left = [] if init is None else [("", "b"), ("", "c"), ("e", "gate_up")]
        if sorted(calls) != left or sorted(report.initialized) != [".".join(p for p in c if p) for c in left]:
            problems.append(f"{calls} {report.initialized}")
        expected = sharded(LIKE)
        run.load(expected, only_readers(good))
        for name, got in parts(model).items():
            wanted = parts(expected)[name]
            wanted = torch.full_like(wanted, -1) if init is not None and name != "a" else wanted
            if not torch.equal(as_bytes(got), as_bytes(wanted)):
                problems.append(f"{name} is {got} where {wanted} was expected")
    for option in ("strict", "ignore_mismatched_shapes"):
        try:
            loader().load(sharded(LIKE), only_readers(good), **{option: "shapes"})  # type: ignore[arg-type]
            problems.append(f"took {option}='shapes'")
        except TypeError as error:
            if f"expected {option} to be a bool, got 'shapes'" not in str(error):
                problems.append(str(error))
    return problems


def _only_shapes(rank: int) -> list[str]:
    """In a strict load mismatched shapes alone are listed and skipped, if they are to be ignored."""
    good, model, run = values(LIKE), sharded(LIKE), loader()
    run.load(model, only_readers(good))
    before = {name: tensor.clone() for name, tensor in parts(model).items()}
    changed = {name: value + 1 for name, value in good.items()} | {"b": torch.zeros(3)}
    report = run.load(model, only_readers(changed), ignore_mismatched_shapes=True)
    keys = (report.missing_keys, report.unexpected_keys, report.mismatched_keys)
    problems = [] if keys == ([], [], ["b"]) else [str(report)]
    return problems + [n for n, t in parts(model).items() if not torch.equal(t, before[n] + (n != "b"))]


def test_a_strict_load_can_ignore_mismatched_shapes() -> None:
    all_fine(ranks.run(4, _only_shapes))


def test_what_does_not_fit_is_listed_and_left_to_a_hook() -> None:
    all_fine(ranks.run(4, _lenient))


def _local(rank: int) -> list[str]:
    """What each rank has of its own is listed on all."""
    make: Callable[[], nn.Module] = partial(Block, {f"x{rank}": (3,), f"y{rank}": (2,)})
    model = make()
    file = {"x0": torch.zeros(4), "x1": torch.ones(3), "x2": torch.zeros(1), "x3": torch.ones(3), "y0": torch.ones(2)}
    file |= {"y1": torch.ones(2), "y3": torch.ones(2), "z": torch.ones(1)}
    lenient = {"strict": False, "ignore_mismatched_shapes": True}
    report = loader().load(model, only_readers(file), local_modules=[LocalModules("")], **lenient)
    keys = (report.missing_keys, report.unexpected_keys, report.mismatched_keys)
    problems = [] if keys == (["y2"], ["z"], ["x0", "x2"]) else [str(report)]
    for name in (f"x{rank}", f"y{rank}"):
        if name not in ("y2", "x0", "x2") and not torch.equal(getattr(model, name), file[name]):
            problems.append(f"{name} is wrong")
    return problems


def test_what_does_not_fit_local_modules_is_known_on_all_ranks() -> None:
    all_fine(ranks.run(4, _local))
