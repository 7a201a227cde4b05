"""Prepares the inputs of one rank to a load: reads its model, and opens the checkpoint."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from epload.checkpoint import file_sets
from epload.checkpoint.base import Checkpoint
from epload.checkpoint.manifest import Manifest
from epload.checkpoint.opening import config_next_to, join_source
from epload.core.log import logger
from epload.errors import CheckpointError
from epload.loading.request import Request
from epload.loading.resources import Resources
from epload.mapping.mapping import Mapping
from epload.mapping.precision import check_patterns, set_dtypes
from epload.mapping.wrappers import check_same_scale, is_adapter_file
from epload.model.devices import check_backend, devices_of
from epload.model.expert_parallel import LocalModules
from epload.model.modules import Modules
from epload.model.snapshot import Snapshot
from epload.model.targets import Targets, collect


@dataclass
class LocalInputs:
    """One rank's side of one load."""

    targets: Targets
    device: torch.device
    """The device that the load works on."""
    materialize_on: torch.device
    """The device for meta tensors whose own device is not known."""
    checkpoint: Checkpoint | None
    """None on a rank that has not opened it."""
    local_modules: bool
    """True if ranks may hold different modules."""
    modules: Modules | None = None
    """The model's modules; None if it was not walked, because it has not changed since the previous load."""
    recomputed: dict[str, Tensor] = field(default_factory=dict)
    """Values of non-persistent buffers, by name, which the model has computed for the previous load."""

    def check_unchanged(self, consequence: str = "") -> None:
        """Raises CheckpointError if a file of the checkpoint is not the one, unchanged, that this rank opened."""
        if self.checkpoint is not None and (changed := self.checkpoint.changed()):
            raise CheckpointError(f"{changed} while it was loaded{consequence}; load again")

    def check_unchanged_after(self) -> None:
        """The same once data has been written."""
        self.check_unchanged("; the model may be partly overwritten")


class InputReader:
    """Reads models and opens checkpoints for one loader; keeps what the next load need not read again."""

    def __init__(self, resources: Resources) -> None:
        self._resources = resources
        self._closed = False
        self.snapshot: Snapshot | None = None
        self._computed = dict[str, Tensor]()
        """Non-persistent buffers of the model of the snapshot, as the model has computed them."""
        self.manifest: Manifest | None = None
        """The manifest of the previous load."""
        self._opened: Checkpoint | None = None
        """The checkpoint that this rank has opened for the present load, unless the caller passed it opened."""

    def read(self, request: Request) -> LocalInputs:
        """Reads the model, and opens the checkpoint where this rank is the source or has one of its own."""
        if self._closed:
            raise ValueError("expected an open HierarchicalLoader, got one that was closed; make a new one")
        request.check()
        model, modules = request.model, None
        unchanged = self.snapshot.read(model, _options(request)) if self.snapshot is not None else None
        if unchanged is not None:
            targets, devices = unchanged
        else:
            modules = Modules(model)
            targets = _collect(request, modules)
            group = self._resources.topology.group
            devices = devices_of(targets, modules.offloaded, self._resources.streams, request.place, group)
        check_backend(self._resources.topology.group, devices[0])
        self._resources.prepare(devices[0])
        recomputed = self._computed if modules is None else {}
        checkpoint = self._open(request, devices[0])
        return LocalInputs(targets, *devices, checkpoint, _has_local_modules(request), modules, recomputed)

    def _open(self, request: Request, device: torch.device) -> Checkpoint | None:
        options, source = self._resources.options, request.checkpoint
        path = isinstance(source, str | os.PathLike)
        has_own = self._resources.router.may_read(device) and not path and options.readers != "auto"
        if self._resources.topology.rank != options.src and not has_own:
            return None
        opened = Checkpoint.open(source, self.manifest, request.prefix, request.variant, self._progress)
        if options.verify and opened.cannot_verify:
            raise ValueError(f"verify=True {opened.cannot_verify}")
        of_adapter = request.strict and is_adapter_file(request.model, opened.manifest.names)
        if of_adapter and (config := config_next_to(opened, file_sets.ADAPTER_CONFIG)):
            check_same_scale(request.model, config, "the checkpoint's", "the model's")
        return self._use(opened, source)

    def join(self, inputs: LocalInputs, source: Any, manifest: Manifest) -> Manifest:
        """Opens the checkpoint on the other ranks that read, by the source's manifest. Returns the manifest to plan with."""
        auto = self._resources.options.readers == "auto"
        joins = self._resources.router.may_read(inputs.device) and inputs.checkpoint is None
        if joins and not (auto and manifest.locations is None):
            try:
                inputs.checkpoint = self._use(join_source(source, manifest, self._progress), source)
            except (CheckpointError, TypeError) as error:
                if not auto:
                    raise
                # Else it has no checkpoint, for another reason.
                if isinstance(error, CheckpointError) and not isinstance(error.__cause__, FileNotFoundError):
                    logger.warning("rank %d gets another rank's checkpoint: %s", self._resources.topology.rank, error)
        self.manifest = inputs.checkpoint.manifest if inputs.checkpoint is not None else manifest
        return self.manifest

    def _progress(self, nbytes: int) -> None:
        self._resources.topology.control.progress += nbytes

    def _use(self, checkpoint: Checkpoint, source: Any) -> Checkpoint:
        checkpoint.configure_reads(direct=False)  # a transfer that reads decides for itself
        self._opened = checkpoint if checkpoint is not source else None
        return checkpoint

    def close_checkpoint(self) -> None:
        """Closes what this rank has opened for a load, however that ended."""
        if self._opened is not None:
            self._opened.close()
            self._opened = None

    def remember(self, request: Request, inputs: LocalInputs, computed: dict[str, Tensor]) -> None:
        """Keeps what the next load would read and compute of the same model, after a load. ``computed``: local tensors that the
        model has computed, by name."""
        modules, targets = inputs.modules, inputs.targets
        if modules is None:
            return
        if request.init_missing is not None:  # it may have changed anything
            modules = Modules(request.model)
            targets = _collect(request, modules)
            if not targets.matches(inputs.targets):
                return
        devices = inputs.device, inputs.materialize_on
        self.snapshot = Snapshot(request.model, modules, targets, devices, _options(request))
        unsaved = inputs.targets.unsaved_buffers | inputs.targets.unsaved_meta.keys()
        self._computed = {name: values for name, values in computed.items() if name in unsaved}

    def close(self) -> None:
        """Drops what was kept for the next load, which fails."""
        self._closed = True
        self.snapshot = self.manifest = None
        self._computed = {}


def _options(request: Request) -> tuple[object, ...]:
    """Returns what targets and devices depend on besides the model."""
    return request.dtypes, request.parts, request.place


def _collect(request: Request, modules: Modules) -> Targets:
    targets = collect(request.model, request.parts, modules, own_names=isinstance(request.mapping, Mapping))
    if not _has_local_modules(request):  # with which each rank has other parameters
        check_patterns(request.dtypes, targets)
    set_dtypes(request.model, modules, targets, request.dtypes, request.as_pretrained)
    return targets


def _has_local_modules(request: Request) -> bool:
    return any(isinstance(part, LocalModules) for part in request.parts)
