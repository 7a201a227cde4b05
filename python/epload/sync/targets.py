"""Defines the targets that a receiver fills: a model's tensors, or full tensors that an engine takes one after the other."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from collections.abc import Mapping as MappingOf
from dataclasses import replace
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from epload.checkpoint.manifest import Manifest
from epload.core.views import View
from epload.errors import LoadError, ModelMismatch
from epload.mapping.mapping import Mapping, ignored_keys, quantize_rule
from epload.mapping.place import Leftover, Place, destinations, place
from epload.mapping.precision import below_fp32_warning
from epload.mapping.resolve import check_mapping, resolve_mapping
from epload.mapping.wrappers import (
    active_adapter,
    adapters_in_base,
    check_same_scale,
    check_unmerged,
    names_added_by_adapters,
    unwrap,
)
from epload.model.copies import forget_casts, wait_for_copies
from epload.model.megatron import MegatronChunks, as_module
from epload.model.targets import Targets
from epload.native import ops
from epload.observe.render import list_keys
from epload.planning.holdings import Holdings, combine, full_holdings, holdings_of_targets
from epload.saving.model_reader import ModelReader
from epload.sync.arrival import TensorLayout, layout_of
from epload.sync.node_version import NodeVersion
from epload.sync.scope import MERGED, Scope, check_not_merged, merged_bases


class Target(ABC):
    """Defines what a receiver fills, on one rank."""

    changes_on_prepare = False
    """True if :meth:`tensors` already changes what an engine computes with."""
    devices: Collection[torch.device] = ()
    """Devices of the local tensors that the holdings count, once :meth:`holdings` was called."""
    warnings: Sequence[str] = ()
    """Warnings that the report of every received version has, once :meth:`holdings` was called."""
    scope = Scope()
    """The part of the sender's model that versions are; set before :meth:`holdings` is called."""
    unexpected: Collection[str] = ()
    """The sender's tensors that the target has no place for, where that is an error unless another target has one."""
    memory: Sequence[object] = ()
    """The places of the local tensors' elements, once :meth:`holdings` was called; empty if they are not known."""

    @abstractmethod
    def holdings(self, manifest: Manifest) -> Holdings:
        """Returns the parts of the sender's tensors that this rank needs. Raises ModelMismatch if they do not fit."""

    def tensors(self) -> list[Tensor]:
        """Returns the local tensors that the holdings count. Raises LoadError if they are not what they were."""
        raise ValueError("a receiver without a target has nothing to commit to: take its tensors()")

    def layouts(self) -> list[TensorLayout]:
        """Returns those of what :meth:`tensors` will return. Raises LoadError if they are not known."""
        return list(map(layout_of, self.tensors()))

    def finish(self) -> None:
        """Called after a version was copied into the tensors."""
        return

    def fill(self, copy: Callable[[MappingOf[int, Tensor]], None]) -> None:
        """Fills the local tensors, and finishes. ``copy`` copies a version that has arrived into some of them, by number."""
        copy(dict(enumerate(self.tensors())))
        self.finish()


@runtime_checkable
class TargetProvider(Protocol):
    """Something that is not a module but can be filled, such as an :class:`epload.EngineModel`."""

    def sync_target(self, strict: bool) -> Target:
        """Returns what a receiver fills. ``strict``: whether tensors that only one of the two jobs has are an error."""
        ...


