"""Loads checkpoints into an inference engine's model. Not collective."""

from __future__ import annotations

from itertools import chain
from typing import Any

import torch

from epload.checkpoint.base import Checkpoint, read_tensor
from epload.core.default_device import on_cpu
from epload.errors import CheckpointError, ModelMismatch
from epload.integrations.engine.model import EngineModel, EngineTarget
from epload.loading.loader import HierarchicalLoader
from epload.mapping.mapping import Mapping
from epload.model.flat_state import FlatState
from epload.observe.render import list_keys
from epload.ranks.control import Control
from epload.ranks.membership import membership
from epload.ranks.topology import Topology
from epload.report import LoadReport


@on_cpu
def load_engine(
    engine: EngineModel, checkpoint: Any, *, strict: bool = True, verify: bool = False, progress: bool = False
) -> LoadReport:
    """Fills an engine's model from a checkpoint. Each rank calls this for itself, and reads only what its model keeps.

    What ``load_weights`` does with each tensor is recorded on tensors without data. What it copies is read from the files to
    where it belongs. Tensors with which it does anything else are read in full, one after the other, and given to it.

    Args:
        engine: whose model has storage, as it is before the engine processes what was loaded.
        checkpoint: as for :meth:`epload.Checkpoint.open`.
        strict: whether a parameter that ``load_weights`` leaves unwritten is an error.
        verify: as for :func:`epload.load`; what goes through ``load_weights`` is not verified.
        progress: as for :func:`epload.load`.

    Returns:
        The report of this rank's load; ``ignored_keys`` are the tensors that the model does not use.

    Raises:
        ModelMismatch: ``load_weights`` does not take the checkpoint, or leaves parameters unwritten; or the model has tensors on
            meta.
        LoadError: as for :func:`epload.load`; the model may be partly written.

    Example::

        report = load_engine(epload.EngineModel(model), "checkpoints/step-1000")
    """
    opened = Checkpoint.open(checkpoint)
    try:
        manifest, target = opened.manifest, EngineTarget(engine, strict)
        tensors, named = target.record(manifest), chain(engine.model.named_parameters(), engine.model.named_buffers())
        if on_meta := [name for name, tensor in named if tensor.is_meta]:
            raise ModelMismatch(f"the engine's model is partly on meta ({list_keys(on_meta)}); give it storage before the load")
        recording = target.recording
        report = LoadReport(source=manifest.source, readers="every")
        if any(recording.regions):
            _, rank, _ = membership(None)
            alone = Topology([[rank]], None, rank, Control(None, (rank,), rank))
            mapping = Mapping(places=recording.regions, ignore_unexpected=(".",))
            filled = FlatState({name: tensors[name] for places in recording.regions for name, _ in places})
            # Through the page cache, so that the disk reads once what several ranks of a machine read.
            with HierarchicalLoader(
                alone, src=rank, readers="every", direct_io=False, verify=verify, progress=progress
            ) as loader:
                report = loader.load(filled, opened, mapping=mapping)
        passed_through = [number for number, name in enumerate(manifest.names) if name in recording.passed_through]
        with torch.no_grad():
            target.load_rest((manifest.names[number], read_tensor(opened, number)) for number in passed_through)
        if changed := opened.changed():
            raise CheckpointError(f"{changed} while it was loaded; the model may be partly overwritten")
    finally:
        if opened is not checkpoint:
            opened.close()
    columns = zip(manifest.names, recording.regions, strict=True)
    report.ignored_keys = [name for name, places in columns if not places and name not in recording.passed_through]
    return report
