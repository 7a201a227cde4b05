"""Chooses the files of a folder that are its checkpoint, by their names alone: one set of weights, never parts of two.

The names and their order are those of transformers, diffusers and PEFT. Local folders, the Hub and object storage all choose
with :func:`choose`. Errors for what is no checkpoint say what it is.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from epload.checkpoint.byte_store import StoredFile
from epload.errors import CheckpointError
from epload.observe.render import list_first

CONFIG = "config.json"
CONFIGS = (CONFIG, "hf_quant_config.json")
"""Files next to the weights that may declare a quantization: the first that does counts."""
ADAPTER_CONFIG = "adapter_config.json"
DCP = ".metadata"
"""The description of a DCP folder."""
DCP_ROOT = "."
"""The prefix of a whole state dict in one."""
DELTA = "epload-delta.json"
"""The index of a folder with what has changed since another checkpoint. No other library reads it."""
OF_CHECKPOINTS = (".safetensors", ".bin", ".pt", ".pth", ".distcp", DELTA)
"""Ends of the names of files of which a checkpoint has at least one."""
WRITTEN = (DELTA, ".safetensors", ".safetensors.index.json")
"""Ends of the names of files that hold or locate the tensors of a checkpoint that is written."""
CHECKSUMS = "checksums.json"
"""The digests of a folder's files: see :mod:`epload.checkpoint.checksums`."""
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_TRANSFORMERS = (SINGLE, INDEX, "pytorch_model.bin", "pytorch_model.bin.index.json")
_DIFFUSERS = (
    "diffusion_pytorch_model.safetensors.index.json", "diffusion_pytorch_model.safetensors",
    "diffusion_pytorch_model.bin", "diffusion_pytorch_model.bin.index.json",
)  # fmt: skip
ADAPTERS = ("adapter_model.safetensors", "adapter_model.bin")
_STEMS = ("model.", "pytorch_model.", "diffusion_pytorch_model.")
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth")
_TRAINING_STATE = re.compile(r"(optimizer|scheduler|scaler|sampler|dl_state_dict|training_args|rng_state)(_\d+)*\.\w+")
"""Files that the Trainer of transformers and accelerate save next to the weights."""
_RANK_FILE = re.compile(r"shard-\d+-(?=model-\d+-of-\d+)")
"""Start of the names of the files that torch's HuggingFaceStorageWriter writes for each rank."""
_NUMBERED = re.compile(r"(?P<begin>.*?)(?P<number>[0-9]{1,9})(-of-(?P<total>[0-9]{1,9})(?P<end>.*)|)")
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


class FileSet(NamedTuple):
    """Weight files that belong together by their names."""

    base: str
    """The name without number and suffix: ``model.fp16`` of ``model.fp16-00001-of-00002.safetensors``."""
    files: list[str]
    fault: str = ""
    """Says what is wrong with the numbers of the files."""

    @property
    def variant(self) -> str:
        """The variant of a model of transformers or diffusers; empty if the files have none, or other names."""
        return next((self.base.removeprefix(stem) for stem in _STEMS if self.base.startswith(stem)), "")

    def __str__(self) -> str:
        more = [f"{len(self.files)} files"] * (len(self.files) > 1) + [self.fault] * bool(self.fault)
        return self.files[0] + (f" ({', '.join(more)})" if more else "")


def standard_names(variant: str = "") -> list[str]:
    """Returns the names that weights have in a folder, in the order in which they are chosen."""
    names = [*_of_variant(_TRANSFORMERS, variant), *_of_variant(_DIFFUSERS, variant)]
    return names if variant else [*names, DCP, *ADAPTERS, DELTA]


def choose(names: Collection[str], where: str, variant: str = "", read: Callable[[str], bytes] = lambda name: b"") -> list[str]:
    """Chooses the files of a folder that are its checkpoint: an index, the metadata of a DCP folder, or weight files.

    Args:
        names: what is in the folder; names of folders end with "/".
        where: the folder, for messages.
        variant: of the weights, e.g. "fp16"; empty for those that have none.
        read: returns the content of a file: the configuration may name the weights, and an index :data:`SINGLE` among others.

    Raises:
        CheckpointError: the folder has no weights, a part of a set only, or several sets of which none comes first.
    """
    sets = _group(names)
    if named_by_config := _weights_in_config(read(CONFIG)) if CONFIG in names else "":
        stated = f"{where}/{CONFIG} states transformers_weights={named_by_config!r}"
        if variant:
            raise CheckpointError(f"{stated}, which leaves no choice to variant={variant!r}: leave it out, or pass a file")
        if named_by_config not in names:
            raise CheckpointError(f"{stated}, which is not in that folder; pass the file that is meant")
        standard = [named_by_config]
    else:
        families = [_of_variant(family, variant) for family in (_TRANSFORMERS, _DIFFUSERS)]
        standard = [name for family in families for name in [*filter(names.__contains__, family)][:1]]
        if standard[:1] == [SINGLE] and INDEX in names and _adds_files(read(INDEX)):
            standard[0] = INDEX
    standard += [DELTA] * (DELTA in names and not variant)
    of_ranks = [file_set for file_set in sets if _RANK_FILE.match(file_set.files[0])]
    if len(standard) + len(of_ranks) > 1:
        raise _ambiguous(where, [*standard, *of_ranks])
    if standard:
        return standard
    if not variant and (name := next(filter(names.__contains__, (DCP, *ADAPTERS)), "")):
        return [name]
    candidates = [s for s in sets if (s.base.endswith(f".{variant}") if variant else not s.variant)]
    reason = _unsupported_folder(where, names) if DCP not in names else ""
    if reason and not any(candidate.files[0].endswith(".safetensors") for candidate in candidates):
        raise CheckpointError(reason)
    if len(candidates) > 1:
        raise _ambiguous(where, candidates)
    if not candidates:
        raise _no_weights(sets, names, where, variant)
    if candidates[0].fault:
        raise CheckpointError(f"{where} has no complete set of weights: {candidates[0]}; copy the files again")
    return candidates[0].files