class ModelTarget(Target):
    """The parameters and persistent buffers of a model, or those of its active adapter."""

    def __init__(self, model: nn.Module, mapping: Mapping | str, strict: bool, alone: bool = True) -> None:
        """``alone``: whether tensors that the model has no place for are an error, if ``strict``, or in :attr:`unexpected`."""
        if quantize_rule(mapping) is not None:
            raise ValueError("expected mapping= without Quantize on a receiver: pass it to the WeightSender, which sends fp8")
        if isinstance(as_module(model), MegatronChunks):
            raise ValueError("expected a model that is not Megatron-Core's, which sends versions and does not receive them")
        self._model = model
        self._reader = ModelReader(model, filled=True, own_names=isinstance(mapping, Mapping))
        self._base: nn.Module = unwrap(model, ())[0]
        self._mapping = mapping
        self._strict = strict
        self._alone = alone
        self._filled: Targets | None = None
        """Without its tensors, which the model may replace."""
        self._adapter = ""
        """The adapter that is filled."""

    def holdings(self, manifest: Manifest) -> Holdings:
        targets = self._reader.read()
        mapping = resolve_mapping(self._mapping, self._model, targets.index, manifest.names)
        targets.check_filled(self._mapping, mapping.only)
        self._check_scope(mapping)
        if self.scope.left_out:
            mapping = replace(mapping, required=False)  # its rules may be for tensors that are not sent
        leftovers: list[Leftover] = []
        placed = place(mapping, manifest.names, manifest.shapes, targets.shapes, leftovers=leftovers)
        added: frozenset[str] = frozenset()
        if self.scope.adapter is None and (added := names_added_by_adapters(self._model, targets.index, computes=False)):
            placed = [tuple(place for place in places if place[0] not in added) for places in placed]
        _check_ties(manifest.names, placed, targets)
        self._check_names(mapping, manifest.names, placed, targets, added, [name for name, _ in leftovers])
        self._filled = replace(targets, tensors=[])
        if self.scope.adapter is not None:
            self._adapter = active_adapter(self._model)
        self.devices = {tensor.device for tensor in targets.local()}
        self.memory = [(t.data_ptr(), t.shape, t.stride()) if t.numel() else object() for t in targets.local()]
        self.warnings = list(filter(None, [below_fp32_warning(targets)]))
        return holdings_of_targets(manifest.shapes, targets, placed)

    def tensors(self) -> list[Tensor]:
        targets = self._reader.read()
        if self._filled is not None and not targets.matches(self._filled):
            raise LoadError("the receiver's model has other tensors or layouts than when it joined; make a new WeightReceiver")
        self._check_mixing()
        wait_for_copies(targets.tensors)
        return targets.local()

    def finish(self) -> None:
        forget_casts(self._model)
        if self.scope.adapters == MERGED:
            merged_bases.add(self._base)
        elif self.scope.adapter is None and not self.scope.left_out:
            merged_bases.discard(self._base)

    def _check_scope(self, mapping: Mapping) -> None:
        """Raises ModelMismatch if the model cannot take the part of the sender's model that is sent."""
        self._check_mixing()
        if self.scope.adapter is None:
            return
        if not mapping.only and self._mapping == "auto":
            raise ModelMismatch(
                "the sender sends an adapter alone, for which the receiver's model has no place; pass a PeftModel with that "
                "adapter, or take its tensors from WeightReceiver(None, address)"
            )
        check_same_scale(self._model, self.scope.adapter, "the sender's", "the receiver's")

    def _check_mixing(self) -> None:
        """Raises ModelMismatch if adapters that are merged, in either job, would mix with adapters apart."""
        if self._reader.has_adapters:
            check_unmerged(self._model)
        if self.scope.adapter is not None:
            check_not_merged(self._base)
            if self._adapter not in ("", active := active_adapter(self._model)):
                raise ModelMismatch(
                    f"versions fill the adapter {self._adapter!r}, which was active when the receiver joined, and {active!r} is "
                    f"active now; call set_adapter({self._adapter!r}) before a version is received or committed"
                )
        elif self.scope.adapters == MERGED and (path := adapters_in_base(self._model)[1]):
            raise ModelMismatch(
                f"the sender's base weights have an adapter merged into them, and {path} of the receiver's model would apply one "
                "to them again; disable its adapters (model.base_model.disable_adapter_layers()), or have the sender unmerge and "
                "disable its own"
            )

    def _check_names(
        self,
        mapping: Mapping,
        names: Sequence[str],
        placed: Sequence[tuple[Place, ...]],
        targets: Targets,
        added: Collection[str],
        leftovers: Sequence[str],
    ) -> None:
        """Raises ModelMismatch, if strict, if only one of the two jobs has a tensor that the mapping does not ignore, and that
        belongs to the part of the model that is sent.

        Args:
            added: the model's tensors that are not of its base model.
            leftovers: what conversions make and the model lacks.
        """
        if not self._strict:
            return
        filled = {targets.index[name] for places in placed for name, _ in places}
        if self.scope.left_out:
            of_all = destinations(mapping, [*names, *self.scope.left_out], targets.shapes)
            filled |= {targets.index[name] for left_out in self.scope.left_out for name in of_all[left_out]}
        if self.scope.adapters:
            filled |= {targets.index[name] for name in added}
        missing = targets.missing(mapping.only, filled)
        unexpected = [name for name, places in zip(names, placed, strict=True) if not places]
        unexpected += leftovers if self._alone else ()  # else perhaps of another model
        ignored = set(ignored_keys(mapping, names, missing, unexpected))
        missing, unexpected = ([name for name in extra if name not in ignored] for extra in (missing, unexpected))
        if not self._alone:
            self.unexpected, unexpected = unexpected, []
        _check_extra(missing, unexpected)


def _check_extra(missing: Sequence[str], unexpected: Sequence[str]) -> None:
    """Raises ModelMismatch if only the receiver has a tensor (``missing``), or only the sender (``unexpected``)."""
    only = {"receiver": missing, "sender": unexpected}
    if texts := [f"only the {side} has {list_keys(extra)}" for side, extra in only.items() if extra]:
        raise ModelMismatch(
            f"the sender's model does not match the receiver's: {'; '.join(texts)}; pass mapping=, or strict=False",
            missing_keys=missing,
            unexpected_keys=unexpected,
        )


def _check_ties(names: Sequence[str], placed: Sequence[tuple[Place, ...]], targets: Targets) -> None:
    """Raises ModelMismatch if two of the sender's tensors fill the same elements, because the receiver's weights are tied."""
    if len(targets.index) == len(targets.names):
        return
    filled: dict[tuple[int, View], int] = {}
    for i, places in enumerate(placed):
        for name, view in places:
            other = filled.setdefault((targets.index[name], view), i)
            if other != i:
                raise ModelMismatch(
                    f"the sender has {names[other]} and {names[i]}, whose values may differ, but they are one tensor of the "
                    f"receiver's model, {targets.names[targets.index[name]]}; tie them in the sender's model, or untie them in "
                    "the receiver's (tie_word_embeddings=False in its config)"
                )


