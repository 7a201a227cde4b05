"""Joining a generation: the ranks of both jobs find one another, tell each other what they have or need, and plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

from torch.distributed.distributed_c10d import PrefixStore, Store

from epload.checkpoint.manifest import Manifest
from epload.core.attempt import Attempt
from epload.errors import LoadError
from epload.planning.exchange import plan_exchange
from epload.planning.holdings import Holdings
from epload.planning.schedule import SYNC_WAVE_BYTES
from epload.planning.streams import ExchangePlan, Members
from epload.ranks.contents import fetch, fetch_holdings, publish, publish_holdings
from epload.ranks.control import Control
from epload.ranks.membership import first_difference, group_equal
from epload.ranks.rendezvous import rendezvous
from epload.sync.devices import DeviceAccess, find_reach


class JoinMessage(NamedTuple):
    """A rank's message as it joins a generation."""

    node: str
    """Equal on ranks that share a machine's memory, and send or receive together."""
    verify: bool
    access: DeviceAccess
    stages: bool = False
    """True if its node keeps a whole version in host memory."""
    holdings: Sequence[str] = ()
    """Names in the store of the rank's holdings."""
    targets: str = ""
    """Name of the targets of a sender's holdings, for those that copy out of its memory; empty if nobody can."""


def join(
    store: Store,
    timeout: timedelta,
    number: int,
    ranks: int,
    rank: int,
    message: JoinMessage,
    holdings: Holdings,
    failure: Exception | None,
    check: Callable[[], None],
) -> tuple[Control, list[JoinMessage]]:
    """Joins a generation; the arguments are those of :class:`~epload.sync.generation.Generation`, and ``ranks`` is their number.
    Collective. Returns the control of the generation, and the messages of all ranks.

    Raises:
        LoadError: a rank cannot take part, or has not come in time; the same on every rank.
        ValueError: ranks differ in ``verify``; on every rank.
    """
    targets = publish(store, holdings.encode_targets()) if message.access.handle else ""
    message = message._replace(holdings=publish_holdings(store, holdings), targets=targets)
    name = f"generation/{number}"
    control, views = rendezvous(
        PrefixStore(name, store), tuple(range(ranks)), rank, timeout, failure, message, _by_rank, message.node, name, check
    )
    return control, [JoinMessage(node, verify, DeviceAccess(*access), *rest) for node, verify, access, *rest in views]


def _by_rank(views: dict[int, list[Any]]) -> list[list[Any]]:
    """Returns the messages of all ranks. Raises ValueError if they differ in ``verify``."""
    first = JoinMessage(*views[0]).verify
    for rank, view in views.items():
        if (verify := JoinMessage(*view).verify) != first:
            raise ValueError(
                f"expected the same verify= from sender and receivers, got {first!r} on rank 0 and {verify!r} on rank {rank}"
            )
    return [views[rank] for rank in sorted(views)]


def find_members(senders: int, messages: Sequence[JoinMessage]) -> Members:
    """Returns the nodes of both jobs. Ranks that may open memory of senders on their machine are a node, apart from those there
    that cannot."""
    shared = {(m.access.machine, m.access.memory) for m in messages if m.access.handle}
    of_senders = {rank: message.node for rank, message in enumerate(messages[:senders])}
    of_receivers = {
        rank: f"{m.node} {(m.access.machine, m.access.memory) in shared}" for rank, m in enumerate(messages[senders:], senders)
    }
    return Members(*(tuple(map(tuple, group_equal(of_rank))) for of_rank in (of_senders, of_receivers)))


def plan_together(
    store: Store,
    control: Control,
    number: int,
    members: Members,
    messages: Sequence[JoinMessage],
    manifest: Manifest,
    holdings: Holdings,
    base: Holdings | None,
) -> tuple[ExchangePlan, dict[int, Holdings], str]:
    """Plans a generation. Collective over its ranks.

    Args:
        base: what this rank's node has of the version before; None if nothing.

    Returns:
        This rank's plan; the holdings of the senders whose memory its node can open; why a sender's memory on the same machine
        cannot be opened, empty if it can.

    Raises:
        LoadError: a receiver needs what no sender has; the same on every rank.
    """
    control.doing = "plans the exchange"
    reach, not_pulled = find_reach(control, members, [message.access for message in messages])
    node = next((i for i, ranks in enumerate(members.nodes) if control.rank in ranks), -1)
    lenders: dict[int, Holdings] = {}

    def plan() -> ExchangePlan:
        of_ranks = fetch_holdings(store, [message.holdings for message in messages], control.timeout)
        for sender in reach.get(node, ()):
            lenders[sender] = of_ranks[sender].with_targets(fetch(store, messages[sender].targets, control.timeout))
        return plan_exchange(
            manifest, members, dict(enumerate(of_ranks)), control.rank, holdings, SYNC_WAVE_BYTES, f"generation {number}",
            reach, lenders if messages[control.rank].stages else None, base,
        )  # fmt: skip

    planned = Attempt(plan)
    fingerprint = planned.result and planned.result.fingerprint.hex()
    control.agree("planning the exchange", planned.failure, fingerprint, _check_equal)
    return planned.value, lenders, not_pulled


def _check_equal(fingerprints: dict[int, str]) -> None:
    if differ := first_difference(fingerprints):
        raise LoadError(
            f"ranks {differ[0]} and {differ[1]} have planned different exchanges of the same tensors; this is a bug in epload"
        )
