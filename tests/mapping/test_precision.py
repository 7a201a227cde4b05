"""Dtypes of transformers models: what ``from_pretrained`` keeps in float32 in a model of a narrower dtype."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from accelerate import init_empty_weights
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoConfig, DeepseekV3ForCausalLM, PreTrainedModel, ResNetConfig, ResNetModel

import epload
from support import ranks
from support.families import FAMILIES, save, shard
from support.findings import differing, must_be_refused_by_all
from support.jobs import Job, Meeting, run
from support.sync_jobs import send_model

SMALL = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1}


def mamba() -> PreTrainedModel:
    """Has an infinite number in its configuration, which JSON has not."""
    config = transformers.Mamba2Config(state_size=4, num_heads=4, head_dim=16, n_groups=2, **SMALL)
    return transformers.Mamba2ForCausalLM(config)


def deberta() -> PreTrainedModel:
    """Makes biases in float32 whatever its dtype is, without a list that says so."""
    config = transformers.DebertaConfig(intermediate_size=64, num_attention_heads=4, **SMALL)
    return transformers.DebertaForMaskedLM(config)


# Keeps a persistent buffer, and from transformers 5.24 on a trainable router.
deepseek = FAMILIES["deepseek_v3"].make
# Keeps trainable routers, and frozen biases.
ernie = FAMILIES["ernie4_5_moe"].make
# Keeps trainable projections, under float16 only.
t5 = FAMILIES["t5"].make
Make = Callable[[], PreTrainedModel]
KEPT = (deepseek, ernie, t5)


def on_meta(folder: str, dtype: torch.dtype | None = None) -> Any:
    config = AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        kind: Any = getattr(transformers, config.architectures[0])
        return kind._from_config(config, **({} if dtype is None else {"dtype": dtype}))


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_buffers_with_storage_beside_parameters_on_meta(dtype: torch.dtype | None, tmp_path: Path) -> None:
    """A buffer that neither the checkpoint nor the class has is left as it is."""
    config = ResNetConfig(embedding_size=8, hidden_sizes=[8], depths=[1])
    folder = save(tmp_path, lambda: ResNetModel(config), "float32")
    with init_empty_weights():
        model = ResNetModel(config)
    norm = model.get_submodule("embedder.embedder.normalization")
    norm.register_buffer("also", norm.running_mean)
    norm.register_buffer("own", torch.full((2,), 1 + 2**-10))
    buffers = dict(model.named_buffers(remove_duplicate=False))
    report = epload.load(model, folder, dtype=dtype, strict=False, progress=False)
    assert report.missing_keys == ["embedder.embedder.normalization.own"]
    expected = ResNetModel.from_pretrained(folder, dtype=dtype or torch.float32)
    also, own = norm._buffers.pop("also"), norm._buffers.pop("own")
    assert differing(model, expected) == []
    assert also is norm.running_mean
    assert also.dtype == (dtype or torch.float32)
    assert own.tolist() == [1 + 2**-10] * 2
    if dtype is None:
        assert all(buffers[name] is buffer for name, buffer in model.named_buffers())


@pytest.mark.parametrize("make", KEPT)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("built_as", [None, torch.float32])
def test_one_process(make: Make, dtype: str, built_as: torch.dtype | None, tmp_path: Path) -> None:
    """Both a model of that dtype, and one of float32 that is loaded with ``dtype=``."""
    folder = save(tmp_path, make, dtype)
    model = on_meta(folder, built_as)
    requested = None if built_as is None else getattr(torch, dtype)
    expected = type(model).from_pretrained(folder, dtype=getattr(torch, dtype))
    report = epload.load(model, folder, dtype=requested, progress=False)
    assert differing(model, expected) == []
    kept = {n for n, t in expected.state_dict().items() if dtype != "float32" and t.dtype == torch.float32}
    assert kept <= {*report.kept_in_fp32}
    assert bool(kept) == (dtype == "float16" or (dtype == "bfloat16" and make is not t5))
    # Again, into what has storage now.
    again = epload.load(model, folder, dtype=requested, progress=False)
    assert differing(model, expected) == []
    assert again.kept_in_fp32 == report.kept_in_fp32
    assert not again.warnings


def test_an_explicit_pattern_rounds(tmp_path: Path) -> None:
    folder = save(tmp_path, ernie, "bfloat16")
    model = on_meta(folder)
    report = epload.load(model, folder, dtype={r"gate\.weight$": torch.bfloat16}, progress=False)
    dtypes = {name: t.dtype for name, t in model.state_dict().items()}
    assert dtypes["model.layers.1.mlp.gate.weight"] == torch.bfloat16
    assert dtypes["model.layers.1.mlp.gate.moe_statics.e_score_correction_bias"] == torch.float32
    assert "model.layers.1.mlp.gate.weight" not in report.kept_in_fp32


def test_storage_of_another_dtype_is_filled_with_a_warning(tmp_path: Path) -> None:
    folder = save(tmp_path, deepseek, "bfloat16")
    model = deepseek().to(torch.bfloat16)
    report = epload.load(model, folder, progress=False)
    assert "e_score_correction_bias" in " ".join(report.warnings)
    assert "bfloat16" in " ".join(report.warnings)
    assert not report.kept_in_fp32
    bias = "model.layers.1.mlp.gate.e_score_correction_bias"
    assert torch.equal(model.state_dict()[bias], load_file(f"{folder}/model.safetensors")[bias].bfloat16())


def test_a_model_inside_another(tmp_path: Path) -> None:
    folder = save(tmp_path, deepseek, "bfloat16")
    outer = nn.Module()
    outer.policy = on_meta(folder)
    state = {f"policy.{name}": value for name, value in load_file(f"{folder}/model.safetensors").items()}
    outer.policy.model.layers[1].mlp.experts = None  # whose names in the file are other ones
    state = {name: value for name, value in state.items() if ".mlp.experts." not in name}
    epload.load(outer, state, progress=False)
    bias = "model.layers.1.mlp.gate.e_score_correction_bias"
    assert torch.equal(outer.policy.state_dict()[bias], load_file(f"{folder}/model.safetensors")[bias])
    assert outer.policy.dtype == torch.bfloat16


@pytest.mark.parametrize("active", ["first", "second", ""])
def test_copies_of_kept_modules_are_kept_too(active: str, tmp_path: Path) -> None:
    """PEFT trains a copy of each module in ``modules_to_save`` for each adapter, and computes with the original if none is."""
    folder = save(tmp_path / "float32", ernie, "float32")
    model = on_meta(folder, torch.float32)
    config = LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["gate"])
    with torch.device("meta"):
        model = get_peft_model(model, config, "first")
        model.add_adapter("second", config)
    epload.load(model, folder, dtype=torch.bfloat16, strict=False, progress=False)
    gates = {name: p.dtype for name, p in model.named_parameters() if name.endswith(".weight") and ".gate." in name}
    assert len(gates) == 6
    assert {*gates.values()} == {torch.float32}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.zero_()
    if active:
        model.set_adapter(active)
        model.merge_adapter()
    else:
        model.base_model.disable_adapter_layers()
    epload.save(model, tmp_path / "saved", dtype=torch.bfloat16)
    state = load_file(tmp_path / "saved/model.safetensors")
    assert {value.dtype for name, value in state.items() if ".gate." in name} == {torch.float32}


# ---- FSDP2 ----


def trained(rank: int, folder: str, in_its_group: bool) -> None:
    """Groups of several dtypes are refused; those of one compute what the library's model computes."""
    model = on_meta(folder)
    if in_its_group:
        shard(model, ())
        texts = "Call fully_shard on ", "before the module around it"
        must_be_refused_by_all(partial(epload.load, model, folder, progress=False, timeout=60), "ModelMismatch", *texts)
        assert all(p.is_meta for p in model.parameters())
        model = on_meta(folder)
    shard(model, ("mlp.gate", ".wo"))
    epload.load(model, folder, progress=False, timeout=60)
    expected = type(model).from_pretrained(folder)
    assert differing(model, expected) == []
    ids = torch.arange(6)[None]
    inputs = {"input_ids": ids} | ({"labels": ids} if "T5" in type(model).__name__ else {})
    logits = model(**inputs).logits
    assert torch.equal(logits, expected(**inputs).logits)
    logits.float().sum().backward()
    without = [n for n, p in model.named_parameters() if p.grad is None and p.requires_grad and ".experts." not in n]
    assert without == []


