"""Versions in SGLang's models, against its own load of each; the scheduler that is called is a stand-in."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from engine import CONFIGS, differences, make_checkpoint, make_model, make_rank
from torch import nn

import epload
from epload.sync.scope import Scope
from support.jobs import Job, Meeting, run
from support.pretrained import fsdp, published
from support.small_syncs import outcome

CPU = torch.device("cpu")


class Scheduler:
    """Has what the updates use of SGLang's scheduler."""

    def __init__(self, models: list[Any]) -> None:
        from sglang.srt.disaggregation.utils import DisaggregationMode
        from sglang.srt.runtime_context import get_parallel

        cache = SimpleNamespace(_assert_weight_cache_inactive=lambda operation: None)
        runners = [SimpleNamespace(model=model, device="cpu", gpu_id=0, weight_updater=cache) for model in models]
        named = [("draft" if i else "target", runner) for i, runner in enumerate(runners)]
        roles = {"target": named[:1], "draft": named[1:], "all": named}
        self.weight_updater = SimpleNamespace(
            _select_runners=roles.__getitem__,
            offload_tags=set(),
            _session=None,
        )
        self.tp_worker = SimpleNamespace(model_runner=runners[0])
        self.tp_group = get_parallel().tp_group
        self.disaggregation_mode = DisaggregationMode.NULL
        self._engine_paused = self.enable_hicache_storage = False
        self.events: list[str] = []
        self.flushes = True

    def pause_generation(self, request: Any) -> None:
        self.events.append(f"pause {request.mode}")
        self._engine_paused = True

    def flush_cache(self) -> bool:
        self.events.append("flush")
        return self.flushes

    def record_weight_version_change(self, new_version: str) -> None:
        self.events.append(f"version {new_version}")

    def continue_generation(self, request: Any) -> None:
        from epload.integrations.sglang import updates

        updates.continue_generation(Scheduler.resume, self, request)

    def resume(self, request: Any) -> None:
        self.events.append("continue")
        self._engine_paused = False

    def taken(self) -> list[str]:
        events, self.events = self.events, []
        return events


def train(rank: int, meeting: Meeting, folder: Path, versions: int, restarts: bool = False) -> None:
    """Shards a transformers model as FSDP2 does, and saves and sends versions of it; each with a sender of its own at one address
    if the trainer is started again."""
    from transformers import AutoModelForCausalLM

    model = fsdp(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16), shard=2)
    sender, address = None, "127.0.0.1:0"
    for version in range(1, versions + 1):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.to_local().add_(1)
        epload.save(model, folder / f"version-{version}")
        if sender is None:
            sender = epload.WeightSender(model, address, receivers=2, timeout=100)
            address = sender.address
            meeting.say(f"address-{version}", address)
        sender.send_weights(version)
        if restarts or version == versions:
            sender.close()
            sender = None


def loaded(config: Any, folder: Path) -> Any:
    from sglang.srt.model_loader.loader import DefaultModelLoader

    model = make_model(config)
    DefaultModelLoader.load_weights_and_postprocess(model, iter(published(folder).items()), CPU)
    return model


def follow(rank: int, meeting: Meeting, folder: Path, drafts: bool, restarts: bool) -> list[Any]:
    """Two versions; returns what differs from SGLang's own load, after each."""
    from epload.integrations.sglang.updates import EngineUpdates

    config = make_rank(folder, 2)
    models = [loaded(config, folder)]
    configs = [config]
    if drafts:
        configs.append(draft_config(config))
        models.append(make_draft(configs[1], models[0], folder))
    scheduler, found = Scheduler(models), []
    updates = EngineUpdates.of(scheduler)
    for version in (1, 2):
        address = meeting.hear(f"address-{version if restarts else 1}", 100)
        updates.receive(address, version, verify=False)
        updates.commit(wait=100)
        expected = [loaded(config, folder / f"version-{version}")]
        if drafts:
            expected.append(make_draft(configs[1], expected[0], folder / f"version-{version}"))
        found.append([name for pair in zip(expected, models, strict=True) for name in differences(*pair)])
        found.append(scheduler.taken())
    return found


def draft_config(config: Any) -> Any:
    """The configuration of a draft that is the target's first layers."""
    from copy import deepcopy

    config = deepcopy(config)
    config.hf_config.num_hidden_layers = 2
    return config


def make_draft(config: Any, target: Any, folder: Path) -> Any:
    """A draft that shares the target's embedding and head."""
    draft: Any = make_model(config)
    draft.model.embed_tokens, draft.lm_head = target.model.embed_tokens, target.lm_head
    names = dict(draft.named_parameters())
    weights = published(folder)
    draft.load_weights(iter((name, tensor) for name, tensor in weights.items() if not beyond(name)))
    assert not any(tensor.isnan().any() for tensor in names.values())
    return draft


