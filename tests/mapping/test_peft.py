"""Base checkpoints and adapters' own files into PEFT models, sharded; what PEFT itself loads is the reference."""

from __future__ import annotations

import re
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import BertConfig, BertForSequenceClassification, LlamaForCausalLM

import epload
from support.findings import differing, must_be_refused_by_all
from support.on_ranks import on_ranks
from support.pretrained import small_llama

peft = pytest.importorskip("peft", reason="peft is not installed: pip install -r requirements-dev.txt")
load = partial(epload.load, progress=False)
load_base = partial(load, strict=False)


def base(tie: bool = False) -> Any:
    return small_llama(tie_word_embeddings=tie)


def lora(*modules: str, **options: Any) -> Any:
    return peft.LoraConfig(**{"r": 2, "target_modules": [*modules], "init_lora_weights": False, **options})


CONFIGS: dict[str, Callable[[], Any]] = {
    "lora": lambda: lora("q_proj", "v_proj", r=3),
    "modules_to_save": lambda: lora("q_proj", modules_to_save=["lm_head", "norm"]),
    "dora": lambda: lora("q_proj", use_dora=True),
    "bias": lambda: lora("q_proj", bias="all"),
    "embedding": lambda: lora("embed_tokens", "o_proj"),
    "ia3": lambda: peft.IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]),
    "loha": lambda: peft.LoHaConfig(r=2, target_modules=["q_proj"], init_weights=False),
    "vera": lambda: peft.VeraConfig(r=4, target_modules=["q_proj"], init_weights=False),
}


def adapted(kind: str, tie: bool = False) -> Any:
    return peft.get_peft_model(base(tie), CONFIGS[kind]())


def sharded(kind: str, tie: bool = False) -> Any:
    with torch.device("meta"):
        model = adapted(kind, tie)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.get_base_model().model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def draw(model: nn.Module, frozen: bool = True) -> Any:
    """Every parameter anew, also those that start as constants."""
    for parameter in model.parameters():
        if frozen or parameter.requires_grad:
            nn.init.normal_(parameter)
    return model


def save_bases(folder: Path) -> None:
    for tie in (False, True):
        draw(base(tie)).save_pretrained(folder / f"base-{tie}")


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """The folder of a base checkpoint."""
    draw(base()).save_pretrained(tmp_path / "base")
    return tmp_path / "base"


# ---- a base checkpoint ----


@on_ranks(2, save_bases)
def test_a_base_checkpoint_fills_the_originals_and_the_copies(rank: int, tmp_path: Path) -> None:
    def zeros(model: nn.Module, paths: str, names: tuple[str, ...]) -> None:
        for name in names:
            nn.init.zeros_(getattr(model, name))

    for tie in (False, True):
        path = tmp_path / f"base-{tie}"
        reference = peft.get_peft_model(LlamaForCausalLM.from_pretrained(path), CONFIGS["modules_to_save"]())
        model = sharded("modules_to_save", tie)
        report = load_base(model, path, init_missing=zeros)
        assert [name for name in report.missing_keys if ".lora_" not in name] == report.unexpected_keys == []
        state = model.state_dict()
        wanted = {name: value for name, value in reference.state_dict().items() if ".lora_" not in name}
        assert differing({name: state[name] for name in wanted}, wanted) == [], f"tie={tie}"


@pytest.mark.parametrize(
    ("kind", "options", "stale"),
    [
        ("Lora", {"r": 2}, False),
        ("Lora", {"r": 2, "init_lora_weights": "gaussian"}, False),
        ("Lora", {"r": 2, "init_lora_weights": "pissa"}, True),
        ("Lora", {"r": 2, "use_dora": True}, True),
        ("Vera", {"r": 2}, False),
        ("Delora", {"r": 2}, True),
        ("OSF", {}, True),
    ],
)
def test_an_adapter_that_comes_from_other_base_weights(
    kind: str, options: dict[str, Any], stale: bool, saved: Path, tmp_path: Path
) -> None:
    """PEFT computes some adapters from the base weights, and a load of other base weights says that they no longer fit."""
    config = getattr(peft, f"{kind}Config")(target_modules=["q_proj"], **options)
    model = peft.get_peft_model(base(), config)
    expected = ("keeps values that PEFT has computed", "has changed the base weights when it was made")
    warned = load_base(model, saved).warnings
    assert any(text in warning for text in expected for warning in warned) == stale
    peft.get_peft_model(LlamaForCausalLM.from_pretrained(saved), config).save_pretrained(tmp_path / "adapter")
    assert not load_base(model, tmp_path / "adapter").warnings


