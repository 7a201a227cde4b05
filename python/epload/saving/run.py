"""One save on one rank: reads the model, agrees with the other ranks on what is saved, and writes this rank's part."""

from __future__ import annotations

import hashlib
import threading
from base64 import b85decode, b85encode
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from epload.core import garbage_collection, log
from epload.core.attempt import attempt
from epload.files import read_regular
from epload.mapping.mapping import Mapping as Rules
from epload.model.flat_state import FlatState
from epload.planning.holdings import HoldingsSummary
from epload.ranks.single_flight import Call, Refused, exclusive
from epload.ranks.topology import Topology, as_timedelta
from epload.report import SaveReport
from epload.saving.layout import FilesLayout, lay_out
from epload.saving.plan import WritePlan, plan_writes
from epload.saving.source import SavedModel, read_model
from epload.saving.writer import write_buckets, write_checkpoint
from epload.transfer.shards import Shards

StateDict = Mapping[str, Any]


@dataclass(frozen=True)
class SaveOptions:
    """Arguments of :func:`epload.save`."""

    path: Path
    mapping: Rules | str
    names_from: Any
    dtype: torch.dtype | None
    max_shard_bytes: int
    files: tuple[Path, ...]
    overwrite: bool

    def check(self) -> None:
        """Raises ValueError."""
        limit = self.max_shard_bytes
        if not isinstance(limit, int) or isinstance(limit, bool) or limit < 1:
            raise ValueError(f"expected max_shard_bytes to be a number of bytes, at least 1, got {limit!r}")
        if missing := [file for file in self.files if not file.is_file()]:
            raise ValueError(f"expected files= to name files to be copied, but {missing[0]} is none")
        if self.dtype is not None and not (isinstance(self.dtype, torch.dtype) and self.dtype.is_floating_point):
            raise ValueError(f"expected dtype to be a floating-point dtype, got {self.dtype!r}")


@dataclass(frozen=True)
class SaveMessage:
    """A rank's message once it has read its model."""

    agreed: str
    """Digest of what has to be equal on all ranks."""
    columns: str
    """First part of its holdings's summary, see :meth:`HoldingsSummary.encode`, in base85. Equal on ranks with equal layouts."""
    rest: str
    """Second part."""


@dataclass(frozen=True)
class SaveDecision:
    """The summaries of all ranks, equal parts once."""

    columns: list[str]
    rest: list[str]
    parts: list[tuple[int, int]]
    """Numbers of both parts for each rank, in the order of the ranks."""

    @classmethod
    def of(cls, messages: dict[int, SaveMessage]) -> SaveDecision:
        """Raises ValueError if the ranks do not save the same."""
        first = min(messages)
        for rank, message in messages.items():
            if message.agreed != messages[first].agreed:
                raise ValueError(
                    f"ranks {first} and {rank} save different tensors, or pass a different path, max_shard_bytes or overwrite; "
                    "pass the same on all ranks"
                )
        columns = list(dict.fromkeys(message.columns for message in messages.values()))
        rest = list(dict.fromkeys(message.rest for message in messages.values()))
        parts = [(columns.index(m.columns), rest.index(m.rest)) for _, m in sorted(messages.items())]
        return cls(columns, rest, parts)

    def summaries(self, ranks: tuple[int, ...]) -> dict[int, HoldingsSummary]:
        """Returns the summaries by rank. Equal ones are one object, and so are their columns."""
        class_of: dict[int, Tensor] = {}
        distinct: dict[tuple[int, int], HoldingsSummary] = {}
        for a, b in map(tuple, self.parts):
            if (a, b) not in distinct:
                summary = HoldingsSummary.decode(b85decode(self.columns[a]), b85decode(self.rest[b]))
                distinct[a, b] = replace(summary, class_of=class_of.setdefault(a, summary.class_of))
        return {rank: distinct[a, b] for rank, (a, b) in zip(ranks, self.parts, strict=True)}


