"""Plans how the encoded changes of a version move: those of consecutive buckets of a stream are one message. Pure."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from epload.core.copy_table import CopyTable
from epload.planning.buckets import HEADER_BYTES
from epload.planning.streams import ExchangeBucket, ExchangePlan, Stream
from epload.planning.waves import group_buckets

_ROOM = HEADER_BYTES + 64
"""The most that a message takes in a staging buffer beyond its payload, in bytes."""


class ChangedBucket(NamedTuple):
    """A bucket that its sender has compared with the base."""

    stream: int
    """Number of the stream among the sender's."""
    wave: int
    elements: int
    """Elements that have changed."""
    nbytes: int
    """Bytes of the encoded changes; 0 if there are none."""
    checksum: int
    """Checksum of the bucket behind its header as it is to become; 0 if none was computed."""


class MessagePart(NamedTuple):
    """The changes of one bucket."""

    bucket: int
    """Number of the bucket in the version's plan."""
    begin: int
    """Offset at which they begin in the message, in bytes."""
    end: int
    checksum: int


@dataclass(frozen=True, eq=False)
class ChangesPlan:
    """The messages of one version's changes, as one rank sees them."""

    version: ExchangePlan
    """The plan of the version's buckets."""
    plan: ExchangePlan
    """The plan whose buckets are the messages. They have no copies."""
    parts: Sequence[Sequence[MessagePart]]
    """The parts of each message."""
    unchanged: Mapping[int, int]
    """The checksums of the buckets that do not change, by their numbers in the version's plan."""
    elements: int
    """Number of elements that have changed, on all senders. Equal on all ranks."""
    staging_bytes: int
    """No wave takes more of a staging buffer, on any rank. Equal on all ranks."""


def plan_changes(plan: ExchangePlan, changed: Mapping[int, Sequence[ChangedBucket]], wave_bytes: int) -> ChangesPlan:
    """
    Args:
        plan: of the version's buckets; see :meth:`ExchangePlan.toward`.
        changed: all buckets of each sender's plan, in its order.
        wave_bytes: of all messages of a wave together, unless one bucket's changes have more.
    """
    totals: dict[int, int] = defaultdict(int)
    for buckets in changed.values():
        for each in buckets:
            totals[each.wave] += each.nbytes + _ROOM if each.nbytes else 0
    waves = sorted(totals)
    groups = group_buckets([totals[wave] for wave in waves], wave_bytes)
    group_of = {waves[i]: number for number, group in enumerate(groups) for i in group}
    numbers = {(b.stream.owner, b.stream.number, b.wave): i for i, b in enumerate(plan.buckets)}
    parts: dict[tuple[int, Stream], list[MessagePart]] = defaultdict(list)
    unchanged = {}
    for owner, buckets in changed.items():
        for each in buckets:
            if (number := numbers.get((owner, each.stream, each.wave))) is None:
                continue
            if each.nbytes:
                of_message = parts[group_of[each.wave], plan.buckets[number].stream]
                begin = of_message[-1].end if of_message else HEADER_BYTES
                of_message.append(MessagePart(number, begin, begin + each.nbytes, each.checksum))
            else:
                unchanged[number] = each.checksum
    none = torch.zeros(0, dtype=torch.int64, device="cpu")
    copies, messages = CopyTable.of(none, dims=1), []
    for (group, stream), of_message in parts.items():
        ends = plan.buckets[of_message[0].bucket].tensors[0], plan.buckets[of_message[-1].bucket].tensors[1]
        messages.append((ExchangeBucket(of_message[-1].end, copies, stream, group, ends, none), of_message))
    messages.sort(key=lambda message: message[0].order(plan.node))
    digest = hashlib.blake2b(repr(sorted(changed.items())).encode(), digest_size=32, key=plan.fingerprint)
    return ChangesPlan(
        plan,
        replace(plan, buckets=[bucket for bucket, _ in messages], fingerprint=digest.digest(), layout=None),
        [of_message for _, of_message in messages],
        unchanged,
        sum(each.elements for buckets in changed.values() for each in buckets),
        max((sum(totals[waves[i]] for i in group) for group in groups), default=0),
    )
