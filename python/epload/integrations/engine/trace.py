"""Runs an engine's ``load_weights`` on tensors without data, and lists what it would write where.

Such a tensor has an ``origin``: a view of the checkpoint tensor whose elements are its own. An operation that makes a view of the
tensor makes the same view of its origin, and a copy has the origin of what is copied. A tensor that is anything else, computed
or joined from several, has none.
"""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.modules import module as torch_module
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from epload.core import dtypes
from epload.core.pieces import Metadata
from epload.core.placement import Box
from epload.core.views import View
from epload.integrations.engine.targets import EngineTargets
from epload.model.memory import storage_of

LoadWeights = Callable[[Iterable[tuple[str, Tensor]]], Any]
_aten = torch.ops.aten
_VIEWS = {
    _aten.alias, _aten.as_strided, _aten.detach, _aten.diagonal, _aten.expand, _aten.permute, _aten.select, _aten.slice,
    _aten.split, _aten.split_with_sizes, _aten.squeeze, _aten.t, _aten.transpose, _aten.unbind, _aten.unfold, _aten.unsqueeze,
    _aten.view, _aten._reshape_alias, _aten._unsafe_view, _aten.lift_fresh,
}  # fmt: skip
"""Operations whose results are regions of their first argument's memory and, in its dtype, have the same values."""
_COPIES = {_aten.clone, _aten._to_copy}
_READ_NO_VALUES = {
    _aten.empty_like, _aten.zeros_like, _aten.ones_like, _aten.full_like, _aten.new_empty, _aten.new_zeros, _aten.new_ones,
    _aten.new_full, _aten.new_empty_strided,
}  # fmt: skip
_LEAVE_TORCH = {
    torch.tensor, torch.as_tensor, torch.asarray,
    Tensor.numpy, Tensor.tolist, Tensor.data_ptr, Tensor.__array__, Tensor.__dlpack__, Tensor.data.__set__,  # type: ignore[attr-defined]
}  # fmt: skip
"""Functions that read or replace a tensor's memory without an operation."""


class Write(NamedTuple):
    """The write to one box of a target."""

    target: str
    box: Box
    sources: frozenset[int] = frozenset()
    """Numbers of the checkpoint tensors that the values depend on."""
    view: View | None = None
    """The region of the only source that is copied to the box. None if the values are computed or constant."""
    value: float | None = None
    """The constant that fills the box, if there is no source."""
    reason: str = ""
    """Why there is no ``view``."""


class _Provenance(NamedTuple):
    """Describes what a fake tensor is derived from."""

    sources: frozenset[int]
    """Numbers of the checkpoint tensors that it depends on."""
    view: Tensor | None = None
    """A view of the checkpoint tensor, on meta and of the same shape, with the elements that the fake tensor has. Identical with
    its ``meta`` if it is that view. None if there is no such view."""
    reason: str = ""
    """Why there is none."""
    exact: bool = True
    """True if its dtype holds every value of the checkpoint tensor's dtype."""


class _FakeTensor(Tensor):
    """A checkpoint tensor, or one derived from some, without data."""

    meta: Tensor
    """Has its shape, strides and offset."""
    provenance: _Provenance
    load_trace: LoadTrace

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        # Reached from threads other than that of the trace, whose modes do not hold there.
        trace = next(leaf.load_trace for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, cls))
        return trace.__torch_dispatch__(func, types, args, kwargs)


