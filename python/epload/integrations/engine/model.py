"""An inference engine's model, filled as its own ``load_weights`` would fill it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
from torch import Tensor, nn

from epload.checkpoint.manifest import Manifest
from epload.core.default_device import callers_default_device
from epload.core.placement import Box, OwnedRegion
from epload.core.views import Shape, View
from epload.errors import LoadError, ModelMismatch
from epload.integrations.engine.recording import Recording, record
from epload.integrations.engine.targets import covers, storage_of, whole_box
from epload.integrations.engine.trace import LoadWeights
from epload.planning.holdings import Holdings, HoldingsBuilder, Part, full_parts, parts_of_view
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


class EngineTarget(Target):
    """An engine's model as a target of versions and checkpoints; see :class:`~epload.sync.targets.Target`."""

    tears_on_prepare = True
    """An engine's ``begin`` may take apart what it computes with."""
    recording: Recording

    def __init__(self, engine: EngineModel, strict: bool) -> None:
        """``strict``: whether a parameter that ``load_weights`` leaves unwritten is an error."""
        self._engine = engine
        self._strict = strict
        # Equal for parameters that are tied; the engine may take these apart to load them.
        self._identity = {name: id(parameter) for name, parameter in engine.model.named_parameters(remove_duplicate=False)}
        self._layouts: dict[str, _Layout] = {}
        """The tensors that are filled directly; they come first among the local tensors."""
        self._own_devices: set[torch.device] = set()
        """Theirs."""
        self._whole: dict[str, tuple[torch.Size, torch.dtype]] = {}
        self._full: list[Tensor] = []

    def record(self, manifest: Manifest) -> dict[str, Tensor]:
        """Records ``load_weights``; returns the tensors that it fills.

        Raises:
            ModelMismatch: it does not take the tensors, or leaves parameters unwritten.
        """
        with callers_default_device(), self._engine.recordable():
            tensors = self._engine.tensors()
            self.recording = record(self._engine.load_weights, manifest, tensors)
        if not self.recording.untraced:
            self._check(tensors, {})
        return tensors

    def load_rest(self, full: Iterable[tuple[str, Tensor]]) -> None:
        """Fills everything that ``load_weights`` does not just copy; ``full`` are the tensors in ``recording.whole``."""
        recording, tensors = self.recording, self._engine.tensors()
        recording.fill(tensors)
        if not recording.whole:
            return
        before = {name: tensor.detach() for name, tensor in tensors.items()}
        with callers_default_device():
            loaded = {**recording.load_whole(self._engine.load_weights, full, tensors)}
        if recording.untraced:
            for name, tensor in self._engine.tensors().items():
                if name in before and storage_of(tensor) != storage_of(before[name]):
                    loaded[name] = [whole_box(before[name])]
            self._check(before, loaded)

    def _check(self, tensors: Mapping[str, Tensor], loaded: Mapping[str, Sequence[Box]]) -> None:
        """Raises ModelMismatch if parameters are left unwritten, apart from boxes that ``load_weights`` has written by itself."""
        if not self._strict:
            return
        boxes = {name: [*self.recording.written.get(name, ()), *loaded.get(name, ())] for name in self._identity}
        written = {self._identity[name] for name in boxes if boxes[name]}
        missing = [
            name
            for name, some in boxes.items()
            if (some or self._identity[name] not in written) and name in tensors and not covers(tensors[name].shape, some)
        ]
        if missing:
            listed = f"{', '.join(missing[:_MAX_SHOWN])}{', ...' * (len(missing) > _MAX_SHOWN)}"
            raise ModelMismatch(
                f"with the tensors that it is given, load_weights leaves {len(missing)} of the engine's parameters unwritten, in "
                f"part or as a whole ({listed}); pass strict=False if they are to keep their values, or if it writes them from "
                "another thread",
                missing_keys=missing,
            )

    def holdings(self, manifest: Manifest) -> Holdings:
        tensors = self.record(manifest)
        regions, whole = self.recording.regions, self.recording.whole
        names = dict.fromkeys(name for places in regions for name, _ in places)
        numbers = {name: number for number, name in enumerate(names)}
        self._layouts = {name: _layout(tensors[name]) for name in names}
        self._own_devices = {tensors[name].device for name in names}
        self.devices = self._own_devices | ({torch.device("cpu")} if whole else set())
        self._whole = {}
        builder = HoldingsBuilder(len(manifest.names))
        columns = zip(manifest.names, manifest.shapes, manifest.dtypes, regions, strict=True)
        for number, (name, shape, dtype, places) in enumerate(columns):
            if name in whole:
                local = (len(numbers) + len(self._whole),)
                self._whole[name] = torch.Size(shape), dtype
                builder.add(number, local, dtype, ("whole", shape, dtype), partial(full_parts, shape))
            elif places:
                filled = [tensors[target] for target, _ in places]
                mixed = any(tensor.dtype != filled[0].dtype for tensor in filled)
                kind = dtype if mixed else filled[0].dtype
                views = tuple((view, tuple(tensor.shape)) for (_, view), tensor in zip(places, filled, strict=True))
                local = tuple(numbers[target] for target, _ in places)
                builder.add(number, local, kind, (shape, kind, mixed, views), partial(_parts, views, shape), mixed)
        return builder.build()

    def tensors(self) -> list[Tensor]:
        with callers_default_device():
            self._engine.begin(self.recording)
        tensors = self._engine.tensors()
        filled = {name: tensors[name].detach() for name in self._layouts if name in tensors}
        if {name: _layout(tensor) for name, tensor in filled.items()} != self._layouts:
            raise LoadError("the engine's model has other tensors than when it was recorded; make a new WeightReceiver")
        self._full = [torch.empty(shape, dtype=dtype) for shape, dtype in self._whole.values()]
        return [*filled.values(), *self._full]

    def layouts(self) -> list[TensorLayout]:
        if len(self._own_devices) > 1 or any(device.type == "meta" for device in self._own_devices):
            raise LoadError(
                "expected the engine's tensors on one device for stage='device', got them on "
                f"{', '.join(sorted(map(str, self._own_devices)))}; pass stage='host'"
            )
        own = [(shape, dtype, device) for device in self._own_devices for shape, _, dtype in self._layouts.values()]
        return [*own, *((*layout, torch.device("cpu")) for layout in self._whole.values())]

    def finish(self) -> None:
        self.load_rest(zip(self._whole, self._full, strict=True))
        self._full = []
        with callers_default_device():
            self._engine.finish()


def _parts(views: Sequence[tuple[View, Shape]], shape: Shape) -> list[Part]:
    return [
        part
        for place, (view, target) in enumerate(views)
        for part in parts_of_view(view, shape, [OwnedRegion((0,) * len(target), target, (0,) * len(target))], place)
    ]


def _layout(tensor: Tensor) -> _Layout:
    return tensor.shape, tensor.stride(), tensor.dtype
