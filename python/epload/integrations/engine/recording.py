"""Records what an engine's ``load_weights`` does with a checkpoint: which regions of which tensors it copies where.

The engine runs its own code on tensors without data. What it does with views and copies becomes data, in the form in which a
mapping's result is; everything else remains a matter of its own ``load_weights``, and is listed as such. Nothing is written.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from epload.core.pieces import Metadata
from epload.core.placement import Box, box_slices
from epload.errors import LoadError, ModelMismatch
from epload.integrations.engine.targets import Cells, EngineTargets, WriteGuard
from epload.integrations.engine.trace import LoadTrace, LoadWeights, Write
from epload.mapping.place import Place


@dataclass(frozen=True)
class Recording:
    """The effect of one ``load_weights``."""

    regions: tuple[tuple[Place, ...], ...]
    """Boxes of targets that each tensor of the checkpoint fills, as :func:`epload.mapping.place.place` gives them. No two
    overlap. The dtype is converted to the target's. Empty for tensors in ``whole`` and for those without effect here, such as
    another rank's experts."""
    whole: dict[str, str]
    """Checkpoint tensors that have to go through the engine's own ``load_weights``, all of them in one call and in this order,
    each with the reason."""
    fills: tuple[tuple[str, Box, float], ...] = ()
    """Constants that fill boxes of targets, such as the padding of a vocabulary. They do not overlap ``regions``."""
    written: Mapping[str, Sequence[Box]] = field(default_factory=dict)
    """Boxes that traced writes cover, by target. Tensors in ``untraced`` may write others."""
    untraced: tuple[str, ...] = ()
    """Tensors in ``whole`` whose writes are not known."""

    def fill(self, targets: Mapping[str, Tensor]) -> None:
        """Writes the constants."""
        for target, box, value in self.fills:
            targets[target].detach()[box_slices(*box)].fill_(value)

    def load_whole(
        self, load_weights: LoadWeights, tensors: Iterable[tuple[str, Tensor]], targets: Mapping[str, Tensor]
    ) -> Mapping[str, Sequence[Box]]:
        """Calls ``load_weights`` with the tensors in ``whole``; returns the boxes that it was seen to write, by target.

        Raises:
            LoadError: it would write where ``regions`` go. Nothing has been written there.
        """
        boxes: dict[str, list[Box]] = defaultdict(list)
        for places in self.regions:
            for target, view in places:
                boxes[target].append((view.start, view.size))
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
    names = tensors.names
    untraced: dict[int, str] = {}
    while True:
        trace = LoadTrace(tensors, [number for number in range(len(names)) if number not in untraced], table)
        problem = _run(trace, load_weights, first=not untraced)
        if problem or not trace.refused:
            break
        # What is refused for one layer is refused for the next: without this, there would be a run for each.
        reasons = {_pattern(names[number]): reason for number, reason in trace.refused.items()}
        patterns = {number: _pattern(name) for number, name in enumerate(names) if number not in untraced}
        untraced |= {number: reasons[pattern] for number, pattern in patterns.items() if pattern in reasons}
    if untraced:  # what waits for one of them has no effect without it
        waiting = trace.pending - {number for write in trace.writes for number in write.sources}
        untraced |= dict.fromkeys(waiting, "load_weights keeps it, perhaps for one that cannot be traced")
    writes: dict[str, list[Write]] = defaultdict(list)
    for write in reversed(dict.fromkeys(reversed(trace.writes))):  # of equal ones, the last counts
        writes[write.target].append(write)
    cells = {
        name: Cells(table.tensors[name].shape, [write.box for write in some]) for name, some in writes.items()
    }
    traced = {} if problem else _find_whole(writes, cells)
    if problem := problem or _check_alone(trace, untraced, traced, load_weights):
        return Recording(((),) * len(names), dict.fromkeys(names, problem), untraced=tuple(names))
    return _summarize(names, writes, cells, traced, untraced)


def _run(trace: LoadTrace, load_weights: LoadWeights, first: bool) -> str:
    """Runs a trace; returns why nothing can be recorded, or an empty string."""
    problem = ""
    try:
        trace.run(load_weights)
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
    if alive := sorted(trace.alive()):
        raise LoadError(
            f"load_weights keeps {len(alive)} of the tensors that it is given for later (the first is "
            f"{trace.tensors.names[alive[0]]}), so that it cannot be recorded; record it outside of a layer-wise reload, or send "
            "it full tensors"
        )
    return trace.unattributed or (f"it gives {moved} another memory" if moved else problem)


def _find_whole(writes: Mapping[str, Sequence[Write]], cells: Mapping[str, Cells]) -> dict[int, str]:
    """Returns the traced tensors that have to go through ``load_weights``, by number, with the reasons."""
    whole: dict[int, str] = {}
    for target, some in writes.items():
        for write in some:
            if write.view is None:
                whole |= dict.fromkeys(write.sources - whole.keys(), write.reason)
        below: list[frozenset[int]] = [write.sources for write in some]
        for first, second in cells[target].overlaps:
            if below[first]:
                below[second] |= below[first]
                whole |= dict.fromkeys(below[second] - whole.keys(), f"{target} is written twice in the same place")
    return whole


def _check_alone(
    trace: LoadTrace, untraced: Mapping[int, str], whole: Mapping[int, str], load_weights: LoadWeights
) -> str:
    """Checks that the traced tensors that go through ``load_weights`` have the same effect without the others, constants that
    are written to the same targets included; returns why not."""
    alone = sorted(whole.keys() - untraced.keys())
    if not alone:
        return ""
    again = LoadTrace(trace.tensors, alone, trace.targets)
    if problem := _run(again, load_weights, first=False):
        return problem
    filled = {write.target for write in trace.writes if write.sources & whole.keys()}
    expected = [
        write
        for write in trace.writes
        if write.sources & whole.keys() or (write.target in filled and not write.sources)
    ]
    if again.refused or again.writes != expected:
        return f"it does something else with {trace.tensors.names[alone[0]]} if tensors are missing"
    return ""


def _summarize(
    names: Sequence[str],
    writes: Mapping[str, Sequence[Write]],
    cells: Mapping[str, Cells],
    traced: Mapping[int, str],
    untraced: Mapping[int, str],
) -> Recording:
    regions: list[list[Place]] = [[] for _ in names]
    fills: list[tuple[str, Box, float]] = []
    for target, some in writes.items():
        for i, write in enumerate(some):
            if write.value is not None:
                fills += [(target, box, write.value) for box in cells[target].boxes_of(i)]
            elif write.view is not None and (number := min(write.sources)) not in traced:
                regions[number].append((target, write.view))
    whole = {**traced, **untraced}
    return Recording(
        tuple(map(tuple, regions)),
        {names[number]: whole[number] for number in sorted(whole)},
        tuple(fills),
        {target: tuple(write.box for write in some) for target, some in writes.items()},
        tuple(names[number] for number in sorted(untraced)),
    )


def _pattern(name: str) -> str:
    return re.sub(r"\d+", "#", name)
