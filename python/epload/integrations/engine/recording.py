"""Records what an engine's ``load_weights`` does with a checkpoint: which regions of which tensors it copies where.

The engine runs its own code on tensors without data. What it does with views and copies becomes data, in the form in which a
mapping's result is; everything else remains a matter of its own ``load_weights``, and is listed as such. Nothing is written.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from epload.core.default_device import callers_default_device, on_cpu
from epload.core.pieces import Metadata
from epload.core.placement import Box, box_slices
from epload.core.views import View
from epload.errors import LoadError, ModelMismatch
from epload.integrations.engine.targets import Cells, EngineTargets
from epload.integrations.engine.trace import LoadTrace, LoadWeights, Write
from epload.mapping.place import Place


@dataclass(frozen=True)
class Recording:
    """The effect of one ``load_weights``."""

    regions: tuple[tuple[Place, ...], ...]
    """Boxes of targets that each tensor of the checkpoint fills, as :func:`epload.mapping.place.place` gives them. No two
    overlap. The dtype is converted to the target's. Empty for tensors in ``passed_through`` and for those without effect
    here, such as another rank's experts."""
    passed_through: dict[str, str]
    """Checkpoint tensors that have to go through the engine's own ``load_weights``, all of them in one call and in this order,
    each with the reason."""
    constants: tuple[tuple[str, Box, float], ...] = ()
    """Constants that fill boxes of targets, such as the padding of a vocabulary. They do not overlap ``regions``."""
    written: Mapping[str, Sequence[Box]] | None = None
    """Boxes that ``load_weights`` writes, by target. None if it cannot be traced: then ``passed_through`` has all tensors."""

    computed: frozenset[str] = frozenset()
    """Targets that tensors in ``passed_through`` fill, also in part."""
    inputs: Mapping[str, Any] = field(default_factory=dict)
    """Values of the integer targets that ``load_weights`` reads, such as a map of experts, for which alone this is its effect."""

    def changed_input(self, targets: Mapping[str, Tensor]) -> str | None:
        """Returns a target in ``inputs`` that has other values now, None if there is none."""
        inputs = self.inputs.items()
        return next((name for name, values in inputs if name not in targets or targets[name].tolist() != values), None)

    def fill_constants(self, targets: Mapping[str, Tensor]) -> None:
        """Writes the constants of these targets."""
        for target, box, value in self.constants:
            if target in targets:
                targets[target].detach()[box_slices(*box)].fill_(value)


@on_cpu
def record(load_weights: LoadWeights, tensors: Metadata, targets: Mapping[str, Tensor]) -> Recording:
    """Records a ``load_weights``, which is called once or twice.

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
    trace = LoadTrace(tensors, range(len(tensors.names)), table)
    _run(trace, load_weights)
    written = _by_target(trace.writes, table)
    passed_through = _find_passed_through(written)
    if passed_through and not trace.problem:
        alone = LoadTrace(tensors, sorted(passed_through), table)
        _run(alone, load_weights, alone=True)
        trace.problem = alone.problem or _find_difference(trace.writes, alone.writes, passed_through, written)
    if trace.problem:
        return Recording(((),) * len(tensors.names), dict.fromkeys(tensors.names, trace.problem))
    regions: list[list[Place]] = [[] for _ in tensors.names]
    constants: list[tuple[str, Box, float]] = []
    views: dict[object, View] = {}
    """Equal views of equal tensors are one object, which planning relies on."""
    for target, (writes, cells) in written.items():
        for i, write in enumerate(writes):
            if write.value is not None:
                constants += [(target, box, write.value) for box in cells.boxes_of(i)]
            elif write.view is not None and (number := min(write.sources)) not in passed_through:
                view = views.setdefault((tensors.shapes[number], write.view), write.view)
                regions[number].append((target, view))
    return Recording(
        tuple(map(tuple, regions)),
        {tensors.names[number]: passed_through[number] for number in sorted(passed_through)},
        tuple(constants),
        {target: [write.box for write in writes] for target, (writes, _) in written.items()},
        frozenset(write.target for write in trace.writes if write.sources & passed_through.keys()),
        {name: table.tensors[name].tolist() for name in sorted(trace.inputs)},
    )


_Written = Mapping[str, tuple[Sequence[Write], Cells]]
"""The writes to each target, and the grid of their boxes."""


def _by_target(writes: Sequence[Write], targets: EngineTargets) -> _Written:
    by_target: dict[str, list[Write]] = defaultdict(list)
    for write in reversed(dict.fromkeys(reversed(writes))):  # of equal ones, the last counts
        by_target[write.target].append(write)
    return {
        target: (some, Cells(targets.tensors[target].shape, [write.box for write in some])) for target, some in by_target.items()
    }


def _run(trace: LoadTrace, load_weights: LoadWeights, alone: bool = False) -> None:
    """Runs a trace. ``alone``: whether an error only means that ``load_weights`` needs the tensors that are missing."""
    try:
        with callers_default_device():
            trace.run(load_weights)
    except Exception as error:
        text = f"load_weights raised {type(error).__name__} after it took {trace.last or 'no tensor'}"
        if not trace.problem and not alone:
            raise ModelMismatch(f"{text}, and nothing was written: {error}") from error
        trace.problem = trace.problem or f"{text}: {error}"
    if alive := trace.alive():
        raise LoadError(
            f"load_weights keeps {len(alive)} of the tensors that it is given for later (the first is {alive[0]}), so that it "
            "cannot be recorded; record it outside of a layer-wise reload, or send it full tensors"
        )


def _find_passed_through(written: _Written) -> dict[int, str]:
    """Returns the tensors that have to go through ``load_weights``, by number, with the reasons."""
    passed_through: dict[int, str] = {}
    for target, (writes, cells) in written.items():
        for write in writes:
            if write.view is None:
                passed_through |= dict.fromkeys(write.sources - passed_through.keys(), write.reason)
        below = [write.sources for write in writes]
        for first, second in cells.overlaps:
            if below[first]:
                below[second] |= below[first]
                passed_through |= dict.fromkeys(
                    below[second] - passed_through.keys(), f"{target} is written twice in the same place"
                )
    return passed_through


def _find_difference(
    writes: Sequence[Write], alone: Sequence[Write], passed_through: Mapping[int, str], written: _Written
) -> str:
    """Returns why ``load_weights`` cannot be called with the tensors in ``passed_through`` alone, after all others were copied.

    Constants that it writes to the same targets belong to them.

    Args:
        writes, alone: with all tensors, and with those alone.
    """
    affected = {write.target for write in writes if write.sources & passed_through.keys()}
    for target in affected:
        of_target, cells = written[target]
        for first, second in cells.overlaps:
            if of_target[first].value is not None and not of_target[second].sources & passed_through.keys():
                return f"{target} is first filled by a constant, then by several tensors"
    expected = [
        write for write in writes if write.sources & passed_through.keys() or (write.target in affected and not write.sources)
    ]
    return "" if alone == expected else "it does something else if some tensors are missing"
