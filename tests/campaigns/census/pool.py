"""Worker processes that judge one class after another, within limits of time and memory."""

from __future__ import annotations

import json
import multiprocessing
import os
import resource
import time
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from campaigns.census.classes import auto_classes

_context = multiprocessing.get_context("spawn")
SECONDS = 180.0
"""That one class may take."""
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
            link.send(judge(*link.recv()).to_json())
    except EOFError:  # there is nothing more to judge
        return


class Worker:
    """A process that judges one class after another."""

    def __init__(self) -> None:
        self.link, theirs = _context.Pipe()
        self._process = _context.Process(target=work, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()
        self.task = ""
        self.began = 0.0
        self.count = 0
        self._dead = False

    def give(self, name: str, places: list[tuple[str, str]]) -> None:
        self.task, self.began = name, time.monotonic()
        self.count += 1
        self.link.send((name, places))

    def take(self) -> dict[str, Any]:
        """The verdict on its class, once the link is ready."""
        name, self.task = self.task, ""
        try:
            return dict(self.link.recv())
        except (EOFError, ConnectionResetError):
            self._dead = True  # also while the system has yet to notice
            return {"name": name, "kind": "raising", "findings": ["the process died"], "notes": []}

    def excess(self) -> str:
        """Whether its class takes too much, and of what."""
        if time.monotonic() - self.began > SECONDS:
            return f"took more than {SECONDS:.0f} s"
        return ""

    def exhausted(self, verdict: dict[str, Any]) -> bool:
        """Whether a class failed, or ended its process, for want of memory that classes before it have taken."""
        return self.count > 1 and (self._dead or any("can't allocate memory" in text for text in verdict["findings"]))

    def spent(self) -> bool:
        return self.count >= RECYCLED or self._dead or not self._process.is_alive()

    def close(self) -> None:
        self.link.close()
        self._process.kill()
        self._process.join()


def verdict_of(worker: Worker, name: str, places: list[tuple[str, str]]) -> dict[str, Any]:
    """The verdict on one class, from a worker that has nothing to do."""
    worker.give(name, places)
    while not worker.link.poll(1):
        if too_much := worker.excess():
            return {"name": name, "kind": "raising", "findings": [too_much], "notes": []}
    return worker.take()


def census(names: list[str], workers: int, results: Path | None, verbose: bool) -> dict[str, dict[str, Any]]:
    """The verdicts on classes by name. ``results`` are kept in a file, and those in it are not judged again."""
    known = auto_classes()
    done: dict[str, dict[str, Any]] = (
        json.loads(results.read_text()) if results is not None and results.exists() else {}
    )
    waiting = [name for name in reversed(names) if name not in done]
    pool: list[Worker] = []
    began, count = time.monotonic(), 0
    while waiting or any(worker.task for worker in pool):
        for worker in [w for w in pool if not w.task and w.spent()]:
            worker.close()
            pool.remove(worker)
        while waiting and len(pool) < workers:
            pool.append(Worker())
        for worker in pool:
            if not worker.task and waiting:
                name = waiting.pop()
                worker.give(name, known.get(name, []))
        busy = {worker.link: worker for worker in pool if worker.task}
        ready = wait(list(busy), timeout=1)
        verdicts = []
        for worker in [busy[link] for link in ready if isinstance(link, Connection)]:
            verdict = worker.take()
            if worker.exhausted(verdict):
                waiting.append(verdict["name"])
                worker.count = RECYCLED
            else:
                verdicts.append(verdict)
        for worker in [w for w in busy.values() if w.task]:
            if too_much := worker.excess():
                verdicts.append({"name": worker.task, "kind": "raising", "findings": [too_much], "notes": []})
                worker.close()
                pool.remove(worker)
        for verdict in verdicts:
            done[verdict["name"]] = verdict
            count += 1
            if verbose or verdict["kind"] in ("wrong", "raising"):
                findings = "; ".join(verdict["findings"])[:400]
                print(
                    f"{time.monotonic() - began:7.1f} s {count:5} {verdict['name']}: {verdict['kind']} {findings}",
                    flush=True,
                )
        if verdicts and results is not None:
            part = results.with_suffix(".part")
            part.write_text(json.dumps(done, indent=0))
            part.replace(results)
    for worker in pool:
        worker.close()
    return {name: done[name] for name in names}
