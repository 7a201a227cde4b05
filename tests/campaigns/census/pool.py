"""Judges each class in a process of its own, within limits of time and memory, several at a time."""

from __future__ import annotations

import json
import logging
import os
import resource
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

from campaigns.census.classes import auto_classes
from support import ranks

SECONDS = 180.0
"""Seconds that one class may take."""
GIGABYTES = 8.0
"""Memory that a process may allocate; a larger model does not build."""


def work(name: str, places: list[tuple[str, str]]) -> None:
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
    print(json.dumps(asdict(judge(name, places))), flush=True)


def judge_alone(name: str, places: list[tuple[str, str]]) -> dict[str, Any]:
    """Judges a class in a process that it may end. ``places``: see :func:`campaigns.census.judge.judge`."""
    status, output = ranks.run_alone(work, name, places, limit=SECONDS)
    if status == 0:
        return dict(json.loads(output.splitlines()[-1]))
    text = f"took more than {SECONDS:.0f} s" if status is None else f"the process died: {output[-300:]}"
    return {"name": name, "kind": "raising", "findings": [text], "notes": []}


def census(names: list[str], workers: int, results: Path | None, verbose: bool) -> dict[str, dict[str, Any]]:
    """Returns the verdicts on classes by name. Those in ``results``, a file that is kept, are not judged again."""
    tables = auto_classes()
    verdicts: dict[str, dict[str, Any]] = json.loads(results.read_text()) if results and results.exists() else {}
    began, todo = time.monotonic(), [name for name in names if name not in verdicts]
    with ThreadPoolExecutor(workers) as pool:
        judged = pool.map(judge_alone, todo, [tables.get(name, []) for name in todo])
        for number, verdict in enumerate(judged, 1):
            verdicts[verdict["name"]] = verdict
            if verbose or verdict["kind"] in ("wrong", "raising"):
                findings = "; ".join(verdict["findings"])[:400]
                at = f"{time.monotonic() - began:7.1f} s {number:5}"
                print(f"{at} {verdict['name']}: {verdict['kind']} {findings}", flush=True)
            if results is not None:
                part = results.with_suffix(".part")
                part.write_text(json.dumps(verdicts, indent=0))
                part.replace(results)
    return {name: verdicts[name] for name in names}
