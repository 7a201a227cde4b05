"""Rewrites a checkpoint of any format as safetensors files, using a few megabytes of memory per process."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from time import perf_counter
from typing import Any

from epload.checkpoint.base import Checkpoint
from epload.checkpoint.delta import DeltaCheckpoint, chain_of, folders_of
from epload.checkpoint.manifest import Manifest
from epload.checkpoint.safetensors import metadata_of
from epload.core.attempt import Attempt
from epload.core.default_device import on_cpu
from epload.core.dtypes import DType, requested
from epload.errors import CheckpointError
from epload.mapping.mapping import Mapping, Renames, apply_renames, find_unused
from epload.mapping.quantize import Quantize
from epload.planning.holdings import digest_of
from epload.ranks.control import Control
from epload.ranks.single_flight import Call, exclusive, preparing_call
from epload.ranks.topology import Topology, as_timedelta, as_topology
from epload.report import SaveReport
from epload.saving.folder import NewFolder, folder_path
from epload.saving.layout import ADAPTER_MODEL, DIFFUSION_MODEL, MODEL, FilesLayout, lay_out
from epload.saving.rewrite import Rewrite, kept_in_converted
from epload.saving.source import with_dtype
from epload.saving.writer import Wrote, check_arguments, check_equal, write_checkpoint


@on_cpu
def convert(
    source: Any,
    path: str | Path,
    *,
    dtype: DType | None = None,
    renames: Renames = (),
    quantize: Quantize | None = None,
    max_shard_bytes: int = 5 << 30,
    files: Sequence[str | Path] = (),
    checksums: bool = False,
    overwrite: bool = False,
    prefix: str = "",
    variant: str = "",
    topology: Topology | None = None,
    timeout: timedelta | float | None = None,
    progress: Callable[[int], object] | None = None,
) -> SaveReport:
    """Writes the tensors of a checkpoint to a folder of safetensors files, which appears when it is complete.

    Collective only if a topology is passed.

    Args:
        source: the checkpoint; ``source``, ``prefix`` and ``variant`` are as for :meth:`epload.Checkpoint.open`.
        path: the folder to write; ``path``, ``max_shard_bytes``, ``files``, ``checksums`` and ``overwrite`` are as for
            :func:`epload.save`.
        dtype: dtype of floating-point tensors of at least 16 bits, itself or its name; by default unchanged. An error if weights
            are quantized. If a ``config.json`` next to the source names a model of transformers or diffusers, tensors that
            ``from_pretrained(dtype=)`` keeps in float32 are not changed; it is an error if the model's class is not installed.
        renames: renames of tensors, applied in order; or a dict from regular expressions to what replaces their first match.
        quantize: the rule that quantizes weights to fp8. The weights are those of the model that a ``config.json`` next to the
            source names, or those that match the rule's patterns. A ``config.json`` that declares the quantization is written.
            Takes more memory: blocks of rows, or, for one scale per weight, one matrix.
        topology: the ranks that divide the work. All of them call this function with equal arguments, and see the same folder.
        timeout: timeout of these ranks, as for :func:`epload.save`.
        progress: called after each read of this process with its number of bytes.

    Raises:
        CheckpointError: the source cannot be read, or has changed meanwhile.
        ValueError: two names become equal, the format lacks a dtype, ``dtype`` is passed for quantized weights, there is nothing
            to quantize, or the folder must not be overwritten.
        LoadError: the folder cannot be written. With a topology, all errors are the same on every rank.
    """
    began = perf_counter()
    with preparing_call(as_topology(topology)) if topology is not None else nullcontext():
        report, limit = SaveReport(path=str(folder_path(path))), as_timedelta(timeout)
    with ExitStack() as stack:
        if topology is not None:
            stack.enter_context(exclusive(Call("convert()", topology, object(), threading.current_thread()), limit))
            stack.enter_context(topology.control.guard())
        else:
            topology = Topology([[0]], None, 0, Control(None, (0,), 0))

        def plan() -> tuple[Checkpoint, Rewrite, FilesLayout, dict[str, bytes], str]:
            contents = check_arguments(topology, max_shard_bytes, copied, checksums, overwrite, quantize is not None)
            checkpoint = Checkpoint.open(source, prefix=prefix, variant=variant)
            if checkpoint is not source:
                stack.callback(checkpoint.close)
            _check_kept(checkpoint, Path(report.path), overwrite)
            rules = Mapping(renames=renames, quantize=quantize)  # type: ignore[arg-type]
            old, new = checkpoint.manifest, _new_manifest(checkpoint, dtype, rules)
            rewrite = Rewrite(checkpoint, new, quantize, dtype)
            options = max_shard_bytes, report.path, overwrite, checksums
            same = old.identity, old.provenance[1], rewrite.new.digest, options
            return checkpoint, rewrite, _lay_out(checkpoint, rewrite.new, max_shard_bytes, files), contents, repr(same)

        copied, progress = tuple(map(Path, files)), _function_of_bytes(progress)
        planned, activity = Attempt(plan), "convert different checkpoints, or pass different options"
        digest = digest_of(planned.value[-1].encode()) if planned.failure is None else ""
        control = topology.control
        control.agree("opening the checkpoint", planned.failure, digest, lambda each: check_equal(each, activity))
        checkpoint, rewrite, layout, contents, _ = planned.value

        def write(folder: NewFolder, wrote: Wrote) -> None:
            for tensor in _own_tensors(topology, checkpoint.manifest):
                for number, begin, data, nbytes in rewrite.read(checkpoint, tensor):
                    folder.write(int(layout.file[number]), int(layout.offset[number]) + begin, data)
                    report.written += len(data)
                    progress(nbytes)
                    wrote(nbytes)
            if changed := checkpoint.changed():
                raise CheckpointError(f"{changed} while it was converted: convert it again")

        write_checkpoint(topology, overwrite, lambda: layout, write, lambda _: rewrite.config, contents, checksums, report)
    report.seconds = perf_counter() - began
    return report


def _function_of_bytes(progress: Callable[[int], object] | None) -> Callable[[int], object]:
    """Returns the caller's function, or one that does nothing."""
    if progress is not None and not callable(progress):
        raise TypeError(f"expected progress to be a function of a number of bytes, got {progress!r}")
    return progress if progress is not None else lambda nbytes: None


