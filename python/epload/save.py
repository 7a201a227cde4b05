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
from epload.ranks.single_flight import add_to_background
from epload.ranks.topology import Topology
from epload.report import SaveReport
from epload.saving.run import PendingSave

MAX_SHARD_BYTES = 5 << 30


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
    ranks or is assembled in memory. The folder appears when it is complete and on disk: whenever a rank ends, a reader finds
    either what was at the path before or the whole new checkpoint.

    Args:
        model: any mix of DTensors and plain tensors with storage; or a state dict of them, perhaps nested, whose names are joined
            by dots. Or this rank's modules of Megatron-Core: one, or a list of pipeline stages. Parts that several ranks have are
            written once.
        path: the folder to write.
        mapping: how checkpoint names become regions of the model's tensors, applied in reverse. ``"auto"`` is what a transformers
            model declares, so that ``from_pretrained`` reads the checkpoint; for other models, names as they are.
        names_from: a checkpoint whose names and shapes are used, for a mapping of your own, or for modules of Megatron-Core.
        dtype: dtype of the floating-point tensors in the files, itself or its name; by default the model's. Tensors that
            ``from_pretrained`` keeps in float32 in a model of this dtype keep the model's dtype. An error if weights are
            quantized.
        max_shard_bytes: maximum bytes of the tensors in a file, unless it has only one tensor.
        files: files to copy into the folder, such as those of a tokenizer. The ``config.json`` and ``generation_config.json`` of
            a model of transformers or diffusers are written anyway.
        base: path of a checkpoint in any format, or a model on the Hub, perhaps itself saved with a base. Only what differs from
            it is written, to a folder that stores the base's digest and its relative path or commit. epload reads the two
            together; other libraries do not.
        checksums: whether to read the files again and write a ``checksums.json`` with the sha256 of each 64 MiB of all files next
            to them. The report has the digest of this list, which :func:`load` takes.
        overwrite: whether a folder at the path is replaced, with everything in it. If False, the folder has to be absent or
            empty.
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
    job = PendingSave(
        model, path, mapping, names_from, dtype, max_shard_bytes, files, base, checksums, overwrite, topology, timeout
    )  # fmt: skip
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
    """Saves like :func:`save`, but returns once this rank's shards are copied to host memory and the model may change again.

    The copies take as much host memory as the shards, until the save has ended. If the model is on a device they are in pinned
    memory, which is kept for the next save.
    Another save, load, sync or broadcast of the process first waits for this one. No collective of the job's groups is called in
    the background. Call :meth:`PendingSave.wait` before the process ends: an interrupted save leaves the path as it was.

    Example::

        pending = epload.save_async(model, "/checkpoints/step-1000")
        train(model)
        print(pending.wait())
    """
    job = PendingSave(
        model, path, mapping, names_from, dtype, max_shard_bytes, files, base, checksums, overwrite, topology, timeout
    )  # fmt: skip
    job._start()
    add_to_background(job._saving, f"save_async() to {path}", job._topology)
    return job
