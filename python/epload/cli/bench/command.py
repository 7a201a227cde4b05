"""``epload bench``: epload's modes and other loaders, on this machine and a checkpoint."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import click

from epload.checkpoint.base import Checkpoint
from epload.cli.output import count, json_option, print_json, show, size, table
from epload.planning.schedule import READERS

_MEMORY = Path("/proc/meminfo")
_CHOICES = ("auto", *READERS)


@click.command()
@click.argument("checkpoint")
@click.option("--nproc", type=click.IntRange(1), default=2, show_default=True, help="Ranks to start.")
@click.option("--repeat", type=click.IntRange(1), default=3, show_default=True, help="Timed loads of each loader.")
@click.option(
    "--readers", type=click.Choice(_CHOICES), multiple=True, help="Only these modes of epload; may be repeated."
)
@click.option("--timeout", type=float, default=600.0, show_default=True, help="Seconds after which to give up.")
@json_option
def bench(checkpoint: str, nproc: int, repeat: int, readers: tuple[str, ...], timeout: float, as_json: bool) -> int:
    """Time epload against torch's loaders here, on a checkpoint.

    Starts torchrun. The model has the checkpoint's own names, is on meta and sharded by FSDP2, in host memory over gloo; one
    load of each loader is compared bit for bit, and not timed. The other loaders read with epload's reader, on rank 0. Exits
    with 1 if any shard differs, or epload fails.
    """
    opened = Checkpoint.open(checkpoint)
    opened.close()
    manifest = opened.manifest
    _check_memory(manifest.nbytes)
    results = _run(checkpoint, nproc, repeat, readers or _CHOICES, timeout)
    if as_json:
        print_json({"nproc": nproc, "repeat": repeat, "nbytes": manifest.nbytes, "results": results})
    else:
        tensors = count(len(manifest.names), "tensor")
        show(f"{tensors}, {size(manifest.nbytes)}, {count(nproc, 'rank')} on one machine, {count(repeat, 'load')} each")
        show()
        show(table(("loader", "median s", "min s", "max s", ""), _rows(results), right=(1, 2, 3)))
    return 0 if all(each.get("equal", not name.startswith("epload")) for name, each in results.items()) else 1


def _check_memory(nbytes: int) -> None:
    """A model, and all weights on rank 0. Raises ValueError."""
    lines = dict(line.split(":") for line in _MEMORY.read_text().splitlines())
    available = 1024 * int(lines["MemAvailable"].split()[0])
    if 2 * nbytes > available:
        raise ValueError(
            f"bench holds the weights twice, {size(2 * nbytes)}, and {size(available)} of memory are available: pass a smaller "
            "checkpoint, such as one file of it"
        )


def _rows(results: dict[str, Any]) -> list[list[str]]:
    rows = []
    for name, each in sorted(results.items(), key=lambda item: float(item[1].get("median", "inf"))):
        if "error" in each:
            rows.append([name, "", "", "", f"failed: {each['error']}"])
            continue
        seconds = (each["median"], min(each["seconds"]), max(each["seconds"]))
        note = f"chose {each['note']}" if each["note"] else ""
        rows.append([name, *(f"{value:.3f}" for value in seconds), note if each["equal"] else "WRONG WEIGHTS"])
    return rows


def _run(checkpoint: str, nproc: int, repeat: int, readers: tuple[str, ...], timeout: float) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={nproc}"]
        command += ["-m", "epload.cli.bench.worker", checkpoint, str(result), f"--repeat={repeat}"]
        command += [f"--readers={each}" for each in readers]
        threads = max(1, len(os.sched_getaffinity(0)) // nproc)
        environment = {"OMP_NUM_THREADS": str(threads), **os.environ}
        code, errors = _wait(command, environment, timeout)
        if code != 0 or not result.exists():
            lines = errors.splitlines() or ["no message"]
            own = [line.removeprefix("epload: ") for line in lines if line.startswith("epload: ")]
            raise click.ClickException(f"torchrun ended with {code}: {(own or lines[-1:])[0]}")
        found: dict[str, Any] = json.loads(result.read_text())
        return found


def _wait(command: list[str], environment: dict[str, str], timeout: float) -> tuple[int, str]:
    """Runs torchrun to its end, which is also that of its ranks. Returns its exit code and standard error."""
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True
    )
    try:
        _, errors = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        raise click.ClickException(f"bench did not end in {timeout:g} s: pass a longer --timeout") from None
    finally:
        if process.poll() is None:  # torchrun ends its ranks when it is told to end
            process.terminate()
            process.communicate()
    return process.returncode, errors
