"""HierarchicalLoader: runs one load after another; ranks agree on each before data moves. Owns the staging buffers."""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Sequence
from datetime import timedelta
from itertools import count as count_from
from pathlib import Path
from time import perf_counter, strftime
from types import TracebackType
from typing import Any

import torch
from torch import nn

from epload.core import garbage_collection, log
from epload.core.default_device import on_cpu
from epload.core.log import logger
from epload.errors import redact_url
from epload.loading.agreement import Agreement
from epload.loading.recorder import record_events
from epload.loading.request import AnyChecksums, Options, Request, describe_model
from epload.loading.resources import Resources
from epload.loading.run import run_load
from epload.mapping.mapping import AnyMapping
from epload.mapping.precision import AnyDTypes
from epload.model.expert_parallel import LocalModules, OuterShard
from epload.model.initialization import InitMissing
from epload.model.megatron import Model
from epload.observe.render import count, list_keys
from epload.planning.schedule import WAVE_BYTES, Algorithms, Readers
from epload.ranks.membership import uninitialized_warning
from epload.ranks.single_flight import Call, exclusive
from epload.ranks.topology import Topology, as_timedelta
from epload.report import LoadReport


class HierarchicalLoader:
    """Loads checkpoints into models whose parameters are sharded over the ranks of a topology.

    Keeps its staging buffers between loads, so that a second load does not allocate them again. They are freed by :meth:`close`,
    or at the end of a ``with`` block. Process groups belong to the topology, which other loaders may use.

    Not thread-safe: two threads of a process must not load at once, not even with different loaders. The second load is rejected
    on every rank.

    Example::

        with epload.HierarchicalLoader(readers="one", timeout=300) as loader:
            for step in range(steps):
                loader.load(model, checkpoint_of(step))
    """

    @on_cpu
    def __init__(
        self,
        topology: Topology | None = None,
        *,
        src: int = 0,
        readers: Readers = "auto",
        algorithm: Algorithms = "auto",
        bucket_bytes: int = WAVE_BYTES,
        verify: bool = False,
        timeout: timedelta | float | None = None,
        stream: torch.Stream | None = None,
        direct_io: bool = True,
        progress: bool = True,
    ) -> None:
        """Creates a loader. Collective over the topology's ranks; all pass equal arguments.

        Args:
            topology: the ranks that load and their nodes; discovered over the whole job if None.
            src: global rank that reads (``readers="one"``); the leaders of the nodes are on its rail.
            readers: ``"one"`` rank ``src`` reads; ``"per_node"`` each node's leader reads, and nothing crosses nodes;
                ``"partitioned"`` readers take turns, and each byte is read once; ``"every"`` each rank reads what it keeps.
                ``"auto"`` is ``"one"`` if not every rank can read the checkpoint; ``"partitioned"`` if, each reading what it
                keeps, a rank would read more than 64 MiB and all ranks together would read the checkpoint more than 1.25 times
                from object storage, or 4 times from files; else ``"every"``.
            algorithm: how buckets move between nodes: ``"two_level"`` through one rank of each, ``"striped"`` in as many stripes
                as a node has ranks. ``"auto"`` is ``"striped"`` for a model on a device if node sizes are equal, else
                ``"two_level"``. With ``"auto"``, buckets that do not cross nodes go through memory that a node's ranks share;
                each rank copies what it keeps out of it.
            bucket_bytes: size of a bucket. Each rank has two, except for a model on a device with ``"every"``, where there are
                none. A rank that copies bytes from the host to a device has up to 64 MiB of pinned memory for them. If a node's
                ranks share staging buffers, this is the size of the buckets that move together, and the node has twice that (each
                rank, if they cannot share memory).
            verify: whether ranks verify their shards against the checkpoint after the load. All ranks that have the checkpoint
                share the work of reading it once more.
            timeout: seconds (or timedelta) without progress after which a load has failed; 30 minutes if None. Data-moving steps
                get extra time, computed at 10 MB/s.
            stream: a stream of the models' device, for all device work except the copies from host memory. It first waits for
                the caller's current stream, which afterwards waits for it. If None, the loader creates a stream and keeps it.
                Must be None for models on CPU.
            direct_io: whether files on local disks that are not in the page cache are read past it (``O_DIRECT``), which takes a
                small part of the CPU time and leaves the cache as it is. If False, they are in the cache afterwards, as far as
                there is memory, and the next load finds them there. Has no effect where bytes are read again: with
                ``verify=True``, and with ``"every"`` if ranks of a node keep the same ones.
            progress: a bar on rank ``src`` when standard error is a terminal or in a notebook; else log records at INFO, one
                every 5 s.

        Raises:
            ValueError, TypeError: an argument is out of range, or of another type.
        """
        log.configure()
        log.check_progress(progress)
        self._timeout = as_timedelta(timeout)
        self.options = Options(readers, algorithm, src, bucket_bytes, verify, direct_io)
        self.topology = topology if topology is not None else Topology.default(timeout=self._timeout)
        number = self.topology.number_loader()  # equal on all ranks
        self._made_by = threading.current_thread()
        self._as_pretrained = True
        """See :class:`Request`."""
        self._remembers = True
        """True if there will be another load."""
        self.topology.check_source(src)
        self.progress = progress
        self._control = self.topology.control
        self._resources = Resources(self.topology, self.options, stream)
        self._agreement = Agreement(self._resources, number)

    def close(self) -> None:
        """Frees pinned and shared memory, and everything else kept for the next load. Not collective. May be called again."""
        self._resources.release()
        self._agreement.close()

    def __enter__(self) -> HierarchicalLoader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @on_cpu
    def load(
        self,
        model: Model,
        checkpoint: Any,
        *,
        mapping: AnyMapping = "auto",
        strict: bool = True,
        ignore_mismatched_shapes: bool = False,
        dtype: AnyDTypes = None,
        device: torch.device | str | None = None,
        init_missing: InitMissing | None = None,
        outer_shards: Sequence[OuterShard] = (),
        local_modules: Sequence[LocalModules] = (),
        prefix: str = "",
        variant: str = "",
        checksums: AnyChecksums = False,
        trace: bool = False,
    ) -> LoadReport:
        """Fills the model's parameters and persistent buffers, in place. Collective over the topology's ranks.

        For a model on a device, returns when the work is queued; work that the caller then queues on its current stream runs
        after it.

        Args:
            model: any mix of DTensors and plain tensors; on meta, materialized or already used. Or this rank's modules of
                Megatron-Core, which have storage: one, or a list of pipeline stages.
            checkpoint: a path, a dict of full tensors or an ``epload.Checkpoint`` on reading ranks; ignored on others.
            mapping: how checkpoint names become regions of the model's tensors. ``"auto"`` is what a transformers model declares
                (:func:`epload.mapping.from_model`); for other models, names as they are.
            strict: whether missing and unexpected keys are an error, as in ``nn.Module.load_state_dict``. If False, the report
                lists them, and missing parameters keep their values or are initialized.
            ignore_mismatched_shapes: whether to skip parameters that have another shape in the checkpoint. If True, the report
                lists them as ``mismatched_keys``, and they are treated like missing parameters; if False, they are an error,
                whatever ``strict`` is.
            dtype: the dtype of floating-point parameters that are on meta, itself or its name (``"bfloat16"``, ``"bf16"``), or a
                dict from regular expressions to dtypes; by default the model's. For a transformers model, it means what it means
                in ``from_pretrained(dtype=)``, which keeps some tensors in float32, also by default; the report lists them.
                Parameters that a dict names get exactly that dtype. fp8 weights and the scales of quantized weights keep the
                model's dtype.
            device: where plain tensors on meta go: a device or its name, such as ``"cuda:0"``, or ``"cuda"`` for the current
                one. It has to be the device of the model's other tensors and of their meshes, which is also the default. For a
                model that has only plain tensors on meta, the default is the device of ``stream=``, else that of the process
                group: its ``device_id``, or the current accelerator if the group has no backend for CPU
                (``init_process_group("nccl")``), else the CPU.
            init_missing: called as ``hook(module, path, names)`` after the data for each module with tensors that neither the
                checkpoint fills nor the model itself initializes. A transformers model initializes tensors that were on meta as
                ``from_pretrained`` does: non-persistent buffers, and parameters that ``strict=False`` leaves unfilled. A tensor
                that nothing fills is an error. ``"reset_parameters"`` calls the method of this name of the modules, which
                initializes these tensors as whole tensors, equally on all ranks; it does not touch tensors that the checkpoint
                has filled. It is not called for outer shards and modules of Megatron-Core, because it cannot know their whole
                size.
            outer_shards: tensors of the model that are this rank's part of larger ones, though they do not say so.
            local_modules: modules whose tensors other ranks need not have.
            prefix: for a folder of torch.distributed.checkpoint (DCP): where in the saved state dict the model is, e.g.
                ``"app.model"``; by default under a top-level key "model" or "state_dict", or under the only key.
            variant: for a folder or a model on the Hub: which set of weights to load, e.g. ``"fp16"`` for
                ``model.fp16.safetensors``; by default the one without a variant.
            checksums: what the checkpoint's files are compared with before anything is changed: True for the ``checksums.json``
                next to them, or for the digests in the cache of the Hub; ``"sha256:HEX"`` for the ``checksums.json`` next to
                them, which must have this digest; the path of a list in the format of sha256sum; or a dict of sha256 digests by
                file name. To be compared, each file is read once more by ranks that have the checkpoint; ranks that see the same
                files share the work.
            trace: whether to record what each rank does and when, for :meth:`~epload.LoadReport.trace` and
                :meth:`~epload.LoadReport.plot` of the report. All ranks record if any rank passes True. Their events go to the
                first rank at the end of the load, in one more agreement round. If the environment variable ``EPLOAD_TRACE`` names
                a folder, every load is traced, and the first rank writes the trace to a file in that folder.

        Returns:
            What happened, on every rank; keys are the same on all.

        Raises:
            LoadError: the run failed, the same on every rank. After ModelMismatch, ManifestMismatch, and CheckpointError for a
                header, nothing has been changed. After any other, such as CheckpointError for a file that was replaced or
                modified during the load, tensors may be materialized and partly written.
            ValueError, TypeError: a caller's mistake, the same on every rank; nothing has been changed.
        """
        with exclusive(Call("load()", self.topology, self, self._made_by), self._timeout):
            try:
                with self._control.guard():
                    module, parts = describe_model(model, (*outer_shards, *local_modules))
                    trace = trace or bool(os.environ.get("EPLOAD_TRACE"))
                    request = Request(
                        module, checkpoint, mapping, strict, ignore_mismatched_shapes, dtype, parts, init_missing, prefix,
                        variant, trace, device, checksums, self._as_pretrained and module is model,  # not Megatron-Core's
                    )  # fmt: skip
                    return self._load(request)
            finally:
                if self._control.failure is not None and not self._control.failure.clean:
                    self._resources.release()
                    self.topology.groups.clear()

    def _load(self, request: Request) -> LoadReport:
        options, topology = self.options, self.topology
        first = topology.rank == topology.ranks[0]
        report = LoadReport(readers=options.readers, verify=options.verify, topology=repr(topology))
        if warning := uninitialized_warning():
            warnings.warn(warning, stacklevel=3)
            report.warnings.append(warning)
        if first:
            _log_start(request.model, request.checkpoint, topology)
        began = perf_counter()
        if request.trace:
            record_events(topology, report)
        if self._resources.memory is not None:
            # All ranks have come through the last round of the load before, and none moves data before all are in this one.
            self._resources.memory.restart()
        try:
            with report.timed("plan"), garbage_collection.paused():
                load = self._agreement.run(request, report)
            run_load(self._resources, request, load, report, self.progress and topology.rank == options.src)
            if self._remembers:
                with report.timed("plan"), garbage_collection.paused():
                    self._agreement.inputs.remember(request, load.inputs)
        finally:
            self._control.events = None
            self._agreement.inputs.close_checkpoint()
        load.describe(report)
        report.seconds = perf_counter() - began
        if first:
            _log_result(report)
            if folder := os.environ.get("EPLOAD_TRACE"):
                _write_trace(report, Path(folder))
        return report


