"""The floor: as many bytes as flat messages, each trainer rank its part to one rank of every rollout node, and nothing else."""

from collections import deque

import torch

from sync_peers import SyncJob

TITLE = "raw messages of 16 MiB"
FILLS = False
MESSAGE = 16 << 20
IN_FLIGHT = 2


def _lengths(job: SyncJob, sender: int) -> list[int]:
    total = sum(parameter.nbytes for parameter in job.model.parameters())
    part = total * (sender + 1) // job.senders - total * sender // job.senders
    return [min(MESSAGE, part - begin) for begin in range(0, part, MESSAGE)]


def send(job: SyncJob) -> None:
    if "lengths" not in job.keep:
        job.keep["lengths"] = _lengths(job, job.rank)
        job.keep["buffer"] = torch.empty(MESSAGE, dtype=torch.uint8)
    buffer = job.keep["buffer"].fill_(job.version % 251)
    works = deque()
    for length in job.keep["lengths"]:
        for node in job.nodes:
            works.append(job.span.group.send([buffer[:length]], node[job.rank % len(node)], 0))
        while len(works) > IN_FLIGHT * len(job.nodes):
            works.popleft().wait()
    for work in works:
        work.wait()


def receive(job: SyncJob) -> list[str]:
    if "from" not in job.keep:
        node = next(node for node in job.nodes if job.rank in node)
        mine = [sender for sender in range(job.senders) if node[sender % len(node)] == job.rank]
        job.keep["from"] = {sender: _lengths(job, sender) for sender in mine}
        job.keep["buffers"] = {sender: [torch.empty(MESSAGE, dtype=torch.uint8) for _ in range(IN_FLIGHT)] for sender in mine}
    lengths, buffers = job.keep["from"], job.keep["buffers"]
    works = deque()
    for i in range(max(map(len, lengths.values()), default=0)):
        for sender, of_sender in lengths.items():
            if i < len(of_sender):
                works.append(job.span.group.recv([buffers[sender][i % IN_FLIGHT][: of_sender[i]]], sender, 0))
        while len(works) > (IN_FLIGHT - 1) * len(lengths):
            works.popleft().wait()
    for work in works:
        work.wait()
    last = [(sender, buffers[sender][(len(some) - 1) % IN_FLIGHT][: some[-1]]) for sender, some in lengths.items()]
    return [f"the last message of rank {sender}" for sender, got in last if not (got == job.version % 251).all()]
