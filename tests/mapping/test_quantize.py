"""Weights quantized to fp8: equal to what transformers and compressed-tensors make of whole tensors, in every layout."""

from __future__ import annotations

import json
import re
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import peft
import pytest
import torch
import transformers
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Placement, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from transformers.integrations.finegrained_fp8 import replace_with_fp8_linear

import epload
from epload import ModelMismatch
from epload.cli.main import main
from epload.mapping import Concatenate, Convert, Mapping, Quantize, Reshape, Transpose
from epload.mapping.quantized_targets import quantize_blocks
from support import fp8, quantized
from support.accelerator import DEVICE, SEMANTICS
from support.checks import local_of
from support.fp8 import Tree
from support.models import mesh, on_meta
from support.on_ranks import on_ranks
from support.pretrained import config
from support.quantized import BF16, FORMATS, FP8, Trainer, as_bits, assert_same, expected, fine_grained, reference

# ---- layouts ----


def sharded(sizes: tuple[int, ...], placements: list[Placement], model: nn.Module) -> nn.Module:
    """Every parameter with enough dims on one mesh; others whole."""
    on, dims = mesh(*((f"axis{i}", size) for i, size in enumerate(sizes))), [placement.dim for placement in placements]  # type: ignore[attr-defined]
    place_parameters(model, max(dims), partial(distribute_tensor, device_mesh=on, placements=placements))
    return model


def place_parameters(model: nn.Module, dim: int, distribute: Callable[..., Tensor]) -> None:
    """Distributes every parameter that has a dim."""
    for module in list(model.modules()):
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter.ndim > dim:
                made = nn.Parameter(distribute(parameter.detach(), src_data_rank=None), requires_grad=False)
                module.register_parameter(name, made)


def fsdp(model: nn.Module) -> nn.Module:
    scalars = {parameter for parameter in model.parameters() if not parameter.ndim}
    return fully_shard(model, mesh=mesh(("all", 4)), ignored_params=scalars)


def experts_on_two_axes(model: nn.Module) -> nn.Module:
    on = mesh(("fsdp", 2), ("ep", 2))
    place_parameters(model.experts, 0, partial(distribute_tensor, device_mesh=on["ep"], placements=[Shard(0)]))
    fully_shard(model.experts, mesh=on["fsdp"], shard_placement_fn=lambda p: Shard(int(p.shape[1] % 2 == 0)))
    return fsdp(model)


LAYOUTS = {
    "plain": lambda model: model,
    "fsdp": fsdp,
    "rows": partial(sharded, (4,), [Shard(0)]),
    "columns": partial(sharded, (4,), [Shard(1)]),
    "strided rows": partial(sharded, (4,), [_StridedShard(0, split_factor=3)]),
    "strided columns": partial(sharded, (4,), [_StridedShard(1, split_factor=2)]),
    "rows twice": partial(sharded, (2, 2), [_StridedShard(0, split_factor=2), Shard(0)]),
    "columns, rows": partial(sharded, (2, 2), [Shard(1), Shard(0)]),
    "ep x fsdp": experts_on_two_axes,
}


def pairs() -> list[tuple[str, list[str]]]:
    """Each layout with a few formats, each format with several layouts."""
    others = list(FORMATS)[1:]
    return [(layout, ["128 x 128", *(others[(i + j) % 7] for j in (0, 3))]) for i, layout in enumerate(LAYOUTS)]


def save_sources(folder: Path) -> None:
    masters = {name: tensor.contiguous() for name, tensor in Trainer().state_dict().items()}
    for name, tensors in {"masters": masters, "mapped": mapped(), "one": {"w": one_scale()}, "turned": {"q": turned()}}.items():
        save_file(tensors, folder / f"{name}.safetensors")


@on_ranks(4, save_sources)
def test_every_layout_is_saved_and_loaded_as_the_whole_tensor_is_quantized(rank: int, tmp_path: Path) -> None:
    topology = epload.Topology.from_nodes([[0, 1], [2, 3]])
    for i, (layout, formats) in enumerate(pairs()):
        readers = ("one", "every", "partitioned", "per_node")[i % 4]
        options: dict[str, Any] = {"readers": readers, "bucket_bytes": 40_000, "verify": i % 3 == 0, "progress": False}
        with epload.HierarchicalLoader(topology, **options) as loader:
            for name in formats:
                case, make = f"{layout}, {name}", LAYOUTS[layout]
                wanted, config = expected(Trainer(), FORMATS[name]), quantized.with_skipped(FORMATS[name])
                epload.save(make(Trainer()), tmp_path / case, mapping=Quantize(config))
                if rank == 0:
                    saved_as_declared(tmp_path / case, config, wanted)
                model = make(Tree(wanted))
                report = loader.load(model, tmp_path / "masters.safetensors", mapping=Quantize(config))
                assert report.missing_keys + report.unexpected_keys == [], case
                whole = Tree(wanted).to_empty(device="cpu")
                whole.load_state_dict(wanted)
                for (key, tensor), other in zip(model.named_parameters(), make(whole).parameters(), strict=True):
                    assert torch.equal(as_bits(local_of(tensor)), as_bits(local_of(other))), f"{case}: {key} differs"


