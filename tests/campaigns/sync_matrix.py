"""Every layout of a trainer with every layout of an engine, and each with every stage, delta, verify and format of fp8, judged
bit for bit by what the libraries of reference make of the trainer's weights.

    python -m campaigns.sync_matrix
    python -m campaigns.sync_matrix fsdp tp1     # one pair: the trainer's layout, the engine's
"""

from __future__ import annotations

import sys
import time
from itertools import product
from typing import NamedTuple

import torch
from torch import nn

from epload.mapping import Quantize
from support.checks import fill
from support.fp8 import Tree
from support.jobs import Job, Meeting, run
from support.quantized import FORMATS, LAYOUTS, Trainer, expected, same, sharded, with_skipped
from support.small_syncs import many_waves, receiving, sending, take

VERSIONS = (1, 2, 3, 4)
PERIOD = 7
"""An element changes in every so many versions."""


class Case(NamedTuple):
    stage: str
    delta: str
    verify: bool
    format: str
    """One of ``FORMATS``; empty for the trainer's own dtype."""


CASES = [
    Case(*case)
    for case in product(("host", "device", "none"), ("off", "auto", "always"), (False, True), ("", "128 x 128", "channel"))
]


def weights(version: int) -> nn.Module:
    """The trainer's whole model at a version."""
    model = Trainer()
    with torch.no_grad():
        for parameter in model.parameters():
            for past in range(1, version + 1):
                parameter.view(-1)[past % PERIOD :: PERIOD] *= 1 + 0.37 * past
    return model


def send(rank: int, meeting: Meeting, layout: str, receivers: int) -> None:
    for number, case in enumerate(CASES):
        mapping = Quantize(with_skipped(FORMATS[case.format])) if case.format else "auto"
        with many_waves():
            model = sharded(Trainer(), layout)
            options = {"mapping": mapping, "verify": case.verify, "delta": case.delta}
            with sending(meeting, model, receivers, where=f"address-{number}", **options) as sender:
                for version in VERSIONS:
                    fill(model, weights(version).state_dict())
                    report = sender.send_weights(version)
                    may = case.stage == "host" and case.delta != "off" and version > VERSIONS[0]
                    if not (may and case.delta == "auto" and case.format):  # another maximum changes a whole block
                        assert (report.changed is not None) == may, (case, report)


def receive(rank: int, meeting: Meeting, layout: str) -> int:
    """Returns the number of tensors that were compared."""
    compared = 0
    for number, case in enumerate(CASES):
        with many_waves():
            like = expected(Trainer(), FORMATS[case.format]) if case.format else dict(Trainer().state_dict())
            model = sharded(Tree(like).to_empty(device="cpu"), layout)
            options = {"stage": case.stage, "verify": case.verify}
            with receiving(meeting, model, where=f"address-{number}", **options) as receiver:
                for version in VERSIONS:
                    take(receiver, version)
                    whole = weights(version)
                    values = expected(whole, FORMATS[case.format]) if case.format else whole.state_dict()
                    for name, tensor in model.state_dict().items():
                        assert same(tensor, values[name]), f"{case}, version {version}: {name} differs"
                        compared += 1
    return compared


def main() -> None:
    pairs = [tuple(sys.argv[1:3])] if sys.argv[1:] else [*product(LAYOUTS, LAYOUTS)]
    for trainer, engine in pairs:
        began = time.monotonic()
        jobs = [Job(LAYOUTS[trainer], send, (trainer, LAYOUTS[engine])), Job(LAYOUTS[engine], receive, (engine,))]
        compared = run(jobs, limit=900)[1]
        print(
            f"{trainer} to {engine}: {len(CASES)} cases, {sum(compared)} shards, {time.monotonic() - began:.0f} s",
            flush=True,
        )


if __name__ == "__main__":
    main()
