"""Checks epload on a machine with an NVIDIA GPU: builds, tests, sanitizes, traces and measures. Prints a table, writes JSON.

Downloads nothing. Needs torch with CUDA, nvcc, cmake, ninja, pybind11, pytest, hypothesis and safetensors. A part that cannot
run is reported as such and makes the exit status 1. ``--device cpu`` rehearses the measurements on a machine without a GPU; its
numbers are meaningless.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
ENVIRONMENT = {**os.environ, "PYTHONPATH": f"{ROOT / 'python'}{os.pathsep}{ROOT / 'tests'}", "EPLOAD_CUDA": "1"}
REPEATS = 5


class NotRun(Exception):
    """A part could not run; the message says why."""


def command(words: list[str], limit: float, **environment: str) -> str:
    """Runs a command and returns the end of its output. Raises NotRun with it if the command fails."""
    try:
        done = subprocess.run(
            words,
            cwd=ROOT,
            env={**ENVIRONMENT, **environment},
            capture_output=True,
            text=True,
            timeout=limit,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NotRun(str(error)) from error
    output = (done.stdout + done.stderr).strip()
    if done.returncode != 0:
        raise NotRun(f"{' '.join(words[:6])} ended with {done.returncode}: {output[-2000:]}")
    return output[-300:]


def hardware() -> dict[str, Any]:
    import torch

    facts: dict[str, Any] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cpu_cores": len(os.sched_getaffinity(0)),
    }
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        facts |= {"gpu": properties.name, "gpu_memory_GB": properties.total_memory / 1e9, "cuda": torch.version.cuda}
        facts["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return facts


def build() -> str:
    return command([sys.executable, "setup.py", "-q", "build_ext", "--inplace"], 600)[-100:] or "built"


def tests() -> str:
    words = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-m",
        "cuda",
        "tests/native/test_cuda.py",
        "tests/end_to_end/test_cuda_loader.py",
    ]
    return command(words, 540, EPLOAD_FAIL_WITHOUT_CUDA="1").splitlines()[-1]


def sanitize() -> str:
    tool = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    if not Path(tool).exists():
        raise NotRun("no compute-sanitizer on PATH or in /usr/local/cuda/bin")
    words = [tool, "--tool", "memcheck", "--error-exitcode", "9", sys.executable, __file__, "--exercise"]
    return command(words, 540).splitlines()[-1]


def exercise() -> None:
    """Runs every access width, both directions and all conversions under the sanitizer."""
    import torch

    from epload.core import dtypes
    from epload.native import ops

    device = torch.device("cuda")
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
    print("no errors in", 2 * 5 + 36, "calls")


class Clock:
    """Seconds of work on a device, measured with events; host time on CPU."""

    def __init__(self, device: Any) -> None:
        self.cuda = device.type == "cuda"

    def best(self, run: Callable[[], object]) -> tuple[float, float]:
        """Returns (seconds until done, seconds until queued by the host), the best of REPEATS after one warm-up."""
        import torch

        run()
        results = []
        for _ in range(REPEATS):
            if self.cuda:
                begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                torch.cuda.synchronize()
                begin.record()
            start = time.perf_counter()
            run()
            queued = time.perf_counter() - start
            if self.cuda:
                end.record()
                end.synchronize()
            results.append((begin.elapsed_time(end) / 1e3 if self.cuda else queued, queued))
        return min(r[0] for r in results), min(r[1] for r in results)


def kernel_seconds(run: Callable[[], object]) -> float | None:
    """Device seconds inside the region copy kernels, according to the profiler."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiled:
        run()
        torch.cuda.synchronize()
    found = [
        e for e in profiled.events() if "region_copy" in e.name and e.device_type == torch.autograd.DeviceType.CUDA
    ]
    return sum(e.device_time for e in found) / 1e6 if found else None


def copy_bandwidth(clock: Clock, device: Any, nbytes: int) -> float:
    """Bytes read plus bytes written per second by one plain copy."""
    import torch

    source = torch.zeros(nbytes, dtype=torch.uint8, device=device)
    target = torch.ones_like(source)
    seconds, _ = clock.best(lambda: target.copy_(source))
    return 2 * nbytes / seconds