def saved_as_declared(folder: Path, config: dict[str, Any], wanted: dict[str, Tensor]) -> None:
    assert_same(load_file(folder / "model.safetensors"), wanted, folder.name)
    declared = json.loads((folder / "config.json").read_text())["quantization_config"]
    key, listed = ("ignore", "re:kep") if "ignore" in declared else ("modules_to_not_convert", "kept")
    # as what else is not quantized
    assert set(declared.pop(key)) - {"down", "row"} == {listed, "gate", "lm_head"}
    assert declared == {k: v for k, v in json.loads(json.dumps(config)).items() if k != key}


def one_scale() -> Tensor:
    """A weight whose largest values are on the last rank."""
    return torch.arange(240).reshape(6, 40).to(torch.bfloat16)


def turned() -> Tensor:
    """A weight whose largest values are on the first rank."""
    return torch.arange(512 * 512, 0, -1).reshape(512, 512).to(torch.bfloat16)


def mapped() -> dict[str, Tensor]:
    """A checkpoint whose tensors are fused, transposed and reshaped in the model."""
    file = fp8.checkpoint()
    scales = {name: file.get(f"{name}_scale_inv") for name in file if "scale" not in name}
    return {n: file[n] if s is None else fp8.dequantized(file[n], s, torch.float32) for n, s in scales.items()}


@on_ranks(4, save_sources)
def test_what_the_model_has_in_another_form_is_quantized_as_it_is_stored(rank: int, tmp_path: Path) -> None:
    model = fully_shard(Tree(fp8.expected(fp8.checkpoint(), torch.float32)), mesh=mesh(("all", 4)))
    epload.load(model, mapped(), mapping=fp8.MAPPING, progress=False)
    flat = fully_shard(nn.ParameterDict({"flat": one_scale().flatten()}), mesh=mesh(("all", 4)))
    as_flat = Mapping(converts=(Convert(("^w$",), ("flat",), (Reshape((-1,)),)),))
    # Each rank has several boxes of a weight, and several empty parts.
    rotated = fully_shard(nn.ParameterDict({"turned": turned().reshape(8, 32, 2, 512).transpose(1, 2).reshape(512, 512)}))
    permute = Mapping(
        converts=(Convert(("^q$",), ("turned",), (Reshape((8, 32, 2, 512)), Transpose(1, 2), Reshape((512, 512)))),)
    )
    for name, source, each, mapping, kind, pattern in (
        ("turned", {"q": turned()}, rotated, permute, "128 x 128", "^q$"),
        ("mapped", mapped(), model, fp8.MAPPING, "128 x 128", "weight$"),
        ("one", {"w": one_scale()}, flat, as_flat, "one", "^w$"),
    ):
        mapping = replace(mapping, quantize=Quantize(FORMATS[kind], weights=(pattern,)))
        epload.save(each, tmp_path / name, mapping=mapping, names_from=tmp_path / f"{name}.safetensors")
        if rank == 0:
            wanted = dict(source)
            for key, tensor in source.items():
                wanted |= reference(key, tensor, FORMATS[kind]) if re.search(pattern, key) else {}
            assert_same(load_file(tmp_path / name / "model.safetensors"), wanted, name)


@on_ranks(2)
def test_a_load_quantizes_experts_of_each_rank(rank: int) -> None:
    """Each rank has experts that others lack, and a part of a stack that does not say so; loaded again and again."""
    config = FORMATS["128 x 128"]
    like = {f"experts.{i}.w.weight": torch.empty(150, 140, dtype=FP8) for i in range(2)}
    like |= {f"{name}_scale_inv": torch.empty(2, 2) for name in like}
    like |= {"stack": torch.empty(2, 30, 40, dtype=FP8), "stack_scale_inv": torch.empty(2, 1, 1)}
    model, generator = Tree(like), torch.Generator().manual_seed(1)
    with epload.HierarchicalLoader(readers="one", bucket_bytes=30_000, progress=False) as loader:
        for _ in range(2):
            source = {f"experts.{i}.w.weight": torch.randn(150, 140, generator=generator) for i in range(4)}
            source["stack"] = torch.randn(4, 30, 40, generator=generator)
            loader.load(
                model, source, mapping=Quantize(),
                local_modules=[epload.LocalModules(r"experts\.(\d+)\.", first=2 * rank)],
                outer_shards=[epload.OuterShard("stack.*", mesh(("ep", 2)), 0)],
            )  # fmt: skip
            wanted = {}
            for i in range(2):
                wanted |= reference(f"experts.{i}.w.weight", source[f"experts.{2 * rank + i}.w.weight"], config)
            whole = reference("stack", source["stack"], config)
            wanted |= {name: tensor[2 * rank : 2 * rank + 2] for name, tensor in whole.items()}
            assert_same(dict(model.state_dict()), wanted)