def _log_start(model: nn.Module, checkpoint: Any, topology: Topology) -> None:
    nodes, ranks = len(topology.nodes), len(topology.ranks)
    source = (
        redact_url(str(checkpoint)) if isinstance(checkpoint, str | os.PathLike) else f"a {type(checkpoint).__name__}"
    )
    logger.info(
        "loading %s into %s, on %s of %s",
        source, type(model).__name__, count(ranks, "rank"), count(nodes, "node"),
    )  # fmt: skip


def _log_result(report: LoadReport) -> None:
    """The summary, and what the checkpoint did not fill."""
    logger.info("%s", report.summary)
    for warning in report.warnings:
        logger.warning("%s", warning)
    unfilled = sorted({*report.missing_keys, *report.mismatched_keys} - {*report.initialized})
    if unfilled:
        logger.warning("not filled, keep their values: %s", list_keys(unfilled))
    if report.unexpected_keys:
        logger.warning("not loaded, as the model lacks them: %s", list_keys(report.unexpected_keys))
    if report.initialized:
        logger.info("initialized: %s", list_keys(report.initialized))


def _write_trace(report: LoadReport, folder: Path) -> None:
    """A load that has succeeded does not fail because its trace cannot be written."""
    path = folder / f"load-{strftime('%Y%m%d-%H%M%S')}-{os.getpid()}-{next(_traces)}.json"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        report.trace(path)
        logger.info("wrote %s; open it with https://ui.perfetto.dev", path)
    except OSError as error:
        logger.warning("cannot write the trace of the load to %s: %s", folder, error)


_traces = count_from(1)
