"""Turns runs into rows of medians, with failures, hardware, date and command."""

from __future__ import annotations

import os
import platform
import re
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import peers
from launch import Outcome

Row = dict[str, Any]


def facts(nbytes: int, tensors: int) -> Row:
    """Command, date, hardware and software of a measurement."""
    cpu = re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.M)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    return {
        "command": " ".join(["python", os.path.relpath(sys.argv[0]), *sys.argv[1:]]),
        "date": time.strftime("%Y-%m-%d"),
        "hardware": f"{len(os.sched_getaffinity(0))} cores of {cpu[1] if cpu else platform.machine()}, {memory:.0f} GB",
        "software": f"torch {torch.__version__}, Python {platform.python_version()}",
        "nbytes": nbytes,
        "tensors": tensors,
    }


def contents(model: nn.Module) -> tuple[int, int]:
    """Number of bytes and of tensors in a model's state dict."""
    state = model.state_dict()
    return sum(tensor.nbytes for tensor in state.values()), len(state)


def titles() -> dict[str, str]:
    """The peers' titles in tables."""
    known = {}
    for name in peers.names():
        try:
            known.update({peer.name: peer.title for peer in peers.find(name)})
        except Exception:
            known[name] = name  # a peer that cannot be imported has no title
    return known


def rows(outcome: Outcome, nbytes: int, few_bytes: int = 0) -> list[Row]:
    """One row per case and entry, in the order of the first run. Failures come last, with their errors.

    Args:
        nbytes: bytes of the model.
        few_bytes: bytes of the model of the case "few".
    """
    grouped: dict[tuple[str, str], list[Row]] = {}
    for sample in outcome.samples:
        grouped.setdefault((sample["case"], sample["entry"]), []).append(sample)
    named = titles()
    made = []
    for (case, entry), samples in grouped.items():
        seconds = [sample["seconds"] for sample in samples]
        links = [sample["links"] for sample in samples]
        size = few_bytes if case == "few" else nbytes
        made.append({
            "case": case, "entry": entry, "title": named.get(entry, entry), "ours": entry.startswith("epload"),
            "runs": len(seconds), "min": min(seconds), "median": statistics.median(seconds), "max": max(seconds),
            "phases": _medians([sample["phases"] for sample in samples]),
            "cpu": _medians([sample["cpu"] for sample in samples]),
            "peak": max((s["peak"] for s in samples if s["peak"] is not None), default=None),
            "in": max(link[0] for run in links for link in run) / size,
            "out": max(link[1] for run in links for link in run) / size,
            "links": links[-1],
            "note": samples[-1]["note"],
        })  # fmt: skip
    failed = {(row["case"], row["entry"]): row for row in outcome.failures}
    made = [row for row in made if (row["case"], row["entry"]) not in failed]
    return made + [{**row, "title": named.get(row["entry"], row["entry"]), "ours": False} for row in failed.values()]


def _medians(dicts: list[dict[str, float]]) -> dict[str, float]:
    names = dict.fromkeys(name for one in dicts for name in one)
    return {name: statistics.median(one.get(name, 0.0) for one in dicts) for name in names}


def by_case(found: list[Row], case: str) -> list[Row]:
    """Rows of one case, fastest first, failures last."""
    return sorted((row for row in found if row["case"] == case), key=lambda row: row.get("median", float("inf")))


def median(found: list[Row], case: str, entry: str) -> float | None:
    return next((row["median"] for row in found if (row["case"], row["entry"]) == (case, entry) and "median" in row), None)
