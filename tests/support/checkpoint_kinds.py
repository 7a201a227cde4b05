"""The kinds of sources that hold one state dict: files, folders, indices, torch files, dicts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from epload import Checkpoint, save
from support.checkpoints import State, tensor


def small_state() -> State:
    shapes = {"b": (3, 5), "a": (7,), "scalar": (), "empty": (0, 4), "odd": (13,), "c.weight": (2, 3, 4)}
    kinds = [torch.float32, torch.bfloat16, torch.float64, torch.int32, torch.uint8, torch.float16]
    return {name: tensor(i, shape, kind) for i, ((name, shape), kind) in enumerate(zip(shapes.items(), kinds, strict=True))}


def split(state: State) -> tuple[State, State]:
    names = list(state)
    return {n: state[n] for n in names[::2]}, {n: state[n] for n in names[1::2]}


def one_file(folder: Path, state: State) -> Any:
    save_file(state, folder / "weights.safetensors")
    return folder / "weights.safetensors"


def with_index(folder: Path, state: State, names: tuple[str, str], index: str, save: Callable[[State, Path], object]) -> Any:
    weight_map = {}
    for name, part in zip(names, split(state), strict=True):
        save(part, folder / name)
        weight_map |= dict.fromkeys(part, name)
    (folder / index).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    save({"stray": tensor(9, (2,))}, folder / f"other{Path(names[0]).suffix}")
    return folder


def folder_with_index(folder: Path, state: State) -> Any:
    names = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    return with_index(folder, state, names, "model.safetensors.index.json", save_file)


def the_index_itself(folder: Path, state: State) -> Any:
    return folder_with_index(folder, state) / "model.safetensors.index.json"


def folder_without_index(folder: Path, state: State) -> Any:
    for number, part in enumerate(reversed(split(state))):
        save_file(part, folder / f"part-{number}.safetensors")
    return str(folder)


def folder_with_model_file(folder: Path, state: State) -> Any:
    save_file(state, folder / "model.safetensors")
    save_file({"stray": tensor(9, (2,))}, folder / "adapter.safetensors")
    return folder


def torch_file(folder: Path, state: State) -> Any:
    torch.save(state, folder / "weights.pt")
    return folder / "weights.pt"


def torch_folder_with_index(folder: Path, state: State) -> Any:
    names = "pytorch_model-1.bin", "pytorch_model-2.bin"
    return with_index(folder, state, names, "pytorch_model.bin.index.json", torch.save)


def torch_folder(folder: Path, state: State) -> Any:
    torch.save(state, folder / "pytorch_model.bin")
    return folder


def wrapped(folder: Path, state: State) -> Any:
    torch.save({"state_dict": state}, folder / "trained.pth")
    return folder / "trained.pth"


def changes_of_changes(folder: Path, state: State) -> Any:
    """A chain of two deltas: a tensor is new in each, and another has changed."""
    first = {name: value + 1 if name == "x" else value for name, value in state.items() if name not in ("a", "y")}
    second = {name: value for name, value in state.items() if name != "a"}
    save(first, folder / "1")
    save(second, folder / "2", base=folder / "1")
    save(state, folder / "3", base=folder / "2")
    return folder / "3"


def plain_dict(folder: Path, state: State) -> Any:
    return state


def opened(folder: Path, state: State) -> Any:
    return Checkpoint.open(one_file(folder, state))


SOURCES = [
    one_file, folder_with_index, the_index_itself, folder_without_index, folder_with_model_file, torch_file,
    torch_folder_with_index, torch_folder, wrapped, changes_of_changes, plain_dict, opened,
]  # fmt: skip
