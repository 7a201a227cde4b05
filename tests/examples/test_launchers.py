"""The scripts and manifests of docs/launchers.md, as far as they can be tried without a cluster."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
import yaml

from support.jobs import session

PAGE = (Path(__file__).parents[2] / "docs" / "launchers.md").read_text()
LIMIT = 300.0
RANK = """
import os, torch.distributed as dist, epload
dist.init_process_group("gloo")
topology = epload.Topology.discover(timeout=60)
names = [None] * dist.get_world_size()
dist.all_gather_object(names, os.environ["NODE"])
if dist.get_rank() == 0:
    print("ranks of", sorted(names), topology.ranks, flush=True)
dist.barrier()
os._exit(0)
"""
EXPECTED = "ranks of ['0', '1'] (0, 1)\n"
STAND_INS = {
    "torchrun": '#!/bin/bash\nexec "$PYTHON" -m torch.distributed.run --local-addr 127.0.0.1 "$@"\n',
    "scontrol": '#!/bin/bash\n[ "$*" = "show hostnames node[0-1]" ] && printf "127.0.0.1\\nnode1\\n"\n',
    "srun": """#!/bin/bash
[[ $1 == --* ]] && shift
for i in 0 1; do NODE=$i SLURM_PROCID=$i SLURM_LOCALID=$i "$@" & jobs="$jobs $!"; done
for job in $jobs; do wait $job || exit 1; done
""",
    "python": '#!/bin/bash\nexec "$PYTHON" "$@"\n',
}
"""What a cluster has, in place of which both nodes are on this machine."""


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "rank.py").write_text(RANK)
    (tmp_path / "bin").mkdir()
    for name, text in STAND_INS.items():
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    return {
        **os.environ, "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "PYTHON": sys.executable, "OMP_NUM_THREADS": "1",
        "SLURM_CPUS_PER_TASK": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }  # fmt: skip


def run(commands: Sequence[list[str]], environments: Sequence[dict[str, str]], folder: Path) -> str:
    """What commands that run at the same time print together. They and what they start are ended at the limit."""
    options: dict[str, Any] = {"cwd": folder, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with ExitStack() as stack:
        started = [session(command, env=env, **options) for command, env in zip(commands, environments, strict=True)]
        processes = [stack.enter_context(each) for each in started]
        outputs = [process.communicate(timeout=LIMIT) for process in processes]
    assert [process.returncode for process in processes] == [0] * len(processes), outputs
    return "".join(output for output, _ in outputs)


def free_port() -> int:
    """Below those that the system chooses, as the script's."""
    for port in range(20000 + os.getpid() % 10000, 30000):
        with suppress(RuntimeError):
            dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
            return port
    raise AssertionError("no port is free")


@pytest.mark.parametrize("number", [0, 1], ids=["torchrun", "tasks"])
def test_the_slurm_scripts_start_ranks_on_each_node(number: int, environment: dict[str, str], tmp_path: Path) -> None:
    script = tmp_path / "load.sh"
    script.write_text(blocks("bash")[number])
    slurm = {
        "SLURM_JOB_ID": str(70000 + free_port() - 20000), "SLURM_JOB_NODELIST": "node[0-1]", "SLURM_JOB_NUM_NODES": "2",
        "SLURM_NTASKS": "2", "RANKS_PER_NODE": "1",
    }  # fmt: skip
    assert run([["bash", str(script), "rank.py"]], [environment | slurm], tmp_path) == EXPECTED


def test_the_manifests_fit_together_and_their_command_starts_ranks(environment: dict[str, str], tmp_path: Path) -> None:
    (text,) = blocks("yaml")
    service, job = yaml.safe_load_all(text)
    name, spec = job["metadata"]["name"], job["spec"]
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    variables: dict[str, Any] = {entry["name"]: entry.get("value") for entry in container["env"]}
    assert service["spec"]["selector"] == {"job-name": name}  # a label that Kubernetes gives to the pods of a Job
    assert service["spec"]["clusterIP"] == "None"
    assert pod["subdomain"] == service["metadata"]["name"]
    assert variables["PET_MASTER_ADDR"] == f"{name}-0.{pod['subdomain']}"  # the host name of the pod with index 0
    assert int(variables["PET_NNODES"]) == spec["completions"] == spec["parallelism"]
    assert int(container["resources"]["limits"]["nvidia.com/gpu"]) == int(variables["PET_NPROC_PER_NODE"])
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}

    here = {"PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": str(free_port()), "PET_NPROC_PER_NODE": "1"}
    pods = [
        environment | variables | here | {"PET_NODE_RANK": str(index), "NODE": str(index)} for index in range(spec["completions"])
    ]
    assert run([[*container["command"], "rank.py"]] * len(pods), pods, tmp_path) == EXPECTED
