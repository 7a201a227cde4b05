"""The native ops, typed. Only this file names torch.ops.epload."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from epload.native import fakes
from epload.native.build import load_native_library

load_native_library()
fakes.register()

_coalesced_bcast = torch.ops.epload.coalesced_bcast.default
_pack = torch.ops.epload.pack.default
_unpack = torch.ops.epload.unpack.default
_device_pipe = torch.ops.epload.device_pipe.default
_read_to_device = torch.ops.epload.read_to_device.default
_write_from_device = torch.ops.epload.write_from_device.default
_upload = torch.ops.epload.upload.default
_download = torch.ops.epload.download.default
_share_memory = torch.ops.epload.share_memory.default
_close_memory = torch.ops.epload.close_memory.default
_open_memory = torch.ops.epload.open_memory.default
_read_regions = torch.ops.epload.read_regions.default
_relay = torch.ops.epload.relay.default
_checksum = torch.ops.epload.checksum.default
_digest_tensors = torch.ops.epload.digest_tensors.default
_digest_bucket = torch.ops.epload.digest_bucket.default
_allocate_like = torch.ops.epload.allocate_like.default
_cuda_obstacle = torch.ops.epload.cuda_obstacle.default
_board_post = torch.ops.epload.board_post.default
_board_wait = torch.ops.epload.board_wait.default

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
    _coalesced_bcast(tensors, src, inter_group, intra_group, bucket_bytes, algorithm, stream, leader=leader)


def pack(bucket: Tensor, sources: Sequence[Tensor], copies: Tensor) -> None:
    """Copies regions of ``sources`` into ``bucket``; the inverse of :func:`unpack`, with the same copy table."""
    _pack(bucket, sources, copies)


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
    _unpack(bucket, targets, copies)


def device_pipe(device: torch.device, threads: int, piece_bytes: int) -> Pipe:
    """A pipe. Its memory is freed with the last reference to it, once nothing uses it.

    Args:
        device: with its index.
        threads: which have two pieces each, and a stream. The streams of a device are those of the pipes before.
        piece_bytes: a multiple of 4,096.

    Raises:
        ValueError: all pieces together have more than 4 GiB, or ``piece_bytes`` is no such multiple.
    """
    pipe: Pipe = _device_pipe(device, threads, piece_bytes)
    return pipe


def read_to_device(
    descriptors: Sequence[int],
    files: Tensor,
    offsets: Tensor,
    origins: Tensor,
    targets: Sequence[Tensor],
    copies: Tensor,
    pipe: Pipe,
    direct: bool = False,
) -> tuple[int, int, int, int]:
    """:func:`read_regions` into tensors on a device. Returns when all has been read; the last of it may still be crossing.

    Args:
        targets: on the pipe's device.

    Raises:
        ValueError: as for :func:`read_regions`.
    """
    outcome = _read_to_device(descriptors, files, offsets, origins, targets, copies, pipe, direct)
    return tuple(map(int, outcome))  # type: ignore[return-value]


def write_from_device(
    descriptors: Sequence[int],
    files: Tensor,
    offsets: Tensor,
    origins: Tensor,
    sources: Sequence[Tensor],
    copies: Tensor,
    pipe: Pipe,
) -> tuple[int, int, int, int]:
    """Writes regions of tensors on a device to open files; the inverse of :func:`read_to_device`, with the same tables. Returns
    when all has been written.

    Returns:
        bytes written; the index of a file that could not be written, or -1; where, in bytes; the errno.

    Raises:
        ValueError: as for :func:`read_regions`.
    """
    outcome = _write_from_device(descriptors, files, offsets, origins, sources, copies, pipe)
    return tuple(map(int, outcome))  # type: ignore[return-value]


def upload(sources: Sequence[Tensor], origins: Tensor, targets: Sequence[Tensor], copies: Tensor, pipe: Pipe) -> None:
    """:func:`read_to_device` with tensors on CPU in place of files. ``sources`` may be changed when it returns.

    Args:
        sources: contiguous, any dtypes.
        origins: int64 CPU tensor [n, 2], for each row of ``copies`` the source that it is of and where in it it starts (bytes).

    Raises:
        ValueError: a row reaches outside its source or its target; nothing has been copied.
    """
    _upload(sources, origins, targets, copies, pipe)


def download(sources: Sequence[Tensor], copies: Tensor, targets: Sequence[Tensor], origins: Tensor, pipe: Pipe) -> None:
    """The inverse of :func:`upload`, with the same tables: ``sources`` are on the device. Returns when ``targets`` hold all."""
    _download(sources, copies, targets, origins, pipe)


def share_memory(tensors: Sequence[Tensor]) -> tuple[Tensor, list[str], list[int]]:
    """Returns by what other processes open the memory of tensors on one device: int64 CPU tensor [n, 2], for each tensor the
    allocation that it begins in, and where (bytes), -1 and 0 for an empty one; the handle of each allocation; its bytes.

    Raises:
        RuntimeError: some of the memory cannot be shared; with the reason.
        ValueError: the tensors are on several devices, or the memory of one has not all of its elements.
    """
    places, handles, sizes = _share_memory(tensors)
    return places, list(handles), list(map(int, sizes))


def open_memory(handle: str, nbytes: int, device: torch.device) -> Tensor:
    """Opens an allocation of another process, which must not free it before :func:`close_memory` or the last reference is gone,
    as uint8 [nbytes] that is used on ``device``. It may be on another one, which this one reaches.

    Raises:
        RuntimeError: it cannot be opened; with the reason.
        ValueError: the handle is none.
    """
    memory: Tensor = _open_memory(handle, nbytes, device)
    return memory


def close_memory(memory: Tensor) -> None:
    """Closes what :func:`open_memory` has opened, else ValueError. Nothing may use it any more, also nothing that is queued."""
    _close_memory(memory)


def read_ranges(
    descriptors: Sequence[int], ranges: Tensor, buffer: Tensor, threads: int, direct: bool = False
) -> tuple[int, int, int, int]:
    """Reads byte ranges of open files into a buffer. Ranges that follow one another in a file are read with one request.

    Args:
        descriptors: open file descriptors.
        ranges: int64 CPU tensor [n, 4], one a row: index into ``descriptors``, offset in the file, offset in ``buffer``, length;
            the last three in bytes.
        buffer: uint8 [bytes], on CPU.
        direct: whether requests of 256 KiB and more of what is not in the page cache go past it, with O_DIRECT.

    Returns:
        as :func:`read_regions`.

    Raises:
        ValueError: a row names no file or reaches outside the buffer; nothing has been read.
    """
    file, offset, position, nbytes = ranges.unbind(1)
    zero, one = torch.zeros_like(file), torch.ones_like(file)
    rows = torch.stack([zero, zero, zero, one, position, nbytes, one], 1)  # the dtype code of uint8 is 0
    files = torch.arange(len(descriptors), device="cpu")
    origins = torch.stack([file, offset], 1)
    return read_regions(descriptors, files, torch.zeros_like(files), origins, [buffer], rows, threads, direct)


def read_regions(
    descriptors: Sequence[int],
    files: Tensor,
    offsets: Tensor,
    origins: Tensor,
    targets: Sequence[Tensor],
    copies: Tensor,
    threads: int,
    direct: bool = False,
) -> tuple[int, int, int, int]:
    """Copies regions of tensors in open files into ``targets``: :func:`unpack` with files in place of the bucket.

    Args:
        descriptors: open file descriptors.
        files: int64 CPU tensor [t], for each tensor in a file an index into ``descriptors``.
        offsets: int64 CPU tensor [t], where each starts in its file (bytes).
        origins: int64 CPU tensor [n, 2], for each row of ``copies`` the tensor that it is of and where in it it starts (bytes).
        targets: on CPU, any dtypes, any strides.
        copies: as for :func:`unpack`, but the offsets are ignored; strides are those of the tensor in the file.
        direct: as for :func:`read_ranges`.

    Returns:
        bytes read; the index of a file that could not be read, or -1; where, in bytes; the errno, 0 if it ended there.

    Raises:
        ValueError: a row reaches outside its target or names no tensor or file; nothing has been read.
    """
    outcome = _read_regions(descriptors, files, offsets, origins, targets, copies, threads, direct)
    return tuple(map(int, outcome))  # type: ignore[return-value]


def relay(
    bucket: Tensor,
    steps: Tensor,
    inter_group: str,
    intra_group: str,
    chunk_bytes: int,
    board: Tensor | None = None,
    seconds: float = 0.0,
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
    return int(_relay(bucket, steps, inter_group, intra_group, chunk_bytes, board, seconds))


def checksum(data: Tensor) -> int:
    """A 64-bit checksum of a contiguous CPU tensor's bytes; never 0. See csrc/checksum.h."""
    return int(_checksum(data)) & (1 << 64) - 1