def beyond(name: str) -> bool:
    return name.startswith(("model.layers.2", "model.layers.3"))


@pytest.mark.parametrize(
    ("name", "drafts", "restarts"), [("llama", False, True), ("llama", True, False), ("deepseek_v3", False, False)]
)
def test_each_version_is_as_sglang_loads_it(name: str, drafts: bool, restarts: bool, tmp_path: Path) -> None:
    make_checkpoint(tmp_path, CONFIGS[name])
    _, found = run([Job(2, train, (tmp_path, 2, restarts)), Job(2, follow, (tmp_path, drafts, restarts))], limit=200)
    for rank in found:
        for version in (1, 2):
            differs, events = rank[2 * version - 2 : 2 * version]
            assert differs == []
            assert events == ["pause retract", "flush", f"version {version}", "continue"]


def fail(rank: int, meeting: Meeting, folder: Path) -> list[str]:
    """Versions that cannot be committed at once, or break off on one rank; returns what is wrong."""
    from sglang.srt.managers import mm_schedule

    from epload.integrations.sglang import model as models
    from epload.integrations.sglang.updates import EngineUpdates

    config = make_rank(folder, 2)
    model = loaded(config, folder)
    scheduler = Scheduler([model])
    updates, address = EngineUpdates.of(scheduler), meeting.hear("address-1", 100)
    wrong: list[str] = []

    def check(what: str, holds: bool) -> None:
        wrong.extend([f"{what}: {scheduler.events}"] * (not holds))

    updates.receive(address, 1)
    for prepare, undo, part in (
        (lambda: setattr(scheduler, "flushes", rank == 0), lambda: setattr(scheduler, "flushes", True), "rank 1: the engine has"),
        (
            lambda: scheduler.weight_updater.offload_tags.add("weights"), scheduler.weight_updater.offload_tags.clear,
            "resume_memory_occupation",
        ),
        (
            lambda: setattr(scheduler.weight_updater, "_session", "open"),
            lambda: setattr(scheduler.weight_updater, "_session", None), "end_weight_update",
        ),
    ):  # fmt: skip
        prepare()
        check(part, part in outcome(partial(updates.commit, wait=100)) and scheduler.taken()[-1] == "continue")
        undo()
    check("the old weights are kept", differences(loaded(config, folder), model) == [])
    mm_schedule.init_mm_embedding_cache(1 << 20)
    mm_schedule.embedding_cache.set(1, mm_schedule.EmbeddingResult(embedding=torch.ones(2, 2)))
    updates.commit()
    check("embeddings of the old weights", len(mm_schedule.embedding_cache) == 0)
    check("the first", differences(loaded(config, folder / "version-1"), model) == [])

    scheduler.taken()
    finish = models.SglangModel.finish
    models.SglangModel.finish = out_of_memory if rank == 1 else finish  # type: ignore[method-assign]
    updates.receive(address, 2)
    text = outcome(partial(updates.commit, wait=100))
    models.SglangModel.finish = finish  # type: ignore[method-assign]
    check(text, "rank 1: out of memory; the engine may have weights of two versions, and stays paused" in text)
    scheduler.continue_generation(None)
    check("paused", scheduler.taken() == ["pause retract", "flush"] and scheduler._engine_paused)
    text = outcome(partial(updates.receive, address, 3, selector="draft"))
    check(text, "expected a version of target, which may have weights of two versions, got selector='draft'" in text)
    scope = Scope(left_out=("lm_head.weight",))
    with mock.patch.object(updates, "_torn_by", None), mock.patch.object(updates._receiver._target, "scope", scope):
        text = outcome(updates._check_received)
    check(text, "commit one of all weights" in text)
    updates.receive(address, 3)
    updates.commit(wait=100)
    check("repaired", scheduler.taken() == ["pause retract", "flush", "version 3", "continue"])
    check("the third", differences(loaded(config, folder / "version-3"), model) == [])

    scheduler.pause_generation(SimpleNamespace(mode="in_place"))
    updates.receive(address, 4)
    updates.commit(wait=100)
    check("a pause of the caller's stays", scheduler._engine_paused and scheduler.taken()[-1] == "version 4")
    return wrong


def out_of_memory(engine: Any) -> None:
    raise RuntimeError("out of memory")


def test_an_engine_has_a_version_on_all_ranks_or_stays_paused(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, CONFIGS["llama"])
    _, found = run([Job(2, train, (tmp_path, 4)), Job(2, fail, (tmp_path,))], limit=200)
    assert found == [[], []]


