"""The README's recipe against ``from_pretrained`` in one process, for families of transformers: names, dtypes, values, buffers,
logits, and a backward. ``make test`` runs four of them on two ranks, ``make test-frameworks`` all, on two and four."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

import epload
from support import families, ranks
from support.checks import full_tensor
from support.findings import differing
from support.recordings import tensors_of

ALL = os.environ.get("EPLOAD_ALL_FAMILIES") == "1"
CASES = [(name, world) for name in (families.FAMILIES if ALL else families.EVERY_TIME) for world in ((2, 4) if ALL else (2,))]


def expected_of(name: str, folder: Path) -> dict[str, Any]:
    """Returns what one process holds and computes."""
    family = families.FAMILIES[name]
    model = family.auto_class.from_pretrained(folder).eval()
    with torch.no_grad():
        logits = model(**family.inputs).logits
    return {"tensors": tensors_of(model), "keys": list(model.state_dict()), "logits": logits}


def run(rank: int, name: str, folder: str) -> list[str]:
    family = families.FAMILIES[name]
    expected = torch.load(f"{folder}/expected.pt")
    with torch.device("meta"):
        model = family.auto_class.from_config(AutoConfig.from_pretrained(folder)).eval()
    families.shard(model, family.own_groups)
    report = epload.load(model, folder, progress=False, timeout=60)
    problems = list(report.warnings)
    if list(model.state_dict()) != expected["keys"]:
        problems.append(f"names: {list(model.state_dict())}")
    problems += differing(tensors_of(model), expected["tensors"])
    logits = model(**family.inputs).logits
    try:  # equal weights: what is left is the order of additions, which depends on how memory is aligned
        torch.testing.assert_close(logits, expected["logits"], rtol=0.016, atol=1e-4)
    except AssertionError as error:
        problems.append(f"logits: {error}")
    logits.float().square().sum().backward()
    if not any(parameter.grad is not None and full_tensor(parameter.grad).any() for parameter in model.parameters()):
        problems.append("no gradient")
    return problems


@pytest.mark.parametrize(("name", "world"), CASES)
def test_the_recipe_gives_what_from_pretrained_holds(name: str, world: int, tmp_path: Path) -> None:
    family = families.FAMILIES[name]
    families.save(tmp_path, family.make, family.dtype, family.block)
    torch.save(expected_of(name, tmp_path), tmp_path / "expected.pt")
    assert ranks.run(world, run, name, str(tmp_path)) == [[]] * world