def bandwidth(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Pack and unpack bandwidth over plain device copy bandwidth; counts bytes read plus bytes written."""
    import torch

    import regions
    from epload.native import ops

    device = torch.device(options.device)
    clock = Clock(device)
    floor = copy_bandwidth(clock, device, options.bucket_bytes * 16)
    rows: list[dict[str, Any]] = [{"what": "device copy", "GB": options.bucket_bytes * 16 / 1e9, "GB_s": floor / 1e9}]
    bucket = torch.randint(0, 255, (options.bucket_bytes,), dtype=torch.uint8, device=device)
    for layout in regions.LAYOUTS:
        model = regions.Model(layers=options.layers)
        work = regions.work(layout, options.world, model, options.bucket_bytes, torch.bfloat16, device)
        wrong = 0
        for shards, table in work.buckets:  # check before timing
            fresh = torch.zeros_like(bucket)
            ops.unpack(bucket, shards, table)
            ops.pack(fresh, shards, table)
            wrong += regions.wrong_regions(bucket, (shards, table)) + regions.wrong_regions(fresh, (shards, table))
        if wrong:
            raise NotRun(f"{layout}: {wrong} wrong regions")
        for name, op in (("unpack", ops.unpack), ("pack", ops.pack)):

            def run(op: Any = op, work: Any = work) -> None:
                for shards, table in work.buckets:
                    op(bucket, shards, table)

            seconds, queued = clock.best(run)
            row = {
                "what": f"{name} {layout}", "GB": work.payload / 1e9, "GB_s": 2 * work.payload / seconds / 1e9,
                "over_copy": 2 * work.payload / seconds / floor, "regions": work.regions, "buckets": len(work.buckets),
                "host_us_per_bucket": queued / len(work.buckets) * 1e6, "host_us_per_region": queued / work.regions * 1e6,
                "wrong": wrong,
            }  # fmt: skip
            if clock.cuda and (inside := kernel_seconds(run)):
                row["kernel_GB_s"] = 2 * work.payload / inside / 1e9
                row["kernel_over_copy"] = 2 * work.payload / inside / floor
            rows.append(row)
    return rows


def op_on_nccl(options: argparse.Namespace) -> list[dict[str, Any]]:
    """The op's host time and the streams of its device work, in an NCCL group of one rank."""
    import torch
    import torch.distributed as dist
    from torch.profiler import ProfilerActivity, profile

    from epload.native import ops

    device = torch.device("cuda", 0)
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group(
            "nccl", init_method=f"file://{folder}/rendezvous", rank=0, world_size=1, device_id=device
        )
        group = str(dist.group.WORLD.group_name)  # type: ignore[union-attr]
        tensors = [
            torch.zeros(64, 2 * (96 + i % 64), dtype=torch.bfloat16, device=device)[:, ::2] for i in range(18_867)
        ]
        stream = torch.cuda.Stream()
        nbytes = sum(t.numel() * t.element_size() for t in tensors)
        buckets = -(-nbytes // options.bucket_bytes)

        def run() -> None:
            ops.coalesced_bcast(tensors, 0, group, "", options.bucket_bytes, "two_level", stream)

        _, queued = Clock(device).best(run)
        with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiled:
            run()
            torch.cuda.synchronize()
        trace = Path(options.json).with_suffix(".trace.json")
        profiled.export_chrome_trace(str(trace))
        dist.destroy_process_group()
    events = json.loads(trace.read_text())["traceEvents"]
    device_work = [e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    streams = sorted({e["args"]["stream"] for e in device_work})
    launches = sum("region_copy" in e["name"] for e in device_work)
    row = {
        "what": "op, 1 rank, NCCL", "GB": nbytes / 1e9, "tensors": len(tensors), "buckets": buckets,
        "host_us_per_bucket": queued / buckets * 1e6, "host_us_per_tensor": queued / len(tensors) * 1e6,
        "launches": launches, "streams": streams, "trace": trace.name,
    }  # fmt: skip
    if len(streams) != 1:
        raise NotRun(f"expected the op's device work on one stream, found it on {streams}: {row}")
    return [row]


def streams_of(run: Callable[[], object], trace: Path) -> dict[str, list[int]]:
    """The streams of a run's kernels and host-to-device copies, from a profiler trace, which is kept."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiled:
        run()
        torch.cuda.synchronize()
    profiled.export_chrome_trace(str(trace))
    events = json.loads(trace.read_text())["traceEvents"]

    def where(wanted: Callable[[dict[str, Any]], bool]) -> list[int]:
        return sorted(
            {e["args"]["stream"] for e in events if e.get("cat", "").startswith(("kernel", "gpu")) and wanted(e)}
        )

    return {
        "kernels": where(lambda e: e["cat"] == "kernel"),
        "copies to device": where(lambda e: e["cat"] == "gpu_memcpy" and "HtoD" in e["name"]),
    }


def page_cache(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Loads a checkpoint from the page cache with epload and safetensors, over pinned host-to-device bandwidth."""
    import torch
    from safetensors.torch import load_file, save_file

    import epload

    device = torch.device(options.device)
    clock = Clock(device)
    count = max(1, int(options.checkpoint_gb * 1e9 / (2048 * 768 * 2)))
    names = [f"layers.{i}.weight" for i in range(count)]
    nbytes = count * 2048 * 768 * 2
    model = torch.nn.ParameterDict(
        {
            n.replace(".", "-"): torch.nn.Parameter(
                torch.zeros(768, 2048, dtype=torch.bfloat16, device=device), requires_grad=False
            )
            for n in names
        }
    )
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        file = f"{folder}/model.safetensors"
        save_file({n: torch.randn(768, 2048).bfloat16() for n in model}, file)
        host = torch.zeros(256 << 20, dtype=torch.uint8, pin_memory=device.type == "cuda")
        there = torch.zeros_like(host, device=device)
        seconds, _ = clock.best(lambda: there.copy_(host, non_blocking=True))
        floor = host.numel() / seconds
        rows.append({"what": "pinned host to device", "GB": host.numel() / 1e9, "GB_s": floor / 1e9})

        def finish(load: Callable[[], object]) -> Callable[[], object]:
            def run() -> None:
                load()
                if clock.cuda:
                    torch.cuda.synchronize()

            return run

        loader = epload.HierarchicalLoader(progress=False)
        loads = {
            "safetensors load_file": lambda: load_file(file, device=str(device)),
            "epload": lambda: loader.load(model, file),
        }
        for name, load in loads.items():
            try:
                seconds, _ = clock.best(finish(load))
            except (ValueError, RuntimeError) as error:
                rows.append({"what": f"page cache, {name}", "not_run": str(error)[:300]})
                continue
            rows.append(
                {
                    "what": f"page cache, {name}",
                    "GB": nbytes / 1e9,
                    "GB_s": nbytes / seconds / 1e9,
                    "over_pinned": nbytes / seconds / floor,
                }
            )
    return rows


def load_on_streams(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Checks the streams of a load: all kernels on one stream, host-to-device copies also on another."""
    import torch

    import epload

    state = {f"w{i}": torch.randn(500, 300) for i in range(40)}
    model = torch.nn.ParameterDict({n: torch.nn.Parameter(torch.zeros_like(t)) for n, t in state.items()}).cuda()
    loader = epload.HierarchicalLoader(bucket_bytes=4 << 20, progress=False)
    loader.load(model, state)
    trace = Path(options.json).with_suffix(".load-trace.json")
    row = {"what": "load's streams", **streams_of(lambda: loader.load(model, state), trace), "trace": trace.name}
    if len(row["kernels"]) != 1 or not set(row["copies to device"]) - set(row["kernels"]):
        raise NotRun(f"expected kernels on one stream and copies to the device on another, found {row}")
    return [row]


def show(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        cells = [f"{k} {v:.3g}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items() if k != "what"]
        print(f"{row['what']:<32}", "  ".join(cells), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", default=str(ROOT / "benchmarks/results/gpu.json"))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--layers", type=int, default=48, help="layers of the model whose shards are unpacked")
    parser.add_argument(
        "--world", type=int, default=8, help="number of ranks the model is sharded over; this is one of them"
    )
    parser.add_argument("--bucket-bytes", type=int, default=64 << 20)
    parser.add_argument("--checkpoint-gb", type=float, default=4.0)
    parser.add_argument("--exercise", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.exercise:
        exercise()
        return 0
    Path(options.json).parent.mkdir(parents=True, exist_ok=True)
    gpu = options.device != "cpu"
    parts: list[tuple[str, Callable[[], Any]]] = [("hardware", hardware)]
    if gpu:
        parts += [("build", build), ("tests", tests), ("compute-sanitizer", sanitize)]
    parts += [("bandwidth", lambda: bandwidth(options)), ("page cache", lambda: page_cache(options))]
    if gpu:
        parts += [("op", lambda: op_on_nccl(options)), ("load", lambda: load_on_streams(options))]
    results: dict[str, Any] = {}
    failed = []
    sys.path[:0] = [str(ROOT / "python")]
    for name, part in parts:
        try:
            results[name] = part()
        except Exception as error:  # report it and run the other parts
            failed.append(name)
            results[name] = [{"what": name, "not_run": f"{type(error).__name__}: {error}"}]
        found = results[name]
        show(found if isinstance(found, list) else [{"what": name, "": found}])
        Path(options.json).write_text(json.dumps(results, indent=1))
    print("NOT RUN: " + ", ".join(failed) if failed else f"all parts ran; results in {options.json}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
