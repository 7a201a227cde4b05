"""``epload.coalesced_bcast``: the native op with a topology, argument checks and agreement between ranks."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from contextlib import nullcontext

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from epload.core.attempt import Attempt
from epload.errors import ManifestMismatch, kind_of, make_error, message_of
from epload.model.devices import check_backend, check_stream
from epload.model.memory import has_internal_overlap, keeps_writes
from epload.native import ops
from epload.planning.schedule import Algorithm
from epload.ranks.control import Control
from epload.ranks.single_flight import Call, exclusive, inside_load
from epload.ranks.topology import Topology, as_topology

DEFAULT_BUCKET_BYTES = 64 << 20
DEFAULT_BUCKET_BYTES_ON_CPU = 16 << 20
"""Smaller, because staging memory on CPU comes from malloc: glibc maps and zeroes blocks over 32 MiB anew in every call."""


def coalesced_bcast(
    tensors: Iterable[Tensor],
    src: int | None = None,
    topology: Topology | None = None,
    *,
    bucket_bytes: int | None = None,
    algorithm: Algorithm = "two_level",
    stream: torch.Stream | None = None,
    check: bool = True,
) -> None:
    """Broadcasts tensors in place from one rank to all ranks of the topology, packed into buckets.

    Collective over the topology's ranks. The call returns when this rank's tensors hold the source's values, or on a device,
    when the work that writes them is queued on ``stream``. No gradient is recorded.

    Args:
        tensors: dense plain tensors or parameters of any shape and dtype, including 0-d and empty ones, all on one device.
            Every rank passes the same shapes and dtypes in the same order. Strides may differ. Tensors that share memory on a
            receiving rank have to share it on the source, too.
        src: global rank whose values are sent; the topology's first if None.
        topology: the ranks that take part and their nodes. If None, the nodes of the whole job, discovered at the first call.
        bucket_bytes: maximum bytes of a bucket, from 16 to 2**60. A larger tensor is split. Default: 64 MiB, and 16 MiB for
            CPU tensors.
        algorithm: ``"two_level"`` sends each bucket along the leaders of the nodes and then inside each node. ``"striped"``
            splits each bucket among the ranks of a node, each of which sends its part to its counterpart on the next node;
            if node sizes differ, ``"two_level"`` is used instead.
        stream: the stream for all device work. Default: the current stream. Must be None for CPU tensors.
        check: compare ``src``, ``bucket_bytes``, ``algorithm`` and the tensors' shapes, dtypes and types of device on all ranks.
            Ranks that disagree would otherwise hang or exchange wrong data. A list that all ranks have agreed on is not compared
            again, so if one rank later passes another list, only the timeout detects it.

    Raises:
        TypeError: an item is not a tensor, is a DTensor, or hands out copies of its elements, or another argument is of another
            type. Nothing has moved.
        ValueError: another argument is wrong. Nothing has moved.
        ManifestMismatch: the ranks disagree. Nothing has moved.
        LoadError: another thread of this process is in a load or a broadcast, or a rank failed or exited.

    Example::

        topology = epload.Topology.from_nodes([[0, 1], [2, 3]])
        epload.coalesced_bcast(model.parameters(), src=0, topology=topology)
    """
    topology = as_topology(topology)
    call, inside = Call("coalesced_bcast()", topology), inside_load(topology)
    with nullcontext() if inside else exclusive(call):
        try:
            _broadcast(list(tensors), src, topology, bucket_bytes, algorithm, stream, check, watched=not inside)
        except BaseException as error:
            # The others may be in the broadcast: none is to be paired with this rank's next one.
            control = topology.control
            control.agreed.clear()
            if inside:
                raise
            failure = control.failure if check else None
            try:  # first: those whose connections end then raise the reason
                first = control.fail(error) if check and failure is None else None
            finally:
                if failure is None or not failure.clean:  # else all have stopped alike, and the call before may go on
                    topology.watched_groups.clear()
            if first is not None and first.rank != control.rank and isinstance(error, Exception):
                raise first.error() from error
            raise


def _broadcast(
    tensors: list[Tensor],
    src: int | None,
    topology: Topology,
    bucket_bytes: int | None,
    algorithm: str,
    stream: torch.Stream | None,
    check: bool,
    watched: bool,
) -> None:
    src = topology.ranks[0] if src is None else src
    options = str((src, bucket_bytes, algorithm))
    if bucket_bytes is None:
        on_cpu = bool(tensors) and isinstance(tensors[0], Tensor) and tensors[0].device.type == "cpu"
        bucket_bytes = DEFAULT_BUCKET_BYTES_ON_CPU if on_cpu else DEFAULT_BUCKET_BYTES
    failure = Attempt(lambda: _check_arguments(tensors, src, topology, bucket_bytes, algorithm, stream)).failure
    if check:
        _check_same_list(topology.control, tensors, options, failure)
    elif failure is not None:
        raise failure
    if algorithm == "striped" and not topology.even:
        algorithm = "two_level"
    route = topology.route(src, algorithm, watched)
    ops.coalesced_bcast(tensors, src, route.inter_group, route.intra_group, bucket_bytes, algorithm, stream, leader=route.leader)


def _check_arguments(
    tensors: list[Tensor], src: int, topology: Topology, bucket_bytes: int, algorithm: str, stream: torch.Stream | None
) -> None:
    """Checks what the op checks too, early enough to tell the other ranks before they wait in a broadcast."""
    for i, tensor in enumerate(tensors):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"expected tensors, but item {i} is a {type(tensor).__name__}")
        if isinstance(tensor, DTensor):
            raise TypeError(f"expected plain tensors, but tensor {i} is a DTensor; pass tensor.to_local()")
        if not keeps_writes(tensor):
            kind = type(tensor).__name__
            raise TypeError(f"tensor {i} is a {kind}, which hands out copies of its elements; pass the tensors that it wraps")
        if tensor.is_conj() or tensor.is_neg():  # which torch itself refuses otherwise
            raise ValueError(f"tensor {i} is a lazy conjugate or negation; pass tensor.resolve_conj().resolve_neg()")
        strided = tensor.layout == torch.strided and not tensor.is_nested and not tensor.is_contiguous()
        if strided and topology.rank != src and has_internal_overlap(tensor):
            raise ValueError(
                f"tensor {i} has elements that share memory, and cannot hold what it receives; pass one that is not expanded"
            )
    if not isinstance(bucket_bytes, int) or not isinstance(algorithm, str) or not (stream is None or hasattr(stream, "device")):
        raise TypeError(
            "expected bucket_bytes to be an int, algorithm a str and stream a torch.Stream, got "
            f"{bucket_bytes!r}, {algorithm!r} and {stream!r}"
        )
    check_stream(stream)
    topology.check_source(src)
    if tensors:
        check_backend(topology.group, tensors[0].device)
    # As in a job of one rank: this checks all other arguments, and moves nothing.
    ops.coalesced_bcast(tensors, src, "", "", bucket_bytes, algorithm, stream)


def _refuse(control: Control, failure: Exception) -> Exception:
    """Publishes that this rank takes no part in the call, and why. Returns the error that it raises."""
    failure.__traceback__ = None  # its frames would keep the tensors until a garbage collection
    refused = make_error(kind_of(failure), f"{message_of(failure)} [rank {control.rank}]")
    control.abort(refused)
    return refused


def _check_same_list(control: Control, tensors: list[Tensor], options: str, failure: Exception | None) -> None:
    """Raises ``failure`` on all ranks if a rank has one, else ManifestMismatch if their options or tensors differ."""
    if failure is not None and control.agreed:  # the others may be in the broadcast, and come to no round
        raise _refuse(control, failure) from None
    lines = [options, *(f"{str(t.dtype)[6:]} {list(t.shape)} {t.device.type}" for t in tensors)] if failure is None else []
    digest = hashlib.blake2b(json.dumps(lines).encode(), digest_size=16).hexdigest()
    if failure is None and digest in control.agreed:
        return
    first = control.coordinator

    def differing_ranks(digests: dict[int, str]) -> list[int]:
        return [rank for rank, digest in digests.items() if digest != digests[first]]

    with control.guard():
        differing = control.agree("coalesced_bcast", failure, digest, differing_ranks)
        if differing:
            view = lines if control.rank in (first, differing[0]) else None
            difference = control.agree("coalesced_bcast", None, view, _first_difference)
            raise ManifestMismatch(f"coalesced_bcast: expected the same arguments on every rank, but {difference}")
    control.agreed.add(digest)


def _first_difference(views: dict[int, list[str] | None]) -> str:
    """``views``: the options and then the tensors of two ranks, one text each; None of all others."""
    (first, a), (other, b) = ((rank, view) for rank, view in views.items() if view)
    for i, (of_first, of_other) in enumerate(zip(a, b, strict=False)):
        if of_first != of_other:
            what = "(src, bucket_bytes, algorithm) is" if i == 0 else f"tensor {i - 1} is"
            return f"{what} {of_first} on rank {first} and {of_other} on rank {other}"
    return f"rank {first} has {len(a) - 1} tensors and rank {other} has {len(b) - 1}"
