"""Parts of a model: the active adapter alone, as PEFT itself saves and loads it, and base weights that a function selects."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from peft import IA3Config, LoraConfig, PeftModel, PromptTuningConfig, get_peft_model
from safetensors.torch import load_file
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import DataParallel

import epload
from epload.mapping.wrappers import adapter_file
from epload.sync.scope import APART, MERGED, Scope
from epload.sync.targets import ModelTarget
from support import small_model
from support.checkpoints import assert_same
from support.checks import all_fine, local_of
from support.jobs import Job, Meeting, run
from support.pretrained import small_llama
from support.recordings import manifest_of
from support.small_syncs import outcome, receiving, sending, take
from support.sync_jobs import send_model

IDS = torch.arange(7)[None]


def base(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return small_llama().eval()


CONFIGS: dict[str, Callable[[], Any]] = {
    "lora": lambda: LoraConfig(r=3, target_modules=["q_proj", "down_proj"], init_lora_weights=False),
    "copies": lambda: LoraConfig(r=3, target_modules=["q_proj"], modules_to_save=["lm_head", "norm"]),
    "embedding": lambda: LoraConfig(r=2, target_modules=["embed_tokens", "o_proj"], init_lora_weights=False),
    "tokens": lambda: LoraConfig(r=2, target_modules=["q_proj"], trainable_token_indices=[1, 5]),
    "ia3": lambda: IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]),
}


def change(model: nn.Module, version: int) -> None:
    """Writes every tensor of an adapter, equal in all layouts and different in all versions."""
    for number, parameter in enumerate(model.parameters()):
        if parameter.requires_grad:
            values = torch.arange(parameter.numel()).reshape(parameter.shape) * 0.013 + number + version * 0.3
            local_of(parameter).copy_(small_model.local_of(torch.sin(values), parameter))


def adapted(kind: str, seed: int = 0) -> Any:
    return get_peft_model(base(seed), CONFIGS[kind]())


def trained(kind: str, version: int = 0, sharded: bool = False) -> Any:
    """The sender's model in this version; another adapter, which is not active, has the same shapes."""
    model = adapted(kind)
    if kind in ("lora", "copies"):
        model.add_adapter("other", CONFIGS[kind]())
    with torch.no_grad():
        change(model, version)
    if sharded:
        for layer in (*model.base_model.model.model.layers, model):
            fully_shard(layer)
    return model


def config_of(content: dict[str, Any]) -> dict[str, Any]:
    """A config without what PEFT sets when it saves; it has no order of modules."""
    others = dict.fromkeys(("inference_mode", "base_model_name_or_path", "auto_mapping"))
    return {**content, **others, "target_modules": sorted(content["target_modules"])}


def receive_adapter(rank: int, meeting: Meeting, kind: str, folder: str, stage: str) -> None:
    """Fills a PEFT model, whose other tensors stay, and takes full tensors, which are the file that PEFT writes."""
    # Another name of the adapter than the sender's.
    model = get_peft_model(base(), CONFIGS[kind](), adapter_name="policy") if rank == 0 else None
    if kind == "lora" and model is not None:
        model.add_adapter("idle", CONFIGS[kind]())
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()} if model is not None else {}
    engine = epload.EngineRank(f"engine-{rank}")
    stage = stage if model is not None else "host"
    with receiving(meeting, model, engine=engine, stage=stage, verify=True) as receiver:
        for version in (1, 2):
            path = f"{folder}/{kind}-{version}-{rank}"
            trained(kind, version).save_pretrained(path, selected_adapters=["default"])
            receiver.receive_weights(version)
            if model is None:
                tensors = dict(receiver.tensors())
                assert_same(tensors, load_file(f"{path}/adapter_model.safetensors"))
                assert peft.set_peft_model_state_dict(adapted(kind), tensors).unexpected_keys == []
                saved = json.loads(Path(path, "adapter_config.json").read_text())
                assert config_of(receiver.adapter_config) == config_of(saved)
            else:
                receiver.commit()
                expected = PeftModel.from_pretrained(base(), path, adapter_name="policy").eval()
                assert torch.equal(model(IDS).logits, expected(IDS).logits)
                own = before | expected.state_dict()
                assert_same(model.state_dict(), {name: own[name] for name in model.state_dict()})


