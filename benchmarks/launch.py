"""Runs the ranks of a benchmark, on this machine or in a testbed, until every entry has been measured or has failed."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import peers
from netbed import NetBed, ended_by_signals
from workload import Size, write_checkpoint

HERE = Path(__file__).parent


@dataclass
class Plan:
    """What the ranks run."""

    nodes: int
    ranks: int
    """Per node."""
    size: dict[str, int]
    checkpoints: list[str]
    """Folders of two checkpoints; for syncs none."""
    entries: dict[str, dict[str, list[float]]]
    """Case -> entry -> seconds of the completed runs."""
    repeat: int = 5
    slow_repeat: int = 3
    """Runs of entries that take longer than ``slow`` seconds."""
    slow: float = 20.0
    limit: float = 300.0
    """Most seconds for one run, including its preparation and check."""
    interface: str = "lo"
    """The network interface whose bytes are counted."""
    few: dict[str, Any] | None = None
    """Size and checkpoints of a second model. Its reloads, the case "few", alternate with those of the first."""
    trainers: int = 0
    """For syncs: how many of the nodes are the trainer's, the first ones. The others are the rollout job's."""
    worker: str = "worker.py"
    """What a rank runs."""


@dataclass
class Outcome:
    samples: list[dict[str, Any]] = field(default_factory=list)
    failures: list[dict[str, str]] = field(default_factory=list)
    """``{"case", "entry", "error"}`` of each entry that could not be imported, raised, hung or produced wrong bytes."""


def checkpoints(folder: Path, size: Size) -> list[str]:
    """Folders of two checkpoints of one model; writes those that do not exist."""
    made = []
    for seed in (0, 1):
        made.append(str(folder / f"{size.layers}x{size.experts}-{seed}"))
        if not (Path(made[-1]) / "config.json").exists():
            write_checkpoint(Path(made[-1]), size, seed)
    return made


def loaders(cases: tuple[str, ...], outcome: Outcome, only: str = "") -> dict[str, dict[str, list[float]]]:
    """The peers of each case. Import failures are added to ``outcome``. ``only``: comma-separated names."""
    entries: dict[str, dict[str, list[float]]] = {case: {} for case in cases}
    for name in peers.names():
        if only and name not in only.split(","):
            continue
        try:
            for peer in peers.find(name):
                for case in set(cases) & set(peer.cases):
                    entries[case][peer.name] = []
        except Exception as error:
            case = "library" if name.startswith("transformers") else "meta"
            case = case if case in cases else cases[0]
            outcome.failures.append({"case": case, "entry": name, "error": f"missing: {error}"})
    return entries


def run(plan: Plan, folder: Path, outcome: Outcome, bed: NetBed | None = None) -> None:
    """Measures all entries. Records an entry that fails and restarts the ranks for the others.

    ``folder`` belongs to this plan and starts empty. Raises SystemExit if the ranks fail before the first entry.
    """
    log = folder / "log"
    with ended_by_signals():
        _until_done(plan, folder, log, outcome, bed)


def _until_done(plan: Plan, folder: Path, log: Path, outcome: Outcome, bed: NetBed | None) -> None:
    while any(plan.entries.values()):
        (folder / "plan.json").write_text(json.dumps(asdict(plan)))
        log.unlink(missing_ok=True)
        for file in folder.glob("error-*"):
            file.unlink()
        error = _ranks(plan, folder, bed)
        lines = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
        for sample in (line for line in lines if "seconds" in line):
            plan.entries[sample["case"]][sample["entry"]].append(sample["seconds"])
            outcome.samples.append(sample)
        if not error:
            return
        began = [line["began"] for line in lines if "began" in line]
        if not began:
            raise SystemExit(f"the ranks did not start: {error}")
        case, entry = began[-1]
        print(f"{case} {entry}: FAILED, {error}", file=sys.stderr, flush=True)
        outcome.failures.append({"case": case, "entry": entry, "error": error})
        del plan.entries[case][entry]
        for cases in together(plan.entries):
            if case in cases:
                break
            for done in cases:
                plan.entries[done] = {}
        plan.entries = {case: entries for case, entries in plan.entries.items() if entries}


def together(cases: Iterable[str]) -> list[list[str]]:
    """Groups the cases that are measured in the same rounds."""
    rounds: list[list[str]] = []
    for case in cases:
        if case == "few" and rounds:
            rounds[-1].append(case)
        else:
            rounds.append([case])
    return rounds


def _ranks(plan: Plan, folder: Path, bed: NetBed | None) -> str:
    """Starts the ranks and waits for them. Returns the error; empty if they succeeded."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = {
        **os.environ, "EPLOAD_BENCH": str(folder), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        "WORLD_SIZE": str(plan.nodes * plan.ranks), "LOCAL_WORLD_SIZE": str(plan.ranks), "OMP_NUM_THREADS": "1",
        "TORCH_CPP_LOG_LEVEL": "ERROR", "TRANSFORMERS_VERBOSITY": "error", "HF_HUB_OFFLINE": "1",
        "PYTHONWARNINGS": "ignore",
        "PYTHONFAULTHANDLER": "1",
    }  # fmt: skip
    processes = []
    for rank in range(plan.nodes * plan.ranks):
        prefix, place = bed.place(rank // plan.ranks) if bed else ([], {})
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank % plan.ranks)}
        with open(folder / f"output-{rank}", "wb") as output:
            process = subprocess.Popen(
                [*prefix, sys.executable, str(HERE / plan.worker)],
                env={**common, **place, **own},
                start_new_session=True,
                stdout=output,
                stderr=output,
            )
        processes.append(process)
    try:
        return _watch(plan, folder, processes)
    finally:
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def _watch(plan: Plan, folder: Path, processes: list[subprocess.Popen[bytes]]) -> str:
    """Waits until all ranks have exited, one has failed, or ``plan.limit`` seconds pass without a log line."""
    progress, until = 0, time.monotonic() + plan.limit
    for line in _follow(folder / "log"):
        if line:
            progress += 1
            until = time.monotonic() + plan.limit
            if "seconds" in line:
                print(f"  {line['case']:<12}{line['entry']:<36}{line['seconds']:9.3f} s", flush=True)
            continue
        codes = [process.poll() for process in processes]
        failed = [rank for rank, code in enumerate(codes) if code]
        if failed:
            killed = [rank for rank in failed if (codes[rank] or 0) < 0]
            if killed:
                print(_tail(folder / f"output-{killed[0]}", 60), file=sys.stderr)  # its stacks
                return f"rank {killed[0]} was killed by {signal.Signals(-(codes[killed[0]] or 0)).name}"
            errors = sorted(folder.glob("error-*"), key=lambda file: file.stat().st_mtime_ns)
            if errors:
                return f"rank {errors[0].name[6:]}: {errors[0].read_text().strip()}"
            return f"rank {failed[0]} ended with {codes[failed[0]]}: {_tail(folder / f'output-{failed[0]}', 1)}"
        if all(code == 0 for code in codes):
            return ""
        if time.monotonic() > until:
            return f"took longer than {plan.limit:.0f} s"
    return ""


def _follow(path: Path) -> Iterator[dict[str, Any]]:
    """Yields the lines of a growing file as they arrive, and an empty dict after each poll."""
    position = 0
    while True:
        text = path.read_text()[position:] if path.exists() else ""
        for line in text.splitlines(keepends=True):
            if line.endswith("\n"):
                position += len(line)
                yield json.loads(line)
        time.sleep(0.1)
        yield {}


def _tail(output: Path, count: int) -> str:
    lines = output.read_text(errors="replace").strip().splitlines() if output.exists() else []
    return "\n".join(lines[-count:]) if lines else "no output"
