"""One save on one rank: agrees with the other ranks, writes this rank's part, and has the folder appear."""

from __future__ import annotations

import base64
import hashlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from epload.cluster.topology import Topology
from epload.control.activity import working
from epload.core import garbage_collection
from epload.core.attempt import attempt
from epload.files import read_regular
from epload.mapping.mapping import Mapping
from epload.model.flat_state import FlatState
from epload.planning.holdings import HoldingsSummary
from epload.saving.folder import NewFolder, check_seen_by_all
from epload.saving.layout import INDEX, FilesLayout, lay_out
from epload.saving.plan import WritePlan, plan_writes
from epload.saving.report import SaveReport
from epload.saving.source import Source, read_source
from epload.saving.writer import NewFiles, write_buckets
from epload.staging.shards import Shards


@dataclass(frozen=True)
class SaveOptions:
    """Arguments of :func:`epload.save`."""

    path: Path
    mapping: Mapping | str
    names_from: Any
    dtype: torch.dtype | None
    max_shard_bytes: int
    files: tuple[Path, ...]
    overwrite: bool

    def read(self, model: nn.Module | FlatState) -> Source:
        """Reads what is saved. Raises ValueError, TypeError or LoadError."""
        limit = self.max_shard_bytes
        if not isinstance(limit, int) or isinstance(limit, bool) or limit < 1:
            raise ValueError(f"expected max_shard_bytes to be a number of bytes, at least 1, got {limit!r}")
        if missing := [file for file in self.files if not file.is_file()]:
            raise ValueError(f"expected files= to name files to be copied, but {missing[0]} is none")
        if self.dtype is not None and not (isinstance(self.dtype, torch.dtype) and self.dtype.is_floating_point):
            raise ValueError(f"expected dtype to be a floating-point dtype, got {self.dtype!r}")
        if isinstance(model, FlatState) and model.others:
            name, value = next(iter(model.others.items()))
            raise ValueError(
                f"expected only tensors in the state dict, got {name}, a {type(value).__name__}: safetensors files hold "
                "nothing else; leave it out, or save with torch.distributed.checkpoint"
            )
        source = read_source(model, self.mapping, self.names_from, self.dtype)
        if not source.manifest.names:
            raise ValueError("expected tensors to save, got none")
        return source