# ---- models of transformers ----

BLOCKS = fine_grained((16, 16), modules_to_not_convert=["lm_head", "model.layers.0.mlp"])


def qwen() -> Any:
    return transformers.AutoModelForCausalLM.from_config(config("qwen3_moe", moe_intermediate_size=32), dtype=BF16)


def in_fp8() -> Any:
    """The model as the library makes it for an fp8 checkpoint, with experts and their scales fused."""
    model, skip = on_meta(qwen), BLOCKS["modules_to_not_convert"]
    settings = transformers.FineGrainedFP8Config(weight_block_size=(16, 16), modules_to_not_convert=skip)
    model = replace_with_fp8_linear(model, modules_to_not_convert=skip, quantization_config=settings)
    model.config.quantization_config = settings
    return model


def test_saved_converted_and_loaded_are_the_same_and_dequantize_as_in_transformers(tmp_path: Path) -> None:
    model, rule = qwen(), Quantize(BLOCKS)
    model.save_pretrained(tmp_path / "bf16")
    epload.save(model, tmp_path / "saved", mapping=rule)
    epload.convert(tmp_path / "bf16", tmp_path / "converted", quantize=rule)
    original, found = (load_file(tmp_path / name / "model.safetensors") for name in ("bf16", "saved"))
    assert_same(load_file(tmp_path / "converted" / "model.safetensors"), found)
    stays = r"norm|embed_tokens|lm_head|mlp\.gate\.|layers\.0\.mlp"
    wanted = dict(original)
    for name, value in original.items():
        wanted |= {} if re.search(stays, name) else reference(name, value, BLOCKS)
    assert_same(found, wanted)
    wide = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "converted", dtype=BF16)
    loaded = on_meta(qwen)
    epload.load(loaded, tmp_path / "saved", progress=False)
    assert_same(dict(loaded.state_dict()), dict(wide.state_dict()))
    for quantizes in (True, False):  # the bf16 checkpoint, and the one in fp8
        fused = in_fp8()
        folder, mapping = ("bf16", Quantize()) if quantizes else ("saved", "auto")
        epload.load(fused, tmp_path / folder, mapping=mapping, progress=False)
        tensors = dict(model.state_dict())
        for name, tensor in fused.state_dict().items():
            if tensor.dtype == FP8:
                tensors |= reference(name, tensors[name], BLOCKS)
        assert_same(dict(fused.state_dict()), tensors)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_a_row_is_quantized_as_the_whole_weight(dtype: torch.dtype) -> None:
    """One scale does not count less in the dtype of a quotient than several."""
    of_rows = Quantize(FORMATS["channel"], weights=(".",)).format
    weight = torch.randn(64, 512, generator=torch.Generator().manual_seed(0)).to(dtype)
    rows = [quantize_blocks(row, of_rows)[0] for row in weight.split(1)]
    assert torch.equal(as_bits(quantize_blocks(weight, of_rows)[0]), as_bits(torch.cat(rows)))


def test_scales_do_not_depend_on_the_default_dtype(tmp_path: Path) -> None:
    for name, form in {"blocks": FORMATS["128 x 128"], "exponents": FORMATS["mx"]}.items():
        rule, trainer, wanted = Quantize(quantized.with_skipped(form)), Trainer(), expected(Trainer(), form)
        model, masters = Tree(wanted).to_empty(device="cpu"), {n: t.contiguous() for n, t in trainer.state_dict().items()}
        torch.set_default_dtype(BF16)
        try:
            epload.save(trainer, tmp_path / name, mapping=rule)
            epload.load(model, masters, mapping=rule, progress=False)
        finally:
            torch.set_default_dtype(torch.float32)
        assert_same(load_file(tmp_path / name / "model.safetensors"), wanted, name)
        assert_same(dict(model.state_dict()), wanted, name)


