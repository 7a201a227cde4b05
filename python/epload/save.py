"""epload.save: every rank writes its own parts of a sharded model to a checkpoint that transformers and vLLM read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from epload.core.default_device import on_cpu
from epload.core.dtypes import DType
from epload.mapping.mapping import AnyMapping
from epload.model.megatron import Model
from epload.ranks.topology import Topology
from epload.report import SaveReport
from epload.saving.run import PendingSave

MAX_SHARD_BYTES = 5 << 30

_pending: PendingSave | None = None
"""The last save that :func:`save_async` has begun in this process."""


@on_cpu
def save(
    model: Model | Mapping[str, Any],
    path: str | Path,
    *,
    mapping: AnyMapping = "auto",
    names_from: Any = None,
    dtype: DType | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    files: Sequence[str | Path] = (),
    base: str | Path | None = None,
    checksums: bool = False,
    overwrite: bool = False,
    topology: Topology | None = None,
    timeout: timedelta | float | None = None,
) -> SaveReport:
    """Saves a sharded model as a folder of safetensors files. Collective over the topology's ranks.

    Each rank writes its own parts to their places in the files, on a file system that all ranks see. No tensor moves between
    ranks, and none is put together in memory. The folder appears when it is complete and on disk: a reader finds what was at the
    path before, or the whole new checkpoint, whenever a rank ends.

    Args:
        model: any mix of DTensors and plain tensors with storage; or a state dict of them, perhaps nested, whose names are joined
            by dots. Or this rank's modules of Megatron-Core: one, or a list of pipeline stages. What ranks have in common is
            written once.
        path: of the folder.
        mapping: how checkpoint names become regions of the model's tensors, in reverse: ``"auto"`` is what a transformers model
            declares, whose checkpoints ``from_pretrained`` reads, else names as they are.
        names_from: a checkpoint whose names and shapes are taken, for a mapping of your own, or for modules of Megatron-Core.
        dtype: of floating-point tensors in the files, itself or its name; by default the model's. What ``from_pretrained`` keeps
            in float32 in a model of this dtype keeps the model's dtype. Refused if weights are quantized.
        max_shard_bytes: of the tensors in a file, unless it has only one.
        files: to be copied into the folder, such as those of a tokenizer. The ``config.json`` and ``generation_config.json`` of a
            transformers model are written anyway.
        base: path of a checkpoint in any format, or a model on the Hub, perhaps itself saved with a base: only what has changed
            since is written, to a folder that names it by digest, and by its relative path or its commit. epload reads the two
            together, other libraries do not.
        checksums: whether a ``checksums.json`` with the sha256 of each 64 MiB of all files is written next to them, for which
            they are read again. The report has its digest, which :func:`load` takes.
        overwrite: whether a folder at the path is replaced, with all that is in it. If False, it has to be absent or empty.
        topology: discovered over the whole job if None.
        timeout: seconds (or timedelta) without progress after which the save has failed; 30 minutes if None.

    Returns:
        What happened, on every rank.

    Raises:
        LoadError: the run failed, the same on every rank, for example because a rank sees another file system; what was at the
            path is still there. ModelMismatch: an element of the model would not be saved.
        ValueError, TypeError: a caller's mistake, the same on every rank; nothing has been written.

    Example::

        report = epload.save(model, "/checkpoints/step-1000")
        print(report)
    """
    wait_for_pending()
    job = PendingSave(
        model,
        path,
        mapping,
        names_from,
        dtype,
        max_shard_bytes,
        files,
        base,
        checksums,
        overwrite,
        topology,
        timeout,
    )
    return job._run()


@on_cpu
def save_async(
    model: Model | Mapping[str, Any],
    path: str | Path,
    *,
    mapping: AnyMapping = "auto",
    names_from: Any = None,
    dtype: DType | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    files: Sequence[str | Path] = (),
    base: str | Path | None = None,
    checksums: bool = False,
    overwrite: bool = False,
    topology: Topology | None = None,
    timeout: timedelta | float | None = None,
) -> PendingSave:
    """Like :func:`save`, but returns once this rank's shards are copied to host memory, and the model may change again.

    The copies are in pinned memory if the model is on a device; they take as much memory as the shards until the save has ended.
    Another save of the process first waits for this one; a load or broadcast meanwhile is refused. No collective is called in the
    background. Call :meth:`PendingSave.wait` before the process ends: a save that is cut off leaves what was at the path.

    Example::

        pending = epload.save_async(model, "/checkpoints/step-1000")
        train(model)
        print(pending.wait())
    """
    global _pending
    wait_for_pending()
    job = PendingSave(
        model,
        path,
        mapping,
        names_from,
        dtype,
        max_shard_bytes,
        files,
        base,
        checksums,
        overwrite,
        topology,
        timeout,
    )
    job._start()
    _pending = job
    return job


def wait_for_pending() -> None:
    """Waits until a save that goes on in the background has ended, whatever its outcome."""
    if (pending := _pending) is not None:
        pending._thread.join()