def unsupported_file(file: StoredFile) -> str:
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


def _unsupported_folder(folder: str, names: Collection[str]) -> str:
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


def _weights_in_config(content: bytes) -> str:
    """Returns the name of the weights that a ``config.json`` states as ``transformers_weights``; empty if it states none."""
    try:
        name = json.loads(content)["transformers_weights"]
    except (ValueError, LookupError, TypeError, RecursionError):
        return ""
    return name if isinstance(name, str) else ""


def _adds_files(content: bytes) -> bool:
    """Returns True for an index that lists :data:`SINGLE` and other files, as tools write it that add tensors to a model."""
    try:
        return {SINGLE} < {*json.loads(content)["weight_map"].values()}
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return False


def _of_variant(family: Sequence[str], variant: str) -> list[str]:
    """Returns the names as transformers and diffusers save a variant. Also the former name of an index of diffusers."""
    if not variant:
        return list(family)
    names = []
    for name in family:
        names.append(f".{variant}.".join(name.rsplit(".", 1)))
        if family is _DIFFUSERS and ".index." in name:
            names.append(name.replace(".index.", f".{variant}.index."))
    return names


def _no_weights(sets: Sequence[FileSet], names: Collection[str], where: str, variant: str) -> CheckpointError:
    """Returns the error for a folder in which no set is meant."""
    if variant:
        present = [*sets, *["a DCP checkpoint"] * (DCP in names)]
        return CheckpointError(f"{where} has no weights of variant={variant!r}; it has {list_first(present) or 'none'}")
    if variants := sorted({file_set.variant for file_set in sets}):
        choices = " or ".join(f"variant={name!r}" for name in variants)
        return CheckpointError(f"{where} has weights of a variant only: {list_first(sets)}; pass {choices}")
    folders = sorted(name for name in names if name.endswith("/"))
    of_them = f"; if they are in one of its folders, pass that one: {list_first(folders)}" if folders else ""
    return CheckpointError(f"no checkpoint in {where}: expected *.safetensors, *.bin, *.pt or *.pth files in it{of_them}")


def _ambiguous(where: str, choices: Sequence[object]) -> CheckpointError:
    return CheckpointError(
        f"{where} has several sets of weights: {list_first(choices)}; pass the file that is meant, or an index that names its "
        "files"
    )


def _group(names: Collection[str]) -> list[FileSet]:
    """Returns the weight files of a folder as sets, sorted by name. Files without a total, such as ``part-0`` and ``part-1``,
    are one set if their numbers have no gap."""
    sets = []
    numbered: dict[tuple[str, str, str, str], list[tuple[int, str]]] = defaultdict(list)
    for name in sorted(names):
        if not name.endswith(_WEIGHTS) or _TRAINING_STATE.fullmatch(name):
            continue
        stem, _, suffix = _RANK_FILE.sub("shard-*-", name).rpartition(".")
        match = _NUMBERED.fullmatch(stem)
        if match and (match["total"] or not stem.startswith(_STEMS)):
            begin, number, total, end = match.group("begin", "number", "total", "end")
            numbered[begin, total or "", end or "", suffix].append((int(number), name))
        else:
            sets.append(FileSet(stem, [name]))
    for (begin, total, end, _), files in numbered.items():
        listed = [name for _, name in sorted(files)]
        numbers = {number for number, _ in files}
        first, count = min(1, *numbers), int(total or len(files))
        is_complete = len(numbers) == count and max(numbers) == first + count - 1
        # Each rank has files of all numbers, or of some.
        if len(numbers) < len(files) and not _RANK_FILE.match(listed[0]):
            is_complete = False
        if total or (is_complete and count > 1):
            fault = "" if is_complete else _fault(numbers, first, count)
            sets.append(FileSet(begin.rstrip("-_.") + end, listed, fault))
        else:
            sets += [FileSet(name.rpartition(".")[0], [name]) for name in listed]
    return sorted(sets, key=lambda file_set: file_set.files)


def _fault(numbers: Collection[int], first: int, count: int) -> str:
    fault = f"expected {count} files with the numbers from {first} on"
    missing = [number for number in range(first, first + min(count, len(numbers) + 6)) if number not in numbers]
    return fault + (f"; missing: {', '.join(map(str, missing[:6]))}" if missing else "")
