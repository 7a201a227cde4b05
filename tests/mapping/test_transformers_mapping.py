"""Everything that the transformers library declares about checkpoints: its names and its conversions against ours."""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from transformers import EsmConfig, EsmForMaskedLM, LlamaConfig, LlamaForCausalLM, PreTrainedConfig, core_model_loading
from transformers import conversion_mapping as library
from transformers.core_model_loading import (
    Chunk,
    Conv3dToLinear,
    ConversionOps,
    Interleave,
    PermuteForRope,
    SplitModulelist,
    WeightConverter,
    WeightRenaming,
    rename_source_key,
)
from transformers.core_model_loading import Transpose as LibraryTranspose
from transformers.modeling_layers import MtpModel

import epload
from epload import Mapping, ModelMismatch
from epload.core.views import Assembly
from epload.mapping import Rename, from_model
from epload.mapping.place import match_conversions, place
from epload.mapping.resolve import resolve_mapping
from epload.mapping.transformers import ElementTracker, convert_of, rename_of, track
from support.checks import full_values
from support.findings import differing, must_be_refused
from support.mappings import Shapes, assemble, shapes_of
from support.models import on_meta
from support.on_ranks import on_ranks
from support.pretrained import build, small_llama

DECLARED: dict[str, list[Any]] = library._build_checkpoint_conversion_mapping()
CONFIG = SimpleNamespace(
    num_attention_heads=2,
    vision_config=SimpleNamespace(num_attention_heads=3),
    get_text_config=lambda: SimpleNamespace(unpadded_vocab_size=31, vocab_size=36),
)


def converters(transforms: list[Any]) -> list[WeightConverter]:
    return [transform for transform in transforms if isinstance(transform, WeightConverter)]


def mapping_of(old: list[str], new: str, *operations: ConversionOps, **options: Any) -> Mapping:
    return Mapping(converts=(convert_of(WeightConverter(old, [new], [*operations]), CONFIG),), **options)


def spelled(pattern: str, layer: int = 3, expert: int = 0) -> list[str]:
    """Names that a pattern of the library's may be meant for."""
    text = re.sub(r"\(\?[=!<][^)]*\)", "", pattern.replace("*.", f"{expert}.").replace(r"\d+", str(layer)))
    text = re.sub(r"\(\?:", "(", text)
    found = [""]
    for piece in re.split(r"(\([^()]*\))", text):
        options = piece[1:-1].split("|") if piece.startswith("(") else [piece]
        found = [name + option for name in found for option in options]
    found = [re.sub(r"\.\+|\.\*", "block.7.weight", name) for name in found]
    return [re.sub(r"[\\^$?+]", "", name) for name in found]


def names_for(transforms: list[Any]) -> list[str]:
    names = {"model.embed_tokens.weight", "lm_head.weight", "layers.0.norm.weight", "LayerNorm.gamma", "vision.weight"}
    for transform in transforms:
        own = getattr(transform, "pattern", None)  # of a class that renames in a way of its own
        spellings = [name for pattern in transform.source_patterns for name in spelled(pattern)]
        spellings += [name for layer in (3, 12) for name in spelled(own.pattern, layer)] if own is not None else []
        for name in spellings:
            for start in ("", "model.", "model.layers.11", "text.", "model.text.", "text.model."):
                for end in ("", ".weight", ".bias", "_scale", "s"):
                    names.add(re.sub(r"\.\.+", ".", f"{start}{name}{end}"))
    return sorted(names)


def test_declared_renames_are_the_librarys_own() -> None:
    """Whatever the library makes of a name, our rules make of it, in any order of names."""
    changed = 0
    for architecture, transforms in library._build_checkpoint_conversion_mapping().items():
        renamings = [t for t in transforms if isinstance(t, WeightRenaming)]
        names = names_for(transforms)
        ours = names[::-1]
        for renaming in renamings:
            ours = rename_of(renaming).apply(ours)
        for name, renamed in zip(names, ours[::-1], strict=True):
            expected, _ = rename_source_key(name, renamings, [])
            assert renamed == expected, f"{architecture}: {name}"
            changed += renamed != name
    assert changed > 1000