class SaveJob:
    """Saves a model once. Reads the model when it is made."""

    def __init__(
        self,
        model: nn.Module | StateDict,
        options: SaveOptions,
        topology: Topology | None,
        timeout: timedelta | float | None,
    ) -> None:
        self._began = perf_counter()
        log.configure()
        self._timeout = as_timedelta(timeout)
        self._topology = topology if topology is not None else Topology.default(timeout=self._timeout)
        self._made_by = threading.current_thread()
        self._options = options
        self._report = SaveReport(path=str(options.path))
        with self._report.timed("plan"), garbage_collection.paused():
            self._source, self._failure = attempt(lambda: self._read(model))

    def _read(self, model: nn.Module | StateDict) -> SavedModel:
        """Raises ValueError, TypeError or LoadError."""
        self._options.check()
        module = model if isinstance(model, nn.Module) else FlatState(model)
        if isinstance(module, FlatState) and module.others:
            name, value = next(iter(module.others.items()))
            raise ValueError(
                f"expected only tensors in the state dict, got {name}, a {type(value).__name__}: safetensors files hold "
                "nothing else; leave it out, or save with torch.distributed.checkpoint"
            )
        source = read_model(module, self._options.mapping, self._options.names_from, self._options.dtype)
        if not source.manifest.names:
            raise ValueError("expected tensors to save, got none")
        return source

    def snapshot(self) -> list[Tensor] | None:
        """Returns copies of the local tensors in host memory."""
        if self._source is None:
            return None
        local = self._source.targets.local()
        copies = []
        for tensor in local:
            pinned = not tensor.is_cpu and torch.accelerator.is_available()
            copies.append(torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pinned))
            copies[-1].copy_(tensor.detach(), non_blocking=pinned)
        for device in {tensor.device for tensor in local if not tensor.is_cpu}:
            torch.accelerator.current_stream(device).synchronize()
        return copies

    def run(self, tensors: list[Tensor] | None = None, failure: Exception | None = None) -> SaveReport:
        """Collective.

        Args:
            tensors: in place of the model's local tensors.
            failure: why this rank cannot save.

        Raises:
            LoadError, ValueError, TypeError: the same on every rank; what was at the path is still there.
        """
        report, options, source = self._report, self._options, self._source
        failure = self._failure or failure
        with exclusively("save()", self._topology, self, self._made_by, self._timeout):
            with report.timed("plan"), garbage_collection.paused():
                summaries = self._agree(failure)
                assert source is not None
                planned, failure = attempt(lambda: self._plan(source, summaries))
            layout, plan = planned if planned is not None else (None, WritePlan((), 0))
            local = tensors if tensors is not None else source.targets.local()
            shards = Shards(plan, local, False, f"rank {self._topology.rank}", len(self._topology.node))
            write_checkpoint(
                self._topology, options.path, options.overwrite, layout, failure,
                lambda files, done: write_buckets(plan, files, shards, report, done),
                lambda: source.config | {file.name: read_regular(file) for file in options.files}, report,
            )  # fmt: skip
        assert layout is not None
        report.files, report.tensors, report.written = len(layout.files), len(source.manifest.names), plan.nbytes
        report.nbytes, report.seconds = source.manifest.nbytes, perf_counter() - self._began
        return report

    def _agree(self, failure: Exception | None) -> dict[int, HoldingsSummary]:
        """Returns the summaries of all ranks, which save the same."""
        control, options, message = self._topology.control, self._options, None
        control.doing = "plans the save"
        if self._source is not None:
            same = self._source.manifest.digest, str(options.path), options.max_shard_bytes, options.overwrite
            columns, rest = (b85encode(part).decode() for part in self._source.holdings.summary().encode())
            message = asdict(
                SaveMessage(hashlib.blake2b(repr(same).encode(), digest_size=16).hexdigest(), columns, rest)
            )

        def decide(views: dict[int, dict[str, Any]]) -> dict[str, Any]:
            return asdict(SaveDecision.of({rank: SaveMessage(**view) for rank, view in views.items()}))

        return SaveDecision(**control.settle("planning the save", failure, message, decide)).summaries(control.ranks)

    def _plan(self, source: SavedModel, summaries: dict[int, HoldingsSummary]) -> tuple[FilesLayout, WritePlan]:
        manifest = source.manifest
        layout = lay_out(manifest, self._options.max_shard_bytes)
        unpadded = replace(manifest, shapes=source.shapes)
        return layout, plan_writes(unpadded, layout, summaries, self._topology.rank, source.holdings)


@contextmanager
def exclusively(
    what: str, topology: Topology, owner: object, made_by: threading.Thread, timeout: timedelta
) -> Iterator[None]:
    """A context in which no other load or save of the process runs, and out of which every rank raises the same error."""
    try:
        with exclusive(Call(what, topology, owner, made_by), timeout), topology.control.guard():
            yield
    except Refused as refused:
        raise refused.failure.error() from None
