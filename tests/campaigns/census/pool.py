"""A worker process that judges one class after another, within limits of time and memory; and as many as a census has."""

from __future__ import annotations

import json
import multiprocessing
import os
import resource
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from campaigns.census.classes import auto_classes

_context = multiprocessing.get_context("spawn")
SECONDS = 180.0
"""Seconds that one class may take."""
GIGABYTES = 8.0
"""Memory that a worker may allocate; a larger model does not build."""
RECYCLED = 120
"""Classes after which a worker is replaced: the library's modules are not given back."""


def work(link: Connection) -> None:
    """Judges the classes that come over a link, until it is closed."""
    import logging
    import warnings

    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ.setdefault("TQDM_DISABLE", "1")
    warnings.simplefilter("ignore")
    import torch
    import transformers

    from campaigns.census.judge import judge

    resource.setrlimit(resource.RLIMIT_DATA, (int(GIGABYTES * 1e9),) * 2)
    torch.set_num_threads(1)
    transformers.logging.set_verbosity(logging.CRITICAL)
    transformers.logging.disable_progress_bar()
    logging.disable(logging.WARNING)
    try:
        while True:
            link.send(asdict(judge(*link.recv())))
    except EOFError:  # there is nothing more to judge
        return


class Worker:
    """A process that judges one class after another, and is replaced when it has ended or has judged many."""

    def __init__(self) -> None:
        self._link: Connection | None = None
        self._count = 0

    def verdict(self, name: str, places: list[tuple[str, str]]) -> dict[str, Any]:
        """Judges a class; once more in a new process if it fails for want of memory that classes before it have taken."""
        fresh = self._link is None
        verdict = self._verdict(name, places)
        starved = any("can't allocate memory" in text or "process died" in text for text in verdict["findings"])
        if starved or self._count >= RECYCLED:
            self.close()
        return verdict if fresh or not starved else self._verdict(name, places)

    def _verdict(self, name: str, places: list[tuple[str, str]]) -> dict[str, Any]:
        if self._link is None:
            self._link, theirs = _context.Pipe()
            self._process = _context.Process(target=work, args=(theirs,), daemon=True)
            self._process.start()
            theirs.close()
            self._count = 0
        self._count += 1
        text = f"took more than {SECONDS:.0f} s"
        try:
            self._link.send((name, places))
            if self._link.poll(SECONDS):
                return dict(self._link.recv())
        except (EOFError, OSError):
            text = "the process died"
        self.close()
        return {"name": name, "kind": "raising", "findings": [text], "notes": []}

    def close(self) -> None:
        if self._link is not None:
            self._link.close()
            self._process.kill()
            self._process.join()
        self._link = None


def census(names: list[str], workers: int, results: Path | None, verbose: bool) -> dict[str, dict[str, Any]]:
    """Returns the verdicts on classes by name. Those in ``results``, a file that is kept, are not judged again."""
    tables = auto_classes()
    verdicts: dict[str, dict[str, Any]] = json.loads(results.read_text()) if results and results.exists() else {}
    began = time.monotonic()
    idle = [Worker() for _ in range(workers)]

    def judge(name: str) -> dict[str, Any]:
        worker = idle.pop()
        verdict = worker.verdict(name, tables.get(name, []))
        idle.append(worker)
        return verdict

    with ThreadPoolExecutor(workers) as pool:
        for number, verdict in enumerate(pool.map(judge, [name for name in names if name not in verdicts]), 1):
            verdicts[verdict["name"]] = verdict
            if verbose or verdict["kind"] in ("wrong", "raising"):
                findings = "; ".join(verdict["findings"])[:400]
                at = f"{time.monotonic() - began:7.1f} s {number:5}"
                print(f"{at} {verdict['name']}: {verdict['kind']} {findings}", flush=True)
            if results is not None:
                part = results.with_suffix(".part")
                part.write_text(json.dumps(verdicts, indent=0))
                part.replace(results)
    for worker in idle:
        worker.close()
    return {name: verdicts[name] for name in names}
