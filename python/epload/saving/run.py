"""One save on one rank: agrees with the other ranks, writes this rank's part, and has the folder appear."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from epload.cluster.topology import Topology
from epload.control.activity import working
from epload.core import garbage_collection
from epload.core.attempt import attempt
from epload.core.log import logger
from epload.files import read_regular
from epload.mapping.mapping import Mapping
from epload.model.flat_state import FlatState
from epload.planning.shares import Outline
from epload.saving.folder import NewFolder, lowest_seen
from epload.saving.layout import INDEX, FilesLayout, lay_out
from epload.saving.plan import WritePlan, plan_writes
from epload.saving.report import SaveReport
from epload.saving.source import Source, read_source
from epload.saving.transfer import FileSink, SentPlan, send_to_nodes, sent_sizes
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
        """What is saved. Raises ValueError, TypeError or LoadError."""
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
        """Whether this rank makes the folder, and has it appear."""
        self._options = options
        self._report = report
        self._folder: NewFolder | None = None
        self._made: list[NewFolder] = []
        """Those that this rank has made; one of them may be ``_folder``."""

    def run(self, source: Source | None, tensors: list[Tensor] | None, failure: Exception | None) -> None:
        """Collective.

        Args:
            source: what this rank saves; None if it cannot.
            tensors: in place of the local tensors of ``source``.
            failure: why it cannot.

        Raises:
            LoadError, ValueError, TypeError: the same on every rank; what was at the path is still there, but for nodes with
                file systems of their own, on which the new folder had appeared when it failed on another.
        """
        try:
            with self._report.timed("plan"), garbage_collection.paused():
                layout, plan = self._prepare(source, failure)
            assert source is not None
            self._write(plan, layout, tensors if tensors is not None else source.targets.local())
            self._commit(source, layout)
        except BaseException:
            for folder in (self._folder, *self._made):
                if folder is not None:
                    folder.discard()
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
            parts = [base64.b85encode(part).decode() for part in source.share.outline().encode()]
            view = [hashlib.blake2b(agreed, digest_size=16).hexdigest(), *parts]
        said = control.settle("planning the save", failure, view, _outlines)
        assert source is not None
        outlines = _decode(said)
        manifest = source.manifest

        def plan() -> tuple[FilesLayout, WritePlan]:
            layout = lay_out(manifest.names, manifest.shapes, manifest.dtypes, self._options.max_shard_bytes)
            mine = plan_writes(
                manifest.names, source.shapes, manifest.dtypes, layout, outlines, control.rank, source.share
            )
            return layout, mine

        planned, failure = attempt(plan)
        name = ""
        if self._first and planned is not None:
            made, failure = attempt(lambda: self._make_folder(planned[0]))
            name = made or ""
        name = control.settle("making the folder", failure, name, lambda views: views[control.ranks[0]])
        assert planned is not None
        self._folder = self._folder or self._folder_called(name)
        return planned

    def _folder_called(self, name: str) -> NewFolder:
        options = self._options
        return NewFolder(options.path, options.path.with_name(name), options.overwrite)

    def _create_folder(self) -> NewFolder:
        self._made.append(NewFolder.create(self._options.path, self._options.overwrite))
        return self._made[-1]

    def _make_folder(self, layout: FilesLayout) -> str:
        self._folder = self._create_folder()
        self._folder.add_files(layout.files)
        return self._folder.temporary.name

    def _write(self, plan: WritePlan, layout: FilesLayout, tensors: list[Tensor]) -> None:
        """Writes the tensors into the hidden folder, or folders."""
        control, folder = self._control, self._folder
        assert folder is not None
        seen = control.settle(
            "finding the folder", None, folder.exists, lambda views: [views[r] for r in control.ranks]
        )
        shards = Shards(plan, tensors, False, f"rank {control.rank}", len(self._topology.node))
        if all(seen):
            self._write_own(plan, layout, shards)
        else:
            self._write_on_each_node(plan, layout, shards)

    def _write_own(self, plan: WritePlan, layout: FilesLayout, shards: Shards) -> None:
        """Writes this rank's part."""
        control = self._control

        def write() -> None:
            with working(control, "writes its part of the checkpoint") as done, self._new_files(layout) as files:
                write_buckets(plan, files, shards, self._report, done)
                self._sync(files, lambda: done(0))

        _, failure = attempt(write)
        control.settle("writing the checkpoint", failure)
        self._report.written = plan.nbytes

    def _write_on_each_node(self, plan: WritePlan, layout: FilesLayout, shards: Shards) -> None:
        """Writes the whole checkpoint to each file system, by the ranks of the first node that has it."""
        control, topology = self._control, self._topology
        assert self._folder is not None
        token = self._folder.temporary.name
        folders = self._find_folders(layout)
        number = topology.nodes.index(topology.node)
        self._first = folders[number] == number and control.rank == topology.node[0]
        self._report.folders = len(set(folders))
        sizes = control.settle("planning the transfer", None, sent_sizes(plan), lambda views: views)
        by_rank = {int(rank): of_rank for rank, of_rank in sizes.items()}
        sent = SentPlan.of(by_rank, topology.nodes, control.rank, folders[number] == number, token)
        with self._new_files(layout) as files:
            sink = FileSink(sent, files, layout.files)
            send_to_nodes(topology, sent, plan, shards, sink, self._report)
            _, failure = attempt(lambda: self._sync(files, self._progressed))
            control.settle("writing the checkpoint", failure, patience=2)
        self._report.written = sink.written

    def _find_folders(self, layout: FilesLayout) -> list[int]:
        """Makes a folder on each file system; returns for each node the first node that sees the same as it does."""
        control, topology, first = self._control, self._topology, self._folder
        assert first is not None
        mine, failure = None, None
        if control.rank == topology.node[0] and not first.exists:
            mine, failure = attempt(self._create_folder)
        of_first = next(i for i, node in enumerate(topology.nodes) if control.ranks[0] in node)
        names = control.settle(
            "making a folder on each node", failure, mine.temporary.name if mine is not None else "",
            lambda views: [views[node[0]] for node in topology.nodes],
        )  # fmt: skip
        names[of_first] = first.temporary.name
        folders = [self._folder_called(name or first.temporary.name) for name in names]
        pairs = enumerate(zip(names, folders, strict=True))
        lowest = next((number for number, (name, folder) in pairs if name and folder.exists), -1)
        found: list[int] = control.settle(
            "finding the folders", None, lowest, lambda views: lowest_seen(topology.nodes, views, self._options.path)
        )
        self._folder, failure = folders[found[topology.nodes.index(topology.node)]], None
        for made in self._made:
            if made.temporary != self._folder.temporary:
                made.discard()
            elif made is mine:
                _, failure = attempt(lambda: mine.add_files(layout.files))
        control.settle("making the files", failure)
        if control.rank == control.ranks[0] and len(set(found)) > 1:
            groups = [[i for i, of_node in enumerate(found) if of_node == each] for each in sorted(set(found))]
            logger.warning(
                "%s is on several file systems, that of nodes %s: each gets the whole checkpoint", self._options.path.parent,
                " and that of ".join(str(group)[1:-1] for group in groups),
            )  # fmt: skip
        return found

    def _new_files(self, layout: FilesLayout) -> NewFiles:
        assert self._folder is not None
        return NewFiles(self._folder.temporary, [file.name for file in layout.files])

    def _progressed(self) -> None:
        self._control.progress += 1

    def _sync(self, files: NewFiles, synced: Callable[[], None]) -> None:
        with self._report.timed("sync"):
            files.sync(synced)

    def _commit(self, source: Source, layout: FilesLayout) -> None:
        """Adds the small files, and has the folder appear."""
        control, folder = self._control, self._folder
        assert folder is not None
        control.doing = "completes the checkpoint"

        def add_small_files() -> None:
            small = {**source.config, **({} if layout.index is None else {INDEX: layout.index})}
            small |= {file.name: read_regular(file) for file in self._options.files}
            for name, content in small.items():
                folder.add(name, content)
            folder.sync()

        failure = None
        if self._first:
            with self._report.timed("sync"):
                _, failure = attempt(add_small_files)
        if self._report.folders > 1:  # no folder appears before all can
            control.settle("adding small files", failure)
        if self._first and failure is None:
            with self._report.timed("sync"):
                _, failure = attempt(folder.commit)
        control.settle("completing the checkpoint", failure, last=True)


def _outlines(views: dict[int, Any]) -> list[Any]:
    """What each rank has, with equal parts once. Raises ValueError if the ranks do not save the same."""
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


def _decode(said: list[Any]) -> dict[int, Outline]:
    """The outlines by rank. Equal ones are one object, and so are their columns."""
    columns, rest, which = said
    arrays: dict[int, Any] = {}
    made: dict[tuple[int, int], Outline] = {}
    for a, b in which.values():
        if (a, b) not in made:
            outline = Outline.decode(base64.b85decode(columns[a]), base64.b85decode(rest[b]))
            made[a, b] = replace(outline, class_of=arrays.setdefault(a, outline.class_of))
    return {int(rank): made[a, b] for rank, (a, b) in which.items()}
