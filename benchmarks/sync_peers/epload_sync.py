"""epload: into the model's own memory, or into the node's memory first."""

from time import perf_counter

import epload
from sync_peers import SyncJob

TITLE = "epload"
MODES = {"stage=none": {"stage": "none"}, "stage=host": {"stage": "host"}}
LIMIT = 120.0


def send(job: SyncJob, stage: str) -> None:
    if "sender" not in job.keep:
        sender = epload.WeightSender(
            job.model, (job.host, 0), receivers=job.receivers, topology=job.topology, timeout=LIMIT
        )
        job.keep["sender"] = job.exit.enter_context(sender)
        job.span.store.set(f"address of {stage}", sender.address)
    job.keep["report"] = job.keep["sender"].send_weights(job.version)


def receive(job: SyncJob, stage: str) -> None:
    if "receiver" not in job.keep:
        address = job.span.store.get(f"address of {stage}").decode()
        receiver = epload.WeightReceiver(job.model, address, topology=job.topology, timeout=LIMIT, stage=stage)
        job.keep["receiver"] = job.exit.enter_context(receiver)
    job.keep["report"] = job.keep["receiver"].receive_weights(job.version)


def commit(job: SyncJob) -> None:
    began = perf_counter()
    job.keep["receiver"].commit()
    job.phases["commit"] = perf_counter() - began
