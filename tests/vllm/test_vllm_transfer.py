"""A sharded trainer's weights through vLLM's weight transfer, against vLLM's own reload of the same full tensors."""

from __future__ import annotations

import importlib
import json
import sys
import threading
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from engine import CONFIGS, calls, differences, make_checkpoint, make_draft, make_engine, make_trainer
from torch import nn

import epload
from support import ranks
from support.jobs import Job, Meeting, run
from support.pretrained import published
from support.recordings import copy_regions, manifest_of, same_bits
from support.small_syncs import outcome

VERSIONS = (1, 2)


def train(rank: int, meeting: Meeting, folder: Path, workers: int) -> None:
    model, engine = make_trainer(meeting, folder, workers, draft=is_drafted(folder))
    saved = model.state_dict().keys()
    for _ in VERSIONS:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.to_local().add_(1)
            for name, buffer in model.named_buffers():
                if name in saved:
                    buffer.add_(1)
        engine.send_weights()
        dist.barrier()
    engine.shutdown()


def serve(rank: int, meeting: Meeting, folder: Path, tensor_parallel: int, processing: str) -> list[Any]:
    """A worker, as vLLM's own drives its engine; returns what differs from vLLM's own reload."""
    from vllm.config import set_current_vllm_config
    from vllm.config.weight_transfer import WeightTransferConfig
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod
    from vllm.model_executor.model_loader.reload import record_metadata_for_reloading
    from vllm.model_executor.model_loader.utils import process_weights_after_loading

    from epload.integrations import vllm as adapter
    from epload.integrations.vllm import transfer

    adapter.register()
    adapter.register()
    if processing == "none":
        transfer._is_processed = lambda layer: False
    elif processing == "reversing":
        UnquantizedLinearMethod.process_weights_after_loading = reverse_columns
    elif processing == "padded":
        pad_experts()
    elif processing == "untraced":
        read_values_after_loading()
    start = transfer.VllmModel._start
    started = mock.patch.object(transfer.VllmModel, "_start", autospec=True, side_effect=start).start()
    mock.patch("epload.integrations.engine.model.BATCH_BYTES", 0).start()
    draft_options: dict[str, Any] = {"method": "mtp", "num_speculative_tokens": 1}
    drafted = is_drafted(folder)
    model, config = make_engine(
        folder,
        tensor_parallel,
        weight_transfer_config=WeightTransferConfig(backend="epload"),
        speculative_config=draft_options if drafted else None,
    )
    drafts = [make_draft(model, config)] if drafted else []
    parts = [(model, config.model_config), *drafts]
    record_metadata_for_reloading(model)
    weights = published(folder)
    with set_current_vllm_config(config):
        for part, part_config in parts:
            part.load_weights(iter(weights.items()))
            process_weights_after_loading(part, part_config, torch.device("cpu"))
    tensors = {f"{i}.{name}": tensor for i, (part, _) in enumerate(parts) for name, tensor in part.named_parameters()}
    pointers = {name: tensor.data_ptr() for name, tensor in tensors.items()}
    device = torch.device("cpu")
    engine = WeightTransferEngineFactory.create_engine(config.weight_transfer_config, config, device, model)
    found: list[Any] = []
    for method, arguments in calls(meeting, rank, 1 + 3 * len(VERSIONS)):
        with set_current_vllm_config(config):
            if method == "init_weight_transfer_engine":
                engine.init_transfer_engine(engine.parse_init_info(*arguments))
            elif method == "start_draft_weight_update":  # as vLLM's worker does
                with pytest.raises(ValueError, match="expected start_draft_weight_update: the trainer's versions are for"):
                    engine.start_weight_update()
                engine.set_weight_update_target(*drafts[0])
                engine.start_weight_update()
            else:
                getattr(engine, method)(*arguments)
        if method == "finish_weight_update":
            engine.reset_weight_update_target()
            # Elements of bfloat16 after as many additions as the trainer has made.
            for name in weights:
                weights[name] = weights[name] + 1
            found.append([name for part, part_config in parts for name in differences(part, config, weights, part_config)])
    engine.shutdown()
    if processing == "reversing":
        assert max(len(call.args[1]) for call in started.call_args_list) == 1, "layers that are open at once"
    found.append([name for name, tensor in tensors.items() if tensor.data_ptr() != pointers[name]])
    return found


def is_drafted(folder: Path) -> bool:
    return bool(json.loads((folder / "config.json").read_text()).get("num_nextn_predict_layers"))


