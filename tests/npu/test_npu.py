"""The op and the loader on ``npu:0`` tensors, with the real torch_npu and its ProcessGroupHCCL, over a fake CANN. It has no
kernels, so that only contiguous copies of one dtype work."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import fakecann
import pytest

HERE = Path(__file__).parent
RANKS = 4


@pytest.fixture(scope="module")
def cann(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fakecann.make(tmp_path_factory.mktemp("cann"))


def environment(cann: Path, trace: Path) -> dict[str, str]:
    return {
        **os.environ,
        "LD_LIBRARY_PATH": str(cann),
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
        "FAKECANN_TRACE": str(trace),
    }


def run_alone(script: str, cann: Path, folder: Path) -> dict[str, Any]:
    """Returns what a script printed."""
    command = [sys.executable, str(HERE / script)]
    env = environment(cann, folder / "trace")
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def test_contiguous_regions_are_copied_by_cann_on_the_stream(cann: Path, tmp_path: Path) -> None:
    answer = run_alone("copies.py", cann, tmp_path)
    assert answer["wrong"] == []
    copies = [line.split() for line in (tmp_path / "trace").read_text().splitlines()]
    inside = [(int(line[1]), line[2]) for line in copies if line[0] == "device-to-device"]
    assert inside == [(nbytes, answer["stream"]) for nbytes in (400, 128, 200)] * 2


def test_no_exception_leaves_a_c_function(cann: Path, tmp_path: Path) -> None:
    """Called from ctypes, which lets none pass: the process would end."""
    answer = run_alone("boundary.py", cann, tmp_path)
    assert answer["moved"]
    assert answer["plain"]
    assert answer["outcomes"]["here"] == [0, ""]
    status, text = answer["outcomes"]["in a new thread"]
    assert status == -(2**31)
    assert "507000" in text


def run_ranks(script: str, cann: Path, folder: Path, *words: str) -> list[tuple[dict[str, Any], list[list[str]]]]:
    """What each rank printed, and its trace in words."""
    processes = []
    for rank in range(RANKS):
        env = environment(cann, folder / f"trace-{rank}")
        command = [sys.executable, str(HERE / script), str(rank), str(RANKS), str(folder), *words]
        pipe = subprocess.PIPE
        processes.append(subprocess.Popen(command, env=env, stdout=pipe, stderr=pipe, text=True))
    try:
        problems = [process.communicate(timeout=300) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for rank, (process, (_, errors)) in enumerate(zip(processes, problems, strict=True)):
        assert process.returncode == 0, f"rank {rank}:\n{errors}"
    traces = [(folder / f"trace-{rank}").read_text().splitlines() for rank in range(RANKS)]
    return [
        (json.loads(output.splitlines()[-1]), [line.split() for line in trace])
        for (output, _), trace in zip(problems, traces, strict=True)
    ]


@pytest.mark.parametrize("case", ["op two_level", "one striped", "partitioned two_level", "every two_level"])
def test_on_one_stream_with_two_communicators(case: str, cann: Path, tmp_path: Path) -> None:
    for rank, (answer, lines) in enumerate(run_ranks("rank.py", cann, tmp_path, *case.split())):
        assert answer["wrong"] == []
        leads = rank in (0, 2) or case.endswith("striped")
        moves = not case.startswith("every")  # each rank reads what it owns, so that no group is made
        expected = (2 if leads else 1) if moves else 0
        assert sum(line[0] == "communicator" for line in lines) == expected
        second = lines[answer["begin"] :]  # the groups have their communicators
        ours = answer["stream"]
        assert {line[2] for line in lines if line[0] == "broadcast"} == ({ours} if moves else set())
        # What a rank reads crosses on the streams of its pipe, on which short pieces are also copied to their places.
        to_device = {line[2] for line in second if line[0] == "host-to-device" and int(line[1]) >= 2000}
        assert bool(to_device) == answer["reads"]
        assert ours not in to_device
        inside = {line[2] for line in second if line[0] == "device-to-device"}
        assert inside - to_device == ({ours} if moves else set())


def test_a_stream_that_torch_npu_did_not_make_is_refused(cann: Path, tmp_path: Path) -> None:
    """Every rank refuses it alike, before a communicator is made; the native op does by torch_npu, where it would wait for the
    caller. A first broadcast that fails is the call's own error: what torch_npu queues later still runs."""
    answers = run_ranks("refusals.py", cann, tmp_path)
    for answer, lines in answers:
        assert answer["wrong"] == []
        assert [line for line in lines[: answer["trace"]] if line[0] in ("communicator", "broadcast")] == []
        assert [line for line in lines if line[0] == "broadcast"] != []
    outcomes = answers[0][0]["outcomes"]
    assert [answer["outcomes"] for answer, _ in answers] == [outcomes] * RANKS
    for what, (kind, parts) in {
        "op": ("ValueError", ["ExternalStream", "torch.npu.Stream", "[ranks 0, 1, 2, 3]"]),
        "op, rank 2": ("ValueError", ["ExternalStream", "torch.npu.Stream", "[rank 2]"]),
        "native op": ("RuntimeError", ["External NPU stream is not supported"]),
        "loader": ("ValueError", ["ExternalStream", "torch.npu.Stream"]),
        "first broadcast": ("RuntimeError", ["HcclBroadcast on npu:0 failed with 9"]),
    }.items():
        assert outcomes[what][0] == kind, outcomes
        assert [part for part in parts if part not in outcomes[what][1]] == [], outcomes


def test_sync_between_two_jobs(cann: Path, tmp_path: Path) -> None:
    """Every shard has the trainer's bits after each version. HCCL moved them: from each sender to a receiver and, where they go
    to the devices of both receivers, from there to the other."""
    answers = run_ranks("sync.py", cann, tmp_path, "none", "auto")
    assert [answer["sends"] for answer, _ in answers] == [True, True, False, False]
    for answer, lines in answers:
        assert answer["wrong"] == []
        assert answer["transports"] == ["hccl", "hccl"]
        assert "device-to-device" in {line[0] for line in lines}
        groups = 1 if answer["sends"] else 2
        assert sum(line[0] == "communicator" for line in lines) == groups
        broadcasts = [line[2] for line in lines if line[0] == "broadcast"]
        # The first of each group is on a stream of its own.
        assert len(set(broadcasts)) == 2 * groups


def test_sync_through_host_memory(cann: Path, tmp_path: Path) -> None:
    """They were copied on the device, into and out of the buffer there: HCCL has moved nothing."""
    for answer, lines in run_ranks("sync.py", cann, tmp_path, "host", "host"):
        assert answer["wrong"] == []
        assert answer["transports"] == ["host", "host"]
        kinds = {line[0] for line in lines}
        assert "device-to-device" in kinds
        assert kinds.isdisjoint({"communicator", "broadcast"})
