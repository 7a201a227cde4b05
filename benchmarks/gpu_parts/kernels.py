"""Parts of the GPU check: the kernels that pack and unpack buckets, and the op over NCCL."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import epload
import regions
from epload.core import dtypes
from epload.native import ops
from gpu_parts.common import Clock, Row, device_of, trace_of


def exercise(options: argparse.Namespace) -> list[Row]:
    """Runs every access width, both directions and all conversions under the sanitizer."""
    device = device_of(options)
    for width, shift in ((torch.uint8, 1), (torch.int16, 2), (torch.int32, 4), (torch.int64, 8), (torch.float32, 16)):
        tensors = [torch.zeros(40, 50 + i, dtype=width, device=device)[:, 1:-1] for i in range(60)]
        rows, at = [], shift
        for i, t in enumerate(tensors):
            rows.append([i, at, dtypes.code(t.dtype), 2, 0, 0, *t.shape, t.shape[1], 1])
            at += t.numel() * t.element_size()
        bucket = torch.randint(0, 255, (at,), dtype=torch.uint8, device=device)
        packed = torch.zeros_like(bucket)
        ops.unpack(bucket, tensors, torch.tensor(rows))
        ops.pack(packed, tensors, torch.tensor(rows))
        assert torch.equal(packed[shift:], bucket[shift:])
    numbers = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2]
    for source in numbers:
        for target in numbers:
            values = torch.randn(4099, device=device).to(source)
            bucket = torch.zeros(4099 * target.itemsize, dtype=torch.uint8, device=device)
            ops.pack(bucket, [values], torch.tensor([[0, 0, dtypes.code(target), 1, 0, 4099, 1]]))
            assert torch.equal(bucket.view(target).float(), values.to(target).float()), (source, target)
    torch.cuda.synchronize()
    return [{"what": "calls under compute-sanitizer", "calls": 2 * 5 + 36}]


def kernel_seconds(run: Callable[[], object]) -> float | None:
    """Device seconds inside the region copy kernels, according to the profiler."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiled:
        run()
        torch.cuda.synchronize()
    found = [e for e in profiled.events() if "region_copy" in e.name and e.device_type == torch.autograd.DeviceType.CUDA]
    return sum(e.device_time for e in found) / 1e6 if found else None


def copy_bandwidth(clock: Clock, device: torch.device, nbytes: int) -> float:
    """Bytes read plus bytes written per second by one plain copy."""
    source = torch.zeros(nbytes, dtype=torch.uint8, device=device)
    target = torch.ones_like(source)
    seconds, _ = clock.best(lambda: target.copy_(source))
    return 2 * nbytes / seconds


def bandwidth(options: argparse.Namespace) -> Iterator[Row]:
    """Pack and unpack bandwidth over that of a plain device copy, for shards of 8 ranks, and of one: the longest runs of bytes.
    Counts bytes read plus bytes written. Every bucket is checked before it is timed."""
    device = device_of(options)
    clock = Clock(device)
    floor = copy_bandwidth(clock, device, options.bucket_bytes * 16)
    yield {"what": "device copy", "GB": options.bucket_bytes * 16 / 1e9, "GB_s": floor / 1e9}
    bucket = torch.randint(0, 255, (options.bucket_bytes,), dtype=torch.uint8, device=device)
    for world in (8, 1):
        for layout in regions.LAYOUTS[: None if world > 1 else 1]:
            yield from _bandwidth_of(layout, world, options, bucket, clock, floor)


