"""Runs an engine's ``load_weights`` on tensors without data, and lists what it would write where."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.modules import module as torch_module
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from epload.core.pieces import Metadata
from epload.core.placement import Box
from epload.core.views import View
from epload.recording.mutation import read_tensors, written_tensors
from epload.recording.provenance import NotViews, Provenance, Region, copy_of, joined
from epload.recording.targets import EngineTargets, storage_of

LoadWeights = Callable[[Iterable[tuple[str, Tensor]]], Any]
_aten = torch.ops.aten
_VIEWS = {
    _aten.alias, _aten.as_strided, _aten.detach, _aten.diagonal, _aten.expand, _aten.permute, _aten.select, _aten.slice,
    _aten.split, _aten.split_with_sizes, _aten.squeeze, _aten.t, _aten.transpose, _aten.unbind, _aten.unfold, _aten.unsqueeze,
    _aten.view, _aten._reshape_alias, _aten._unsafe_view, _aten.lift_fresh,
}  # fmt: skip
"""Operations whose results are regions of their first argument's memory, in its dtype."""
_COPIES = {_aten.clone, _aten._to_copy}
_READ_NO_VALUES = {
    _aten.empty_like, _aten.zeros_like, _aten.ones_like, _aten.full_like, _aten.new_empty, _aten.new_zeros, _aten.new_ones,
    _aten.new_full, _aten.new_empty_strided,
}  # fmt: skip
_LEAVE_TORCH = {
    Tensor.numpy, Tensor.tolist, Tensor.data_ptr, Tensor.__array__, Tensor.__dlpack__, Tensor.data.__set__,  # type: ignore[attr-defined]
}  # fmt: skip
"""Functions that read or replace a tensor's memory without an operation."""


class Write(NamedTuple):
    """The writes of one operation to one target."""

    target: str
    boxes: tuple[Box, ...]
    parts: tuple[tuple[int, View], ...] = ()
    """Number and view of the checkpoint tensor that fills each box; empty if the values are computed."""
    sources: frozenset[int] = frozenset()
    """The checkpoint tensors that the values depend on."""
    value: float | None = None
    """The constant that fills the boxes, if no checkpoint tensor does."""
    reason: str = ""
    """Why there are no ``parts``."""


class Untraceable(Exception):
    """Ends a ``load_weights`` that does what a recording cannot hold."""


class _Storage:
    """The memory of a fake tensor, which its views share."""

    def __init__(self, provenance: Provenance, tokens: tuple[_Token, ...]) -> None:
        self.provenance = provenance
        self.tokens = tokens


class _Token:
    """Lives as long as a tensor that depends on one checkpoint tensor."""

    def __init__(self, number: int) -> None:
        self.number = number


class _CheckpointTensor(Tensor):
    """A checkpoint tensor, or what was made of some, without data. ``meta`` has its shape, strides and offset."""

    meta: Tensor
    memory: _Storage
    run: LoadTrace

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def make(meta: Tensor, storage: _Storage, trace: LoadTrace) -> _CheckpointTensor:
        made: _CheckpointTensor = Tensor._make_wrapper_subclass(
            _CheckpointTensor,
            meta.shape,
            strides=meta.stride(),
            storage_offset=meta.storage_offset(),
            dtype=meta.dtype,
            device=trace.targets.device,
        )
        made.meta, made.memory, made.run = meta, storage, trace
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        # Reached from threads other than that of the trace, whose modes are not theirs.
        tensors = tree_leaves((args, kwargs))
        trace = next(tensor.run for tensor in tensors if isinstance(tensor, cls))
        return trace.dispatch(func, args, kwargs or {})