@pytest.mark.parametrize(
    ("make", "dtype", "in_its_group"), [(deepseek, "bfloat16", False), (ernie, "bfloat16", True), (t5, "float16", True)]
)
def test_a_forward_and_a_backward(make: Make, dtype: str, in_its_group: bool, tmp_path: Path) -> None:
    ranks.run(2, trained, save(tmp_path, make, dtype), in_its_group)


# ---- saves and syncs ----


@pytest.mark.parametrize("make", [deepseek, ernie, t5, mamba, deberta])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_saves_and_conversions(make: Make, dtype: torch.dtype, tmp_path: Path) -> None:
    """Loads of a save and of a conversion give what ``from_pretrained`` makes of the original checkpoint."""
    folder, kind = save(tmp_path / "float32", make, "float32"), type(make())
    epload.save(kind.from_pretrained(folder), tmp_path / "saved", dtype=dtype)
    epload.convert(folder, tmp_path / "converted", dtype=dtype, files=[f"{folder}/config.json"])
    expected = kind.from_pretrained(folder, dtype=dtype)
    for name in ("saved", "converted"):
        assert differing(kind.from_pretrained(tmp_path / name, dtype=dtype), expected) == []
    assert differing(kind.from_pretrained(tmp_path / "saved"), expected) == [], "the configuration says the dtype"
    if make in (deepseek, ernie):
        written = load_file(tmp_path / "saved/model.safetensors").items()
        assert {tensor.dtype for name, tensor in written if "correction_bias" in name} == {torch.float32}
    elif make is deberta:
        assert expected.deberta.encoder.layer[0].attention.self.q_bias.dtype == torch.float32


