"""A skeleton of a model: stand-ins for its modules on which initializers run without touching the model.

A stand-in has the class and the attributes of its module, but its tensors are on meta, except the ones to be
initialized, which are full tensors on the CPU. So an initializer cannot overwrite a loaded weight, whatever it does,
and touches no DTensor: no collective is issued, and DTensor's random-number state is neither used nor changed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.utils.parametrize import ParametrizationList

from epload.model.poison import is_poisoned

_INITIALIZED = "_is_hf_initialized"
"""The attribute with which transformers marks tensors and modules that its initializers must leave alone."""


def class_before_fsdp(cls: type) -> type:
    """The class of a module before ``fully_shard`` replaced it by a subclass of its own."""
    return next(base for base in cls.__mro__ if not issubclass(base, FSDPModule))


class Skeleton:
    """Stand-ins for a model's modules, created on first access. One per module, so that identity is preserved."""

    def __init__(self, full: Mapping[int, Tensor], tied: Set[tuple[int, str]]) -> None:
        """
        Args:
            full: the poisoned full tensors to be initialized, by the id of the model's own tensor.
            tied: tensors not to be initialized where they are, by the id of the owning module and the name there, because they
                are tied to others that are.
        """
        self._full = full
        self._tied = tied
        self._stand_ins: dict[int, nn.Module] = {}
        """Stand-ins, by the id of the original."""
        self._originals: dict[int, tuple[nn.Module, dict[str, Any]]] = {}
        """Originals, by the id of the stand-in, each with the attributes that the stand-in started with."""
        self._tensors: dict[int, Tensor] = {}
        self._meta_tensors: dict[tuple[Any, ...], Tensor] = {}

    def module(self, original: nn.Module) -> nn.Module:
        """The stand-in for a module. A stand-in is its own."""
        if id(original) in self._originals or isinstance(original, torch.jit.ScriptModule):
            return original
        stand_in = self._stand_ins.get(id(original))
        if stand_in is None:
            stand_in = self._stand_ins[id(original)] = object.__new__(class_before_fsdp(type(original)))
            attributes = {name: value for name, value in original.__dict__.items() if name != _INITIALIZED}
            attributes["_modules"] = _Children(self, original._modules)
            for kind in ("_parameters", "_buffers"):
                owned = getattr(original, kind).items()
                attributes[kind] = {n: t if t is None else self._owned_tensor(original, n, t) for n, t in owned}
            stand_in.__dict__.update(attributes)
            self._originals[id(stand_in)] = original, attributes
            for name, value in attributes.items():
                if name not in ("_modules", "_parameters", "_buffers"):
                    attributes[name] = stand_in.__dict__[name] = self._with_stand_ins(value)
        return stand_in

    def computed(self) -> dict[int, Tensor]:
        """The tensors that were initialized, in place or by assigning another object, by the id of the model's own tensor."""
        found: dict[int, Tensor] = {}
        for stand_in in list(self._stand_ins.values()):
            original, _ = self._originals[id(stand_in)]
            for before, after in ((original._parameters, stand_in._parameters), (original._buffers, stand_in._buffers)):
                for name, tensor in before.items():
                    value = after.get(name)
                    skip = tensor is None or id(tensor) not in self._full or id(tensor) in found
                    if not skip and value is not None and not value.is_meta and not is_poisoned(value):
                        found[id(tensor)] = value.detach()
        return found

    def changed_attributes(self) -> list[tuple[nn.Module, str, Any]]:
        """Returns what initializers set on modules, except parameters, buffers and children: original module, name, value."""
        found = []
        for stand_in in self._stand_ins.values():
            original, before = self._originals[id(stand_in)]
            for name, value in stand_in.__dict__.items():
                if value is not before.get(name, self) and name != _INITIALIZED and not _contains_modules(value):
                    found.append((original, name, value))
        return found

    def _with_stand_ins(self, value: Any) -> Any:
        """An attribute value with its modules replaced by their stand-ins, also those in a list, a tuple or a dict."""
        if isinstance(value, nn.Module):
            return self.module(value)
        if type(value) in (list, tuple) and any(isinstance(item, nn.Module) for item in value):
            return type(value)(map(self._with_stand_ins, value))
        if type(value) is dict and any(isinstance(item, nn.Module) for item in value.values()):
            return {key: self._with_stand_ins(item) for key, item in value.items()}
        return value

    def _owned_tensor(self, module: nn.Module, name: str, original: Tensor) -> Tensor:
        if (id(module), name) in self._tied:
            return self._on_meta(original)
        siblings = module.parameters(recurse=False) if isinstance(module, ParametrizationList) else ()
        if id(original) in self._full or not any(id(tensor) in self._full for tensor in siblings):
            return self._tensor(original)
        # Reading one tensor of a parametrization computes with all of them.
        zeros = torch.zeros(original.shape, dtype=original.dtype)
        setattr(zeros, _INITIALIZED, True)
        return nn.Parameter(zeros, requires_grad=False) if isinstance(original, nn.Parameter) else zeros

    def _tensor(self, original: Tensor) -> Tensor:
        stand_in = self._tensors.get(id(original))
        if stand_in is None:
            stand_in = self._tensors[id(original)] = self._create_tensor(original)
        return stand_in

    def _create_tensor(self, original: Tensor) -> Tensor:
        is_parameter = isinstance(original, nn.Parameter)
        full = self._full.get(id(original))
        if full is not None:
            return nn.Parameter(full, requires_grad=False) if is_parameter else full
        if is_parameter or original.is_meta or isinstance(original, DTensor):
            return self._on_meta(original)
        clone = original.detach().cpu().clone()  # a buffer, from which others may be computed
        setattr(clone, _INITIALIZED, True)
        return clone

    def _on_meta(self, original: Tensor) -> Tensor:
        """A stand-in on meta. It cannot be written to, so that tensors of the same shape share one."""
        is_parameter = isinstance(original, nn.Parameter)
        key = (is_parameter, original.shape, original.dtype)
        if key not in self._meta_tensors:
            meta = torch.empty(original.shape, dtype=original.dtype, device="meta")
            self._meta_tensors[key] = nn.Parameter(meta, requires_grad=False) if is_parameter else meta
            setattr(self._meta_tensors[key], _INITIALIZED, True)
        return self._meta_tensors[key]


class _Children(dict[str, Any]):
    """The ``_modules`` of a stand-in: stand-ins for the children, created on first access."""

    def __init__(self, skeleton: Skeleton, children: Mapping[str, nn.Module | None]) -> None:
        super().__init__(children)
        self._skeleton = skeleton

    def __getitem__(self, name: str) -> nn.Module | None:
        child = super().__getitem__(name)
        return None if child is None else self._skeleton.module(child)

    def get(self, name: str, default: Any = None) -> Any:
        return self[name] if name in self else default  # noqa: SIM401  (that would be this method)

    def values(self) -> Any:
        return [self[name] for name in self]

    def items(self) -> Any:
        return [(name, self[name]) for name in self]


def _contains_modules(value: Any) -> bool:
    items: Iterable[Any] = (
        value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else (value,)
    )
    return any(isinstance(item, nn.Module) for item in items)
