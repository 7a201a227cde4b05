"""Saves and syncs of models with PEFT's adapters: what is saved loads as the model that PEFT itself would merge."""

from __future__ import annotations

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
from safetensors.torch import load_file
from torch import nn
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

import epload
from support import ranks
from support.jobs import Job, Meeting, run

IDS = torch.arange(7)[None]


def base(tied: bool = False) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, vocab_size=32,
        tie_word_embeddings=tied,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def adapted(tied: bool = False, **options: Any) -> Any:
    """A model whose adapter and copies were trained."""
    options = {"target_modules": ["q_proj", "down_proj"], "modules_to_save": ["lm_head"], **options}
    model = get_peft_model(base(tied), LoraConfig(r=3, init_lora_weights=False, **options))
    train(model)
    return model


def train(model: nn.Module) -> None:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                torch.manual_seed(len(name))
                parameter.add_(torch.randn(parameter.shape) * 0.1)


def check_saved(model: Any, folder: Path) -> None:
    """The checkpoint computes what the model computes, and has the names of its base model alone."""
    logits = model(IDS).logits
    epload.save(model, folder)
    reference = LlamaForCausalLM.from_pretrained(folder).eval()
    torch.testing.assert_close(reference(IDS).logits, logits)
    state = load_file(folder / "model.safetensors")
    assert state.keys() <= base().state_dict().keys()


def merged() -> Any:
    model = adapted()
    model.merge_adapter()
    return model


def dora() -> Any:
    model = adapted(use_dora=True)
    model.merge_adapter()
    return model


def untied_head() -> Any:
    """The copy of the head is trained, and the embedding that it was tied to is not."""
    model = adapted(tied=True)
    model.merge_adapter()
    return model


def trained_tokens() -> Any:
    model = adapted(trainable_token_indices=[1, 5], modules_to_save=None)
    model.merge_adapter()
    return model


def ia3() -> Any:
    config = IA3Config(
        target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"], init_ia3_weights=False
    )
    model = get_peft_model(base(), config)
    train(model)
    model.merge_adapter()
    return model


def second_adapter() -> Any:
    model = adapted()
    config = LoraConfig(r=3, target_modules=["v_proj"], modules_to_save=["lm_head"], init_lora_weights=False)
    model.add_adapter("second", config)
    model.set_adapter("second")
    train(model)
    model.merge_adapter()
    return model


def disabled() -> Any:
    """Computes as the base model, with the original head."""
    model = adapted()
    model.base_model.disable_adapter_layers()
    return model


def injected() -> Any:
    """A transformers model without PEFT's outer modules, as transformers' own ``add_adapter`` leaves it."""
    model = inject_adapter_in_model(LoraConfig(r=3, target_modules=["q_proj"], init_lora_weights=False), base())
    train(model)
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
    model = get_peft_model(Qwen3MoeForCausalLM(config).eval(), lora)
    train(model)
    model.merge_adapter()
    return model


def test_experts_with_an_adapter_for_each_parameter(tmp_path: Path) -> None:
    model = experts()
    logits = model(IDS).logits
    epload.save(model, tmp_path / "saved")
    reference = Qwen3MoeForCausalLM.from_pretrained(tmp_path / "saved").eval()
    torch.testing.assert_close(reference(IDS).logits, logits)
    assert not any("base_layer" in name for name in load_file(tmp_path / "saved/model.safetensors"))


def shared_matrices() -> Any:
    """The layers share matrices that belong to the tuner."""
    model = get_peft_model(base(), VeraConfig(r=3, target_modules=["q_proj"], init_weights=True))
    train(model)
    model.merge_adapter()
    return model


def inside() -> Any:
    """The transformers model alone, whose layers PEFT has replaced."""
    return merged().get_base_model()


@pytest.mark.parametrize(
    "make",
    [merged, dora, untied_head, trained_tokens, ia3, second_adapter, disabled, injected, shared_matrices, inside],
)
def test_what_is_saved_computes_the_same(make: Callable[[], Any], tmp_path: Path) -> None:
    check_saved(make(), tmp_path / "saved")


def after_unmerging() -> Any:
    model = merged()
    model.unmerge_adapter()
    return model


def one_layer_unmerged() -> Any:
    model = merged()
    model.base_model.model.model.layers[1].self_attn.q_proj.unmerge()
    return model


def merged_and_disabled() -> Any:
    model = merged()
    model.base_model.disable_adapter_layers()
    return model


