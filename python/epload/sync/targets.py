"""Defines the targets that a receiver fills: a model's tensors, or full tensors that an engine takes one after the other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from epload.checkpoint.manifest import Manifest
from epload.core.columns import arange
from epload.core.copy_table import CopyTable
from epload.core.views import View
from epload.errors import LoadError, ModelMismatch
from epload.mapping.mapping import Mapping, ignored_keys
from epload.mapping.place import Place, place
from epload.mapping.precision import below_fp32_warning
from epload.mapping.resolve import resolve_mapping
from epload.model.targets import Targets
from epload.native import ops
from epload.planning.shares import Share, share_of_targets, whole_share
from epload.saving.model_reader import ModelReader
from epload.sync.arrival import TensorFacts
from epload.sync.epoch import Epoch

_BATCH_BYTES = 64 << 20
"""Maximum bytes of full tensors that are made at once, unless one is larger."""
_MOST_SHOWN = 5


class Target(Protocol):
    tears_on_prepare: bool
    """True if :meth:`tensors` already changes what an engine computes with."""

    @property
    def warnings(self) -> Sequence[str]:
        """Warnings that the report of every received version has, once :meth:`share` was called."""
        ...

    def share(self, manifest: Manifest) -> Share:
        """Returns the parts of the sender's tensors that this rank needs. Raises ModelMismatch if they do not fit."""
        ...

    @property
    def devices(self) -> set[torch.device]:
        """Devices of the local tensors that the share counts, once :meth:`share` was called."""
        ...

    def tensors(self) -> list[Tensor]:
        """The local tensors that the share counts. Raises LoadError if they are not what they were."""
        ...

    def facts(self) -> list[TensorFacts]:
        """The facts of what :meth:`tensors` will return. Raises LoadError if they are not known."""
        ...

    def finish(self) -> None:
        """After a version was copied into them."""
        ...


@runtime_checkable
class TargetProvider(Protocol):
    """Something that is not a module but can be filled, such as an :class:`epload.EngineModel`."""

    def sync_target(self, strict: bool) -> Target:
        """Returns what a receiver fills. ``strict``: whether tensors that only one of the two jobs has are an error."""
        ...


class ModelTarget:
    """The parameters and persistent buffers of a model."""

    tears_on_prepare = False

    def __init__(self, model: nn.Module, mapping: Mapping | str, strict: bool) -> None:
        self._reader = ModelReader(model, filled=True)
        self._mapping = mapping
        self._strict = strict
        self._known: Targets | None = None

    @property
    def warnings(self) -> Sequence[str]:
        warning = below_fp32_warning(self._known) if self._known is not None else ""
        return [warning] if warning else []

    @property
    def devices(self) -> set[torch.device]:
        return {tensor.device for tensor in self._known.local()} if self._known is not None else set()

    def share(self, manifest: Manifest) -> Share:
        targets = self._reader.read()
        mapping = resolve_mapping(self._mapping, self._reader.model, targets.index, manifest.names)
        placed = place(mapping, manifest.names, manifest.shapes, targets.shapes)
        _check_ties(manifest.names, placed, targets)
        filled = {targets.index[name] for places in placed for name, _ in places}
        missing = [name for i, name in enumerate(targets.names) if i not in filled]
        unexpected = [name for name, places in zip(manifest.names, placed, strict=True) if not places]
        ignored = set(ignored_keys(mapping, manifest.names, missing, unexpected))
        missing = [name for name in missing if name not in ignored]
        unexpected = [name for name in unexpected if name not in ignored]
        if self._strict and (missing or unexpected):
            parts = [
                f"{len(names)} {what} ({', '.join(names[:_MOST_SHOWN])}{', ...' * (len(names) > _MOST_SHOWN)})"
                for what, names in (
                    ("tensors that only the receiver has", missing),
                    ("that only the sender has", unexpected),
                )
                if names
            ]
            raise ModelMismatch(
                f"the sender's model does not match the receiver's: {'; '.join(parts)}; pass mapping=, or strict=False",
                missing_keys=missing,
                unexpected_keys=unexpected,
            )
        self._known = targets
        return share_of_targets(manifest.shapes, manifest.dtypes, targets, placed)

    def tensors(self) -> list[Tensor]:
        targets = self._reader.read()
        if self._known is not None and not targets.matches(self._known):
            raise LoadError(
                "the receiver's model has other tensors or layouts than when it joined; make a new WeightReceiver"
            )
        return targets.local()

    def facts(self) -> list[TensorFacts]:
        return list(map(TensorFacts.of, self.tensors()))

    def finish(self) -> None:
        pass


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


class FullTensors:
    """All tensors of the sender in full, once in each node's memory."""

    tears_on_prepare = False
    warnings: ClassVar[Sequence[str]] = ()
    devices: ClassVar[set[torch.device]] = {torch.device("cpu")}

    def __init__(self) -> None:
        self._manifest: Manifest | None = None

    def share(self, manifest: Manifest) -> Share:
        self._manifest = manifest
        return whole_share(manifest.shapes, manifest.dtypes)

    def tensors(self) -> list[Tensor]:
        raise ValueError("a receiver without a target has nothing to commit to: take its tensors()")

    def facts(self) -> list[TensorFacts]:
        return list(map(TensorFacts.of, self.tensors()))

    def finish(self) -> None:
        pass

    def assemble(self, epoch: Epoch) -> Iterator[tuple[str, Tensor]]:
        """Makes the tensors out of the node's memory, some at a time, in the sender's order."""
        manifest = self._manifest
        assert manifest is not None
        tensor, bucket, rows = _rows_by_tensor(epoch)
        ends = torch.searchsorted(tensor, arange(len(manifest.names)), right=True).tolist()
        buffers = dict(epoch.staged_buckets())
        first = 0
        for batch in _batches(manifest):
            made = [torch.empty(manifest.shapes[i], dtype=manifest.dtypes[i], device="cpu") for i in batch]
            last = ends[batch[-1]]
            part, of = rows.select(slice(first, last)), bucket[first:last]
            for number in torch.unique(of).tolist():
                some = part.select(of == number)
                some.target.sub_(batch[0])
                ops.unpack(buffers[number], made, some.rows)
            first = last
            yield from zip((manifest.names[i] for i in batch), made, strict=True)


def _rows_by_tensor(epoch: Epoch) -> tuple[Tensor, Tensor, CopyTable]:
    """The copies of all buckets in the order of tensors, which they count as targets; the tensor and the bucket of each."""
    buckets = epoch.plan.buckets
    table = buckets.copies
    order = torch.argsort(table.target, stable=True)
    table = table.select(order)
    return table.target.clone(), buckets.of_rows()[order], table


def _batches(manifest: Manifest) -> Iterator[range]:
    """Consecutive tensors that are made at once."""
    first = total = 0
    for i, (shape, dtype) in enumerate(zip(manifest.shapes, manifest.dtypes, strict=True)):
        nbytes = prod(shape) * dtype.itemsize
        if i > first and total + nbytes > _BATCH_BYTES:
            yield range(first, i)
            first, total = i, 0
        total += nbytes
    if first < len(manifest.names):
        yield range(first, len(manifest.names))
