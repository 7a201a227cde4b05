"""Versions of a trainer's weights in a running SGLang engine: what its schedulers do when they are called.

``epload_receive`` starts a thread that receives a version while the engine generates; ``epload_commit`` copies it into the model
between two batches. All ranks of an engine run each call at the same point, and agree on its outcome.
"""

from __future__ import annotations

import contextvars
import json
from collections.abc import Callable
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.managers import mm_schedule
from sglang.srt.managers.io_struct import (
    ContinueGenerationReqInput,
    PauseGenerationReqInput,
    UpdateWeightsFromTensorReqInput,
    UpdateWeightsFromTensorReqOutput,
)
from sglang.srt.model_executor.model_runner_components.weight_updater import _unsupported_derived_weight_cache_error
from sglang.srt.runtime_context import get_exec, get_parallel

from epload.core.log import logger
from epload.errors import LoadError, message_of
from epload.integrations.sglang.model import SglangModel, check_updatable
from epload.sync.receiver import WeightReceiver

LOAD_FORMAT = "epload"
_ATTRIBUTE = "_epload_updates"
_WEIGHTS = "weights"
"""SGLang's name of the memory that ``release_memory_occupation`` gives back."""


class EngineUpdates:
    """Receives versions into the models of one scheduler, and commits them."""

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        self._arguments: dict[str, Any] = {}
        """Arguments of the receiver."""
        self._receiver: WeightReceiver | None = None
        self._thread: Thread | None = None
        """Receives a version, or has received one that is not committed."""
        self._failure: BaseException | None = None
        """The reason why it could not receive the version."""
        self.version: int | None = None
        """Version that was asked for last."""
        self._models: frozenset[str] = frozenset()
        """Names of the models that have the version, in SGLang's terms."""
        self._torn: frozenset[str] = frozenset()
        """Names of the models of which some rank may have weights of two versions. Equal on all ranks."""
        self._torn_by: WeightReceiver | None = None
        """Receiver of the version that could not be copied into them."""
        self.resumes = True
        """True if generation goes on after the commit, False if it was paused before."""

    @property
    def partially_updated(self) -> bool:
        """True if some rank may have weights of two versions. Equal on all ranks."""
        return bool(self._torn)

    @classmethod
    def of(cls, scheduler: Any) -> EngineUpdates:
        """Returns the updates of a scheduler, which has one object for them."""
        updates: EngineUpdates = scheduler.__dict__.setdefault(_ATTRIBUTE, cls(scheduler))
        return updates

    def receive(self, address: str, version: int, selector: str = "all", **options: Any) -> None:
        """Starts to receive a version into host memory, and returns. Collective over the engine's ranks.

        Args:
            address: as for :class:`epload.WeightReceiver`, as ``options`` are: ``timeout``, ``verify`` and ``strict``.
            version: the only one that is right.
            selector: ``"target"``, ``"draft"`` or ``"all"``, as in SGLang: the models that have the version, together.

        Raises:
            LoadError: a rank cannot receive it. Nothing was started on any.
        """
        runners: list[Any] = []

        def check() -> None:
            self._check(version, options)
            selected = self._scheduler.weight_updater._select_runners(selector)
            self._models = frozenset(name for name, _ in selected)
            if not self._torn <= self._models:
                raise ValueError(
                    f"expected a version of {', '.join(sorted(self._torn))}, which may have weights of two versions, got "
                    f"selector={selector!r}"
                )
            runners.extend(runner for _, runner in selected)
            _check_runners(runners)

        def receive() -> None:
            try:
                device = torch.device(runners[0].device)
                if device.type != "cpu":
                    torch.get_device_module(device.type).set_device(runners[0].gpu_id)
                arguments = {"address": address, "selector": selector, **options}
                receiver = self._connect(arguments, [runner.model for runner in runners], device)
                logger.info("%s", receiver.receive_weights(version))
            except BaseException as error:
                logger.warning("version %d was not received: %s", version, message_of(error))
                self._failure = error

        self._agree("receive", check)
        self._failure, self.version = None, version
        # SGLang's settings, which load_weights reads, are those of the context.
        thread = Thread(target=contextvars.copy_context().run, args=(receive,), name="epload-sglang", daemon=True)
        thread.start()
        self._thread = thread

    def _check(self, version: int, options: dict[str, Any]) -> None:
        """Raises ValueError if no version can be received."""
        scheduler = self._scheduler
        if unknown := options.keys() - {"timeout", "verify", "strict"}:
            raise ValueError(f"expected timeout, verify and strict as options, got {', '.join(sorted(unknown))}")
        if self._thread is not None:
            raise ValueError("a version was received, or is on its way: expected epload_commit to be called before")
        if isinstance(version, bool) or not isinstance(version, int):
            raise ValueError(f"expected the number of a version, got {version!r}")
        for name, what in (("pp_size", "pipeline stages"), ("dp_size", "data-parallel replicas")):
            if (size := getattr(get_parallel(), name)) != 1:
                raise ValueError(
                    f"expected {name}=1, got {size}: SGLang's {what} handle calls at different times, so that they cannot change "
                    "weights at the same point"
                )
        moe = get_exec().moe
        if moe.enable_eplb or moe.elastic_ep_backend is not None:
            raise ValueError(
                "expected an engine without --enable-eplb and --elastic-ep-backend, which move experts while it runs, so that "
                "weights would go to the places of others"
            )
        if scheduler.disaggregation_mode != DisaggregationMode.NULL:
            raise ValueError("expected an engine without prefill-decode disaggregation, whose requests cannot be retracted")
        if scheduler.enable_hicache_storage:
            raise ValueError("expected an engine without --hicache-storage-backend, which keeps what the old weights computed")

    def _connect(self, arguments: dict[str, Any], models: list[Any], device: torch.device) -> WeightReceiver:
        """Returns the receiver, a new one if arguments are others, or the trainer has been started again."""
        if self._receiver is not None and (self._arguments != arguments or self._receiver.sender_has_ended()):
            self._receiver.close()
            self._receiver = None
        if self._receiver is None:
            options = {name: value for name, value in arguments.items() if name not in ("address", "selector")}
            self._receiver = WeightReceiver(SglangModel(models, device), arguments["address"], stage="host", **options)
            self._arguments = arguments
        return self._receiver

    def commit(self, wait: float = 60.0) -> None:
        """Copies the version that was received into the models, between two batches. Collective over the engine's ranks.

        Running requests return to the queue, and the caches of what the old weights computed are cleared. Requests go on with the
        new weights, unless generation was paused before.

        Args:
            wait: seconds to wait for a version that is still on its way, while nothing is generated.

        Raises:
            LoadError: the version has not arrived, or could not be received, or the engine cannot be paused: all ranks keep their
                weights, and generation goes on. If a rank fails to copy it, the engine stays paused until another version is
                committed.
        """
        self._agree("commit", lambda: self._check_arrival(wait))
        try:
            self._agree("commit", self._check_received)
        except BaseException:
            self._thread, receiver, self._receiver = None, self._receiver, None
            if receiver is not None:
                receiver.close()
            raise
        assert self._receiver is not None
        receiver, version = self._receiver, self._receiver.staged
        scheduler = self._scheduler
        if not self.partially_updated:
            self.resumes = not scheduler._engine_paused
        scheduler.pause_generation(PauseGenerationReqInput(mode="retract"))
        try:
            self._agree("commit", self._check_idle)
        except LoadError:
            self._resume()
            raise
        self._thread, self._torn, self._torn_by = None, self._models, receiver
        self._agree("commit", lambda: self._copy(receiver))
        self._torn, self._torn_by = frozenset(), None
        scheduler.record_weight_version_change(new_version=str(version))
        self._resume()

    def _check_arrival(self, wait: float) -> None:
        if self._thread is None:
            raise ValueError("expected epload_receive to be called before epload_commit")
        self._thread.join(wait)
        if self._thread.is_alive():
            raise LoadError(f"the version has not arrived within {wait:g} s; commit once the trainer's send_weights has returned")

    def _check_received(self) -> None:
        if self._failure is not None:
            raise self._failure
        assert self._receiver is not None
        if self._torn and self._receiver is not self._torn_by and self._receiver._target.scope.left_out:
            raise LoadError("the version is a part of the weights, and others may be of two versions; commit one of all weights")

    def _check_idle(self) -> None:
        if _WEIGHTS in self._scheduler.weight_updater.offload_tags:
            raise LoadError("the engine's weights have no memory; call resume_memory_occupation(tags=['weights']) first")
        if self._scheduler.weight_updater._session is not None:
            raise LoadError("a weight-update session is open; call end_weight_update first")
        if not self._scheduler.flush_cache():
            raise LoadError("the engine has requests that cannot be retracted, so that its cache cannot be cleared; commit later")
        if mm_schedule.embedding_cache is not None:  # what the old weights made of images, which flush_cache() keeps
            mm_schedule.embedding_cache.clear()

    def _copy(self, receiver: WeightReceiver) -> None:
        """Copies the version into the models. Raises LoadError if these are now partially updated."""
        try:
            receiver.commit()
            device = torch.device(self._scheduler.tp_worker.model_runner.device)
            if device.type != "cpu":
                torch.get_device_module(device.type).synchronize()
        except BaseException as error:
            raise LoadError(
                f"{error}; the engine may have weights of two versions, and stays paused until a version is committed"
            ) from error

    def _resume(self) -> None:
        if self.resumes and not self.partially_updated:
            self._scheduler.continue_generation(ContinueGenerationReqInput(torch_empty_cache=False))

    def _agree(self, call: str, step: Callable[[], None]) -> None:
        """Takes a step that may fail. Raises LoadError on all ranks if it fails on any."""
        failure: BaseException | None = None
        try:
            step()
        except BaseException as error:
            failure = error
        group = self._scheduler.tp_group.cpu_group
        texts: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(texts, None if failure is None else f"{failure}", group=group)
        for rank, text in enumerate(texts):
            if text is not None:
                raise LoadError(f"epload_{call} failed on rank {rank}: {text}") from failure


