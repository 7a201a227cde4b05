"""Process groups made by their members alone, directly over the job's store.

``dist.new_group`` needs every rank of the job for every group (N barriers of the whole job at N nodes), or counts the groups that
the process is in and hangs if members have different counts. If the default group is bound to a device, it also splits that
group's communicator, which again needs every rank. Groups made here are not in the list of ``torch.distributed``: they change no
name and no count of the caller's groups. The native ops find them by name.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager, nullcontext, suppress
from datetime import timedelta
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import PrefixStore, Store

from epload.core import threads
from epload.errors import LoadError
from epload.native import ops
from epload.ranks.connection import connect_again

_MIN_POLL, _MAX_POLL = 0.001, 0.1
"""Seconds between two checks; doubles in between."""
_EXIT_SECONDS = 10.0
"""Maximum seconds that process exit waits for device communicators to be aborted."""
_EXIT_THREADS = 4
"""Threads that abort them then: NCCL's abort of a communicator may not return."""


class GroupStore(Store):
    """A store for making one group: waits can be canceled, and the keys that this rank has set are known."""

    def __init__(self, store: Store, timeout: timedelta) -> None:
        super().__init__()
        self.inner = store
        """Store whose waits cannot be canceled."""
        self._timeout = timeout
        self.canceled = False
        self.keys: list[str] = []
        """Set by this rank."""

    def set(self, key: str, value: str) -> None:
        self.keys.append(key)
        self.inner.set(key, value)

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self.inner.get(key)

    def add(self, key: str, value: int) -> int:
        self.keys.append(key)
        return self.inner.add(key, value)

    def check(self, keys: list[str]) -> bool:
        return self.inner.check(keys)

    def delete_key(self, key: str) -> bool:
        return self.inner.delete_key(key)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Polls, as a wait inside the store cannot be canceled."""
        until = time.monotonic() + (timeout or self._timeout).total_seconds()
        pause = _MIN_POLL
        while not self.inner.check(keys):
            if self.canceled:
                raise LoadError("making a process group was canceled, as another rank failed")
            if time.monotonic() >= until:
                raise LoadError(f"timed out: members of the process group did not set {', '.join(keys)}")
            time.sleep(pause)
            pause = min(2 * pause, _MAX_POLL)


Backends = Mapping[str, str]
"""The backend for each type of device."""


class Group:
    """A process group that this rank is in."""

    def __init__(self, name: str, rank: int, ranks: Sequence[int], device: int | None) -> None:
        """
        Args:
            name: equal on all members.
            rank: of this member.
            ranks: sorted global ranks of the members.
            device: index of the device that its backends for devices use; None if it has none.
        """
        self.name: Any = f"{name}/{rank}"  # torch 2.13 has a type for names, 2.11 has none
        """The name by which the native ops find the group: a process may be two members, as of a sender and of a receiver."""
        self._shared_name: Any = name
        self.ranks = tuple(ranks)
        self._device = device
        self._group: dist.ProcessGroup | None = None
        self._device_backends: list[Any] = []
        self._is_hccl = False

    def make(
        self,
        store: GroupStore,
        rank: int,
        timeout: timedelta,
        backends: Backends,
        device: torch.device | None = None,
        watched: bool = False,
    ) -> None:
        """Blocks until all members have called this, in a thread of its own, unless the store's waits are canceled while it makes
        no communicator.

        Args:
            store: the job's, prefixed for this group alone.
            rank: this process's, one of ``ranks``.
            timeout: of making the group, and of each of its operations.
            backends: of the group.
            device: on which to make its communicator now. Otherwise the first operation makes it, which nothing can end if a
                member does not come.
            watched: whether torch ends the process when an operation of NCCL or HCCL fails or takes longer than ``timeout``.
                Otherwise nobody but epload ends operations.
        """
        self._enter_device()
        index, size = self.ranks.index(rank), len(self.ranks)
        # Other backends wait inside the store, until the timeout, for a member that does not come.
        own = store.inner if set(backends.values()) == {"gloo"} else connect_again(store.inner)
        if own is not store.inner:
            own.set_timeout(timeout)  # a sync's store has a shorter one, for other calls
        group = dist.ProcessGroup(PrefixStore("group/", store if own is store.inner else own), index, size)
        built: dict[str, tuple[Any, Any]] = {}
        for kind_of_device, name in backends.items():
            if name not in built:
                prefix = f"{kind_of_device}/"
                with nullcontext() if watched or name not in ("nccl", "hccl") else _unwatched(name):
                    # Only gloo stops using the store once it is made. Threads of other backends may use theirs until the
                    # process exits, when Python code can no longer run.
                    inner = PrefixStore(prefix, store if name == "gloo" else own)
                    built[name] = self._make_backend(name, inner, index, size, timeout)
            group._register_backend(torch.device(kind_of_device), *built[name])
        # The default backend is chosen as by torch: NCCL or XCCL, else a plugin, else gloo.
        default = min(built, key=lambda name: (name not in ("nccl", "xccl"), name == "gloo"))
        group._set_default_backend(built[default][0])
        del store.inner  # the store's port is free, and its keys are gone, once nobody has it
        group._set_group_name(self._shared_name)
        self._group = group
        self.register()
        if device is not None:
            self._connect(device)
        if self.on_devices:
            _at_exit()
            _with_devices.add(self)

    def _make_backend(self, name: str, store: Store, index: int, size: int, timeout: timedelta) -> tuple[Any, Any]:
        """Returns the backend's type and object."""
        types, plugin, backend_type = dist.ProcessGroup.BackendType, dist.Backend._plugins.get(name.upper()), None
        if name == "gloo":
            gloo: Any = dist.ProcessGroupGloo
            options = gloo._Options()
            options._timeout = timeout
            options._devices = gloo_devices()
            options._threads = 2 * len(options._devices)
            self._describe(options)
            return types.GLOO, gloo(store, index, size, options)
        if name in ("nccl", "xccl"):
            kind = getattr(distributed_c10d, f"ProcessGroup{name.upper()}")
            options = kind.Options()
            options._timeout = timeout
            self._describe(options)
            backend_type = getattr(types, name.upper())
            backend: Any = kind(store, index, size, options)
        elif plugin is None:
            raise LoadError(f"cannot make process groups of backend {name!r}; initialize the job with gloo, nccl or hccl")
        elif plugin.extended_api:
            arguments = _distributed_c10d._DistributedBackendOptions()
            arguments.store, arguments.group_rank, arguments.group_size = store, index, size
            arguments.timeout, arguments.group_id = timeout, self._shared_name
            arguments.global_ranks_in_group = list(self.ranks)
            backend = plugin.creator_fn(arguments, None)
        else:
            backend = plugin.creator_fn(store, index, size, timeout)
        self._is_hccl = name == "hccl"
        self._device_backends.append(backend)
        return backend_type or types.CUSTOM, backend

    def _describe(self, options: Any) -> None:
        options.global_ranks_in_group = list(self.ranks)
        options.group_name = self._shared_name

    def register(self) -> None:
        """Lets the native ops find the group by its name."""
        assert self._group is not None
        _distributed_c10d._register_process_group(self.name, self._group)

    def _connect(self, device: torch.device) -> None:
        """Makes the communicator: returns when all members have called this."""
        stream = torch.Stream(device)
        with stream:
            byte = torch.zeros(1, dtype=torch.uint8, device=device)
            ops.coalesced_bcast([byte], self.ranks[0], "", self.name, 4096, "two_level")
        stream.synchronize()

    def all_reduce_maximum(self, tensor: torch.Tensor) -> Any:
        """Begins to replace each element by the largest of all ranks. Returns torch's ``Work``."""
        assert self._group is not None
        options: Any = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MAX
        return self._group.allreduce([tensor], options)

    def _enter_device(self) -> None:
        """Makes the group's device the current one of a new thread."""
        if self._device is not None:
            torch.accelerator.set_device_index(self._device)

    @property
    def on_devices(self) -> bool:
        """True if it may have operations that run on devices, and has not been aborted."""
        return bool(self._device_backends)

    def abort(self) -> None:
        """Ends operations that run on devices. In a thread of its own, as that may not return."""
        group, backends, self._device_backends = self._group, self._device_backends, []
        with suppress(Exception):
            self._enter_device()
        for backend in backends:
            with suppress(Exception):
                if not self._is_hccl or group is None or not ops.abort_hccl(group):
                    backend.abort()

    def close(self) -> None:
        """Closes connections; may wait for an operation on CPU."""
        self._group = None


