"""Shared by campaigns of seeded faults: how a process dies, stops or fails, and the judging of one seed after another."""

from __future__ import annotations

import argparse
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from typing import Any
from unittest import mock

from support.ranks import RankFailed


def stop(seconds: float, then: signal.Signals) -> None:
    """Stops this process; another one sends it a signal later, which must not reach a process that has its number by then."""
    victim = os.pidfd_open(os.getpid())
    if os.fork() == 0:
        time.sleep(seconds)
        with suppress(OSError):
            signal.pidfd_send_signal(victim, then)
        os._exit(0)
    os.close(victim)
    os.kill(os.getpid(), signal.SIGSTOP)


def act(kind: str, timeout: float) -> None:
    """Does to this process what a kind of fault is. ``timeout``: after which the others give it up."""
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif kind == "stop":
        stop(2 * timeout, signal.SIGKILL)
    elif kind == "slow":
        time.sleep(timeout / 3)
    elif kind == "full":
        raise OSError(28, "No space left on device")
    elif kind == "memory":
        raise MemoryError("no memory left, by the campaign")
    elif kind == "raise":
        raise RuntimeError("a fault of the campaign")


class Moments:
    """Counts calls of some methods, and does something at one of them. A context manager."""

    def __init__(
        self, places: Sequence[tuple[Any, str]], at: int = -1, action: Callable[..., object] | None = None, after: bool = False,
        applies: Callable[..., bool] = lambda *args: True,
    ) -> None:  # fmt: skip
        """
        Args:
            places: owners and names of the methods.
            action: is given the arguments of the call; with ``after`` it comes after it, and returns False if it did nothing.
            applies: tells from the arguments whether a call counts.
        """
        self._places, self._at, self._action, self._after, self._applies = places, at, action, after, applies
        self.count = 0
        self.fired = False
        self._lock = threading.Lock()

    def _wrap(self, inner: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            with self._lock:  # some calls come from several threads
                counts = self._applies(*args)
                self.count += counts
                now = counts and self.count > self._at >= 0 and not self.fired and self._action is not None
                self.fired |= now
            if now and not self._after:
                self._action(*args)
            result = inner(*args, **kwargs)
            if now and self._after:
                self.fired = self._action(*args) is not False
            return result

        return call

    def __enter__(self) -> Moments:
        self._stack = ExitStack()
        for owner, name in self._places:
            self._stack.enter_context(mock.patch.object(owner, name, self._wrap(getattr(owner, name))))
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()


def left_over() -> list[str]:
    """Returns the threads of epload that still run, once they had a moment to end."""
    until = time.monotonic() + 5
    while True:
        names = [thread.name for thread in threading.enumerate() if thread.name.startswith("epload-")]
        if not names or time.monotonic() > until:
            return names
        time.sleep(0.05)


def has_hung(error: RankFailed) -> bool:
    return "did not answer" in str(error) or "stack at the limit" in str(error)


def run(
    description: str | None, judge: Callable[[int], tuple[str, str]], good: Sequence[str], regressions: Sequence[int] = ()
) -> int:  # fmt: skip
    """Judges the seeds that the command line names; returns the exit status, 1 if a verdict is bad.

    Args:
        judge: gives for a seed the verdict, and the fault or why.
        good: verdicts that are as they should be.
        regressions: seeds that were once judged bad.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no fault after so many")
    parser.add_argument("--regressions", action="store_true", help="the seeds once judged bad, in place of others")
    options = parser.parse_args()
    began, verdicts = time.monotonic(), Counter[str]()
    for seed in regressions if options.regressions else range(options.seed, options.seed + options.faults):
        if time.monotonic() - began > options.seconds:
            break
        verdict, why = judge(seed)
        verdicts[verdict] += 1
        shown = why.partition("\n")[0] if verdict in good else why
        print(f"seed {seed}: {verdict}: {shown}", flush=True)
    counts = ", ".join(f"{count} {verdict}" for verdict, count in verdicts.items())
    print(f"{verdicts.total()} faults in {time.monotonic() - began:.0f} s: {counts}")
    return int(any(verdict not in good for verdict in verdicts))
