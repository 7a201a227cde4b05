"""A nested state dict as a module, so that its tensors can be read and filled as those of a model are."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.stateful import Stateful


class FlatState(nn.Module):
    """Has the tensors of a nested state dict, the same objects, under the names that torch.distributed.checkpoint saves them."""

    def __init__(self, state: Mapping[str, Any]) -> None:
        """
        Args:
            state: tensors, DTensors and other values, in dicts and lists of any depth.

        Raises:
            TypeError: not a dict; or a value has a ``state_dict()`` of its own, or is divided in another way than a DTensor.
            ValueError: a tensor is on meta.
        """
        super().__init__()
        if not isinstance(state, Mapping):
            hint = ", a module: pass it to epload.load" if isinstance(state, nn.Module) else ""
            raise TypeError(f"expected a dict of tensors, got {type(state).__name__}{hint}")
        flat, paths = flatten_state_dict(dict(state))
        for name, value in flat.items():
            if isinstance(value, Stateful):
                raise TypeError(f"expected values and tensors, but {name} is a {type(value).__name__}; pass its state_dict()")
            if type(value).__name__ == "ShardedTensor" or hasattr(value, "global_offsets"):
                raise TypeError(f"{name} is a {type(value).__name__} that is divided among ranks; expected DTensors")
        tensors = {name: value for name, value in flat.items() if isinstance(value, Tensor)}
        self.others = {name: value for name, value in flat.items() if not isinstance(value, Tensor)}
        """Values that are not tensors, by name."""
        self.paths = {name: _own_keys(state, paths[name]) for name in self.others}
        """Keys of each of these in the nested state, by its name."""
        if on_meta := next((name for name, tensor in tensors.items() if tensor.is_meta), None):
            raise ValueError(f"{on_meta} is on meta; give it storage first")
        # Not register_buffer(), which refuses names with a dot.
        self._buffers.update({name: t.detach() if t.requires_grad else t for name, t in tensors.items()})


def _own_keys(state: Any, path: Iterable[Any]) -> tuple[Any, ...]:
    """Returns the keys of a value in a nested state dict. ``path``: these keys; torch makes strings of those in dicts."""
    keys = []
    for key in path:
        if isinstance(state, Mapping) and key not in state:
            key = next(own for own in state if str(own) == key)
        keys.append(key)
        state = state[key]
    return tuple(keys)


def assign(state: Any, path: tuple[Any, ...], value: Any) -> None:
    """Replaces a value in a nested state dict, by its keys and list indices."""
    *parents, last = path
    for key in parents:
        state = state[key]
    state[last] = value
