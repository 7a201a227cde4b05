"""Process groups made by their members alone, directly over the job's store.

``dist.new_group`` needs every rank of the job for every group (at N nodes, N barriers of the whole job), or counts how many
groups the process is in already and hangs where members count differently. Where the default group is bound to a device, it
also splits that group's communicator, which again needs every rank. Groups made here are unknown to ``torch.distributed``'s own
list: they change no name and no count of the caller's groups. The native ops find them by name.
"""

from __future__ import annotations

import atexit
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import PrefixStore, Store

from epload.core import threads
from epload.errors import LoadError

_FIRST_POLL, _LAST_POLL = 0.001, 0.1
"""Seconds between two looks for a key."""
_GRACE = 0.5
"""Seconds that a group which is given up has to end by itself."""
_EXIT_SECONDS = 10.0
"""How long the end of the process waits for communicators of devices to be given up."""


class GroupStore(Store):
    """A store for making one group: waits in it can be given up, and what it has written can be deleted."""

    def __init__(self, store: Store, timeout: timedelta) -> None:
        super().__init__()
        self._inner = store
        self._limit = timeout
        self.given_up = False
        self.keys: list[str] = []
        """Those that this rank has set."""

    def set(self, key: str, value: str) -> None:
        self.keys.append(key)
        self._inner.set(key, value)

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._inner.get(key)

    def add(self, key: str, value: int) -> int:
        self.keys.append(key)
        return self._inner.add(key, value)

    def check(self, keys: list[str]) -> bool:
        return self._inner.check(keys)

    def delete_key(self, key: str) -> bool:
        return self._inner.delete_key(key)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        self.wait(keys)
        return self._inner.multi_get(keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Polls, as a wait inside the store could not be given up."""
        until = time.monotonic() + (timeout or self._limit).total_seconds()
        pause = _FIRST_POLL
        while not self._inner.check(keys):
            if self.given_up:
                raise LoadError("making a process group was given up, as a rank has failed")
            if time.monotonic() >= until:
                raise LoadError(f"timed out: members of the process group did not write {', '.join(keys)}")
            time.sleep(pause)
            pause = min(2 * pause, _LAST_POLL)


class Group:
    """One group that this rank is in. Its name is that of the native ops' arguments."""

    def __init__(self, name: str, ranks: Sequence[int]) -> None:
        """``ranks``: global ranks of the members, sorted."""
        self.name: Any = name  # torch 2.13 has a type of its own for names, 2.11 has not
        self.ranks = tuple(ranks)
        self._group: dist.ProcessGroup | None = None
        self._store: GroupStore | None = None
        self._backends: list[Any] = []
        """Those of devices."""

    def make(self, store: Store, rank: int, timeout: timedelta, like: dist.ProcessGroup) -> None:
        """Blocks until all members have called this. Thread-safe; :meth:`give_up` in another thread ends it early.

        Args:
            store: that of the job, in a place of its own for this group.
            rank: this process's, one of ``ranks``.
            timeout: of making the group, and of each of its operations.
            like: a group with the same backends.
        """
        self._store = GroupStore(store, timeout)
        group = dist.ProcessGroup(PrefixStore("group/", store), self.ranks.index(rank), len(self.ranks))
        config = dist.get_backend_config(like)
        backends = distributed_c10d.BackendConfig(dist.Backend(config)).get_device_backend_map()
        made: dict[str, tuple[Any, Any]] = {}
        for device, backend in backends.items():
            if backend not in made:
                made[backend] = self._backend(device, str(backend), store, rank, timeout)
            kind, built = made[backend]
            group._register_backend(torch.device(device), kind, built)
        group._set_default_backend(_default_kind({str(name): kind for name, (kind, _) in made.items()}))
        group._set_group_name(self.name)
        self._group = group
        if self._backends:
            _with_devices.add(self)

    def _backend(self, device: str, name: str, store: Store, rank: int, timeout: timedelta) -> tuple[Any, Any]:
        """The type and the object of a backend."""
        assert self._store is not None
        at, size = self.ranks.index(rank), len(self.ranks)
        # Only gloo is through with the store when it is made; the threads of others may use theirs until the process ends,
        # where no code in Python can run any more.
        plain = PrefixStore(f"{device}/", store)
        built: Any
        if name == "gloo":
            built = dist.ProcessGroupGloo(PrefixStore(f"{device}/", self._store), at, size, timeout)
            built.options.global_ranks_in_group = list(self.ranks)
            built.options.group_name = self.name
            return dist.ProcessGroup.BackendType.GLOO, built
        if name in ("nccl", "xccl"):
            kind = getattr(distributed_c10d, f"ProcessGroup{name.upper()}")
            options = kind.Options()
            options._timeout = timeout
            options.global_ranks_in_group = list(self.ranks)
            options.group_name = self.name
            built = kind(plain, at, size, options)
            backend_type = getattr(dist.ProcessGroup.BackendType, name.upper())
        elif name.upper() in dist.Backend._plugins:
            plugin = dist.Backend._plugins[name.upper()]
            if plugin.extended_api:
                asked = _distributed_c10d._DistributedBackendOptions()
                asked.store, asked.group_rank, asked.group_size = plain, at, size
                asked.timeout, asked.group_id, asked.global_ranks_in_group = timeout, self.name, list(self.ranks)
                built = plugin.creator_fn(asked, None)
            else:
                built = plugin.creator_fn(plain, at, size, timeout)
            backend_type = dist.ProcessGroup.BackendType.CUSTOM
        else:
            raise LoadError(
                f"cannot make process groups of backend {name!r}; initialize the job with gloo, nccl or hccl"
            )
        self._backends.append(built)
        return backend_type, built

    def register(self) -> None:
        """From here on the native ops find it by its name."""
        assert self._group is not None
        _distributed_c10d._register_process_group(self.name, self._group)

    @property
    def keys(self) -> list[str]:
        """Of its store, set by this rank; nobody needs them once all members have made the group."""
        return self._store.keys if self._store is not None else []

    def give_up(self) -> None:
        """Ends a wait of :meth:`make` in the store."""
        if self._store is not None:
            self._store.given_up = True

    def abort(self) -> None:
        """Ends what runs on devices."""
        for backend in self._backends:
            with suppress(Exception):
                backend.abort()

    def close(self) -> None:
        """Lets go of connections; may wait for an operation that cannot be called off."""
        self.abort()
        self._backends.clear()
        self._group = None
        self._store = None


class Making:
    """Makes a group in a thread, as a wait for connections between its members cannot be given up otherwise."""

    def __init__(self, group: Group, store: Store, rank: int, timeout: timedelta, like: dist.ProcessGroup) -> None:
        """Arguments are those of :meth:`Group.make`."""
        self.group = group
        self.error: BaseException | None = None
        self._ended = threading.Event()
        self._work: Callable[[], None] = lambda: group.make(store, rank, timeout, like)
        self._device = _device_of(like)
        threads.start("epload-group", self._run)

    def _run(self) -> None:
        try:
            if self._device is not None:  # a new thread is on device 0
                torch.accelerator.set_device_index(self._device)
            self._work()
        except BaseException as error:
            self.error = error
        self._ended.set()

    def wait(self, stopped: Callable[[], bool], limit: float) -> bool:
        """Whether the group was made or failed to be, which ``error`` says; False if ``stopped`` or after ``limit`` seconds, when
        the thread is left alone with the group."""
        until = time.monotonic() + limit
        pause = _FIRST_POLL
        while not self._ended.wait(pause):
            if stopped() or time.monotonic() >= until:
                self.group.give_up()
                return self._ended.wait(_GRACE)
            pause = min(2 * pause, _LAST_POLL)
        return True


def _device_of(like: dist.ProcessGroup) -> int | None:
    """The calling thread's device, if the group has a backend for any."""
    config = distributed_c10d.BackendConfig(dist.Backend(dist.get_backend_config(like))).get_device_backend_map()
    if set(config) == {"cpu"} or not torch.accelerator.is_available():
        return None
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or accelerator.type not in config or set(map(str, config.values())) == {"gloo"}:
        return None
    return int(torch.accelerator.current_device_index())


def _default_kind(made: dict[str, Any]) -> Any:
    """As torch chooses it: NCCL's, else that of a plugin, else gloo's."""
    for name in ("nccl", "xccl"):
        if name in made:
            return made[name]
    return next((kind for name, kind in made.items() if name != "gloo"), made.get("gloo"))


def dispose(groups: Sequence[Group]) -> None:
    """Gives groups back in a thread of its own, since the end of a group waits for an operation that still runs in it."""
    gone = list(groups)
    for group in gone:
        with suppress(Exception):
            _distributed_c10d._unregister_process_group(group.name)

    def close() -> None:
        while gone:
            gone.pop().close()

    if gone:
        with suppress(RuntimeError):  # no thread can be started: they stay until the process ends
            threading.Thread(target=close, name="close-groups", daemon=True).start()


_with_devices: weakref.WeakSet[Group] = weakref.WeakSet()


@atexit.register
def _abort_all() -> None:
    """Before the devices' libraries go away; torch does so for groups that it knows."""
    left = list(_with_devices)

    def abort() -> None:
        for group in left:
            group.abort()

    if left:
        thread = threading.Thread(target=abort, daemon=True)
        thread.start()
        thread.join(_EXIT_SECONDS)