def digest_tensors(tensors: Sequence[Tensor], copies: Tensor) -> Tensor:
    """The checksum of each region's elements in row-major order, as they lie in CPU tensors; int64 [n].

    Args:
        copies: as for :func:`unpack`; what it says of a bucket is ignored.

    Raises:
        ValueError: a row reaches outside its tensor.
    """
    digests: Tensor = _digest_tensors(tensors, copies)
    return digests


def digest_bucket(bucket: Tensor, copies: Tensor) -> Tensor:
    """The checksum that each region of a bucket will have in the tensor it is unpacked to; int64 [n].

    Args:
        copies: as for :func:`unpack`, but with the dtype code of that tensor in place of its index.

    Raises:
        ValueError: a row reaches outside the bucket.
    """
    digests: Tensor = _digest_bucket(bucket, copies)
    return digests


def allocate_like(tensors: Sequence[Tensor], dtype: torch.dtype, device: torch.device, threads: int) -> list[Tensor]:
    """Uninitialized tensors with the shapes and strides of others, each with a storage of its own.

    On CPU, parts of common blocks of memory whose pages are touched at once. The memory of a tensor that is freed goes back to
    the system, except for what it has of a page with others.

    Args:
        tensors: dense; may be on meta.
        threads: at most so many touch the memory.

    Raises:
        ValueError: a tensor is not dense.
        torch.OutOfMemoryError: there is not enough memory.
    """
    made: list[Tensor] = _allocate_like(tensors, dtype, device, threads)
    return made


def cuda_obstacle(device: torch.device) -> str:
    """Returns why the CUDA kernels do not run on a CUDA device (ValueError for others), and warns once; empty if they do."""
    return str(_cuda_obstacle(device))


def board_post(board: Tensor, slot: int, value: int) -> None:
    """Sets a counter of a board (int32 words that threads or processes share) and wakes all who wait. Slot -1: failure."""
    _board_post(board, slot, value)


def board_wait(board: Tensor, slots: Sequence[int], value: int, seconds: float) -> int:
    """Waits until all of ``slots`` are at least ``value``: BOARD_REACHED, BOARD_FAILED, or the first slot that is behind."""
    return int(_board_wait(board, slots, value, seconds))
