"""Records what an engine's ``load_weights`` does with a checkpoint: which regions of which tensors it copies where.

The engine runs its own code on tensors without data. What it does with views and copies becomes data, in the form in which a
mapping's result is; everything else remains a matter of its own ``load_weights``, and is listed as such. Nothing is written.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

import torch
from torch import Tensor

from epload.core.pieces import Metadata
from epload.core.placement import Box, box_slices
from epload.core.views import View
from epload.errors import LoadError, ModelMismatch
from epload.mapping.place import Place
from epload.recording.mutation import WriteGuard
from epload.recording.provenance import overlapping, subtract, uncovered
from epload.recording.targets import EngineTargets
from epload.recording.tracing import LoadTrace, LoadWeights, Untraceable, Write


@dataclass(frozen=True)
class Fill:
    """A box of a target that ``load_weights`` fills with a constant, such as the padding of a vocabulary."""

    target: str
    box: Box
    value: float


@dataclass(frozen=True)
class Whole:
    """Checkpoint tensors that have to go through the engine's own ``load_weights``, all of them in one call."""

    names: tuple[str, ...]
    """Names of the tensors, in the order of the checkpoint."""
    reason: str
    """Reason why they are not views or plain copies, for messages."""


@dataclass(frozen=True)
class Recording:
    """The effect of one ``load_weights``."""

    regions: tuple[tuple[Place, ...], ...]
    """Boxes of targets that each tensor of the checkpoint fills, as :func:`epload.mapping.place.place` gives them. No two
    overlap. The dtype is converted to the target's. Empty for tensors in ``whole`` and ``unused``."""
    whole: tuple[Whole, ...]
    fills: tuple[Fill, ...]
    """Constants, to be written in this order. They do not overlap ``regions``."""
    unused: tuple[str, ...]
    """Checkpoint tensors that have no effect here: another rank's experts, another stage's layers."""
    unwritten: dict[str, tuple[Box, ...]]
    """Boxes that nothing was seen to write, by target. Tensors in ``unseen`` may write them."""
    written: frozenset[str]
    """Targets that something was seen to write. Tensors in ``unseen`` may write others."""
    unseen: tuple[str, ...]
    """Tensors in ``whole`` whose writes are not known."""

    def unfilled(self, parameters: Mapping[str, int], loaded: Mapping[str, Sequence[Box]]) -> list[str]:
        """The parameters that keep other values than those of the checkpoint, in part or as a whole.

        Args:
            parameters: a number for each, by name; equal for those that are tied.
            loaded: boxes that ``load_weights`` has written by itself, by target.
        """
        known = self.written | loaded.keys()
        written = {parameters[name] for name in known if name in parameters}
        return [
            name
            for name, boxes in self.unwritten.items()
            if name in parameters
            and (name in known or parameters[name] not in written)
            and uncovered(boxes, list(dict.fromkeys(loaded.get(name, ()))))
        ]

    def fill(self, targets: Mapping[str, Tensor]) -> None:
        """Writes the constants."""
        for fill in self.fills:
            targets[fill.target].detach()[box_slices(*fill.box)].fill_(fill.value)

    def load_whole(
        self, load_weights: LoadWeights, tensors: Iterable[tuple[str, Tensor]], targets: Mapping[str, Tensor]
    ) -> dict[str, list[Box]]:
        """Calls ``load_weights`` with tensors of one or more complete groups of ``whole``; returns the boxes that it was seen to
        write, by target.

        Raises:
            LoadError: it would write where ``regions`` go. Nothing has been written there.
        """
        boxes: dict[str, list[Box]] = {}
        for places in self.regions:
            for target, view in places:
                boxes.setdefault(target, []).append((view.start, view.size))
        guard = WriteGuard(EngineTargets(targets), boxes)
        with torch.no_grad(), guard:
            load_weights(tensors)
        return guard.written


