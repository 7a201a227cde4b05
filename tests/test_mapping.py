"""Mapping: checkpoint names and layouts to boxes of the model's tensors, assembled and compared with plain torch."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig, MixtralConfig, PretrainedConfig, Qwen3MoeConfig

from epload import Mapping, Merge, ModelMismatch, Rename
from epload.mapping import Placed, resolve

Shapes = dict[str, tuple[int, ...]]

EXPERTS = Mapping(
    merges=(
        Merge(
            (r"experts\.(?P<index>\d+)\.gate\.weight", r"experts\.(?P<index>\d+)\.up\.weight"),
            "experts.gate_up",
            stack_dim=0,
            concat_dim=1,
        ),
        Merge((r"experts\.(?P<index>\d+)\.down\.weight",), "experts.down", stack_dim=0),
        Merge(("q.weight", "k.weight", "v.weight"), "qkv.weight", concat_dim=0),
    )
)


def tensor(number: int, *shape: int) -> Tensor:
    return torch.arange(prod(shape), dtype=torch.float64).reshape(shape) + 1000 * number


def shapes_of(tensors: dict[str, Tensor]) -> Shapes:
    return {name: tuple(value.shape) for name, value in tensors.items()}


def place(mapping: Mapping, sources: Shapes, targets: Shapes) -> list[Placed | None]:
    return mapping.place(list(sources), list(sources.values()), targets)


def assemble(mapping: Mapping, sources: dict[str, Tensor], targets: Shapes) -> dict[str, Tensor]:
    """Fills targets box by box; an element written twice or never fails."""
    dtype = {name: next(iter(sources.values())).dtype for name in targets}
    made = {name: torch.zeros(shape, dtype=dtype[name]) for name, shape in targets.items()}
    written = {name: torch.zeros(shape, dtype=torch.int32) for name, shape in targets.items()}
    for value, placed in zip(sources.values(), place(mapping, shapes_of(sources), targets), strict=True):
        if placed is None:
            continue
        target, (start, size) = placed
        assert prod(size) == value.numel()
        box = tuple(slice(at, at + length) for at, length in zip(start, size, strict=True))
        made[target][box] = value.reshape(size)
        written[target][box] += 1
    filled = {placed[0] for placed in place(mapping, shapes_of(sources), targets) if placed}
    assert all(bool((written[name] == 1).all()) for name in filled)
    return {name: made[name] for name in filled}


def equal(got: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return set(got) == set(expected) and all(torch.equal(got[name], value) for name, value in expected.items())


def test_identity() -> None:
    sources = {"a": tensor(1, 3, 4), "b.c": tensor(2), "d": tensor(3, 0, 2)}
    assert equal(assemble(Mapping.identity(), sources, shapes_of(sources)), sources)


def test_what_the_model_does_not_have() -> None:
    sources: Shapes = {"a": (2,), "stray": (3,), "layer.experts.0.gate.weight": (1, 2)}
    assert place(EXPERTS, sources, {"a": (2,)}) == [("a", ((0,), (2,))), None, None]


def test_rename() -> None:
    mapping = Mapping(renames=(Rename(r"^transformer\.", "model."), Rename(r"\.h\.(\d+)\.", r".layers.\1.")))
    w, v = tensor(1, 2, 3), tensor(2, 4)
    got = assemble(mapping, {"transformer.h.10.w": w, "same": v}, {"model.layers.10.w": (2, 3), "same": (4,)})
    assert equal(got, {"model.layers.10.w": w, "same": v})


def test_a_name_the_model_has_is_not_renamed() -> None:
    mapping = Mapping(renames=(Rename("gamma", "weight"),))
    assert place(mapping, {"gamma": (2,)}, {"gamma": (2,), "weight": (2,)}) == [("gamma", ((0,), (2,)))]


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 0, 1]])
def test_stack(order: list[int]) -> None:
    downs = [tensor(i, 3, 4) for i in range(3)]
    sources = {f"layers.7.experts.{i}.down.weight": downs[i] for i in order}
    got = assemble(EXPERTS, sources, {"layers.7.experts.down": (3, 3, 4)})
    assert equal(got, {"layers.7.experts.down": torch.stack(downs)})


def test_stack_along_an_inner_dim() -> None:
    mapping = Mapping(merges=(Merge((r"e(?P<index>\d+)",), "all", stack_dim=1),))
    parts = [tensor(i, 2, 3) for i in range(4)]
    got = assemble(mapping, {f"e{i}": part for i, part in enumerate(parts)}, {"all": (2, 4, 3)})
    assert equal(got, {"all": torch.stack(parts, dim=1)})


def test_stack_of_0d() -> None:
    mapping = Mapping(merges=(Merge((r"scale\.(?P<index>\d+)",), "scales", stack_dim=0),))
    parts = [tensor(i) for i in range(3)]
    got = assemble(mapping, {f"scale.{i}": part for i, part in enumerate(parts)}, {"scales": (3,)})
    assert equal(got, {"scales": torch.stack(parts)})


@pytest.mark.parametrize("dim", [0, 1])
def test_concat_of_unequal_parts(dim: int) -> None:
    mapping = Mapping(merges=(Merge(("q.weight", "k.weight", "v.weight"), "qkv.weight", concat_dim=dim),))
    parts = {
        name: tensor(i, *((size, 5) if dim == 0 else (5, size)))
        for i, (name, size) in enumerate({"v": 1, "q": 4, "k": 2}.items())
    }
    expected = torch.cat([parts["q"], parts["k"], parts["v"]], dim)
    sources = {f"attn.{name}.weight": part for name, part in parts.items()}
    got = assemble(mapping, sources, {"attn.qkv.weight": tuple(expected.shape)})
    assert equal(got, {"attn.qkv.weight": expected})


def test_stack_and_concat() -> None:
    gates, ups = [tensor(i, 3, 4) for i in range(12)], [tensor(100 + i, 2, 4) for i in range(12)]
    sources = {f"l.experts.{i}.up.weight": ups[i] for i in reversed(range(12))}
    sources |= {f"l.experts.{i}.gate.weight": gates[i] for i in range(12)}
    got = assemble(EXPERTS, sources, {"l.experts.gate_up": (12, 5, 4)})
    stacked = torch.stack([torch.cat(pair) for pair in zip(gates, ups, strict=True)])
    assert equal(got, {"l.experts.gate_up": stacked})


def test_rename_then_merge() -> None:
    mapping = Mapping((Rename("block_sparse_moe", "mlp"),), EXPERTS.merges)
    downs = [tensor(i, 2, 2) for i in range(2)]
    sources = {f"l.block_sparse_moe.experts.{i}.down.weight": down for i, down in enumerate(downs)}
    got = assemble(mapping, sources, {"l.mlp.experts.down": (2, 2, 2)})
    assert equal(got, {"l.mlp.experts.down": torch.stack(downs)})


def test_several_modules_at_once() -> None:
    sources, expected = {}, {}
    for layer in range(3):
        downs = [tensor(10 * layer + i, 2, 3) for i in range(2)]
        sources |= {f"{layer}.experts.{i}.down.weight": down for i, down in enumerate(downs)}
        sources[f"{layer}.norm"] = expected[f"{layer}.norm"] = tensor(50 + layer, 5)
        expected[f"{layer}.experts.down"] = torch.stack(downs)
    assert equal(assemble(EXPERTS, sources, shapes_of(expected)), expected)


def experts(count: Sequence[int], kinds: Sequence[str] = ("gate", "up"), shape: tuple[int, ...] = (2, 4)) -> Shapes:
    return {f"l.experts.{i}.{kind}.weight": shape for i in count for kind in kinds}


GATE_UP: Shapes = {"l.experts.gate_up": (3, 4, 4)}
CASES: dict[str, tuple[Mapping, Shapes, Shapes, list[str]]] = {
    "whole, wrong shape": (Mapping(), {"a": (2, 3)}, {"a": (3, 2)}, ["a ", "[2, 3]", "[3, 2]"]),
    "renamed, wrong shape": (
        Mapping(renames=(Rename("^old", "new"),)), {"old.a": (2,)}, {"new.a": (3,)}, ["old.a", "new.a", "[2]", "[3]"]
    ),
    "missing expert": (EXPERTS, experts([0, 2]), GATE_UP, ["l.experts.gate_up", "2 of its 6", "experts.1.gate.weight"]),
    "missing half of an expert": (
        EXPERTS, {**experts([0, 1]), **experts([2], ["gate"])}, GATE_UP, ["1 of its 6", "experts.2.up.weight"]
    ),
    "missing part": (
        EXPERTS, {"a.q.weight": (2, 4), "a.v.weight": (1, 4)}, {"a.qkv.weight": (4, 4)}, ["a.qkv.weight", "k.weight"]
    ),
    "index out of range": (EXPERTS, experts([0, 1, 2, 3]), GATE_UP, ["l.experts.gate_up", "l.experts.3.", "index 3"]),
    "same index twice": (
        EXPERTS, {**experts([0, 1, 2]), "l.experts.01.up.weight": (2, 4)}, GATE_UP,
        ["l.experts.1.up.weight", "l.experts.01.up.weight"],
    ),
    "two names become one": (
        Mapping(renames=(Rename("^old[.]", ""),)), {"w": (2, 4), "old.w": (2, 4)}, {"w": (2, 4)}, ["w", "old.w"]
    ),
    "two old names become one": (
        Mapping(renames=(Rename("^(old|older)[.]", ""),)), {"older.w": (2,), "old.w": (2,)}, {"w": (2,)},
        ["older.w", "old.w"],
    ),
    "whole and in parts": (
        EXPERTS, {"l.experts.gate_up": (3, 4, 4), **experts([0, 1, 2])}, GATE_UP, ["l.experts.gate_up", "l.experts.0"]
    ),
    "part of the wrong rank": (EXPERTS, experts([0, 1, 2], shape=(8,)), GATE_UP, ["l.experts.0.gate.weight", "[8]"]),
    "part too large": (EXPERTS, experts([0, 1, 2], shape=(2, 5)), GATE_UP, ["l.experts.0.gate.weight", "[2, 5]"]),
    "parts too long": (EXPERTS, experts([0, 1, 2], shape=(3, 4)), GATE_UP, ["l.experts.0.up.weight", "[3, 4]"]),
    "parts that do not fill": (EXPERTS, experts([0, 1, 2], shape=(1, 4)), GATE_UP, ["l.experts.gate_up", "24 of its 48"]),
    "parts that nothing keeps apart": (
        Mapping(merges=(Merge(("a", "b"), "ab"),)), {"a": (2, 4), "b": (2, 4)}, {"ab": (4, 4)}, ["ab"]
    ),
    "stacked parts that nothing keeps apart": (
        Mapping(merges=(Merge((r"(?P<index>\d)\.a", r"(?P<index>\d)\.b"), "ab", stack_dim=0),)),
        {f"{i}.{part}": (1, 4) for i in range(3) for part in "ab"}, {"ab": (3, 2, 4)}, ["ab"],
    ),
    "stacked into a 0-d target": (
        Mapping(merges=(Merge((r"e\.(?P<index>\d+)",), "all", stack_dim=0),)), {"e.0": ()}, {"all": ()}, ["all", "e.0"]
    ),
    "stacked along a dim the target lacks": (
        Mapping(merges=(Merge((r"e\.(?P<index>\d+)",), "all", stack_dim=2),)), {"e.0": (1, 1)}, {"all": (1, 1)},
        ["all", "e.0"],
    ),
    "concatenated along a dim the target lacks": (
        Mapping(merges=(Merge(("a", "b"), "ab", concat_dim=1),)), {"a": (2,), "b": (2,)}, {"ab": (4,)}, ["ab", "a"]
    ),
    "stacked without an index": (
        Mapping(merges=(Merge(("a", "b"), "ab", stack_dim=0),)), {"a": (2,), "b": (2,)}, {"ab": (2, 2)}, ["ab", "a"]
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_refusals_name_the_keys(case: str) -> None:
    mapping, sources, targets, said = CASES[case]
    with pytest.raises(ModelMismatch) as caught:
        place(mapping, sources, targets)
    assert [text for text in said if text not in str(caught.value)] == [], str(caught.value)


def test_resolve() -> None:
    model = nn.Linear(2, 2)
    assert resolve("auto", model) == Mapping.identity()
    assert resolve(EXPERTS, model) is EXPERTS
    for wrong in ("nonsense", None, 3):
        with pytest.raises(ValueError, match=r"expected mapping to be 'auto' or an epload\.Mapping"):
            resolve(wrong, model)  # type: ignore[arg-type]


# ---- what transformers declares ----

SMALL: dict[str, Any] = {
    "vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
    "head_dim": 8, "intermediate_size": 24, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": None,
}  # fmt: skip
CONFIGS: dict[str, PretrainedConfig] = {
    "qwen3_moe": Qwen3MoeConfig(**SMALL, moe_intermediate_size=12, num_experts=12, num_experts_per_tok=2),
    "qwen3_moe, some layers dense": Qwen3MoeConfig(
        **SMALL, moe_intermediate_size=12, num_experts=4, num_experts_per_tok=2, mlp_only_layers=[0]
    ),
    "mixtral": MixtralConfig(**SMALL, num_local_experts=3, num_experts_per_tok=2),
    "llama": LlamaConfig(**SMALL),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_what_transformers_declares(name: str, tmp_path: Path) -> None:
    """The boxes give what the library's own loading gives, from a checkpoint in the published form."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[name], dtype=torch.float32)
    model.save_pretrained(tmp_path)
    sources = load_file(tmp_path / "model.safetensors")
    if name != "llama":
        assert set(sources) != set(model.state_dict())  # the file has per-expert tensors: a mapping is called for
    expected = type(model).from_pretrained(tmp_path, dtype=torch.float32).state_dict()
    with torch.device("meta"):
        meta = AutoModelForCausalLM.from_config(CONFIGS[name], dtype=torch.float32)
    got = assemble(resolve("auto", meta), sources, shapes_of(expected))
    assert sorted(set(expected) - set(got)) == []
    assert [key for key, value in expected.items() if not torch.equal(got[key], value)] == []
    placed = place(resolve("auto", meta), shapes_of(sources), shapes_of(expected))
    assert [key for key, at in zip(sources, placed, strict=True) if at is None] == []


def test_a_plain_model_does_not_import_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.setitem(sys.modules, "transformers.conversion_mapping", None)
    assert resolve("auto", nn.Linear(1, 1)) == Mapping.identity()
