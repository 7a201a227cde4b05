"""epload.load and epload.load_state: load a checkpoint into a model, or into a nested state dict."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch

from epload.checkpoint.checksums import AnyChecksums
from epload.checkpoint.dcp import ROOT
from epload.core.default_device import on_cpu
from epload.loading.loader import HierarchicalLoader
from epload.loading.request import LoadOptions
from epload.loading.values import agree_on_values
from epload.mapping.mapping import AnyMapping
from epload.mapping.mapping import Mapping as Rules
from epload.mapping.precision import AnyDTypes
from epload.model.flat_state import assign
from epload.model.initialization import InitMissing
from epload.model.megatron import Model
from epload.planning.schedule import WAVE_BYTES, Algorithms, Readers
from epload.ranks.single_flight import Call, exclusive
from epload.ranks.topology import Topology, as_timedelta
from epload.report import LoadReport
from epload.sync.running_job import RunningJob, address_of


def load(
    model: Model,
    checkpoint: Any,
    *,
    mapping: AnyMapping = "auto",
    strict: bool = True,
    ignore_mismatched_shapes: bool = False,
    dtype: AnyDTypes = None,
    device: torch.device | str | None = None,
    init_missing: InitMissing | None = None,
    variant: str = "",
    readers: Readers = "auto",
    verify: bool = False,
    checksums: AnyChecksums = False,
    timeout: timedelta | float | None = None,
    topology: Topology | None = None,
    progress: bool = True,
    options: LoadOptions | None = None,
) -> LoadReport:
    """Loads a checkpoint into a sharded model, once. Collective over the topology's ranks.

    To load repeatedly with the same buffers, use :class:`HierarchicalLoader`. Its arguments have the same names and are explained
    there in more detail.

    Args:
        model: any mix of DTensors and plain tensors; on meta, materialized or already used. Or this rank's modules of
            Megatron-Core: one, or a list of pipeline stages.
        checkpoint: a path, a dict of full tensors or an ``epload.Checkpoint`` on reading ranks; ignored on others. Or
            ``"epload://host:port"`` on every rank: receives the version that engines of the :class:`epload.WeightSender` at this
            address have in host memory.
        mapping: how checkpoint names become regions of the model's tensors; by default what the model declares.
        strict: whether missing and unexpected keys are an error.
        ignore_mismatched_shapes: whether parameters that have another shape in the checkpoint are treated as missing.
        dtype: the dtype of floating-point parameters on meta, itself or its name, such as ``"bf16"``; or a dict from regular
            expressions to dtypes.
        device: where plain tensors on meta go, such as ``"cuda:0"``; by default the device of the model's other tensors or of
            their meshes, else of the process group: the current accelerator with ``"nccl"`` alone, else the CPU.
        init_missing: called as ``hook(module, path, names)`` for tensors that neither the checkpoint nor the model fills; or
            ``"reset_parameters"``, which calls this method of their modules.
        variant: which set of weights of a folder to load, e.g. ``"fp16"``.
        readers: which ranks read: ``"every"``, ``"one"``, ``"per_node"``, ``"partitioned"``, or ``"auto"``, which chooses.
        verify: whether ranks verify their shards against the checkpoint afterwards.
        checksums: published digests of the checkpoint's files. The files are compared with them before anything is changed. True
            for the digests next to the files, the digest or the path of a list, or a dict.
        timeout: seconds (or timedelta) without progress after which the load has failed; 30 minutes if None.
        topology: discovered over the whole job if None.
        progress: whether rank ``src`` shows a bar, or logs the progress.
        options: rarely needed options.

    Returns:
        What happened, on every rank.

    Raises:
        LoadError, ValueError, TypeError: as :meth:`HierarchicalLoader.load`.

    Example::

        report = epload.load(model, "/checkpoints/Qwen3-30B-A3B")
        if dist.get_rank() == 0:
            print(report)
    """
    options = LoadOptions() if options is None else options
    if not isinstance(options, LoadOptions):
        raise TypeError(f"expected options to be epload.LoadOptions, got {options!r}")
    if (address := address_of(checkpoint)) is not None:
        if readers not in ("auto", "every"):
            raise ValueError(
                f"expected readers='every' for {checkpoint}, each of whose ranks receives, got {readers!r}"
            )
        checkpoint, readers = RunningJob(model, address, timeout), "every"
    loader = HierarchicalLoader(
        topology, src=options.src, readers=readers, algorithm=options.algorithm, bucket_bytes=options.bucket_bytes,
        verify=verify, timeout=timeout, stream=options.stream, direct_io=options.direct_io, progress=progress,
    )  # fmt: skip
    with loader:
        loader._remembers = False
        return loader.load(
            model, checkpoint, mapping=mapping, strict=strict, ignore_mismatched_shapes=ignore_mismatched_shapes,
            dtype=dtype, device=device, init_missing=init_missing, outer_shards=options.outer_shards,
            local_modules=options.local_modules, prefix=options.prefix, variant=variant, checksums=checksums,
            trace=options.trace,
        )  # fmt: skip


@on_cpu
def load_state(
    state: dict[str, Any],
    checkpoint: Any,
    *,
    strict: bool = True,
    variant: str = "",
    topology: Topology | None = None,
    src: int = 0,
    readers: Readers = "auto",
    algorithm: Algorithms = "auto",
    bucket_bytes: int = WAVE_BYTES,
    verify: bool = False,
    timeout: timedelta | float | None = None,
    progress: bool = True,
) -> LoadReport:
    """Fills a state dict from a checkpoint, in place. Collective over the topology's ranks.

    Tensors and DTensors are written into their own storage; other values, such as learning rates, are replaced. Names are the
    ones that torch.distributed.checkpoint (DCP) uses when it saves a state dict: keys and list indices joined by dots.

    Args:
        state: dicts and lists, of any depth, of tensors with storage, DTensors and other values, with the same names on all
            ranks; what ``torch.distributed.checkpoint.state_dict.get_state_dict`` returns for a model and its optimizer.
        checkpoint: the path of a DCP folder, or anything else that :func:`epload.load` takes, which then has no values other than
            tensors; or a nested dict like ``state`` with full tensors, on the ranks that read.
        strict: whether names that only ``state`` or only the checkpoint has are an error, except values of the checkpoint that
            are not tensors. If False, the report lists them, and entries of ``state`` that the checkpoint lacks keep their
            values.
        variant: as for :func:`epload.load`.

    The other arguments are those of :class:`epload.HierarchicalLoader`.

    Returns:
        What happened, on every rank.

    Raises:
        LoadError: as :func:`epload.load`. CheckpointError also for a value that could execute code when it is loaded: only values
            that ``torch.load(weights_only=True)`` allows are loaded.
        ValueError, TypeError: a caller's mistake, the same on every rank; nothing has been changed.

    Example::

        model_state, optimizer_state = get_state_dict(model, optimizer)
        state = {"model": model_state, "optimizer": optimizer_state}
        epload.load_state(state, "/checkpoints/step-1000")
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    """
    topology = topology if topology is not None else Topology.default(timeout=as_timedelta(timeout))
    topology.check_source(src)
    with exclusive(Call("load_state()", topology), as_timedelta(timeout)), topology.control.guard():
        flat, source, values, missing = agree_on_values(topology.control, state, checkpoint, src, strict)
    report = load(
        flat, source, mapping=Rules(), strict=strict, variant=variant, topology=topology, readers=readers,
        verify=verify, timeout=timeout, progress=progress,
        options=LoadOptions(
            src=src, algorithm=algorithm, bucket_bytes=bucket_bytes, prefix="" if isinstance(source, dict) else ROOT
        ),
    )  # fmt: skip
    for name, value in values.items():
        assign(state, flat.paths[name], value)
    report.missing_keys += missing
    return report