def test_an_adapter_that_changes_base_weights_is_made_after_they_are_loaded(saved: Path, tmp_path: Path) -> None:
    config = peft.LoraConfig(target_modules=["q_proj"], r=2, init_lora_weights="pissa")
    trained = peft.get_peft_model(LlamaForCausalLM.from_pretrained(saved), config)
    trained.save_pretrained(tmp_path / "adapter")
    wanted = peft.PeftModel.from_pretrained(LlamaForCausalLM.from_pretrained(saved), tmp_path / "adapter")
    model = base()
    load_base(model, saved)
    model = peft.get_peft_model(model, config)
    assert not load_base(model, tmp_path / "adapter").warnings
    assert differing(model, wanted) == []


@pytest.mark.parametrize(
    ("kind", "field", "values"),
    [
        ("LoHa", "alpha", (8, 64)), ("LoKr", "alpha", (8, 64)), ("FourierFT", "scaling", (1.0, 2.0)),
        ("Lora", "trainable_token_indices", ([1, 5], [2, 3])), ("Lora", "trainable_token_indices", ({"lm_head": [1]}, [1])),
    ],
)  # fmt: skip
def test_what_scales_an_adapter_is_that_of_the_file(kind: str, field: str, values: Any, saved: Path, tmp_path: Path) -> None:
    models = []
    for value in values:
        options: dict[str, Any] = {"n_frequency": 4} if kind == "FourierFT" else {}
        config = getattr(peft, f"{kind}Config")(target_modules=["q_proj"], **options | {field: value})
        models.append(peft.get_peft_model(LlamaForCausalLM.from_pretrained(saved), config))
    for model, name in zip(models, "ab", strict=True):
        model.save_pretrained(tmp_path / name)
    load(models[0], tmp_path / "a")
    text = f"the checkpoint's adapter has {field}={values[1]} and the model's {values[0]}"
    with pytest.raises(epload.ModelMismatch, match=re.escape(text)):
        load(models[0], tmp_path / "b")


def test_two_peft_models_side_by_side(saved: Path, tmp_path: Path) -> None:
    parts = {name: adapted("lora") for name in ("actor", "critic")}
    parts["critic"].save_pretrained(tmp_path)
    with pytest.raises(epload.ModelMismatch, match="the model has several PEFT models, actor and critic"):
        load(torch.nn.ModuleDict(parts), tmp_path)
    load(parts["critic"], tmp_path)


def test_a_merged_adapter_is_warned_of(saved: Path) -> None:
    model = adapted("lora")
    assert load_base(model, saved).warnings == []
    model.merge_adapter()
    (warning,) = load_base(model, saved).warnings
    assert "adapter default is merged into base weights" in warning


def test_each_adapter_has_its_copy(saved: Path) -> None:
    model = adapted("modules_to_save")
    model.add_adapter("other", CONFIGS["modules_to_save"]())
    assert all(".lora_" in name for name in load_base(model, saved).missing_keys)
    wanted = load_file(saved / "model.safetensors")["lm_head.weight"]
    head = model.base_model.model.lm_head
    for copy in (head.original_module, head.modules_to_save["default"], head.modules_to_save["other"]):
        assert torch.equal(copy.weight, wanted)
    whole = {name: torch.full_like(tensor, i) for i, (name, tensor) in enumerate(model.state_dict().items())}
    load(model, whole)  # a whole PEFT model's state, which has a value for each copy
    assert differing(model, whole) == []


def test_an_adapter_of_a_model_that_transformers_has_divided(saved: Path, tmp_path: Path) -> None:
    """PEFT gathers the adapter's tensors of such a model."""
    trained, model = (peft.get_peft_model(LlamaForCausalLM.from_pretrained(saved), lora("q_proj")) for _ in range(2))
    draw(trained, frozen=False).save_pretrained(tmp_path / "adapter")
    model.get_base_model()._tp_size = 1
    load(model, tmp_path / "adapter")
    assert differing(model, trained) == []


def test_a_prompt_tuning_model_takes_a_base_checkpoint(saved: Path) -> None:
    """Its base model is one module less deep."""
    model = peft.get_peft_model(base(), peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3))
    assert all("prompt" in name for name in load_base(model, saved).missing_keys)
    assert differing(model.get_base_model(), LlamaForCausalLM.from_pretrained(saved)) == []


