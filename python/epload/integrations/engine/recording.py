"""Records what an engine's ``load_weights`` does with a checkpoint: which regions of which tensors it copies where.

The engine runs its own code on tensors without data. What it does with views and copies becomes data, in the form in which a
mapping's result is; everything else remains a matter of its own ``load_weights``, and is listed as such. Nothing is written.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from epload.core.pieces import Metadata
from epload.core.placement import Box, box_slices
from epload.errors import LoadError, ModelMismatch
from epload.integrations.engine.boxes import overlapping, subtract
from epload.integrations.engine.targets import EngineTargets, WriteGuard, whole_box
from epload.integrations.engine.trace import LoadTrace, LoadWeights, Untraceable, Write
from epload.mapping.place import Place


@dataclass(frozen=True)
class Recording:
    """The effect of one ``load_weights``."""

    regions: tuple[tuple[Place, ...], ...]
    """Boxes of targets that each tensor of the checkpoint fills, as :func:`epload.mapping.place.place` gives them. No two
    overlap. The dtype is converted to the target's. Empty for tensors in ``whole`` and ``unused``."""
    whole: dict[str, str]
    """Checkpoint tensors that have to go through the engine's own ``load_weights``, all of them in one call and in this order,
    each with the reason."""
    fills: tuple[tuple[str, Box, float], ...]
    """Constants that fill boxes of targets, such as the padding of a vocabulary. They do not overlap ``regions``, and are to be
    written in this order."""
    unused: tuple[str, ...]
    """Checkpoint tensors that have no effect here: another rank's experts, another stage's layers."""
    unwritten: dict[str, tuple[Box, ...]]
    """Boxes that no traced write covers, by target. Tensors in ``untraced`` may write them."""
    written: frozenset[str]
    """Targets that have traced writes. Tensors in ``untraced`` may write others."""
    untraced: tuple[str, ...]
    """Tensors in ``whole`` whose writes are not known."""

    def unfilled(self, parameters: Mapping[str, int], loaded: Mapping[str, Sequence[Box]]) -> list[str]:
        """Returns the parameters that keep other values than those of the checkpoint, in part or as a whole.

        Args:
            parameters: a number for each, by name; equal for those that are tied.
            loaded: boxes that ``load_weights`` has written by itself, by target.
        """
        targets = self.written | loaded.keys()
        written = {parameters[name] for name in targets if name in parameters}
        return [
            name
            for name, boxes in self.unwritten.items()
            if name in parameters
            and (name in targets or parameters[name] not in written)
            and subtract(boxes, list(dict.fromkeys(loaded.get(name, ()))))
        ]

    def fill(self, targets: Mapping[str, Tensor]) -> None:
        """Writes the constants."""
        for target, box, value in self.fills:
            targets[target].detach()[box_slices(*box)].fill_(value)

    def load_whole(
        self, load_weights: LoadWeights, tensors: Iterable[tuple[str, Tensor]], targets: Mapping[str, Tensor]
    ) -> dict[str, list[Box]]:
        """Calls ``load_weights`` with the tensors in ``whole``; returns the boxes that it was seen to write, by target.

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
    numbers = range(len(tensors.names))
    untraced: dict[int, str] = {}
    while True:
        trace = LoadTrace(tensors, [number for number in numbers if number not in untraced], table)
        if problem := _run(trace, load_weights, first=not untraced):
            return _summarize(tensors, table, {}, dict.fromkeys(numbers, problem), numbers)
        if not trace.refused:
            break
        # What is refused for one layer is refused for the next: without this, there would be a run for each.
        reasons = {_pattern(tensors.names[number]): reason for number, reason in trace.refused.items()}
        untraced |= {
            number: reasons[pattern]
            for number, name in enumerate(tensors.names)
            if (pattern := _pattern(name)) in reasons and number not in untraced
        }
    writes: dict[str, list[Write]] = {}
    for write in reversed(dict.fromkeys(reversed(trace.writes))):  # of equal ones, the last counts
        writes.setdefault(write.target, []).append(write)
    whole, late_fills = _find_whole(writes, untraced)
    if problem := _check_alone(trace, sorted(whole.keys() - untraced.keys()), late_fills, load_weights):
        return _summarize(tensors, table, {}, dict.fromkeys(numbers, problem), numbers)
    return _summarize(tensors, table, writes, whole, untraced)


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
    if referenced := trace.referenced():
        raise LoadError(
            f"load_weights keeps {len(referenced)} of the tensors that it is given for later (the first is {referenced[0]}), so "
            "that it cannot be recorded; record it outside of a layer-wise reload, or send it full tensors"
        )
    if moved:
        problem = f"it gives {moved} another memory"
    return trace.unattributed or problem


def _find_whole(
    writes: Mapping[str, Sequence[Write]], untraced: Mapping[int, str]
) -> tuple[dict[int, str], set[Write]]:
    """Returns the numbers of the tensors that have to go through ``load_weights``, with the reasons, and the constants that are
    written over what checkpoint tensors filled."""
    whole, late_fills = dict(untraced), set()
    for target, target_writes in writes.items():
        reasons = [(number, write.reason) for write in target_writes if write.view is None for number in write.sources]
        for pair in overlapping([write.box for write in target_writes]):
            first, second = (target_writes[i] for i in sorted(pair))
            if first.sources:
                late_fills |= {second} if not second.sources else set()
                sources = first.sources | second.sources
                reasons += [(number, f"{target} is written twice in the same place") for number in sources]
        for number, reason in reasons:
            whole.setdefault(number, reason)
    return whole, late_fills


def _check_alone(trace: LoadTrace, alone: Sequence[int], late_fills: set[Write], load_weights: LoadWeights) -> str:
    """Checks that the tensors that go through ``load_weights`` have the same effect without the others; returns why not."""
    if not alone:
        return ""
    numbers = frozenset(alone)
    again = LoadTrace(trace.tensors, alone, trace.targets)
    if problem := _run(again, load_weights, first=False):
        return problem
    expected, actual = (
        [write for write in run.writes if write.sources & numbers or write in late_fills] for run in (trace, again)
    )
    if again.refused or actual != expected:
        return f"it does something else with {trace.tensors.names[alone[0]]} if tensors are missing"
    return ""


def _summarize(
    tensors: Metadata,
    targets: EngineTargets,
    writes: Mapping[str, Sequence[Write]],
    whole: Mapping[int, str],
    untraced: Iterable[int],
) -> Recording:
    regions: list[list[Place]] = [[] for _ in tensors.names]
    fills: list[tuple[str, Box, float]] = []
    used = set(whole)
    for target, target_writes in writes.items():
        covered = []
        for write in target_writes:
            used |= write.sources
            if write.view is not None and (number := min(write.sources)) not in whole:
                regions[number].append((target, write.view))
                covered.append(write.box)
        for write in target_writes:
            if write.value is not None:
                fills += [(target, box, write.value) for box in subtract([write.box], covered)]
    unwritten = {}
    for name, tensor in targets.tensors.items():
        boxes = [write.box for write in writes.get(name, ())]
        if tensor.numel() and (left := subtract([whole_box(tensor)], boxes)):
            unwritten[name] = tuple(left)
    return Recording(
        tuple(map(tuple, regions)),
        {tensors.names[number]: whole[number] for number in sorted(whole)},
        tuple(fills),
        tuple(name for number, name in enumerate(tensors.names) if number not in used),
        unwritten,
        frozenset(writes),
        tuple(tensors.names[number] for number in sorted(untraced)),
    )


def _pattern(name: str) -> str:
    return re.sub(r"\d+", "#", name)
