"""One save on one rank: agrees with the other ranks, writes this rank's part, and has the folder appear."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from torch import Tensor

from epload.cluster.topology import Topology
from epload.control.watch import Stop
from epload.core import garbage_collection
from epload.core.attempt import attempt
from epload.errors import LoadError
from epload.planning.shares import Outline
from epload.saving.folder import NewFolder
from epload.saving.layout import INDEX, FilesLayout, lay_out
from epload.saving.plan import WritePlan, plan_writes
from epload.saving.report import SaveReport
from epload.saving.source import Source
from epload.saving.writer import Writer
from epload.staging.shards import Shards


class SaveRun:
    def __init__(
        self,
        topology: Topology,
        path: Path,
        max_shard_bytes: int,
        files: Sequence[Path],
        overwrite: bool,
        report: SaveReport,
    ) -> None:
        """Arguments are those of :func:`epload.save`."""
        self._control = topology.control
        self._first = topology.rank == topology.ranks[0]
        self._path = path
        self._max_shard_bytes = max_shard_bytes
        self._files = files
        self._overwrite = overwrite
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
        report.written = plan.nbytes

    def _prepare(self, source: Source | None, failure: Exception | None) -> tuple[FilesLayout, WritePlan]:
        """The ranks agree on what is saved, and have the empty files."""
        control = self._control
        control.doing = "plans the save"
        view: list[Any] = []
        if source is not None:
            agreed = repr((source.manifest.digest, str(self._path), self._max_shard_bytes, self._overwrite)).encode()
            parts = [base64.b85encode(part).decode() for part in source.share.outline().encode()]
            view = [hashlib.blake2b(agreed, digest_size=16).hexdigest(), *parts]
        said = control.settle("planning the save", failure, view, _outlines)
        assert source is not None
        outlines = _decode(said)
        manifest = source.manifest

        def plan() -> tuple[FilesLayout, WritePlan]:
            layout = lay_out(manifest.names, manifest.shapes, manifest.dtypes, self._max_shard_bytes)
            mine = plan_writes(
                manifest.names, manifest.shapes, manifest.dtypes, layout, outlines, control.rank, source.share
            )
            return layout, mine

        planned, failure = attempt(plan)
        name = ""
        if self._first and planned is not None:
            made, failure = attempt(lambda: self._make_folder(planned[0]))
            name = made or ""
        name = control.settle("making the folder", failure, name, lambda views: views[control.ranks[0]])
        assert planned is not None
        self._folder = self._folder or NewFolder(self._path, self._path.parent / name, self._overwrite)
        return planned

    def _make_folder(self, layout: FilesLayout) -> str:
        self._folder = NewFolder.create(self._path, self._overwrite)
        self._folder.add_files(layout.files)
        return self._folder.temporary.name

    def _write(self, plan: WritePlan, layout: FilesLayout, tensors: list[Tensor]) -> None:
        control, report = self._control, self._report
        assert self._folder is not None
        folder, names = self._folder.temporary, [file.name for file in layout.files]
        control.doing = "writes its part of the checkpoint"
        stop = Stop()
        shards = Shards(plan, tensors, None, None, False, f"rank {control.rank}")

        def wrote(nbytes: int) -> None:
            control.progress += nbytes + 1
            stop.check()

        def write() -> None:
            if not folder.is_dir():
                raise LoadError(
                    f"rank {control.rank} does not see {folder}, which rank {control.ranks[0]} has made: save to a path "
                    "on a file system that all ranks share"
                )
            with control.watch.guards(stop), closing(Writer(plan, folder, names)) as writer:
                writer.write(shards.pack, report, wrote)

        _, failure = attempt(write)
        control.settle("writing the checkpoint", failure)

    def _commit(self, source: Source, layout: FilesLayout) -> None:
        """Adds the small files, and has the folder appear."""
        control, folder = self._control, self._folder
        assert folder is not None
        control.doing = "completes the checkpoint"

        def commit() -> None:
            small = {**source.config, **({} if layout.index is None else {INDEX: layout.index})}
            small |= {file.name: file.read_bytes() for file in self._files}
            for name, content in small.items():
                folder.add(name, content)
            folder.commit()

        failure = None
        if self._first:
            with self._report.timed("sync"):
                _, failure = attempt(commit)
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
            made[a, b] = Outline(arrays.setdefault(a, outline.class_of), outline.boxes, outline.dtypes)
    return {int(rank): made[a, b] for rank, (a, b) in which.items()}
