"""Ops that allocate and describe tensors; all ops by hostile arguments; the native code without Python."""

from __future__ import annotations

import io
import subprocess
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import load as load_safetensors
from safetensors.torch import save as save_safetensors
from torch import Tensor

from campaigns import hostile_ops
from epload.core import dtypes
from epload.native import ops
from support import fakedev, ranks
from support.accelerator import DEVICE
from support.failures import must_raise
from support.fakedev import build
from support.on_ranks import on_ranks

CPU = torch.device("cpu")
BF16 = torch.bfloat16


def allocate(shapes: Sequence[Sequence[int]], dtype: torch.dtype = BF16) -> list[Tensor]:
    like = [torch.empty(tuple(shape), device="meta") for shape in shapes]
    made = ops.allocate_like(like, dtype, CPU, 2)
    assert [tuple(tensor.shape) for tensor in made] == [tuple(shape) for shape in shapes]
    assert all(tensor.dtype == dtype and not tensor.requires_grad for tensor in made)
    return made


ALLOCATED = [(3, 5), (0, 4), (1,), (), (7, 1, 2), (64, 1000), (0,), (1 << 24,), (13,), (3 << 23,), (0,)]


def test_tensors_do_not_overlap() -> None:
    made = allocate(ALLOCATED)
    for i, tensor in enumerate(made):
        tensor.fill_(i)
    assert all(bool((tensor == i).all()) for i, tensor in enumerate(made))
    assert all(tensor.data_ptr() % 64 == 0 for tensor in made)
    spans = sorted((t.data_ptr(), t.data_ptr() + t.nbytes) for t in made if t.nbytes)
    assert all(end <= begin for (_, end), (begin, _) in pairwise(spans))


def test_each_storage_is_its_tensors_alone() -> None:
    made = allocate(ALLOCATED)
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


def test_strides_are_kept_and_what_is_not_dense_or_too_large_is_refused() -> None:
    like = [torch.empty(4, 6, device="meta").t(), torch.empty(5, device="meta").expand(3, 5), torch.empty(9)[::2]]
    made = ops.allocate_like(like, torch.float32, CPU, 1)
    assert [tensor.stride() for tensor in made] == [tensor.stride() for tensor in like]
    assert [tensor.untyped_storage().nbytes() for tensor in made] == [96, 20, 36]
    tensors, huge = [torch.zeros(1), torch.zeros(2, 2).to_sparse()], torch.empty(1 << 60, device="meta")
    must_raise(ValueError, "expected dense tensors, tensor 1 is Sparse", ops.allocate_like, tensors, BF16, CPU, 2)
    must_raise(ValueError, "expected dense strided tensors, tensor 1 is Sparse", ops.describe_memory, tensors)
    text = f"tried to allocate {1 << 60} bytes"
    must_raise(RuntimeError, text, ops.allocate_like, [huge], torch.uint8, CPU, 2)


BASE = torch.zeros(6, 4)
TENSORS = [
    BASE, BASE.t(), BASE[1:3, 2:], BASE[:0], torch.zeros(()), torch.zeros(1, 3).expand(5, 3), torch.zeros(2, 3, 4, dtype=BF16),
    torch.zeros(7, device="meta"), torch.nn.Parameter(torch.zeros(3)),
]  # fmt: skip


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


def test_every_op_is_covered_and_tables_of_dtypes_are_equal() -> None:
    names = {schema.name.partition("::")[2] for schema in torch._C._jit_get_all_schemas() if "epload::" in schema.name}
    assert set(hostile_ops.CALLS) == names
    assert ops.dtypes() == {dtypes.name(dtype): dtypes.code(dtype) for dtype in dtypes.TABLE}


HERE = Path(__file__).parent / "cpp"


def test_the_kept_corpus_and_random_inputs() -> None:
    program = build.program([HERE / "test_native.cpp", HERE / "cases.cpp"])
    done = subprocess.run([program, HERE / "corpus"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    kept = [len(list((HERE / "corpus" / case).iterdir())) for case in ("copy_table", "planner", "changes", "pickles")]
    assert min(kept) > 0
    assert done.stdout.startswith(f"{sum(kept)} inputs of the corpus")


LIMIT = 300.0
"""Seconds."""


@pytest.mark.usefixtures("fake_device")
@pytest.mark.parametrize("op", sorted({*hostile_ops.CALLS} - {"dtypes"}))  # which takes none
def test_no_argument_ends_the_process(op: str) -> None:
    status, output = ranks.run_alone(hostile_ops.main, op, limit=LIMIT)
    lines = output.splitlines()
    assert status == 0, f"ended with {status} after:\n" + "\n".join(lines[-12:])
    calls, refused = map(int, lines[-1].split())
    assert calls >= (7 if op == "abort_hccl" else 10)  # which has one argument
    assert 0 < refused <= calls


@pytest.mark.usefixtures("fake_device")
@on_ranks(1, setup=fakedev.setup, limit=60)
def test_freed_memory_is_poisoned(rank: int) -> None:
    """Memory given back is not what it was, for a stream that still reads it; nor is fresh memory zero."""
    second = torch.Stream(DEVICE)
    x = torch.ones(1000, device=DEVICE)
    y, z = torch.zeros(1000, device=DEVICE), torch.zeros(1000, device=DEVICE)
    torch.accelerator.synchronize()
    with fakedev.holding(second):
        with second:
            y.copy_(x)
        del x
        torch.accelerator.current_stream(DEVICE).synchronize()
    assert not bool((y == 1).any())
    x = torch.ones(1000, device=DEVICE)
    torch.accelerator.synchronize()
    with fakedev.holding(second):
        with second:
            z.copy_(x)
        x.record_stream(second)
        del x
        again = torch.ones(1000, device=DEVICE)
    second.synchronize()
    assert bool((z == 1).all()), "a recorded stream keeps it"
    assert bool((again == 1).all())
    assert torch.empty(10, device=DEVICE, dtype=torch.uint8).tolist() != [0] * 10
    torch.accelerator.synchronize()
