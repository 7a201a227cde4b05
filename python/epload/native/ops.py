"""The native ops, typed. Only this file names torch.ops.epload."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from epload.native.extension import load_native_library

load_native_library()

_ops = torch.ops.epload

Pipe: TypeAlias = torch.ScriptObject
"""An object of the class in csrc/device/pipe.h: data crosses between the host and a device through its pinned pieces, on its
streams. Work already on the device's current stream precedes what an op sends through a pipe; later work there follows it."""
BOARD_FIXED_WORDS, BOARD_REACHED, BOARD_FAILED = 2, -1, -2
"""Same values as in csrc/comm/board.h."""


def coalesced_bcast(
    tensors: Sequence[Tensor],
    src: int,
    inter_group: str,
    intra_group: str,
    bucket_bytes: int,
    algorithm: str,
    stream: torch.Stream | None = None,
    *,
    leader: int = -1,
) -> None:
    """Broadcasts ``tensors`` in place from global rank ``src``: among the leaders, then inside each node.

    Args:
        tensors: the same count, dtypes and sizes in the same order on every rank; any strides; one device.
        src: global rank whose values are sent.
        inter_group: name of the leaders' group, ``""`` on a rank that leads no node.
        intra_group: name of this node's group, ``""`` for a node of one rank.
        bucket_bytes: size of a flat bucket; a larger tensor is split.
        algorithm: ``"two_level"``, or ``"striped"``: then inter_group is this rank's rail.
        stream: where all device work goes; the current stream if None. Must be None on CPU.
        leader: global rank of this node's leader; -1 derives ``src`` on its own node, elsewhere the node's lowest rank.
            For ``"striped"`` the rank of the source's node that is on this rank's rail.

    Raises:
        ValueError: wrong arguments; nothing has moved.
    """
    _ops.coalesced_bcast.default(tensors, src, inter_group, intra_group, bucket_bytes, algorithm, stream, leader=leader)


def abort_hccl(group: Any) -> bool:
    """Ends operations of a ``ProcessGroup`` of HCCL's, whose own ``abort()`` does nothing (torch_npu 2.13). May not return.

    Returns:
        False if this build lacks the part for NPUs.

    Raises:
        RuntimeError: it has no backend for NPUs, or not torch_npu's, or HCCL fails.
    """
    return bool(_ops.abort_hccl.default(group.boxed()))


def pack(bucket: Tensor, sources: Sequence[Tensor], copies: Tensor) -> None:
    """Copies regions of ``sources`` into ``bucket``; the inverse of :func:`unpack`, with the same copy table."""
    _ops.pack.default(bucket, sources, copies)


def unpack(bucket: Tensor, targets: Sequence[Tensor], copies: Tensor) -> None:
    """Copies regions of ``bucket`` into ``targets``, converting dtypes as ``Tensor.copy_`` does.

    Args:
        bucket: contiguous uint8, 1-D.
        targets: any dtypes, any strides, on the bucket's device.
        copies: int64 CPU tensor [n, 4 + 3 * D], a region a row: target index, offset in the bucket (bytes), dtype code of
            the bucket's elements, ndim, then start[D] and size[D] in the target and stride[D] in the bucket (elements).

    Raises:
        ValueError: a row reaches outside the bucket or its target; nothing has been copied.
    """
    _ops.unpack.default(bucket, targets, copies)


def device_pipe(device: torch.device, threads: int, piece_bytes: int) -> Pipe:
    """Returns a pipe, whose memory is freed with the last reference to it, once nothing uses it.

    Args:
        device: with its index.
        threads: which have two pieces each, and a stream. The streams of a device are those of the pipes before.
        piece_bytes: a multiple of 4,096. As many bytes as all pieces have are taken on the device, too.

    Raises:
        ValueError: all pieces together have more than 4 GiB, or ``piece_bytes`` is no such multiple.
    """
    pipe: Pipe = _ops.device_pipe.default(device, threads, piece_bytes)
    return pipe


def pinned_memory(nbytes: int, device: torch.device) -> Tensor:
    """Returns memory of the host (uint8) from which, and to which, a device copies without another copy on the way: of exactly so
    many bytes, where torch's allocator takes the next power of two and keeps it.

    Args:
        device: with its index.

    Raises:
        ValueError: ``nbytes`` is none that a process can have, or the device is the CPU.
        RuntimeError: there is not as much memory.
    """
    memory: Tensor = _ops.pinned_memory.default(nbytes, device)
    return memory