def test_wrapped_models(tmp_path: Path) -> None:
    """Activation checkpointing hides its wrapper in the state dict; torch.compile and PEFT do not."""
    rule, wanted = Quantize(quantized.with_skipped(FORMATS["128 x 128"])), expected(Trainer(), FORMATS["128 x 128"])
    model = Trainer()
    model.up = checkpoint_wrapper(model.up)
    wanted["down.weight"].view(torch.uint8)[0, 0] = 0  # merging adds 0 to -0.0
    adapted = peft.get_peft_model(Trainer(), peft.LoraConfig(target_modules=["up", "down"]))
    adapted.merge_adapter()
    for name, wrapped in {"checkpointed": model, "compiled": torch.compile(Trainer()), "adapted": adapted}.items():
        epload.save(wrapped, tmp_path / name, mapping=rule)
        found = load_file(tmp_path / name / "model.safetensors")
        found["down.weight"].view(torch.uint8)[0, 0] &= 0x7F
        assert_same(found, wanted, name)


def test_the_command(tmp_path: Path) -> None:
    source = {"a.weight": torch.randn(130, 40).to(BF16), "a.bias": torch.ones(3), "b.weight": torch.randn(4, 4)}
    save_file(source, tmp_path / "m.safetensors")
    arguments = ["convert", str(tmp_path / "m.safetensors"), str(tmp_path / "new"), "--weights", r"^a\."]
    assert "expected --quantize with it" in CliRunner().invoke(main, arguments).output
    assert CliRunner().invoke(main, [*arguments, "--quantize", "fp8"]).exit_code == 0
    wanted = source | reference("a.weight", source["a.weight"], FORMATS["128 x 128"])
    assert_same(load_file(tmp_path / "new" / "model.safetensors"), wanted)


# ---- memory ----


def test_a_load_holds_few_weights_at_once(tmp_path: Path) -> None:
    names, shape = [f"w{i}.weight" for i in range(8)], (512, 2048)
    save_file({name: torch.full(shape, 1.0 + i, dtype=BF16) for i, name in enumerate(names)}, tmp_path / "w.safetensors")
    like = {name: torch.empty(shape, dtype=FP8) for name in names}
    like |= {f"{name}_scale_inv": torch.empty(4, 16) for name in names}
    model, held, sizes = Tree(like), [0], list[int]()
    allocate = torch.empty

    def count(*size: Any, **options: Any) -> Tensor:
        tensor = allocate(*size, **options)
        if tensor.shape == shape and tensor.dtype == BF16:
            held[0] += tensor.nbytes
            sizes.append(held[0])
            weakref.finalize(tensor, lambda nbytes=tensor.nbytes: held.__setitem__(0, held[0] - nbytes))
        return tensor

    with mock.patch.object(torch, "empty", count):
        epload.load(
            model, tmp_path / "w.safetensors", mapping=Quantize(), readers="one", progress=False,
            options=epload.LoadOptions(bucket_bytes=1 << 20),
        )  # fmt: skip
    for name, tensor in model.state_dict().items():
        assert "scale" in name or bool((tensor.float() == 448).all()), name
    assert max(sizes) <= 2 * 512 * 2048 * 2


# ---- refusals ----