class SaveRun:
    def __init__(self, topology: Topology, options: SaveOptions, report: SaveReport) -> None:
        self._topology = topology
        self._control = topology.control
        self._first = topology.rank == topology.ranks[0]
        """True on the rank that makes the folder and renames it in the end."""
        self._options = options
        self._report = report
        self._folder: NewFolder | None = None

    def run(self, source: Source | None, tensors: list[Tensor] | None, failure: Exception | None) -> None:
        """Collective.

        Args:
            source: what this rank saves; None if it cannot.
            tensors: in place of the local tensors of ``source``.
            failure: why it cannot.

        Raises:
            LoadError, ValueError, TypeError: the same on every rank; what was at the path is still there.
        """
        try:
            with self._report.timed("plan"), garbage_collection.paused():
                layout, plan = self._prepare(source, failure)
            assert source is not None
            self._write(plan, layout, tensors if tensors is not None else source.targets.local())
            self._commit(source, layout)
        except BaseException:
            if self._folder is not None:
                self._folder.discard()
            raise
        report, manifest = self._report, source.manifest
        report.files, report.tensors, report.nbytes = len(layout.files), len(manifest.names), manifest.nbytes

    def _prepare(self, source: Source | None, failure: Exception | None) -> tuple[FilesLayout, WritePlan]:
        """The ranks agree on what is saved, and have the empty files."""
        control = self._control
        control.doing = "plans the save"
        view: list[Any] = []
        if source is not None:
            options = self._options
            agreed = repr(
                (source.manifest.digest, str(options.path), options.max_shard_bytes, options.overwrite)
            ).encode()
            parts = [base64.b85encode(part).decode() for part in source.holdings.summary().encode()]
            view = [hashlib.blake2b(agreed, digest_size=16).hexdigest(), *parts]
        said = control.settle("planning the save", failure, view, _summaries)
        assert source is not None
        summaries = _decode(said)
        manifest = source.manifest

        def plan() -> tuple[FilesLayout, WritePlan]:
            layout = lay_out(manifest.names, manifest.shapes, manifest.dtypes, self._options.max_shard_bytes)
            mine = plan_writes(
                manifest.names, source.shapes, manifest.dtypes, layout, summaries, control.rank, source.holdings
            )
            return layout, mine

        planned, failure = attempt(plan)
        name = ""
        if self._first and planned is not None:
            made, failure = attempt(lambda: self._make_folder(planned[0]))
            name = made or ""
        name = control.settle("making the folder", failure, name, lambda views: views[control.ranks[0]])
        assert planned is not None
        options = self._options
        self._folder = self._folder or NewFolder(options.path, options.path.with_name(name), options.overwrite)
        return planned

    def _make_folder(self, layout: FilesLayout) -> str:
        self._folder = NewFolder.create(self._options.path, self._options.overwrite)
        self._folder.add_files(layout.files)
        return self._folder.temporary.name

    def _write(self, plan: WritePlan, layout: FilesLayout, tensors: list[Tensor]) -> None:
        """Writes this rank's part into the hidden folder."""
        control, topology, folder = self._control, self._topology, self._folder
        assert folder is not None
        control.settle(
            "finding the folder", None, folder.exists,
            lambda views: check_seen_by_all(folder.path.parent, topology.nodes, views),
        )  # fmt: skip
        shards = Shards(plan, tensors, False, f"rank {control.rank}", len(topology.node))

        def write() -> None:
            new_files = NewFiles(folder.temporary, [file.name for file in layout.files])
            with working(control, "writes its part of the checkpoint") as done, new_files as files:
                write_buckets(plan, files, shards, self._report, done)
                with self._report.timed("sync"):
                    files.sync(lambda: done(0))

        _, failure = attempt(write)
        control.settle("writing the checkpoint", failure)
        self._report.written = plan.nbytes

    def _commit(self, source: Source, layout: FilesLayout) -> None:
        """Adds the small files, and has the folder appear."""
        control, folder = self._control, self._folder
        assert folder is not None
        control.doing = "completes the checkpoint"

        def complete() -> None:
            small = {**source.config, **({} if layout.index is None else {INDEX: layout.index})}
            small |= {file.name: read_regular(file) for file in self._options.files}
            for name, content in small.items():
                folder.add(name, content)
            folder.sync()
            folder.commit()

        failure = None
        if self._first:
            with self._report.timed("sync"):
                _, failure = attempt(complete)
        control.settle("completing the checkpoint", failure, last=True)


def _summaries(views: dict[int, Any]) -> list[Any]:
    """Collects the summaries of all ranks, equal parts once. Raises ValueError if the ranks do not save the same."""
    first = min(views)
    for rank, view in views.items():
        if view[0] != views[first][0]:
            raise ValueError(
                f"ranks {first} and {rank} save different tensors, or pass a different path, max_shard_bytes or overwrite; "
                "pass the same on all ranks"
            )
    columns = list(dict.fromkeys(view[1] for view in views.values()))
    rest = list(dict.fromkeys(view[2] for view in views.values()))
    return [columns, rest, {rank: [columns.index(view[1]), rest.index(view[2])] for rank, view in views.items()}]


def _decode(said: list[Any]) -> dict[int, HoldingsSummary]:
    """The summaries by rank. Equal ones are one object, and so are their columns."""
    columns, rest, which = said
    arrays: dict[int, Any] = {}
    made: dict[tuple[int, int], HoldingsSummary] = {}
    for a, b in which.values():
        if (a, b) not in made:
            summary = HoldingsSummary.decode(base64.b85decode(columns[a]), base64.b85decode(rest[b]))
            made[a, b] = replace(summary, class_of=arrays.setdefault(a, summary.class_of))
    return {int(rank): made[a, b] for rank, (a, b) in which.items()}