def test_an_adapter_that_transformers_has_put_in_place(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # transformers 5.24 asks for PEFT 0.22, which was not released yet when this was written.
    monkeypatch.setattr("transformers.integrations.peft.MIN_PEFT_VERSION", peft.__version__)
    model, wanted = base(), LlamaForCausalLM.from_pretrained(saved)
    for each in (model, wanted):
        each.add_adapter(CONFIGS["modules_to_save"]())
    assert all(".lora_" in name for name in load_base(model, saved).missing_keys)
    assert [name for name in differing(model, wanted) if ".lora_" not in name] == []


@pytest.mark.parametrize(
    "config",
    [
        lambda: lora("q_proj", init_lora_weights=True),
        lambda: peft.AdaLoraConfig(target_modules=["q_proj"], total_step=9),
        lambda: lora("embed_tokens", init_lora_weights=True),
    ],
)
def test_adapters_on_meta_that_initialize_themselves(config: Callable[[], Any], saved: Path) -> None:
    with torch.device("meta"):
        model = peft.get_peft_model(base(), config())
    report = load_base(model, saved)
    assert not any(tensor.is_meta for tensor in model.state_dict().values())
    assert all(bool(tensor.any()) for name, tensor in model.state_dict().items() if "q_proj.lora_A" in name)
    wanted, inputs = LlamaForCausalLM.from_pretrained(saved).eval(), torch.arange(7)[None]
    with torch.no_grad():
        assert torch.equal(model.eval()(inputs).logits, wanted(inputs).logits), "an adapter begins with no effect"
    assert {name for name in report.missing_keys if ".embed_tokens.base_layer" in name} == set()


# ---- an adapter's own file ----


def fills_what_peft_fills(model: Any, reference: Any, folder: Path, adapter: str = "default", wrap: Any = None) -> None:
    """``reference``: an equal model."""
    before, file = deepcopy(reference.state_dict()), load_file(folder / "adapter_model.safetensors")
    assert differing(model, before) == []
    unexpected = peft.set_peft_model_state_dict(reference, file, adapter_name=adapter).unexpected_keys
    assert all("modules_to_save.bias" in name for name in unexpected)  # which PEFT saves twice
    report = load(wrap(model) if wrap else model, folder)
    assert report.tensors
    assert report.missing_keys == report.unexpected_keys == []
    assert differing(model, reference) == []
    assert differing(model, before)


def save_both(folder: Path, kind: str = "lora") -> None:
    """The state of a model before, and an adapter of another."""
    torch.manual_seed(0)
    folder.mkdir(exist_ok=True)
    torch.save(draw(adapted(kind)).state_dict(), folder / "before.pt")
    draw(adapted(kind)).save_pretrained(folder / "adapter")


def save_every_kind(folder: Path) -> None:
    for kind in CONFIGS:
        save_both(folder / kind, kind)


@on_ranks(2, save_every_kind)
def test_an_adapters_file_fills_what_peft_fills(rank: int, tmp_path: Path) -> None:
    """Every kind into FSDP2, and one into other wrappers."""
    others = [("modules_to_save", wrap) for wrap in (DistributedDataParallel, torch.compile)]
    for kind, wrap in [*((kind, None) for kind in CONFIGS), *others]:
        before = torch.load(tmp_path / kind / "before.pt")
        model, reference = adapted(kind) if wrap else sharded(kind), adapted(kind)
        load(model, before)
        reference.load_state_dict(before)
        fills_what_peft_fills(model, reference, tmp_path / kind / "adapter", wrap=wrap)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("RandLora", {"r": 2}),
        ("TinyLora", {"r": 2}),
        ("UniLora", {"r": 2, "theta_d_length": 16}),
        ("VBLoRA", {"r": 2, "num_vectors": 4, "vector_length": 4, "topk": 2}),
    ],
)
def test_adapters_whose_layers_share_tensors(kind: str, options: dict[str, Any], tmp_path: Path) -> None:
    models = []
    for _ in range(3):
        torch.manual_seed(0)
        config = getattr(peft, f"{kind}Config")(target_modules=["q_proj"], **options)
        models.append(peft.get_peft_model(base(), config))
    draw(models[2], frozen=False).save_pretrained(tmp_path)
    fills_what_peft_fills(models[0], models[1], tmp_path)


def test_the_active_adapter_is_filled_and_no_other(tmp_path: Path) -> None:
    save_both(tmp_path)
    model = adapted("lora")
    model.add_adapter("other", CONFIGS["lora"]())
    reference = deepcopy(model)
    model.set_adapter("other")
    fills_what_peft_fills(model, reference, tmp_path / "adapter", "other")
    model.base_model.set_adapter(["default", "other"])
    text = r"2 adapters of the model are active \(default, other\); select one with model.set_adapter\(name\)"
    with pytest.raises(epload.ModelMismatch, match=text):
        load(model, tmp_path / "adapter")


