"""Base checkpoints and adapters' own files into PEFT models, sharded; what PEFT itself loads is the reference."""

from __future__ import annotations

import copy
from collections.abc import Callable
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
from transformers import BertConfig, BertForSequenceClassification, LlamaConfig, LlamaForCausalLM

import epload
from support import ranks
from support.checks import all_fine
from support.findings import differing, must_be_refused, must_be_refused_by_all
from support.gather import full_state

peft = pytest.importorskip("peft", reason="peft is not installed: pip install -r requirements-dev.txt")
_OPTIONS = {
    "vocab_size": 17,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}


def base(tie: bool = False) -> Any:
    return LlamaForCausalLM(LlamaConfig(**_OPTIONS, tie_word_embeddings=tie))


CONFIGS: dict[str, Callable[[], Any]] = {
    "lora": lambda: peft.LoraConfig(r=3, target_modules=["q_proj", "v_proj"], init_lora_weights=False),
    "modules_to_save": lambda: peft.LoraConfig(
        r=3, target_modules=["q_proj"], modules_to_save=["lm_head", "norm"], init_lora_weights=False
    ),
    "dora": lambda: peft.LoraConfig(r=2, target_modules=["q_proj"], use_dora=True, init_lora_weights=False),
    "bias": lambda: peft.LoraConfig(r=2, target_modules=["q_proj"], bias="all", init_lora_weights=False),
    "embedding": lambda: peft.LoraConfig(r=2, target_modules=["embed_tokens", "o_proj"], init_lora_weights=False),
    "ia3": lambda: peft.IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]),
    "loha": lambda: peft.LoHaConfig(r=2, target_modules=["q_proj"], init_weights=False),
    "vera": lambda: peft.VeraConfig(r=4, target_modules=["q_proj"], init_weights=False),
}


def adapted(kind: str, tie: bool = False) -> Any:
    return peft.get_peft_model(base(tie), CONFIGS[kind]())


def sharded(make: Callable[[], nn.Module]) -> Any:
    with torch.device("meta"):
        model: Any = make()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.get_base_model().model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def draw(model: nn.Module) -> nn.Module:
    """Every parameter anew, also those that start as constants."""
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    return model


def zeros(model: nn.Module, paths: str, names: tuple[str, ...]) -> None:
    """For what no base checkpoint holds."""
    for name in names:
        nn.init.zeros_(getattr(model, name))


# ---- a base checkpoint ----


def _base(rank: int, folder: Path) -> None:
    for tie in (False, True):
        path = folder / f"base-{tie}"
        reference = peft.get_peft_model(LlamaForCausalLM.from_pretrained(path), CONFIGS["modules_to_save"]())
        model = sharded(lambda tie=tie: adapted("modules_to_save", tie))
        report = epload.load(model, path, strict=False, init_missing=zeros, progress=False)
        assert [f"missing: {name}" for name in report.missing_keys if ".lora_" not in name] == []
        assert [*report.unexpected_keys] == [], "unexpected"
        state = full_state(model)
        for name, value in reference.state_dict().items():
            assert not (".lora_" not in name and not torch.equal(state[name], value)), f"tie={tie}: {name}"


def test_a_base_checkpoint_fills_the_originals_and_the_copies(tmp_path: Path) -> None:
    torch.manual_seed(0)
    for tie in (False, True):
        draw(base(tie)).save_pretrained(tmp_path / f"base-{tie}")
    ranks.run(2, _base, tmp_path)


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
    kind: str, options: dict[str, Any], stale: bool, tmp_path: Path
) -> None:
    """PEFT computes some adapters from the base weights, and a load of other base weights says that they no longer fit."""
    draw(base()).save_pretrained(tmp_path / "base")
    config = getattr(peft, f"{kind}Config")(target_modules=["q_proj"], **options)
    model = peft.get_peft_model(base(), config)
    report = epload.load(model, tmp_path / "base", strict=False, progress=False)
    assert any("keeps values that PEFT has computed" in text for text in report.warnings) == stale
    peft.get_peft_model(LlamaForCausalLM.from_pretrained(tmp_path / "base"), config).save_pretrained(
        tmp_path / "adapter"
    )
    assert not epload.load(model, tmp_path / "adapter", strict=False, progress=False).warnings


