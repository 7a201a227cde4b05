"""Saves of every layout case: the files have the full tensors, bit for bit."""

from __future__ import annotations

import traceback
from pathlib import Path

import pytest
import torch

import epload
from support import ranks
from support.checks import as_bytes, full_values, ties
from support.layout_cases import cases
from support.layout_loads import meta_model, none_fails, oracle


def save_cases(rank: int, world: int, folder: str) -> list[str]:
    failures = []
    for number, case in enumerate(cases(world)):
        try:
            epload.save(oracle(case), f"{folder}/{number}", max_shard_bytes=200 if number % 2 else 1 << 30)
        except Exception:
            failures.append(f"rank {rank}: {case.name}: {traceback.format_exc(limit=-3)}")
    return failures


@pytest.mark.parametrize("world", [4])
def test_every_layout(world: int, tmp_path: Path) -> None:
    none_fails(ranks.run(world, save_cases, world, str(tmp_path), limit=300))
    for number, case in enumerate(cases(world)):
        model = meta_model(case)
        expected = full_values(model)
        checkpoint = epload.Checkpoint.open(tmp_path / str(number))
        manifest = checkpoint.manifest
        names = set(manifest.names)
        tied = ties(model.state_dict(keep_vars=True))
        assert all(len(names.intersection(group)) == 1 for group in tied), f"{case.name}: tied tensors once"
        assert names | {name for group in tied for name in group} == set(expected), case.name
        for index, (name, nbytes) in enumerate(zip(manifest.names, manifest.nbytes_of(), strict=True)):
            bucket = torch.empty(nbytes, dtype=torch.uint8)
            checkpoint.fill(bucket, [epload.Piece(index, 0, 0, nbytes)])
            assert manifest.shapes[index] == tuple(expected[name].shape), (case.name, name)
            assert manifest.dtypes[index] == expected[name].dtype, (case.name, name)
            assert torch.equal(bucket, as_bytes(expected[name]).flatten()), (case.name, name)
