"""Quantized saves declare what transformers reads, and models that are quantized are saved as it writes them.

The library keeps fp8 only where there is a GPU, and says so in ``validate_environment``, which is left out here.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer
from transformers.quantizers.quantizer_mxfp4 import Mxfp4HfQuantizer

import epload
from campaigns.census import judge
from campaigns.census.classes import auto_classes
from epload.mapping import Quantize
from support.failures import must_raise
from support.pretrained import SIZES, config
from support.quantized import BF16, FP8, assert_same, fine_grained

BLOCKS = fine_grained((16, 16))


as_on_a_gpu = partial(mock.patch.object, FineGrainedFP8HfQuantizer, "validate_environment")


def build(kind: str, auto: str = "AutoModelForCausalLM", **options: Any) -> Any:
    torch.manual_seed(0)
    settings = QWEN2_MOE if kind == "qwen2_moe" else config(kind, **options)
    return getattr(transformers, auto).from_config(settings, dtype=BF16)


LOOP = "Inkling2LoopForCausalLM"
QWEN = {"moe_intermediate_size": 32}
QWEN2_MOE = transformers.Qwen2MoeConfig(
    **SIZES | QWEN | {"shared_expert_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2}
)


@pytest.mark.parametrize(
    ("kind", "options", "block"),
    [
        ("qwen3_moe", QWEN, (16, 16)), ("qwen3_moe", QWEN, None), ("llama", {}, None), ("llama", {}, (16, 16)),
        ("qwen3_moe", {"moe_intermediate_size": 8}, (16, 16)),  # less than a block: each half of gate and up has a scale
        ("mixtral", {"intermediate_size": 32}, (16, 16)), ("deepseek_v3", QWEN, (16, 16)),
    ],
)  # fmt: skip
def test_a_model_in_fp8_is_saved_as_by_the_library(
    kind: str, options: dict[str, Any], block: tuple[int, int] | None, tmp_path: Path
) -> None:
    rule = Quantize(BLOCKS | {"weight_block_size": block})
    epload.save(build(kind, **options), tmp_path / "fp8", mapping=rule)
    with as_on_a_gpu():
        model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "fp8", dtype=BF16)
    model.save_pretrained(tmp_path / "theirs")
    epload.save(model, tmp_path / "ours")
    theirs, ours = (load_file(tmp_path / name / "model.safetensors") for name in ("theirs", "ours"))
    assert FP8 in {tensor.dtype for tensor in ours.values()}
    assert_same(ours, theirs)


@pytest.mark.parametrize(("block", "shown"), [((16, 16), "16 x 16"), (None, "60 x 32")])
def test_blocks_across_gate_and_up_are_refused(block: tuple[int, int] | None, shown: str, tmp_path: Path) -> None:
    model = build("qwen3_moe", moe_intermediate_size=30)
    model.config.quantization_config = BLOCKS | {"weight_block_size": block}
    for layer in model.model.layers[1:]:
        experts = layer.mlp.experts
        for name in ("gate_up_proj", "down_proj"):
            weight = getattr(experts, name)
            grid = (len(weight), *(-(-length // 16) if block else 1 for length in weight.shape[1:]))
            setattr(experts, name, torch.nn.Parameter(weight.to(FP8), requires_grad=False))
            experts.register_parameter(f"{name}_scale_inv", torch.nn.Parameter(torch.ones(grid)))
    text = f"has fp8 blocks of {shown}, which reach across the parts of shape"
    must_raise(epload.ModelMismatch, text, epload.save, model, tmp_path / "new")


def test_scales_without_a_place_are_not_left_out(tmp_path: Path) -> None:
    """A class of the library whose names for scales do not lead back to the model's."""
    cls, settings, _ = judge._build(LOOP, auto_classes()[LOOP])
    cls._from_config(judge.copy_of(settings), dtype=BF16).save_pretrained(tmp_path / "wide")
    quantization = transformers.FineGrainedFP8Config(weight_block_size=(2, 2), modules_to_not_convert=["lm_head"])
    with as_on_a_gpu():
        model = cls.from_pretrained(tmp_path / "wide", dtype=BF16, quantization_config=quantization)
    text = r"have no place in the checkpoint .*experts\.gate_up_proj_scale_inv"
    must_raise(epload.ModelMismatch, text, epload.save, model, tmp_path / "new")


class OddLinear(torch.nn.Linear):
    """Is none of the classes that the library replaces."""


def test_names_of_what_is_not_quantized(tmp_path: Path) -> None:
    layers = {"plain": torch.nn.Linear(32, 32), "odd": OddLinear(32, 32)}
    epload.save(torch.nn.ModuleDict(layers).to(BF16), tmp_path / "new", mapping=Quantize(BLOCKS))
    saved = load_file(tmp_path / "new" / "model.safetensors")
    assert (saved["plain.weight"].dtype, saved["odd.weight"].dtype) == (FP8, BF16)
    declared = json.loads((tmp_path / "new" / "config.json").read_text())["quantization_config"]
    assert declared["modules_to_not_convert"] == ["odd"]
    # A name may not exclude what is quantized, too.
    inner = torch.nn.ModuleDict({"aggregate": torch.nn.Linear(32, 32)})
    model = torch.nn.ModuleDict({"gate": torch.nn.Linear(32, 32), "out": inner}).to(BF16)
    text = r"out\.aggregate would be quantized, but modules_to_not_convert also has to list gate"
    must_raise(ValueError, text, epload.save, model, tmp_path / "other", mapping=Quantize(BLOCKS))