def test_a_merged_adapter_is_warned_of(tmp_path: Path) -> None:
    base().save_pretrained(tmp_path)
    model = adapted("lora")
    assert epload.load(model, tmp_path, strict=False, progress=False).warnings == []
    model.merge_adapter()
    (warning,) = epload.load(model, tmp_path, strict=False, progress=False).warnings
    assert "adapter default is merged into base weights" in warning


def _two_adapters(rank: int, folder: Path) -> list[str]:
    model = adapted("modules_to_save")
    model.add_adapter("other", CONFIGS["modules_to_save"]())
    report = epload.load(model, folder / "base-False", strict=False, progress=False)
    wanted = load_file(folder / "base-False" / "model.safetensors")["lm_head.weight"]
    head = model.base_model.model.lm_head
    copies = [head.original_module.weight, head.modules_to_save["default"].weight, head.modules_to_save["other"].weight]
    whole = {name: torch.full_like(tensor, i) for i, (name, tensor) in enumerate(model.state_dict().items())}
    epload.load(model, whole, progress=False)  # a whole PEFT model's state, which has a value for each copy
    return [
        *(str(i) for i, tensor in enumerate(copies) if not torch.equal(tensor, wanted) and not report.missing_keys),
        *differing(model, whole),
    ]


def test_each_adapter_has_its_copy(tmp_path: Path) -> None:
    draw(base()).save_pretrained(tmp_path / "base-False")
    all_fine(ranks.run(1, _two_adapters, tmp_path))


# ---- an adapter's own file ----


def _adapters(rank: int, folder: Path) -> list[str]:
    """Every kind into FSDP2, and one into other wrappers."""
    cases = [(kind, sharded) for kind in CONFIGS]
    cases += [("modules_to_save", wrap) for wrap in (DistributedDataParallel, torch.compile)]
    return [f"{kind}, {wrap}: {text}" for kind, wrap in cases for text in _adapter(folder / kind, kind, wrap)]


def _adapter(folder: Path, kind: str, wrap: Callable[[Any], Any]) -> list[str]:
    reference = adapted(kind)
    before = torch.load(folder / "before.pt")
    reference.load_state_dict(before)
    result = peft.set_peft_model_state_dict(reference, load_file(folder / "adapter" / "adapter_model.safetensors"))
    assert not result.unexpected_keys
    if wrap is sharded:
        model = wrapped = sharded(lambda: adapted(kind))
        epload.load(model, before, progress=False)
    else:
        model = adapted(kind)
        model.load_state_dict(before)
        wrapped = wrap(model)
    report = epload.load(wrapped, folder / "adapter", progress=False)
    problems = [str(report)] if report.missing_keys or report.unexpected_keys or not report.tensors else []
    state = full_state(model) if wrap is sharded else model.state_dict()
    return problems + differing(state, reference)


def save_both(folder: Path, kind: str) -> None:
    """The state of a model before, and an adapter of another."""
    torch.manual_seed(0)
    folder.mkdir(exist_ok=True)
    torch.save(draw(adapted(kind)).state_dict(), folder / "before.pt")
    draw(adapted(kind)).save_pretrained(folder / "adapter")


def test_an_adapters_file_fills_what_peft_fills(tmp_path: Path) -> None:
    for kind in CONFIGS:
        save_both(tmp_path / kind, kind)
    all_fine(ranks.run(2, _adapters, tmp_path))


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
    def make() -> Any:
        torch.manual_seed(0)
        return peft.get_peft_model(base(), getattr(peft, f"{kind}Config")(target_modules=["q_proj"], **options))

    model, reference, other = make(), make(), make()
    with torch.no_grad():
        for parameter in other.parameters():
            if parameter.requires_grad:
                nn.init.normal_(parameter)
    other.save_pretrained(tmp_path)
    peft.set_peft_model_state_dict(reference, load_file(tmp_path / "adapter_model.safetensors"))
    report = epload.load(model, tmp_path, progress=False)
    assert report.tensors
    assert report.missing_keys == report.unexpected_keys == []
    assert differing(model, reference) == []
    assert differing(model, make())