def adaption() -> Any:
    model = get_peft_model(base(), AdaptionPromptConfig(adapter_len=3, adapter_layers=1, task_type="CAUSAL_LM"))
    return model


def prompt() -> Any:
    return get_peft_model(base(), PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"))


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (adapted, "call merge_adapter() before"),
        (after_unmerging, "call merge_adapter() before"),
        (one_layer_unmerged, "layers.1.self_attn.q_proj has an active adapter that is not merged (default)"),
        (merged_and_disabled, "merged into its base weights and disabled at once"),
        (prompt, "has a prompt that is trained"),
        (adaption, "has a prompt that is trained"),
    ],
)
def test_what_no_base_model_computes_is_refused(make: Callable[[], Any], text: str, tmp_path: Path) -> None:
    with pytest.raises(epload.ModelMismatch) as raised:
        epload.save(make(), tmp_path / "saved")
    assert text in str(raised.value)
    assert not (tmp_path / "saved").exists()


def save_sharded(rank: int, folder: str) -> None:
    model = merged()
    for layer in model.base_model.model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    epload.save(model, folder)


def test_a_sharded_model(tmp_path: Path) -> None:
    ranks.run(2, save_sharded, str(tmp_path / "saved"))
    expected = merged().merge_and_unload().state_dict()
    state = load_file(tmp_path / "saved/model.safetensors")
    assert state.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(state[name], value)


# ---- syncs ----


def send(rank: int, meeting: Meeting) -> list[str]:
    model = adapted()
    problems = []
    with epload.WeightSender(model, ("127.0.0.1", 0), receivers=1, timeout=60) as sender:
        meeting.say("address", sender.address)
        for version in (1, 2):
            model.merge_adapter()
            sender.send_weights(version)
            model.unmerge_adapter()
            train(model)
        meeting.hear("done")
        try:
            sender.send_weights(3)
            problems.append("sent unmerged weights")
        except epload.ModelMismatch as error:
            if "merge_adapter()" not in str(error):
                problems.append(str(error))
    return problems


def receive(rank: int, meeting: Meeting) -> list[str]:
    model = base()
    problems = []
    reference = adapted()
    with epload.WeightReceiver(model, meeting.hear("address"), strict=True, timeout=60) as receiver:
        for version in (1, 2):
            receiver.receive_weights()
            receiver.commit()
            with torch.no_grad():
                if not torch.allclose(model(IDS).logits, reference(IDS).logits, atol=1e-5):
                    problems.append(f"version {version}")
            train(reference)
    meeting.say("done")
    return problems


def test_syncs_of_merged_adapters_are_strict() -> None:
    assert run([Job(1, send), Job(1, receive)]) == [[[]], [[]]]


def send_after_a_failure(rank: int, meeting: Meeting, folder: str) -> list[str]:
    model = second_adapter()
    model.unmerge_adapter()
    names = Path(folder, "names")
    base().save_pretrained(names)
    problems = []
    with epload.WeightSender(model, ("127.0.0.1", 0), receivers=1, names_from=names, timeout=60) as sender:
        meeting.say("address", sender.address)
        model.set_adapter("default")
        model.merge_adapter()
        sender.send_weights(1)
        model.unmerge_adapter()
        model.set_adapter("second")
        model.merge_adapter()
        names.rename(f"{names}-away")
        try:
            sender.send_weights(2)
            problems.append("version 2 was sent")
        except epload.LoadError:
            Path(f"{names}-away").rename(names)
        sender.send_weights(3)
        meeting.hear("done")
    return problems


def receive_after_a_failure(rank: int, meeting: Meeting) -> list[str]:
    model = base()
    problems = []
    reference = second_adapter()
    reference.unmerge_adapter()
    with epload.WeightReceiver(model, meeting.hear("address"), timeout=60) as receiver:
        for adapter in ("default", "second"):
            receiver.receive_weights()
            receiver.commit()
            reference.set_adapter(adapter)
            with torch.no_grad():
                if not torch.allclose(model(IDS).logits, reference(IDS).logits, atol=1e-5):
                    problems.append(adapter)
    meeting.say("done")
    return problems


def test_a_version_after_one_that_failed_is_of_the_adapter_that_is_active(tmp_path: Path) -> None:
    """The failed one has read the model, and sent nothing."""
    assert run([Job(1, send_after_a_failure, (str(tmp_path),)), Job(1, receive_after_a_failure)]) == [[[]], [[]]]
