"""A checkpoint whose tensors pass through a converter, see :mod:`epload.compat.conversion`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from epload.checkpoint.base import Checkpoint
from epload.checkpoint.manifest import Manifest
from epload.compat.conversion import Conversion, Converted, TensorConverter
from epload.core.pieces import Piece, Pieces
from epload.errors import CheckpointError

_log = logging.getLogger(__name__)


class _Entry(NamedTuple):
    """One tensor of the converted checkpoint."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    source_number: int
    """Its number in the source. -1 if the converter returned it."""
    origin: str
    """Name of the last tensor of the source that it was made from, for error messages."""


class ConvertedCheckpoint(Checkpoint):
    """The tensors that a converter makes of another checkpoint's.

    A first pass over meta tensors yields names, shapes and dtypes. Data is converted when it is read. Tensors that the converter
    does not take are read directly. The others come from one pass of a new converter, which keeps a converted tensor until a
    later one is read. Reading an earlier tensor again starts another pass.

    The source is opened when the manifest is first used, so only ranks that read need access to its files.

    Args:
        source: a path, or anything else that :meth:`Checkpoint.open` accepts.
        make: creates a converter. Returns None if there is nothing to convert.
        rename: the converter's name for a tensor of the source.
    """

    def __init__(self, source: Any, make: Callable[[], TensorConverter | None], rename: Callable[[str], str]) -> None:
        self._source = source
        self._make = make
        self._rename = rename
        self._inner: Checkpoint | None = None
        self._manifest: Manifest | None = None
        self._entries: list[_Entry] = []
        """Tensors that are read directly, then those of the converter in its order."""
        self._direct = 0
        """Number of tensors that are read directly."""
        self._inputs: list[int] = []
        """Numbers of the source's tensors that the converter takes."""
        self._cache: dict[int, Tensor] = {}
        """Converted tensors, by number."""
        self._keep_all = False
        """True if the converter needs data to tell shapes, so that all its results stay in memory."""
        self._pass: Iterator[Converted] | None = None
        self._next = 0
        """Number of the first tensor that the current pass has not reached."""
        self.passes = 0
        """Number of times that the source's data has been converted."""

    @property
    def manifest(self) -> Manifest:
        if self._manifest is None:
            self.prepare()
        assert self._manifest is not None
        return self._manifest

    def prepare(self) -> None:
        """Opens the source and runs the first pass.

        Raises:
            CheckpointError: the source cannot be opened, or the converter failed.
            TypeError: the converter lacks a method.
        """
        if self._manifest is None:
            self._inner = Checkpoint.open(self._source)
            self._list_entries(self._inner.manifest)
            columns = [(entry.name, entry.shape, entry.dtype) for entry in self._entries]
            names, shapes, kinds = zip(*columns, strict=True) if columns else ((), (), ())
            inner = self._inner.manifest
            self._manifest = Manifest(names, shapes, kinds, inner.source, quantization=inner.quantization)

    def fill(self, bucket: Tensor, pieces: Sequence[Piece]) -> None:
        assert self._inner is not None
        direct = []
        for piece in sorted(Pieces.of(pieces)):  # in the order in which the converter returns them
            entry = self._entries[piece.tensor]
            if entry.source_number >= 0:
                direct.append(piece._replace(tensor=entry.source_number))
                continue
            data = self._tensor(piece.tensor).reshape(-1).view(torch.uint8)
            bucket[piece.bucket_offset : piece.bucket_offset + piece.nbytes] = data[
                piece.tensor_offset : piece.tensor_offset + piece.nbytes
            ]
        if direct:
            self._inner.fill(bucket, direct)

    def changed(self) -> str:
        return self._inner.changed() if self._inner is not None else ""

    def reopen(self) -> None:
        if self._inner is not None:
            self._inner.reopen()
        self._end_pass()

    def close(self) -> None:
        if self._inner is not None:
            self._inner.close()
        self._end_pass()

    def _end_pass(self) -> None:
        self._cache.clear()
        self._pass = None

    # ---- the first pass ----

    def _list_entries(self, source: Manifest) -> None:
        conversion = self._new_conversion()
        origins: dict[str, str] = {}
        inputs = []
        for number, (origin, shape, dtype) in enumerate(zip(source.names, source.shapes, source.dtypes, strict=True)):
            if conversion.handles(number):
                inputs.append(number)
            else:
                self._add(origins, _Entry(self._rename(origin), shape, dtype, number, origin))
        self._inputs, self._direct = inputs, len(self._entries)
        if not inputs:
            return
        for origin, result in self._first_pass(conversion):
            if self._keep_all:
                self._cache[len(self._entries)] = result.tensor.contiguous()
            self._add(origins, _Entry(result.name, tuple(result.tensor.shape), result.tensor.dtype, -1, origin))

    def _new_conversion(self) -> Conversion:
        assert self._inner is not None
        return Conversion(self._inner, self._make, self._rename)

    def _first_pass(self, conversion: Conversion) -> list[Converted]:
        """Runs the converter on meta tensors, or on the data if it cannot work on those; returns the results."""
        try:
            return list(conversion.run(self._inputs, meta=True))
        except CheckpointError as error:
            if not _is_for_lack_of_data(error.__cause__):
                raise
        _log.warning(
            "%s: the model's converter %s cannot work on meta tensors, so all the tensors that it returns are kept in memory",
            self._title, conversion.name,
        )  # fmt: skip
        self._keep_all = True
        self.passes += 1
        return list(self._new_conversion().run(self._inputs, meta=False))

    def _add(self, origins: dict[str, str], entry: _Entry) -> None:
        if entry.name in origins:
            raise CheckpointError(
                f"{self._title}: both {origins[entry.name]} and {entry.origin} are converted to {entry.name}"
            )
        origins[entry.name] = entry.origin
        self._entries.append(entry)

    # ---- passes over the data ----

    def _tensor(self, number: int) -> Tensor:
        """A converted tensor. Frees those before it."""
        if number not in self._cache:
            if number < self._next or self._pass is None:
                self._next, self.passes = self._direct, self.passes + 1
                self._pass = self._new_conversion().run(self._inputs, meta=False)
            self._cache.clear()
            self._advance(self._pass, number)
        elif not self._keep_all:
            for earlier in [cached for cached in self._cache if cached < number]:
                del self._cache[earlier]
        return self._cache[number]

    def _advance(self, results: Iterator[Converted], target: int) -> None:
        """Runs the pass up to the tensor of number ``target`` and caches that."""
        for number in range(self._next, target + 1):
            entry = self._entries[number]
            origin, result = next(results, ("", None))
            if result is None:
                raise CheckpointError(
                    f"{self._title}: the converter returned {entry.name} in its first pass, but not in a later one"
                )
            name, shape, dtype = result.name, tuple(result.tensor.shape), result.tensor.dtype
            if (name, shape, dtype) != (entry.name, entry.shape, entry.dtype):
                raise CheckpointError(
                    f"{self._title}: the converter returned {entry.name} {list(entry.shape)} {entry.dtype} in its first pass, "
                    f"but {name} {list(shape)} {dtype} in a later one (at {origin})"
                )
            self._next = number + 1
            if number == target:
                self._cache[number] = result.tensor.detach().cpu().contiguous()

    @property
    def _title(self) -> str:
        return self._inner.manifest.source if self._inner is not None else str(self._source)


def _is_for_lack_of_data(error: BaseException | None) -> bool:
    """Returns True if the error is likely due to meta tensors."""
    return isinstance(error, NotImplementedError) or "meta" in str(error).lower()
