"""Defines the targets that a receiver fills: a model's tensors, or full tensors that an engine takes one after the other."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from epload.checkpoint.manifest import Manifest
from epload.core.views import View
from epload.errors import LoadError, ModelMismatch
from epload.mapping.mapping import Mapping, ignored_keys, quantize_rule
from epload.mapping.place import Place, place
from epload.mapping.precision import below_fp32_warning
from epload.mapping.resolve import resolve_mapping
from epload.model.targets import Targets
from epload.native import ops
from epload.observe.render import list_keys
from epload.planning.holdings import Holdings, full_holdings, holdings_of_targets
from epload.saving.model_reader import read_targets
from epload.sync.arrival import TensorLayout, layout_of
from epload.sync.generation import Generation


class Target(ABC):
    """Defines what a receiver fills, on one rank."""

    changes_on_prepare = False
    """True if :meth:`tensors` already changes what an engine computes with."""
    devices: Collection[torch.device] = ()
    """Devices of the local tensors that the holdings count, once :meth:`holdings` was called."""
    warnings: Sequence[str] = ()
    """Warnings that the report of every received version has, once :meth:`holdings` was called."""

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


@runtime_checkable
class TargetProvider(Protocol):
    """Something that is not a module but can be filled, such as an :class:`epload.EngineModel`."""

    def sync_target(self, strict: bool) -> Target:
        """Returns what a receiver fills. ``strict``: whether tensors that only one of the two jobs has are an error."""
        ...


class ModelTarget(Target):
    """The parameters and persistent buffers of a model."""

    def __init__(self, model: nn.Module, mapping: Mapping | str, strict: bool) -> None:
        if quantize_rule(mapping) is not None:
            raise ValueError(
                "expected mapping= without Quantize on a receiver: pass it to the WeightSender, which sends fp8"
            )
        self._model = model
        self._mapping = mapping
        self._strict = strict
        self._filled: Targets | None = None

    def holdings(self, manifest: Manifest) -> Holdings:
        targets = read_targets(self._model, filled=True)
        mapping = resolve_mapping(self._mapping, self._model, targets.index, manifest.names)
        placed = place(mapping, manifest.names, manifest.shapes, targets.shapes)
        _check_ties(manifest.names, placed, targets)
        if self._strict:
            _check_names(mapping, manifest.names, placed, targets)
        self._filled = targets
        self.devices = {tensor.device for tensor in targets.local()}
        self.warnings = list(filter(None, [below_fp32_warning(targets)]))
        return holdings_of_targets(manifest.shapes, manifest.dtypes, targets, placed)

    def tensors(self) -> list[Tensor]:
        targets = read_targets(self._model, filled=True)
        if self._filled is not None and not targets.matches(self._filled):
            raise LoadError(
                "the receiver's model has other tensors or layouts than when it joined; make a new WeightReceiver"
            )
        return targets.local()


def _check_names(mapping: Mapping, names: Sequence[str], placed: Sequence[tuple[Place, ...]], targets: Targets) -> None:
    """Raises ModelMismatch if only one of the two jobs has a tensor that the mapping does not ignore."""
    filled = {targets.index[name] for places in placed for name, _ in places}
    missing = [name for i, name in enumerate(targets.names) if i not in filled]
    unexpected = [name for name, places in zip(names, placed, strict=True) if not places]
    ignored = set(ignored_keys(mapping, names, missing, unexpected))
    only = {"receiver": missing, "sender": unexpected}
    only = {side: [name for name in extra if name not in ignored] for side, extra in only.items()}
    if texts := [f"only the {side} has {list_keys(extra)}" for side, extra in only.items() if extra]:
        raise ModelMismatch(
            f"the sender's model does not match the receiver's: {'; '.join(texts)}; pass mapping=, or strict=False",
            missing_keys=only["receiver"],
            unexpected_keys=only["sender"],
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


class FullTensors(Target):
    """All tensors of the sender in full, once in each node's memory."""

    devices = (torch.device("cpu"),)

    def __init__(self) -> None:
        self._manifest = Manifest((), (), (), "")

    def holdings(self, manifest: Manifest) -> Holdings:
        self._manifest = manifest
        return full_holdings(manifest.shapes, manifest.dtypes)

    def assemble(self, generation: Generation) -> Iterator[tuple[str, Tensor]]:
        """Makes the tensors out of the node's memory, one after the other, in the sender's order."""
        manifest = self._manifest
        pieces: list[list[tuple[Tensor, Tensor]]] = [[] for _ in manifest.names]
        """Buckets and the rows of their copies, by tensor."""
        for number, bucket in generation.staged_buckets():
            table = generation.plan.buckets[number].rows
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
