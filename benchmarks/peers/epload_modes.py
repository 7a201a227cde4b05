"""epload in every mode."""

from typing import Any

from safetensors.torch import load_file

import epload
from peers import Job

TITLE = "epload"
MODES = {
    f"{readers}/{algorithm}": {"readers": readers, "algorithm": algorithm}
    for readers, algorithms in {
        "one": ("two_level", "striped"),
        "partitioned": ("two_level", "striped"),
        "per_node": ("auto",),
        "every": ("auto",),
        "auto": ("auto",),
    }.items()
    for algorithm in algorithms
} | {"auto, a dict on rank 0": {"readers": "auto", "algorithm": "auto", "as_dict": True}}
# Loads from meta differ only in the transfer, which reloads measure.
_ONLY_RELOAD = ("one/striped", "partitioned/two_level", "partitioned/striped", "per_node/auto")
MODE_CASES = dict.fromkeys(_ONLY_RELOAD, ("reload",))


def load(job: Job, readers: str, algorithm: str, as_dict: bool = False, verify: bool = False) -> None:
    """Reloads reuse one loader and its buffers; a load from meta is the only one of its loader, as in ``epload.load``."""
    checkpoint: Any = job.folder
    if as_dict:
        with job.phase("read"):
            checkpoint = load_file(job.file) if job.rank == 0 else None
    options: dict[str, Any] = {"readers": readers, "verify": verify, "progress": False}
    if job.case == "reload":
        loader = job.keep.get("loader") or epload.HierarchicalLoader(job.topology, algorithm=algorithm, **options)
        job.keep["loader"], job.keep["report"] = loader, loader.load(job.model, checkpoint)
    else:
        options |= {"topology": job.topology, "options": epload.LoadOptions(algorithm=algorithm)}
        job.keep["report"] = epload.load(job.model, checkpoint, **options)
