"""The pinned memory through which bytes cross between the host and a device, in pieces of a few threads: small, and so soon used
again that they stay in the processor's cache."""

from __future__ import annotations

import threading
import weakref

import torch

from epload.native import ops
from epload.transfer.affinity import near, read_threads

PINNED_BYTES = 64 << 20
"""Maximum bytes of a pipe."""
_PIECE_BYTES = 4 << 20
"""Maximum bytes of a piece; each thread has two. 8 threads with 4 MiB took 51.9 of the 54.8 GB/s of an H200's link; with 1 MiB,
38 to 48."""
_ALIGNMENT = 4096
_pipes: weakref.WeakValueDictionary[torch.device, DevicePipe] = weakref.WeakValueDictionary()
_lock = threading.Lock()


class DevicePipe:
    """The pipe of one device, which all that use it in this process share. It is freed with the last reference."""

    def __init__(self, device: torch.device, threads: int) -> None:
        piece = min(_PIECE_BYTES, PINNED_BYTES // (2 * threads) // _ALIGNMENT * _ALIGNMENT)
        with near(device):
            self.native = ops.device_pipe(device, threads, piece)
            """The pipe as the ops take it."""
        self.footprint = 2 * 2 * threads * piece
        """Bytes of pinned memory, and as many on the device, for what does not cross straight to its tensor."""

    @staticmethod
    def of(device: torch.device, ranks: int) -> DevicePipe:
        """Returns that of a device, and makes it if there is none. ``ranks``: of this node, which share its processors."""
        with _lock:
            pipe = _pipes.get(device)
            if pipe is None:
                pipe = _pipes[device] = DevicePipe(device, read_threads(ranks))
            return pipe
