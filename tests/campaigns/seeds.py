"""Runs a campaign whose faults are each judged by themselves."""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Callable, Sequence


def run(
    description: str | None,
    judge: Callable[[int], tuple[str, str]],
    good: Sequence[str],
    bad: Sequence[str],
    regressions: Sequence[int] = (),
) -> int:
    """Judges the seeds that the command line names; returns the exit status, 1 if a verdict is bad.

    Args:
        judge: gives for a seed the verdict, and the fault or why.
        good: verdicts that are as they should be.
        bad: the others.
        regressions: seeds that were once judged bad.
    """
    arguments = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--faults", type=int, default=30)
    arguments.add_argument("--seed", type=int, default=0)
    arguments.add_argument("--seconds", type=float, default=float("inf"), help="start no fault after so many")
    arguments.add_argument("--regressions", action="store_true", help="the seeds once judged bad, in place of others")
    given = arguments.parse_args()
    began, verdicts = time.monotonic(), Counter[str]()
    for seed in regressions if given.regressions else range(given.seed, given.seed + given.faults):
        if time.monotonic() - began > given.seconds:
            break
        verdict, why = judge(seed)
        verdicts[verdict] += 1
        shown = why.partition("\n")[0] if verdict in good else why
        print(f"seed {seed}: {verdict}: {shown}", flush=True)
    counts = ", ".join(f"{verdicts[kind]} {kind}" for kind in (*good, *bad))
    print(f"{sum(verdicts.values())} faults in {time.monotonic() - began:.0f} s: {counts}")
    return int(any(number for verdict, number in verdicts.items() if verdict not in good))
