"""A trainer's adapter as vLLM's in-memory LoRA, against the same adapter from the folder that PEFT saves."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
from engine import CONFIGS, SMALL, make_checkpoint, make_engine

from support.jobs import Job, Meeting, run
from support.pretrained import published
from support.small_syncs import receiving
from support.sync_jobs import send_model

VERSIONS = (1, 2)


def adapted(version: int) -> Any:
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(version)
    options: dict[str, Any] = {"lora_alpha": 7, "rank_pattern": {"down_proj": 2}, "init_lora_weights": False}
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], use_rslora=True, **options)
    return get_peft_model(LlamaForCausalLM(LlamaConfig(vocab_size=323, **SMALL)), config)


def change(model: Any, version: int) -> None:
    model.load_state_dict(adapted(version).state_dict())


def serve(rank: int, meeting: Meeting, folder: Path) -> list[str]:
    """A worker of an engine, which has each version under the same number, in place of the one before."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.utils import process_weights_after_loading

    model, config = make_engine(folder, 1, enable_lora=True, max_lora_rank=8, max_loras=1)
    with set_current_vllm_config(config):
        model.load_weights(iter(published(folder).items()))
        process_weights_after_loading(model, config.model_config, torch.device("cpu"))
        manager = make_manager(config)
        model = manager.create_lora_manager(model, config)
        problems = []
        with receiving(meeting, None, timeout=100) as receiver:
            for version in VERSIONS:
                receiver.receive_weights()
                memory, tensors = receiver.adapter_config, dict(receiver.tensors())
                manager.add_adapter(request("memory", peft_config=memory, lora_tensors=tensors, load_inplace=True))
                received, saved = stacked(model), adapted(version)
                problems += [f"version {version}: {text}" for text in other_output(model, manager, saved)]
                saved.save_pretrained(folder / f"adapter-{version}")
                manager.add_adapter(request(str(folder / f"adapter-{version}"), load_inplace=True))
                expected = stacked(model)
                if not any(tensor.any() for tensor in expected.values()) or expected.keys() != received.keys():
                    problems.append(f"version {version}: vLLM reads nothing")
                differing = [name for name, tensor in expected.items() if not torch.equal(tensor, received[name])]
                problems += [f"version {version}: {name}" for name in differing]
        return problems


def other_output(model: Any, manager: Any, saved: Any) -> list[str]:
    """Compares what the adapter adds in a layer of the engine with what it adds in PEFT's own."""
    from vllm.lora.layers import LoRAMapping

    rows = torch.randn(5, SMALL["hidden_size"])
    attention, fused = saved.base_model.model.model.layers[1].self_attn, model.model.layers[1].self_attn.qkv_proj
    with torch.no_grad():
        manager.set_active_adapters(set(), LoRAMapping((0,) * 5, (0,), is_prefill=True))
        without, _ = fused(rows)
        manager.set_active_adapters({request("memory")}, LoRAMapping((1,) * 5, (1,), is_prefill=True))
        added = fused(rows)[0] - without
        query, value = (layer(rows) - layer.base_layer(rows) for layer in (attention.q_proj, attention.v_proj))
        expected = torch.cat([query, torch.zeros_like(value), value], 1)
    return [] if torch.allclose(added, expected, atol=1e-4) else [f"adds {added[0]}, expected {expected[0]}"]


def request(path: str, **fields: Any) -> Any:
    """A request as frameworks define it whose engines take an adapter without files, with the same number each time."""
    from msgspec import field
    from vllm.lora.request import LoRARequest

    class TensorLoRARequest(LoRARequest):
        peft_config: dict[str, Any] | None = field(default=None)
        lora_tensors: dict[str, Any] | None = field(default=None)

    return TensorLoRARequest("policy", 1, path, **fields)


def make_manager(config: Any) -> Any:
    """The manager of the adapters of a running worker, which reads such requests as these frameworks have it do."""
    from vllm.lora.peft_helper import PEFTHelper
    from vllm.lora.worker_manager import LRUCacheWorkerLoRAManager

    class Manager(LRUCacheWorkerLoRAManager):
        def _load_adapter(self, lora_request: Any) -> Any:
            if lora_request.lora_tensors is None:
                return super()._load_adapter(lora_request)
            helper = PEFTHelper.from_dict(lora_request.peft_config)
            helper.validate_legal(self.lora_config)
            return self._lora_model_cls.from_lora_tensors(
                lora_request.lora_int_id,
                lora_request.lora_tensors,
                helper,
                device="cpu",
                dtype=self.lora_config.lora_dtype,
            )

    return Manager(config, torch.device("cpu"), {})


def stacked(model: Any) -> dict[str, torch.Tensor]:
    """The adapter in the layers of the engine's model, as these compute with it."""
    return {
        f"{name}.{kind}.{i}": tensor.clone()
        for name, module in model.named_modules()
        for kind in ("lora_a_stacked", "lora_b_stacked")
        for i, tensor in enumerate(getattr(module, kind, ()))
    }


def test_an_engine_takes_the_adapter_that_peft_saves(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, CONFIGS["llama"])
    sends = partial(send_model, change=change, versions=len(VERSIONS), only="adapter", timeout=100)
    jobs = [Job(1, sends, (partial(adapted, 0),)), Job(1, serve, (tmp_path,))]
    assert run(jobs, limit=240) == [[["", ""]], [[]]]