def reverse_columns(method: Any, layer: Any) -> None:
    """Stands in for what quantizing or repacking does to a layer, whose weights load_weights cannot fill afterwards."""
    from vllm.model_executor.utils import replace_parameter

    replace_parameter(layer, "weight", layer.weight.data.flip(-1).contiguous())


def pad_experts() -> None:
    """Has vLLM pad the experts of CPUs as it pads those of a GPU, where it makes the padding zero after loading."""
    from vllm.model_executor.layers.fused_moe import unquantized_fused_moe_method as module
    from vllm.model_executor.layers.fused_moe.oracle import unquantized

    module.unquantized_round_up_hidden_size_and_intermediate_size = lambda backend, hidden, inner: (hidden, inner + 32)
    process = module.UnquantizedFusedMoEMethod.process_weights_after_loading

    def process_zeros(method: Any, layer: Any) -> None:
        unquantized._zero_intermediate_padding(method.moe, layer.w13_weight.data, layer.w2_weight.data)
        process(method, layer)

    module.UnquantizedFusedMoEMethod.process_weights_after_loading = process_zeros


def read_values_after_loading() -> None:
    """Makes Llama's load_weights one that cannot be recorded, so that all weights go through it, as Zamba2's and Whisper's do."""
    from vllm.model_executor.models.llama import LlamaForCausalLM

    load_weights = LlamaForCausalLM.load_weights

    def load_and_read(model: Any, weights: Any) -> Any:
        loaded = load_weights(model, weights)
        model.model.norm.weight.data.exp()
        return loaded

    LlamaForCausalLM.load_weights = load_and_read


CASES = [
    ("qwen3_moe", 2, "reversing"), ("qwen3_moe", 2, "none"), ("qwen3_moe", 2, "padded"), ("qwen3_moe", 4, "own"),
    ("llama_tied", 2, "own"), ("llama_tied", 2, "untraced"), ("deepseek_v3", 2, "own"),
    ("mimo", 2, "reversing"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "workers", "processing"), CASES)
def test_an_engine_holds_what_its_own_reload_gives(name: str, workers: int, processing: str, tmp_path: Path) -> None:
    """2 FSDP ranks to 2 tensor- and expert-parallel workers, in one pipeline stage or two."""
    make_checkpoint(tmp_path, CONFIGS[name])
    _, found = run([Job(2, train, (tmp_path, workers)), Job(workers, serve, (tmp_path, 2, processing))], limit=240)
    assert found == [[[]] * (len(VERSIONS) + 1)] * workers


