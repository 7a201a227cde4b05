"""Ranks whose models differ are told by name which tensors only some have, and which differ."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import epload
from support import ranks

SAME = ["a", "b", "c"]


def model_of(names: list[str], **dtypes: torch.dtype) -> nn.Module:
    model = nn.Module()
    for name in names:
        model.register_parameter(name, nn.Parameter(torch.zeros(3, dtype=dtypes.get(name))))
    return model


def load_different_models(rank: int) -> list[str]:
    """Rank 1 differs from rank 0: by one tensor at the front, by one that only it lacks, by the order, by a dtype."""
    cases = [
        (["first", *SAME], {}),
        (["a", "c"], {}),
        (["b", "a", "c"], {}),
        (SAME, {"b": torch.float64}),
        (["first", "b", "c"], {"c": torch.float64}),
    ]
    texts = []
    for names, dtypes in cases:
        model = model_of(names, **dtypes) if rank == 1 else model_of(SAME)
        with pytest.raises(epload.ManifestMismatch) as raised:
            epload.load(model, {name: torch.ones(3) for name in SAME}, readers="one", strict=False, progress=False)
        texts.append(str(raised.value))
        assert not any(parameter.any() for parameter in model.parameters())
    return texts


def test_models_are_compared_by_name() -> None:
    first, second = ranks.run(2, load_different_models)
    assert first == second
    lines = [text.split("\n")[1:] for text in first]
    float32, float64 = ("float32 [3] on mesh [] whole", "float64 [3] on mesh [] whole")
    assert lines == [
        ["  rank 1 has 'model first', which rank 0 lacks"],
        ["  rank 0 has 'model b', which rank 1 lacks"],
        ["  rank 0 has the same names in another order than rank 1: 'model a' where it has 'model b'"],
        [f"  rank 0 has 'model b: {float32}' where rank 1 has 'model b: {float64}'"],
        [
            "  rank 0 has 'model a', which rank 1 lacks",
            "  rank 1 has 'model first', which rank 0 lacks",
            f"  rank 0 has 'model c: {float32}' where rank 1 has 'model c: {float64}'",
        ],
    ]
