"""A fake asynchronous accelerator, ``fakedev:0`` and ``fakedev:1``, for tests. Streams are threads, memory is the host's.

Use it in processes made for it, since it stays loaded: ``ranks.run(2, function, setup=partial(fakedev.setup, "nccl"))``.
Work on a stream runs when its turn comes; a *gate* (:func:`hold`) stops it there until :func:`release`, so that what
should have been waited for is certain not to have happened yet. Memory is poisoned when it is freed and when it is given
out. An error of a stream's work is raised by the next host-side wait for that stream. A broadcast whose peer has ended does
not end until its communicator is aborted.
"""

from __future__ import annotations

import atexit
import os
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib import util
from typing import Any

import torch
import torch.distributed as dist

from epload.native import ops
from support.fakedev import build

NAME = "fakedev"
BACKENDS = f"cpu:gloo,{NAME}:fakeccl"
AS_ASCEND = f"cpu:gloo,{NAME}:hccl"
"""Backends of a group whose one for the device has the name of Ascend's."""
SEMANTICS = ("nccl", "hccl")

_semantics = "nccl"
_lazy = False


def setup(semantics: str = "nccl", lazy: bool = False, shares: bool = True) -> str:
    """Loads the device into this process and returns the backends to make the process group with.

    ``shares``: whether other processes can open its memory, as under nccl they can, but not that of expandable segments.

    ``lazy``: whether a group connects its members in its first operation, as NCCL and HCCL do, and not when it is made.

    ``semantics``: ``"nccl"``: synchronous collectives run on the current stream and return no work, and epload's ops run the CUDA
    kernels' own code, as on a GPU; ``"hccl"``: all collectives run on a stream of the group's own, between event hops, and return
    a work, and there are no kernels, as on Ascend.
    """
    if semantics not in SEMANTICS:
        raise ValueError(f"expected one of {SEMANTICS}, got {semantics!r}")
    global _semantics, _lazy
    _semantics, _lazy = semantics, lazy
    os.environ.pop("EPLOAD_TEST_NOT_SHARED", None)
    if not shares:
        os.environ["EPLOAD_TEST_NOT_SHARED"] = "1"
    _native()
    if semantics == "nccl":
        use_kernels()
    return BACKENDS


class _Kernels:
    """``torch.ops.epload``, but for the ops that know a kind of device."""

    def __getattr__(self, name: str) -> Any:
        of_pipes = ("device_pipe", "read_regions", "write_from_device", "upload", "download")
        of_device = ("pack", "unpack", "cuda_obstacle", "share_memory", "open_memory", "close_memory", *of_pipes)
        return getattr(torch.ops.epload_test if name in of_device else torch.ops.epload, name)


def use_kernels() -> None:
    """From here on epload's ops run the kernels' code on the device. The library that is shipped has kernels for CUDA only."""
    torch.ops.load_library(str(build.library()))
    ops._ops = _Kernels()


def hold(stream: torch.Stream) -> None:
    """Work pushed to ``stream`` from here on waits for :func:`release`; a host-side wait for it would hang."""
    _native().hold(stream.device_index, stream.stream_id)


def release(stream: torch.Stream) -> None:
    """Opens every gate of ``stream``."""
    _native().release(stream.device_index, stream.stream_id)


@contextmanager
def holding(stream: torch.Stream) -> Iterator[None]:
    hold(stream)
    try:
        yield
    finally:
        release(stream)


def wedge_aborts(wedge: bool = True) -> None:
    """Whether aborting a communicator never returns, as NCCL's may not."""
    _native().wedge_aborts(wedge)


def contexts() -> list[int]:
    """The devices on which this process has a context."""
    return list(_native().contexts())


def group_streams() -> list[torch.Stream]:
    """The streams that process groups have made for themselves so far."""
    return [
        torch.Stream(stream_id=stream, device_index=device, device_type=torch._C._autograd.DeviceType.PrivateUse1.value)
        for device, stream in _native().group_streams()
    ]


@contextmanager
def traced() -> Iterator[list[tuple[int, int, str]]]:
    """Fills the list, at the end, with (device, stream id, task) of all that ran, in order of completion."""
    seen: list[tuple[int, int, str]] = []
    torch.accelerator.synchronize()
    _native().start_trace()
    yield seen
    torch.accelerator.synchronize()
    seen += _native().stop_trace()


class _Module(types.ModuleType):
    """``torch.fakedev``, as torch expects a device's module to be."""

    Stream = torch.Stream
    Event = torch.Event

    is_available = staticmethod(lambda: True)
    is_initialized = staticmethod(lambda: True)
    _is_in_bad_fork = staticmethod(lambda: False)
    _lazy_init = staticmethod(lambda: None)
    manual_seed_all = staticmethod(lambda seed: None)
    get_rng_state = staticmethod(lambda device=None: torch.empty(0, dtype=torch.uint8))
    set_rng_state = staticmethod(lambda state, device=None: None)
    get_amp_supported_dtype = staticmethod(lambda: [torch.float16, torch.bfloat16])
    device_count = staticmethod(lambda: int(_native().DEVICES))
    current_device = staticmethod(lambda: torch.accelerator.current_device_index())
    current_stream = staticmethod(lambda device=None: torch.accelerator.current_stream(device))
    synchronize = staticmethod(lambda device=None: torch.accelerator.synchronize(device))
    set_device = staticmethod(lambda device: torch.accelerator.set_device_index(torch.device(device).index or 0))
    stream = staticmethod(lambda stream: stream)
    empty_cache = staticmethod(lambda: torch.accelerator.empty_cache())


def _native() -> Any:
    if "_fakedev" in sys.modules:
        return sys.modules["_fakedev"]
    spec = util.spec_from_file_location("_fakedev", build.device())
    assert spec is not None
    assert spec.loader is not None
    native = util.module_from_spec(spec)
    torch.utils.rename_privateuse1_backend(NAME)
    spec.loader.exec_module(native)
    sys.modules["_fakedev"] = native
    torch._register_device_module(NAME, _Module(f"torch.{NAME}"))
    torch.utils.generate_methods_for_privateuse1_backend(for_tensor=True, for_module=True, for_storage=True)
    for name in ("fakeccl", "hccl"):
        dist.Backend.register_backend(name, partial(_make_backend, name), extended_api=True, devices=[NAME])
    atexit.register(native.drain, 5.0)  # threads that still work when the interpreter goes would crash it
    return native


def _make_backend(name: str, options: Any, _: Any = None) -> Any:
    store, rank, size = dist.PrefixStore("fakeccl/", options.store), options.group_rank, options.group_size
    timeout = options.timeout

    def connect() -> Any:
        return dist.ProcessGroupGloo(store, rank, size, timeout=timeout)

    backend = None if _lazy else connect()
    ranks = list(options.global_ranks_in_group)
    return _native().make_backend(lambda: backend or connect(), rank, size, name, ranks, _semantics == "hccl")
