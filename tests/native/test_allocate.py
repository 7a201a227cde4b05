"""Memory for many tensors at once."""

from __future__ import annotations

import io
from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch
from safetensors.torch import load as load_safetensors
from safetensors.torch import save as save_safetensors
from torch import Tensor

from epload.native import ops

CPU = torch.device("cpu")
BF16 = torch.bfloat16


def allocate(shapes: Sequence[Sequence[int]], dtype: torch.dtype = BF16) -> list[Tensor]:
    like = [torch.empty(tuple(shape), device="meta") for shape in shapes]
    made = ops.allocate_like(like, dtype, CPU, 2)
    assert [tuple(tensor.shape) for tensor in made] == [tuple(shape) for shape in shapes]
    assert all(tensor.dtype == dtype and not tensor.requires_grad for tensor in made)
    return made


SHAPES = [(3, 5), (0, 4), (1,), (), (7, 1, 2), (64, 1000), (0,), (1 << 24,), (13,), (3 << 23,), (0,)]


def test_tensors_do_not_overlap() -> None:
    made = allocate(SHAPES)
    for i, tensor in enumerate(made):
        tensor.fill_(i)
    assert all(bool((tensor == i).all()) for i, tensor in enumerate(made))
    assert all(tensor.data_ptr() % 64 == 0 for tensor in made)
    spans = sorted((t.data_ptr(), t.data_ptr() + t.nbytes) for t in made if t.nbytes)
    assert all(end <= begin for (_, end), (begin, _) in pairwise(spans))


def test_each_storage_is_its_tensors_alone() -> None:
    made = allocate(SHAPES)
    assert [tensor.untyped_storage().nbytes() for tensor in made] == [tensor.nbytes for tensor in made]
    assert len({tensor.untyped_storage()._cdata for tensor in made}) == len(made)
    small = {str(i): tensor.fill_(i) for i, tensor in enumerate(made[:6])}
    assert all(torch.equal(small[name], value) for name, value in load_safetensors(save_safetensors(small)).items())
    buffer = io.BytesIO()
    torch.save(made[0], buffer)
    assert buffer.tell() < 3000
    made[0].untyped_storage().resize_(300)
    made[1].resize_(5, 4).fill_(1)
    assert bool((made[2] == 2).all()), "a storage that grows moves away"


def test_strides_are_kept() -> None:
    like = [torch.empty(4, 6, device="meta").t(), torch.empty(5, device="meta").expand(3, 5), torch.empty(9)[::2]]
    made = ops.allocate_like(like, torch.float32, CPU, 1)
    assert [tensor.stride() for tensor in made] == [tensor.stride() for tensor in like]
    assert [tensor.untyped_storage().nbytes() for tensor in made] == [96, 20, 36]


def test_what_is_not_dense_is_refused() -> None:
    sparse = torch.zeros(2, 2).to_sparse()
    with pytest.raises(ValueError, match="expected dense tensors, tensor 1 is Sparse"):
        ops.allocate_like([torch.zeros(1), sparse], BF16, CPU, 2)


def test_more_than_there_is() -> None:
    huge = [torch.empty(1 << 60, dtype=torch.uint8, device="meta")]
    with pytest.raises(RuntimeError, match="tried to allocate 1152921504606846976 bytes"):
        ops.allocate_like(huge, torch.uint8, CPU, 2)
