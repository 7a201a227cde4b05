"""Calls one op with hostile arguments: ``hostile_ops.py OP``.

Replaces one or two arguments of a good call by hostile values of every kind, and prints how many calls it made and how many were
refused. It prints what it is about to do first, so that the last line tells what ended the process.
"""

from __future__ import annotations

import itertools
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from epload.core import dtypes
from epload.native import ops
from support import fakedev
from support.accelerator import DEVICE

INT64_MAX = 2**63 - 1
FLOAT = dtypes.code(torch.float32)
ROW = [0, 0, FLOAT, 1, 0, 4, 1]
"""Four floats at the start of a bucket, for elements 0 to 4 of the first tensor."""


def freed(tensor: Tensor) -> Tensor:
    tensor.untyped_storage().resize_(0)
    return tensor


def wrapper() -> Tensor:
    """A tensor of a subclass that has no memory, as those of a library for quantized weights."""

    class Wraps(Tensor):
        @classmethod
        def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            raise NotImplementedError("this class does nothing")

    return Tensor._make_wrapper_subclass(Wraps, (4,), dtype=torch.float32)  # type: ignore[attr-defined]


def misaligned() -> Tensor:
    return torch.frombuffer(bytearray(65), dtype=torch.int32, offset=1, count=8)


def tensors_of_every_kind() -> list[Tensor]:
    names = ("int64", "int32", "uint8", "float32", "bool", "complex64", "float8_e4m3fn")
    shapes = ((), (0,), (1,), (4,), (2, 6), (2, 7), (3, 4, 5), (64,))
    plain = [torch.zeros(shape, dtype=getattr(torch, name)) for name, shape in itertools.product(names, shapes)]
    big, four = torch.full((2, 7), INT64_MAX), torch.zeros(4)
    raw, row = torch.zeros(128, dtype=torch.uint8), torch.zeros(1, 7, dtype=torch.int64)
    return [
        *plain, big, -big, big[:, 0], torch.full((7,), -1), torch.arange(14).reshape(7, 2).t(), raw[::2], raw[:1].expand(64),
        row[:, 0].expand(2, 7), raw[3:67],
        *(freed(torch.zeros(shape, dtype=torch.int64)) for shape in ((1,), (4,), (1, 2), (1, 6), (1, 7))),
        freed(torch.zeros(16, dtype=torch.uint8)), freed(torch.zeros(8, dtype=torch.int32)), freed(torch.zeros(4)),
        row.to("meta"), raw[:16].to("meta"), row.to_sparse(), four.long().to_sparse(), torch.eye(3).to_sparse_csr(),
        four.to_mkldnn(), four.to(torch.complex64).conj(), torch._neg_view(four), torch._neg_view(row),
        torch.quantize_per_tensor(four, 0.1, 0, torch.quint8), torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)]),
        torch._lazy_clone(raw[:16].clone()), torch.nn.Parameter(torch.zeros(4)), wrapper(), misaligned(),
    ]  # fmt: skip


NUMBERS = [0, 1, -1, 2, 3, 7, 64, 2**31 - 1, 2**31, 2**32, 2**32 + 1, 2**62, INT64_MAX, -INT64_MAX - 1, -(2**32)]
FLOATS = [0.0, -1.0, float("nan"), float("inf"), -float("inf"), 1e-300, 1e308, 1e9]
TEXTS = ["", "0", "default_pg", "two_level", "striped", "\0", "x" * 10_000, "\N{SNOWMAN}"]
OBJECTS: list[Any] = [None, "text", object(), b"bytes", [], {}, 1.5]


def hostile(value: Any, objects: list[Any]) -> list[Any]:
    """Values to put in place of a good one."""
    tensors = tensors_of_every_kind()
    if isinstance(value, list):
        ones: list[Any] = tensors if value and isinstance(value[0], Tensor) else NUMBERS
        return [[], *([one] for one in ones), *([one, *value] for one in ones), [*value] * 3, NUMBERS, *OBJECTS]
    kinds: dict[Any, list[Any]] = {
        torch.ScriptObject: objects,
        Tensor: [*tensors, *(changed_entries(value) if isinstance(value, Tensor) else [])],
        torch.dtype: [torch.bool, torch.complex128, torch.float8_e5m2, torch.quint4x2, torch.qint8, torch.bits8],
        torch.device: [*map(torch.device, ("meta", "cuda:7", "cpu:3", "mkldnn", "xla:0"))],
        float: FLOATS, int: NUMBERS, str: TEXTS,
    }  # fmt: skip
    return next(values for kind, values in kinds.items() if isinstance(value, kind)) + OBJECTS


