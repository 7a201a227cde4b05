"""Holds what a loader keeps on a device from load to load: its stream and its staging buffers."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch

from epload.core import threads
from epload.errors import LoadError
from epload.native import ops
from epload.transfer.device import DeviceStaging, StagingNeeds
from epload.transfer.device_pipe import DevicePipe


class DeviceResources:
    """The device resources of one loader, made when first needed."""

    def __init__(self, stream: torch.Stream | None) -> None:
        """``stream``: that which the caller gave, if any."""
        self._given = stream
        self._own: dict[torch.device, torch.Stream] = {}
        self.staging: DeviceStaging | None = None
        self._preparing: threading.Thread | None = None
        self._pipe: DevicePipe | None = None
        """Made beforehand, until the staging has it."""

    def stream(self, device: torch.device) -> torch.Stream:
        """The caller's, or the loader's own."""
        if self._given is not None:
            return self._given
        if device not in self._own:
            self._own[device] = torch.Stream(device)
        return self._own[device]

    def describe_stream(self, device: torch.device) -> str:
        """Describes the stream for the report."""
        stream = self.stream(device)
        return f"{stream.device} {stream.stream_id}, {'the loader' if self._given is None else 'the caller'}'s"

    def serves(self, needs: StagingNeeds) -> bool:
        """Returns True if the staging of the load before can be used."""
        return self.staging is not None and self.staging.needs.covers(needs)

    def prepare(self, device: torch.device, ranks: int) -> None:
        """Begins to make the pipe of a first load's staging, and to open what the device runs, while the load is planned.

        ``ranks``: as in :class:`StagingNeeds`.
        """
        if self.staging is not None or self._preparing is not None:
            return

        def make() -> None:
            torch.accelerator.set_device_index(device)
            with suppress(Exception):  # it is made again, and fails again, where that is reported
                if device.type == "cuda":
                    ops.cuda_obstacle(device)
                self._pipe = DevicePipe.of(device, ranks)

        with suppress(LoadError):  # the process has reached its limit on threads
            self._preparing = threads.start("epload-pipe", make)

    def _prepared(self) -> None:
        """Waits for what :meth:`prepare` has begun."""
        if self._preparing is not None:
            self._preparing.join()
            self._preparing = None

    def reserve(self, needs: StagingNeeds) -> DeviceStaging:
        """Staging that is kept for the next load."""
        self._prepared()
        if not self.serves(needs):
            self.staging = None  # before more is allocated
            self.staging = DeviceStaging(needs, self.stream(needs.device))
        self._pipe = None
        assert self.staging is not None
        return self.staging

    def forget(self) -> None:
        """Drops the staging, and what was to become one."""
        self._prepared()
        self.staging = self._pipe = None

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Queues what is done inside on the load's stream, between the waits for and of the caller's. Without staging nothing."""
        if self.staging is None:
            yield
            return
        with self.staging.entered():
            yield
