"""One save on one rank: reads the model, agrees with the other ranks on what is saved, and writes this rank's part."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from time import perf_counter
from typing import Any

from torch import Tensor, nn
from torch.distributed import HashStore  # type: ignore[attr-defined]

from epload.core import garbage_collection, log, threads
from epload.core.attempt import Attempt
from epload.core.dtypes import DType, requested
from epload.mapping.mapping import AnyMapping, quantize_rule
from epload.model.flat_state import FlatState
from epload.model.megatron import Model, as_module
from epload.planning.holdings import Holdings, digest_of
from epload.ranks.contents import fetch_holdings, publish_holdings
from epload.ranks.single_flight import Call, exclusive, preparing_call, wait_for_background
from epload.ranks.topology import Topology, as_timedelta, as_topology
from epload.report import SaveReport
from epload.saving.changes import DeltaBase
from epload.saving.folder import NewFolder, folder_path
from epload.saving.layout import FilesLayout, lay_out
from epload.saving.plan import WritePlan, plan_writes
from epload.saving.source import SavedModel, read_model
from epload.saving.writer import Wrote, check_arguments, check_equal, write_checkpoint, write_regions
from epload.transfer.host_copies import copy_to_host, host_memory_for


class PendingSave:
    """A save that goes on in the background; made by :func:`epload.save_async`. Reads the model when it is made."""

    def __init__(
        self,
        model: Model | Mapping[str, Any],
        path: str | Path,
        mapping: AnyMapping,
        names_from: Any,
        dtype: DType | None,
        max_shard_bytes: int,
        files: Sequence[str | Path],
        base: Any,
        checksums: bool,
        overwrite: bool,
        topology: Topology | None,
        timeout: timedelta | float | None,
    ) -> None:
        """See :func:`epload.save` for the arguments."""
        self._began = perf_counter()
        with preparing_call(topology):
            log.configure()
            wait_for_background()
            self._path = folder_path(path)
            self._files = tuple(map(Path, files))
            self._timeout = as_timedelta(timeout)
            self._topology = as_topology(topology, self._timeout)
        self._max_shard_bytes = max_shard_bytes
        self._checksums = checksums
        self._overwrite = overwrite
        self._made_by = threading.current_thread()
        self._report = SaveReport(path=str(self._path))
        with self._report.timed("plan"), garbage_collection.paused(), preparing_call(self._topology):
            self._model = Attempt(lambda: self._read(model, mapping, names_from, dtype))
            self._base = Attempt(lambda: self._open_base(base))

    def _read(self, model: Model | Mapping[str, Any], mapping: AnyMapping, names_from: Any, dtype: DType | None) -> SavedModel:
        quantizes = quantize_rule(mapping) is not None
        self._contents = check_arguments(
            self._topology, self._max_shard_bytes, self._files, self._checksums, self._overwrite, quantizes
        )
        dtype = None if dtype is None else requested("dtype", dtype)
        if not isinstance(model, nn.Module | list | tuple):
            if not isinstance(model, Mapping):
                raise TypeError(f"expected an nn.Module or a dict of tensors, got {type(model).__name__}")
            model = FlatState(model)
            if model.others:
                name, value = next(iter(model.others.items()))
                raise ValueError(
                    f"expected only tensors in the state dict, got {name}, a {type(value).__name__}: safetensors files hold "
                    "nothing else; leave it out, or save with torch.distributed.checkpoint"
                )
        saved = read_model(as_module(model), mapping, names_from, dtype)
        if not saved.manifest.names:
            raise ValueError("expected tensors to save, got none")
        return saved

    def _open_base(self, source: Any) -> DeltaBase | None:
        if source is None:
            return None
        if self._files or self._checksums:
            raise ValueError("files= and checksums= are for whole checkpoints; leave them out, and pass them to epload.convert()")
        return DeltaBase(source, self._path, self._model.value)

    def _start(self) -> None:
        """Copies the local tensors to host memory, so that the model may change, and begins to save in another thread."""
        read = self._model
        with preparing_call(self._topology):
            self._model = Attempt(lambda: replace(read.value, tensors=_copy(read.value.tensors)))
            if self._model.result is not None:
                self._report.peak_staging = sum(copy.nbytes for copy in self._model.result.tensors)
        number = self._topology.control.next_load()  # in the order of the caller's calls

        def run() -> SaveReport:
            outcome = Attempt(lambda: self._run(number))
            if outcome.failure is not None:  # which nobody may wait for
                log.logger.warning("the save to %s failed: %s", self._path, outcome.failure)
            if self._model.failure is None and any(copy.is_pinned() for copy in self._model.value.tensors):
                _pinned[:] = self._model.value.tensors
            del self._model, self._base  # which are much memory
            return outcome.value

        try:
            self._saving = threads.call("epload-save", run)
        except Exception as error:
            self._model.failure = error
            self._run(number)  # on all ranks, where it raises this
            raise

    def done(self) -> bool:
        """Returns True if it has ended, so that :meth:`wait` returns at once."""
        return self._saving.done()

    def wait(self) -> SaveReport:
        """Waits until it has ended.

        Raises:
            LoadError, ValueError, TypeError: as :func:`epload.save`.
        """
        return self._saving.result()

    def _run(self, number: int | None = None) -> SaveReport:
        """Saves the model, as the call of this number. Collective. Raises LoadError, ValueError or TypeError, the same on every
        rank; what was at the path is still there."""
        report, topology = self._report, self._topology
        call = Call("save()", topology, self, self._made_by)
        with exclusive(call, self._timeout, number), topology.control.guard():
            with report.timed("plan"), garbage_collection.paused():
                holdings = self._agree()
                planned = Attempt(lambda: self._plan(holdings))

            base, saved = self._base.value, self._model.value
            tensors = saved.tensors
            if saved.quantized is not None:
                with report.timed("pack"):
                    tensors = saved.quantized.quantize(Attempt(lambda: saved.tensors), topology, on_host=True)

            def write(folder: NewFolder, wrote: Wrote) -> None:
                plan = planned.value[1]
                if base is not None:
                    report.base = base.name
                    number = topology.ranks.index(topology.rank)
                    base.write_changes(plan, tensors, folder, number, report, wrote)
                    return
                write_regions(plan, tensors, folder, len(topology.node), report, wrote)
                report.written = int(plan[0].nbytes().sum())

            def describe(folder: NewFolder) -> Mapping[str, bytes]:
                return base.describe(folder) if base is not None else saved.config

            overwrite, files, checksums = self._overwrite, self._contents, self._checksums
            write_checkpoint(topology, overwrite, lambda: planned.value[0], write, describe, files, checksums, report)
        report.seconds = perf_counter() - self._began
        return report

    def _agree(self) -> list[Holdings]:
        """Returns the holdings of all ranks, without targets, which save the same."""
        control = self._topology.control
        control.doing = "plans the save"
        store = control.store if control.store is not None else HashStore()

        def message() -> list[str]:
            saved = self._model.value
            base = (base := self._base.value) and (base.name, base.digest)
            same = (
                saved.padded.digest,
                saved.rules,
                str(self._path),
                self._max_shard_bytes,
                self._overwrite,
                base,
                self._checksums,
            )
            return [digest_of(repr(same).encode()), *publish_holdings(store, saved.holdings)]

        def reduce(views: dict[int, list[str]]) -> list[list[str]]:
            activity = "save different tensors, or pass a different mapping, path, max_shard_bytes, base, checksums or overwrite"
            check_equal({rank: digest for rank, (digest, *_) in views.items()}, activity)
            return [names for _, (_, *names) in sorted(views.items())]

        own = Attempt(message)
        names = control.agree("planning the save", own.failure, own.result, reduce)
        return fetch_holdings(store, names, control.timeout)

    def _plan(self, holdings: list[Holdings]) -> tuple[FilesLayout, WritePlan]:
        saved, topology, base = self._model.value, self._topology, self._base.value
        if base is None:
            layout = lay_out(saved.padded, self._max_shard_bytes, stem=saved.stem)
        else:
            layout = base.lay_out(len(topology.ranks))
        of_ranks = dict(zip(topology.control.ranks, holdings, strict=True))
        return layout, plan_writes(saved.manifest, layout, of_ranks, topology.rank, saved.holdings)


_pinned: list[Tensor] = []
"""The memory of the last save in the background that has ended, if the model was on a device: pinning it again would take longer
than copying."""


def _copy(tensors: list[Tensor]) -> list[Tensor]:
    copies, _pinned[:] = list(_pinned), []  # which no other save uses meanwhile
    if [(copy.shape, copy.dtype) for copy in copies] != [(tensor.shape, tensor.dtype) for tensor in tensors]:
        copies.clear()
        copies = host_memory_for(tensors)
    copy_to_host(tensors, copies)
    return copies
