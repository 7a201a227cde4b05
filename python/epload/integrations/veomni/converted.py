"""A checkpoint whose tensors pass through a converter, which takes one tensor at a time and returns others.

VeOmni uses converters to fuse experts and to dequantize.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from epload.checkpoint.base import Checkpoint
from epload.checkpoint.manifest import Manifest
from epload.core.pieces import Piece, Pieces
from epload.errors import CheckpointError
from epload.integrations.read_tensor import read_tensor

_log = logging.getLogger(__name__)
_Entry = tuple[str, tuple[int, ...], torch.dtype]
"""Name, shape and dtype of a tensor."""


class ConvertedCheckpoint(Checkpoint):
    """The tensors that a converter makes of another checkpoint's.

    A first pass over meta tensors yields names, shapes and dtypes. Data is converted when it is read. Tensors that the converter
    does not take are read directly. The others come from one pass of a new converter, which keeps a converted tensor until a
    later one is read. Reading an earlier tensor again starts another pass.

    The source is opened when the manifest is first used, so only ranks that read need access to its files.

    A converter has the interface of VeOmni's: ``can_handle(name)`` and ``convert(name, tensor)``, which returns None or a result
    with a ``name`` and a ``tensor``. Optional are ``can_handle_tensor(name, tensor)``, which is asked in addition to
    ``can_handle``, and ``finalize()``, which returns the remaining results.

    Args:
        source: a path, or anything else that :meth:`Checkpoint.open` accepts.
        make: creates a converter. Returns None if there is nothing to convert.
        rename: the converter's name for a tensor of the source.
    """

    def __init__(self, source: Any, make: Callable[[], Any], rename: Callable[[str], str]) -> None:
        self._source = source
        self._make = make
        self._rename = rename
        self._inner: Checkpoint | None = None
        self._manifest: Manifest | None = None
        self._direct: list[int] = []
        """Numbers of the source's tensors that are read directly. They are the first of this checkpoint."""
        self._inputs: list[int] = []
        """Numbers of the source's tensors that the converter takes."""
        self._cache: dict[int, Tensor] = {}
        """Converted tensors, by number: the last one that was read, or all if the converter needs data to tell shapes."""
        self._results: Iterator[tuple[str, Any]] | None = None
        self._next = 0
        """Number of the first tensor that the current pass has not reached."""

    @property
    def manifest(self) -> Manifest:
        self.prepare()
        assert self._manifest is not None
        return self._manifest

    def prepare(self) -> None:
        """Opens the source and runs the first pass.

        Raises:
            CheckpointError: the source cannot be opened, or the converter failed.
            TypeError: the converter lacks a method.
        """
        if self._manifest is not None:
            return
        self._inner = Checkpoint.open(self._source)
        inner = self._inner.manifest
        converter = self._new_converter()
        self._direct, self._inputs = [], []
        for number, name in enumerate(inner.names):
            handled = self._handles(converter, self._rename(name), _on_meta(inner, number))
            (self._inputs if handled else self._direct).append(number)
        entries: list[_Entry] = [
            (self._rename(inner.names[number]), inner.shapes[number], inner.dtypes[number]) for number in self._direct
        ]
        origins = [inner.names[number] for number in self._direct]
        for origin, result in self._first_pass(converter):
            entries.append(_entry_of(result))
            origins.append(origin)
        names, shapes, dtypes = zip(*entries, strict=True) if entries else ((), (), ())
        origin_of: dict[str, str] = {}
        for name, origin in zip(names, origins, strict=True):
            if name in origin_of:
                raise CheckpointError(f"{inner.source}: both {origin_of[name]} and {origin} are converted to {name}")
            origin_of[name] = origin
        self._manifest = Manifest(names, shapes, dtypes, inner.source, quantization=inner.quantization)

    def fill(self, bucket: Tensor, pieces: Sequence[Piece]) -> None:
        assert self._inner is not None
        direct = []
        for piece in sorted(Pieces.of(pieces)):  # in the order in which the converter returns them
            if piece.tensor < len(self._direct):
                direct.append(piece._replace(tensor=self._direct[piece.tensor]))
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
        self._results = None

    # ---- passes ----

    def _first_pass(self, converter: Any) -> list[tuple[str, Any]]:
        """Runs the converter on meta tensors, or on the data if it cannot work on those; returns the results."""
        try:
            return list(self._convert(converter, meta=True)) if self._inputs else []
        except CheckpointError as error:
            cause = error.__cause__
            if not isinstance(cause, NotImplementedError) and "meta" not in str(cause).lower():
                raise
            _log.warning(
                "the converter cannot work on meta tensors, so all the tensors that it returns are kept: %s", error
            )
        results = list(self._convert(self._new_converter(), meta=False))
        tensors = [result.tensor.detach().cpu().contiguous() for _, result in results]
        self._cache = dict(enumerate(tensors, len(self._direct)))
        return results

    def _tensor(self, number: int) -> Tensor:
        """Returns a converted tensor, and frees the one before."""
        if number not in self._cache:
            if self._results is None or number < self._next:
                self._results, self._next = self._convert(self._new_converter(), meta=False), len(self._direct)
            self._cache.clear()
            while self._next <= number:
                tensor = self._next_tensor(self._results)
            self._cache[number] = tensor.detach().cpu().contiguous()
        return self._cache[number]

    def _next_tensor(self, results: Iterator[tuple[str, Any]]) -> Tensor:
        manifest, number = self.manifest, self._next
        expected = manifest.names[number], manifest.shapes[number], manifest.dtypes[number]
        origin, result = next(results, ("", None))
        if result is None:
            raise CheckpointError(
                f"{manifest.source}: the converter returned {expected[0]} in its first pass, but not in a later one"
            )
        if (actual := _entry_of(result)) != expected:
            first, later = (f"{name} {list(shape)} {dtype}" for name, shape, dtype in (expected, actual))
            raise CheckpointError(
                f"{manifest.source}: the converter returned {first} in its first pass, but {later} in a later one (at {origin})"
            )
        self._next += 1
        tensor: Tensor = result.tensor
        return tensor

    # ---- the converter ----

    def _convert(self, converter: Any, meta: bool) -> Iterator[tuple[str, Any]]:
        """Yields what the converter returns, with the name of the tensor that it was given last.

        Args:
            meta: convert tensors on the meta device instead of reading the data.
        """
        assert self._inner is not None
        for number in self._inputs:
            origin = self._inner.manifest.names[number]
            tensor = _on_meta(self._inner.manifest, number) if meta else read_tensor(self._inner, number)
            result = self._call(converter, f"at {origin}", lambda: converter.convert(self._rename(origin), tensor))  # noqa: B023
            if result is not None:
                yield origin, result
        if hasattr(converter, "finalize"):
            for result in self._call(converter, "after the last tensor", lambda: list(converter.finalize() or ())):
                yield "the end", result

    def _new_converter(self) -> Any:
        """Raises TypeError if the converter lacks a method."""
        converter = self._make()
        missing = [method for method in ("can_handle", "convert") if not hasattr(converter, method)]
        if missing and converter is not None:
            raise TypeError(f"expected a converter with {' and '.join(missing)}, got {type(converter).__name__}")
        return converter

    def _handles(self, converter: Any, name: str, tensor: Tensor) -> bool:
        def handles() -> Any:
            by_tensor = getattr(converter, "can_handle_tensor", None)
            return bool((callable(by_tensor) and by_tensor(name, tensor)) or converter.can_handle(name))

        return converter is not None and bool(self._call(converter, f"at {name}", handles))

    def _call(self, converter: Any, when: str, function: Callable[[], Any]) -> Any:
        """Calls a function. Raises CheckpointError if it fails."""
        try:
            with torch.no_grad():
                return function()
        except Exception as error:
            assert self._inner is not None
            raise CheckpointError(
                f"{self._inner.manifest.source}: the model's converter {type(converter).__name__} failed {when}: "
                f"{type(error).__name__}: {error}"
            ) from error


def _entry_of(result: Any) -> _Entry:
    return result.name, tuple(result.tensor.shape), result.tensor.dtype


def _on_meta(manifest: Manifest, number: int) -> Tensor:
    return torch.empty(manifest.shapes[number], dtype=manifest.dtypes[number], device="meta")
