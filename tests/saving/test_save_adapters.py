"""Saves and syncs of models with PEFT's adapters: what is saved loads as the model that PEFT itself would merge."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import (
    AdaptionPromptConfig,
    IA3Config,
    LoraConfig,
    PromptTuningConfig,
    VeraConfig,
    get_peft_model,
    inject_adapter_in_model,
)
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn
from torch.distributed.fsdp import fully_shard
from transformers import LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

import epload
from support import ranks
from support.checkpoints import assert_same, read_folder
from support.checks import all_fine
from support.failures import must_raise
from support.findings import not_refused
from support.jobs import Job, Meeting, run
from support.pretrained import small_llama

IDS = torch.arange(7)[None]


def base(tied: bool = False) -> Any:
    torch.manual_seed(0)
    return small_llama(tie_word_embeddings=tied).eval()


def adapted(tied: bool = False, **options: Any) -> Any:
    options = {"target_modules": ["q_proj", "down_proj"], "modules_to_save": ["lm_head"], **options}
    return train(get_peft_model(base(tied), LoraConfig(r=3, init_lora_weights=False, **options)))


def train(model: Any) -> Any:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                torch.manual_seed(len(name))
                parameter.add_(torch.randn(parameter.shape) * 0.1)
    return model


def merge(model: Any) -> Any:
    model.merge_adapter()
    return model


def merged(**options: Any) -> Any:
    return merge(adapted(**options))


def trained_and_merged(config: Any, model: nn.Module | None = None) -> Any:
    return merge(train(get_peft_model(model or base(), config)))


def two_adapters() -> Any:
    """The second one is active."""
    model = adapted()
    config = LoraConfig(r=3, target_modules=["v_proj"], modules_to_save=["lm_head"], init_lora_weights=False)
    model.add_adapter("second", config)
    model.set_adapter("second")
    return train(model)


def disabled(model: Any) -> Any:
    """Computes as the base model, with the original head."""
    model.base_model.disable_adapter_layers()
    return model


def injected() -> Any:
    """A transformers model without PEFT's outer modules, as transformers' own ``add_adapter`` leaves it."""
    model = train(inject_adapter_in_model(LoraConfig(r=3, target_modules=["q_proj"], init_lora_weights=False), base()))
    for module in model.modules():
        if isinstance(module, BaseTunerLayer):
            module.merge()
    return model


def experts() -> Any:
    """Both parameters of a module have an adapter, so that the module is wrapped twice."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        hidden_size=16, intermediate_size=24, moe_intermediate_size=8, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, vocab_size=32, num_experts=4, num_experts_per_tok=2,
    )  # fmt: skip
    targets = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    lora = LoraConfig(r=2, target_modules=[], target_parameters=targets, init_lora_weights=False)
    return trained_and_merged(lora, Qwen3MoeForCausalLM(config).eval())


IA3 = {"target_modules": ["k_proj", "down_proj"], "feedforward_modules": ["down_proj"]}
SAVED: dict[str, Callable[[], Any]] = {
    "merged": merged,
    "dora": lambda: merged(use_dora=True),
    "the copy of the head is trained, and not the embedding that it was tied to": lambda: merged(tied=True),
    "trained tokens": lambda: merged(trainable_token_indices=[1, 5], modules_to_save=None),
    "ia3": lambda: trained_and_merged(IA3Config(init_ia3_weights=False, **IA3)),
    "the second of two": lambda: merge(two_adapters()),
    "disabled": lambda: disabled(adapted()),
    "injected": injected,
    "experts": experts,
    "matrices that layers share": lambda: trained_and_merged(VeraConfig(r=3, target_modules=["q_proj"])),
    "the transformers model inside": lambda: merged().get_base_model(),
}


@pytest.mark.parametrize("case", SAVED)
def test_what_is_saved_computes_the_same(case: str, tmp_path: Path) -> None:
    model = SAVED[case]()
    logits = model(IDS).logits
    epload.save(model, tmp_path)
    reference = (Qwen3MoeForCausalLM if case == "experts" else LlamaForCausalLM).from_pretrained(tmp_path).eval()
    torch.testing.assert_close(reference(IDS).logits, logits)
    names = read_folder(tmp_path).keys()
    if case == "experts":  # the library's checkpoints have each expert apart
        assert not any("base_layer" in name for name in names)
    else:
        assert names <= base().state_dict().keys()


def unmerged() -> Any:
    model = merged()
    model.unmerge_adapter()
    return model


def unmerged_layer() -> Any:
    model = merged()
    model.base_model.get_submodule("model.model.layers.1.self_attn.q_proj").unmerge()
    return model


class LinearLora(nn.Linear):
    """Stands for the layers of NeMo Automodel, torchtune and torchtitan, and of loralib, which may be merged."""

    def __init__(self, merged: bool = False) -> None:
        super().__init__(2, 2)
        self.lora_A = nn.Linear(2, 1)
        self.merged = merged