def test_every_declared_conversion_takes_the_same_names() -> None:
    """A name that the library collects for a pattern of a converter is an input of ours, and no other name is."""
    taken = 0
    for architecture, transforms in DECLARED.items():
        theirs = converters(transforms)
        ours = [convert_of(transform, CONFIG) for transform in theirs]
        for name in names_for(theirs):
            groups, _ = match_conversions(ours, [name])
            got = [(ours.index(group.convert), number) for group in groups for number, _ in group.inputs]
            matched = ((i, each.rename_source_key(name)[1]) for i, each in enumerate(theirs))
            first = next(((i, pattern) for i, pattern in matched if pattern is not None), None)
            expected = [] if first is None else [(first[0], theirs[first[0]].source_patterns.index(first[1]))]
            assert got == expected, f"{architecture}: {name}"
            taken += len(got)
    assert taken > 1000


def values(convert: WeightConverter, config: Any) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Made-up checkpoint tensors that a converter takes, and what the library makes of them; names without a prefix."""
    many = any("*" in pattern for pattern in convert.source_patterns)
    rope = any(isinstance(op, PermuteForRope) for op in convert.operations)
    shape = (36, 8) if rope or len(convert.operations) == 1 else (12, 12, 4)
    if isinstance(convert.operations[0], Interleave | Conv3dToLinear) or (len(shape) == 2 and _dims(convert) > 1):
        shape = (12, 12, 4)
    sources, collected = {}, {}
    alone = "Dequantize" in type(convert.operations[0]).__name__  # the others are scales
    for number, pattern in enumerate(convert.source_patterns[:1] if alone else convert.source_patterns):
        tensors = []
        for expert in range(4 if many else 1):
            tensors.append(torch.arange(12 * 12 * 4)[: torch.Size(shape).numel()].reshape(shape) + 1000 * (expert + 8 * number))
            sources[spelled(pattern, expert=expert)[0]] = tensors[-1]
        collected[pattern] = tensors
    for operation in convert.operations:
        made = spelled(convert.target_patterns[0])[0]
        collected = operation.convert(
            collected, source_patterns=convert.source_patterns, target_patterns=convert.target_patterns, config=config,
            full_layer_name=made, model=_Sizes(collected, convert),
        )  # fmt: skip
    return sources, {name: tensor[0] if isinstance(tensor, list) else tensor for name, tensor in collected.items()}


def _dims(convert: WeightConverter) -> int:
    return max(max(getattr(op, name, 0) for name in ("dim", "dim0", "dim1")) for op in convert.operations)


class _Sizes:
    """Stands for the model of which the library asks a parameter's shape: transposed, or thirds of what there is."""

    def __init__(self, collected: dict[str, Any], convert: WeightConverter) -> None:
        tensor = next(iter(collected.values()))[0]
        self.shape = (tensor.shape[0] // len(convert.target_patterns), *tensor.shape[1:])
        if len(convert.target_patterns) == 1:
            self.shape = (-1,)

    def get_parameter(self, name: str) -> Any:
        return SimpleNamespace(shape=self.shape, dtype=torch.int64)


def test_every_declared_conversion() -> None:
    """The regions of each give what the library computes, for made-up tensors."""
    every = [(architecture, each) for architecture, transforms in DECLARED.items() for each in converters(transforms)]
    for architecture, transform in every:
        sources, expected = values(transform, CONFIG)
        mapping = Mapping(converts=(convert_of(transform, CONFIG),), required=False)
        made = assemble(mapping, sources, shapes_of(expected))
        assert differing(made, expected) == [], f"{architecture}: {transform}"
    assert len(every) > 130


def test_splitting_into_a_list() -> None:
    tensor = torch.arange(24).reshape(3, 4, 2)
    mapping = mapping_of(["experts.up"], "experts.*.up.weight", SplitModulelist(1))
    expected = {f"experts.{i}.up.weight": part for i, part in enumerate(tensor.unbind(1))}
    assert differing(assemble(mapping, {"experts.up": tensor}, shapes_of(expected)), expected) == []


class Moved(ConversionOps):
    """An operation that is unknown to epload, on each of the tensors."""

    def __init__(self, move: Callable[[Tensor], Tensor]) -> None:
        self.move = move

    def convert(self, input_dict: dict[str, Any], *args: Any, **kwargs: Any) -> dict[str, Any]:
        moved = {name: [self.move(tensor) for tensor in tensors] for name, tensors in input_dict.items()}
        return {"new": moved["old"]} if "old" in moved else moved


def test_an_operation_that_computes_values_is_named() -> None:
    """No regions can stand for it."""
    mapping = mapping_of(["experts.*.w"], "experts.all", Moved(lambda t: t * 2), Chunk(), required=False)
    shapes: Shapes = {"l.experts.0.w": (2,), "l.experts.1.w": (2,)}
    text = r"l\.experts\.all .*l\.experts\.0\.w, l\.experts\.1\.w.* Moved .*computes values"
    with pytest.raises(ModelMismatch, match=text):
        place(mapping, list(shapes), list(shapes.values()), {"l.experts.all": (2, 2)})
    assert place(mapping, ["other"], [(2,)], {"other": (2,)}) != [()]  # nothing is wrong while no tensor needs it


@pytest.mark.parametrize(
    "move",
    [
        lambda t: t.permute(2, 0, 1), lambda t: t.permute(-1, 1, 0).flatten(1), lambda t: t[1], lambda t: t[:, -1],
        lambda t: t.select(-1, 2).t(), lambda t: t.mT, lambda t: t.movedim(0, -1).reshape(-1), lambda t: t[..., 1:3],
        lambda t: t.unsqueeze(0).squeeze(0), lambda t: torch.stack(t.unbind(-1)[::-1], 1), lambda t: t.narrow(1, 1, 2),
        lambda t: torch.cat(t.chunk(2)[::-1]),
    ],
)  # fmt: skip
def test_what_moves_elements_is_followed(move: Callable[[Tensor], Tensor]) -> None:
    tensor = torch.arange(3 * 4 * 5).reshape(3, 4, 5)
    mapping, shape = mapping_of(["old"], "new", Moved(move)), tuple(move(tensor).shape)
    assert torch.equal(assemble(mapping, {"old": tensor}, {"new": shape})["new"], move(tensor))
    with torch.inference_mode():
        mapping = mapping_of(["old"], "new", Moved(move))
        assert torch.equal(assemble(mapping, {"old": tensor}, {"new": shape})["new"], move(tensor))


@pytest.mark.parametrize(
    "change", [lambda t: t.view(torch.int32), lambda t: t.half(), lambda t: t.flip(0), lambda t: t[torch.tensor([0])]]
)
def test_what_changes_them_is_not(change: Callable[[Tensor], Tensor]) -> None:
    with ElementTracker(), pytest.raises(ValueError, match="computes values"):
        change(track(Assembly.of(0, (2, 3))))


def test_two_layers_of_a_checkpoint_for_one_of_the_model() -> None:
    rename = Rename(r"layers\.(\d+)\.", r"blocks.\1.", shift=-1, divide=2)
    assert rename.apply(["layers.1.a", "layers.2.a", "layers.21.a"]) == ["blocks.0.a", "blocks.0.a", "blocks.10.a"]
    with pytest.raises(ValueError, match="divide"):
        Rename(r"(\d+)", r"\1", divide=0)


@pytest.mark.skipif(not hasattr(core_model_loading, "Inkling2LoopDequantizeExperts"), reason="newer than this transformers")
def test_scales_of_an_optional_input_are_refused_and_plain_weights_are_not() -> None:
    dequantize = core_model_loading.Inkling2LoopDequantizeExperts()
    mapping = mapping_of(["w", "w_scale"], "new", dequantize, LibraryTranspose())
    weight = torch.arange(6).reshape(2, 3)
    got = assemble(mapping, {"w": weight}, {"new": (3, 2)})
    assert torch.equal(got["new"], weight.T)
    with pytest.raises(ModelMismatch, match=r"new .*w, w_scale.*Inkling2LoopDequantizeExperts"):
        place(mapping, ["w", "w_scale"], [(2, 3), (2,)], {"new": (3, 2)})
    with pytest.raises(ModelMismatch, match=r"lacks 1 of 1 sources, the first is w"):
        place(mapping, ["w_scale"], [(2,)], {"new": (3, 2)})


def test_a_sharded_model_declares_what_it_did_before_and_a_layer_nothing() -> None:
    """fully_shard gives a module a class of its own, by which the library would not know it."""
    model = on_meta(partial(build, "qwen3_moe"))
    assert resolve_mapping("auto", model.model.layers[0], []) == Mapping()
    before = from_model(model)
    assert len(before.converts) == 2
    for module in model.modules():  # the first is the whole
        cls = type(module)
        module.__class__ = type(f"FSDP{cls.__name__}", (FSDPModule, cls), {})
        assert from_model(model) == before


def test_rules_of_layers_that_differ_in_heads_are_equal_on_all_ranks() -> None:
    """Ranks compare the text of their rules."""
    per_layer = {0: {"num_attention_heads": 2}}
    texts = set()
    for _ in range(2):
        config = PreTrainedConfig(num_hidden_layers=2, num_attention_heads=4, per_layer_config=per_layer)
        texts.add(repr(convert_of(WeightConverter(["old"], ["new"], [Moved(torch.clone)]), config)))
    (text,) = texts
    assert "[2, 4]" in text


def test_the_first_of_the_layers_frequencies_of_esm_counts(tmp_path: Path) -> None:
    """Its public checkpoints have one in each layer, and the model has one."""
    sizes = {"vocab_size": 33, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
    config = EsmConfig(**sizes, max_position_embeddings=20, position_embedding_type="rotary", pad_token_id=1, mask_token_id=32)
    EsmForMaskedLM(config).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    state = load_file(file)
    (saved,) = [name for name in state if name.endswith("inv_freq")]
    values = state.pop(saved)
    for layer in range(2):
        state[f"esm.encoder.layer.{layer}.attention.self.rotary_embeddings.inv_freq"] = values + layer + 1
    save_file(state, file, {"format": "pt"})
    expected, model = EsmForMaskedLM.from_pretrained(tmp_path), EsmForMaskedLM(config)
    epload.load(model, tmp_path, progress=False)
    assert differing(model.state_dict(), expected.state_dict()) == []
    assert torch.equal(model.esm.rotary_embeddings.inv_freq, values + 1)


def test_models_whose_layers_the_library_selects_while_it_loads_are_rejected() -> None:
    sizes = {"vocab_size": 33, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
    main = LlamaForCausalLM(LlamaConfig(**sizes, num_mtp_layers=1))
    model = MtpModel(main, 1)
    must_be_refused(lambda: epload.load(model, main.state_dict(), strict=False), "ModelMismatch", "MtpModel.from_pretrained")


@pytest.mark.parametrize("lacking", ["a module", "a method"])
def test_a_version_that_declares_too_little_is_named(lacking: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Versions 4 have no such module, and 5.0 no such method; a model that needs neither can be loaded with them nevertheless."""
    model = on_meta(partial(build, "qwen3_moe"))
    if lacking == "a module":
        monkeypatch.setitem(sys.modules, "transformers.conversion_mapping", None)
    else:
        monkeypatch.delattr(transformers.PreTrainedModel, "_get_dtype_plan")
    texts = f"transformers {transformers.__version__} ", "5.19 to 5.24", "mapping=epload.Mapping()"
    must_be_refused(lambda: epload.load(model, {"a": torch.ones(1)}), "ModelMismatch", *texts)


def test_a_rename_of_a_version_without_scopes() -> None:
    """Versions before 5.12 have none."""
    stub = SimpleNamespace(
        compiled_sources=re.compile("a"), target_patterns=["b"], rename_source_key=lambda name: (name.replace("a", "b"), None)
    )
    assert rename_of(stub).apply(["a", "c"]) == ["b", "c"]


def test_scales_of_activations_are_ignored() -> None:
    """Fp8 checkpoints with static activations have them, and models that quantize activations as they go do not."""
    sizes = {"vocab_size": 33, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
    model = LlamaForCausalLM(LlamaConfig(**sizes))
    scale = "model.layers.0.mlp.up_proj.activation_scale"
    report = epload.load(model, {**model.state_dict(), scale: torch.ones(())}, progress=False)
    assert (report.unexpected_keys, report.ignored_keys) == ([], [scale])


# ---- wrappers that give tensors other names, around a model, in one another, around a module of it ----


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 5)
        self.module = nn.Linear(5, 2)  # called as a wrapper's
        self.register_buffer("step", torch.zeros(2))


WRAPPED: dict[str, Callable[[nn.Module], Any]] = {
    "ddp": DistributedDataParallel,
    "ddp of compiled": lambda model: DistributedDataParallel(torch.compile(model)),
    "compiled ddp": lambda model: torch.compile(DistributedDataParallel(model)),
    "ddp of ddp": lambda model: DistributedDataParallel(DistributedDataParallel(model)),
    "data parallel": nn.DataParallel,
}


@on_ranks(2)
def test_a_wrapped_model_or_module_is_loaded_by_its_own_names(rank: int) -> None:
    whole = full_values(Net())
    as_saved_from_ddp = {f"module.{key}": value for key, value in whole.items()}
    for name, wrap in WRAPPED.items():
        plain = Net()
        wrapper = wrap(plain)
        for source in (whole, as_saved_from_ddp):
            report = epload.load(wrapper, source, progress=False)
            assert differing(plain, whole) == [], name
            assert (report.tensors, report.missing_keys, report.unexpected_keys) == (len(whole), [], []), name
            plain.load_state_dict({key: torch.zeros_like(value) for key, value in whole.items()})

    plain, linear = Net(), nn.Linear(2, 2)
    model = torch.compile(nn.Sequential(DistributedDataParallel(plain), torch.compile(linear)))
    of_linear = {"weight": torch.eye(2), "bias": torch.ones(2)}
    parts = {"0": whole, "1": of_linear}
    source = {f"{i}.{name}": value for i, part in parts.items() for name, value in part.items()}
    epload.load(model, source, progress=False)
    assert differing(plain, whole) + differing(linear, of_linear) == []


# ---- ties between more than two ----


def test_one_value_under_many_names() -> None:
    """Pairs in any order; what the checkpoint holds is never replaced, and other shapes are no ties."""
    pairs = (("c", "d"), ("b", "c"), ("a", "b"), ("a", "odd"))
    shapes = {"a": (2,), "b": (2,), "c": (2,), "d": (2,), "odd": (3,)}
    (places,) = place(Mapping(ties=pairs), ["a"], [(2,)], shapes)
    assert sorted(name for name, _ in places) == ["a", "b", "c", "d"]
    first, second = place(Mapping(ties=pairs), ["a", "c"], [(2,), (2,)], shapes)
    assert sorted(name for name, _ in first) == ["a"]
    assert sorted(name for name, _ in second) == ["b", "c", "d"]


# ---- the way out, where names have another prefix ----


@pytest.mark.parametrize("prefix", ["module.", "base_model.model.", "a+b."])
@pytest.mark.parametrize("added", [True, False], ids=["in the checkpoint", "in the model"])
def test_the_error_for_another_prefix_gives_a_mapping_that_works(prefix: str, added: bool, tmp_path: Path) -> None:
    plain = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
    model: nn.Module = plain
    for part in reversed(prefix[:-1].split(".")) if not added else ():
        outer = nn.Module()
        outer.register_module(part, model)
        model = outer
    whole = full_values(plain)
    stored = {f"{prefix}{name}" if added else name: value for name, value in whole.items()}
    save_file(stored, tmp_path / "model.safetensors")
    with pytest.raises(epload.ModelMismatch) as caught:
        epload.load(model, tmp_path, progress=False)
    message, _, way = str(caught.value).removesuffix(" [rank 0]").partition("pass mapping=")
    assert "4 of 4 unexpected keys match the model" in message
    epload.load(model, tmp_path, mapping=eval(way, {"epload": epload}), progress=False)
    assert differing(plain, whole) == []


def test_the_hint_for_a_model_with_rules_keeps_them(tmp_path: Path) -> None:
    model, other = small_llama(), small_llama()
    save_file({f"module.{n}": t for n, t in other.state_dict().items()}, tmp_path / "model.safetensors")
    with pytest.raises(epload.ModelMismatch) as caught:
        epload.load(model, tmp_path, progress=False)
    rules, mapping = str(caught.value).removesuffix(" [rank 0]").partition("rules = ")[2].split(", then pass mapping=")
    names: dict[str, Any] = {"epload": epload, "dataclasses": dataclasses, "model": model}
    names["rules"] = eval(rules, names)
    epload.load(model, tmp_path, mapping=eval(mapping, names), progress=False)
    assert differing(model, other) == []


def test_a_rename_of_ours_reaches_a_wrapped_model() -> None:
    """Rules speak of the model's names as they are where a mapping is given: wrappers and all."""
    model: Any = torch.compile(nn.Linear(3, 5))
    whole = {"w.weight": torch.ones(5, 3), "w.bias": torch.ones(5)}
    epload.load(model, whole, mapping=Mapping(renames=(Rename(r"^w\.", "_orig_mod."),)), progress=False)
    assert bool((model.weight == 1).all())
