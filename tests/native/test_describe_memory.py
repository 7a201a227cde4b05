"""The description of tensors by which a reload notices that they have changed."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from epload.native import ops

BASE = torch.zeros(6, 4)
TENSORS = [
    BASE,
    BASE.t(),
    BASE[1:3, 2:],
    BASE[:0],
    torch.zeros(()),
    torch.zeros(1, 3).expand(5, 3),
    torch.zeros(2, 3, 4, dtype=torch.bfloat16),
    torch.zeros(7, device="meta"),
    torch.nn.Parameter(torch.zeros(3)),
]


def expected(tensor: Tensor, dims: int) -> list[int]:
    begin = tensor.data_ptr() if tensor.numel() else 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    end = begin + (last + 1) * tensor.element_size() if begin else 0
    padding = [-1] * (dims - tensor.ndim)
    return [begin, end, *tensor.shape, *padding, *tensor.stride(), *padding]


def test_rows() -> None:
    table = ops.describe_memory(TENSORS)
    assert table[:, [0, 1, *range(4, 10)]].tolist() == [expected(tensor, 3) for tensor in TENSORS]
    assert len({tuple(row) for row in table[:, 2:].tolist()}) == len(TENSORS)
    device, dtype = table[:, 2].tolist(), table[:, 3].tolist()
    assert [number == device[0] for number in device] == [tensor.is_cpu for tensor in TENSORS]
    assert [number == dtype[0] for number in dtype] == [tensor.dtype == torch.float32 for tensor in TENSORS]
    assert ops.describe_memory([]).shape == (0, 4)


def test_other_layouts_are_refused() -> None:
    with pytest.raises(ValueError, match="expected dense strided tensors, tensor 1 is Sparse"):
        ops.describe_memory([BASE, torch.eye(3).to_sparse()])