def refuse(rank: int, meeting: Meeting, folder: Path) -> list[str]:
    from sglang.srt.disaggregation.utils import DisaggregationMode
    from sglang.srt.kernel_plugins.amd import binding
    from sglang.srt.runtime_context import get_exec, get_parallel

    from epload.integrations.sglang import updates as module

    model = make_model(make_rank(folder, 2))
    scheduler = Scheduler([model])
    receive = module.EngineUpdates.of(scheduler).receive
    texts = [outcome(partial(receive, "127.0.0.1:1", 1, stage="none")), outcome(partial(receive, "127.0.0.1:1", "one"))]
    for size in ("pp_size", "dp_size"):
        sizes = {"pp_size": 1, "dp_size": 1, size: 2}
        module.get_parallel = lambda sizes=sizes: SimpleNamespace(**sizes)
        texts.append(outcome(partial(receive, "127.0.0.1:1", 1)))
    module.get_parallel = get_parallel
    for moved in ({"enable_eplb": True}, {"elastic_ep_backend": "mooncake"}):
        experts = SimpleNamespace(**{"enable_eplb": False, "elastic_ep_backend": None} | moved)
        module.get_exec = lambda experts=experts: SimpleNamespace(moe=experts)
        texts.append(outcome(partial(receive, "127.0.0.1:1", 1)))
    module.get_exec = get_exec
    scheduler.disaggregation_mode = DisaggregationMode.PREFILL
    texts.append(outcome(partial(receive, "127.0.0.1:1", 1)))
    scheduler.disaggregation_mode = DisaggregationMode.NULL
    scheduler.enable_hicache_storage = True
    texts.append(outcome(partial(receive, "127.0.0.1:1", 1)))
    scheduler.enable_hicache_storage = False
    texts.append(outcome(partial(receive, "127.0.0.1:1", 1, selector="draft")))
    layer = model.model.layers[0].self_attn.qkv_proj
    if rank == 1:
        layer.use_intel_amx_backend = True
    texts.append(outcome(partial(receive, "127.0.0.1:1", 1)))
    layer.use_intel_amx_backend = False
    layer.quant_method.w13_swiglu_interleaved = True
    texts.append(outcome(partial(receive, "127.0.0.1:1", 1)))
    layer.quant_method.w13_swiglu_interleaved = False
    backend = binding._backend
    binding._backend = lambda: "amd"
    texts.append(outcome(partial(receive, "127.0.0.1:1", 1)))
    binding._backend = backend
    model._derived_weight_cache_error = "cached splits"
    texts.append(outcome(partial(receive, "127.0.0.1:1", 1)))
    return texts


def test_what_an_engine_cannot_update_is_refused_by_name_on_all_ranks(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, CONFIGS["llama"])
    first, second = run([Job(2, refuse, (tmp_path,))], limit=100)[0]
    assert first == second
    expected = [
        "got stage", "got 'one'", "pp_size=1, got 2", "dp_size=1, got 2", "--enable-eplb", "--elastic-ep-backend",
        "disaggregation", "--hicache-storage-backend", "models that this engine has",
        "rank 1: model.layers.0.self_attn.qkv_proj of LlamaForCausalLM is packed for AMX",
        "is interleaved for its MoE kernel (SGLANG_OPT_FUSE_SWIGLU_INTERLEAVED)", "monokernel", "cached splits",
    ]  # fmt: skip
    assert [part for part, text in zip(expected, first, strict=True) if part not in text] == []


class Absorbed(nn.Module):
    """Computes a tensor from its weight after each load, as Kimi-Linear does."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3), requires_grad=False)

    def load_weights(self, weights: Any) -> None:
        for _, tensor in weights:
            self.weight.data.copy_(tensor)
        self.post_load_weights()

    def post_load_weights(self) -> None:
        self.w_kc = (self.weight * 2).contiguous()


def test_what_is_computed_again_stays_where_it_was_and_what_is_not_is_refused() -> None:
    """CUDA graphs have its address."""
    from epload.integrations.sglang.model import SglangModel, check_updatable

    model = Absorbed()
    engine = SglangModel([model], CPU)
    addresses = set()
    for version in (1.0, 2.0):
        engine.load_weights([("weight", torch.full((3,), version))])
        engine.finish()
        assert model.w_kc.tolist() == [2 * version] * 3
        addresses.add(model.w_kc.data_ptr())
    assert len(addresses) == 1
    check_updatable(model)
    model.w_kc_qrep = torch.zeros(3)
    with pytest.raises(epload.ModelMismatch, match=r"a Absorbed .* computes values from its weights once \(w_kc_qrep\)"):
        check_updatable(model)
