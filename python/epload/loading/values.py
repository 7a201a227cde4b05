"""The entries of a state dict that are no tensors, such as learning rates: one rank reads their values, and all agree on them."""

from __future__ import annotations

import base64
import io
import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from epload.checkpoint.opening import read_objects
from epload.checkpoint.torch_file import check_pickles
from epload.core.attempt import Attempt
from epload.errors import CheckpointError, ModelMismatch, message_of
from epload.model.flat_state import FlatState
from epload.observe.render import list_first
from epload.ranks.control import Control


def agree_on_values(
    control: Control, state: dict[str, Any], checkpoint: Any, src: int, strict: bool
) -> tuple[FlatState, Any, dict[str, Any], list[str]]:
    """Returns the tensors of the state dict and of the checkpoint; the values of the entries that are no tensors, which rank
    ``src`` reads; and the names of those that there are none for."""

    def read() -> tuple[FlatState, Any, tuple[list[str], dict[str, str]]]:
        flat, source, raw = FlatState(state), checkpoint, dict[str, bytes]()
        if isinstance(checkpoint, str | os.PathLike) and os.path.isdir(checkpoint):
            source = os.path.realpath(checkpoint)  # a link may lead elsewhere when the tensors are read
        if isinstance(checkpoint, Mapping):
            source_state = FlatState(checkpoint)
            source = dict(source_state._buffers)
            raw = {name: _saved(source_state.others[name]) for name in flat.others if name in source_state.others}
        if control.rank == src:
            raw = read_objects(source, list(flat.others)) | raw
        contents = {name: base64.b64encode(content).decode() for name, content in raw.items()}
        return flat, source, (sorted(flat.others), contents if control.rank == src else {})

    def choose(views: dict[int, Any]) -> dict[str, str]:
        expected, contents = views[src]
        for rank, (names, _) in views.items():
            if names != expected:
                raise ValueError(
                    f"ranks {src} and {rank} pass state dicts with different values besides tensors: "
                    f"{list_first(sorted(set(names) ^ set(expected)), 10)}"
                )
        chosen: dict[str, str] = contents
        return chosen

    def load_values() -> dict[str, Any]:
        if missing and strict:
            raise ModelMismatch(
                f"the checkpoint has no value for {list_first(missing, 10)} of the state dict; pass strict=False to keep what is "
                "in it",
                missing_keys=missing,
            )
        return {name: _value(name, content) for name, content in contents.items()}

    opened = Attempt(read)
    view = opened.value[2] if opened.failure is None else None
    contents: dict[str, str] = control.agree("reading values", opened.failure, view, choose)
    flat, source, (names, _) = opened.value
    missing = [name for name in names if name not in contents]
    values = Attempt(load_values)
    control.agree("reading values", values.failure, last=True)
    return flat, source, values.value, missing


def _saved(value: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def _value(name: str, content: str) -> Any:
    try:
        stream = io.BytesIO(base64.b64decode(content))
        check_pickles(stream)
        value = torch.load(stream, map_location="cpu", weights_only=True)
    except Exception as error:
        raise CheckpointError(
            f"the value of {name} cannot be loaded without executing what it names, or is damaged: "
            f"{message_of(error).rpartition('WeightsUnpickler error: ')[2][:500]}"
        ) from error
    if isinstance(value, Tensor):
        raise CheckpointError(f"{name} is a tensor in the checkpoint, and none in the state dict")
    return value