class ExpertsLora(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_and_up_projs = nn.Parameter(torch.ones(2, 2, 2))
        self.lora_gate_and_up_A = nn.Parameter(torch.ones(2, 2, 1))


def prompted(make: Callable[..., Any], **options: Any) -> Any:
    return get_peft_model(base(), make(task_type="CAUSAL_LM", **options))


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "never merged": (adapted, "call merge_adapter() before"),
    "unmerged": (unmerged, "call merge_adapter() before"),
    "one layer unmerged": (
        unmerged_layer,
        "layers.1.self_attn.q_proj has an active adapter that is not merged (default)",
    ),
    "disabled": (lambda: disabled(merged()), "merged into its base weights and disabled at once"),
    "prompt": (lambda: prompted(PromptTuningConfig, num_virtual_tokens=3), "has a prompt that is trained"),
    "adaption": (
        lambda: prompted(AdaptionPromptConfig, adapter_len=3, adapter_layers=1),
        "has a prompt that is trained",
    ),
    "a layer's own": (lambda: nn.Sequential(LinearLora()), "0 applies an adapter, lora_A, next to its base weights"),
    "experts' own": (lambda: nn.Sequential(ExpertsLora()), "0 applies an adapter, lora_gate_and_up_A, next to its base weights"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_no_base_model_computes_is_refused(case: str, tmp_path: Path) -> None:
    make, text = REFUSED[case]
    must_raise(epload.ModelMismatch, re.escape(text), epload.save, make(), tmp_path / "saved")
    assert not (tmp_path / "saved").exists()


@pytest.mark.parametrize("state", [lambda: LinearLora().state_dict(), lambda: LinearLora(merged=True)])
def test_a_layers_own_lora_is_saved_with_its_base_weights(state: Callable[[], Any], tmp_path: Path) -> None:
    epload.save(state(), tmp_path)
    model = LinearLora()
    epload.load(model, tmp_path)
    assert_same(read_folder(tmp_path), model.state_dict())


def merge_sharded(rank: int, folder: str) -> list[str]:
    sharded = merged()
    for layer in sharded.base_model.model.model.layers:
        fully_shard(layer)
    epload.save(fully_shard(sharded), f"{folder}/merged")
    problems = []
    for kind, options in {"dora": {"use_dora": True}, "lora": {}}.items():
        torch.manual_seed(3)
        model = train(get_peft_model(base(), LoraConfig(r=2, target_modules=["q_proj", "embed_tokens"], **options)))
        expected = copy.deepcopy(model).merge_and_unload().state_dict()
        for layer in model.base_model.model.model.layers:
            fully_shard(layer.self_attn.q_proj)  # a class of its own then
            fully_shard(layer)
        fully_shard(model)
        model.merge_adapter()
        if kind == "dora":
            text = "merge_and_unload() before"
            problems += not_refused(lambda: epload.save(model, f"{folder}/{kind}"), "ModelMismatch", text)  # noqa: B023
            with epload.WeightSender(model, ("127.0.0.1", 0), receivers=1, timeout=30) as sender:
                problems += not_refused(lambda: sender.send_weights(1), text)
        else:
            epload.save(model, f"{folder}/{kind}")
            state = read_folder(Path(folder, kind))
            problems += [name for name, value in expected.items() if not torch.allclose(state[name], value, atol=1e-6)]
    return problems


def test_sharded_models(tmp_path: Path) -> None:
    """Merged before or after they are sharded: PEFT assigns ``weight.data``, with which torch leaves a DTensor as it is."""
    all_fine(ranks.run(2, merge_sharded, str(tmp_path)))
    torch.testing.assert_close(read_folder(tmp_path / "merged"), dict(merged().merge_and_unload().state_dict()))


@pytest.mark.parametrize("mixed", [False, True])
def test_an_adapter_around_a_module_of_the_model(mixed: bool, tmp_path: Path) -> None:
    config = LoraConfig(r=3, target_modules=["q_proj"], init_lora_weights=False)
    model = nn.ModuleDict({"inner": get_peft_model(base(), config, mixed=mixed)})
    epload.save({f"inner.{name}": value for name, value in base().state_dict().items()}, tmp_path / "base")
    report = epload.load(model, tmp_path / "base", strict=False, progress=False)
    assert report.unexpected_keys == []
    assert all(".lora_" in name for name in report.missing_keys)
    model["inner"].merge_adapter()
    epload.save(model, tmp_path / "saved")
    expected = model["inner"].merge_and_unload().state_dict()
    assert_same(read_folder(tmp_path / "saved"), {f"inner.{name}": value for name, value in expected.items()})


def send(rank: int, meeting: Meeting, folder: str | None) -> list[str]:
    """Two versions, with a failed one between them: unmerged weights, or else a model that is read and not sent."""
    model = two_adapters()
    names, problems = Path(folder, "names") if folder is not None else None, []
    if names is not None:
        base().save_pretrained(names)
    with epload.WeightSender(model, ("127.0.0.1", 0), receivers=1, names_from=names, timeout=60) as sender:
        meeting.say("address", sender.address)
        for version, adapter in enumerate(("default", "second")):
            model.set_adapter(adapter)
            if version and names is None:
                problems += not_refused(lambda: sender.send_weights(2), "ModelMismatch", "merge_adapter()")
            model.merge_adapter()
            if version and names is not None:
                names.rename(f"{names}-away")
                problems += not_refused(lambda: sender.send_weights(2), "no checkpoint")
                Path(f"{names}-away").rename(names)
            meeting.say(f"refused before {adapter}")  # who waits for the version that fails would fail, too
            sender.send_weights(2 * version + 1)
            model.unmerge_adapter()
        meeting.hear("done")
    return problems


def receive(rank: int, meeting: Meeting) -> list[str]:
    model, reference, problems = base(), two_adapters(), []
    with epload.WeightReceiver(model, meeting.hear("address"), strict=True, timeout=60) as receiver:
        for adapter in ("default", "second"):
            meeting.hear(f"refused before {adapter}")
            receiver.receive_weights()
            receiver.commit()
            reference.set_adapter(adapter)
            with torch.no_grad():
                if not torch.allclose(model(IDS).logits, reference(IDS).logits, atol=1e-5):
                    problems.append(adapter)
    meeting.say("done")
    return problems


@pytest.mark.parametrize("names", [False, True])
def test_versions_are_of_the_adapter_that_is_active(names: bool, tmp_path: Path) -> None:
    assert run([Job(1, send, (str(tmp_path) if names else None,)), Job(1, receive)]) == [[[]], [[]]]
