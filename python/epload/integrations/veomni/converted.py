"""A checkpoint whose tensors pass through a converter, which takes one tensor at a time and returns others.

VeOmni uses converters to fuse experts and to dequantize.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from epload.checkpoint.base import Checkpoint, read_tensor
from epload.checkpoint.manifest import Manifest
from epload.core.pieces import Piece, Pieces
from epload.errors import CheckpointError

_Result = tuple[str, str, Tensor]
"""A tensor that a converter returned: the name of the tensor that it was given last, and its own name."""


class ConvertedCheckpoint(Checkpoint):
    """The tensors that a converter makes of another checkpoint's.

    A first pass over meta tensors yields names, shapes and dtypes; over the data, if the converter needs it. Data is converted
    when it is read. Tensors that the converter does not take are read directly. The others come from one pass of a new
    converter, in its order. Reading an earlier tensor again starts another pass.

    The source is opened when the manifest is first used, so only ranks that read need access to its files.

    A converter has the interface of VeOmni's: ``can_handle(name)`` and ``convert(name, tensor)``, which returns None or a result
    with a ``name`` and a ``tensor``. Optional are ``can_handle_tensor(name, tensor)``, which is asked in addition to
    ``can_handle``, and ``finalize()``, which returns the remaining results.

    Args:
        source: a path, or anything else that :meth:`Checkpoint.open` accepts.
        make: creates a converter. Returns None if there is nothing to convert.
        rename: the converter's name for a tensor of the source.
    """

    _inner: Any = None
    """The source, once it is open."""

    def __init__(self, source: Any, make: Callable[[], Any], rename: Callable[[str], str]) -> None:
        self._source = source
        self._make = make
        self._rename = rename
        self._manifest: Manifest | None = None
        self._direct: list[int] = []
        """Numbers of the source's tensors that are read directly. They are the first of this checkpoint."""
        self._inputs: list[int] = []
        """Numbers of the source's tensors that the converter takes."""
        self._results: Iterator[_Result] | None = None
        """The current pass, which has reached tensor number ``_number``."""
        self._number = -1
        self._tensor = torch.empty(0)

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
        inner, converter = self._inner.manifest, self._new_converter()
        self._direct, self._inputs = [], []
        for number, name in enumerate(inner.names):
            (self._inputs if self._takes(converter, name, number) else self._direct).append(number)
        entries = [(inner.names[i], self._rename(inner.names[i]), inner.shapes[i], inner.dtypes[i]) for i in self._direct]
        try:
            entries += [(origin, *_entry(name, tensor)) for origin, name, tensor in self._convert(meta=True)]
        except CheckpointError as error:
            if not isinstance(error.__cause__, NotImplementedError) and "meta" not in str(error.__cause__).lower():
                raise
            entries += [(origin, *_entry(name, tensor)) for origin, name, tensor in self._convert(meta=False)]
        origins: dict[str, str] = {}
        for origin, name, _, _ in entries:
            if name in origins:
                raise CheckpointError(f"{inner.source}: both {origins[name]} and {origin} are converted to {name}")
            origins[name] = origin
        _, names, shapes, dtypes = zip(*entries, strict=True) if entries else ((), (), (), ())
        self._manifest = Manifest(names, shapes, dtypes, inner.source, quantization=inner.quantization)

    def fill(self, bucket: Tensor, pieces: Sequence[Piece]) -> None:
        direct = []
        for piece in sorted(Pieces.of(pieces)):  # in the order in which the converter returns them
            if piece.tensor < len(self._direct):
                direct.append(piece._replace(tensor=self._direct[piece.tensor]))
            else:
                data = self._read_converted(piece.tensor).view(-1).view(torch.uint8)
                part = data[piece.tensor_offset : piece.tensor_offset + piece.nbytes]
                bucket[piece.bucket_offset : piece.bucket_offset + piece.nbytes] = part
        if direct:
            self._inner.fill(bucket, direct)

    def changed(self) -> str:
        return str(self._inner.changed()) if self._inner is not None else ""

    def reopen(self) -> None:
        if self._inner is not None:
            self._inner.reopen()
        self._results = None

    def close(self) -> None:
        if self._inner is not None:
            self._inner.close()
        self._results, self._tensor = None, torch.empty(0)

    # ---- the converter ----

    def _read_converted(self, number: int) -> Tensor:
        """Returns a converted tensor, and frees the one before."""
        manifest = self.manifest
        if self._results is None or number < self._number:
            self._results, self._number = self._convert(meta=False), len(self._direct) - 1
        while self._number < number:
            self._number += 1
            first = manifest.names[self._number], manifest.shapes[self._number], manifest.dtypes[self._number]
            origin, name, self._tensor = next(self._results, ("the end", "nothing", torch.empty(0)))
            if (later := _entry(name, self._tensor)) != first:
                texts = (f"{name} {list(shape)} {dtype}" for name, shape, dtype in (first, later))
                raise CheckpointError(
                    f"{manifest.source}: the converter returned {' in its first pass, but '.join(texts)} in a later one (at "
                    f"{origin})"
                )
        self._tensor = self._tensor.detach().cpu().contiguous()
        return self._tensor

    def _convert(self, meta: bool) -> Iterator[_Result]:
        """Yields what a new converter returns. ``meta``: whether to give it meta tensors instead of the data."""
        converter, inner = self._new_converter(), self._inner.manifest
        for number in self._inputs:
            origin = inner.names[number]
            tensor = _on_meta(inner, number) if meta else read_tensor(self._inner, number)
            result = self._call(converter, f"at {origin}", "convert", self._rename(origin), tensor)
            if result is not None:
                yield origin, result.name, result.tensor
        if hasattr(converter, "finalize"):
            for result in self._call(converter, "after the last tensor", "finalize") or ():
                yield "the end", result.name, result.tensor

    def _new_converter(self) -> Any:
        """Raises TypeError if the converter lacks a method."""
        converter = self._make()
        missing = [method for method in ("can_handle", "convert") if not hasattr(converter, method)]
        if missing and converter is not None:
            raise TypeError(f"expected a converter with {' and '.join(missing)}, got {type(converter).__name__}")
        return converter

    def _takes(self, converter: Any, origin: str, number: int) -> bool:
        name, when = self._rename(origin), f"at {origin}"
        if hasattr(converter, "can_handle_tensor"):
            tensor = _on_meta(self._inner.manifest, number)
            if self._call(converter, when, "can_handle_tensor", name, tensor):
                return True
        return converter is not None and bool(self._call(converter, when, "can_handle", name))

    def _call(self, converter: Any, when: str, method: str, *arguments: Any) -> Any:
        """Calls a method. Raises CheckpointError if it fails."""
        try:
            with torch.no_grad():
                return getattr(converter, method)(*arguments)
        except Exception as error:
            raise CheckpointError(
                f"{self._inner.manifest.source}: the model's converter {type(converter).__name__} failed {when}: "
                f"{type(error).__name__}: {error}"
            ) from error


def _entry(name: str, tensor: Tensor) -> tuple[str, tuple[int, ...], torch.dtype]:
    return name, tuple(tensor.shape), tensor.dtype


def _on_meta(manifest: Manifest, number: int) -> Tensor:
    return torch.empty(manifest.shapes[number], dtype=manifest.dtypes[number], device="meta")
