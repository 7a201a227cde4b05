"""Saves of every layout case, whole and as changes of a base: the files have the full tensors, bit for bit."""

from __future__ import annotations

import traceback
from pathlib import Path

import torch
from safetensors.torch import save_file

import epload
from support import ranks
from support.checkpoints import assert_same, read_all
from support.checks import as_bytes, full_values, ties
from support.layout_cases import cases
from support.layout_loads import meta_model, none_fails, oracle


def save_cases(rank: int, folder: str) -> list[str]:
    failures = []
    for number, case in enumerate(cases(4)):
        try:
            model = oracle(case)
            epload.save(model, f"{folder}/{number}", max_shard_bytes=200 if number % 2 else 1 << 30)
            epload.save(model, f"{folder}/changes-{number}", base=f"{folder}/base-{number}")
        except Exception:
            failures.append(f"rank {rank}: {case.name}: {traceback.format_exc(limit=-3)}")
    return failures


def changed(tensor: torch.Tensor, step: int) -> torch.Tensor:
    """A copy in which every so many bytes one bit differs."""
    raw = as_bytes(tensor).clone()
    raw[::step] ^= 1
    return raw.view(tensor.dtype).reshape(tensor.shape)


def test_every_layout(tmp_path: Path) -> None:
    """Some bytes of each tensor differ in the bases; some tensors are missing, and others have another shape."""
    for number, case in enumerate(cases(4)):
        state = full_values(meta_model(case))
        old = {name: changed(tensor, 7 + number) for name, tensor in list(state.items())[number % 2 :]}
        if number % 3 == 0:
            old = {name: tensor.reshape(-1) if i % 2 else tensor for i, (name, tensor) in enumerate(old.items())}
        (tmp_path / f"base-{number}").mkdir()
        save_file({"gone": torch.ones(3), **old}, tmp_path / f"base-{number}" / "model.safetensors")
    none_fails(ranks.run(4, save_cases, str(tmp_path), limit=300))
    for number, case in enumerate(cases(4)):
        model = meta_model(case)
        expected = full_values(model)
        found = read_all(epload.Checkpoint.open(tmp_path / str(number)))
        tied = ties(model.state_dict(keep_vars=True))
        assert all(len(found.keys() & {*group}) == 1 for group in tied), f"{case.name}: tied tensors once"
        assert found.keys() | {name for group in tied for name in group} == expected.keys(), case.name
        assert_same(found, {name: expected[name] for name in found})
        assert_same(read_all(epload.Checkpoint.open(tmp_path / f"changes-{number}")), found)
