"""epload from the folder that dcp.save wrote."""

from dataclasses import replace

from peers import Job, epload_modes
from peers.dcp_folder import FOLDER, prepare

__all__ = ["MODES", "TITLE", "load", "prepare"]

TITLE = "epload, DCP folder,"
MODES = {mode: epload_modes.MODES[mode] for mode in ("auto/auto", "one/two_level")}


def load(job: Job, readers: str, algorithm: str) -> None:
    epload_modes.load(replace(job, folder=job.folder / FOLDER), readers, algorithm)