def changed_entries(table: Tensor) -> list[Tensor]:
    """A table of integers with each of its numbers replaced."""
    found = []
    for at, number in itertools.product(range(table.numel() if table.dtype is torch.int64 else 0), NUMBERS):
        found.append(table.clone())
        found[-1].view(-1)[at] = number
    return found


class Setting:
    """Good arguments of every op."""

    def __init__(self, op: str = "") -> None:
        self.bucket = torch.arange(16, dtype=torch.uint8)
        self.tensors = [torch.zeros(4), torch.zeros(3, 2)]
        self.copies = torch.tensor([ROW])
        descriptor, path = tempfile.mkstemp()
        os.write(descriptor, bytes(range(256)))
        os.unlink(path)
        self.descriptors = [descriptor]
        self.files, self.offsets, self.origins = torch.tensor([0]), torch.tensor([16]), torch.tensor([[0, 4]])
        self.board = torch.zeros(6, dtype=torch.int32)
        self.steps = torch.tensor([[0, 16, -1, -1, -1, -1]])
        self.objects: list[Any] = [self._make_pipe()] if op in PIPE_OPS else []
        if op in SHARING_OPS:
            self._share()

    def _make_pipe(self) -> ops.Pipe:
        self.on_device = [tensor.to(DEVICE) for tensor in self.tensors]
        self.pipe = ops.device_pipe(torch.device(DEVICE), 1, 4096)
        return self.pipe

    def _share(self) -> None:
        """Has another process share memory, as none opens its own."""
        self.on_device = [tensor.to(DEVICE) for tensor in self.tensors]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        pipe = subprocess.PIPE
        self.lender = subprocess.Popen([sys.executable, "-c", LENDER], env=environment, stdin=pipe, stdout=pipe, text=True)
        assert self.lender.stdout is not None
        handle, nbytes = self.lender.stdout.readline().split()
        self.lent: list[Any] = [torch.tensor(list(bytes.fromhex(handle)), dtype=torch.uint8), int(nbytes)]

    def open(self) -> Tensor:
        memory: Tensor = torch.ops.epload_test.open_memory(*self.lent, torch.device(DEVICE))
        return memory


LENDER = """
import sys, torch
from support import fakedev
fakedev.setup("nccl")
from epload.native import ops
tensor = torch.zeros(4, device="fakedev:0")
_, (handle,), (nbytes,) = ops.share_memory([tensor])
print(handle, nbytes, flush=True)
sys.stdin.read()
"""
GROUP = "0"
"""The name that torch gives the default group."""


def encoded(base: Tensor) -> Tensor:
    """Encoded changes of the first byte of a buffer."""
    changed, out = base.clone(), torch.zeros(ops.encoded_limit(len(base)), dtype=torch.uint8)
    changed[:1] ^= 1
    return out[: ops.encode_changes(base, changed, 1, out)[0]]


def encoded_regions(setting: Setting) -> Tensor:
    """Encoded changes of the regions that the copies name."""
    nbytes, changed = len(setting.bucket), [tensor + 1 for tensor in setting.tensors]
    out = torch.zeros(ops.encoded_limit(nbytes), dtype=torch.uint8)
    return out[: ops.encode_regions(setting.tensors, changed, setting.copies, 0, nbytes, out)[0]]


