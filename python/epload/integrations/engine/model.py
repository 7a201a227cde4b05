"""An inference engine's model, filled as its own ``load_weights`` would fill it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from math import prod
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from epload.checkpoint.manifest import Manifest
from epload.core.default_device import callers_default_device
from epload.core.log import logger
from epload.core.placement import Box
from epload.core.views import View
from epload.errors import LoadError, ModelMismatch
from epload.integrations.engine.recording import Recording, record
from epload.integrations.engine.targets import EngineTargets, covers
from epload.integrations.engine.trace import LoadWeights
from epload.model.memory import storage_of
from epload.model.targets import Targets
from epload.observe.render import count, list_first, list_keys
from epload.planning.holdings import Holdings, holdings_of_targets
from epload.sync.arrival import TensorLayout, layout_of
from epload.sync.targets import Target

_PROCESS = "process_weights_after_loading"
BATCH_BYTES = 1 << 30
"""Maximum bytes of several groups of parameters that an engine processes at once."""


class EngineModel:
    """A model that an engine fills with ``load_weights``, for :class:`epload.WeightReceiver`.

    The receiver records what ``load_weights`` does with each tensor of the sender. What it copies arrives where it belongs,
    without the rest of the tensor. Tensors with which it does anything else are received in full, and given to it by
    :meth:`WeightReceiver.commit`.

    Example::

        receiver = epload.WeightReceiver(epload.EngineModel(model), "trainer0:29600")
    """

    def __init__(self, model: nn.Module, load_weights: LoadWeights | None = None) -> None:
        """
        Args:
            model: with storage.
            load_weights: takes an iterable of names and full tensors; the model's own if None.

        Raises:
            TypeError: the model has none.
        """
        if load_weights is None:
            load_weights = getattr(model, "load_weights", None)
            if load_weights is None:
                raise TypeError(f"expected a model with load_weights, got a {type(model).__name__}; pass load_weights=")
        self.model = model
        self.load_weights = load_weights

    def tensors(self) -> dict[str, Tensor]:
        """All parameters and buffers as ``load_weights`` fills them, under all of their names."""
        parameters: dict[str, Tensor] = dict(self.model.named_parameters(remove_duplicate=False))
        return parameters | dict(self.model.named_buffers(remove_duplicate=False))

    def sync_target(self, strict: bool) -> EngineTarget:
        """See :class:`~epload.sync.targets.TargetProvider`. Raises ModelMismatch: vLLM balances experts among its ranks, or an
        engine may have brought weights into the layout of a kernel, where what ``load_weights`` copies does not belong."""
        for name, module in self.model.named_modules():
            processing = (getattr(part, _PROCESS, None) for part in (module, getattr(module, "quant_method", None)))
            if type(self) is EngineModel and any(processing):
                raise ModelMismatch(
                    f"the engine changes its weights after loading them ({name or type(module).__name__} has {_PROCESS}); pass "
                    "epload.integrations.vllm.VllmModel(model, vllm_config, device), or epload.integrations.sglang.SglangModel"
                )
            if getattr(module, "eplb_state", None) is not None:
                raise ModelMismatch(
                    f"vLLM moves experts of {name or type(module).__name__} while it runs (enable_eplb), and weights would go "
                    "to the places of others: serve without it"
                )
        return EngineTarget(self, strict)

    # What engines override that change parameters after loading, for example to quantize or repack them.

    device = torch.device("meta")
    """Device on which :meth:`begin` makes those that are on meta while ``load_weights`` is recorded."""

    def recordable(self) -> AbstractContextManager[None]:
        """The model has the tensors that ``load_weights`` fills, perhaps on meta."""
        return nullcontext()

    def filled_as_a_whole(self) -> list[list[str]]:
        """Returns groups of parameters, each of which a version has to fill as a whole, or none of it. They are filled one after
        the other, each with all that its layers have."""
        return []

    def begin(self, written: Collection[str] | None) -> None:
        """Called before a version is copied in; afterwards the model has the tensors that ``load_weights`` fills, those that are
        ``written`` (all if None). Called again without :meth:`process` or :meth:`finish` if the version could not be copied."""

    def process(self) -> None:
        """Called when these have the version, before :meth:`begin` is called for others of it."""

    def finish(self) -> None:
        """Called when all have the version, in place of :meth:`process` for the last."""


class EngineTarget(Target):
    """An engine's model as a target of versions and checkpoints; see :class:`~epload.sync.targets.Target`."""

    changes_on_prepare = True
    """An engine's ``begin`` may take apart what it computes with."""
    recording: Recording

    def __init__(self, engine: EngineModel, strict: bool) -> None:
        """``strict``: whether a parameter that ``load_weights`` leaves unwritten is an error."""
        self._engine = engine
        self._strict = strict
        # Equal for parameters that are tied, perhaps by their memory only. The engine may take these apart to load them.
        parameters = engine.model.named_parameters(remove_duplicate=False)
        self._identity = {name: (storage_of(p), p.storage_offset(), p.shape, p.stride()) for name, p in parameters}
        self._filled: dict[str, TensorLayout] = {}
        """Layouts of the tensors that are filled directly."""
        self._full: dict[str, TensorLayout] = {}
        """Layouts of the full tensors for ``load_weights``."""
        self._received: dict[str, Tensor] = {}
        """These tensors, while a version is applied."""

    def record(self, manifest: Manifest) -> dict[str, Tensor]:
        """Records ``load_weights``; returns the tensors that it fills.

        Raises:
            ModelMismatch: it does not take the tensors, or leaves parameters unwritten.
        """
        with callers_default_device(), self._engine.recordable():
            tensors = self._engine.tensors()
            self.recording = record(self._engine.load_weights, manifest, tensors)
        if passed_through := self.recording.passed_through:
            name, reason = next(iter(passed_through.items()))
            logger.info("load_weights takes %s in full, the first is %s (%s)", count(len(passed_through), "tensor"), name, reason)
        if self.recording.written is not None:
            self._check(tensors, self.recording.written)
        return tensors

    def load_rest(self, full: Iterable[tuple[str, Tensor]], done: Collection[str] = ()) -> None:
        """Fills everything that ``load_weights`` does not just copy.

        Args:
            full: the tensors in ``recording.passed_through``.
            done: names of those of the engine that need nothing any more.
        """
        tensors = {name: tensor for name, tensor in self._engine.tensors().items() if name not in done}
        self.recording.fill_constants(tensors)
        if not self.recording.passed_through:
            return
        log = _WriteLog(EngineTargets(tensors))
        before = {name: tensor.detach() for name, tensor in tensors.items()}
        with callers_default_device(), torch.no_grad(), log:
            self._engine.load_weights(full)
        if self.recording.written is None:
            for name, tensor in self._engine.tensors().items():
                if name in before and storage_of(tensor) != storage_of(before[name]):  # replaced
                    log.written[name] = [((0,) * tensor.ndim, tuple(tensor.shape))]
            self._check(before, log.written)

    def _check(self, tensors: Mapping[str, Tensor], written: Mapping[str, Sequence[Box]]) -> None:
        """Raises ModelMismatch if parameters are left unwritten."""
        reached = {self._identity[name] for name in written if name in self._identity}

        def is_unwritten(name: str) -> bool:
            is_reached = name not in written and self._identity.get(name) in reached  # by a tied one
            return name in tensors and not is_reached and not covers(tensors[name], written.get(name, ()))

        groups = [group for group in self._engine.filled_as_a_whole() if not written.keys().isdisjoint(group)]
        if torn := sorted({name for group in groups for name in group if is_unwritten(name)}):
            raise ModelMismatch(
                f"with the tensors that it is given, load_weights leaves {list_keys(torn)} unwritten, in part or as a whole, and "
                "fills other parameters of the same layers, which the engine processes after loading; send these layers as a "
                "whole",
                missing_keys=torn,
            )
        missing = list(filter(is_unwritten, self._identity))
        if missing and self._strict and not self.scope.left_out:
            raise ModelMismatch(
                f"with the tensors that it is given, load_weights leaves {len(missing)} of the engine's parameters unwritten, in "
                f"part or as a whole ({list_first(missing)}); pass strict=False if they are to keep their values, or if it "
                "writes them from another thread",
                missing_keys=missing,
            )

    def holdings(self, manifest: Manifest) -> Holdings:
        if self.scope.adapter is not None:
            raise ModelMismatch(
                "the sender sends an adapter alone, and load_weights takes base weights; take the adapter's tensors from "
                "WeightReceiver(None, address)"
            )
        tensors, recording = self.record(manifest), self.recording
        places = dict(zip(manifest.names, recording.regions, strict=True))
        unread = {name for name, of_tensor in places.items() if not of_tensor} - recording.passed_through.keys()
        skipped = [name for name in manifest.names if name in unread & self._identity.keys() and tensors[name].numel()]
        if skipped and self._strict:
            raise ModelMismatch(
                f"load_weights takes nothing from {skipped[0]}, which the engine ties to another parameter, and the sender has a "
                "tensor of its own for it: serve with tie_word_embeddings=False, or tie the sender's (tie_weights())"
            )
        self._filled = {name: self._layout_of(tensors[name]) for places in recording.regions for name, _ in places}
        self._full, whole = {}, cache(View.whole)
        placed = list(recording.regions)
        for i, (name, shape, dtype) in enumerate(zip(manifest.names, manifest.shapes, manifest.dtypes, strict=True)):
            if name in recording.passed_through:
                self._full[name] = torch.Size(shape), dtype, torch.device("cpu")
                placed[i] = ((f"full {name}", whole(shape)),)
        layouts = [*self._filled.values(), *self._full.values()]
        self.devices = {device for *_, device in layouts}
        targets = Targets().with_extra(
            [*self._filled, *(f"full {name}" for name in self._full)],
            [tuple(shape) for shape, *_ in layouts],
            [dtype for _, dtype, _ in layouts],
        )
        return holdings_of_targets(manifest.shapes, targets, placed)

    def _layout_of(self, tensor: Tensor) -> TensorLayout:
        """Returns that of a tensor that was recorded, once the engine has made it."""
        return tensor.shape, tensor.dtype, self._engine.device if tensor.is_meta else tensor.device

    def tensors(self) -> list[Tensor]:
        self._check_inputs()
        tensors = self._begin(self.recording.written)
        self._received = {
            name: torch.empty(shape, dtype=dtype, device=device) for name, (shape, dtype, device) in self._full.items()
        }
        return [*(tensors[name] for name in self._filled), *self._received.values()]

    def _check_inputs(self) -> None:
        if changed := self.recording.changed_input(self._engine.tensors()):
            raise LoadError(
                f"{changed} of the engine's model has other values than when load_weights was recorded, so that weights would "
                "go to other places; make a new WeightReceiver"
            )

    def _begin(self, written: Collection[str] | None) -> dict[str, Tensor]:
        """Returns these of the tensors that ``load_weights`` fills, once the engine has them."""
        with callers_default_device():
            self._engine.begin(written)
        try:
            found = {name: attrgetter(name)(self._engine.model).detach() for name in written or ()}
            same = all(layout_of(found[name])[:2] == self._filled[name][:2] for name in self._filled.keys() & found)
        except AttributeError:
            same = False
        if not same:
            raise LoadError("the engine's model has other tensors than when it was recorded; make a new WeightReceiver")
        return found

    def layouts(self) -> list[TensorLayout]:
        own = {device for *_, device in self._filled.values()}
        if len(own) > 1 or any(device.type == "meta" for device in own):
            raise LoadError(
                "expected the engine's tensors on one device for stage='device', got them on "
                f"{', '.join(sorted(map(str, own)))}; pass stage='host'"
            )
        return [*self._filled.values(), *self._full.values()]

    def finish(self) -> None:
        self._finish(self._received.items())
        self._received = {}

    def _finish(self, full: Iterable[tuple[str, Tensor]], done: Collection[str] = ()) -> None:
        self.load_rest(full, done)
        with callers_default_device():
            self._engine.finish()

    def fill(self, copy: Callable[[Mapping[int, Tensor]], None]) -> None:
        """Fills what the engine processes batch after batch, so that it needs memory for one at a time, and then the rest. Full
        tensors are made when ``load_weights`` takes them."""
        self._check_inputs()
        numbers, done = {name: number for number, name in enumerate(self._filled)}, set[str]()
        of_layers: dict[str, list[str]] = defaultdict(list)
        for name in self.recording.written or ():
            of_layers[_layer_of(name)].append(name)

        def fill_directly(names: Collection[str] | None) -> None:
            tensors = self._begin(names)
            copy({numbers[name]: tensor for name, tensor in tensors.items() if name in numbers})
            self.recording.fill_constants(tensors)

        def full() -> Iterator[tuple[str, Tensor]]:
            for number, (name, (shape, dtype, device)) in enumerate(self._full.items(), len(numbers)):
                tensor = torch.empty(shape, dtype=dtype, device=device)
                copy({number: tensor})
                yield name, tensor

        # With all that their layers have, such as buffers, or these would be opened once more.
        groups = (
            [name for layer in dict.fromkeys(map(_layer_of, group)) for name in of_layers.pop(layer, ())]
            for group in self._engine.filled_as_a_whole()
        )
        for names in self._batches(names for names in groups if self.recording.computed.isdisjoint(names)):
            fill_directly(names)
            with callers_default_device():
                self._engine.process()
            done.update(names)
        written = self.recording.written
        fill_directly(None if written is None else [name for name in written if name not in done])
        self._finish(full(), done)

    def _batches(self, groups: Iterable[list[str]]) -> Iterator[list[str]]:
        """Yields the names of consecutive groups that have at most ``BATCH_BYTES`` together, or of one group: for each batch, all
        buckets are looked at that have some of it."""
        batch, total = list[str](), 0
        for names in groups:
            layouts = [self._filled[name] for name in names if name in self._filled]
            nbytes = sum(prod(shape) * dtype.itemsize for shape, dtype, _ in layouts)
            if batch and total + nbytes > BATCH_BYTES:
                yield batch
                batch, total = [], 0
            batch, total = batch + names, total + nbytes
        if batch:
            yield batch


def _layer_of(name: str) -> str:
    return name.rpartition(".")[0]


class _WriteLog(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the boxes that operations write, by target. Writes from other threads are not seen."""

    def __init__(self, targets: EngineTargets) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._targets = targets
        self.written: dict[str, list[Box]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func._schema.is_mutable:
            for tensor in tree_leaves((args[:1], kwargs.get("out"))):
                if isinstance(tensor, Tensor) and (located := self._targets.locate(tensor)) is not None:
                    name, views = located
                    self.written.setdefault(name, []).extend((view.start, view.size) for view in views)
        return func(*args, **kwargs)
