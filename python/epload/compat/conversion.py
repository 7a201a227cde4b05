"""Runs a converter over the tensors of a checkpoint: Python code that takes one tensor at a time and returns others.

VeOmni uses converters to fuse experts and to dequantize.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import Any, Protocol

import torch
from torch import Tensor

from epload.checkpoint.base import Checkpoint
from epload.core.pieces import Piece
from epload.errors import CheckpointError


class Converter(Protocol):
    """The interface of VeOmni's converters, which a model creates in ``_create_checkpoint_tensor_converter``.

    ``convert`` returns None or a result with a ``name`` and a ``tensor``. ``finalize`` returns the remaining results.
    ``finalize`` is optional, and so is ``can_handle_tensor(name, tensor)``, which is asked in addition to ``can_handle``.
    """

    def can_handle(self, name: str) -> bool: ...
    def convert(self, name: str, tensor: Tensor) -> Any: ...
    def finalize(self) -> Sequence[Any]: ...


Converted = tuple[str, Any]
"""The name of a tensor of the checkpoint, and what a converter returned after it."""


class Conversion:
    """Runs converters over the tensors of a checkpoint. Each pass needs a new converter, because converters keep state.

    Args:
        source: the checkpoint, open.
        make: creates a converter. Returns None if there is nothing to convert.
        rename: the converter's name for a tensor of the checkpoint.
    """

    def __init__(self, source: Checkpoint, make: Callable[[], Converter | None], rename: Callable[[str], str]) -> None:
        self.source = source
        self._make = make
        self._rename = rename

    def new_converter(self) -> Any:
        """A new converter, or None.

        Raises:
            TypeError: it lacks a method.
        """
        converter = self._make()
        lacking = [name for name in ("can_handle", "convert") if converter is not None and not hasattr(converter, name)]
        if lacking:
            raise TypeError(f"expected a converter with {' and '.join(lacking)}, got {type(converter).__name__}")
        return converter

    def handles(self, converter: Any, number: int, name: str) -> bool:
        """Whether the converter takes the checkpoint's tensor of this number, which it knows as ``name``.

        Raises:
            CheckpointError: the converter failed.
        """
        if converter is None:
            return False
        try:
            by_tensor = getattr(converter, "can_handle_tensor", None)
            if callable(by_tensor) and by_tensor(name, self._on_meta(number)):
                return True
            return bool(converter.can_handle(name))
        except Exception as error:
            raise self._failure(converter, f"at {name}", error) from error

    def run(self, converter: Any, numbers: Sequence[int], meta: bool) -> Iterator[Converted]:
        """Yields what the converter returns for the checkpoint's tensors of these numbers.

        Args:
            meta: convert tensors on the meta device instead of reading the data.

        Raises:
            CheckpointError: the converter failed, or the checkpoint cannot be read.
        """
        for number in numbers:
            name = self.source.manifest.names[number]
            tensor = self._on_meta(number) if meta else self._read(number)
            try:
                with torch.no_grad():
                    result = converter.convert(self._rename(name), tensor)
            except Exception as error:
                raise self._failure(converter, f"at {name}", error) from error
            if result is not None:
                yield name, result
        if not hasattr(converter, "finalize"):
            return
        try:
            with torch.no_grad():
                rest = list(converter.finalize() or ())
        except Exception as error:
            raise self._failure(converter, "after the last tensor", error) from error
        for result in rest:
            yield "the end", result

    def _on_meta(self, number: int) -> Tensor:
        manifest = self.source.manifest
        return torch.empty(manifest.shapes[number], dtype=manifest.dtypes[number], device="meta")

    def _read(self, number: int) -> Tensor:
        manifest = self.source.manifest
        shape, dtype = manifest.shapes[number], manifest.dtypes[number]
        raw = torch.empty(prod(shape) * dtype.itemsize, dtype=torch.uint8)
        if raw.numel():
            self.source.fill(raw, [Piece(number, 0, 0, raw.numel())])
        return raw.view(dtype).reshape(shape)

    def _failure(self, converter: Any, where: str, error: Exception) -> CheckpointError:
        return CheckpointError(
            f"{self.source.manifest.source}: the model's converter {type(converter).__name__} failed {where}: "
            f"{type(error).__name__}: {error}"
        )