def test_biases_that_peft_saves_twice(tmp_path: Path) -> None:
    sizes = {"vocab_size": 17, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2}
    whole = BertForSequenceClassification(BertConfig(**sizes, num_labels=3))
    config = lora("query", task_type="SEQ_CLS", bias="all", init_lora_weights=True)
    other, model, reference = (peft.get_peft_model(deepcopy(whole), deepcopy(config)) for _ in range(3))
    draw(other).save_pretrained(tmp_path)
    load(reference, model.state_dict())
    fills_what_peft_fills(model, reference, tmp_path)


def save_misfits(folder: Path) -> None:
    save_both(folder)
    state = load_file(folder / "adapter" / "adapter_model.safetensors")
    at = "base_model.model.model.layers.0.self_attn"
    short = {name: t for name, t in state.items() if name != f"{at.replace('.0.', '.1.')}.v_proj.lora_B.weight"}
    save_file(short, folder / "short.safetensors")
    save_file(state | {f"{at}.k_proj.lora_A.weight": torch.ones(3, 8)}, folder / "stray.safetensors")
    save_file(state | {f"{at}.q_proj.lora_A.weight": torch.ones(4, 8)}, folder / "shape.safetensors")


@on_ranks(2, save_misfits)
def test_an_adapters_file_that_does_not_fit(rank: int, tmp_path: Path) -> None:
    model, layers = sharded("lora"), "base_model.model.model.layers"
    texts = "an adapter file without base weights", "load the base checkpoint first"
    must_be_refused_by_all(partial(load, model, tmp_path / "adapter"), *texts)
    assert all(parameter.is_meta for parameter in model.parameters())
    load(model, torch.load(tmp_path / "before.pt"))
    for file, texts in {
        "short": (f"1 parameter missing from the checkpoint: {layers}.1.self_attn.v_proj.lora_B.default.weight",),
        "stray": (f"1 unexpected checkpoint key: {layers}.0.self_attn.k_proj.lora_A.weight",),
        "shape": ("1 mismatched shape", "lora_A.weight has shape [4, 8], but "),
    }.items():
        must_be_refused_by_all(partial(load, model, tmp_path / f"{file}.safetensors"), *texts)
    assert len(load(model, tmp_path / "short.safetensors", strict=False).missing_keys) == 1


def test_an_adapters_file_of_another_scale(tmp_path: Path) -> None:
    model, other = (peft.get_peft_model(base(), lora("q_proj", lora_alpha=alpha)) for alpha in (8, 32))
    other.save_pretrained(tmp_path)
    for source in (tmp_path, epload.Checkpoint.open(tmp_path)):
        with pytest.raises(epload.ModelMismatch, match="the checkpoint's adapter has lora_alpha=32 and the model's 8"):
            load(model, source)
        load(model, source, strict=False)
    (tmp_path / "adapter_config.json").write_text("{")
    with pytest.raises(epload.CheckpointError, match=r"adapter_config\.json is no JSON"):
        load(model, tmp_path)


def test_base_rows_of_trained_tokens(saved: Path, tmp_path: Path) -> None:
    model, other = (peft.get_peft_model(base(), lora("q_proj", trainable_token_indices=[1, 5])) for _ in range(2))
    draw(other).save_pretrained(tmp_path / "adapter")
    load_base(model, saved)
    load(model, tmp_path / "adapter")
    model.merge_adapter()
    model.unmerge_adapter()
    rows = model.get_base_model().model.embed_tokens.token_adapter.base_layer.weight
    assert torch.equal(rows, load_file(saved / "model.safetensors")["model.embed_tokens.weight"])


class PackedLinear(nn.Linear):
    """Shows the constants of its packed weight in its state dict, as bitsandbytes' Linear4bit does."""

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}weight.absmax"] = torch.ones(3)


def packed() -> Any:
    model = base()
    for layer in model.model.layers:
        kept = layer.self_attn.q_proj
        layer.self_attn.q_proj = PackedLinear(kept.in_features, kept.out_features, bias=False)
    return peft.get_peft_model(model, lora("q_proj"))


def test_an_adapter_over_layers_that_show_what_they_do_not_have(saved: Path, tmp_path: Path) -> None:
    """It is filled, and a checkpoint of all weights is refused."""
    peft.get_peft_model(draw(base()), lora("q_proj")).save_pretrained(tmp_path / "adapter")
    model = packed()
    load(model, tmp_path / "adapter")
    file = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    for name, tensor in file.items():
        assert torch.equal(model.get_parameter(name.replace(".weight", ".default.weight")), tensor)
    for strict in (True, False):
        with pytest.raises(epload.ModelMismatch, match=r"q_proj.* \(PackedLinear\) returns copies in its state dict"):
            load(model, saved, strict=strict)
