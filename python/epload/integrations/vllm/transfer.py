"""vLLM's weight transfer over epload: ``WeightTransferConfig(backend="epload")``. In the trainer::

info = EploadTrainerInitInfo("trainer0:29600", receivers=8, rank=rank)
engine = WeightTransferTrainerFactory.trainer_init(info, client=client, source=ModuleSource(model))
engine.send_weights()
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Thread
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from vllm.config import set_current_vllm_config
from vllm.device_allocator.cumem import CuMemAllocator
from vllm.distributed.weight_transfer.base import (
    TrainerInitInfo,
    TrainerWeightTransferEngine,
    WeightSource,
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.lora.layers import BaseLayerWithLoRA
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.reload.layerwise import (
    _copy_and_restore_kernel_tensors,
    _get_original_loader,
    _place_kernel_tensors,
    get_layerwise_info,
)
from vllm.model_executor.model_loader.reload.meta import materialize_layer, restore_layer_on_meta
from vllm.model_executor.model_loader.reload.utils import get_layer_params_buffers, get_layer_tensors
from vllm.platforms import current_platform

from epload.core.log import logger
from epload.errors import LoadError, ModelMismatch
from epload.integrations.engine.model import EngineModel, EngineTarget
from epload.mapping.mapping import AnyMapping
from epload.observe.render import count, show_bytes
from epload.ranks.single_flight import preparing_call
from epload.sync.endpoint import Deltas, Stages
from epload.sync.receiver import WeightReceiver
from epload.sync.sender import WeightSender

BACKEND = "epload"
_TIMEOUT = 1800.0
_SENDER_OPTIONS = ("mapping", "delta", "timeout", "verify")
_RECEIVER_OPTIONS = ("timeout", "verify", "stage", "strict")
_COMPUTED_ONCE = ("_merged_conv_weight", "_wp_fp32", "fold_router_output_multiplier", "weight_fp32", "w13_weight_list")
"""Attributes of modules that compute something from weights once, and not again for others (GLM-5-Next, Muse Spark); or anew in
other memory, while captured graphs read the old (vllm-ascend's ``ops/linear.py`` and ``ops/fused_moe/routed_experts.py``)."""


@dataclass
class EploadInitInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """The arguments that the trainer sends to the workers: those of :class:`epload.WeightReceiver`."""

    address: str
    timeout: float = _TIMEOUT
    verify: bool = False
    stage: Stages = "host"
    strict: bool = True
    draft: bool = False


@dataclass
class EploadUpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    version: int


class EploadWeightTransferEngine(WeightTransferEngine):  # type: ignore[misc]
    """A worker's side: ``update_weights`` receives a version, ``finish_weight_update`` copies it into the model.

    With ``draft=True`` in the trainer's information, a version is for the model and its draft: vLLM's
    ``start_draft_weight_update``, which says what the draft is, begins it in place of ``start_weight_update``.
    """

    init_info_cls = EploadInitInfo
    update_info_cls = EploadUpdateInfo
    supports_draft_weight_update = True
    _info: EploadInitInfo | None = None
    _receiver: WeightReceiver | None = None

    def init_transfer_engine(self, init_info: EploadInitInfo) -> None:
        self.shutdown()
        self._info = init_info
        if not init_info.draft:
            self._connect(init_info)

    def start_weight_update(self) -> None:
        info = self._info
        if info is None:
            raise ValueError("expected init_weight_transfer_engine to be called before a weight update")
        if info.draft != (self.model is not self._default_model):
            raise ValueError(
                "expected start_draft_weight_update: the trainer's versions are for the model and its draft"
                if info.draft
                else "expected start_weight_update: pass draft=True in the trainer's EploadTrainerInitInfo to update the draft, "
                "together with the model"
            )
        if info.stage == "none":
            _check_awake()
        if self._receiver is None:
            self._connect(info)

    def _connect(self, info: EploadInitInfo) -> None:
        drafts = [(self.model, self.model_config)] if info.draft else []
        target = VllmModel(self._default_model, self.vllm_config, self.device, drafts)
        self._receiver = WeightReceiver(target, info.address, **_options(info, *_RECEIVER_OPTIONS))

    def update_weights(self, update_info: dict[str, Any]) -> None:
        # Unlike the base class, without waiting for the device, on which nothing happens before the commit.
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: EploadUpdateInfo) -> None:
        self._connected().receive_weights(update_info.version)

    def finish_weight_update(self) -> None:
        receiver = self._connected()
        _check_awake()
        if receiver.staged is None and receiver.stage != "none" and not receiver.partially_updated:
            logger.warning("an update of the weights ends in which no version was received: they stay as they are")
            return  # else vLLM could not begin another
        receiver.commit()

    def shutdown(self) -> None:
        if self._receiver is not None:
            self._receiver.close()
            self._receiver = None

    def _connected(self) -> WeightReceiver:
        if self._receiver is None:
            raise ValueError("expected init_weight_transfer_engine to be called before a weight update")
        return self._receiver


