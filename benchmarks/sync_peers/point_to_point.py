"""As awex and Ray's direct transport do it: a message for each box that a trainer rank's shard shares with a rollout rank's."""

from collections import deque

from sync_peers import SyncJob, box_of, cut, local

TITLE = "a message per overlap of two shards"
IN_FLIGHT = 512
"""Messages that a rank has posted."""


def _prepare(job: SyncJob) -> None:
    """This rank's messages, as views of its tensors, in the same order at both ends."""
    if "messages" in job.keep:
        return
    parameters = list(job.model.parameters())
    boxes = job.span.exchange([box_of(parameter) for parameter in parameters])
    senders, receivers = range(job.senders), range(job.senders, job.span.world)
    others = receivers if job.rank in senders else senders
    job.keep["messages"] = [
        (view, other)
        for i, parameter in enumerate(parameters)
        for other in others
        if (view := _overlap(local(parameter), boxes[job.rank][i], boxes[other][i])) is not None
    ]


def _overlap(tensor, mine, other):
    start = [max(a, b) for a, b in zip(mine[0], other[0], strict=True)]
    ends = [min(a + n, b + m) for a, n, b, m in zip(*mine, *other, strict=True)]
    size = [end - begin for begin, end in zip(start, ends, strict=True)]
    if any(length <= 0 for length in size):
        return None
    return cut(tensor, [at - own for at, own in zip(start, mine[0], strict=True)], size)


def send(job: SyncJob) -> None:
    _prepare(job)
    works = deque()
    for view, other in job.keep["messages"]:
        works.append(job.span.group.send([view.contiguous()], other, 0))
        if len(works) > IN_FLIGHT:
            works.popleft().wait()
    for work in works:
        work.wait()


def receive(job: SyncJob) -> None:
    _prepare(job)
    works = deque()

    def finish() -> None:
        work, part, view = works.popleft()
        work.wait()
        if part is not view:
            view.copy_(part)

    for view, other in job.keep["messages"]:
        part = view if view.is_contiguous() else view.new_empty(view.shape)
        works.append((job.span.group.recv([part], other, 0), part, view))
        if len(works) > IN_FLIGHT:
            finish()
    while works:
        finish()