@pytest.mark.parametrize("key", ["attn_implementation", "_attn_implementation"])
@pytest.mark.parametrize("kernel", ["some/kernel", "flash_attention_2"])
def test_kernels_that_a_configuration_names_are_not_loaded(key: str, kernel: str, tmp_path: Path) -> None:
    folder = save(tmp_path / "float32", deepseek, "float32")
    config = Path(folder, "config.json")
    config.write_text(json.dumps(json.loads(config.read_text()) | {key: kernel}))
    epload.convert(folder, tmp_path / "narrow", dtype=torch.bfloat16)


def test_a_save_in_a_wider_dtype(tmp_path: Path) -> None:
    folder = save(tmp_path / "bfloat16", deepseek, "bfloat16")
    model = DeepseekV3ForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    epload.save(model, tmp_path / "saved", dtype="float32")
    values = load_file(tmp_path / "saved" / "model.safetensors")
    assert {value.dtype for value in values.values()} == {torch.float32}
    expected = DeepseekV3ForCausalLM.from_pretrained(tmp_path / "saved").state_dict()
    assert all(torch.equal(expected[name], value.float()) for name, value in model.state_dict().items())


def test_conversions_that_cannot_know_what_stays_in_float32_are_refused(tmp_path: Path) -> None:
    folder = save(tmp_path / "float32", deepseek, "float32")
    state = load_file(f"{folder}/model.safetensors")
    save_file({f"another.{name}": value for name, value in state.items()}, f"{folder}/model.safetensors")
    with pytest.raises(ValueError, match=r"no tensor of the checkpoint fits DeepseekV3ForCausalLM"):
        epload.convert(folder, tmp_path / "narrow", dtype=torch.bfloat16)
    save_file(state, f"{folder}/model.safetensors")
    config = json.loads(Path(folder, "config.json").read_text())
    Path(folder, "config.json").write_text(json.dumps(config | {"architectures": ["NoSuchModel"]}))
    with pytest.raises(ValueError, match=r"cannot tell which tensors .* keeps in float32: .*NoSuchModel"):
        epload.convert(folder, tmp_path / "narrow", dtype=torch.bfloat16)
    assert not (tmp_path / "narrow").exists()


def loaded(folder: str) -> nn.Module:
    model = on_meta(folder)
    epload.load(model, folder, progress=False)
    return model


def receive(rank: int, meeting: Meeting, folder: str) -> list[str]:
    model = deepseek().to(torch.bfloat16)
    with epload.WeightReceiver(model, meeting.hear("address"), timeout=60) as receiver:
        report = receiver.receive_weights()
        receiver.commit()
    return [*differing(model, DeepseekV3ForCausalLM.from_pretrained(folder).to(torch.bfloat16)), *report.warnings]


def test_syncs(tmp_path: Path) -> None:
    folder = save(tmp_path, deepseek, "bfloat16")
    _, [[warning]] = run([Job(1, send_model, (partial(loaded, folder),)), Job(1, receive, (folder,))])
    assert "e_score_correction_bias" in warning