def record(load_weights: LoadWeights, tensors: Metadata, targets: Mapping[str, Tensor]) -> Recording:
    """Records a ``load_weights``, which is called several times.

    Args:
        load_weights: takes an iterable of names and full tensors. It is given tensors without data.
        tensors: the checkpoint's, in the order in which they will come.
        targets: all parameters and buffers that it may write: plain tensors, perhaps on meta. They keep their values.

    Raises:
        ModelMismatch: ``load_weights`` raised an error that has nothing to do with being recorded, or targets share memory.
        LoadError: it keeps tensors that it was given for later.
        ValueError: a target is not a dense tensor.
    """
    table = EngineTargets(targets)
    refused: dict[int, str] = {}
    while True:
        numbers = [number for number in range(len(tensors.names)) if number not in refused]
        trace = LoadTrace(tensors, numbers, table)
        problem = _run(trace, load_weights, first=not refused)
        if problem:
            return _all_whole(tensors, table, problem)
        if not trace.refused:
            break
        # What is refused for one layer is refused for the next: without this, there would be a run for each.
        reasons = {_pattern(tensors.names[number]): reason for number, reason in trace.refused.items()}
        refused |= {
            number: reasons[pattern]
            for number, name in enumerate(tensors.names)
            if (pattern := _pattern(name)) in reasons and number not in refused
        }
    resolver = _Resolver(tensors, table, trace.writes, refused)
    if problem := _check_alone(resolver, load_weights, trace):
        return _all_whole(tensors, table, problem)
    return resolver.recording()


def _run(trace: LoadTrace, load_weights: LoadWeights, first: bool) -> str:
    """Runs a trace; returns why nothing can be recorded, or an empty string."""
    problem = ""
    try:
        trace.run(load_weights)
    except Untraceable:
        pass
    except Exception as error:
        if first and not trace.refused and not trace.unattributed:
            raise ModelMismatch(
                f"load_weights raised {type(error).__name__} after it took {trace.last or 'no tensor'}, "
                f"and nothing was written: {error}"
            ) from error
        if not trace.refused:
            problem = f"it raises {type(error).__name__} without the tensors that cannot be recorded: {error}"
    finally:
        moved = trace.targets.restore()
    if kept := trace.kept():
        raise LoadError(
            f"load_weights keeps {len(kept)} of the tensors that it is given for later (the first is {kept[0]}), so that it "
            "cannot be recorded; record it outside of a layer-wise reload, or send it full tensors"
        )
    if moved:
        problem = f"it gives {moved} another memory"
    return trace.unattributed or problem


def _check_alone(resolver: _Resolver, load_weights: LoadWeights, trace: LoadTrace) -> str:
    """Checks that the tensors that go through ``load_weights`` have the same effect without the others; returns why not."""
    alone = sorted(resolver.whole - resolver.refused.keys())
    if not alone:
        return ""
    again = LoadTrace(resolver.tensors, alone, trace.targets)
    if problem := _run(again, load_weights, first=False):
        return problem
    expected, found = (
        [w for write in each.writes for w in _single(write) if w.sources & set(alone) or w in resolver.late_fills]
        for each in (trace, again)
    )
    if again.refused or found != expected:
        return f"it does something else with {resolver.tensors.names[alone[0]]} if tensors are missing"
    return ""


def _all_whole(tensors: Metadata, targets: EngineTargets, reason: str) -> Recording:
    names = tuple(tensors.names)
    whole = (Whole(names, reason),) if names else ()
    return Recording(((),) * len(names), whole, (), (), _unwritten(targets, {}), frozenset(), names)


def _pattern(name: str) -> str:
    return re.sub(r"\d+", "#", name)


class _Groups:
    """Disjoint sets of numbers."""

    def __init__(self) -> None:
        self._parent: dict[int, int] = {}

    def find(self, number: int) -> int:
        root = number
        while (parent := self._parent.setdefault(root, root)) != root:
            root = parent
        self._parent[number] = root
        return root

    def join(self, numbers: Iterable[int]) -> None:
        first, *others = numbers
        for other in others:
            self._parent[self.find(other)] = self.find(first)