REFUSED: dict[str, tuple[Any, str]] = {
    "another method": ({"quant_method": "awq"}, 'expected quant_method "fp8" or "compressed-tensors"'),
    "no size of blocks": ({"quant_method": "fp8"}, "expected weight_block_size in the quantization_config"),
    "static activations": (fine_grained((128, 128), activation_scheme="static"), "activation_scheme to be 'dynamic'"),
    "fp4 experts": (fine_grained((128, 128), expert_dtype="fp4"), "expert_dtype to be 'fp8'"),
    "fp4 experts, beside": ({"quantization_config": fine_grained((128, 128)), "expert_dtype": "fp4"}, "expert_dtype to be 'fp8'"),
    "integers": (quantized.compressed(strategy="channel", type="int"), "type to be 'float'"),
    "rotated inputs": (
        {**quantized.compressed(strategy="channel"), "transform_config": {"config_groups": {"u": {}}}},
        "transform_config to be None",
    ),
    "no configuration": ({"hidden_size": 3}, "has none; pass a dict"),
    "no pattern": (fine_grained((128, 128), modules_to_not_convert=["lm_head("]), "excludes as regular expressions"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_configurations_that_are_refused(case: str) -> None:
    declared, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        Quantize(declared)


def test_the_format_may_have_the_name_of_its_dtype() -> None:
    """It has in the configurations of MiniMax-M2."""
    assert Quantize(fine_grained((128, 128), fmt="float8_e4m3fn")).format == Quantize(fine_grained((128, 128))).format


def test_models_that_are_refused(tmp_path: Path) -> None:
    model = Trainer()
    with pytest.raises(ValueError, match=r"down\.weight has 390 columns, expected a multiple of 32"):
        epload.save(model, tmp_path / "x", mapping=Quantize(FORMATS["group"]))
    with pytest.raises(ValueError, match="found no weights to quantize"):
        epload.save({"w": torch.ones(4)}, tmp_path / "x", mapping=Quantize())
    save_file({name: torch.ones(8, 4) for name in ("query.weight", "key.weight")}, tmp_path / "names.safetensors")
    fused = nn.ModuleDict({"joint": nn.Linear(4, 16, bias=False)})
    rule = Quantize(fine_grained((8, 8), modules_to_not_convert=["key"]))
    mapping = Mapping(
        converts=(Convert(("^query.weight$", "^key.weight$"), ("joint.weight",), (Concatenate(0),)),), quantize=rule
    )
    with pytest.raises(ModelMismatch, match=r"key\.weight is not quantized but query\.weight is, and both are part of joint"):
        epload.save(fused, tmp_path / "x", mapping=mapping, names_from=tmp_path / "names.safetensors")
    wide, narrow = Tree({"w.weight": torch.empty(4, 4)}), Tree({"w.weight": torch.empty(4, 4, dtype=FP8)})
    source = {"w.weight": torch.ones(4, 4)}
    with pytest.raises(ModelMismatch, match=r"cannot take; pass mapping=epload.mapping.Quantize\(\) to quantize it"):
        epload.load(narrow, source, progress=False)
    with pytest.raises(ModelMismatch, match=r"cannot quantize w\.weight, .* next to it as w\.weight_scale_inv"):
        epload.load(narrow, source, mapping=Quantize(), progress=False)
    epload.load(wide, source, mapping=Quantize(), progress=False)  # nothing in it is fp8
    other = Tree({"w.weight": torch.empty(4, 4, dtype=FP8), "w.weight_scale_inv": torch.empty(2, 2)})
    with pytest.raises(ModelMismatch, match=r"is float32 of shape \[2, 2\] in the model, expected float32 of shape"):
        epload.load(other, source, mapping=Quantize(), progress=False)
    with pytest.raises(ValueError, match="cannot tell which weights of state dict to quantize"):
        epload.convert(source, tmp_path / "x", quantize=Quantize())
    epload.convert(source, tmp_path / "x", quantize=Quantize(weights=(r"^w\.",)))
    with pytest.raises(ValueError, match=r"expected weights that are not quantized, but w\.weight is"):
        epload.save(load_file(tmp_path / "x" / "model.safetensors"), tmp_path / "y", mapping=Quantize(weights=("w",)))


# ---- devices ----


@pytest.mark.usefixtures("fake_device")
@SEMANTICS
@on_ranks(1)
def test_devices(rank: int, semantics: str, tmp_path: Path) -> None:
    config = quantized.with_skipped(FORMATS["128 x 128"])
    wanted = expected(Trainer(), FORMATS["128 x 128"])
    for verify in (False, True):
        model = Tree(wanted).to_empty(device=DEVICE)
        epload.load(model, dict(Trainer().state_dict()), mapping=Quantize(config), verify=verify, progress=False)
        assert_same({name: tensor.cpu() for name, tensor in model.state_dict().items()}, wanted)
    pending = epload.save_async(Trainer().to(DEVICE), tmp_path / "x", mapping=Quantize(config))
    pending.wait()
    epload.save(Trainer().to(DEVICE), tmp_path / "y", mapping=Quantize(config))
    for name in ("x", "y"):
        assert_same(load_file(tmp_path / name / "model.safetensors"), wanted)


@pytest.mark.parametrize("key", ["modules_to_not_convert", "ignored_layers"])
def test_the_name_of_one_module_is_no_list(key: str) -> None:
    with pytest.raises(ValueError, match=r"expected a list of the modules that are not quantized .*got 'lm_head'"):
        Quantize({"quant_method": "fp8", "weight_block_size": [128, 128], key: "lm_head"})


def test_a_pattern_that_matches_nothing_is_refused(tmp_path: Path) -> None:
    state = {"a.weight": torch.ones(4, 4, dtype=torch.bfloat16)}
    rule = Quantize(weights=("a.weight", "zzz"))
    with pytest.raises(ValueError, match=r"'zzz', a pattern of the weights to quantize, matches no tensor; there are a\.weight"):
        epload.convert(state, tmp_path / "c", quantize=rule)
