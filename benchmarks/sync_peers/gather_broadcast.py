"""As verl and vLLM do it: the trainer's first rank gathers full tensors into buckets, and broadcasts these to all rollout ranks.

Two buckets are in use at a time: one is gathered while the other is broadcast. "full_tensor" gathers tensor by tensor, "packed" a
bucket's shards in one message a rank.
"""

import torch
import torch.distributed as dist

from sync_peers import SyncJob, box_of, cut, local

TITLE = "gather on rank 0, broadcast"
MODES = {"full_tensor": {"packed": False}, "packed": {"packed": True}}
BUCKET = 128 << 20


def _prepare(job: SyncJob, packed: bool) -> None:
    """Cuts the model into buckets of whole tensors."""
    if "buckets" in job.keep:
        return
    buckets, used = [[]], 0
    for parameter in job.model.parameters():
        if used + parameter.nbytes > BUCKET and buckets[-1]:
            buckets.append([])
            used = 0
        buckets[-1].append((parameter, used))
        used += parameter.nbytes
    job.keep["buckets"] = buckets
    if job.rank == 0 or job.rank >= job.senders:
        ranks = [0, *range(job.senders, job.span.world)]
        job.keep["group"] = job.span.make_group(f"gather_broadcast {packed}", ranks)
        job.keep["buffers"] = [torch.empty(BUCKET, dtype=torch.uint8) for _ in range(2)]


def _broadcast(job: SyncJob, number: int) -> dist.Work:
    parameter, offset = job.keep["buckets"][number][-1]
    return job.keep["group"].broadcast(job.keep["buffers"][number % 2][: offset + parameter.nbytes], 0)


def send(job: SyncJob, packed: bool) -> None:
    _prepare(job, packed)
    works = []
    for number, bucket in enumerate(job.keep["buckets"]):
        if len(works) >= 2:
            works[-2].wait()
        buffer = job.keep["buffers"][number % 2] if job.rank == 0 else None
        if packed:
            _gather(job, bucket, buffer)
        else:
            for parameter, offset in bucket:
                full = parameter.full_tensor()
                if buffer is not None:
                    _view(buffer, parameter, offset).copy_(full)
        if job.rank == 0:
            works.append(_broadcast(job, number))
    for work in works[-2:]:
        work.wait()


def _gather(job: SyncJob, bucket, buffer) -> None:
    boxes = [[box_of(parameter, rank) for parameter, _ in bucket] for rank in range(job.senders)]
    counts = [sum(torch.Size(size).numel() for _, size in some) for some in boxes]
    mine = torch.empty(max(counts), dtype=torch.bfloat16)
    torch.cat([local(parameter).reshape(-1) for parameter, _ in bucket], out=mine[: counts[job.rank]])
    if buffer is None:
        dist.gather(mine, None, 0)
        return
    everyones = [torch.empty_like(mine) for _ in range(job.senders)]
    dist.gather(mine, everyones, 0)
    for flat, count, some in zip(everyones, counts, boxes, strict=True):
        parts = flat[:count].split([torch.Size(size).numel() for _, size in some])
        into = [cut(_view(buffer, parameter, offset), *box) for (parameter, offset), box in zip(bucket, some, strict=True)]
        torch._foreach_copy_(into, [part.view(size) for part, (_, size) in zip(parts, some, strict=True)])


def receive(job: SyncJob, packed: bool) -> None:
    _prepare(job, packed)
    buckets = job.keep["buckets"]
    work = _broadcast(job, 0)
    for number, bucket in enumerate(buckets):
        work.wait()
        if number + 1 < len(buckets):
            work = _broadcast(job, number + 1)
        buffer = job.keep["buffers"][number % 2]
        parts = [cut(_view(buffer, parameter, offset), *box_of(parameter)) for parameter, offset in bucket]
        torch._foreach_copy_([local(parameter) for parameter, _ in bucket], parts)


def _view(buffer, parameter, offset):
    """A full tensor in a bucket."""
    return buffer[offset : offset + parameter.nbytes].view(parameter.dtype).view(parameter.shape)
