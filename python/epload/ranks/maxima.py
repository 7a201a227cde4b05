"""The largest values of all ranks: the one collective that quantizing needs."""

from __future__ import annotations

import threading
import time

import torch
from torch import Tensor

from epload.core.attempt import Attempt
from epload.errors import LoadError, RemoteFailure, WaitTimeout, message_of
from epload.ranks.control import Control
from epload.ranks.groups import Group
from epload.ranks.membership import first_difference
from epload.ranks.topology import Topology

_MIN_POLL, _MAX_POLL = 0.0005, 0.02
"""Seconds between two checks; doubles in between."""


def reduce_maxima(topology: Topology, own: Attempt[Tensor]) -> Tensor:
    """Returns the elementwise maximum over all ranks, by all-reduces over gloo: in each node, among the nodes, and in each node
    again, as a group of all ranks would connect each with each. Collective, within a load: an agreement round comes first, so
    that no rank enters it unless all do.

    Args:
        own: int32 on CPU [n], n equal on all ranks; or why this rank has none, which all ranks raise.

    Raises:
        LoadError: the ranks have tensors of different sizes, or one ended meanwhile; the same on every rank.
    """
    control, groups = topology.control, topology.host_groups
    count = len(own.value) if own.failure is None else 0
    control.agree("quantizing", own.failure, count, _check_equal)
    if not count or len(topology.ranks) == 1:
        return own.value
    leaders = tuple(node[0] for node in topology.nodes)
    groups.make("maxima", topology.nodes, (leaders,))
    steps = [topology.node, leaders, topology.node] if len(leaders) > 1 else [topology.node]
    reduced = own.value.clone()
    try:
        for ranks in steps:
            if topology.rank in ranks and len(ranks) > 1:
                _all_reduce(control, groups.group(ranks), reduced)
        control.agree("exchanging maxima", None)  # all have the group, or none
    except BaseException:
        groups.clear()
        raise
    return reduced


def _all_reduce(control: Control, group: Group, values: Tensor) -> None:
    """Raises RemoteFailure if a rank fails or ends meanwhile, WaitTimeout if one does not come."""
    stop = threading.Event()
    with control.stopping(stop.set):
        control.doing = "exchanges the maxima of blocks"
        work, pause = group.all_reduce_maximum(values), _MIN_POLL
        until = time.monotonic() + control.timeout.total_seconds()
        while not work.is_completed():
            if stop.wait(pause):
                raise RemoteFailure("another rank failed")
            if time.monotonic() >= until:
                raise WaitTimeout(f"the maxima of {len(values)} blocks did not arrive within {control.timeout}")
            pause = min(2 * pause, _MAX_POLL)
        try:
            work.wait()
        except RuntimeError as error:  # a rank has ended, which its node's watch names
            raise RemoteFailure(message_of(error)) from error


def _check_equal(counts: dict[int, int]) -> None:
    if differ := first_difference(counts):
        first, rank = differ
        raise LoadError(
            f"rank {first} quantizes {counts[first]} blocks that ranks share, rank {rank} {counts[rank]}; use one model on all "
            "ranks"
        )


def as_integers(maxima: Tensor) -> Tensor:
    """Returns float32 values of at least 0, or NaN, as integers of the same order, in which NaN is the largest."""
    return maxima.contiguous().view(torch.int32) & 0x7FFFFFFF  # a NaN may have a sign
