"""epload: into the model's own memory, or into the node's memory first; in full, or what has changed."""

from time import perf_counter

import epload
from sync_peers import SyncJob

TITLE = "epload"
DELTA = {"stage": "host", "delta": "auto"}
MODES = {
    "stage=none": {"stage": "none"},
    "stage=host": {"stage": "host"},
    "delta, all changed": DELTA,
    "delta, 2 % changed": DELTA,
    "delta, an AdamW step": DELTA,
}
CHANGES = {"delta, 2 % changed": "2 %", "delta, an AdamW step": "adamw"}
LIMIT = 120.0


def send(job: SyncJob, stage: str, delta: str = "off") -> None:
    if "sender" not in job.keep:
        sender = epload.WeightSender(
            job.model, (job.host, 0), receivers=job.receivers, topology=job.topology, timeout=LIMIT, delta=delta
        )
        job.keep["sender"] = job.exit.enter_context(sender)
        job.span.store.set(f"address of {job.peer}", sender.address)
    job.keep["report"] = job.keep["sender"].send_weights(job.version)


def receive(job: SyncJob, stage: str, delta: str = "off") -> None:
    if "receiver" not in job.keep:
        address = job.span.store.get(f"address of {job.peer}").decode()
        receiver = epload.WeightReceiver(job.model, address, topology=job.topology, timeout=LIMIT, stage=stage)
        job.keep["receiver"] = job.exit.enter_context(receiver)
    job.keep["report"] = job.keep["receiver"].receive_weights(job.version)


def commit(job: SyncJob) -> None:
    began = perf_counter()
    job.keep["receiver"].commit()
    job.phases["commit"] = perf_counter() - began
