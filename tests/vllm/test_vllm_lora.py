"""A trainer's adapter as vLLM's in-memory LoRA, against the same adapter from the folder that PEFT saves."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
from engine import SMALL

import epload
from support.jobs import Job, Meeting, run
from support.small_syncs import outcome


def adapted(version: int) -> Any:
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(version)
    options: dict[str, Any] = {"lora_alpha": 7, "rank_pattern": {"down_proj": 2}, "init_lora_weights": False}
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], use_rslora=True, **options)
    return get_peft_model(LlamaForCausalLM(LlamaConfig(vocab_size=323, **SMALL)), config)


def send(rank: int, meeting: Meeting) -> list[str]:
    model = adapted(1)
    with epload.WeightSender(model, ("127.0.0.1", 0), receivers=1, only="adapter", timeout=100) as sender:
        meeting.say("address", sender.address)
        model.load_state_dict(adapted(2).state_dict())
        return [outcome(partial(sender.send_weights, 2))]


def serve(rank: int, meeting: Meeting, folder: Path) -> list[str]:
    from msgspec import field
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.peft_helper import PEFTHelper
    from vllm.lora.request import LoRARequest

    class TensorLoRARequest(LoRARequest):
        """A request as frameworks define it whose engines take an adapter without files."""

        peft_config: dict[str, Any] | None = field(default=None)
        lora_tensors: dict[str, Any] | None = field(default=None)

    adapted(2).save_pretrained(folder)
    with epload.WeightReceiver(None, meeting.hear("address"), timeout=100) as receiver:
        receiver.receive_weights()
        request: Any = TensorLoRARequest(
            "policy", 1, "memory", peft_config=receiver.adapter_config, lora_tensors=dict(receiver.tensors())
        )
    options: dict[str, Any] = {"device": "cpu", "dtype": torch.float32}
    helper = PEFTHelper.from_dict(request.peft_config)
    found = LoRAModel.from_lora_tensors(1, request.lora_tensors, helper, **options)
    modules = {"q_proj", "v_proj", "down_proj"}
    saved = PEFTHelper.from_local_dir(str(folder), None)
    expected = LoRAModel.from_local_checkpoint(str(folder), modules, saved, lora_model_id=1, **options)
    if not expected.loras or found.loras.keys() != expected.loras.keys():
        return [f"other modules: {sorted(found.loras)}"]
    return [
        f"{name}.{part}"
        for name, layer in expected.loras.items()
        for part, value in vars(layer).items()
        if not same(value, getattr(found.loras[name], part))
    ]


def same(a: Any, b: Any) -> bool:
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


def test_vllm_reads_the_adapter_that_peft_saves(tmp_path: Path) -> None:
    assert run([Job(1, send), Job(1, serve, (tmp_path,))], limit=240) == [[[""]], [[]]]
