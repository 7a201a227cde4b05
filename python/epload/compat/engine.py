"""Checkpoints into an inference engine's model, as its own ``load_weights`` would put them there. Not collective."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from epload.checkpoint.base import Checkpoint
from epload.cluster.membership import membership
from epload.cluster.topology import Topology
from epload.control.control import Control
from epload.core.pieces import Piece
from epload.errors import CheckpointError, ModelMismatch
from epload.loader import HierarchicalLoader
from epload.mapping.mapping import Placed
from epload.recording import Recording, record
from epload.report import LoadReport
from epload.sync.engine_model import EngineModel, replaced_tensors

_MOST_SHOWN = 5


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
        ModelMismatch: ``load_weights`` does not take the checkpoint, or leaves parameters unwritten.
        LoadError: as for :func:`epload.load`; the model may be partly written.

    Example::

        report = load_engine(epload.EngineModel(model), "checkpoints/step-1000")
    """
    opened = Checkpoint.open(checkpoint)
    try:
        manifest = opened.manifest
        parameters = engine.parameter_ids()
        with engine.recordable():
            tensors = engine.tensors()
            recording = record(engine.load_weights, manifest, tensors)
        if strict and not recording.unseen:
            _check_filled(recording.unfilled(parameters, {}))
        state = engine.model.state_dict(keep_vars=True).keys()
        if hidden := [name for places in recording.regions for name, _ in places if name not in state]:
            raise ModelMismatch(
                f"load_weights fills {hidden[0]}, which is not in the model's state dict; register it as a persistent buffer"
            )
        alone = _alone()
        mapping = Placed(places=recording.regions, ignore_unexpected=(".",), ignore_missing=(".",))
        options: dict[str, Any] = {"src": alone.rank, "readers": "every", "verify": verify, "progress": progress}
        # Through the page cache, so that the disk reads once what several ranks of a machine read.
        with HierarchicalLoader(alone, direct_io=False, **options) as loader:
            report = loader.load(engine.model, opened, mapping=mapping)
        with torch.no_grad():
            _fill_rest(engine, opened, recording, parameters, strict)
        if changed := opened.changed():
            raise CheckpointError(f"{changed} while it was loaded; the model may be partly overwritten")
    finally:
        if opened is not checkpoint:
            opened.close()
    report.ignored_keys = list(recording.unused)
    return report


def _fill_rest(
    engine: EngineModel, checkpoint: Checkpoint, recording: Recording, parameters: dict[str, int], strict: bool
) -> None:
    """Fills everything that ``load_weights`` does not just copy."""
    tensors = engine.tensors()
    recording.fill(tensors)
    whole = [name for group in recording.whole for name in group.names]
    if not whole:
        return
    before = {name: tensor.detach() for name, tensor in tensors.items()}
    loaded = recording.load_whole(engine.load_weights, _full_tensors(checkpoint, whole), tensors)
    if strict and recording.unseen:
        _check_filled(recording.unfilled(parameters, loaded | replaced_tensors(before, engine.tensors())))


def _full_tensors(checkpoint: Checkpoint, names: list[str]) -> Iterator[tuple[str, Tensor]]:
    manifest = checkpoint.manifest
    numbers = {name: number for number, name in enumerate(manifest.names)}
    for name in names:
        number = numbers[name]
        tensor = torch.empty(manifest.shapes[number], dtype=manifest.dtypes[number])
        if tensor.numel():
            checkpoint.fill(tensor.view(-1).view(torch.uint8), [Piece(number, 0, 0, tensor.nbytes)])
        yield name, tensor


def _check_filled(missing: list[str]) -> None:
    if missing:
        listed = f"{', '.join(missing[:_MOST_SHOWN])}{', ...' * (len(missing) > _MOST_SHOWN)}"
        raise ModelMismatch(
            f"with the tensors that the checkpoint has, load_weights leaves {len(missing)} of the engine's parameters unwritten, "
            f"in part or as a whole ({listed}); pass strict=False if they are to keep their values",
            missing_keys=missing,
        )


def _alone() -> Topology:
    """This rank by itself, whatever the job."""
    _, rank, _ = membership(None)
    return Topology([[rank]], None, rank, Control(None, (rank,), rank))
