"""Runs a function on several real processes joined by gloo, each with a hard limit that shows every rank's stack.

A server process imports what all tests import once and forks the ranks from it, so that a test of seven ranks does not
cost seven imports.
"""

from __future__ import annotations

import faulthandler
import gc
import multiprocessing
import os
import runpy
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

# A TCPStore looks up the name of each address that connects: a lost answer of a name server would take 5 s.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(
    [
        "torch", "torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor.debug", "epload", "pytest", "hypothesis",
        "transformers.models.auto.modeling_auto", "transformers.modeling_utils", "transformers.conversion_mapping",
        "transformers.models.qwen3_moe.modeling_qwen3_moe",
    ]
)  # fmt: skip

LIMIT = 120.0
"""Seconds one run may take."""


class RankFailed(AssertionError):
    """A rank raised, died or hung; the text has what each rank raised."""


def run(
    world: int, function: Callable[..., Any], *args: Any, limit: float = LIMIT, setup: Callable[[], str] | None = None,
    dying: Collection[int] = (), tcp: bool = False,
) -> list[Any]:  # fmt: skip
    """Calls ``function(rank, *args)`` on ``world`` ranks of a gloo group and returns each rank's value, in order.

    ``setup`` is called first on each rank and returns the backends to make the group with, in place of gloo. Ranks that are
    ``dying`` have to end without a value, for which None is returned. With ``tcp``, they meet at a TCP store, as under torchrun.
    """
    with tempfile.TemporaryDirectory(prefix="epload-test-") as folder:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if tcp else None
        port = store.port if store is not None else 0
        links, processes = [], []
        for rank in range(world):
            ours, theirs = _context.Pipe()
            process = _context.Process(
                target=_main,
                args=(rank, world, folder, limit, theirs, setup, bool(dying), port, function, args),
                daemon=True,
            )
            process.start()
            theirs.close()
            links.append(ours)
            processes.append(process)
        values, errors = _collect(links, time.monotonic() + limit + 10)
        for rank, process in enumerate(processes):
            process.join(60)
            if process.is_alive():
                process.kill()
                errors.setdefault(rank, "did not exit after its value was returned")
            elif rank in errors:
                errors[rank] += f" (exit status {process.exitcode})"
        for rank in dying:
            if not errors.pop(rank, "").startswith("died"):
                errors[rank] = f"was to die, but returned {values.pop(rank, None)}"
        if errors:
            for rank in range(world):
                if stack := _read(Path(folder) / f"stack-{rank}"):
                    errors[rank] = f"{errors.get(rank, '')}\nstack at the limit of {limit} s, or in a crash:\n{stack}"
            raise RankFailed("\n".join(f"---- rank {rank}: {text}" for rank, text in sorted(errors.items())))
        return [values.get(rank) for rank in range(world)]


def run_alone(function: Callable[..., Any], *args: Any, limit: float = LIMIT) -> tuple[int | None, str]:
    """Calls a function in a process of its own, without a group, that it may crash.

    Returns the exit status (negative for a signal, None if it had to be killed at the limit) and what the process printed.
    """
    with tempfile.NamedTemporaryFile("w+", prefix="epload-test-") as output:
        process = _context.Process(target=_alone, args=(output.name, function, args), daemon=True)
        process.start()
        process.join(limit)
        status = process.exitcode
        if status is None:
            process.kill()
            process.join()
        return status, output.read()


def run_script(
    world: int, script: Path, arguments: list[str], folder: Path, environment: dict[str, str], prepare: Callable[[], None],
) -> str:  # fmt: skip
    """Runs a script on ranks with the environment that torchrun makes, and returns what they print."""
    agents = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    common = {
        "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(agents.port),
        "TORCHELASTIC_RUN_ID": "test", "TORCHELASTIC_USE_AGENT_STORE": "True", **environment,
    }  # fmt: skip

    def run_one(rank: int) -> tuple[int | None, str]:
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank), **common}
        return run_alone(_script, script, arguments, folder, own, prepare)

    with ThreadPoolExecutor(world) as pool:
        outcomes = list(pool.map(run_one, range(world)))
    output = "".join(text for _, text in outcomes)
    statuses = [status for status, _ in outcomes]
    if statuses != [0] * world:
        raise RankFailed(f"exit statuses {statuses}, None at the limit of {LIMIT} s:\n{output[-5000:]}")
    return output


def _script(script: Path, arguments: list[str], folder: Path, environment: dict[str, str], prepare: Callable[[], None]) -> None:
    os.environ.update(environment)
    os.chdir(folder)
    torch.set_num_threads(1)
    sys.argv = [str(script), *arguments]
    prepare()
    try:
        runpy.run_path(str(script), run_name="__main__")
        status = 0
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    # A thread of gloo may still be about to free tensors of the last collective, for which it needs Python. Where the
    # interpreter ends first, torch aborts the process.
    os._exit(status)


def _alone(output: str, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    gc.freeze()  # each full collection would copy all pages of what the server has imported
    with open(output, "w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    function(*args)


def _collect(links: list[Connection], until: float) -> tuple[dict[int, Any], dict[int, str]]:
    values: dict[int, Any] = {}
    errors: dict[int, str] = {}
    waiting = dict(zip(links, range(len(links)), strict=True))
    while waiting:
        ready = wait(list(waiting), timeout=max(0.0, until - time.monotonic()))
        if not ready:
            errors.update(dict.fromkeys(waiting.values(), "did not answer in time"))
            break
        for link in ready:
            rank = waiting.pop(link)
            try:
                ok, value = link.recv()
                (values if ok else errors)[rank] = value
            except EOFError:
                errors[rank] = "died"
    return values, errors


def _read(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def _main(
    rank: int, world: int, folder: str, limit: float, link: Connection, setup: Callable[[], str] | None, some_die: bool,
    port: int, function: Callable[..., Any], args: tuple[Any, ...],
) -> None:  # fmt: skip
    gc.freeze()  # each full collection would copy all pages of what the server has imported
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background of a shell ignores it
    with open(os.path.join(folder, f"stack-{rank}"), "w") as stacks:
        faulthandler.enable(stacks)
        faulthandler.dump_traceback_later(limit, file=stacks, exit=True)
        try:
            store = dist.TCPStore("127.0.0.1", port, is_master=False) if port else None
            dist.init_process_group(
                setup() if setup else "gloo", f"file://{folder}/rendezvous" if store is None else None, store=store,
                rank=rank, world_size=world, timeout=timedelta(seconds=limit),
            )  # fmt: skip
            value = function(rank, *args)
            if not some_die:
                dist.barrier()
            link.send((True, value))
            status = 0
        except BaseException:
            link.send((False, traceback.format_exc()))
            status = 1
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)  # gloo can abort a rank that destroys its group while others, which may be stuck, still use it