def _active(rank: int, folder: Path) -> None:
    """The active adapter's tensors, and no others."""
    model = adapted("lora")
    model.add_adapter("other", CONFIGS["lora"]())
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.set_adapter("other")
    epload.load(model, folder / "adapter", progress=False)
    reference = adapted("lora")
    reference.add_adapter("other", CONFIGS["lora"]())
    reference.load_state_dict(before)
    peft.set_peft_model_state_dict(
        reference, load_file(folder / "adapter" / "adapter_model.safetensors"), adapter_name="other"
    )
    assert differing(model, reference) == []
    model.base_model.set_adapter(["default", "other"])
    text = "2 adapters of the model are active (default, other); select one with model.set_adapter(name)"
    must_be_refused(lambda: epload.load(model, folder / "adapter", progress=False), text)


def test_the_active_adapter_is_filled(tmp_path: Path) -> None:
    save_both(tmp_path, "lora")
    ranks.run(1, _active, tmp_path)


def _misfits(rank: int, folder: Path) -> None:
    model = sharded(lambda: adapted("lora"))
    texts = "an adapter file without base weights", "load the base checkpoint first"
    must_be_refused_by_all(lambda: epload.load(model, folder / "adapter", progress=False), *texts)
    assert [name for name, parameter in model.named_parameters() if not parameter.is_meta] == []
    epload.load(model, torch.load(folder / "before.pt"), progress=False)
    for file, texts in {
        "short": (
            "1 parameter missing from the checkpoint: base_model.model.model.layers.1.self_attn.v_proj.lora_B.default.weight",
        ),
        "stray": ("1 unexpected checkpoint key: base_model.model.model.layers.0.self_attn.k_proj.lora_A.weight",),
        "shape": ("1 mismatched shape", "lora_A.weight has shape [4, 8], but "),
    }.items():
        load = partial(epload.load, model, folder / f"{file}.safetensors", progress=False)
        must_be_refused_by_all(load, *texts)
    report = epload.load(model, folder / "short.safetensors", strict=False, progress=False)
    assert len(report.missing_keys) == 1, str(report.missing_keys)


def test_an_adapters_file_that_does_not_fit(tmp_path: Path) -> None:
    save_both(tmp_path, "lora")
    state = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    at = "base_model.model.model.layers.0.self_attn"
    short = {name: t for name, t in state.items() if name != f"{at.replace('.0.', '.1.')}.v_proj.lora_B.weight"}
    save_file(short, tmp_path / "short.safetensors")
    save_file(state | {f"{at}.k_proj.lora_A.weight": torch.ones(3, 8)}, tmp_path / "stray.safetensors")
    save_file(state | {f"{at}.q_proj.lora_A.weight": torch.ones(4, 8)}, tmp_path / "shape.safetensors")
    ranks.run(2, _misfits, tmp_path)


def test_a_prompt_tuning_model_takes_a_base_checkpoint(tmp_path: Path) -> None:
    """Its base model is one module less deep."""
    draw(base()).save_pretrained(tmp_path)
    model = peft.get_peft_model(base(), peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3))
    report = epload.load(model, tmp_path, strict=False, progress=False)
    assert all("prompt" in name for name in report.missing_keys)
    assert differing(model.get_base_model(), LlamaForCausalLM.from_pretrained(tmp_path)) == []


def test_an_adapter_that_transformers_has_put_in_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # transformers 5.24 asks for PEFT 0.22, which was not released yet when this was written.
    monkeypatch.setattr("transformers.integrations.peft.MIN_PEFT_VERSION", peft.__version__)
    draw(base()).save_pretrained(tmp_path)
    model = base()
    model.add_adapter(CONFIGS["modules_to_save"]())
    report = epload.load(model, tmp_path, strict=False, progress=False)
    assert all(".lora_" in name for name in report.missing_keys)
    wanted = LlamaForCausalLM.from_pretrained(tmp_path)
    wanted.add_adapter(CONFIGS["modules_to_save"]())
    state = model.state_dict()
    assert [n for n, t in wanted.state_dict().items() if ".lora_" not in n and not torch.equal(t, state[n])] == []


