"""HierarchicalLoader: runs one load after another; ranks agree on each before data moves. Owns the staging buffers."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from dataclasses import replace
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
from epload.loading.request import AnyChecksums, Options, Request, describe_model, parts_of
from epload.loading.resources import Resources
from epload.loading.run import run_load
from epload.mapping.mapping import AnyMapping
from epload.mapping.precision import AnyDTypes
from epload.model.expert_parallel import LocalModules, OuterShard, remember
from epload.model.initialization import InitMissing
from epload.model.megatron import Model
from epload.observe.render import count, list_keys
from epload.planning.schedule import WAVE_BYTES, Algorithms, Readers
from epload.ranks.membership import uninitialized_warning
from epload.ranks.single_flight import Call, exclusive, preparing_call
from epload.ranks.topology import Topology, as_timedelta, as_topology
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

    _remembers = True
    """True if there will be another load."""

    @on_cpu
    def __init__(
        self,
        topology: Topology | None = None,
        *,
        src: int | None = None,
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
            topology, readers, verify, timeout, progress: as for :func:`epload.load`.
            src, algorithm, bucket_bytes, stream, direct_io: as in :class:`LoadOptions`.

        Raises:
            ValueError, TypeError: an argument is out of range, or of another type.
        """
        log.configure()
        log.check_progress(progress)
        self._timeout = as_timedelta(timeout)
        options = Options(readers, algorithm, 0, bucket_bytes, verify, direct_io)
        self.topology = as_topology(topology, self._timeout)
        self.options = replace(options, src=self.topology.check_source(src))
        self._made_by = threading.current_thread()
        self._as_pretrained = True
        """See :class:`Request`."""
        self.progress = progress
        self._control = self.topology.control
        self._resources = Resources(self.topology, self.options, stream)
        number = self.topology.number_loader() if self._remembers else 0  # equal on all ranks
        self._agreement = Agreement(self._resources, number)

    def close(self) -> None:
        """Frees pinned and shared memory, and everything else kept for the next load. Not collective. May be called again."""
        self._resources.release()
        self._agreement.close()

    def __enter__(self) -> HierarchicalLoader:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
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

        Args:
            model, checkpoint, mapping, strict, ignore_mismatched_shapes, dtype, device, init_missing, variant, checksums: as for
                :func:`epload.load`.
            outer_shards, local_modules, prefix, trace: as in :class:`LoadOptions`.

        Returns:
            What happened, on every rank; keys are the same on all.

        Raises:
            LoadError, ValueError, TypeError: as :func:`epload.load`.
        """
        self.topology.check_group()
        with preparing_call(self.topology):
            said = parts_of(outer_shards, local_modules)
        with exclusive(Call("load()", self.topology, self, self._made_by), self._timeout):
            try:
                with self._control.guard():
                    module, parts = describe_model(model, said)
                    trace = trace or bool(os.environ.get("EPLOAD_TRACE"))
                    request = Request(
                        module, checkpoint, mapping, strict, ignore_mismatched_shapes, dtype, parts, init_missing, prefix,
                        variant, trace, device, checksums, self._as_pretrained and module is model,  # not Megatron-Core's
                    )  # fmt: skip
                    return self._load(request)
            except BaseException:
                failure = self._control.failure
                if not self._control.succeeded and (failure is None or not failure.clean):
                    self._resources.release()
                    self.topology.groups.clear()
                raise

    def _load(self, request: Request) -> LoadReport:
        options, topology = self.options, self.topology
        first = topology.rank == topology.ranks[0]
        report = LoadReport(readers=options.readers, verify=options.verify, topology=repr(topology))
        if warning := uninitialized_warning():
            report.warnings.append(warning)
        if first:
            _log_start(request.model, request.checkpoint, topology)
        began = perf_counter()
        if request.trace:
            self._agreement.record_events(report)
        self._resources.restart()
        try:
            with report.timed("plan"), garbage_collection.paused():
                load = self._agreement.run(request, report)
            run_load(self._resources, request, load, report, self.progress and topology.rank == options.src)
            remember(request.parts, request.model, load.inputs.targets.names, load.inputs.targets.tensors)
            if self._remembers:
                with report.timed("plan"), garbage_collection.paused():
                    self._agreement.inputs.remember(request, load.inputs, load.missing.computed)
        finally:
            self._control.events = None
            self._agreement.inputs.close_checkpoint()
        load.describe(report)
        report.seconds = perf_counter() - began
        if first:
            logger.info("%s", report.summary)
        if first or load.inputs.local_modules:  # with which each rank has warnings of its own
            for warning in report.warnings:
                logger.warning("%s", warning)
        if first:
            _log_keys(report)
            if folder := os.environ.get("EPLOAD_TRACE"):
                _write_trace(report, Path(folder))
        return report


class SingleLoad(HierarchicalLoader):
    """A loader for one load. It has no number: one that a rank has not made would be missed by all later ones."""

    _remembers = False


def _log_start(model: nn.Module, checkpoint: Any, topology: Topology) -> None:
    nodes, ranks = len(topology.nodes), len(topology.ranks)
    source = redact_url(str(checkpoint)) if isinstance(checkpoint, str | os.PathLike) else f"a {type(checkpoint).__name__}"
    logger.info(
        "loading %s into %s, on %s of %s",
        source, type(model).__name__, count(ranks, "rank"), count(nodes, "node"),
    )  # fmt: skip


def _log_keys(report: LoadReport) -> None:
    """Logs what the checkpoint did not fill."""
    if report.mismatched_keys:
        logger.warning("not loaded, as they have other shapes: %s", list_keys(report.mismatched_keys))
    if unfilled := sorted({*report.missing_keys} - {*report.initialized}):
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