class LoadTrace:
    """One call of ``load_weights`` with some tensors of a checkpoint."""

    def __init__(self, tensors: Metadata, numbers: Sequence[int], targets: EngineTargets) -> None:
        self.targets = targets
        self.writes: list[Write] = []
        self.refused: dict[int, str] = {}
        """Checkpoint tensors with effects that are unknown, and why."""
        self.unattributed = ""
        """An effect that cannot be said to be that of some checkpoint tensors."""
        self.last = ""
        """The name last taken from the iterator."""
        self._tensors = tensors
        self._numbers = numbers
        self._created: set[int] = set()
        self._tokens: weakref.WeakSet[_Token] = weakref.WeakSet()

    def run(self, load_weights: LoadWeights) -> None:
        """Raises what ``load_weights`` raises; Untraceable, too."""
        with ExitStack() as stack:
            for register in (
                torch_module.register_module_parameter_registration_hook,
                torch_module.register_module_buffer_registration_hook,
            ):
                stack.callback(register(self._refuse_registration).remove)
            stack.enter_context(torch.no_grad())
            stack.enter_context(_Functions(self))
            stack.enter_context(_Operations(self))
            load_weights(self._yield_tensors())

    def kept(self) -> list[str]:
        """Names of checkpoint tensors that are still referenced."""
        if self._tokens:
            gc.collect()
        return [self._tensors.names[number] for number in sorted({token.number for token in self._tokens})]

    def _yield_tensors(self) -> Iterator[tuple[str, Tensor]]:
        for number in self._numbers:
            self.last, shape = self._tensors.names[number], self._tensors.shapes[number]
            meta = torch.empty(shape, dtype=self._tensors.dtypes[number], device="meta")
            token = _Token(number)
            self._tokens.add(token)
            yield self.last, _CheckpointTensor.make(meta, _Storage(Provenance.of_source(number, shape), (token,)), self)
            del token

    # ---- refusals ----

    def refuse(self, tensors: Iterable[Any], reason: str) -> Untraceable:
        for tensor in tensors:
            if isinstance(tensor, _CheckpointTensor):
                for number in tensor.memory.provenance.sources:
                    self.refused.setdefault(number, reason)
        return Untraceable(reason)

    def refuse_all(self, reason: str) -> Untraceable:
        self.unattributed = self.unattributed or reason
        return Untraceable(reason)

    def refuse_access(self, func: Any, args: Sequence[Any]) -> None:
        """Raises Untraceable if an access that is not an operation concerns a fake tensor or memory of the model."""
        name = getattr(func, "__name__", "data")
        if any(isinstance(argument, _CheckpointTensor) for argument in args):
            raise self.refuse(args, f"its memory is accessed by {name}")
        tensor = args[0]
        replaces = func is Tensor.data.__set__ and storage_of(tensor) not in self._created  # type: ignore[attr-defined]
        if replaces or storage_of(tensor) in self.targets:
            raise self.refuse_all(f"it accesses a parameter's memory with {name}")

    def _refuse_registration(self, module: Any, name: str, value: Any) -> None:
        raise self.refuse_all(f"it replaces {name} of a {type(module).__name__}")

    # ---- operations ----

    def dispatch(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        first = args[0] if args else None
        if func.overloadpacket in _VIEWS and isinstance(first, _CheckpointTensor) and not _changes_dtype(func):
            return self._wrap(func(first.meta, *args[1:], **kwargs), first.memory)
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        fakes = [tensor for tensor in tensors if isinstance(tensor, _CheckpointTensor)]
        if (fakes or self._any_target(tensors)) and func.overloadpacket not in _VIEWS and _can_decompose(func):
            # In inference mode, composite operations arrive in one piece.
            with _Operations(self):
                return func.decompose(*args, **kwargs)
        if func._schema.is_mutable:
            return self._write(func, args, kwargs, fakes)
        if not fakes:
            return self._compute_real(func, args, kwargs, tensors)
        if func.overloadpacket in _COPIES:
            return self._copy(func, args, kwargs)
        if func.overloadpacket in (_aten.cat, _aten.stack) and len(fakes) == len(tensors):
            return self._join(func, args, kwargs)
        return self._compute(func, args, kwargs, fakes)

    def _wrap(self, result: Any, storage: _Storage) -> Any:
        return tree_map_only(Tensor, lambda meta: _CheckpointTensor.make(meta, storage, self), result)

    def _derived(self, result: Any, provenance: Provenance, parents: Iterable[_CheckpointTensor]) -> Any:
        tokens = {id(token): token for parent in parents for token in parent.memory.tokens}
        return self._wrap(result, _Storage(provenance, tuple(tokens.values())))

    def _copy(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        source = args[0]
        result = self._on_meta(func, args, kwargs)
        provenance = copy_of(source.memory.provenance, Region.of(source.meta), Region.of(result))
        return self._derived(result, provenance.cast(source.dtype, result.dtype), [source])

    def _join(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensors, result = args[0], self._on_meta(func, args, kwargs)
        dim = args[1] if len(args) > 1 else kwargs.get("dim", 0)
        if func.overloadpacket is _aten.stack:
            pieces = list(result.unbind(dim))
        elif any(tensor.ndim != result.ndim for tensor in tensors):
            return self._compute(func, args, kwargs, tensors)
        else:
            pieces = list(result.split([tensor.shape[dim] for tensor in tensors], dim))
        if any(tensor.dtype != result.dtype for tensor in tensors):
            return self._compute(func, args, kwargs, tensors)
        copies = [
            (tensor.memory.provenance, Region.of(tensor.meta), Region.of(piece))
            for tensor, piece in zip(tensors, pieces, strict=True)
        ]
        return self._derived(result, joined(copies, Region.of(result)), tensors)

    def _compute(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], fakes: Sequence[_CheckpointTensor]
    ) -> Any:
        """Anything else: what it makes depends on its arguments, and is not elements of them."""
        reason = f"is changed by {func.overloadpacket.__name__}"
        try:
            result = self._on_meta(func, args, kwargs)
        except (NotImplementedError, RuntimeError) as error:
            raise self.refuse(fakes, f"its values are read by {func.overloadpacket.__name__}") from error
        if any(not isinstance(leaf, Tensor | None) for leaf in tree_leaves(result)):
            raise self.refuse(fakes, f"its values are read by {func.overloadpacket.__name__}")
        return self._derived(result, Provenance.computed([fake.memory.provenance for fake in fakes], reason), fakes)

    def _on_meta(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        args, kwargs = tree_map_only(Tensor, _meta_of, (args, kwargs))
        if kwargs.get("device") is not None:
            kwargs = {**kwargs, "device": torch.device("meta")}
        kwargs.pop("pin_memory", None)
        return func(*args, **kwargs)

    def _compute_real(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: Sequence[Tensor]) -> Any:
        known = {storage_of(tensor) for tensor in tensors}
        if func.overloadpacket not in _VIEWS | _READ_NO_VALUES and self._any_target(tensors):
            raise self.refuse_all(f"it reads a parameter's values with {func.overloadpacket.__name__}")
        result = func(*args, **kwargs)
        for made in tree_leaves(result):
            if isinstance(made, Tensor):
                self._created |= {storage_of(made)} - known
        return result

    # ---- writes ----

    def _write(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], fakes: Sequence[_CheckpointTensor]
    ) -> Any:
        packet = func.overloadpacket
        if packet is _aten._foreach_copy_:
            for target, source in zip(args[0], args[1], strict=True):
                self.dispatch(_aten.copy_.default, (target, source), {})
            return None
        written = written_tensors(func, args, kwargs)
        if len(written) != 1:
            raise (
                self.refuse(fakes, f"{packet.__name__} writes several tensors")
                if fakes
                else self.refuse_all(f"it writes several tensors with {packet.__name__}")
            )
        target = written[0]
        if not fakes and self._any_target(read_tensors(func, args, kwargs)):
            raise self.refuse_all(f"it reads a parameter's values with {packet.__name__}")
        if isinstance(target, _CheckpointTensor):
            reason = f"is changed by {packet.__name__}"
            target.memory.provenance = Provenance.computed([fake.memory.provenance for fake in fakes], reason)
            tokens = {id(token): token for fake in fakes for token in fake.memory.tokens}
            target.memory.tokens = tuple(tokens.values())
            return target
        if target.numel() == 0:
            return target
        if storage_of(target) in self.targets:
            self._write_target(func, target, args, kwargs, fakes)
            return target
        if fakes:
            raise self.refuse(fakes, f"is written by {packet.__name__} to a tensor that is not one of the targets")
        if storage_of(target) not in self._created:
            raise self.refuse_all(f"{packet.__name__} writes to a tensor that is not one of the targets")
        return func(*args, **kwargs)

    def _write_target(
        self,
        func: Any,
        target: Tensor,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        fakes: Sequence[_CheckpointTensor],
    ) -> None:
        packet = func.overloadpacket
        place = self.targets.find(target)
        if place is None:
            raise self.refuse_all(f"{packet.__name__} writes to a parameter's memory outside of the parameter")
        value = args[1] if len(args) > 1 else None
        sources = frozenset[int]().union(*(fake.memory.provenance.sources for fake in fakes))
        if not fakes:
            constant = 0 if packet is _aten.zero_ else value
            if packet in (_aten.copy_, _aten.fill_) and isinstance(value, Tensor) and value.numel() == 1:
                constant = value.item()
            if packet not in (_aten.copy_, _aten.fill_, _aten.zero_) or isinstance(constant, Tensor | None):
                raise self.refuse_all(f"{packet.__name__} writes to {place.name} what no checkpoint tensor holds")
            self.writes.append(Write(place.name, place.boxes, value=constant))
            return
        if packet is not _aten.copy_ or not isinstance(value, _CheckpointTensor):
            reason = f"is written by {packet.__name__}"
            self.writes.append(Write(place.name, place.boxes, sources=sources, reason=reason))
            return
        if not place.same_dtype:
            raise self.refuse(fakes, f"is written to {place.name} as another dtype")
        provenance = value.memory.provenance.cast(value.dtype, target.dtype)
        region = Region.of(value.meta.expand(target.shape))
        try:
            parts = tuple(provenance.copied(region, place.shape, place.strides, place.region))
            boxes = tuple((view.start, view.size) for _, view in parts)
            self.writes.append(Write(place.name, boxes, parts, sources))
        except NotViews as error:
            self.writes.append(Write(place.name, place.boxes, sources=sources, reason=str(error)))

    def _any_target(self, tensors: Iterable[Tensor]) -> bool:
        return any(not isinstance(t, _CheckpointTensor) and storage_of(t) in self.targets for t in tensors)


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, trace: LoadTrace) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._trace = trace

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._trace.dispatch(func, args, kwargs or {})


class _Functions(TorchFunctionMode):
    """Refuses what reads or replaces memory without an operation."""

    def __init__(self, trace: LoadTrace) -> None:
        super().__init__()
        self._trace = trace

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _LEAVE_TORCH:
            self._trace.refuse_access(func, args)
        return func(*args, **(kwargs or {}))


def _meta_of(tensor: Tensor) -> Tensor:
    if isinstance(tensor, _CheckpointTensor):
        return tensor.meta
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _changes_dtype(func: Any) -> bool:
    return func is _aten.view.dtype


@cache
def _can_decompose(func: Any) -> bool:
    return bool(func._can_decompose())
