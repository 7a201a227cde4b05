"""An inference engine's model, filled as its own ``load_weights`` would fill it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

from epload.checkpoint.manifest import Manifest
from epload.core.default_device import callers_default_device
from epload.core.placement import Box
from epload.core.views import View
from epload.errors import LoadError, ModelMismatch
from epload.integrations.engine.recording import Recording, record
from epload.integrations.engine.targets import storage_of, whole_box
from epload.integrations.engine.trace import LoadWeights
from epload.planning.holdings import Holdings, HoldingsBuilder, Share, full_share
from epload.sync.arrival import TensorLayout
from epload.sync.targets import Target

_MAX_SHOWN = 5
_Layout = tuple[torch.Size, tuple[int, ...], torch.dtype]
"""Shape, strides and dtype of a tensor."""


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
        """See :class:`~epload.sync.targets.TargetProvider`."""
        return EngineTarget(self, strict)

    # What engines override that change parameters after loading, for example to quantize or repack them.

    def recordable(self) -> AbstractContextManager[None]:
        """The model has the tensors that ``load_weights`` fills, perhaps on meta."""
        return nullcontext()

    def begin(self, recording: Recording) -> None:
        """Called before a version is copied in; afterwards the model has the tensors that ``load_weights`` fills. Called again
        without :meth:`finish` if the version could not be copied."""

    def finish(self) -> None:
        """Called when they have the version."""


class RecordedEngine:
    """An engine's model, and a recording of what its ``load_weights`` does with certain tensors."""

    def __init__(self, engine: EngineModel, manifest: Manifest, parameters: Mapping[str, int], strict: bool) -> None:
        """
        Args:
            parameters: see :func:`parameter_ids`.
            strict: whether a parameter that ``load_weights`` leaves unwritten is an error.

        Raises:
            ModelMismatch: ``load_weights`` does not take the tensors, or leaves parameters unwritten.
        """
        self._engine = engine
        self._parameters = parameters
        self._strict = strict
        with callers_default_device(), engine.recordable():
            self.tensors = engine.tensors()
            """The tensors that ``load_weights`` fills."""
            self.recording = record(engine.load_weights, manifest, self.tensors)
        if strict and not self.recording.untraced:
            self._check({})

    def load_rest(self, full: Iterable[tuple[str, Tensor]]) -> None:
        """Fills everything that ``load_weights`` does not just copy.

        Args:
            full: the tensors in ``recording.whole``.
        """
        recording, tensors = self.recording, self._engine.tensors()
        recording.fill(tensors)
        if not recording.whole:
            return
        before = {name: tensor.detach() for name, tensor in tensors.items()}
        with callers_default_device():
            loaded = recording.load_whole(self._engine.load_weights, full, tensors)
        if self._strict and recording.untraced:
            replaced = {
                name: [whole_box(before[name])]
                for name, tensor in self._engine.tensors().items()
                if name in before and storage_of(tensor) != storage_of(before[name])
            }
            self._check(loaded | replaced)

    def _check(self, loaded: Mapping[str, Sequence[Box]]) -> None:
        """Raises ModelMismatch if parameters are left unwritten, apart from boxes that ``load_weights`` wrote by itself."""
        if missing := self.recording.unfilled(self._parameters, loaded):
            listed = f"{', '.join(missing[:_MAX_SHOWN])}{', ...' * (len(missing) > _MAX_SHOWN)}"
            raise ModelMismatch(
                f"with the tensors that it is given, load_weights leaves {len(missing)} of the engine's parameters unwritten, in "
                f"part or as a whole ({listed}); pass strict=False if they are to keep their values, or if it writes them from "
                "another thread",
                missing_keys=missing,
            )


def parameter_ids(engine: EngineModel) -> dict[str, int]:
    """Returns a number for each parameter, by name; tied ones have the same."""
    return {name: id(parameter) for name, parameter in engine.model.named_parameters(remove_duplicate=False)}