CAUSAL, TIED = "AutoModelForCausalLM", {"lm_head", "model.embed_tokens"}


@pytest.mark.parametrize(
    ("kind", "auto", "rule", "wide"),
    [
        ("qwen2_moe", CAUSAL, {}, {"lm_head", "mlp.gate", "mlp.shared_expert_gate"}),
        ("llama", CAUSAL, {"modules_to_not_convert": ["model.layers.0.mlp"]}, TIED),
        ("llama", "AutoModelForSequenceClassification", {}, set()),
    ],
)
def test_the_configuration_lists_what_is_not_quantized(
    kind: str, auto: str, rule: dict[str, Any], wide: set[str], tmp_path: Path
) -> None:
    model = build(kind, auto, num_labels=16, pad_token_id=0)
    model.save_pretrained(tmp_path / "bf16")
    epload.save(model, tmp_path / "saved", mapping=Quantize(BLOCKS | rule))
    epload.convert(tmp_path / "bf16", tmp_path / "converted", quantize=Quantize(BLOCKS | rule))
    for folder in (tmp_path / "saved", tmp_path / "converted"):
        declared = json.loads((folder / "config.json").read_text())["quantization_config"]
        listed = set(declared["modules_to_not_convert"]) - set(rule.get("modules_to_not_convert", ()))
        assert {name.partition("layers.")[2].partition(".")[2] or name for name in listed} == wide
        with as_on_a_gpu():
            found, info = getattr(transformers, auto).from_pretrained(folder, dtype=BF16, output_loading_info=True)
        assert not any(info.values()), info
        for name, tensor in found.state_dict().items():
            if tensor.dtype == BF16:
                assert torch.equal(tensor, model.state_dict()[name]), name


def test_layers_that_the_model_does_not_have(tmp_path: Path) -> None:
    """Other libraries have them, such as those that predict more tokens, and decide by names what is quantized in them."""
    build("deepseek_v3").save_pretrained(tmp_path / "bf16")
    file = tmp_path / "bf16" / "model.safetensors"
    matrices = {f"model.layers.9.{name}.weight": torch.ones(32, 32, dtype=BF16) for name in ("eh_proj", "mlp.gate", "head")}
    bias = {"model.layers.9.mlp.gate.e_score_correction_bias": torch.tensor([0.1, 0.2])}
    save_file(load_file(file) | matrices | bias, file, {"format": "pt"})
    epload.convert(tmp_path / "bf16", tmp_path / "fp8", quantize=Quantize(BLOCKS))
    written = load_file(tmp_path / "fp8" / "model.safetensors")
    assert_same({name: written[name] for name in matrices}, matrices)
    assert written["model.layers.0.self_attn.o_proj.weight"].dtype == FP8
    declared = json.loads((tmp_path / "fp8" / "config.json").read_text())["quantization_config"]
    assert {name.removesuffix(".weight") for name in matrices} < {*declared["modules_to_not_convert"]}
    epload.convert(tmp_path / "bf16", tmp_path / "fp16", quantize=Quantize(BLOCKS), dtype="fp16")
    assert json.loads((tmp_path / "fp16" / "config.json").read_text())["dtype"] == "float16"
    epload.convert(tmp_path / "bf16", tmp_path / "narrow", dtype="bfloat16")
    assert_same({name: load_file(tmp_path / "narrow" / "model.safetensors")[name] for name in bias}, bias)


def test_experts_with_their_inputs_in_rows(tmp_path: Path) -> None:
    experts = torch.nn.Module()
    experts.down_proj, experts.is_transposed = torch.nn.Parameter(torch.ones(2, 32, 16, dtype=BF16)), True
    model = torch.nn.ModuleDict({"experts": experts})
    channels = {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {"all": {
        "weights": {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False},
        "targets": ["Linear"]}}}  # fmt: skip
    text = r"experts\.down_proj has its inputs in rows, so that blocks of 1 x 16 would divide it along its outputs"
    must_raise(ValueError, text, epload.save, model, tmp_path / "new", mapping=Quantize(channels))
    epload.save(model, tmp_path / "new", mapping=Quantize(BLOCKS))