def write_from_device(
    descriptors: Sequence[int],
    files: Tensor,
    offsets: Tensor,
    origins: Tensor,
    sources: Sequence[Tensor],
    copies: Tensor,
    pipe: Pipe,
) -> tuple[int, int, int, int]:
    """Inverts :func:`read_regions`, with the same tables and errors. Returns when all has been written.

    Returns:
        bytes written; the index of a file that could not be written, or -1; where, in bytes; the errno.
    """
    outcome = _ops.write_from_device.default(descriptors, files, offsets, origins, sources, copies, pipe)
    return tuple(map(int, outcome))  # type: ignore[return-value]


def upload(sources: Sequence[Tensor], origins: Tensor, targets: Sequence[Tensor], copies: Tensor, pipe: Pipe) -> None:
    """Copies regions as :func:`read_regions` does, from tensors on CPU instead of files, which may be changed when it returns.

    Args:
        sources: contiguous, any dtypes.
        origins: int64 CPU tensor [n, 2], for each row of ``copies`` the source that it is of and where in it it starts (bytes).

    Raises:
        ValueError: a row reaches outside its source or its target; nothing has been copied.
    """
    _ops.upload.default(sources, origins, targets, copies, pipe)


def download(sources: Sequence[Tensor], copies: Tensor, targets: Sequence[Tensor], origins: Tensor, pipe: Pipe) -> None:
    """Inverts :func:`upload`, with the same tables: ``sources`` are on the device. Returns when ``targets`` hold all."""
    _ops.download.default(sources, copies, targets, origins, pipe)


def share_memory(tensors: Sequence[Tensor]) -> tuple[Tensor, list[str], list[int]]:
    """Shares the memory of tensors on one device with other processes.

    Returns:
        int64 CPU tensor [n, 2], for each tensor the allocation that it begins in, and where (bytes), -1 and 0 for an empty one;
        the handle of each allocation, in hexadecimal digits; its bytes.

    Raises:
        RuntimeError: some of the memory cannot be shared; with the reason.
        ValueError: the tensors are on several devices, or the memory of one has not all of its elements.
    """
    places, handles, sizes = _ops.share_memory.default(tensors)
    return places, [bytes(handle).hex() for handle in handles.tolist()], list(map(int, sizes))


def open_memory(handle: str, nbytes: int, device: torch.device) -> Tensor:
    """Opens an allocation of another process, which must not free it before :func:`close_memory` or the last reference is gone,
    as uint8 [nbytes] that is used on ``device``. It may be on another one, which this one reaches.

    Raises:
        RuntimeError: it cannot be opened; with the reason.
        ValueError: the handle is none.
    """
    content = torch.tensor(list(bytes.fromhex(handle)), dtype=torch.uint8, device="cpu")
    memory: Tensor = _ops.open_memory.default(content, nbytes, device)
    return memory


def close_memory(memory: Tensor) -> None:
    """Closes what :func:`open_memory` has opened, else ValueError. Nothing may use it any more, also nothing that is queued."""
    _ops.close_memory.default(memory)


def read_regions(
    descriptors: Sequence[int],
    files: Tensor,
    offsets: Tensor,
    origins: Tensor,
    targets: Sequence[Tensor],
    copies: Tensor,
    threads: int,
    direct: bool = False,
    pipe: Pipe | None = None,
) -> tuple[int, int, int, int]:
    """Copies regions of tensors in open files into ``targets``: :func:`unpack` with files in place of the bucket.

    Returns when all has been read; the last of it may still be crossing to a device.

    Args:
        descriptors: open file descriptors.
        files: int64 CPU tensor [t], for each tensor in a file an index into ``descriptors``.
        offsets: int64 CPU tensor [t], where each starts in its file (bytes).
        origins: int64 CPU tensor [n, 2], for each row of ``copies`` the tensor that it is of and where in it it starts (bytes).
        targets: on CPU, or on the pipe's device; any dtypes, any strides.
        copies: as for :func:`unpack`, but the offsets are ignored; strides are those of the tensor in the file.
        threads: for targets on CPU.
        direct: whether requests of 256 KiB and more of what is not in the page cache go past it, with O_DIRECT.
        pipe: for targets on a device.

    Returns:
        bytes read; the index of a file that could not be read, or -1; where, in bytes; the errno, 0 if it ended there.

    Raises:
        ValueError: a row reaches outside its target or names no tensor or file; nothing has been read.
    """
    outcome = _ops.read_regions.default(descriptors, files, offsets, origins, targets, copies, threads, direct, pipe)
    return tuple(map(int, outcome))  # type: ignore[return-value]