def fail_and_retry(rank: int, folder: Path) -> dict[str, Any]:
    """A worker whose layers cannot be opened, then not be processed, and whose load_weights is recorded again in between. Then
    another receiver takes over, also after a reload by vLLM itself."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod
    from vllm.model_executor.model_loader.reload import record_metadata_for_reloading
    from vllm.model_executor.model_loader.utils import process_weights_after_loading

    from epload.integrations.engine.recording import record
    from epload.integrations.vllm import transfer

    failing = Failing()
    UnquantizedLinearMethod.process_weights_after_loading = failing.at_call(3, reverse_columns)
    transfer.materialize_layer = failing.at_call(3, transfer.materialize_layer)
    model, config = make_engine(folder, 1)
    record_metadata_for_reloading(model)
    weights = published(folder)
    with set_current_vllm_config(config):
        model.load_weights(iter(weights.items()))
        process_weights_after_loading(model, config.model_config, torch.device("cpu"))
    before = {name: (tensor.data_ptr(), tensor.clone()) for name, tensor in model.named_parameters()}
    target = transfer.VllmModel(model, config, torch.device("cpu"))

    def recorded() -> Any:
        with target.recordable():
            return record(target.load_weights, manifest_of(weights), target.tensors())

    def apply(version: int) -> None:
        target.begin(recording.written)
        recording.fill_constants(target.tensors())
        copy_regions(recording, target.tensors(), {name: tensor + version for name, tensor in weights.items()})
        target.finish()

    recording = recorded()
    error = torch.OutOfMemoryError("out of memory")
    text = r"processes 18 layers .* take 786\.4 kB on cpu .* put the KV cache to sleep"
    with mock.patch.object(transfer, "materialize_layer", side_effect=[None, error]), pytest.raises(epload.LoadError, match=text):
        target.begin(recording.written)
    unchanged = [name for name, tensor in model.named_parameters() if same_bits(tensor, before[name][1])]
    for _ in range(2):  # while layers are opened, then while they are processed
        failing.left = 1
        with pytest.raises(RuntimeError, match="out of memory"):
            apply(1)
        assert recorded() == recording
    differs = []
    for version in (2, 3):
        target = transfer.VllmModel(model, config, torch.device("cpu"))
        recording = recorded()
        apply(version)
        differs += differences(model, config, {name: tensor + version for name, tensor in weights.items()})
    biases = {name for name in weights if name.endswith(".bias")}
    for part, unwritten in (
        ({name for name in weights if "q_proj" in name}, r"qkv_proj\.bias.*qkv_proj\.weight"),
        (weights.keys() - biases, r"o_proj\.bias.*qkv_proj\.bias"), (biases, r"o_proj\.weight.*qkv_proj\.weight"),
    ):  # fmt: skip
        with pytest.raises(epload.ModelMismatch, match=rf"leaves 8 tensors: .*{unwritten}.* unwritten.*send these layers as a"):
            target.sync_target(strict=False).record(manifest_of({name: weights[name] for name in sorted(part)}))
    return {
        "changed by recording": sorted(before.keys() - set(unchanged)),
        "differs": differs,
        "moved": [name for name, tensor in model.named_parameters() if tensor.data_ptr() != before[name][0]],
        "failures left": failing.left,
    }


class Failing:
    """Functions that raise, once each."""

    left = 0

    def at_call(self, number: int, function: Any) -> Any:
        calls, failed = 0, False

        def called(*arguments: Any) -> Any:
            nonlocal calls, failed
            calls += self.left
            if self.left and not failed and calls >= number:
                self.left, failed = 0, True
                raise RuntimeError("out of memory")
            return function(*arguments)

        return called


def test_a_version_can_be_applied_after_one_that_could_not(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, CONFIGS["llama_biased"])
    nothing: dict[str, Any] = {"changed by recording": [], "differs": [], "moved": [], "failures left": 0}
    assert ranks.run(1, fail_and_retry, tmp_path) == [nothing]


def balance(rank: int, folder: Path) -> str:
    from vllm.distributed.eplb.eplb_state import EplbLayerState

    from epload.integrations.vllm.transfer import VllmModel

    model, config = make_engine(folder, 1)
    layer: Any = model.get_submodule("model.layers.0.mlp.experts")
    layer.router.eplb_state = EplbLayerState()
    assert layer.eplb_state is not None
    with pytest.raises(epload.ModelMismatch) as caught:
        epload.WeightReceiver(VllmModel(model, config, torch.device("cpu")), "127.0.0.1:1", timeout=5)
    return str(caught.value)


def test_engines_that_move_experts_are_refused(tmp_path: Path) -> None:
    """vLLM refuses them in its own engine that copies by a plan: weights would go into the slots of other experts."""
    make_checkpoint(tmp_path, CONFIGS["qwen3_moe"])
    (text,) = ranks.run(1, balance, tmp_path)
    assert "moves experts of model.layers.0.mlp.experts while it runs (enable_eplb)" in text


@pytest.mark.parametrize(
    ("tag", "asleep", "stage", "ascend"),
    [
        ("weights", True, "host", False), ("weights", True, "none", False), ("kv_cache", True, "none", False),
        ("weights", False, "none", False), ("weights", True, "host", True), ("weights", False, "none", True),
    ],
)  # fmt: skip
def test_an_engine_whose_weights_sleep_is_woken_up_first(tag: str, asleep: bool, stage: str, ascend: bool) -> None:
    """``ascend``: by vllm-ascend's allocator, whose data have no ``is_asleep``."""
    from vllm.device_allocator import AllocationData
    from vllm.device_allocator.cumem import CuMemAllocator

    from epload.integrations.vllm.transfer import EploadInitInfo, EploadWeightTransferEngine

    engine = object.__new__(EploadWeightTransferEngine)
    engine.model = engine._default_model = None
    engine._info, engine._receiver = EploadInitInfo("127.0.0.1:1", stage=stage), mock.Mock()
    backup = torch.zeros(1) if asleep else None
    data: Any = AllocationData((0, 1, 1, 1), tag, is_asleep=asleep)
    data = SimpleNamespace(tag=tag, cpu_backup_tensor=backup) if ascend else data
    allocator = SimpleNamespace(pointer_to_data={1: data})
    camem: Any = SimpleNamespace(CaMemAllocator=SimpleNamespace(instance=allocator if ascend else None))
    with (
        mock.patch.object(CuMemAllocator, "instance", None if ascend else allocator),
        mock.patch.dict(sys.modules, {"vllm_ascend.device_allocator.camem": camem}),
    ):
        found = [outcome(call) for call in (engine.start_weight_update, engine.finish_weight_update)]
    refused = [tag == "weights" and asleep and stage == "none", tag == "weights" and asleep]
    assert ["call wake_up(tags=['weights']) first" in text for text in found] == refused
    assert engine._receiver.commit.called is not refused[1]


