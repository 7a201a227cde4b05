"""Prepares the inputs of one rank to a load: reads its model, and opens the checkpoint."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from epload.checkpoint.base import Checkpoint
from epload.checkpoint.manifest import Manifest
from epload.errors import CheckpointError
from epload.loading.request import Options, Request
from epload.loading.routes import Router
from epload.mapping.precision import set_dtypes
from epload.model.devices import Devices, check_backend, devices_of
from epload.model.materialize import cpu_offloaded_ids
from epload.model.modules import Modules
from epload.model.snapshot import Snapshot
from epload.model.targets import Targets, collect
from epload.ranks.topology import Topology


@dataclass
class LocalInputs:
    """One rank's side of one load."""

    targets: Targets
    devices: Devices
    checkpoint: Checkpoint | None
    """None on a rank that has not opened it."""
    local_modules: bool
    """True if ranks may hold different modules."""
    modules: Modules | None = None
    """The model's modules; None if it was not walked, because it has not changed since the previous load."""

    @property
    def device(self) -> torch.device:
        """The device that the load works on."""
        return self.devices.load

    def check_unchanged(self, consequence: str = "") -> None:
        """Raises CheckpointError if a file of the checkpoint is not the one, unchanged, that this rank opened."""
        if self.checkpoint is not None and (changed := self.checkpoint.changed()):
            raise CheckpointError(f"{changed} while it was loaded{consequence}; load again")

    def check_unchanged_after(self) -> None:
        """The same once data has been written."""
        self.check_unchanged("; the model may be partly overwritten")

    def reopen(self) -> None:
        """Opens the files again, to read what is at their paths now. Raises as :meth:`check_unchanged`."""
        if self.checkpoint is not None:
            self.check_unchanged_after()
            self.checkpoint.reopen()


class InputReader:
    """Reads models and opens checkpoints for one loader; keeps what the next load need not read again."""

    def __init__(self, topology: Topology, options: Options, router: Router) -> None:
        self._topology = topology
        self._options = options
        self._router = router
        self.snapshot: Snapshot | None = None
        self.manifest: Manifest | None = None
        """The manifest of the previous load."""
        self._opened: Checkpoint | None = None
        """The checkpoint that this rank has opened for the present load, unless the caller passed it opened."""

    def read(self, request: Request, streams: Sequence[torch.Stream]) -> LocalInputs:
        """Reads the model, and opens the checkpoint where this rank is the source or has one of its own.

        Args:
            streams: of the models' device, those that the caller gave.
        """
        request.check()
        unchanged = self.snapshot.read(request.model, _asked(request)) if self.snapshot is not None else None
        modules = None
        if unchanged is not None:
            targets, devices = unchanged
        else:
            modules = Modules(request.model)
            targets = _collect(request, modules)
            devices = devices_of(targets, cpu_offloaded_ids(modules.fsdp_groups), streams)
        check_backend(self._topology.group, devices.load)
        checkpoint = self._open(request, devices.load)
        return LocalInputs(
            targets, devices, checkpoint, request.parts is not None and bool(request.parts.local_modules), modules
        )

    def remember(self, request: Request, inputs: LocalInputs) -> None:
        """Keeps what the next load would read of the same model, after a load."""
        modules, targets = inputs.modules, inputs.targets
        if modules is None:
            return
        if request.init_missing is not None:  # it may have changed anything
            modules = Modules(request.model)
            targets = _collect(request, modules)
            if not targets.matches(inputs.targets):
                return
        self.snapshot = Snapshot(request.model, modules, targets, inputs.devices, _asked(request))

    def forget(self) -> None:
        """Drops what was kept for the next load."""
        self.snapshot = self.manifest = None

    def _open(self, request: Request, device: torch.device) -> Checkpoint | None:
        options, given = self._options, request.checkpoint
        path = isinstance(given, str | os.PathLike)
        has_own = self._router.may_read(device) and not path and options.readers != "auto"
        if self._topology.rank != options.src and not has_own:
            return None
        opened = Checkpoint.open(given, self.manifest, request.prefix, request.variant, self._progress)
        checkpoint = self._keep(opened, given)
        if checkpoint.read_once and options.verify:
            raise ValueError(
                "verify=True reads the checkpoint again after the load, but this one can be read once: leave out consume=True"
            )
        return checkpoint

    def join(self, inputs: LocalInputs, given: Any, source: Manifest) -> Manifest:
        """Opens the checkpoint on the other ranks that read, by the source's manifest. Returns the manifest to plan with."""
        auto = self._options.readers == "auto"
        joins = self._router.may_read(inputs.device) and inputs.checkpoint is None
        if joins and not (auto and source.locations is None):
            try:
                inputs.checkpoint = self._keep(Checkpoint.join(given, source, self._progress), given)
            except (CheckpointError, TypeError):
                if not auto:
                    raise
        self.manifest = inputs.checkpoint.manifest if inputs.checkpoint is not None else source
        return self.manifest

    def _progress(self, nbytes: int) -> None:
        self._topology.control.progress += nbytes

    def close_checkpoint(self) -> None:
        """After a load, however it ended: closes what this rank has opened for it."""
        if self._opened is not None:
            self._opened.close()
            self._opened = None

    def _keep(self, checkpoint: Checkpoint, given: Any) -> Checkpoint:
        checkpoint.configure_reads(direct=False)  # a transfer that reads decides for itself
        self._opened = checkpoint if checkpoint is not given else None
        return checkpoint


def _collect(request: Request, modules: Modules) -> Targets:
    targets = collect(request.model, request.parts, modules)
    set_dtypes(request.model, modules, targets, request.dtype, request.as_pretrained)
    return targets


def _asked(request: Request) -> tuple[object, ...]:
    """Returns the options on which targets depend, besides the model."""
    return request.dtype, request.parts
