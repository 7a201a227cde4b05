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


class TensorConverter(Protocol):
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
    """A new converter and the checkpoint that it converts. Each pass needs another one, because converters keep state.

    Args:
        source: the checkpoint, open.
        make: creates a converter. Returns None if there is nothing to convert.
        rename: the converter's name for a tensor of the checkpoint.

    Raises:
        TypeError: the converter lacks a method.
    """

    def __init__(
        self, source: Checkpoint, make: Callable[[], TensorConverter | None], rename: Callable[[str], str]
    ) -> None:
        self._source = source
        self._rename = rename
        self._converter: Any = make()
        self.name = type(self._converter).__name__
        """Class of the converter, for messages."""
        lacking = [method for method in ("can_handle", "convert") if not hasattr(self._converter, method)]
        if lacking and self._converter is not None:
            raise TypeError(f"expected a converter with {' and '.join(lacking)}, got {self.name}")

    def handles(self, number: int) -> bool:
        """Returns True if the converter takes the checkpoint's tensor of this number.

        Raises:
            CheckpointError: the converter failed.
        """
        if self._converter is None:
            return False
        name = self._rename(self._source.manifest.names[number])
        try:
            by_tensor = getattr(self._converter, "can_handle_tensor", None)
            if callable(by_tensor) and by_tensor(name, self._on_meta(number)):
                return True
            return bool(self._converter.can_handle(name))
        except Exception as error:
            raise self._failure(f"at {name}", error) from error

    def run(self, numbers: Sequence[int], meta: bool) -> Iterator[Converted]:
        """Yields what the converter returns for the checkpoint's tensors of these numbers.

        Args:
            meta: convert tensors on the meta device instead of reading the data.

        Raises:
            CheckpointError: the converter failed, or the checkpoint cannot be read.
        """
        for number in numbers:
            name = self._source.manifest.names[number]
            tensor = self._on_meta(number) if meta else self._read(number)
            try:
                with torch.no_grad():
                    result = self._converter.convert(self._rename(name), tensor)
            except Exception as error:
                raise self._failure(f"at {name}", error) from error
            if result is not None:
                yield name, result
        if not hasattr(self._converter, "finalize"):
            return
        try:
            with torch.no_grad():
                rest = list(self._converter.finalize() or ())
        except Exception as error:
            raise self._failure("after the last tensor", error) from error
        for result in rest:
            yield "the end", result

    def _on_meta(self, number: int) -> Tensor:
        manifest = self._source.manifest
        return torch.empty(manifest.shapes[number], dtype=manifest.dtypes[number], device="meta")

    def _read(self, number: int) -> Tensor:
        manifest = self._source.manifest
        shape, dtype = manifest.shapes[number], manifest.dtypes[number]
        raw = torch.empty(prod(shape) * dtype.itemsize, dtype=torch.uint8)
        if raw.numel():
            self._source.fill(raw, [Piece(number, 0, 0, raw.numel())])
        return raw.view(dtype).reshape(shape)

    def _failure(self, where: str, error: Exception) -> CheckpointError:
        return CheckpointError(
            f"{self._source.manifest.source}: the model's converter {self.name} failed {where}: {type(error).__name__}: {error}"
        )