CALLS: dict[str, Callable[[Setting], list[Any]]] = {
    "coalesced_bcast": lambda s: [s.tensors, 0, GROUP, "", 64, "two_level", None],
    "abort_hccl": lambda s: [dist.group.WORLD.boxed()],  # type: ignore[union-attr]
    "pack": lambda s: [s.bucket, s.tensors, s.copies],
    "unpack": lambda s: [s.bucket, s.tensors, s.copies],
    "device_pipe": lambda s: [torch.device(DEVICE), 1, 4096],
    "pinned_memory": lambda s: [4096, torch.device(DEVICE)],
    "write_from_device": lambda s: [s.descriptors, s.files, s.offsets, s.origins, s.on_device, s.copies, s.pipe],
    "upload": lambda s: [[s.bucket], torch.tensor([[0, 0]]), s.on_device, s.copies, s.pipe],
    "download": lambda s: [s.on_device, s.copies, [s.bucket], torch.tensor([[0, 0]]), s.pipe],
    "share_memory": lambda s: [s.on_device],
    "open_memory": lambda s: [*s.lent, torch.device(DEVICE)],
    "close_memory": lambda s: [s.open()],
    "read_regions": lambda s: [
        s.descriptors, s.files, s.offsets, s.origins, s.on_device, s.copies, 2, True, s.pipe
    ],
    "relay": lambda s: [s.bucket, s.steps, GROUP, "", 8, s.board, 1.0],
    "allocate_like": lambda s: [s.tensors, torch.float32, torch.device("cpu"), 2],
    "describe_memory": lambda s: [s.tensors],
    "checksum": lambda s: [s.bucket],
    "digest_tensors": lambda s: [s.tensors, s.copies],
    "dtypes": lambda s: [],
    "digest_bucket": lambda s: [s.bucket, torch.tensor([[FLOAT, *ROW[1:]]])],
    "encode_changes": lambda s: [s.bucket, s.bucket.clone(), 1, torch.zeros(ops.encoded_limit(len(s.bucket)), dtype=torch.uint8)],
    "encode_regions": lambda s: [
        s.tensors, s.tensors, s.copies, 0, len(s.bucket), torch.zeros(ops.encoded_limit(len(s.bucket)), dtype=torch.uint8),
    ],
    "apply_regions": lambda s: [encoded_regions(s), s.tensors, s.copies, 0, len(s.bucket)],
    "check_changes": lambda s: [encoded(s.bucket), len(s.bucket)],
    "apply_changes": lambda s: [encoded(s.bucket), s.bucket],
    "cuda_obstacle": lambda s: [torch.device("cuda", 0)],
    "board_post": lambda s: [s.board, 0, 1],
    "board_wait": lambda s: [s.board, [0, 1], 0, 0.01],
}  # fmt: skip
"""For each op the arguments of a call that is right."""
PIPE_OPS = ("device_pipe", "pinned_memory", "read_regions", "write_from_device", "upload", "download")
"""Those for the fake accelerator."""
SHARING_OPS = ("share_memory", "open_memory", "close_memory")
"""Ops for a fake accelerator with the library for CUDA, which shares memory."""


def arguments(op: str) -> str:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert dist.group.WORLD.group_name == GROUP  # type: ignore[union-attr]
    call = getattr(torch.ops.epload, op).default
    if op in PIPE_OPS:
        fakedev.setup("hccl")  # whose ops are those of the library that is shipped
    if op in SHARING_OPS:
        fakedev.setup("nccl")
        call = getattr(torch.ops.epload_test, op).default
    setting = Setting(op)
    call(*CALLS[op](setting))  # which is refused by none
    calls = refused = 0
    rng = random.Random(op)
    good = CALLS[op](setting)
    bad = [hostile(value if value is not None else 1.5, setting.objects) for value in good]
    if op == "write_from_device":  # nothing may be written to what this process prints
        bad[0] = [value for value in bad[0] if not isinstance(value, list) or not {1, 2}.intersection(value)]
    changes: list[dict[int, Any]] = [{i: value} for i, values in enumerate(bad) for value in values]
    for i, j in itertools.combinations(range(len(good)), 2):
        changes += [{i: rng.choice(bad[i]), j: rng.choice(bad[j])} for _ in range(20)]
    for number, change in enumerate(changes):
        print(f"{op}: change {number}: {describe(change)}", flush=True)
        given = CALLS[op](setting)
        for i, value in change.items():
            given[i] = value
        calls += 1
        try:
            call(*given)
        except Exception:
            refused += 1
    return f"{calls} {refused}"


def describe(change: dict[int, Any]) -> str:
    def shown(value: Any) -> str:
        if isinstance(value, list):
            return f"[{', '.join(map(shown, value[:3]))}...]"
        return f"{type(value).__name__} {value.dtype} {value.layout}" if isinstance(value, Tensor) else repr(value)[:60]

    return ", ".join(f"argument {i} = {shown(value)}" for i, value in change.items())


def main(op: str) -> None:
    torch.set_num_threads(2)
    print(arguments(op), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
