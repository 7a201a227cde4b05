"""Which places are loaded: what the first name fills, with each tensor's own places; and which dtypes are converted."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from epload import Manifest, ModelMismatch
from epload.core import dtypes
from epload.core.views import View
from epload.mapping.place import Place
from epload.model.targets import Targets
from epload.planning.selection import check_dtypes, select

VIEWS = [View((at,), (2,), 0, (1,)) for at in range(3)]
TARGETS = 4
NAMES = [f"target.{number}" for number in range(TARGETS)]
TIED = [f"tied.{number}" for number in range(TARGETS)]

Placed = list[tuple[Place, ...]]
places = st.lists(st.tuples(st.sampled_from(NAMES + TIED), st.sampled_from(VIEWS)), max_size=3).map(tuple)


def targets_of(types: list[torch.dtype]) -> Targets:
    index = {name: number for names in (NAMES, TIED) for number, name in enumerate(names)}
    return replace(Targets(), names=[*NAMES], dtypes=types, index=index)


def manifest_of(types: list[torch.dtype]) -> Manifest:
    return Manifest(tuple(f"tensor.{i}" for i in range(len(types))), ((2,),) * len(types), tuple(types), "a test")


def of_bfloat16(placed: Placed) -> tuple[Manifest, Targets]:
    return manifest_of([torch.bfloat16] * len(placed)), targets_of([torch.bfloat16] * TARGETS)


@given(st.lists(places, max_size=8), st.sets(st.integers(0, 7)))
def test_the_first_name_of_a_parameter_fills_it(placed: Placed, wanted: set[int]) -> None:
    manifest, targets = of_bfloat16(placed)
    first_name: dict[int, str] = {}
    for name, _ in (place for some in placed for place in some):
        first_name.setdefault(targets.index[name], name)
    kept = [[(n, view) for n, view in some if first_name[targets.index[n]] == n] for some in placed]
    loaded = {(first_name[targets.index[n]], view) for some in kept for n, view in some}
    left_out = [(n, view) for some in placed for n, view in some if first_name[targets.index[n]] != n]
    if any((first_name[targets.index[n]], view) not in loaded for n, view in left_out):
        with pytest.raises(ModelMismatch, match="divided in different ways"):
            select(manifest, targets, placed, wanted)
        return

    chosen, tied, twins, unplaced = select(manifest, targets, placed, wanted)
    tensors = [i for i, some in enumerate(kept) if some or i in wanted]
    assert chosen.tensor.tolist() == tensors
    of_tensor = [slice(*ends) for ends in pairwise(chosen.first.tolist())]
    views = [chosen.views[number] for number in chosen.view.tolist()]
    found = [list(zip(chosen.target[some].tolist(), views[some], strict=True)) for some in of_tensor]
    assert found == [[(targets.index[name], view) for name, view in kept[i]] for i in tensors]
    assert len({*map(id, chosen.views)}) == len(chosen.views)
    assert tied == tuple(f"tensor.{i}" for i, some in enumerate(placed) if some and i not in tensors)
    assert unplaced == [i for i, some in enumerate(placed) if not some]
    source = {(name, view): i for i, some in enumerate(kept) for name, view in some}
    expected = {
        (source[first_name[targets.index[n]], view], i, (first_name[targets.index[n]], n))
        for i, some in enumerate(placed)
        for n, view in some
        if first_name[targets.index[n]] != n
    }
    expected = {each for each in expected if each[0] != each[1]}
    assert {(twin.kept, twin.left_out, twin.names) for twin in twins} == expected
    assert {twin.dtype for twin in twins} <= {torch.bfloat16}


TYPES = [torch.bfloat16, torch.float32, torch.int8, torch.bool, torch.float8_e4m3fn]


@given(
    st.lists(places, max_size=6),
    st.lists(st.sampled_from(TYPES), min_size=6, max_size=6),
    st.lists(st.sampled_from(TYPES), min_size=TARGETS, max_size=TARGETS),
    st.sets(st.integers(0, TARGETS - 1)),
)
def test_tensors_whose_dtype_is_converted_are_counted(
    placed: Placed, types: list[torch.dtype], wanted: list[torch.dtype], scaled: set[int]
) -> None:
    placed = [tuple((name.replace("tied", "target"), view) for name, view in some) for some in placed]
    manifest, targets = manifest_of(types[: len(placed)]), targets_of(wanted)
    pairs = [(i, targets.index[name]) for i, some in enumerate(placed) for name, _ in some]
    casts = {i for i, target in pairs if types[i] is not wanted[target]}
    refused = [
        (i, target)
        for i, target in pairs
        if i in casts and target not in scaled and not dtypes.converts(types[i], wanted[target])
    ]
    chosen = select(manifest, targets, placed, set()).chosen
    if not refused:
        assert check_dtypes(manifest, targets, chosen, scaled) == len(casts)
        return
    tensor, target = refused[0]
    with pytest.raises(ModelMismatch, match=rf"^tensor\.{tensor} is .* which the model's target\.{target} of "):
        check_dtypes(manifest, targets, chosen, scaled)