def test_experts_of_an_engine_that_sleeps_are_not_recorded() -> None:
    """Their map, which the loaders read, has no memory then."""
    from vllm.device_allocator import AllocationData
    from vllm.device_allocator.cumem import CuMemAllocator

    from epload.integrations.vllm.transfer import VllmModel

    model = nn.ModuleDict({"experts": nn.Linear(2, 2)})
    model.load_weights = lambda weights: None
    target = VllmModel(model, SimpleNamespace(model_config=None), torch.device("cpu"))
    allocator = SimpleNamespace(pointer_to_data={1: AllocationData((0, 1, 1, 1), "weights", is_asleep=True)})
    with mock.patch.object(CuMemAllocator, "instance", allocator):
        with target.recordable():
            pass
        model["experts"].register_buffer("_expert_map", torch.zeros(2), persistent=False)
        with pytest.raises(epload.LoadError, match=r"wake_up"), target.recordable():
            pass


class LocalClient:
    """A trainer's view of an engine that does not answer, or whose answer is an error."""

    def __init__(self, error: Exception | None) -> None:
        self._error = error
        self.over = threading.Event()
        self.awaited = False

    def start_weight_update(self) -> None:
        pass

    def update_weights(self, update_info: Any) -> None:
        if self._error is not None:
            raise self._error
        self.awaited = not self.over.wait(20)


class FailingSender:
    topology = None

    def send_weights(self, version: int) -> None:
        for thread in threading.enumerate():
            if thread.name == "epload-vllm":
                thread.join(1)
        raise epload.LoadError("an engine did not come")


@pytest.mark.parametrize("error", [None, ConnectionError("the engine is gone")])
def test_a_trainer_does_not_wait_for_the_call_of_a_sync_that_failed(error: Exception | None) -> None:
    from epload.integrations.vllm import EploadTrainerWeightTransferEngine

    engine = object.__new__(EploadTrainerWeightTransferEngine)
    engine.client, engine.is_sender, engine._sender = LocalClient(error), True, FailingSender()
    with pytest.raises(epload.LoadError, match="an engine did not come") as caught:
        engine.send_weights()
    assert not engine.client.awaited
    assert caught.value.__cause__ is error
    assert all(thread.daemon for thread in threading.enumerate() if thread.name == "epload-vllm")
    engine.client.over.set()


def test_an_update_in_which_nothing_was_received_can_end() -> None:
    """Another engine may be dead, and vLLM begins no update before the last one has ended."""
    from epload.integrations.vllm import EploadWeightTransferEngine

    engine = object.__new__(EploadWeightTransferEngine)
    for stage, partially_updated, commits in (("host", False, 0), ("host", True, 1), ("none", False, 1)):
        receiver = mock.Mock(staged=None, stage=stage, partially_updated=partially_updated)
        engine._receiver = receiver
        engine.finish_weight_update()
        assert receiver.commit.call_count == commits


@pytest.mark.parametrize("attribute", ["_wp_fp32", "weight_fp32", "w13_weight_list"])
def test_values_that_are_computed_once_are_refused_and_wrappers_of_adapters_are_not_processed(attribute: str) -> None:
    from vllm.lora.layers import BaseLayerWithLoRA
    from vllm.model_executor.layers.fused_moe import UnquantizedFusedMoEMethod

    from epload.integrations.vllm import transfer

    wrapper = BaseLayerWithLoRA()
    wrapper.base_layer = nn.Linear(2, 2)
    wrapper.base_layer.quant_method = UnquantizedFusedMoEMethod.__new__(UnquantizedFusedMoEMethod)
    assert transfer._is_processed(wrapper.base_layer)
    assert not transfer._is_processed(wrapper)
    model = nn.ModuleDict({"attention": nn.Linear(2, 2)})
    model.load_weights = lambda weights: None
    setattr(model["attention"], attribute, None)
    target = transfer.VllmModel(model, SimpleNamespace(model_config=None), torch.device("cpu"))
    with pytest.raises(epload.ModelMismatch, match=rf"attention, a Linear, keeps values .* weights \({attribute}\)"):
        target.sync_target(strict=True)


def test_vllm_finds_the_engines_through_its_plugins() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    module, _, name = project["entry-points"]["vllm.general_plugins"]["epload"].partition(":")
    getattr(importlib.import_module(module), name)()
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory, WeightTransferTrainerFactory

    for factory in (WeightTransferEngineFactory, WeightTransferTrainerFactory):
        assert factory._registry["epload"]().__module__ == "epload.integrations.vllm.transfer"