class EngineTarget(Target):
    """See :class:`~epload.sync.targets.Target`."""

    tears_on_prepare = True
    """An engine's ``begin`` may take apart what it computes with."""

    def __init__(self, engine: EngineModel, strict: bool) -> None:
        self._engine = engine
        self._strict = strict
        self._parameters = parameter_ids(engine)  # before the engine takes tied ones apart to load them
        self._recorded: RecordedEngine | None = None
        self._layouts: dict[str, _Layout] = {}
        """The targets that are filled directly; they come first among the local tensors."""
        self._whole: list[tuple[str, torch.Size, torch.dtype]] = []
        self._full: list[Tensor] = []
        self._own_devices: set[torch.device] = set()
        """Without that of what the engine loads by itself."""

    def holdings(self, manifest: Manifest) -> Holdings:
        self._recorded = RecordedEngine(self._engine, manifest, self._parameters, self._strict)
        tensors, recording = self._recorded.tensors, self._recorded.recording
        names = dict.fromkeys(name for places in recording.regions for name, _ in places)
        self._layouts = {name: _layout(tensors[name]) for name in names}
        self._own_devices = {tensors[name].device for name in names}
        self.devices = self._own_devices | ({torch.device("cpu")} if recording.whole else set())
        numbers = {name: number for number, name in enumerate(names)}
        self._whole = []
        builder = HoldingsBuilder(len(manifest.names))
        columns = zip(manifest.names, manifest.shapes, manifest.dtypes, recording.regions, strict=True)
        for number, (name, shape, dtype, places) in enumerate(columns):
            local: tuple[int, ...]
            if name in recording.whole:
                local = (len(numbers) + len(self._whole),)
                self._whole.append((name, torch.Size(shape), dtype))
                builder.add(number, local, ("whole", shape, dtype), full_share, shape, dtype)
            elif places:
                local = tuple(numbers[target] for target, _ in places)
                kinds = {tensors[target].dtype for target, _ in places}
                kind = kinds.pop() if len(kinds) == 1 else dtype
                views = [(view, tuple(tensors[target].shape)) for target, view in places]
                builder.add(number, local, (shape, kind, *views), _share, views, shape, kind)
        return builder.build()

    def tensors(self) -> list[Tensor]:
        assert self._recorded is not None
        with callers_default_device():
            self._engine.begin(self._recorded.recording)
        tensors = self._engine.tensors()
        filled = {name: tensors[name] for name in self._layouts if name in tensors}
        if {name: _layout(tensor) for name, tensor in filled.items()} != self._layouts:
            raise LoadError("the engine's model has other tensors than when it was recorded; make a new WeightReceiver")
        self._full = [torch.empty(shape, dtype=dtype) for _, shape, dtype in self._whole]
        return [*(tensor.detach() for tensor in filled.values()), *self._full]

    def layouts(self) -> list[TensorLayout]:
        if len(self._own_devices) > 1 or any(device.type == "meta" for device in self._own_devices):
            raise LoadError(
                "expected the engine's tensors on one device for stage='device', got them on "
                f"{', '.join(sorted(map(str, self._own_devices)))}; pass stage='host'"
            )
        layouts = self._layouts.values()
        own = [(shape, dtype, device) for device in self._own_devices for shape, _, dtype in layouts]
        return [*own, *((shape, dtype, torch.device("cpu")) for _, shape, dtype in self._whole)]

    def finish(self) -> None:
        assert self._recorded is not None
        self._recorded.load_rest(zip((name for name, _, _ in self._whole), self._full, strict=True))
        self._full = []
        with callers_default_device():
            self._engine.finish()


def _share(views: list[tuple[View, tuple[int, ...]]], shape: tuple[int, ...], dtype: torch.dtype) -> Share:
    local = [(place, view) for place, (view, _) in enumerate(views) if 0 not in view.size]
    return Share(shape, tuple(local), dtype)


def _layout(tensor: Tensor) -> _Layout:
    return tensor.shape, tensor.stride(), tensor.dtype
