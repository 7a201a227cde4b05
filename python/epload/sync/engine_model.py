"""An inference engine's model as the target of a receiver: filled as its own ``load_weights`` would fill it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
from torch import Tensor, nn

from epload.checkpoint.manifest import Manifest
from epload.core.default_device import callers_default_device
from epload.core.placement import Box, OwnedRegion
from epload.core.views import View
from epload.errors import LoadError, ModelMismatch
from epload.planning.holdings import Holdings, HoldingsBuilder, Part, full_parts, parts_of_view
from epload.recording import LoadWeights, Recording, record
from epload.recording.targets import storage_of
from epload.sync.arrival import TensorLayout
from epload.sync.targets import Target

_MOST_SHOWN = 5


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

    def parameter_ids(self) -> dict[str, int]:
        """A number for each parameter, by name; tied ones have the same."""
        parameters = self.model.named_parameters(remove_duplicate=False)
        return {name: id(parameter) for name, parameter in parameters}

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
    """See :class:`~epload.sync.targets.Target`."""

    tears_on_prepare = True
    """An engine's ``begin`` may take apart what it computes with."""

    def __init__(self, engine: EngineModel, strict: bool) -> None:
        self._engine = engine
        self._strict = strict
        self._parameters = engine.parameter_ids()
        """Ids of the parameters, by name, before the engine has taken tied ones apart to load them."""
        self._recording: Recording | None = None
        self._names: list[str] = []
        """Names of the targets that are filled directly; they come first among the local tensors."""
        self._layouts: list[tuple[torch.Size, tuple[int, ...], torch.dtype]] = []
        """Shape, strides and dtype of these."""
        self._whole: list[tuple[str, torch.Size, torch.dtype]] = []
        self._full: list[Tensor] = []
        self._own_devices: set[torch.device] = set()
        """Devices of the targets that are filled directly."""

    def holdings(self, manifest: Manifest) -> Holdings:
        engine = self._engine
        with callers_default_device(), engine.recordable():
            tensors = engine.tensors()
            recording = record(engine.load_weights, manifest, tensors)
        if self._strict and not recording.unseen:
            self._check(recording, {})
        numbers: dict[str, int] = {}
        for places in recording.regions:
            for name, _ in places:
                numbers.setdefault(name, len(numbers))
        self._recording, self._names = recording, list(numbers)
        self._layouts = [_layout(tensors[name]) for name in self._names]
        self._own_devices = {tensors[name].device for name in self._names}
        whole = {name for group in recording.whole for name in group.names}
        self._whole = []
        builder = HoldingsBuilder(len(manifest.names))
        columns = zip(manifest.names, manifest.shapes, manifest.dtypes, recording.regions, strict=True)
        for number, (name, shape, dtype, places) in enumerate(columns):
            if name in whole:
                local = len(numbers) + len(self._whole)
                self._whole.append((name, torch.Size(shape), dtype))
                builder.add(number, (local,), dtype, ("whole", shape, dtype), partial(full_parts, shape))
            elif places:
                of = tuple(numbers[target] for target, _ in places)
                views = [(view, tuple(tensors[target].shape)) for target, view in places]
                dtypes = {tensors[target].dtype for target, _ in places}
                common = dtypes.pop() if len(dtypes) == 1 else dtype
                key = (shape, common, *((id(view), target) for view, target in views))
                builder.add(number, of, common, key, partial(_parts, views, shape))
        self.devices = {*self._own_devices, torch.device("cpu")} if self._whole else self._own_devices
        return builder.build()

    def tensors(self) -> list[Tensor]:
        assert self._recording is not None
        with callers_default_device():
            self._engine.begin(self._recording)
        tensors = self._engine.tensors()
        filled = [tensors[name] for name in self._names if name in tensors]
        if [_layout(tensor) for tensor in filled] != self._layouts:
            raise LoadError("the engine's model has other tensors than when it was recorded; make a new WeightReceiver")
        self._full = [torch.empty(shape, dtype=dtype) for _, shape, dtype in self._whole]
        return [*(tensor.detach() for tensor in filled), *self._full]

    def layouts(self) -> list[TensorLayout]:
        if len(self._own_devices) > 1 or any(device.type == "meta" for device in self._own_devices):
            raise LoadError(
                "expected the engine's tensors on one device for stage='device', got them on "
                f"{', '.join(sorted(map(str, self._own_devices)))}; pass stage='host'"
            )
        own = [(shape, dtype, device) for device in self._own_devices for shape, _, dtype in self._layouts]
        return [*own, *((shape, dtype, torch.device("cpu")) for _, shape, dtype in self._whole)]

    def finish(self) -> None:
        recording, engine = self._recording, self._engine
        assert recording is not None
        tensors = engine.tensors()
        recording.fill(tensors)
        if self._whole:
            before = {name: tensor.detach() for name, tensor in tensors.items()}
            named = zip((name for name, _, _ in self._whole), self._full, strict=True)
            with callers_default_device():
                loaded = recording.load_whole(engine.load_weights, named, tensors)
            if self._strict and recording.unseen:
                self._check(recording, loaded | replaced_tensors(before, engine.tensors()))
        self._full = []
        with callers_default_device():
            engine.finish()

    def _check(self, recording: Recording, loaded: Mapping[str, Sequence[Box]]) -> None:
        """Raises ModelMismatch if parameters keep values that no tensor of the sender gives.

        Args:
            loaded: boxes that ``load_weights`` has written by itself, by target.
        """
        missing = recording.unfilled(self._parameters, loaded)
        if missing:
            listed = f"{', '.join(missing[:_MOST_SHOWN])}{', ...' * (len(missing) > _MOST_SHOWN)}"
            raise ModelMismatch(
                f"with the tensors that the sender has, load_weights leaves {len(missing)} of the engine's parameters unwritten, "
                f"in part or as a whole ({listed}); pass strict=False if they are to keep their values, or if it writes them "
                "from another thread",
                missing_keys=missing,
            )


def replaced_tensors(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> dict[str, list[Box]]:
    """The whole of each tensor that has got another memory, by name."""
    return {
        name: [((0,) * before[name].ndim, tuple(before[name].shape))]
        for name, tensor in after.items()
        if name in before and storage_of(tensor) != storage_of(before[name])
    }


def _parts(views: list[tuple[View, tuple[int, ...]]], shape: tuple[int, ...]) -> list[Part]:
    return [
        part
        for place, (view, target) in enumerate(views)
        for part in parts_of_view(view, shape, [OwnedRegion((0,) * len(target), target, (0,) * len(target))], place)
    ]


def _layout(tensor: Tensor) -> tuple[torch.Size, tuple[int, ...], torch.dtype]:
    return tensor.shape, tensor.stride(), tensor.dtype