def gloo_devices() -> list[Any]:
    """Returns what gloo connects with. Raises RuntimeError if GLOO_SOCKET_IFNAME, or the name of this machine, leads nowhere."""
    gloo: Any = dist.ProcessGroupGloo
    # With TORCH_GLOO_LAZY_INIT=1, it would read keys when it first sends, when they are deleted.
    names = os.environ.get("GLOO_SOCKET_IFNAME")
    devices = [gloo.create_device(interface=name, lazy_init=False) for name in names.split(",")] if names else []
    return devices or [gloo.create_default_device(lazy_init=False)]


@contextmanager
def _unwatched(backend: str) -> Iterator[None]:
    """A ProcessGroupNCCL or ProcessGroupHCCL that is made inside has no watchdog, which would end the process minutes after a
    member has ended, although epload has raised, and after an operation that took longer than the timeout, although epload
    waits."""
    name = f"TORCH_{backend.upper()}_BLOCKING_WAIT"
    with _environment:
        before = os.environ.pop(name, None)
        os.environ[name] = "1"
        try:
            yield
        finally:
            del os.environ[name]
            if before is not None:
                os.environ[name] = before


_environment = threading.Lock()


def can_connect(backend: str) -> bool:
    """Returns True if groups can be made of a backend, and it moves bytes from device to device."""
    return backend in ("nccl", "xccl") or (backend != "fake" and backend.upper() in dist.Backend._plugins)


