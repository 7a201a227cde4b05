"""epload, which quantizes the trainer's weights to fp8 in blocks, as engines that serve fp8 have them, before they are sent.

Each version counts only if weights and scales are bit for bit what transformers makes of the whole weight.
"""

from collections.abc import Iterator
from types import SimpleNamespace

import torch
from torch.distributed.tensor import DTensor
from transformers.integrations.finegrained_fp8 import Fp8Quantize

import epload
from epload.mapping import Quantize
from sync_peers import SyncJob

TITLE = "epload, fp8"
FILLS = False
BLOCK = (16, 64)
"""The reference takes no weight with a part of a block."""
LIMIT = 120.0


def send(job: SyncJob) -> None:
    if "sender" not in job.keep:
        rule = Quantize({"quant_method": "fp8", "weight_block_size": BLOCK}, weights=(r"_proj\.weight$",))
        sender = epload.WeightSender(
            job.model, (job.host, 0), receivers=job.receivers, topology=job.topology, timeout=LIMIT, mapping=rule
        )
        job.keep["sender"] = job.exit.enter_context(sender)
        job.span.store.set(f"address of {job.peer}", sender.address)
    job.keep["report"] = job.keep["sender"].send_weights(job.version)


def receive(job: SyncJob) -> Iterator[str]:
    """Returns the names of tensors that are wrong, found once they are asked for; the model then has the trainer's weights."""
    if "receiver" not in job.keep:
        address = job.span.store.get(f"address of {job.peer}").decode()
        receiver = epload.WeightReceiver(None, address, topology=job.topology, timeout=LIMIT)
        job.keep["receiver"] = job.exit.enter_context(receiver)
    job.keep["report"] = job.keep["receiver"].receive_weights(job.version)
    return _wrong(job)


def _wrong(job: SyncJob) -> Iterator[str]:
    settings = SimpleNamespace(weight_block_size=BLOCK, scale_fmt="float")
    reference = Fp8Quantize(SimpleNamespace(quantization_config=settings))
    received = dict(job.keep["receiver"].tensors())
    for name, parameter in job.model.named_parameters():
        full = parameter.detach().full_tensor() if isinstance(parameter, DTensor) else parameter.detach()
        scales = f"{name}_scale_inv"
        expected = reference.convert({name: full}) if scales in received else {name: full}
        for key, tensor in expected.items():
            if not torch.equal(received.pop(key).view(torch.uint8), tensor.contiguous().view(torch.uint8)):
                yield key
    yield from received