class LoadTrace(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """One call of ``load_weights`` with some tensors of a checkpoint."""

    def __init__(self, tensors: Metadata, numbers: Sequence[int], targets: EngineTargets) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.writes: list[Write] = []
        self.problem = ""
        """Why the call cannot be traced; empty if it can."""
        self.last = ""
        """The name last taken from the iterator."""
        self.inputs: set[str] = set()
        """Integer targets whose values the call reads, such as a map of experts."""
        self._tensors = tensors
        self._numbers = numbers
        self._targets = targets
        self._created: set[int] = set()
        """Storages created during the call, which it may write."""
        self._fakes: weakref.WeakSet[_FakeTensor] = weakref.WeakSet()

    def run(self, load_weights: LoadWeights) -> None:
        """Raises what ``load_weights`` raises, and RuntimeError where it does what cannot be traced."""
        self._thread = threading.get_ident()
        with ExitStack() as stack:
            for register in (
                torch_module.register_module_parameter_registration_hook,
                torch_module.register_module_buffer_registration_hook,
            ):
                stack.callback(register(self._reject_registration).remove)
            stack.enter_context(torch.no_grad())
            stack.enter_context(_Functions(self))
            stack.enter_context(self)
            load_weights(self._yield_tensors())

    def alive(self) -> list[str]:
        """Returns the names of the checkpoint tensors on which tensors depend that still exist."""
        if self._fakes:
            gc.collect()
        return [self._tensors.names[i] for i in sorted(_sources_of(self._fakes))]

    def reject(self, reason: str) -> RuntimeError:
        self.problem = self.problem or reason
        return RuntimeError(reason)

    def _reject_registration(self, module: Any, name: str, value: Any) -> None:
        if threading.get_ident() == self._thread or isinstance(value, _FakeTensor):  # other threads may run other modules
            raise self.reject(f"it replaces {name} of a {type(module).__name__}")

    def check_access(self, func: Any, tensor: Tensor) -> None:
        """Raises RuntimeError if an access that is not an operation concerns a fake tensor or memory of the model."""
        name, is_fake = getattr(func, "__name__", "data"), isinstance(tensor, _FakeTensor)
        replaces = name == "__set__" and not is_fake and storage_of(tensor) not in self._created
        if is_fake or replaces or self._targets.share_storage(tensor):
            raise self.reject(f"it accesses the memory of a tensor with {name}")

    def _yield_tensors(self) -> Iterator[tuple[str, Tensor]]:
        for number in self._numbers:
            self.last = self._tensors.names[number]
            meta = torch.empty(self._tensors.shapes[number], dtype=self._tensors.dtypes[number], device="meta")
            yield self.last, self._fake(meta, _Provenance(frozenset((number,)), meta))

    def _fake(self, meta: Tensor, provenance: _Provenance) -> _FakeTensor:
        fake: _FakeTensor = Tensor._make_wrapper_subclass(
            _FakeTensor, meta.shape, strides=meta.stride(), storage_offset=meta.storage_offset(), dtype=meta.dtype,
            device=self._targets.device,
        )  # fmt: skip
        fake.meta, fake.provenance, fake.load_trace = meta, provenance, self
        self._fakes.add(fake)
        return fake

    # ---- operations ----

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        packet, kwargs = func.overloadpacket, kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        fakes = [tensor for tensor in tensors if isinstance(tensor, _FakeTensor)]
        touches = bool(fakes) or any(map(self._targets.share_storage, tensors))
        if touches and packet not in _VIEWS and func._can_decompose():
            with self:  # in inference mode, composite operations arrive in one piece
                return func.decompose(*args, **kwargs)
        if func._schema.is_mutable:
            return self._write(func, args, kwargs, tensors)
        if fakes and fakes[0] is args[0] and any(result.alias_info is not None for result in func._schema.returns):
            return self._view(func, fakes[0], args[1:], kwargs)
        if fakes:
            return self._derive(func, args, kwargs, fakes)
        if touches and packet not in _VIEWS | _READ_NO_VALUES and (read := self._read_values(packet.__name__, tensors)):
            return self._derive(func, args, kwargs, read)
        result = func(*args, **kwargs)
        storages = {storage_of(leaf) for leaf in tree_leaves(result) if isinstance(leaf, Tensor)}
        self._created |= storages - set(map(storage_of, tensors))
        return result

    def _read_values(self, name: str, tensors: Sequence[Tensor]) -> list[_FakeTensor]:
        """Returns a fake tensor for each target that has been written and is read. Notes integer targets whose values are read.
        Raises RuntimeError for others."""
        fakes, reason = list[_FakeTensor](), f"is read again with {name}"
        for tensor in filter(self._targets.share_storage, tensors):
            target, is_inexact = self._targets.containing(tensor), tensor.is_floating_point() or tensor.is_complex()
            sources = frozenset[int]().union(*(write.sources for write in self.writes if write.target == target))
            if sources:
                fakes.append(self._fake(_meta_of(tensor), _Provenance(sources, reason=reason)))
            elif target is None or is_inexact or tensor.is_meta or any(write.target == target for write in self.writes):
                raise self.reject(f"it reads a parameter's values with {name}")
            else:
                self.inputs.add(target)
        return fakes

    def _view(self, func: Any, fake: _FakeTensor, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        packet, (_, view, reason, _) = func.overloadpacket, fake.provenance
        if packet is _aten._reshape_alias:
            func, args = _aten.view.default, args[:1]
        metas, views = func(fake.meta, *args, **kwargs), None
        if packet in _VIEWS and func is not _aten.view.dtype:
            if view is fake.meta:
                views = metas
            elif view is not None and packet is not _aten.as_strided:
                with suppress(RuntimeError):  # the elements may not be a view of the checkpoint tensor
                    views = func(view, *args, **kwargs)
        provenance = fake.provenance._replace(reason=reason or f"is rearranged by {packet.__name__}")
        if isinstance(metas, Tensor):
            return self._fake(metas, provenance._replace(view=views))
        pairs = zip(metas, views or [None] * len(metas), strict=True)
        return [self._fake(meta, provenance._replace(view=view)) for meta, view in pairs]

    def _derive(self, func: Any, args: Any, kwargs: Any, fakes: Sequence[_FakeTensor]) -> Any:
        """Returns new fake tensors: a copy of another, or what is computed from several."""
        name = func.overloadpacket.__name__
        args, kwargs = tree_map_only(Tensor, _meta_of, (args, kwargs))
        if kwargs.get("device") is not None:
            kwargs = {**kwargs, "device": torch.device("meta")}
            kwargs.pop("pin_memory", None)
        try:
            result = func(*args, **kwargs)
        except (NotImplementedError, RuntimeError) as error:
            raise self.reject(f"values are read by {name}") from error
        if any(not isinstance(leaf, Tensor | None) for leaf in tree_leaves(result)):
            raise self.reject(f"values are read by {name}")
        if func.overloadpacket in _COPIES:
            return self._fake(result, _cast(fakes[0], result.dtype))
        reason = next((fake.provenance.reason for fake in fakes if fake.provenance.view is None), "")
        provenance = _Provenance(_sources_of(fakes), reason=reason or f"is changed by {name}")
        return tree_map_only(Tensor, lambda meta: self._fake(meta, provenance), result)

    def _write(self, func: Any, args: Any, kwargs: Any, tensors: Sequence[Tensor]) -> Any:
        name, arguments = func.overloadpacket.__name__, func._schema.arguments
        if func.overloadpacket is _aten._foreach_copy_:
            for pair in zip(args[0], args[1], strict=True):
                self.__torch_dispatch__(_aten.copy_.default, (), pair)
            return None
        changed = [argument for argument in arguments if argument.alias_info and argument.alias_info.is_write]
        target, others = tensors[0], tensors[1:]
        fakes = [tensor for tensor in others if isinstance(tensor, _FakeTensor)]
        if changed != arguments[:1] or target is not args[0] or any(map(self._targets.share_storage, others)):
            raise self.reject(f"{name} writes several tensors, or reads a parameter's values")
        if target.numel() == 0:
            return target
        if isinstance(target, _FakeTensor):
            own, resized = target.provenance.sources, torch.Tag.inplace_view in func.tags or func.overloadpacket is _aten.resize_
            if resized or any(fake is not target and not fake.provenance.sources.isdisjoint(own) for fake in self._fakes):
                raise self.reject(f"a tensor that it is given, or a copy, is changed by {name} while there are others of it")
            target.provenance = _Provenance(_sources_of([target, *fakes]), reason=f"is changed by {name}")
            return target
        if self._targets.share_storage(target):
            self._write_target(func, target, args[1] if len(args) > 1 else None, fakes)
            return target
        if fakes or storage_of(target) not in self._created:
            raise self.reject(f"{name} writes to a tensor that is not one of the targets")
        return func(*args, **kwargs)

    def _write_target(self, func: Any, target: Tensor, value: Any, fakes: Sequence[_FakeTensor]) -> None:
        name, located = func.overloadpacket.__name__, self._targets.locate(target)
        if located is None:
            raise self.reject(f"{name} writes to memory outside of a parameter, in another format, or in too many boxes")
        place, boxes = located
        if place in self.inputs:
            raise self.reject(f"it reads and writes {place}")
        constant, sources, reason = None, _sources_of(fakes), f"is written by {name}"
        if not fakes:
            constant = _constant(func, value)
            if constant is None:
                raise self.reject(f"{name} writes to {place} what no checkpoint tensor holds")
        elif func.overloadpacket in (_aten.copy_, _aten.fill_) and value is fakes[0]:
            _, view, reason, _ = _cast(fakes[0], target.dtype)
            if view is not None and (views := self._views_of(target, view)):
                self.writes += [Write(place, (view.start, view.size), sources, view) for view in views]
                return
            reason = reason or "an element is used several times, or in too many boxes"
        self.writes += [Write(place, (box.start, box.size), sources, None, constant, reason) for box in boxes]

    def _views_of(self, target: Tensor, view: Tensor) -> list[View]:
        """Returns the regions of a checkpoint tensor that a copy of its view puts into a target; empty if there are none."""
        view, extent = view.expand(target.shape), 0
        for stride, size in sorted((s, n) for n, s in zip(view.shape, view.stride(), strict=True) if n > 1):
            if stride <= extent:  # a plan's views have strides that exceed the extent of all inner dims
                return []
            extent += (size - 1) * stride
        located = self._targets.locate(target, view)
        return located[1] if located is not None else []


class _Functions(TorchFunctionMode):
    """Sees functions that read or replace memory without an operation."""

    def __init__(self, trace: LoadTrace) -> None:
        super().__init__()
        self._trace = trace

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.item and isinstance(args[0], _FakeTensor):
            return args[0].reshape(())  # in place of the number, which may be written into a parameter
        for leaf in tree_leaves(args) if func in _LEAVE_TORCH else ():
            if isinstance(leaf, Tensor):
                self._trace.check_access(func, leaf)
        return func(*args, **(kwargs or {}))


def _meta_of(tensor: Tensor) -> Tensor:
    if isinstance(tensor, _FakeTensor):
        return tensor.meta
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _sources_of(fakes: Iterable[_FakeTensor]) -> frozenset[int]:
    return frozenset[int]().union(*(fake.provenance.sources for fake in fakes))


def _cast(fake: _FakeTensor, dtype: torch.dtype) -> _Provenance:
    """Returns the provenance of a copy in another dtype.

    Casts one after the other are one cast only if none but the last rounds, and epload's own copies cast between wide floats
    alone.
    """
    provenance = fake.provenance
    if provenance.view is None:
        return provenance
    if fake.dtype == dtype or (provenance.exact and dtypes.converts(fake.dtype, dtype)):
        exact = provenance.exact and torch.promote_types(fake.dtype, dtype) == dtype
        return provenance._replace(reason="", exact=exact)
    rounded = "" if provenance.exact else " after rounding"
    reason = f"converts {dtypes.name(fake.dtype)} to {dtypes.name(dtype)}{rounded}"
    return provenance._replace(view=None, reason=reason, exact=False)


def _constant(func: Any, value: Any) -> float | None:
    """Returns the number that an operation writes to every element, None if it writes anything else."""
    if func.overloadpacket is _aten.zero_:
        return 0
    if func.overloadpacket not in (_aten.copy_, _aten.fill_):
        return None
    if isinstance(value, Tensor):
        return value.item() if value.numel() == 1 else None
    return value  # type: ignore[no-any-return]