class _Resolver:
    """Sorts out what the writes of one trace amount to."""

    def __init__(
        self, tensors: Metadata, targets: EngineTargets, writes: Sequence[Write], refused: Mapping[int, str]
    ) -> None:
        self.tensors = tensors
        self.refused = refused
        self.whole: set[int] = set()
        self.late_fills: list[Write] = []
        """Constants that are written over what checkpoint tensors filled."""
        self._targets = targets
        self._reasons: dict[int, str] = {}
        self._groups = _Groups()
        self._writes: dict[str, list[Write]] = {}
        for write in writes:
            self._writes.setdefault(write.target, []).extend(_single(write))
        for number, reason in refused.items():
            self._add_whole([number], reason)
        for write in writes:
            if write.sources and not write.parts and write.boxes:
                self._add_whole(write.sources, write.reason)
        for target, of_target in self._writes.items():
            self._writes[target] = of_target = list(dict.fromkeys(of_target))
            for a, b in overlapping([write.boxes[0] for write in of_target]):
                self._add_overlap(*(of_target[i] for i in sorted((a, b))))

    def _add_whole(self, sources: AbstractSet[int] | Sequence[int], reason: str) -> None:
        self._groups.join(sources)
        self.whole |= set(sources)
        for source in sources:
            self._reasons.setdefault(source, reason)

    def _add_overlap(self, first: Write, second: Write) -> None:
        if second.value is not None and not first.sources:
            return
        if second.sources and first.value is not None:
            return
        if not first.sources | second.sources:
            return
        if second.value is not None:
            self.late_fills.append(second)
        self._add_whole(first.sources | second.sources, f"{second.target} is written twice in the same place")

    def recording(self) -> Recording:
        regions: list[list[Place]] = [[] for _ in self.tensors.names]
        fills: list[Fill] = []
        interned: dict[View, View] = {}
        used = set(self.whole)
        for target, writes in self._writes.items():
            for write in writes:
                used |= write.sources
                if write.parts and not write.sources & self.whole:
                    ((number, view),) = write.parts
                    regions[number].append((target, interned.setdefault(view, view)))
            covered = [write.boxes[0] for write in writes if write.parts and not write.sources & self.whole]
            for write in writes:
                if write.value is not None:
                    fills += [Fill(target, box, write.value) for box in subtract(write.boxes[0], covered)]
        return Recording(
            tuple(map(tuple, regions)),
            self._whole_groups(),
            tuple(fills),
            tuple(name for number, name in enumerate(self.tensors.names) if number not in used),
            _unwritten(self._targets, self._writes),
            frozenset(self._writes),
            tuple(self.tensors.names[number] for number in sorted(self.refused)),
        )

    def _whole_groups(self) -> tuple[Whole, ...]:
        members: dict[int, list[int]] = {}
        for number in sorted(self.whole):
            members.setdefault(self._groups.find(number), []).append(number)
        return tuple(
            Whole(tuple(self.tensors.names[number] for number in group), self._reasons[group[0]])
            for group in members.values()
        )


def _unwritten(targets: EngineTargets, writes: Mapping[str, Sequence[Write]]) -> dict[str, tuple[Box, ...]]:
    found = {}
    for name, tensor in targets.tensors.items():
        shape = tuple(tensor.shape)
        boxes = [write.boxes[0] for write in writes.get(name, ())]
        if tensor.numel() and (left := uncovered([((0,) * len(shape), shape)], boxes)):
            found[name] = tuple(left)
    return found


def _single(write: Write) -> Iterable[Write]:
    """The write of each box."""
    if not write.parts:
        return (write._replace(boxes=(box,)) for box in write.boxes)
    return (
        write._replace(boxes=(box,), parts=(part,), sources=frozenset((part[0],)))
        for box, part in zip(write.boxes, write.parts, strict=True)
    )


__all__ = ["Fill", "Recording", "Whole", "record"]