def test_a_dequantized_model_is_no_longer_declared_as_quantized(tmp_path: Path) -> None:
    epload.save(build("llama"), tmp_path / "fp8", mapping=Quantize(BLOCKS))
    with torch.device("meta"):
        read = transformers.AutoConfig.from_pretrained(tmp_path / "fp8")
        model = transformers.AutoModelForCausalLM.from_config(read, dtype=BF16)
    epload.load(model, tmp_path / "fp8", progress=False)
    epload.save(model, tmp_path / "bf16")
    assert "quantization_config" not in json.loads((tmp_path / "bf16" / "config.json").read_text())
    assert model.config.quantization_config  # the model's own stays
    model.is_quantized = True  # as where layers quantize their weights in each forward pass
    epload.save(model, tmp_path / "online")
    assert "quantization_config" in json.loads((tmp_path / "online" / "config.json").read_text())


def test_a_quantization_that_a_part_declares_is_not_declared_by_what_was_dequantized(tmp_path: Path) -> None:
    """Engines read the declaration of the text model, and another key, too."""
    small = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_hidden_layers": 1}
    text = small | {"model_type": "llama", "vocab_size": 32, "num_key_value_heads": 2}
    vision = small | {"model_type": "clip_vision_model", "image_size": 8, "patch_size": 4, "projection_dim": 8}
    settings = transformers.LlavaConfig(vision_config=vision, text_config=text, image_token_index=3)
    model = transformers.LlavaForConditionalGeneration(settings)
    model.config.compression_config = model.config.text_config.quantization_config = {"quant_method": "fp8"}
    epload.save(model, tmp_path / "saved")
    saved = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert "compression_config" not in saved
    assert "quantization_config" not in saved["text_config"]
    assert saved["text_config"]["vocab_size"] == 32


def test_what_is_quantized_already_is_not_declared_otherwise(tmp_path: Path) -> None:
    tensors = {"a.weight": torch.ones(100, 100, dtype=BF16), "b.weight": torch.ones(100, 100).to(FP8)}
    part, taken = tensors | {"b.weight_scale_inv": torch.ones(2, 2)}, {"a.weight_scale_inv": torch.ones(7, 7)}
    rule = Quantize(BLOCKS, weights=("^a",))
    for state, text in (
        (part, r"expected weights that are not quantized, but b\.weight is"),
        (
            taken | {"a.weight": tensors["a.weight"]},
            r"expected no tensor with the name .* there is a\.weight_scale_inv",
        ),
    ):
        save_file(state, tmp_path / "old.safetensors")
        must_raise(ValueError, text, epload.convert, tmp_path / "old.safetensors", tmp_path / "new", quantize=rule)
    assert not (tmp_path / "new").exists()


def test_what_peft_trains_as_a_copy_is_quantized_as_the_module_itself(tmp_path: Path) -> None:
    model, copies = build("qwen2_moe"), ["shared_expert_gate", "k_proj"]
    epload.save(model, tmp_path / "base", mapping=Quantize(BLOCKS))
    config = LoraConfig(target_modules=["q_proj"], modules_to_save=copies)
    adapted = get_peft_model(model, config, autocast_adapter_dtype=False)
    adapted.merge_adapter()
    epload.save(adapted, tmp_path / "adapted", mapping=Quantize(BLOCKS))
    base, saved = (
        [load_file(tmp_path / name / "model.safetensors"), (tmp_path / name / "config.json").read_text()]
        for name in ("base", "adapted")
    )
    assert_same(saved[0], base[0])
    assert saved[1] == base[1]


@pytest.mark.parametrize("fails", ["mxfp4", "not serializable", "converted"])
def test_weights_in_a_layout_that_only_the_library_knows_are_not_saved(fails: str, tmp_path: Path) -> None:
    """The experts of a model in MXFP4 are objects of Triton on a GPU, which no state dict has."""
    quantizer: Any = object.__new__(Mxfp4HfQuantizer if fails == "mxfp4" else FineGrainedFP8HfQuantizer)
    quantizer.quantization_config, quantizer.pre_quantized = transformers.FineGrainedFP8Config(), True
    model = build("llama")
    model.hf_quantizer, model.is_quantized = quantizer, True
    if fails != "mxfp4":
        epload.save(model, tmp_path / "serializable")
        model.hf_quantizer = SimpleNamespace(is_serializable=True)  # diffusers' have no conversions
        epload.save(model, tmp_path / "serializable", overwrite=True)
        model.hf_quantizer = quantizer
    if fails == "not serializable":
        quantizer.is_serializable = False
    elif fails == "converted":
        quantizer.get_weight_conversions = lambda: [None]
    with epload.WeightSender(model, ("127.0.0.1", 0), receivers=1, timeout=20) as sender:
        for call in (partial(epload.save, model, tmp_path / "saved"), partial(sender.send_weights, 1)):
            must_raise(epload.ModelMismatch, "keeps its weights as .*HfQuantizer has packed them", call)
    assert not (tmp_path / "saved").exists()
    adapted = get_peft_model(model, LoraConfig(target_modules=["q_proj"]))
    with epload.WeightSender(adapted, ("127.0.0.1", 0), receivers=1, timeout=0.5, only="adapter") as sender:
        must_raise(epload.LoadError, "0 receiving ranks ready", sender.send_weights, 1)  # it sends none of these weights