@dataclass
class EploadTrainerInitInfo(TrainerInitInfo):  # type: ignore[misc]
    """Arguments are those of :class:`epload.WeightSender`, ``stage`` and ``strict`` of :class:`epload.WeightReceiver`."""

    backend: ClassVar[str] = BACKEND

    address: str
    receivers: int
    """Workers of all engines."""
    mapping: AnyMapping = "auto"
    """A :class:`epload.mapping.Quantize` sends the fp8 weights and scales of an engine whose ``Fp8Config`` has blocks."""
    delta: Deltas = "off"
    timeout: float = _TIMEOUT
    verify: bool = False
    stage: Stages = "host"
    strict: bool = True
    draft: bool = False
    """True if engines have a draft model whose weights the trainer's model has too. The client then needs a
    ``start_draft_weight_update``."""


class EploadTrainerWeightTransferEngine(TrainerWeightTransferEngine):  # type: ignore[misc]
    """A trainer rank's side. Every rank sends its own shards; rank 0 alone talks to the engines."""

    init_info_cls = EploadTrainerInitInfo
    _sender: WeightSender
    _version = 0
    _start = "start_weight_update"
    """Method of the client that begins a version."""

    @classmethod
    def trainer_init(
        cls, init_info: EploadTrainerInitInfo, *, client: Any, source: WeightSource | None = None
    ) -> EploadTrainerWeightTransferEngine:
        model = getattr(source, "_module", None)
        if not isinstance(model, nn.Module):
            raise TypeError(f"expected source to be a vllm ModuleSource of the trainer's model, got {source!r}")
        engine = cls(client=client, source=source, is_sender=init_info.is_sender, rank=init_info.rank)
        if init_info.draft and init_info.is_sender:
            engine._start = "start_draft_weight_update"
            if not callable(getattr(client, engine._start, None)):
                raise TypeError(f"expected a client with {engine._start}() for draft=True, got a {type(client).__name__}")
        engine._sender = WeightSender(
            model, init_info.address, receivers=init_info.receivers, **_options(init_info, *_SENDER_OPTIONS)
        )
        if init_info.is_sender:
            options = _options(init_info, *_RECEIVER_OPTIONS, "draft")
            client.init_weight_transfer_engine({"address": engine._sender.address, **options})
        return engine

    def send_weights(self) -> None:
        self._version += 1
        if not self.is_sender:
            self._sender.send_weights(self._version)
            return
        with preparing_call(self._sender.topology):  # which tells the other ranks if it fails
            getattr(self.client, self._start)()
        received = self._update_engines()
        try:
            self._sender.send_weights(self._version)
        except Exception as error:
            # A call to an engine that is dead may never return, and nothing waits for it.
            if received.done() and (cause := received.exception()) is not None:
                raise error from cause
            raise
        received.result()
        self.client.finish_weight_update()

    def _update_engines(self) -> Future[None]:
        """Makes the engines receive the version, from a thread that does not keep the process alive."""
        received: Future[None] = Future()

        def update() -> None:
            try:
                received.set_result(self.client.update_weights({"version": self._version}))
            except BaseException as error:
                received.set_exception(error)

        Thread(target=update, name="epload-vllm", daemon=True).start()
        return received

    def shutdown(self) -> None:
        self._sender.close()


def _check_awake() -> None:
    """Raises LoadError if vLLM sleeps, so that its weights have no memory. vllm-ascend does not say so of its second level."""
    ascend = sys.modules.get("vllm_ascend.device_allocator.camem")  # imported where it is used
    for allocator in (CuMemAllocator.instance, ascend and ascend.CaMemAllocator.instance):
        for data in allocator.pointer_to_data.values() if allocator is not None else ():
            if data.tag == "weights" and getattr(data, "is_asleep", data.cpu_backup_tensor is not None):
                raise LoadError("the engine sleeps, and its weights have no memory; call wake_up(tags=['weights']) first")