def relay(
    bucket: Tensor,
    steps: Tensor,
    inter_group: str,
    intra_group: str,
    chunk_bytes: int,
    board: Tensor | None = None,
    seconds: float = 0,
) -> int:
    """Receives pieces of ``bucket`` and passes them on, chunk by chunk; returns the number of messages.

    Args:
        bucket: contiguous uint8, 1-D, on CPU.
        steps: int64 CPU tensor [n, 6], a piece a row, in order: begin, end (bytes), the rank it comes from in the inter-node
            group, in the intra-node group, the rank it goes to in each. Global ranks, -1 for none.
        chunk_bytes: bytes of a message, equal on all ranks.
        board: given up as soon as a failure is posted on it, also while waiting for a message.
        seconds: that a message may take; 0 for the timeout of its group.

    Raises:
        ValueError: a step outside the bucket, or a rank that is not in its group.
        RuntimeError: the network failed, a rank did not answer in time, or a failure was posted. No message writes to the
            bucket any more; the groups are of no further use.
    """
    return int(_ops.relay.default(bucket, steps, inter_group, intra_group, chunk_bytes, board, seconds))


def checksum(data: Tensor) -> int:
    """Returns a 64-bit checksum of a contiguous CPU tensor's bytes; never 0. See csrc/digest.cpp."""
    return int(_ops.checksum.default(data)) & (1 << 64) - 1


def digest_tensors(tensors: Sequence[Tensor], copies: Tensor) -> Tensor:
    """Returns the checksum of each region's elements in row-major order, as they lie in CPU tensors; int64 [n].

    Args:
        copies: as for :func:`unpack`; what it says of a bucket is ignored.

    Raises:
        ValueError: a row reaches outside its tensor.
    """
    digests: Tensor = _ops.digest_tensors.default(tensors, copies)
    return digests


def digest_bucket(bucket: Tensor, copies: Tensor) -> Tensor:
    """Returns the checksum that each region of a bucket will have in the tensor it is unpacked to; int64 [n].

    Args:
        copies: as for :func:`unpack`, but with the dtype code of that tensor in place of its index.

    Raises:
        ValueError: a row reaches outside the bucket.
    """
    digests: Tensor = _ops.digest_bucket.default(bucket, copies)
    return digests


def encode_changes(base: Tensor, changed: Tensor, unit: int, out: Tensor) -> tuple[int, int]:
    """Encodes the differences between two buffers, in the format that docs/sync.md describes.

    Args:
        base, changed: uint8 [n] on CPU, contiguous, at addresses that are multiples of ``unit``, as is n.
        unit: size of the elements that are compared, as integers: 1, 2, 4 or 8 bytes.
        out: uint8 on CPU, with room for :func:`encoded_limit` bytes.

    Returns:
        The bytes written to ``out``; the number of units that differ.

    Raises:
        ValueError: the buffers do not match.
    """
    nbytes, count = _ops.encode_changes.default(base, changed, unit, out)
    return int(nbytes), int(count)


def encode_regions(
    base: Sequence[Tensor], changed: Sequence[Tensor] | Tensor, copies: Tensor, begin: int, end: int, out: Tensor
) -> tuple[int, int]:
    """Encodes the differences between a bucket that is packed from some tensors and one packed from others, from ``begin`` to
    ``end`` (bytes), without packing them. Each region is a block of the encoding, compared in units of its dtype.

    Args:
        base: on CPU.
        changed: likewise; or the bucket that is packed from them, uint8 on CPU.
        copies: as for :func:`unpack`, in the order of their offsets, and each without gaps in the bucket. Bytes of no copy are
            equal.
        out: uint8 on CPU, with room for :func:`encoded_limit` bytes.

    Returns:
        The bytes written to ``out``; the number of units that differ.

    Raises:
        ValueError: a row reaches outside its tensor, has another dtype than it, or does not lie so.
    """
    bucket, tensors = (changed, ()) if isinstance(changed, Tensor) else (None, changed)
    nbytes, count = _ops.encode_regions.default(base, tensors, copies, begin, end, out, bucket)
    return int(nbytes), int(count)