def _check_runners(runners: list[Any]) -> None:
    """Raises ValueError or ModelMismatch if a running engine cannot take other weights."""
    if not runners:
        raise ValueError("expected a selector of models that this engine has")
    for runner in runners:
        runner.weight_updater._assert_weight_cache_inactive("epload_receive")
        if error := _unsupported_derived_weight_cache_error(runner.model):
            raise ValueError(error)
        check_updatable(runner.model)
        if getattr(runner, "draft_model_idx", None) is not None:
            raise ValueError(
                f"{type(runner.model).__name__} is one of several layers that predict tokens, each of which would get weights "
                'of the last one; pass selector="target"'
            )


def continue_generation(original: Callable[..., Any], scheduler: Any, request: ContinueGenerationReqInput) -> None:
    """Runs in place of ``Scheduler.continue_generation``: an engine that is partially updated stays paused."""
    updates = EngineUpdates.of(scheduler)
    if updates.partially_updated:
        updates.resumes = True
        logger.error("the engine may have weights of two versions, and stays paused until a version is committed")
    else:
        original(scheduler, request)


def collective_rpc(original: Callable[..., None], engine: Any, method: str, **arguments: Any) -> None:
    """Runs in place of ``Engine.collective_rpc``: later replies name the version that was committed."""
    original(engine, method, **arguments)
    if method == "epload_receive":
        engine.__dict__[_ATTRIBUTE] = arguments["version"]
    elif method == "epload_commit":
        engine.tokenizer_manager._update_weight_version_if_provided(str(engine.__dict__[_ATTRIBUTE]))