def test_an_adapters_file_of_another_scale(tmp_path: Path) -> None:
    model, other = (
        peft.get_peft_model(base(), peft.LoraConfig(r=3, lora_alpha=alpha, target_modules=["q_proj"]))
        for alpha in (8, 32)
    )
    other.save_pretrained(tmp_path)
    for source in (tmp_path, epload.Checkpoint.open(tmp_path)):
        with pytest.raises(epload.ModelMismatch, match="the checkpoint's adapter has lora_alpha=32 and the model's 8"):
            epload.load(model, source, progress=False)
        epload.load(model, source, strict=False, progress=False)
    (tmp_path / "adapter_config.json").write_text("{")
    with pytest.raises(epload.CheckpointError, match=r"adapter_config\.json is no JSON"):
        epload.load(model, tmp_path, progress=False)


def test_base_rows_of_trained_tokens(tmp_path: Path) -> None:
    draw(base()).save_pretrained(tmp_path / "base")
    config = peft.LoraConfig(r=3, target_modules=["q_proj"], trainable_token_indices=[1, 5])
    model, other = peft.get_peft_model(base(), config), peft.get_peft_model(base(), config)
    draw(other).save_pretrained(tmp_path / "adapter")
    epload.load(model, tmp_path / "base", strict=False, progress=False)
    epload.load(model, tmp_path / "adapter", progress=False)
    model.merge_adapter()
    model.unmerge_adapter()
    rows = model.get_base_model().model.embed_tokens.token_adapter.base_layer.weight
    assert torch.equal(rows, load_file(tmp_path / "base/model.safetensors")["model.embed_tokens.weight"])


@pytest.mark.parametrize(
    "config",
    [
        lambda: peft.LoraConfig(r=2, target_modules=["q_proj"]),
        lambda: peft.AdaLoraConfig(target_modules=["q_proj"], total_step=9),
        lambda: peft.LoraConfig(r=2, target_modules=["embed_tokens"]),
    ],
)
def test_adapters_on_meta_that_initialize_themselves(config: Callable[[], Any], tmp_path: Path) -> None:
    draw(base()).save_pretrained(tmp_path)
    with torch.device("meta"):
        model = peft.get_peft_model(base(), config())
    report = epload.load(model, tmp_path, strict=False, progress=False)
    assert not any(tensor.is_meta for tensor in model.state_dict().values())
    assert all(bool(tensor.any()) for name, tensor in model.state_dict().items() if "q_proj.lora_A" in name)
    wanted, inputs = LlamaForCausalLM.from_pretrained(tmp_path).eval(), torch.arange(7)[None]
    with torch.no_grad():
        assert torch.equal(model.eval()(inputs).logits, wanted(inputs).logits), "an adapter begins with no effect"
    assert {name for name in report.missing_keys if ".embed_tokens.base_layer" in name} == set()


def test_biases_that_peft_saves_twice(tmp_path: Path) -> None:
    def classifier() -> Any:
        config = BertConfig(
            vocab_size=17, hidden_size=8, intermediate_size=12, num_hidden_layers=1, num_attention_heads=2, num_labels=3
        )
        return BertForSequenceClassification(config)

    config = peft.LoraConfig(r=2, target_modules=["query"], task_type="SEQ_CLS", bias="all")
    whole = classifier()
    draw(peft.get_peft_model(copy.deepcopy(whole), config)).save_pretrained(tmp_path)
    model = peft.get_peft_model(copy.deepcopy(whole), config)
    report = epload.load(model, tmp_path, progress=False)
    assert report.missing_keys == report.unexpected_keys == []
    assert differing(model, peft.PeftModel.from_pretrained(copy.deepcopy(whole), tmp_path)) == []