def _bandwidth_of(
    layout: str, world: int, options: argparse.Namespace, bucket: torch.Tensor, clock: Clock, floor: float
) -> list[Row]:
    layers = max(1, options.layers * world // 8)  # of one rank about the same bytes
    model = regions.Model(layers=layers, experts=options.experts, vocabulary=options.vocabulary)
    work = regions.work(layout, world, model, options.bucket_bytes, torch.bfloat16, bucket.device)
    wrong = 0
    for shards, table in work.buckets:
        fresh = torch.zeros_like(bucket)
        ops.unpack(bucket, shards, table)
        ops.pack(fresh, shards, table)
        wrong += regions.wrong_regions(bucket, (shards, table)) + regions.wrong_regions(fresh, (shards, table))
    if wrong:
        raise RuntimeError(f"{layout}: {wrong} wrong regions")
    rows = []
    for name, op in (("unpack", ops.unpack), ("pack", ops.pack)):

        def run(op: Any = op) -> None:
            for shards, table in work.buckets:
                op(bucket, shards, table)

        seconds, queued = clock.best(run)
        row = {
            "what": f"{name} {layout}, {world} rank{'s' * (world > 1)}", "GB": work.payload / 1e9,
            "GB_s": 2 * work.payload / seconds / 1e9, "over_copy": 2 * work.payload / seconds / floor,
            "regions": work.regions, "buckets": len(work.buckets),
            "host_us_per_bucket": queued / len(work.buckets) * 1e6, "host_us_per_region": queued / work.regions * 1e6,
        }  # fmt: skip
        if clock.cuda and (inside := kernel_seconds(run)):
            row |= {
                "kernel_GB_s": 2 * work.payload / inside / 1e9,
                "kernel_over_copy": 2 * work.payload / inside / floor,
            }
        rows.append(row)
    return rows


def op(options: argparse.Namespace) -> list[Row]:
    """The op's host time and the streams of its device work, in an NCCL group of one rank."""
    device = device_of(options)
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("nccl", init_method=f"file://{folder}/rendezvous", rank=0, world_size=1, device_id=device)
        group = str(dist.group.WORLD.group_name)  # type: ignore[union-attr]
        tensors = [torch.zeros(64, 2 * (96 + i % 64), dtype=torch.bfloat16, device=device)[:, ::2] for i in range(18_867)]
        stream = torch.cuda.Stream()
        nbytes = sum(t.numel() * t.element_size() for t in tensors)
        buckets = -(-nbytes // options.bucket_bytes)

        def run() -> None:
            ops.coalesced_bcast(tensors, 0, group, "", options.bucket_bytes, "two_level", stream)

        _, queued = Clock(device).best(run)
        work = trace_of(run, Path(options.out) / "op.trace.json")
        dist.destroy_process_group()
    row = {
        "what": "op, 1 rank, NCCL", "GB": nbytes / 1e9, "tensors": len(tensors), "buckets": buckets,
        "host_us_per_bucket": queued / buckets * 1e6, "host_us_per_tensor": queued / len(tensors) * 1e6,
        "launches": sum("region_copy" in event["name"] for event in work),
        "streams": sorted({event["args"]["stream"] for event in work}),
    }  # fmt: skip
    if len(row["streams"]) != 1:
        raise RuntimeError(f"expected the op's device work on one stream, found {row}")
    return [row]


def streams(options: argparse.Namespace) -> list[Row]:
    """A load's copies to the device are on several streams, and its kernels, for what is short or converted, on the same ones."""
    state = {f"w{i}": torch.randn(500, 3000) for i in range(40)} | {f"b{i}": torch.randn(3000) for i in range(40)}
    model = torch.nn.ParameterDict({n: torch.nn.Parameter(torch.zeros_like(t)) for n, t in state.items()}).cuda()
    loader = epload.HierarchicalLoader(progress=False)
    loader.load(model, state)
    work = trace_of(lambda: loader.load(model, state), Path(options.out) / "load.trace.json")
    copies = [event for event in work if event["cat"] == "gpu_memcpy" and "HtoD" in event["name"]]
    kernels = [event for event in work if event["cat"] == "kernel"]
    row: Row = {"what": "a load's streams"}
    for name, events in (("copies", copies), ("kernels", kernels)):
        row[name] = sorted({event["args"]["stream"] for event in events})
        row[f"{name}_us"] = sum(event["dur"] for event in events)
    if len(row["copies"]) < 2 or not row["kernels"] or {*row["kernels"]} - {*row["copies"]}:
        raise RuntimeError(f"expected copies to the device on several streams, and kernels on some of these, found {row}")
    return [row]