def apply_regions(encoded: Tensor, base: Sequence[Tensor], copies: Tensor, begin: int, end: int) -> int:
    """Makes tensors equal to those that :func:`encode_regions` was called with; returns the number of units that change.

    Args:
        encoded: uint8 on CPU.
        base, copies, begin, end: as for :func:`encode_regions`.

    Raises:
        ValueError: the changes are damaged, or those of other regions; nothing was changed.
    """
    return int(_ops.apply_regions.default(encoded, base, copies, begin, end))


def encoded_limit(nbytes: int, regions: int = 1) -> int:
    """Returns the most bytes that the encoded changes of so many bytes, in so many regions, have."""
    return nbytes + -(-nbytes // (1 << 16)) + 40 * regions


def check_changes(encoded: Tensor, nbytes: int) -> int:
    """Returns the number of units that :func:`apply_changes` would change in a buffer of so many bytes; same errors."""
    return int(_ops.check_changes.default(encoded, nbytes))


def apply_changes(encoded: Tensor, base: Tensor) -> int:
    """Makes a buffer what :func:`encode_changes` was called with; returns the number of units that change.

    Args:
        encoded: uint8 [m] on CPU. It may come from anywhere.
        base: uint8 [n] on CPU.

    Raises:
        ValueError: the changes are damaged, of another format, or of a buffer of another size; nothing was changed.
    """
    return int(_ops.apply_changes.default(encoded, base))


def allocate_like(tensors: Sequence[Tensor], dtype: torch.dtype, device: torch.device, threads: int) -> list[Tensor]:
    """Returns uninitialized tensors with the shapes and strides of others. On CPU, all pages are touched at once.

    Args:
        tensors: dense; may be on meta.
        threads: at most so many touch the memory.

    Raises:
        ValueError: a tensor is not dense.
        RuntimeError: there is not enough memory.
    """
    made: list[Tensor] = _ops.allocate_like.default(tensors, dtype, device, threads)
    return made


def describe_memory(tensors: Sequence[Tensor]) -> Tensor:
    """Describes tensors by what may differ between two of the same name, except their values.

    Returns:
        int64 [n, 4 + 2 * D], D dims at most: the addresses at which a tensor's memory begins and ends, 0 if it has none; numbers
        for its device and its dtype; sizes [D] and strides [D], -1 past its dims.

    Raises:
        ValueError: a tensor is not dense and strided.
    """
    table: Tensor = _ops.describe_memory.default(tensors)
    return table


def cuda_obstacle(device: torch.device) -> str:
    """Returns why the CUDA kernels do not run on a CUDA device (ValueError for others), and warns once; empty if they do."""
    return str(_ops.cuda_obstacle.default(device))


def board_post(board: Tensor, slot: int, value: int) -> None:
    """Sets a counter of a board (int32 words that threads or processes share) and wakes all who wait. Slot -1: failure."""
    _ops.board_post.default(board, slot, value)


def board_wait(board: Tensor, slots: Sequence[int], value: int, seconds: float) -> int:
    """Waits until all of ``slots`` are at least ``value``: BOARD_REACHED, BOARD_FAILED, or the first slot that is behind."""
    return int(_ops.board_wait.default(board, slots, value, seconds))


def dtypes() -> dict[str, int]:
    """Returns the code of each dtype that the native code moves, by its name. See csrc/dtypes.h."""
    names, codes = _ops.dtypes.default()
    return dict(zip(names, codes, strict=True))


def _reject_meta(name: str, label: str) -> None:
    """Registers an op for fake tensors. It also stands for the meta device, where there is nothing to copy."""

    def fake(*arguments: Any, **_: Any) -> None:
        values = [value for each in arguments for value in (each if isinstance(each, (list, tuple)) else [each])]
        for i, tensor in enumerate(value for value in values if isinstance(value, Tensor)):
            if tensor.is_meta and type(tensor) in (Tensor, torch.nn.Parameter):  # fake tensors are a type of their own
                raise ValueError(f"{label}: tensor {i} is on meta and holds no data; materialize it first (to_empty)")

    torch.library.register_fake(f"epload::{name}", fake)


_reject_meta("coalesced_bcast", "coalesced_bcast")
_reject_meta("pack", "region_copy")
_reject_meta("unpack", "region_copy")
# torch.compile would not know the type of an argument, and drop a broadcast whose tensors are not used again, for which the other
# ranks would wait.
torch.fx.operator_schemas._type_eval_globals.setdefault("Stream", torch.Stream)
torch.fx.node.has_side_effect(_ops.coalesced_bcast.default)
