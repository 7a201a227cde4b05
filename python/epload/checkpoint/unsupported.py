"""Error messages for what is no checkpoint that epload reads: each says what it is and what to do."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from epload.checkpoint.byte_store import StoredFile

_DCP = (
    "a checkpoint of torch.distributed.checkpoint (DCP), which epload does not read: convert it with "
    "`python -m torch.distributed.checkpoint.format_utils dcp_to_torch FOLDER FILE`, then pass FILE"
)
_ZERO = (
    "a DeepSpeed checkpoint, which has a separate file for each rank's part: run the zero_to_fp32.py that DeepSpeed saved "
    "with it, then pass its output"
)
_GGUF = "a GGUF file, a format of llama.cpp that epload does not read: pass the checkpoint it was converted from"
_LFS = "a Git LFS pointer in place of the file: run `git lfs pull` in the repository, then load again"
_DCP_SHARD = (
    "holds one rank's shards, as saved by torch.distributed.checkpoint's HuggingFaceStorageWriter: join them with "
    "torch.distributed.checkpoint's consolidate_safetensors_files, then pass its output folder"
)
_ZERO_FILE = re.compile(
    r"^(mp_rank_\d+_|zero_pp_rank_\d+_|bf16_zero_pp_rank_\d+_|layer_\d+-model_|.*_optim_states\.pt$)"
)
_DCP_SHARD_FILE = re.compile(r"^shard-\d+-model-\d+-of-\d+\.safetensors$")


def missing(path: Path, source: str) -> str:
    """For a path that does not exist. ``source``: what the caller passed."""
    if "://" in source:
        return (
            f"no checkpoint at {source}: epload reads local files and folders, not URLs; "
            "download it first and pass the local path"
        )
    text = f"no checkpoint at {path}: expected a file or a folder"
    if re.fullmatch(r"[\w.-]+/[\w.-]+", source) and not source.startswith("."):
        text += (
            f"; if {source} is a model on the Hugging Face Hub, download it first and pass the folder: "
            f"huggingface_hub.snapshot_download({source!r})"
        )
    return text


def of_file(file: StoredFile) -> str:
    """For a file that is neither a safetensors file nor an index; empty if it may be a torch file. Raises OSError."""
    if file.name.endswith(".json"):
        return f"{file} is a JSON file, which holds no weights: pass the folder it is in, or the file with the weights"
    if file.name == ".metadata" or file.name.endswith(".distcp"):
        return f"{file} is part of {_DCP}"
    if _ZERO_FILE.match(file.name):
        return f"{file} is part of {_ZERO}"
    begin = file.read(0, 64)
    if begin[:4] == b"GGUF" or file.name.endswith(".gguf"):
        return f"{file} is {_GGUF}"
    return lfs_pointer(file, begin)


def lfs_pointer(file: StoredFile, begin: bytes) -> str:
    """For a file with these first bytes; empty if it is no Git LFS pointer."""
    return f"{file} is {_LFS}" if begin.startswith(b"version https://git-lfs") else ""


def of_folder(path: Path) -> str:
    """For a folder without safetensors files; empty if its torch files may be a checkpoint. Raises OSError."""
    names = [entry.name for entry in path.iterdir()]
    if ".metadata" in names or any(name.endswith(".distcp") for name in names):
        return f"{path} is {_DCP}"
    steps = "latest" in names and any(re.fullmatch(r"global_step\d+", name) for name in names)
    if steps or any(map(_ZERO_FILE.match, names)):
        return f"{path} is {_ZERO}"
    if found := sorted(name for name in names if name.endswith(".gguf")):
        return f"{path / found[0]} is {_GGUF}"
    return ""


def of_metadata(file: StoredFile, metadata: Any) -> str:
    """For a safetensors file with this ``__metadata__``; empty if it holds whole tensors."""
    sharding = metadata.get("DCP_SHARDING_INFO") if isinstance(metadata, Mapping) else None
    if not isinstance(sharding, str):
        return ""
    # A job of one rank saves whole tensors with this key too.
    if _DCP_SHARD_FILE.match(file.name) or _has_offset_shard(sharding):
        return f"{file} {_DCP_SHARD}"
    return ""


def _has_offset_shard(sharding: str) -> bool:
    """Whether some tensor is a shard that does not begin at the start of the whole tensor."""
    try:
        return any(any(of_tensor["saved_offsets"]) for of_tensor in json.loads(sharding).values())
    except (ValueError, KeyError, TypeError, AttributeError):
        return False