@pytest.mark.parametrize("kind", CONFIGS)
def test_an_adapter_alone_is_what_peft_saves_and_loads(kind: str, tmp_path: Path) -> None:
    stage = {"copies": "none", "embedding": "device"}.get(kind, "host")
    options = {"snapshot": "host", "delta": "always"} if kind == "lora" else {}
    sender = partial(send_model, change=change, versions=2, receivers=2, only="adapter", verify=True, **options)
    jobs = [Job(2, sender, (partial(trained, kind, sharded=True),))]
    jobs.append(Job(2, receive_adapter, (kind, str(tmp_path), stage)))
    assert run(jobs)[0] == [["", ""]] * 2


def refused(model: nn.Module, **options: Any) -> str:
    with epload.WeightSender(model, ("127.0.0.1", 0), receivers=1, timeout=5, **options) as sender:
        return outcome(partial(sender.send_weights, 1))


def merged(kind: str = "copies") -> Any:
    model = adapted(kind)
    model.merge_adapter()
    return model


def several() -> Any:
    model = adapted("lora")
    model.add_adapter("second", CONFIGS["lora"]())
    model.base_model.set_adapter(["default", "second"])
    return model


REFUSED: dict[str, tuple[Callable[[], Any], Any, str]] = {
    "merged": (merged, "adapter", r"layers\.0\.self_attn\.q_proj have an adapter merged into them \(default\).*unmerge_adapter"),
    "no adapter": (base, "adapter", "expected a PeftModel to send an adapter of, got a LlamaForCausalLM"),
    "injected": (lambda: peft.inject_adapter_in_model(CONFIGS["lora"](), base()), "adapter", "expected a PeftModel"),
    "several": (several, "adapter", r"expected one active adapter, got 2 \(default, second\)"),
    "prompt": (
        lambda: get_peft_model(base(), PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM")),
        "adapter",
        "adapter default is a prompt that is trained",
    ),
    "nothing selected": (base, lambda name: "lora_" in name, r"only= selects none of the tensors that are sent: 21 tensors"),
    "an adapter next to selected base weights": (
        lambda: adapted("lora"), lambda name: "mlp" in name, "has an active adapter that is not merged",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_sent_alone_is_refused_by_name(case: str) -> None:
    make, only, text = REFUSED[case]
    assert re.search(text, refused(make(), only=only))


def test_a_selection_of_another_kind_is_refused() -> None:
    with pytest.raises(TypeError, match="expected only to be a function of a name, 'adapter' or None, got 'lora'"):
        refused(base(), only="lora")
    with pytest.raises(ValueError, match="no mapping= and no names_from= with only='adapter'"):
        refused(adapted("lora"), only="adapter", mapping=epload.mapping.Mapping())
    with pytest.raises(TypeError, match="expected a model, an EngineModel, a list of these, or None"):
        epload.WeightReceiver([base(), "draft"], "127.0.0.1:1")


def train_both(model: nn.Module, step: int) -> None:
    """Changes the adapter, and the base weights, too."""
    with torch.no_grad():
        change(model, step)
        for parameter in model.parameters():
            if not parameter.requires_grad:
                parameter.add_(0.5)


def send_both(rank: int, meeting: Meeting) -> list[str]:
    """The base, the adapter and the base anew, and then what would mix with these."""
    model = adapted("copies")
    outcomes = []
    adapter_options: dict[str, Any] = {"only": "adapter", "where": "address of the adapter"}
    with sending(meeting, model) as sender, sending(meeting, model, **adapter_options) as adapter_sender:
        for step in range(3):
            train_both(model, step)
            if step == 1:
                adapter_sender.send_weights(40)
            else:
                with model.disable_adapter():
                    sender.send_weights(step)
        model.merge_adapter()
        outcomes += [outcome(partial(sending.send_weights, 50)) for sending in (sender, adapter_sender)]
        meeting.say("refused")  # of which a receiver that waits already would hear
        adapter_sender.close()
        outcomes += [outcome(partial(sender.send_weights, version)) for version in (51, 52)]
        model.unmerge_adapter()
    with sending(meeting, model, **adapter_options) as adapter_sender:
        outcomes.append(outcome(partial(adapter_sender.send_weights, 41)))
    return outcomes


def receive_both(rank: int, meeting: Meeting) -> list[str]:
    """Into one PEFT model, which then computes what the sender's does. Returns what is refused."""
    model, reference = adapted("copies", 3), adapted("copies")
    copies = list(model.base_model.model.lm_head.modules_to_save.parameters())
    at_adapter = partial(receiving, meeting, model, where="address of the adapter")
    with receiving(meeting, model) as base_receiver, at_adapter() as adapter_receiver, torch.no_grad():
        for step in range(3):
            receiver = adapter_receiver if step == 1 else base_receiver
            receiver.receive_weights()
            if step == 1:
                model.merge_adapter()  # meanwhile
                assert "merged weights do not mix" in outcome(receiver.commit)
                assert (receiver.version, receiver.partially_updated) == (None, False)
                model.unmerge_adapter()
            receiver.commit()
            train_both(reference, step)
            if step == 1:
                weights = [tensor.clone() for tensor in copies]
            if step:
                change(reference, 1)
                assert torch.equal(model(IDS).logits, reference(IDS).logits) == (step == 2), step
        assert all(map(torch.equal, weights, copies)), "the base has overwritten the adapter's copy"
        assert (base_receiver.version, adapter_receiver.version) == (2, 40)
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        meeting.hear("refused")
        text = outcome(base_receiver.receive_weights)
        assert_same(model.state_dict(), before)
        model.base_model.disable_adapter_layers()
        take(base_receiver)
        change(reference, 2)
        reference.merge_adapter()
        assert torch.equal(model(IDS).logits, reference(IDS).logits)
        return [text]


def test_merged_weights_and_adapters_apart_never_mix() -> None:
    ((sent,), ((refused_there,),)) = run([Job(1, send_both), Job(1, receive_both)])
    together, merged_alone, refused_here, taken, twice = sent
    assert re.search("adapter of .* is merged into the base weights, and another sender sends the adapter", together)
    assert "have an adapter merged into them (default)" in merged_alone
    for text in (refused_here, refused_there):
        assert re.search("base weights have an adapter merged into them, and .*q_proj of the receiver's model", text)
    assert taken == ""
    assert "an engine that has these would apply the adapter twice" in twice


def test_an_adapter_does_not_follow_merged_weights_in_a_receiver() -> None:
    model = adapted("lora")
    config, names = adapter_file(model, model.state_dict())
    manifest = manifest_of({key: model.state_dict()[name] for key, name in names.items()})
    for adapters, text in ((MERGED, "would apply the adapter twice"), (APART, "")):
        target = ModelTarget(model, "auto", strict=True)
        target.scope = Scope(adapters=adapters)
        target.finish()  # as a version of base weights that was committed does
        target.scope = Scope(config)
        assert text in (raised := outcome(partial(target.holdings, manifest)))
        assert bool(raised) == bool(text)


@pytest.mark.parametrize("wrap", [DataParallel, torch.compile])
def test_wrappers_do_not_change_the_names_of_an_adapter(wrap: Callable[[Any], Any]) -> None:
    model = adapted("copies")
    wrapped = wrap(model)
    config, names = adapter_file(wrapped, wrapped.state_dict())
    expected = peft.get_peft_model_state_dict(model)
    assert names.keys() == expected.keys()
    assert all(wrapped.state_dict()[name].data_ptr() == expected[key].data_ptr() for key, name in names.items())
    assert config["r"] == 3


def lora(*modules: str, **options: Any) -> Any:
    return get_peft_model(base(), LoraConfig(r=3, target_modules=list(modules), **options))


def with_value_head() -> Any:
    model: Any = base()
    model.value_head = nn.Linear(24, 1)
    return model


def is_attention(name: str) -> bool:
    return "self_attn" in name or name == "lm_head.weight"


UNFIT: dict[str, dict[str, tuple[Callable[[], Any], bool, str]]] = {
    "adapter": {
        "no adapter": (base, False, "for which the receiver's model has no place; pass a PeftModel with that adapter"),
        "another scale": (partial(lora, "q_proj", "down_proj", lora_alpha=64), False, "has lora_alpha=8 and the receiver's 64"),
        "merged": (partial(merged, "lora"), False, "have an adapter merged into them (default)"),
        "other modules": (partial(lora, "q_proj", "v_proj"), True, "only the receiver has 4 tensors: base_model.model"),
        "an engine": (lambda: epload.EngineModel(base(), list), False, "load_weights takes base weights"),
    },
    "attention": {
        "a tensor that nobody sends": (with_value_head, True, "only the receiver has 2 tensors: value_head.weight"),
        "no place for what is sent": (lambda: base().model, True, "only the sender has 1 tensor: lm_head.weight"),
    },
}  # fmt: skip


def receive_unfit(rank: int, meeting: Meeting, sent: str) -> list[str]:
    problems = []
    for case, (make, strict, text) in UNFIT[sent].items():
        with receiving(meeting, make(), strict=strict, timeout=30) as receiver:
            if text not in (raised := outcome(receiver.receive_weights)):
                problems.append(f"{case}: {raised}")
    return problems


@pytest.mark.parametrize("sent", UNFIT)
def test_receivers_that_a_part_does_not_fit_are_refused(sent: str) -> None:
    only, make = (is_attention, base) if sent == "attention" else (sent, partial(adapted, "lora"))
    sender = partial(send_model, versions=len(UNFIT[sent]), only=only)
    (outcomes,), received = run([Job(1, sender, (make,)), Job(1, receive_unfit, (sent,))])
    assert all(outcomes)
    all_fine(received)


def send_selected(rank: int, meeting: Meeting) -> list[str]:
    model = base(1)
    for layer in model.model.layers:
        fully_shard(layer)
    return send_model(rank, meeting, partial(fully_shard, model), receivers=2, only=is_attention, snapshot="host")


def receive_selected(rank: int, meeting: Meeting) -> None:
    """Takes full tensors on the first rank."""
    model, before, sent = base(2), base(2).state_dict(), base(1).state_dict()
    engine = epload.EngineRank(f"engine-{rank}")
    with receiving(meeting, model if rank else None, engine=engine, timeout=30) as receiver:
        receiver.receive_weights()
        if rank == 0:
            assert_same(dict(receiver.tensors()), {name: sent[name] for name in sent if is_attention(name)})
            return
        receiver.commit()
    assert_same(model.state_dict(), {name: (sent if is_attention(name) else before)[name] for name in sent})


def test_selected_base_weights_arrive_and_no_others() -> None:
    assert run([Job(2, send_selected), Job(2, receive_selected)])[0] == [[""]] * 2


def receive_into_the_first(rank: int, meeting: Meeting, folder: str) -> list[str]:
    """Another adapter is active for a while, and when another engine joins."""
    model = get_peft_model(base(), CONFIGS["lora"](), adapter_name="policy")
    model.add_adapter("reference", CONFIGS["lora"]())
    before = {name: tensor.clone() for name, tensor in model.state_dict().items() if ".reference." in name}
    outcomes = []
    with receiving(meeting, model, engine=epload.EngineRank("own")) as receiver:
        take(receiver)
        receiver.receive_weights()
        model.set_adapter("reference")
        outcomes.append(outcome(receiver.commit))
        model.set_adapter("policy")
        receiver.commit()
        trained("lora", 2).save_pretrained(folder, selected_adapters=["default"])
        expected = PeftModel.from_pretrained(base(), folder, adapter_name="policy").eval()
        assert torch.equal(model(IDS).logits, expected(IDS).logits)
        model.set_adapter("reference")
        meeting.say("joins")
        outcomes.append(outcome(receiver.receive_weights))
    assert before
    assert_same({name: model.state_dict()[name] for name in before}, before)
    return outcomes


def receive_later(rank: int, meeting: Meeting) -> list[str]:
    meeting.hear("joins")
    with receiving(meeting, None, engine=epload.EngineRank("other")) as receiver:
        assert receiver.receive_weights().from_engines  # the next version waits for an engine that has one
        meeting.say("joined")
        return [outcome(partial(receiver.receive_weights, 3))]


def send_before_and_after_a_join(rank: int, meeting: Meeting) -> list[str]:
    model = trained("lora")
    with torch.no_grad(), sending(meeting, model, only="adapter", timeout=20) as sender:
        for version in (1, 2):
            change(model, version)
            sender.send_weights(version)
        meeting.hear("joined")
        return [outcome(partial(sender.send_weights, 3))]


def test_versions_fill_the_adapter_that_was_active_when_the_receiver_joined(tmp_path: Path) -> None:
    jobs = [Job(1, send_before_and_after_a_join), Job(1, receive_into_the_first, (str(tmp_path),)), Job(1, receive_later)]
    (sent,), ((committed, received),), (late,) = run(jobs)
    text = "versions fill the adapter 'policy', which was active when the receiver joined, and 'reference' is active now"
    for failure in (committed, received, *sent, *late):
        assert text in failure