def _check_shared(names: Sequence[str], holdings: Holdings, memory: Sequence[object], filled: dict[object, set[int]]) -> None:
    """Adds what fills the memory of one of several targets. Raises ModelMismatch if other tensors fill some of it elsewhere."""
    own = defaultdict[object, set[int]](set)
    for number, local_tensors in enumerate(holdings.targets if memory else ()):
        for local in local_tensors:
            own[memory[local]].add(number)
    for address, numbers in own.items():
        if other := numbers ^ filled.setdefault(address, numbers):
            raise ModelMismatch(
                f"the sender has {list_keys(sorted(names[i] for i in other | numbers))}, whose values may differ, but a model "
                "and its draft have one tensor for them; tie them in the sender's model, or give the draft its own"
            )


class CombinedTarget(Target):
    """Several targets that are filled together: an engine's model and its draft, both or neither."""

    def __init__(self, targets: Sequence[Target]) -> None:
        self._targets = targets
        self.changes_on_prepare = any(target.changes_on_prepare for target in targets)
        self._counts: list[int] = []
        """Local tensors of each target that its holdings count."""

    def holdings(self, manifest: Manifest) -> Holdings:
        combined, self._counts = full_holdings((), ()), []
        filled: dict[object, set[int]] = {}
        """The sender's tensors that fill some memory."""
        for i, target in enumerate(self._targets):
            target.scope = self.scope
            holdings = target.holdings(manifest)
            combined = combine(combined, holdings, sum(self._counts)) if i else holdings
            _check_shared(manifest.names, holdings, target.memory, filled)
            self._counts.append(1 + max((number for numbers in holdings.targets for number in numbers), default=-1))
        self.devices = {device for target in self._targets for device in target.devices}
        self.warnings = [warning for target in self._targets for warning in target.warnings]
        first, *others = (target.unexpected for target in self._targets)
        _check_extra([], [name for name in first if all(name in of_target for of_target in others)])
        return combined

    def tensors(self) -> list[Tensor]:
        return self._concatenate([target.tensors() for target in self._targets])

    def layouts(self) -> list[TensorLayout]:
        return self._concatenate([target.layouts() for target in self._targets])

    def finish(self) -> None:
        for target in self._targets:
            target.finish()

    def _concatenate(self, columns: Sequence[list[Any]]) -> list[Any]:
        return [value for column, count in zip(columns, self._counts, strict=True) for value in column[:count]]


def make_target(
    target: nn.Module | TargetProvider | Sequence[nn.Module | TargetProvider] | None,
    mapping: Mapping | str,
    strict: bool,
) -> Target:
    """Returns the target that a receiver was given. Raises TypeError, ValueError: it is none of those, or an option is wrong."""
    check_mapping(mapping)
    if not isinstance(strict, bool):
        raise TypeError(f"expected strict to be a bool, got {strict!r}")
    if target is None:
        return FullTensors()
    targets: list[Any] = list(target) if isinstance(target, list | tuple) else [target]
    if not targets:
        raise TypeError("expected a model, an EngineModel, a list of these, or None to receive into, got an empty list")
    for part in targets:
        if not isinstance(part, nn.Module | TargetProvider):
            raise TypeError(f"expected a model, an EngineModel, a list of these, or None to receive into, got {part!r}")
    alone = len(targets) == 1
    parts = [
        part.sync_target(strict) if isinstance(part, TargetProvider) else ModelTarget(part, mapping, strict, alone)
        for part in targets
    ]
    return parts[0] if alone else CombinedTarget(parts)


class FullTensors(Target):
    """All tensors of the sender in full, once in each node's memory."""

    devices = (torch.device("cpu"),)

    def __init__(self) -> None:
        self._manifest = Manifest((), (), (), "")

    def holdings(self, manifest: Manifest) -> Holdings:
        self._manifest = manifest
        return full_holdings(manifest.shapes, manifest.dtypes)

    def assemble(self, version: NodeVersion) -> Iterator[tuple[str, Tensor]]:
        """Makes the tensors out of the node's memory, one after the other, in the sender's order."""
        manifest = self._manifest
        pieces: list[list[tuple[Tensor, Tensor]]] = [[] for _ in manifest.names]
        """Buckets and the rows of their copies, by tensor."""
        for number, bucket in version.buckets.items():
            table = version.plan.buckets[number].rows
            rows = table.rows[table.target.argsort(stable=True)]
            targets, counts = torch.unique_consecutive(rows[:, 0], return_counts=True)
            rows[:, 0] = 0
            for target, of_target in zip(targets.tolist(), torch.split(rows, counts.tolist()), strict=True):
                pieces[target].append((bucket, of_target))
        for name, shape, dtype, of_tensor in zip(manifest.names, manifest.shapes, manifest.dtypes, pieces, strict=True):
            tensor = torch.empty(shape, dtype=dtype, device="cpu")
            for bucket, rows in of_tensor:
                ops.unpack(bucket, [tensor], rows)
            yield name, tensor
