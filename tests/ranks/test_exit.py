"""A job's processes end as others do: with their own exit status, whatever their loads have come to."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = """
import sys
from torch import distributed as dist
from epload import HierarchicalLoader, LoadError, Topology
from support.failures import Failing
from support.small_model import BUCKET, meta_net, state_for

rank, store = int(sys.argv[1]), dist.FileStore(sys.argv[2], 2)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
loader = HierarchicalLoader(Topology.from_nodes([[0], [1]]), readers="one", bucket_bytes=BUCKET, progress=False)
loader.load(meta_net(), state_for(1) if rank == 0 else None)
try:
    loader.load(meta_net(), Failing(state_for(1), OSError(5, "a bad disk"), 1) if rank == 0 else None)
except LoadError as error:
    assert "a bad disk" in str(error)
else:
    sys.exit("loaded")
sys.exit(3)
"""


def test_a_process_ends_with_its_own_status_after_a_load(tmp_path: Path) -> None:
    """A thread that closes groups after a failure must not be in native code when the interpreter ends."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(rank), str(tmp_path / "store")],
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    outputs = [process.communicate(timeout=300)[0] for process in processes]
    assert [process.returncode for process in processes] == [3] * 2, "\n".join(outputs)