def _lay_out(checkpoint: Checkpoint, new: Manifest, max_shard_bytes: int, files: Sequence[str | Path]) -> FilesLayout:
    """Returns the files of the new checkpoint. For a delta, which has the model's small files in its index, these are written
    next to the new index, unless the dtype changes or ``files`` replaces them."""
    whole = chain_of(checkpoint)[-1]
    files_before = whole.manifest.locations.files if whole.manifest.locations is not None else ()
    first = files_before[0].name if files_before else ""
    stem = next(filter(first.startswith, (DIFFUSION_MODEL, ADAPTER_MODEL)), MODEL)
    layout = lay_out(new, max_shard_bytes, metadata_of(checkpoint.files), stem)
    if stem == ADAPTER_MODEL and len(layout.names) > 1:
        raise ValueError("PEFT reads an adapter from one file; pass a larger max_shard_bytes")
    if isinstance(checkpoint, DeltaCheckpoint) and new.dtypes == checkpoint.manifest.dtypes:
        copied = {Path(file).name for file in files}
        layout.index.update({name: text for name, text in checkpoint.config.items() if name not in copied})
    return layout


def _check_kept(checkpoint: Checkpoint, path: Path, overwrite: bool) -> None:
    """Raises ValueError if to overwrite the folder at a path would delete what is converted, or the base of a delta."""
    new = path.resolve()
    for folder in folders_of(checkpoint) if overwrite else ():
        if folder is not None and folder.is_relative_to(new):
            raise ValueError(
                f"{path} cannot be replaced: {folder}, from which the checkpoint is read, would be deleted with it; pass another "
                "path"
            )


def _new_manifest(checkpoint: Checkpoint, dtype: DType | None, rules: Mapping) -> Manifest:
    """Returns the tensors that are written."""
    manifest = checkpoint.manifest
    if dtype is not None:
        dtype = requested("dtype", dtype)
        manifest = with_dtype(manifest, dtype, kept_in_converted(checkpoint, dtype))
    for unused in find_unused(rules, manifest.names):
        raise ValueError(unused)
    names = apply_renames(rules.renames, list(manifest.names))
    if len(set(names)) != len(names):
        name = Counter(names).most_common(1)[0][0]
        raise ValueError(f"the renames give several tensors the name {name}; change them so that names stay different")
    return replace(manifest, names=tuple(names), locations=None)


def _own_tensors(topology: Topology, old: Manifest) -> range:
    """Divides the tensors among the ranks; returns the numbers of those that this rank rewrites."""
    numbers, rank, ranks = range(len(old.names)), topology.ranks.index(topology.rank), len(topology.ranks)
    if old.locations is None:  # there are no facts by which ranks recognize one another's files: the first does all
        return numbers if rank == 0 else range(0)
    return numbers[len(numbers) * rank // ranks : len(numbers) * (rank + 1) // ranks]