def _options(init_info: Any, *names: str) -> dict[str, Any]:
    return {name: getattr(init_info, name) for name in names}


class VllmModel(EngineModel):
    """A worker's model, and perhaps its draft, which may share layers. Layers that vLLM processes after loading are filled as
    before that, and then processed again, as in its own layer-wise reload."""

    def __init__(self, model: nn.Module, config: Any, device: torch.device, drafts: Sequence[tuple[nn.Module, Any]] = ()) -> None:
        """``drafts``: models, each with vLLM's configuration of it, that have each version together with the model."""
        self._parts: list[tuple[Any, Any]] = [(model, config.model_config), *drafts]
        models = [part for part, _ in self._parts]
        super().__init__(nn.ModuleList(models) if drafts else model, self._load)
        self._config = config
        self.device = device
        self._open: set[nn.Module] = set()
        """Layers that have the tensors that ``load_weights`` fills. vLLM's information about each keeps those that it computes
        with, also after a failure."""
        self._begun: list[nn.Module] = []
        """Layers that :meth:`process` processes."""
        counts = Counter(id(tensor) for layer in self.model.modules() for tensor in _computed_with(layer)[0].values())
        self._tied = {tensor for tensor, number in counts.items() if number > 1}
        """Identities of the parameters that several layers have."""

    def sync_target(self, strict: bool) -> EngineTarget:
        """See :class:`EngineModel`. Raises ModelMismatch, too, for a model that would compute with values of older weights."""
        for name, module in self.model.named_modules():
            if computed := [attribute for attribute in _COMPUTED_ONCE if hasattr(module, attribute)]:
                raise ModelMismatch(
                    f"{name}, a {type(module).__name__}, keeps values that it computes from its weights ({computed[0]}), and "
                    "vLLM may go on with those of the old weights; restart the engine to change them"
                )
        return super().sync_target(strict)

    def tensors(self) -> dict[str, Tensor]:
        """All but what attention layers compute from other weights after loading, such as the matrices of MLA."""
        computed = {
            f"{path}.{name}"
            for path, layer in self.model.named_modules(remove_duplicate=False)
            if is_deferred_attention_layer(layer)
            for name in layer._parameters.keys() - get_layerwise_info(layer).restore_metadata[0].keys()
        }
        return {name: tensor for name, tensor in super().tensors().items() if name not in computed}

    def filled_as_a_whole(self) -> list[list[str]]:
        """Returns those of each layer that is processed: values that a version leaves as they are would be processed twice."""
        groups = []
        for path, layer in self.model.named_modules(remove_duplicate=False):
            if _is_processed(layer):
                # Some methods permute the bias, which stays in the layer, and which vLLM's metadata lack.
                names = get_layerwise_info(layer).restore_metadata[0].keys() | (layer._parameters.keys() & {"bias"})
                groups.append([f"{path}.{name}" for name in names])
        return groups

    def _load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        tensors = list(weights) if len(self._parts) > 1 else weights  # of which each takes what it has
        with self._context():
            for model, _ in self._parts:
                model.load_weights(iter(tensors))

    @contextmanager
    def _context(self) -> Iterator[None]:
        with set_current_vllm_config(self._config), torch.device(self.device):
            yield

    @contextmanager
    def recordable(self) -> Iterator[None]:
        if any(getattr(module, "_expert_map", None) is not None for module in self.model.modules()):
            _check_awake()  # loaders read this map, which sleeps, too
        still_open = frozenset(self._open)
        layers = [layer for layer in self.model.modules() if _is_processed(layer)]
        try:
            for layer in layers:
                self._put_aside(layer)
            yield
        finally:
            self._put_back(self._open - still_open)

    def begin(self, written: Collection[str] | None) -> None:
        paths = None if written is None else dict.fromkeys(name.rpartition(".")[0] for name in written)
        layers = self.model.modules() if paths is None else map(self.model.get_submodule, paths)
        self._start([layer for layer in dict.fromkeys(layers) if _is_processed(layer)])

    def _start(self, layers: list[nn.Module]) -> None:
        """Gives layers the tensors that ``load_weights`` fills. Those that are open after a failure begin again, from any state.

        Raises:
            LoadError: there is no memory for these tensors. The layers have those that they had.
        """
        still_open, begun = frozenset(self._open), set(layers)
        self._begun = layers
        shared: dict[int, Tensor] = {}
        if any(id(tensor) in self._tied for layer in layers for tensor in _computed_with(layer)[0].values()):
            others = (layer for layer in self.model.modules() if layer not in begun)
            shared = {id(tensor): tensor for layer in others for tensor in layer.parameters(recurse=False)}
        for layer in layers:
            self._put_aside(layer)
            info = get_layerwise_info(layer)
            try:
                materialize_layer(layer, info)
            except torch.OutOfMemoryError as error:
                self._put_back(self._open - still_open)
                metadata = [part for layer in layers for part in get_layerwise_info(layer).restore_metadata]
                nbytes = sum(tensor.nbytes for part in metadata for tensor in part.values())
                raise LoadError(
                    f"vLLM processes {count(len(layers), 'layer')} after loading, whose weights take {show_bytes(nbytes)} on "
                    f"{self.device} until then, for which there is no room; put the KV cache to sleep, lower "
                    "gpu_memory_utilization, or replace stage='none' by stage='host', which processes 1 GiB at a time"
                ) from error
            parameters, buffers = info.kernel_tensors
            before = parameters | buffers
            for key, tensor in get_layer_tensors(layer).items():
                old = before.get(key)
                if old is None or (old.shape, old.dtype) != (tensor.shape, tensor.dtype):
                    continue
                # Tied tensors stay tied, or the old values of one would be copied back over the new ones of another.
                if (tied := shared.setdefault(id(old), tensor)) is not tensor:
                    setattr(layer, key, tied)
                else:
                    tensor.data.copy_(old.data)

    def _put_aside(self, layer: nn.Module) -> None:
        """Opens the layer: keeps the tensors that it computes with, and gives it on meta those that ``load_weights`` fills."""
        info = get_layerwise_info(layer)
        if info.kernel_tensors is None:  # else it has been open since a failure, perhaps of another receiver
            info.kernel_tensors = get_layer_params_buffers(layer)
            info.kernel_non_persistent_buffers = set(layer._non_persistent_buffers_set)
        self._open.add(layer)
        restore_layer_on_meta(layer, info)
        for tensor in get_layer_tensors(layer).values():
            if hasattr(tensor, "weight_loader"):  # vLLM's reload leaves its own, which does nothing outside of one
                tensor.weight_loader = _get_original_loader(tensor)

    def _put_back(self, layers: Iterable[nn.Module]) -> None:
        """Gives open layers the tensors that they compute with."""
        for layer in layers:
            _place_kernel_tensors(layer, get_layerwise_info(layer))
            self._close(layer)

    def _close(self, layer: nn.Module) -> None:
        get_layerwise_info(layer).reset()
        self._open.remove(layer)

    @torch.no_grad()
    def process(self) -> None:
        layers: list[Any] = self._begun
        with self._context():
            for layer in layers:
                # As vLLM's reload does: some methods process a layer only once.
                layer.__dict__.pop("_already_called_process_weights_after_loading", None)
                layer.quant_method.process_weights_after_loading(layer)
                if hasattr(layer, "update_param_tp_status"):
                    layer.update_param_tp_status()
                _copy_and_restore_kernel_tensors(layer, get_layerwise_info(layer))
                self._close(layer)

    @torch.no_grad()
    def finish(self) -> None:
        self.process()
        if self._open:  # since a failure, and not part of this version
            self._start([layer for layer in self.model.modules() if layer in self._open])
            self.process()
        with self._context():
            for model, model_config in self._parts:
                for module in model.modules():
                    if is_deferred_attention_layer(module):
                        module.process_weights_after_loading(model_config.dtype)
                if hasattr(model, "process_weights_after_loading"):
                    model.process_weights_after_loading()


def _computed_with(layer: nn.Module) -> Any:
    """Returns the parameters and the buffers that vLLM computes with, also of a layer that is open."""
    return get_layerwise_info(layer).kernel_tensors or get_layer_params_buffers(layer)


def _is_processed(layer: nn.Module) -> bool:
    """Returns True if vLLM may change the layer's tensors after loading."""
    method = getattr(layer, "quant_method", None)
    if not isinstance(method, QuantizeMethodBase) or is_deferred_attention_layer(layer):
        return False
    if isinstance(layer, BaseLayerWithLoRA):  # shows the method of the layer in it
        return False
    if type(method).process_weights_after_loading is QuantizeMethodBase.process_weights_after_loading:
        return False
    plain = type(method) in (UnquantizedLinearMethod, UnquantizedEmbeddingMethod)
    return not (plain and current_platform.is_cuda())
