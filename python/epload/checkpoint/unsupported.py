"""Error messages for what is no checkpoint that epload reads: each says what it is and what to do."""

from __future__ import annotations

import re
from collections.abc import Collection

from epload.checkpoint.byte_store import StoredFile

_DCP = "a checkpoint of torch.distributed.checkpoint (DCP), which is a folder with .metadata and .distcp files: pass the folder"
_ZERO = (
    "a DeepSpeed checkpoint, which has a separate file for each rank's part: run the zero_to_fp32.py that DeepSpeed saved "
    "with it, then pass its output"
)
_GGUF = (
    "a GGUF file, a format of llama.cpp that epload does not read: pass the checkpoint it was converted from, or convert it with "
    "transformers: from_pretrained(FOLDER, gguf_file=FILE), then save_pretrained"
)
_LFS = "a Git LFS pointer in place of the file: run `git lfs pull` in the repository, then load again"
_ZERO_FILE = re.compile(r"^(mp_rank_\d+_|zero_pp_rank_\d+_|bf16_zero_pp_rank_\d+_|layer_\d+-model_|.*_optim_states\.pt$)")


def of_file(file: StoredFile) -> str:
    """Returns the error for a file that is neither safetensors nor an index; empty if it may be a torch file. Raises OSError."""
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
    """Returns the error for a file with these first bytes; empty if it is not a Git LFS pointer."""
    return f"{file} is {_LFS}" if begin.startswith(b"version https://git-lfs") else ""


def of_folder(folder: str, names: Collection[str]) -> str:
    """Returns the error for a folder with these names and no safetensors files; empty if its torch files may be a checkpoint."""
    if any(name.endswith(".distcp") for name in names):
        return (
            f"{folder} has files of a checkpoint of torch.distributed.checkpoint (DCP), but no .metadata: the job ended while it "
            "was saving, or each rank saved its own metadata (use_collectives=False), which epload does not read; save it again"
        )
    steps = "latest" in names and any(re.fullmatch(r"global_step\d+/", name) for name in names)
    if steps or any(map(_ZERO_FILE.match, names)):
        return f"{folder} is {_ZERO}"
    if gguf := [name for name in names if name.endswith(".gguf")]:
        return f"{folder}/{gguf[0]} is {_GGUF}"
    return ""
