"""epload.load and epload.load_state: load a checkpoint into a model, or into a nested state dict."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch

from epload.checkpoint.checksums import AnyChecksums
from epload.checkpoint.file_sets import DCP_ROOT
from epload.core.default_device import on_cpu
from epload.core.log import logger
from epload.loading.loader import SingleLoad
from epload.loading.request import LoadOptions
from epload.loading.values import agree_on_values
from epload.mapping.mapping import AnyMapping
from epload.mapping.mapping import Mapping as Rules
from epload.mapping.precision import AnyDTypes
from epload.model.flat_state import assign
from epload.model.initialization import InitMissing
from epload.model.megatron import Model
from epload.observe.render import list_first
from epload.planning.schedule import WAVE_BYTES, Algorithms, Readers
from epload.ranks.single_flight import Call, exclusive, preparing_call
from epload.ranks.topology import Topology, as_timedelta, as_topology
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
    """Loads a checkpoint into a sharded model, in place: its parameters and persistent buffers.

    Collective over the topology's ranks. For a model on a device, returns when the work is queued; work that the caller then
    queues on its current stream runs after it. To load repeatedly with the same buffers, use :class:`HierarchicalLoader`.

    Args:
        model: any mix of DTensors and plain tensors; on meta, materialized or already used. Or this rank's modules of
            Megatron-Core, which have storage: one, or a list of pipeline stages.
        checkpoint: a path, a dict of full tensors or an ``epload.Checkpoint`` on reading ranks; ignored on others. Or
            ``"epload://host:port"`` on every rank: receives the version that engines of the :class:`epload.WeightSender` at this
            address have in host memory.
        mapping: how checkpoint names become regions of the model's tensors. ``"auto"`` is what a transformers model declares
            (:func:`epload.mapping.from_model`); for other models, names as they are.
        strict: whether missing and unexpected keys are an error, as in ``nn.Module.load_state_dict``. If False, the report lists
            them, and missing parameters keep their values or are initialized.
        ignore_mismatched_shapes: whether to skip parameters that have another shape in the checkpoint. If True, the report lists
            them as ``mismatched_keys``, and they are treated like missing parameters; if False, they are an error, whatever
            ``strict`` is.
        dtype: the dtype of floating-point parameters that are on meta, itself or its name (``"bfloat16"``, ``"bf16"``), or a dict
            from regular expressions to dtypes; by default the model's. For a transformers model, it means what it means in
            ``from_pretrained(dtype=)``, which keeps some tensors in float32, also by default; the report lists them. Parameters
            that a dict names get exactly that dtype. fp8 weights and the scales of quantized weights keep the model's dtype.
        device: where plain tensors on meta go: a device or its name, such as ``"cuda:0"``, or ``"cuda"`` for the current one. It
            has to be the device of the model's other tensors and of their meshes, which is also the default. For a model that has
            only plain tensors on meta, the default is the device of ``stream=``, else that of the process group: its
            ``device_id``, or the current accelerator if the group has no backend for CPU (``init_process_group("nccl")``), else
            the CPU.
        init_missing: called as ``hook(module, path, names)`` after the data for each module with tensors that neither the
            checkpoint fills nor the model itself initializes. A transformers model initializes tensors that were on meta as
            ``from_pretrained`` does: non-persistent buffers, and parameters that ``strict=False`` leaves unfilled. A tensor that
            nothing fills is an error. ``"reset_parameters"`` calls the method of this name of the modules, which initializes
            these tensors as whole tensors, equally on all ranks; it does not touch tensors that the checkpoint has filled. It is
            not called for outer shards, whose whole size it cannot know, and an error for Megatron-Core's modules.
        variant: for a folder or a model on the Hub: which set of weights to load, e.g. ``"fp16"`` for
            ``model.fp16.safetensors``; by default the one without a variant.
        readers: ``"one"`` rank reads (``src`` of the options); ``"per_node"`` each node's leader reads, and nothing crosses
            nodes; ``"partitioned"`` readers take turns, and each byte is read once; ``"every"`` each rank reads what it keeps.
            ``"auto"`` is ``"one"`` if not every rank can read the checkpoint; ``"partitioned"`` if, each reading what it keeps, a
            rank would read more than 64 MiB, and all ranks together the checkpoint more than 1.25 times from object storage, or
            all nodes more than 4 times from files; else ``"every"``.
        verify: whether ranks verify their shards against the checkpoint after the load. All ranks that have the checkpoint share
            the work of reading it once more.
        checksums: what the checkpoint's files are compared with before anything is changed: True for the ``checksums.json`` next
            to them, or for the digests in the cache of the Hub; ``"sha256:HEX"`` for the ``checksums.json`` next to them, which
            must have this digest; the path of a list in the format of sha256sum; or a dict of sha256 digests by file name. To be
            compared, each file is read once more on each node; the ranks of a node that have the same files share the work.
        timeout: seconds (or timedelta) without progress after which the load has failed; 30 minutes if None. Data-moving steps
            get extra time, computed at 10 MB/s.
        topology: the ranks that load and their nodes; discovered over the whole job if None.
        progress: a bar on rank ``src`` when standard error is a terminal or in a notebook; else log records at INFO, one every
            5 s.
        options: rarely needed options: the source rank, the algorithm, the size of buckets, the stream, expert-parallel tensors
            that are not DTensors, a part of a DCP folder, traces.

    Returns:
        What happened, on every rank; keys are the same on all.

    Raises:
        LoadError: the run failed, the same on every rank. ModelMismatch, ManifestMismatch, and CheckpointError for a header:
            nothing has been changed. Any other, as CheckpointError for a file that was replaced or modified during the load:
            tensors may be materialized and partly written.
        ValueError, TypeError: a caller's mistake, the same on every rank; nothing has been changed.

    Example::

        report = epload.load(model, "/checkpoints/Qwen3-30B-A3B")
        if dist.get_rank() == 0:
            print(report)
    """
    with preparing_call(topology):
        options = LoadOptions() if options is None else options
        if not isinstance(options, LoadOptions):
            raise TypeError(f"expected options to be epload.LoadOptions, got {options!r}")
        if (address := address_of(checkpoint)) is not None:
            if readers not in ("auto", "every"):
                raise ValueError(f"expected readers='every' for {checkpoint}, each of whose ranks receives, got {readers!r}")
            checkpoint, readers = RunningJob(model, address, timeout), "every"
        loader = SingleLoad(
            topology, src=options.src, readers=readers, algorithm=options.algorithm, bucket_bytes=options.bucket_bytes,
            verify=verify, timeout=timeout, stream=options.stream, direct_io=options.direct_io, progress=progress,
        )  # fmt: skip
    with loader:
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
    src: int | None = None,
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
        variant, readers, verify, timeout, topology, progress: as for :func:`epload.load`.
        src, algorithm, bucket_bytes: as in :class:`epload.LoadOptions`.

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
        set_state_dict(
            model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )
    """
    with preparing_call(topology):
        topology = as_topology(topology, as_timedelta(timeout))
        src = topology.check_source(src)
    with exclusive(Call("load_state()", topology), as_timedelta(timeout)), topology.control.guard():
        flat, source, values, missing = agree_on_values(topology.control, state, checkpoint, src, strict)
    report = load(
        flat, source, mapping=Rules(), strict=strict, variant=variant, topology=topology, readers=readers,
        verify=verify, timeout=timeout, progress=progress,
        options=LoadOptions(
            src=src, algorithm=algorithm, bucket_bytes=bucket_bytes, prefix=DCP_ROOT
        ),
    )  # fmt: skip
    for name, value in values.items():
        assign(state, flat.paths[name], value)
    if missing:
        logger.warning("the checkpoint has no value for %s, which keep theirs", list_first(missing, 10))
    report.missing_keys += missing
    return report
