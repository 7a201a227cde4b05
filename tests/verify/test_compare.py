"""Differences between the values of two checkpoints, against plain arithmetic on whole tensors."""

from __future__ import annotations

from math import inf, nan
from typing import Any

import pytest
import torch
from torch import Tensor

from epload import Checkpoint
from epload.verify import compare
from epload.verify.compare import compare_values


def difference(a: Tensor, b: Tensor, **tolerances: float) -> dict[str, Any] | None:
    pair = [Checkpoint.from_state_dict({"t": each}) for each in (a, b)]
    seen: list[int] = []
    found = list(compare_values(pair[0], pair[1], ["t"], seen.append, **tolerances))
    assert sum(seen) == a.nbytes
    return found[0] if found else None


@pytest.mark.parametrize("chunk", [1, 7, 1 << 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int32, torch.uint8])
def test_counts_and_distances(dtype: torch.dtype, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare, "_CHUNK_ELEMENTS", chunk)
    a = torch.arange(3 * 11).reshape(3, 11).to(dtype)
    b = a.clone()
    b[0, 0], b[2, 10] = 5, 24
    assert difference(a, a) is None
    found = difference(a, b)
    assert found is not None
    assert (found["differing"], found["count"], found["largest"]) == (2, 33, 8.0)
    assert found["mean"] == pytest.approx(13 / 33)


def test_dtypes_are_compared_by_value() -> None:
    a = torch.tensor([1.0, 2.0, 3.140625])
    assert difference(a, a.bfloat16()) is None
    found = difference(torch.tensor([1.001]), torch.tensor([1.001]).bfloat16())
    assert found is not None
    assert found["differing"] == 1


def test_what_is_not_finite() -> None:
    a = torch.tensor([nan, inf, -inf, nan, inf, 0.0])
    assert difference(a, a.clone()) is None
    assert difference(a, a.double()) is None  # bytes differ, values do not
    found = difference(a, torch.tensor([nan, inf, inf, 1.0, 2.0, -0.0]), rtol=0.5, atol=1.0)
    assert found is not None
    assert (found["differing"], found["largest"], found["mean"]) == (3, inf, inf)


def test_tolerances_are_those_of_isclose() -> None:
    generator = torch.Generator().manual_seed(0)
    a = torch.rand(1000, generator=generator, dtype=torch.float64)
    b = a + torch.rand(1000, generator=generator, dtype=torch.float64) * 0.1
    expected = int((~torch.isclose(a, b, rtol=0.05, atol=0.02)).sum())
    assert 0 < expected < 1000
    found = difference(a, b, rtol=0.05, atol=0.02)
    assert found is not None
    assert found["differing"] == expected


def test_integers_beyond_float64_are_compared_exactly() -> None:
    a = torch.tensor([2**60, 2**60 + 1, -1])
    found = difference(a, torch.tensor([2**60, 2**60, -1]))
    assert found is not None
    assert found["differing"] == 1
    unsigned = torch.tensor([2**60, 2**60 + 1, 2**64 - 1], dtype=torch.uint64)
    found = difference(a, unsigned)
    assert found is not None
    assert found["differing"] == 1
    assert difference(a[:2], unsigned[:2]) is None


@pytest.mark.parametrize("dtype", [torch.complex64, torch.float8_e4m3fn, torch.float8_e5m2, torch.bool])
def test_other_dtypes(dtype: torch.dtype) -> None:
    a = torch.tensor([0.0, 1.0, 0.0, 1.0]).to(dtype)
    found = difference(a, torch.tensor([0.0, 1.0, 1.0, 1.0]).to(dtype))
    assert found is not None
    assert (found["differing"], found["largest"], found["mean"]) == (1, 1.0, 0.25)
    assert difference(a, a.clone()) is None
