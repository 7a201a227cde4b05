"""One process: unpacks contiguous regions from odd offsets and packs them again, on a stream; fills a tensor in a format of
Ascend's own. Prints what was wrong, and the stream."""

from __future__ import annotations

import json
import os

import torch
import torch_npu

from epload.core import dtypes
from epload.native import ops
from epload.planning.holdings import full_holdings
from epload.sync.arrival import Arrival, layout_of

OFFSETS = (2, 407, 1033)
"""Bytes; no view of float32 could begin there, so that torch's own copy would need a kernel."""


NZ = 29
"""A format of Ascend's own."""
ODD_BYTES = 1501
"""Offset of fp8 values, of which bf16 values are made."""


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """The device's memory is the host's."""
    nbytes = (sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1) * tensor.itemsize
    storage = torch._C._construct_storage_from_data_pointer(tensor.data_ptr(), torch.device("cpu"), nbytes)
    return torch.empty(0, dtype=tensor.dtype).set_(storage, 0, tensor.shape, tensor.stride())


def strided_fp8() -> list[str]:
    """Unpacks and packs columns of a matrix, with a kernel, of which the fake CANN has none. Returns what was wrong."""
    kinds: set[torch.dtype] = set()

    def copy(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        kinds.update((target.dtype, source.dtype))
        on_host(target).copy_(on_host(source))
        return target

    codes = torch.arange(64, dtype=torch.uint8).view(8, 8)
    bucket, again = codes.flatten().to("npu:0"), torch.zeros(64, dtype=torch.uint8).to("npu:0")
    matrix = torch.zeros(8, 16, dtype=torch.uint8).to("npu:0").view(torch.float8_e4m3fn)
    table = torch.tensor([[0, 0, dtypes.code(torch.float8_e4m3fn), 2, 0, 4, 8, 8, 8, 1]])
    torch.npu.synchronize()
    kernels = torch.library.Library("aten", "IMPL")
    kernels.impl("copy_", copy, "PrivateUse1")
    ops.unpack(bucket, [matrix], table)
    ops.pack(again, [matrix], table)
    found, expected = on_host(matrix).view(torch.uint8), torch.nn.functional.pad(codes, (4, 4))
    right = torch.equal(found, expected) and torch.equal(on_host(again), codes.flatten())
    return [] if right and kinds == {torch.uint8} else [f"columns of fp8, copied as {kinds}"]


def main() -> None:
    torch.npu.set_device(0)
    values = [torch.arange(100.0), torch.arange(1000.0, 1064.0).view(8, 8), torch.arange(60.0) + 7]
    regions = [([0], [100]), ([2, 0], [4, 8]), ([10], [50])]  # of the second tensor four whole rows
    bucket = torch.zeros(2000, dtype=torch.uint8)
    rows = []
    for i, (at, (start, size)) in enumerate(zip(OFFSETS, regions, strict=True)):
        part = values[i][tuple(slice(a, a + n) for a, n in zip(start, size, strict=True))].reshape(-1)
        bucket[at : at + part.nbytes] = part.view(torch.uint8)
        pad = [0] * (2 - len(start))
        stride = [8, 1] if len(start) == 2 else [1]
        rows.append([i, at, dtypes.code(torch.float32), len(start), *start, *pad, *size, *pad, *stride, *pad])
    rows.append([3, ODD_BYTES, dtypes.code(torch.float8_e4m3fn), 1, 0, 0, 64, 0, 1, 0])
    codes = torch.arange(64, dtype=torch.uint8)
    bucket[ODD_BYTES : ODD_BYTES + 64] = codes
    table = torch.tensor(rows)
    there = bucket.to("npu:0")
    tensors = [torch.zeros_like(value).to("npu:0") for value in [*values, torch.empty(64, dtype=torch.bfloat16)]]
    again = torch.zeros(2000, dtype=torch.uint8).to("npu:0")
    torch.npu.synchronize()
    stream = torch.npu.Stream()
    with torch.npu.stream(stream):
        ops.unpack(there, tensors, table)
        ops.pack(again, tensors, table[:3])
    torch.npu.synchronize()
    wrong = [] if torch.equal(tensors.pop().cpu(), codes.view(torch.float8_e4m3fn).bfloat16()) else ["fp8"]
    bucket[ODD_BYTES : ODD_BYTES + 64] = 0
    wrong += [] if torch.equal(again.cpu(), bucket) else ["the bucket"]
    for i, (start, size) in enumerate(regions):
        box = tuple(slice(a, a + n) for a, n in zip(start, size, strict=True))
        expected = torch.zeros_like(values[i])
        expected[box] = values[i][box]
        if not torch.equal(tensors[i].cpu(), expected):
            wrong.append(f"tensor {i}")
    private = torch_npu.empty_with_format((32, 32), dtype=torch.float16, device="npu:0", acl_format=NZ)
    try:
        Arrival(full_holdings([private.shape], [private.dtype]), [layout_of(private)]).copy_into({0: private}, verify=False)
        wrong.append("filled in a format of Ascend's own")
    except ValueError as error:
        wrong += [] if "Ascend's own formats" in str(error) else [str(error)]
    wrong += strided_fp8()
    print(json.dumps({"wrong": wrong, "stream": hex(stream.npu_stream)}), flush=True)
    os._exit(0)  # torch_npu's end asks for more of CANN than there is here


if __name__ == "__main__":
    main()
