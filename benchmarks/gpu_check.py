"""Checks epload on a machine with an NVIDIA GPU: builds, tests, sanitizes, traces and measures. Writes tables and JSON.

    python benchmarks/gpu_check.py                                # all parts, the most important first
    python benchmarks/gpu_check.py --parts build,tests,bandwidth
    python benchmarks/gpu_check.py --device cpu --checkpoint-gb 0.3   # a rehearsal without a GPU; its numbers mean nothing

Parts: "build"; "load", a checkpoint from the page cache, compared with the file; "real_size", Qwen3-30B-A3B's names and shapes in
/dev/shm, where there is memory for 61 GB, beside other libraries; "page_cache", pipes by threads and size of a piece; "save";
"sync" between processes; "ranks", loads by several; "tests" of the kernels and of loads, of which one that ends its process costs
no other; "peers", other libraries that load the file of "load"; "memory" of thousands of tensors, shared with another process;
"op", the broadcast over NCCL; "bandwidth" of packing and unpacking; "streams" of a load in a profiler trace; "sanitizer",
memcheck. Rates are also said as a share of the limit, a copy of 1 GiB from pinned memory.

Each part is a process with its own limit, all of them together take eight minutes at most, and rows are kept as they come; parts
after one that fails run all the same. Downloads nothing. Needs torch with CUDA, nvcc, cmake, ninja, pybind11, pytest, xdist,
hypothesis and safetensors; which of these are there is said first. The exit status is 1 if a part did not run.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
TOTAL = 480.0
"""Seconds for all parts."""
LIMITS = {
    "build": 60, "load": 45, "real_size": 150, "page_cache": 45, "save": 35, "sync": 85, "ranks": 95, "tests": 90, "peers": 40,
    "memory": 45, "op": 30, "streams": 30, "bandwidth": 30, "sanitizer": 60,
}  # fmt: skip
"""Seconds for each part at most, in the order in which they run: what is worth most comes first, the last have what is left."""
REHEARSAL = 4.0
"""Times as long each part may take without a GPU, where the machine may be busy with something else."""
NEEDED = ("torch", "cmake", "ninja", "pybind11", "pytest", "xdist", "hypothesis", "safetensors")
Row = dict[str, Any]
DEADLINE = time.monotonic() + TOTAL


class NotRun(Exception):
    """A part could not run; the message says why."""


def command(words: list[str], limit: float, gpus: bool = True, **environment: str) -> str:
    """Runs a command, and whatever processes it starts, and returns what it wrote to standard output.

    Args:
        limit: seconds, or fewer where less is left for all parts.
        gpus: whether it may see any.

    Raises:
        NotRun: it failed or took too long; with the end of what it wrote.
    """
    status, output, errors = finish(words, limit, gpus, **environment)
    if status:
        raise NotRun(f"{' '.join(words[:6])} {status}: {(output + errors).strip()[-2000:]}")
    return output.strip()


def finish(words: list[str], limit: float, gpus: bool = True, **environment: str) -> tuple[str, str, str]:
    """The same, however it ends: how, empty for 0, and what it wrote to standard output and to standard error."""
    limit = min(limit, DEADLINE - time.monotonic())
    if limit < 5:
        raise NotRun(f"no time is left of {TOTAL:.0f} s")
    folders = [str(ROOT / folder) for folder in ("python", "tests", "benchmarks")]
    folders += filter(None, [os.environ.get("PYTHONPATH")])
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(folders), "EPLOAD_CUDA": "1", **environment}
    if not gpus:
        variables["CUDA_VISIBLE_DEVICES"] = ""
    pipe = subprocess.PIPE
    try:
        process = subprocess.Popen(
            words,
            cwd=ROOT,
            env=variables,
            stdout=pipe,
            stderr=pipe,
            text=True,
            errors="replace",
            start_new_session=True,
        )
    except OSError as error:
        raise NotRun(str(error)) from error
    try:
        output, errors = process.communicate(timeout=limit)
        status = f"ended with {process.returncode}" if process.returncode != 0 else ""
    except subprocess.TimeoutExpired:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        output, errors = process.communicate()
        status = f"took more than {limit:.0f} s"
    return status, output, errors


# ---- parts that are commands ----


def machine(options: argparse.Namespace) -> list[Row]:
    """What is here, before anything runs."""
    found = [name for name in NEEDED if importlib.util.find_spec(name) is not None or shutil.which(name)]
    rows: list[Row] = [
        {
            "what": "machine", "date": datetime.now(UTC).isoformat(timespec="seconds"), "python": platform.python_version(),
            "cpus": len(os.sched_getaffinity(0)), "GB": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9,
            "nvcc": shutil.which("nvcc") or "none", "missing": ", ".join({*NEEDED} - {*found}) or "nothing",
        }
    ]  # fmt: skip
    try:
        query = [
            "nvidia-smi",
            "--query-gpu=index,name,memory.total,pcie.link.gen.max,driver_version",
            "--format=csv,noheader",
        ]
        rows += [{"what": "GPU", "is": line} for line in command(query, 20).splitlines()]
    except NotRun as error:
        rows.append({"what": "GPU", "is": f"none: {error}"[:200]})
    facts = "import json, torch; print(json.dumps([torch.__version__, torch.version.cuda, torch.cuda.is_available()]))"
    torch_version, cuda, usable = json.loads(command([sys.executable, "-c", facts], 60).splitlines()[-1])
    rows.append({"what": "torch", "version": torch_version, "cuda": cuda, "usable": usable})
    if options.device == "cuda" and not usable:
        rows[-1]["not_run"] = f"torch {torch_version} finds no CUDA device; --device cpu rehearses without one"
    return rows


def build(options: argparse.Namespace) -> list[Row]:
    began = time.monotonic()
    command([sys.executable, "setup.py", "-q", "build_ext", "--inplace"], LIMITS["build"])
    info = command([sys.executable, "-c", "import epload; print(epload.build_info())"], 30)
    return [{"what": "build", "s": time.monotonic() - began, "is": info.splitlines()[-1]}]


def tests(options: argparse.Namespace) -> list[Row]:
    """All that are marked ``cuda``, by four workers. One that ends its process is named, and costs no other."""
    words = [sys.executable, "-u", "-m", "pytest", "-p", "no:cacheprovider", "-m", "cuda", "--tb=short"]
    modules = ["tests/native/test_cuda.py", "tests/end_to_end/test_cuda_loader.py"]
    listed = command([*words, "-q", "-p", "no:xdist", "--collect-only", *modules], 60).splitlines()
    names = [line for line in listed if "::" in line]
    status, output, errors = finish([*words, "-v", "-n", "4", *modules], LIMITS["tests"], EPLOAD_FAIL_WITHOUT_CUDA="1")
    verdicts = re.findall(r"\] (PASSED|FAILED|ERROR|SKIPPED|XFAIL) (\S+::.+?) *$", output, re.MULTILINE)
    # A test that has passed may fail as it is torn down.
    found = {name: verdict for verdict, name in sorted(verdicts, key=lambda pair: pair[0] in ("FAILED", "ERROR"))}
    counts = {verdict: list(found.values()).count(verdict) for verdict in sorted({*found.values()})}
    row: Row = {"what": "tests", **counts}
    if missing := [name for name in names if name not in found]:
        row["not_run"] = f"{len(missing)}, among them {missing[0]}"
    if status:
        row["not_run"] = f"{row.get('not_run', 'not all right')}: {status}: {(output + errors)[-3000:]}"
    return [row]


def sanitizer(options: argparse.Namespace) -> list[Row]:
    tool = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    if not Path(tool).exists():
        raise NotRun("no compute-sanitizer on PATH or in /usr/local/cuda/bin")
    # torch asks the driver for what may not be there, and handles the error.
    words = [
        tool,
        "--tool",
        "memcheck",
        "--report-api-errors",
        "no",
        "--error-exitcode",
        "9",
        *_words("exercise", options),
    ]
    return [{"what": "compute-sanitizer", "is": command(words, LIMITS["sanitizer"]).splitlines()[-1]}]


# ---- parts that measure, each in a process of its own ----


def _words(part: str, options: argparse.Namespace) -> list[str]:
    given = {name: value for name, value in vars(options).items() if name not in ("parts", "part")}
    words = [f"--{name.replace('_', '-')}={value}" for name, value in given.items()]
    return [sys.executable, __file__, f"--part={part}", *words]


def measured(part: str) -> Callable[[argparse.Namespace], list[Row]]:
    def run(options: argparse.Namespace) -> list[Row]:
        found = Path(options.work) / f"{part}.json"
        found.unlink(missing_ok=True)
        failed: list[Row] = []
        memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
        with tempfile.TemporaryDirectory(dir=memory, prefix="epload-gpu-") as options.memory:  # freed however the part ends
            try:
                limit = LIMITS[part] * (REHEARSAL if options.device == "cpu" else 1)
                command(_words(part, options), limit, gpus=options.device != "cpu")
            except NotRun as error:
                failed = [{"what": part, "not_run": str(error)}]
        measured_before = json.loads(found.read_text()) if found.exists() else []
        return [*measured_before, *failed]

    return run


def run_here(options: argparse.Namespace) -> None:
    """Runs one part in this process, and writes its rows."""
    from gpu_parts import kernels, loads, memory, reading

    parts: dict[str, Callable[[argparse.Namespace], Iterable[Row]]] = {
        "load": loads.load, "ranks": loads.several_ranks, "bandwidth": kernels.bandwidth, "page_cache": reading.page_cache,
        "streams": kernels.streams, "op": kernels.op, "peers": loads.others, "exercise": kernels.exercise,
        "real_size": loads.real_size, "save": loads.save, "sync": loads.sync, "memory": memory.memory,
    }  # fmt: skip
    rows: list[Row] = []
    Path(options.work).mkdir(parents=True, exist_ok=True)
    for row in parts[options.part](options):
        rows.append(row)
        new = Path(options.work) / f"{options.part}.new"
        new.write_text(json.dumps(rows))
        new.rename(Path(options.work) / f"{options.part}.json")


PARTS: dict[str, Callable[[argparse.Namespace], list[Row]]] = {
    part: {"build": build, "tests": tests, "sanitizer": sanitizer}.get(part) or measured(part) for part in LIMITS
}
ON_CPU = ("load", "page_cache", "save", "sync", "ranks", "peers", "bandwidth")
"""Parts that a machine without a GPU can rehearse."""


# ---- the whole check ----


def run_all(options: argparse.Namespace, names: list[str]) -> Iterator[tuple[str, list[Row]]]:
    """The machine first; if it cannot run them, no part."""
    for name in ("machine", *names):
        try:
            rows = (machine if name == "machine" else PARTS[name])(options)
        except Exception as error:  # report it and run the other parts
            rows = [{"what": name, "not_run": f"{type(error).__name__}: {error}"}]
        yield name, rows
        if name == "machine" and not_run(rows):
            return


def not_run(rows: list[Row]) -> bool:
    return any("not_run" in row for row in rows)


def lines(rows: list[Row]) -> Iterator[str]:
    for row in rows:
        cells = [f"{name} {value:.3g}" if isinstance(value, float) else f"{name} {value}" for name, value in row.items()]
        yield f"| {row['what']} | {', '.join(cells[1:])} |".replace("\n", " ")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default=",".join(PARTS), help="comma-separated; all by default")
    parser.add_argument("--out", default=str(ROOT / "benchmarks/results/gpu"), help="directory for tables, JSON and traces")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--layers", type=int, default=48, help="layers of the model whose shards are packed and unpacked")
    parser.add_argument("--experts", type=int, default=128, help="of each layer of that model")
    parser.add_argument("--vocabulary", type=int, default=151936, help="of that model")
    parser.add_argument("--bucket-bytes", type=int, default=64 << 20)
    parser.add_argument("--checkpoint-gb", type=float, default=4.0)
    parser.add_argument("--work", help="directory for the checkpoint; temporary by default")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    parser.add_argument("--memory", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part:
        run_here(options)
        return 0
    names = options.parts.split(",")
    if unknown := [name for name in names if name not in PARTS]:
        parser.error(f"expected parts among {', '.join(PARTS)}, got {', '.join(unknown)}")
    if options.device == "cpu":
        names = [name for name in names if name in ON_CPU]
    out = Path(options.out).resolve()
    options.out = str(out)
    out.mkdir(parents=True, exist_ok=True)
    results: dict[str, list[Row]] = {}
    with tempfile.TemporaryDirectory(prefix="epload-gpu-") as work:
        options.work = str(Path(options.work or work).resolve())
        for name, rows in run_all(options, names):
            results[name] = rows
            print(f"\n{name}", *lines(rows), sep="\n", flush=True)
            (out / "gpu.json").write_text(json.dumps(results, indent=1))
            table = [f"\n## {part}\n\n| what | found |\n|---|---|\n" + "\n".join(lines(found)) for part, found in results.items()]
            (out / "gpu.md").write_text("\n".join(table).strip() + "\n")
    failed = [name for name in ("machine", *names) if name not in results or not_run(results[name])]
    print("\nNOT RUN, all or in part: " + ", ".join(failed) if failed else f"\nall parts ran; results in {out}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
