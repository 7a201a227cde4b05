"""epload: nodes of the rollout job that join get the version that the first one has from it, while the trainer does nothing."""

from time import perf_counter

import epload
from sync_peers import SyncJob

TITLE = "epload, engines that join"
LIMIT = 120.0


def prepare(job: SyncJob) -> None:
    """The first node gets the version; the others have none."""
    if job.rank < job.senders:
        if "sender" not in job.keep:
            sender = epload.WeightSender(
                job.model, (job.host, 0), receivers=len(job.nodes[0]), topology=job.topology, timeout=LIMIT
            )
            job.keep["sender"] = job.exit.enter_context(sender)
            job.span.store.set(f"address of {job.peer}", sender.address)
        job.span.barrier()
        job.keep["sender"].send_weights(job.version)
        return
    number, node = next((i, node) for i, node in enumerate(job.nodes) if job.rank in node)
    if number and "receiver" in job.keep:
        job.keep.pop("receiver").close()
    job.span.barrier()
    if "receiver" not in job.keep:
        engine = epload.EngineRank(f"{number} of {job.version if number else 0}", node.index(job.rank), len(node))
        address = job.span.store.get(f"address of {job.peer}").decode()
        job.keep["receiver"] = epload.WeightReceiver(
            job.model, address, engine=engine, node=str(number), timeout=LIMIT, stage="host"
        )
        job.exit.enter_context(job.keep["receiver"])
    if not number:
        job.keep["report"] = job.keep["receiver"].receive_weights(job.version)


def send(job: SyncJob) -> None:
    """Nothing: it trains."""


def receive(job: SyncJob) -> None:
    if job.rank not in job.nodes[0]:
        job.keep["report"] = job.keep["receiver"].receive_weights(job.version)


def commit(job: SyncJob) -> None:
    began = perf_counter()
    job.keep["receiver"].commit()
    job.phases["commit"] = perf_counter() - began
