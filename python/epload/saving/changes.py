"""Writes what has changed in a model since another checkpoint, its base: each rank its own part, to a file of its own."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from epload.checkpoint import delta, file_sets, hub
from epload.checkpoint.base import Checkpoint
from epload.checkpoint.manifest import Manifest
from epload.core.buffers import as_memoryview
from epload.core.columns import arange
from epload.core.copy_table import byte_view
from epload.core.placement import Box
from epload.core.views import View
from epload.errors import CheckpointError
from epload.native import ops
from epload.planning.holdings import parts_of_view
from epload.report import SaveReport
from epload.saving.folder import NewFolder
from epload.saving.layout import FilesLayout, lay_out
from epload.saving.plan import WritePlan
from epload.saving.source import SavedModel
from epload.saving.writer import Wrote, region_of


class DeltaBase:
    """The checkpoint that a model is compared with."""

    def __init__(self, source: Any, path: Path, saved: SavedModel) -> None:
        """
        Args:
            source: path of the base, or a model on the Hub.
            path: of the folder to be saved.
            saved: what is saved.

        Raises:
            TypeError, ValueError: ``source`` cannot be a base of this folder.
            CheckpointError: it cannot be read.
        """
        if not isinstance(source, str | os.PathLike):
            raise TypeError(
                f"expected base to be the path of a checkpoint, got {type(source).__name__}: readers find it by its path"
            )
        if "://" in str(source) and hub.parse(source) is None:
            raise ValueError(
                f"expected base to be a path next to {path} or a model on the Hub, got {source}: the folder names its base by a "
                "relative path, so that both can be copied; copy the base, or save without one"
            )
        padded = zip(saved.manifest.names, saved.padded.shapes, saved.manifest.shapes, strict=True)
        if name := next((name for name, shape, unpadded in padded if shape != unpadded), ""):
            raise ValueError(f"{name} is saved with padding, which a save with base= does not support; save without base=")
        base, self._checkpoint = Path(source).expanduser().resolve(), Checkpoint.open(source)
        with closing(self._checkpoint):
            self._check_chain(path, base)
            self.digest = delta.content_digest(self._checkpoint)
        manifest = self._checkpoint.manifest
        relative = os.path.relpath(base, path.parent.resolve() / path.name)
        self.name = hub.at_commit(manifest.source) or Path(relative).as_posix()
        """The base in the index: a relative path, or a commit on the Hub."""
        self._saved = replace(saved, tensors=[])  # which may change meanwhile
        numbers = {key: i for i, key in enumerate(_keys(manifest))}
        self._numbers = [numbers.get(key, -1) for key in _keys(saved.manifest)]

    def _check_chain(self, path: Path, base: Path) -> None:
        """Raises ValueError if the chain has no room for another delta, or the save would delete a part of it.

        ``base``: where the first link is, as the index will say.
        """
        chain = delta.chain_of(self._checkpoint)
        for number, link in enumerate(chain):
            if hub.at_commit(link.manifest.source):
                continue
            source = Path(link.manifest.source)
            # Its file may be a link to another folder.
            named = source.parent.resolve() / source.name if number else base
            for needed in (source.resolve(), named):
                if path.resolve() in (needed, *needed.parents):
                    raise ValueError(f"{path} cannot be saved as changes of itself: its base needs {needed}; pass another path")
        if len(chain) > delta.MAX_LINKS:
            raise ValueError(
                f"{chain[0].manifest.source} ends a chain of {delta.MAX_LINKS} deltas, the longest that is read: save without "
                "base= now and then, or convert one of them"
            )

    def lay_out(self, ranks: int) -> FilesLayout:
        """Returns the files, one of each rank. In the columns each tensor has a file of its own."""
        layout = lay_out(self._saved.manifest, self._saved.manifest.nbytes + 1)
        tensors = arange(len(layout.file))
        names = [f"changes-{number:05}-of-{ranks:05}.epload" for number in range(1, ranks + 1)]
        nothing, offset = ([b""] * ranks, [0] * ranks), torch.zeros_like(tensors)
        return FilesLayout(names, *nothing, tensors, offset, layout.nbytes, {})

    def write_changes(
        self,
        plan: WritePlan,
        tensors: Sequence[Tensor],
        folder: NewFolder,
        number: int,
        report: SaveReport,
        wrote: Wrote,
    ) -> None:
        """Writes the changes in this rank's regions, and their table, for :meth:`describe`.

        Args:
            plan: of :meth:`lay_out`.
            number: of this rank's file.

        Raises:
            CheckpointError: the base cannot be read, or has changed meanwhile.
        """
        copies, origins = plan
        manifest, largest = self._saved.manifest, int(copies.nbytes().max()) if len(copies) else 0
        out, base = (torch.empty(size, dtype=torch.uint8) for size in (ops.encoded_limit(largest), largest))
        table, end = [], 0
        rows = zip(copies.boxes(), origins.tolist(), strict=True)
        for (target, _, dtype, *box_in_model), (tensor, offset) in rows:
            with report.timed("pack"):
                region, strides = region_of(tensors[target], dtype, *box_in_model)
                data, shape = byte_view(region), tuple(region.shape)
                view = View((0,) * region.ndim, shape, offset // region.element_size(), tuple(strides))
                box = next(parts_of_view(view, manifest.shapes[tensor], 0)).box
                before, nbytes = self._encode(tensor, box, data, base[: len(data)], out)
            with report.timed("write") as block:
                folder.write(number, end, as_memoryview(out[:nbytes]))
                block.nbytes = nbytes
            table.append([tensor, *delta.DeltaChunk(number, end, nbytes, before, ops.checksum(data), box).to_row()])
            end += nbytes
            wrote(len(data))
        folder.add(_table(folder, number).name, json.dumps(table).encode())
        if changed := self._checkpoint.changed():
            raise CheckpointError(f"{changed} while the model was compared with it: save again")
        self._checkpoint.close()
        report.written = end

    def _encode(self, tensor: int, box: Box, data: Tensor, base: Tensor, out: Tensor) -> tuple[int, int]:
        """Encodes the changes in a box. Returns the checksum of its bytes in the base, 0 if the base has no such tensor; the
        number of bytes in ``out``, 0 if nothing has changed."""
        before = 0
        if (number := self._numbers[tensor]) >= 0:
            delta.read_boxes(self._checkpoint, [(number, box, 0)], base)
            before = ops.checksum(base)
            if torch.equal(base, data):
                return before, 0
        else:
            base.zero_()
        unit = min(self._saved.manifest.dtypes[tensor].itemsize, 8)
        nbytes, _ = ops.encode_changes(base, data if data.data_ptr() % unit == 0 else data.clone(), unit, out)
        return before, nbytes

    def describe(self, folder: NewFolder) -> Mapping[str, bytes]:
        """Returns the index, by its name. Called when all ranks have written; deletes their tables."""
        manifest = self._saved.manifest
        chunks: list[list[delta.DeltaChunk]] = [[] for _ in manifest.names]
        files = []
        for number, name in enumerate(folder.layout.names):
            table, end = _table(folder, number), 0
            for tensor, *row in json.loads(table.read_bytes()):
                chunk = delta.DeltaChunk.from_row(row, len(manifest.shapes[tensor]))
                chunks[tensor].append(chunk)
                end = chunk.offset + chunk.nbytes
            files.append((name, end))  # NFS may know the size only seconds later
            table.unlink()
        kinds = zip(manifest.dtypes, manifest.shapes, chunks, strict=True)
        tensors = dict(zip(manifest.names, kinds, strict=True))

        def encoded(digest: str) -> bytes:
            return delta.encode_index(self.name, self.digest, digest, self._saved.config, files, tensors)

        # The folder is next to its final place, from where the base has the same relative path.
        draft = folder.temporary / file_sets.DELTA
        draft.write_bytes(encoded(""))
        with closing(Checkpoint.open(folder.temporary)) as opened:
            assert isinstance(opened, delta.DeltaCheckpoint)
            digest = delta.content_digest(opened, sampled=True)
        draft.unlink()
        return {file_sets.DELTA: encoded(digest)}


def _keys(manifest: Manifest) -> list[tuple[object, ...]]:
    return list(zip(manifest.names, manifest.dtypes, manifest.shapes, strict=True))


def _table(folder: NewFolder, number: int) -> Path:
    """Returns the path of the chunks that a rank has written, until the index has them."""
    path = folder.path_of(number)
    return path.with_name(f"{path.name}.table")
