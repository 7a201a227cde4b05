"""What a loader keeps on a device from load to load: its stream and its staging buffers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from epload.staging.device import DeviceStaging, StagingNeeds


class DeviceResources:
    """Of one loader; made when first needed."""

    def __init__(self, stream: torch.Stream | None) -> None:
        """``stream``: that which the caller gave, if any."""
        self._given = stream
        self._own: dict[torch.device, torch.Stream] = {}
        self.staging: DeviceStaging | None = None

    def stream(self, device: torch.device) -> torch.Stream:
        """The caller's, or the loader's own."""
        if self._given is not None:
            return self._given
        if device not in self._own:
            self._own[device] = torch.Stream(device)
        return self._own[device]

    def describe_stream(self, device: torch.device) -> str:
        """For the report."""
        stream = self.stream(device)
        return f"{stream.device} {stream.stream_id}, {'the loader' if self._given is None else 'the caller'}'s"

    def serves(self, needs: StagingNeeds) -> bool:
        """Whether the staging of the load before can be used."""
        return self.staging is not None and self.staging.needs.covers(needs)

    def reserve(self, needs: StagingNeeds) -> DeviceStaging:
        """Staging that is kept for the next load."""
        if not self.serves(needs):
            self.staging = None  # before more is allocated
            self.staging = DeviceStaging(needs, self.stream(needs.device))
        assert self.staging is not None
        return self.staging

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Queues what is done inside on the load's stream, between the waits for and of the caller's. Without staging nothing."""
        if self.staging is None:
            yield
            return
        with self.staging.entered():
            yield
