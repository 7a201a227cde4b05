"""The pinned memory through which bytes cross between the host and a device, in pieces of a few threads: small, and so soon used
again that they stay in the processor's cache."""

from __future__ import annotations

import mmap
import threading
import weakref
from typing import Any

import torch
from torch import Tensor

from epload.native import ops
from epload.staging.affinity import near, read_threads

PINNED_BYTES = 64 << 20
"""Of a pipe, at most."""
_PIECE_BYTES = 4 << 20
"""Of a piece, at most; each thread has two. 8 threads with 4 MiB took 51.9 of the 54.8 GB/s of an H200's link, 1 MiB 38 to 48."""
_HUGE_PAGE = 2 << 20
_pipes: weakref.WeakValueDictionary[torch.device, DevicePipe] = weakref.WeakValueDictionary()
_lock = threading.Lock()


class DevicePipe:
    """Of one device, shared by all that use it in this process. Freed with the last reference to it."""

    def __init__(self, device: torch.device, threads: int) -> None:
        nbytes = min(PINNED_BYTES, 2 * threads * _PIECE_BYTES)
        with near(device):
            self._memory, registered = _pinned(nbytes, device)
        self.native = ops.device_pipe(self._memory, device, threads)
        """For the ops."""
        self.threads = threads
        self.footprint = nbytes
        """Bytes of pinned memory."""
        weakref.finalize(self, _free, self.native, self._memory, registered).atexit = False

    @staticmethod
    def of(device: torch.device, ranks: int) -> DevicePipe:
        """That of a device, made if there is none. ``ranks``: of this node, which share its processors."""
        with _lock:
            pipe = _pipes.get(device)
            if pipe is None:
                pipe = _pipes[device] = DevicePipe(device, read_threads(ranks))
            return pipe


def _pinned(nbytes: int, device: torch.device) -> tuple[Tensor, bool]:
    """uint8 memory that the device can copy from and to, and whether it has to be unregistered. On CUDA, huge pages that torch's
    threads touch and that are then registered: a third of the time of ``pin_memory=True``."""
    if device.type == "cuda":
        mapped = mmap.mmap(-1, nbytes + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        mapped.madvise(mmap.MADV_HUGEPAGE)
        memory = torch.frombuffer(mapped, dtype=torch.uint8)
        memory = memory[-memory.data_ptr() % _HUGE_PAGE :][:nbytes].zero_()
        with torch.cuda.device(device):
            if int(_runtime().cudaHostRegister(memory.data_ptr(), nbytes, 0)) == 0:
                return memory, True
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True), False


def _free(pipe: ops.Pipe, memory: Tensor, registered: bool) -> None:
    """Nothing uses the memory any more when it goes."""
    ops.drain_pipe(pipe)
    if registered:
        _runtime().cudaHostUnregister(memory.data_ptr())


def _runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]