def update_weights_from_tensor(
    original: Callable[..., Any], manager: Any, request: UpdateWeightsFromTensorReqInput
) -> UpdateWeightsFromTensorReqOutput:
    """Runs in place of the scheduler's handler of ``/update_weights_from_tensor``, for servers.

    With ``load_format="epload"``, the request has no tensors, but JSON: ``{"call": "receive" or "commit", ...}`` with the call's
    arguments. An error becomes the message of the reply, whose ``success`` is false. SGLang's server puts the request's
    ``weight_version`` into later replies: a commit has to have that of its version, and a receive none.
    """
    if request.load_format != LOAD_FORMAT:
        return original(manager, request)
    success, message = True, "Success"
    try:
        arguments = _parse(request)
        updates = EngineUpdates.of(manager.scheduler)
        receives = arguments.pop("call") == "receive"
        label = None if receives or updates.version is None else str(updates.version)
        if request.weight_version != label:
            raise ValueError(f"expected weight_version={label!r} of the request, got {request.weight_version!r}")
        (updates.receive if receives else updates.commit)(**arguments)
    except Exception as error:
        success, message = False, str(error)
        logger.error("%s", message)
    dist.barrier(group=manager.tp_cpu_group)
    return UpdateWeightsFromTensorReqOutput(success=success, message=message)


def _parse(request: UpdateWeightsFromTensorReqInput) -> dict[str, Any]:
    """Returns the arguments of a call. Raises ValueError: the request has no call."""
    expected = 'expected serialized_named_tensors=[JSON of {"call": "receive" or "commit", ...}] for load_format=\'epload\''
    try:
        arguments = json.loads(bytes(request.serialized_named_tensors[0]))
    except (ValueError, TypeError, IndexError) as error:
        raise ValueError(expected) from error
    if not isinstance(arguments, dict) or arguments.get("call") not in ("receive", "commit"):
        raise ValueError(f"{expected}, got {arguments}")
    return arguments
