"""What was passed as a checkpoint and is none that epload reads: says in a sentence what it is and what to do."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_DCP = (
    "a checkpoint of torch.distributed.checkpoint (DCP), which epload does not read: convert it with "
    "`python -m torch.distributed.checkpoint.format_utils dcp_to_torch FOLDER FILE`, then pass FILE"
)
_ZERO = (
    "a DeepSpeed checkpoint, in which each rank's part is a file of its own: run the zero_to_fp32.py that DeepSpeed put "
    "beside it, then pass what that writes"
)
_GGUF = "a GGUF file, as llama.cpp uses; epload reads safetensors and torch files: pass the checkpoint it was converted from"
_LFS = "a Git LFS pointer in place of the file: run `git lfs pull` in the repository, then load again"
_DCP_SHARD = (
    "holds one rank's shards, as torch.distributed.checkpoint's HuggingFaceStorageWriter saves them: join them with "
    "torch.distributed.checkpoint's consolidate_safetensors_files, then pass the folder that it writes"
)
_ZERO_FILE = re.compile(
    r"^(mp_rank_\d+_|zero_pp_rank_\d+_|bf16_zero_pp_rank_\d+_|layer_\d+-model_|.*_optim_states\.pt$)"
)
_DCP_SHARD_FILE = re.compile(r"^shard-\d+-model-\d+-of-\d+\.safetensors$")


def missing(path: Path, asked: str) -> str:
    """Why there may be nothing at a path. ``asked``: as the caller spelled it."""
    if "://" in asked:
        return (
            f"no checkpoint at {asked}: epload reads files and folders, no web addresses and no object stores; "
            "download it first and pass the local path"
        )
    text = f"no checkpoint at {path}: expected a file or a folder"
    if re.fullmatch(r"[\w.-]+/[\w.-]+", asked) and not asked.startswith("."):
        text += (
            f"; if {asked} is a model of the Hugging Face Hub, download it first and pass the folder: "
            f"huggingface_hub.snapshot_download({asked!r})"
        )
    return text


def file(path: Path) -> str:
    """What a file is that is neither a safetensors file nor an index; empty if it may be a torch file."""
    if path.suffix == ".json":
        return (
            f"{path} is a JSON file, which holds no weights: pass the folder it lies in, or the file with the weights"
        )
    if path.name == ".metadata" or path.suffix == ".distcp":
        return f"{path} is part of {_DCP}"
    if _ZERO_FILE.match(path.name):
        return f"{path} is part of {_ZERO}"
    with open(path, "rb") as opened:
        begin = opened.read(64)
    if begin[:4] == b"GGUF" or path.suffix == ".gguf":
        return f"{path} is {_GGUF}"
    return pointer(path, begin)


def pointer(path: Path, begin: bytes) -> str:
    """Of a file with these first bytes; empty if it is no stand-in for the file itself."""
    return f"{path} is {_LFS}" if begin.startswith(b"version https://git-lfs") else ""


def folder(path: Path) -> str:
    """What a folder is that has no safetensors files; empty if its torch files may be a checkpoint."""
    names = [each.name for each in path.iterdir()]
    if ".metadata" in names or any(name.endswith(".distcp") for name in names):
        return f"{path} is {_DCP}"
    steps = "latest" in names and any(re.fullmatch(r"global_step\d+", name) for name in names)
    if steps or any(map(_ZERO_FILE.match, names)):
        return f"{path} is {_ZERO}"
    if found := sorted(name for name in names if name.endswith(".gguf")):
        return f"{path / found[0]} is {_GGUF}"
    return ""


def safetensors(path: Path, metadata: Any) -> str:
    """What a safetensors file with this ``__metadata__`` holds in place of whole tensors; empty if nothing speaks against it."""
    said = metadata.get("DCP_SHARDING_INFO") if isinstance(metadata, Mapping) else None
    if not isinstance(said, str):
        return ""
    # A job of one rank saves whole tensors with this key too.
    if _DCP_SHARD_FILE.match(path.name) or _begins_inside(said):
        return f"{path} {_DCP_SHARD}"
    return ""


def _begins_inside(said: str) -> bool:
    """Whether some tensor is a part that does not begin where the whole tensor does."""
    try:
        return any(any(of_tensor["saved_offsets"]) for of_tensor in json.loads(said).values())
    except (ValueError, KeyError, TypeError, AttributeError):
        return False
