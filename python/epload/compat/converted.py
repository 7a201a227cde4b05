"""A checkpoint whose tensors pass through a converter, a piece of Python that takes one tensor at a time and gives back others:
VeOmni's way of fusing experts and of dequantizing."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from epload.checkpoint.base import Checkpoint
from epload.checkpoint.manifest import Manifest
from epload.core.pieces import Piece, Pieces
from epload.errors import CheckpointError, LoadError

_log = logging.getLogger(__name__)


class Converter(Protocol):
    """What VeOmni's models make by ``_create_checkpoint_tensor_converter``. Results have a ``name`` and a ``tensor``.

    It may also have ``can_handle_tensor(name, tensor)``.
    """

    def can_handle(self, name: str) -> bool: ...
    def convert(self, name: str, tensor: Tensor) -> Any: ...
    def finalize(self) -> Sequence[Any]: ...


class _Made(NamedTuple):
    """One tensor of the converted checkpoint."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    direct: int
    """The number of the source's tensor that it is; -1 if the converter has made it."""
    origin: str
    """The name of the last tensor that it was made from, for messages."""


class ConvertedCheckpoint(Checkpoint):
    """What a converter makes of another checkpoint's tensors.

    Names, shapes and dtypes come from a first pass over tensors without data. Data is converted when it is read: tensors that
    no converter takes are read where they are wanted, the others in one pass through a new converter, in which a converted
    tensor is kept until a later one is read. What is read again after that starts another pass.

    Opened on the rank that reads, when the manifest is asked for: other ranks need not have the files.
    """

    def __init__(self, source: Any, make: Callable[[], Converter | None], rename: Callable[[str], str]) -> None:
        """
        Args:
            source: a path, or what else a checkpoint can be opened from.
            make: a new converter; None if there is nothing to convert.
            rename: the converter's name for a tensor of the source.
        """
        self._source = source
        self._make = make
        self._rename = rename
        self._inner: Checkpoint | None = None
        self._manifest: Manifest | None = None
        self._made: list[_Made] = []
        self._held: dict[int, Tensor] = {}
        self._next = 0
        """The number of the first tensor that the present pass has not come to."""
        self._pass: Iterator[tuple[str, Any]] | None = None
        self._inputs: list[int] = []
        """Numbers of the source's tensors that the converter takes."""
        self._converted = 0
        """The number of the first tensor that the converter makes; all others follow, in its order."""
        self._keep_all = False
        self.passes = 0
        """How often the source has been converted, but for the first pass without data."""

    @property
    def manifest(self) -> Manifest:
        if self._manifest is None:
            self.prepare()
        assert self._manifest is not None
        return self._manifest

    def prepare(self) -> None:
        """Raises CheckpointError if the source cannot be opened, or the converter cannot make sense of it."""
        if self._manifest is None:
            self._inner = Checkpoint.open(self._source)
            self._describe()
            columns = [(made.name, made.shape, made.dtype) for made in self._made]
            names, shapes, kinds = zip(*columns, strict=True) if columns else ((), (), ())
            self._manifest = Manifest(names, shapes, kinds, self._inner.manifest.source)

    def fill(self, bucket: Tensor, pieces: Sequence[Piece]) -> None:
        assert self._inner is not None
        direct = []
        for piece in sorted(Pieces.of(pieces)):  # as they are made
            made = self._made[piece.tensor]
            if made.direct >= 0:
                direct.append(piece._replace(tensor=made.direct))
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
        self._held.clear()  # what is asked for from now on is converted anew
        self._pass = None

    def close(self) -> None:
        if self._inner is not None:
            self._inner.close()
        self._held.clear()
        self._pass = None

    # ---- the pass without data ----

    def _describe(self) -> None:
        """Fills ``_made``: what is read as it is, and what the converter makes of the rest."""
        assert self._inner is not None
        source = self._inner.manifest
        converter = self._converter()
        columns = zip(source.names, source.shapes, source.dtypes, strict=True)
        known: dict[str, str] = {}
        inputs = []
        for number, (original, shape, dtype) in enumerate(columns):
            name = self._rename(original)
            if self._takes(converter, name, torch.empty(shape, dtype=dtype, device="meta")):
                inputs.append(number)
            else:
                self._add(known, _Made(name, shape, dtype, number, original))
        self._inputs, self._converted = inputs, len(self._made)
        if not inputs:
            return
        try:
            results = list(self._run(converter, meta=True))
        except CheckpointError as error:
            if not _for_lack_of_data(error.__cause__):
                raise
            _log.warning(
                "%s: the model's converter %s cannot work on meta tensors, so that all that it makes is kept in memory at once",
                source.source, type(converter).__name__,
            )  # fmt: skip
            self._keep_all = True
            self.passes += 1
            results = list(self._run(self._converter(), meta=False))
        for origin, result in results:
            if self._keep_all:
                self._held[len(self._made)] = result.tensor.contiguous()
            self._add(known, _Made(result.name, tuple(result.tensor.shape), result.tensor.dtype, -1, origin))

    def _add(self, known: dict[str, str], made: _Made) -> None:
        if made.name in known:
            raise CheckpointError(f"{self._title}: both {known[made.name]} and {made.origin} become {made.name}")
        known[made.name] = made.origin
        self._made.append(made)

    def _converter(self) -> Any:
        converter = self._make()
        lacking = [part for part in ("can_handle", "convert") if converter is not None and not hasattr(converter, part)]
        if lacking:
            raise TypeError(f"expected a converter with {' and '.join(lacking)}, got {type(converter).__name__}")
        return converter

    # ---- passes with data ----

    def _tensor(self, number: int) -> Tensor:
        """A converted tensor; what comes before it is let go."""
        if number not in self._held:
            if number < self._next or self._pass is None:
                self._next, self.passes = 0, self.passes + 1
                self._pass = self._run(self._converter(), meta=False)
            self._held.clear()
            self._advance(self._pass, number)
        elif not self._keep_all:
            for earlier in [held for held in self._held if held < number]:
                del self._held[earlier]
        return self._held[number]

    def _advance(self, results: Iterator[tuple[str, Any]], wanted: int) -> None:
        for number in range(max(self._next, self._converted), wanted + 1):
            made = self._made[number]
            origin, result = next(results, ("", None))
            if result is None:
                raise CheckpointError(f"{self._title}: the converter has not made {made.name} again")
            found = (result.name, tuple(result.tensor.shape), result.tensor.dtype)
            if found != (made.name, made.shape, made.dtype):
                raise CheckpointError(
                    f"{self._title}: the converter made {made.name} {list(made.shape)} {made.dtype} of meta tensors, but "
                    f"{found[0]} {list(found[1])} {found[2]} of the data (at {origin})"
                )
            self._next = number + 1
            if number == wanted:
                self._held[number] = result.tensor.detach().cpu().contiguous()

    def _run(self, converter: Any, meta: bool) -> Iterator[tuple[str, Any]]:
        """What the converter makes, each with the name of the tensor after which it did.

        Raises:
            CheckpointError: the converter failed, or the checkpoint is incomplete.
        """
        assert self._inner is not None
        source = self._inner.manifest
        for number in self._inputs:
            original = source.names[number]
            tensor = self._empty(number, "meta") if meta else self._read(number)
            try:
                with torch.no_grad():
                    result = converter.convert(self._rename(original), tensor)
            except Exception as error:
                raise self._failed(converter, f"at {original}", error) from error
            if result is not None:
                yield original, result
        if not hasattr(converter, "finalize"):
            return
        try:
            with torch.no_grad():
                rest = list(converter.finalize() or ())
        except Exception as error:
            raise self._failed(converter, "after the last tensor", error) from error
        for result in rest:
            yield "the end", result

    def _takes(self, converter: Any, name: str, tensor: Tensor) -> bool:
        if converter is None:
            return False
        try:
            by_tensor = getattr(converter, "can_handle_tensor", None)
            return bool((callable(by_tensor) and by_tensor(name, tensor)) or converter.can_handle(name))
        except Exception as error:
            raise self._failed(converter, f"at {name}", error) from error

    def _failed(self, converter: Any, where: str, error: Exception) -> LoadError:
        return CheckpointError(
            f"{self._title}: the model's converter {type(converter).__name__} failed {where}: "
            f"{type(error).__name__}: {error}"
        )

    def _empty(self, number: int, device: str) -> Tensor:
        assert self._inner is not None
        source = self._inner.manifest
        return torch.empty(source.shapes[number], dtype=source.dtypes[number], device=device)

    def _read(self, number: int) -> Tensor:
        assert self._inner is not None
        source = self._inner.manifest
        shape, dtype = source.shapes[number], source.dtypes[number]
        raw = torch.empty(prod(shape) * dtype.itemsize, dtype=torch.uint8)
        if raw.numel():
            self._inner.fill(raw, [Piece(number, 0, 0, raw.numel())])
        return raw.view(dtype).reshape(shape)

    @property
    def _title(self) -> str:
        return self._inner.manifest.source if self._inner is not None else str(self._source)


def _for_lack_of_data(error: BaseException | None) -> bool:
    """Whether something failed only because meta tensors hold nothing."""
    return isinstance(error, NotImplementedError) or "meta" in str(error).lower()
