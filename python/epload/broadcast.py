"""The op with a topology: ``epload.coalesced_bcast``."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from epload.cluster.single_flight import Call, Refused, exclusive, inside_load
from epload.cluster.topology import Topology
from epload.control.control import Control
from epload.errors import ManifestMismatch
from epload.model.devices import check_backend, check_stream
from epload.native import ops

DEFAULT_BUCKET_BYTES = 64 << 20
DEFAULT_BUCKET_BYTES_ON_CPU = 16 << 20
"""Less, as staging memory there is malloc's: what is larger than glibc keeps (32 MiB) is mapped and zeroed at every call."""
ALGORITHMS = ("two_level", "striped", "flat")


def coalesced_bcast(
    tensors: Iterable[Tensor],
    src: int = 0,
    topology: Topology | None = None,
    *,
    bucket_bytes: int | None = None,
    algorithm: str = "two_level",
    stream: torch.Stream | None = None,
    check: bool = True,
) -> None:
    """Broadcasts tensors in place from global rank ``src`` to all ranks of the topology, many to a message.

    Args:
        tensors: the same list on every rank (shapes and dtypes; strides may differ). Any dtype, 0-d and empty ones too,
            parameters too (no gradient is recorded), all on one device.
        src: global rank whose values are sent.
        topology: discovered over the whole job if None, which is itself a small exchange.
        bucket_bytes: bytes a message holds at most; a larger tensor is split. By default 64 MiB, and 16 MiB on CPU.
        algorithm: ``"two_level"`` (between the leaders, then inside each node), ``"striped"`` (every rank of a node passes its
            part on to the same rank of the other nodes; two_level where node sizes differ) or ``"flat"`` (one group).
        stream: where all device work goes; the current stream if None. Not for CPU tensors.
        check: compare the lists of all ranks the first time a list is seen; a mismatch would otherwise hang or corrupt.
            Once a list has been agreed on it is not compared again, so a rank that later passes another list while the
            rest repeat theirs is found out by the timeout only.

    Raises:
        TypeError: a DTensor was passed.
        ValueError: any other wrong argument. Nothing has moved.
        ManifestMismatch: the ranks' lists differ. Nothing has moved.
        LoadError: another thread of this process is in a load or a broadcast; or a rank has failed or ended before data moved.
    """
    tensors = list(tensors)
    topology = topology if topology is not None else Topology.default()
    asked = (src, bucket_bytes, algorithm)
    if bucket_bytes is None:
        on_cpu = bool(tensors) and isinstance(tensors[0], Tensor) and tensors[0].device.type == "cpu"
        bucket_bytes = DEFAULT_BUCKET_BYTES_ON_CPU if on_cpu else DEFAULT_BUCKET_BYTES

    def send() -> None:
        failure: Exception | None = None
        try:
            _check_arguments(tensors, src, topology, bucket_bytes, algorithm, stream)
        except (TypeError, ValueError) as error:
            failure = error
        if check:
            _check_same_list(topology.control, tensors, asked, failure)
        elif failure is not None:
            raise failure
        sent = "two_level" if algorithm == "striped" and not topology.even else algorithm
        routes = {"flat": topology.flat_route, "striped": topology.striped_route, "two_level": topology.route}
        route = routes[sent](src)
        leader = -1 if algorithm == "flat" else route.leader
        ops.coalesced_bcast(
            tensors, src, route.inter_group, route.intra_group, bucket_bytes, sent, stream, leader=leader
        )

    if inside_load(topology):
        send()
        return
    try:
        with exclusive(Call("coalesced_bcast()", topology)):
            send()
            return
    except Refused as refused:
        error = refused.failure.error()
    raise error


def _check_arguments(
    tensors: list[Tensor], src: int, topology: Topology, bucket_bytes: int, algorithm: str, stream: torch.Stream | None
) -> None:
    """What the op would refuse too; found here, it can be told to the other ranks before they wait in a broadcast."""
    for i, tensor in enumerate(tensors):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"expected tensors, item {i} is a {type(tensor).__name__}")
        if isinstance(tensor, DTensor):
            raise TypeError(f"expected plain tensors, tensor {i} is a DTensor; pass its to_local()")
        if tensor.device != tensors[0].device:
            raise ValueError(
                f"expected all tensors on one device, tensor 0 is on {tensors[0].device} and tensor {i} on {tensor.device}"
            )
        if tensor.is_meta:
            raise ValueError(f"tensor {i} is on meta and holds no data; materialize it first (to_empty)")
        if tensor.layout != torch.strided or tensor.is_quantized:
            raise ValueError(f"expected dense strided tensors, tensor {i} is {tensor.layout} of {tensor.dtype}")
        if tensor.is_conj() or tensor.is_neg():
            raise ValueError(f"tensor {i} is a lazy conjugate or negation; pass resolve_conj() / resolve_neg() of it")
        if tensor.numel() and tensor.untyped_storage().nbytes() < _reach(tensor):
            raise ValueError(f"tensor {i} of shape {list(tensor.shape)} lacks storage (was it freed by FSDP?)")
    check_stream(stream)
    if stream is not None and tensors and stream.device != tensors[0].device:
        raise ValueError(f"expected a stream of {tensors[0].device}, where the tensors are, got one of {stream.device}")
    if stream is not None and tensors and tensors[0].device.type == "cpu":
        raise ValueError("expected stream=None for tensors on cpu")
    if algorithm not in ALGORITHMS:
        raise ValueError(f"expected algorithm to be one of {', '.join(ALGORITHMS)}, got {algorithm!r}")
    if not 16 <= bucket_bytes <= 1 << 60:
        raise ValueError(f"expected bucket_bytes from 16 to 2**60, got {bucket_bytes}")
    topology.check_source(src)
    if tensors:
        check_backend(topology.group, tensors[0].device)


def _reach(tensor: Tensor) -> int:
    """Bytes of storage that the tensor's last element needs."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return int(tensor.storage_offset() + last + 1) * tensor.element_size()


def _check_same_list(
    control: Control, tensors: list[Tensor], options: tuple[object, ...], failure: Exception | None
) -> None:
    lines = [] if failure else [f"{str(t.dtype)[6:]} {list(t.shape)}" for t in tensors]
    digest = hashlib.blake2b(json.dumps([options, lines]).encode(), digest_size=16)
    key = digest.digest()
    if failure is None and key in control.agreed:
        return

    with control.guard():
        _compare_lists(control, [str(options), *lines], digest.hexdigest(), failure)
    control.agreed.add(key)


def _compare_lists(control: Control, lines: list[str], digest: str, failure: Exception | None) -> None:
    def same(views: dict[int, str]) -> list[int]:
        return [rank for rank, view in views.items() if view != views[control.coordinator]]

    odd = control.settle("coalesced_bcast", failure, digest, same)
    if odd:
        speakers = {control.coordinator, odd[0]}
        view = lines if control.rank in speakers else None

        def differ(views: dict[int, list[str] | None]) -> str:
            ours, theirs = views[control.coordinator] or [], views[odd[0]] or []
            for i, (a, b) in enumerate(zip(ours, theirs, strict=False)):
                if a != b:
                    what = "src, bucket_bytes and algorithm are" if i == 0 else f"tensor {i - 1} is"
                    return f"{what} {a} on rank {control.coordinator} but {b} on rank {odd[0]}"
            return f"rank {control.coordinator} has {len(ours) - 1} tensors but rank {odd[0]} has {len(theirs) - 1}"

        text = control.settle("coalesced_bcast", None, view, differ)
        raise ManifestMismatch(f"coalesced_bcast: the ranks' lists differ: {text}")