def dispose(groups: Iterable[Group]) -> None:
    """Closes groups in another thread, as closing one waits for operations that still run in it."""
    open_groups = list(groups)
    for group in open_groups:
        with suppress(Exception):
            _distributed_c10d._unregister_process_group(group.name)
    abort(open_groups)

    def close() -> None:
        while open_groups:
            open_groups.pop().close()

    if open_groups:
        _start("close-groups", close)  # which a load leaves behind, unlike threads named epload-*


def abort(groups: Iterable[Group]) -> None:
    """Ends operations of groups that run on devices. Each in another thread: NCCL's abort of a communicator may not return."""
    for group in groups:
        if group.on_devices:
            _start("abort-group", group.abort)


def _start(name: str, target: Callable[[], None]) -> None:
    with suppress(LoadError):  # no thread can be started: operations go on, and groups stay open, until the process exits
        threads.start(name, target)


_with_devices: weakref.WeakSet[Group] = weakref.WeakSet()


class _AtExit:
    """Aborts groups before the device libraries are unloaded, as torch does for the groups that it knows. In threads that are
    started before: Python 3.12 starts none at exit."""

    def __init__(self) -> None:
        self._exits, self._process, self._groups = threading.Event(), os.getpid(), list[Group]()
        self._threads: list[Future[None]] = []
        with suppress(LoadError):
            for _ in range(_EXIT_THREADS):
                self._threads.append(threads.call("abort-at-exit", self._run))
        atexit.register(self._exit)

    def _run(self) -> None:
        self._exits.wait()
        with suppress(IndexError):
            while True:
                self._groups.pop().abort()

    def _exit(self) -> None:
        self._groups = list(_with_devices)
        self._exits.set()
        if os.getpid() == self._process:
            wait(self._threads, _EXIT_SECONDS)


_at_exit = cache(_AtExit)
