"""Writes a checkpoint of safetensors files, to which each rank writes its own part, and the list of their digests."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from functools import partial
from itertools import cycle
from pathlib import Path

import torch
from torch import Tensor

from epload.checkpoint import checksums
from epload.checkpoint.file_sets import CHECKSUMS, CONFIG, WRITTEN
from epload.core import threads
from epload.core.attempt import Attempt
from epload.core.buffers import as_memoryview
from epload.core.columns import batches
from epload.core.placement import box_slices, contiguous_runs
from epload.errors import LoadError
from epload.files import read_regular
from epload.native import ops
from epload.observe.render import list_first
from epload.ranks.membership import first_difference
from epload.ranks.topology import Topology
from epload.report import SaveReport
from epload.saving.folder import NewFolder, discard, hidden_path
from epload.saving.layout import FilesLayout
from epload.saving.plan import WritePlan
from epload.transfer.affinity import read_threads
from epload.transfer.device_pipe import DevicePipe

CALL_BYTES = 128 << 20
"""Bytes on a device that are written in one call, in which all threads of the pipe take part."""
Wrote = Callable[[int], None]
"""Called with the number of bytes after each write; may raise to stop."""
_ONE_NODE = "to the disk of one node, with topology=Topology.discover(group) over that node's ranks"
Digests = Mapping[str, Sequence[str]]
"""The digests of the chunks of files, by their names."""


def check_equal(digests: Mapping[int, str], activity: str) -> None:
    """Raises ValueError unless all ranks want to write the same. ``activity``: for the message, of several ranks."""
    if differ := first_difference(digests):
        raise ValueError(f"ranks {differ[0]} and {differ[1]} {activity}; pass the same on all ranks")


def check_arguments(
    topology: Topology, max_shard_bytes: int, files: Sequence[Path], checksums: bool, overwrite: bool, quantizes: bool
) -> dict[str, bytes]:
    """Returns the contents of the files that the first rank copies, by name; empty on others.

    Raises ValueError if ``max_shard_bytes`` is no number of bytes, or one of the files is not there, or has the name of another
    or of one that is written; TypeError if an option is no bool.

    ``checksums``: whether that is a list of digests; ``quantizes``: whether it is a ``config.json``."""
    for name, option in (("checksums", checksums), ("overwrite", overwrite)):
        if not isinstance(option, bool):
            raise TypeError(f"expected {name} to be a bool, got {option!r}")
    if not isinstance(max_shard_bytes, int) or isinstance(max_shard_bytes, bool) or max_shard_bytes < 1:
        raise ValueError(f"expected max_shard_bytes to be a number of bytes, at least 1, got {max_shard_bytes!r}")
    is_first = topology.rank == topology.ranks[0]
    if is_first and (missing := [file for file in files if not file.is_file()]):
        raise ValueError(f"expected files= to name files to be copied, but {missing[0]} is none")
    names = Counter(file.name for file in files)
    if checksums and CHECKSUMS in names:
        raise ValueError(f"expected files= without {CHECKSUMS}, which checksums=True writes")
    if quantizes and CONFIG in names:
        raise ValueError(f"expected files= without {CONFIG}: the one that is written declares how weights are quantized")
    for name, count in names.items():
        if count > 1:
            raise ValueError(f"expected files= of different names, got {count} called {name}")
        if name.endswith(WRITTEN):
            raise ValueError(f"expected files= without {name}: the tensors of the checkpoint are written, and no others")
    return {file.name: read_regular(file) for file in files} if is_first else {}


def write_checkpoint(
    topology: Topology,
    overwrite: bool,
    lay_out: Callable[[], FilesLayout],
    write: Callable[[NewFolder, Wrote], None],
    describe: Callable[[NewFolder], Mapping[str, bytes]],
    files: Mapping[str, bytes],
    checksums: bool,
    report: SaveReport,
) -> None:
    """Writes a checkpoint that appears at its path once it is complete and on disk. Collective.

    Args:
        overwrite: equal on all ranks, as is the report's path.
        lay_out: returns the files, equal on all ranks; may raise.
        write: writes this rank's part.
        describe: called on the first rank when all have written; returns the content of other files, by name.
        files: contents of other files, by name, on the first rank.
        checksums: whether a list of the digests of all files is written next to them. Ranks share the files for that.

    Raises:
        LoadError, ValueError, TypeError: the same on every rank; what was at the path is still there.
    """
    control, is_first, path = topology.control, topology.rank == topology.ranks[0], Path(report.path)
    # All ranks know the name, and delete the folder if the first one ends before it has told them that it is there.
    call = f"{control.name} {control.at[0]}" if control.store is not None else secrets.token_hex(6)
    hidden = hidden_path(path, hashlib.blake2b(call.encode(), digest_size=6).hexdigest())
    with ExitStack() as failed:
        failed.callback(lambda: discard(hidden))

        def create() -> NewFolder:
            new = NewFolder(path, hidden, overwrite, lay_out())
            try:
                if is_first:
                    new.create()
            except OSError as error:
                raise LoadError(f"cannot make {path}: {error}") from error
            return new

        def write_part() -> None:
            with control.working("writes its part of the checkpoint") as wrote, closing(folder):
                write(folder, wrote)
                with report.timed("sync"):
                    folder.sync(lambda: wrote(0))

        def complete() -> str:
            with report.timed("sync"):
                for name, content in {**folder.layout.index, **describe(folder), **files}.items():
                    folder.add(name, content)
                digest = _publish(folder.temporary, digests) if checksums else ""
                folder.commit()
                return digest

        created = Attempt(create)
        control.agree("making the folder", created.failure)
        folder = created.value
        _check_shared(topology, folder)
        control.agree("writing the checkpoint", Attempt(write_part).failure)
        digests = _hash_files(folder, topology) if checksums else {}
        control.doing = "completes the checkpoint"
        completed = Attempt(lambda: complete() if is_first else "")
        report.checksums = control.agree(
            "completing the checkpoint",
            completed.failure,
            completed.result,
            lambda views: views[control.ranks[0]],
            last=True,
        )
        failed.pop_all()
    report.files, report.tensors = len(folder.layout.names), len(folder.layout.file)
    report.nbytes = folder.layout.nbytes


def _check_shared(topology: Topology, folder: NewFolder) -> None:
    """Collective. If ranks of several nodes write to one file, the first of each node writes a byte to a file, as not every file
    system keeps all of them.

    Raises:
        LoadError: a rank does not see the folder that the first rank has made, or a byte is lost; the same on every rank.
    """
    control, path, nodes = topology.control, folder.temporary / "probe", topology.nodes
    is_first, is_leader = topology.rank == topology.ranks[0], topology.rank == topology.node[0]
    is_probed = len(nodes) > 1 and any(folder.layout.sizes)  # a save of changes has a file for each rank
    made = Attempt(lambda: _make_probe(path, len(nodes)) if is_first and is_probed else None)
    is_seen = folder.temporary.is_dir()
    control.agree("finding the folder", made.failure, is_seen, lambda views: _check_seen(folder.path.parent, views))
    if is_probed:
        wrote = Attempt(lambda: _write_byte(path, nodes.index(topology.node), folder.path.parent) if is_leader else None)
        control.agree("writing a byte of each node", wrote.failure)
        found = Attempt(lambda: _check_written(path, folder.path.parent, nodes) if is_first else None)
        control.agree("reading the byte of each node", found.failure)


def _check_seen(parent: Path, seen: Mapping[int, bool]) -> None:
    """Raises LoadError unless every rank sees the hidden folder that the first rank has made in ``parent``.

    The folder's name is that of no other save, so that a rank does not see another one in its place.
    """
    if others := [rank for rank, sees in seen.items() if not sees]:
        raise LoadError(
            f"{parent} is on several file systems: ranks {list_first(others)} do not see the folder that rank "
            f"{min(seen)} has made there, and nothing was saved; save to a folder that all nodes share, or {_ONE_NODE}"
        )


def _make_probe(path: Path, nbytes: int) -> None:
    with open(path, "xb") as stream:
        stream.truncate(nbytes)  # without a write, as in NewFolder.create()


def _write_byte(path: Path, offset: int, parent: Path) -> None:
    """Raises LoadError if the byte cannot be written."""
    try:
        fd = os.open(path, os.O_WRONLY)
        try:
            os.pwrite(fd, b"\1", offset)
            os.fsync(fd)
        finally:
            os.close(fd)
    except OSError as error:
        raise LoadError(
            f"{parent} does not let several nodes write to one file ({error.strerror}), and nothing was saved; save to a file "
            f"system that does, such as NFS or Lustre, or {_ONE_NODE}"
        ) from error


def _check_written(path: Path, parent: Path, nodes: Sequence[Sequence[int]]) -> None:
    """Raises LoadError if a byte is lost. Deletes the file."""
    content = path.read_bytes().ljust(len(nodes), b"\0")
    path.unlink()
    if lost := [node[0] for node, byte in zip(nodes, content, strict=True) if byte != 1]:
        raise LoadError(
            f"{parent} does not keep what several nodes write to one file: a byte of each of ranks {list_first(lost)} is lost, "
            f"and nothing was saved; save to a file system that keeps it, such as NFS or Lustre, or {_ONE_NODE}"
        )


def _hash_files(folder: NewFolder, topology: Topology) -> Digests:
    """Reads the files that all ranks have written, and returns their digests, on the first rank. Collective: each rank hashes
    some of the chunks. Raises LoadError, the same on every rank."""
    control, ranks = topology.control, topology.control.ranks
    paths = [folder.path_of(number) for number in range(len(folder.layout.names))]
    index = ranks.index(control.rank)

    def hash_own() -> list[str]:
        chunks = [(path, number) for path in paths for number in _chunks_of(path)][index :: len(ranks)]
        with control.working("hashes its part of the checkpoint") as done:
            steps = [partial(checksums.hash_chunk, *chunk, done) for chunk in chunks]
            return threads.run_all("epload-hash", steps, read_threads(len(topology.node)))

    own = Attempt(hash_own)
    control.agree("hashing the files", own.failure, patience=2)
    received = control.exchange("the digests of files", {ranks[0]: json.dumps(own.value).encode()})
    if index > 0:
        return {}
    shares = cycle([iter(json.loads(received[rank])) for rank in ranks])
    return {path.name: [next(next(shares)) for _ in _chunks_of(path)] for path in paths}


def _publish(folder: Path, digests: Digests) -> str:
    """Writes the list of all files of a folder, those that are not hashed yet included. Returns its digest. Raises OSError."""
    files = {}
    for path in sorted(folder.iterdir()):
        known = digests.get(path.name) or [checksums.hash_chunk(path, number) for number in _chunks_of(path)]
        files[path.name] = {"bytes": path.stat().st_size, "chunks": known}
    described = {"algorithm": "sha256", "chunk_bytes": checksums.CHUNK_BYTES, "files": files}
    content = json.dumps(described, indent=1).encode()
    with open(folder / CHECKSUMS, "xb") as stream:
        stream.write(content)
    return checksums.PREFIX + hashlib.sha256(content).hexdigest()


def _chunks_of(path: Path) -> range:
    return range(checksums.chunk_count(path.stat().st_size, checksums.CHUNK_BYTES))


def write_regions(
    plan: WritePlan, tensors: Sequence[Tensor], folder: NewFolder, ranks: int, report: SaveReport, wrote: Wrote
) -> None:
    """Writes all regions of a plan.

    Args:
        tensors: on CPU, on one accelerator, or on both.
        ranks: of this node, which share its processors.
    """
    copies, origins = plan
    on_cpu = torch.tensor([tensor.is_cpu for tensor in tensors], dtype=torch.bool)[copies.target]
    rows = zip(copies.select(on_cpu).boxes(), origins[on_cpu].tolist(), strict=True)
    for (target, _, dtype, start, size, strides), (file, offset) in rows:
        with report.timed("pack"):
            region, in_file = region_of(tensors[target], dtype, start, size, strides)
            _, offsets = contiguous_runs(region.shape, in_file)
            data = as_memoryview(region)
        with report.timed("write") as block:
            block.nbytes, length = len(data), len(data) // len(offsets)
            for i, begin in enumerate(offsets):
                folder.write(file, offset + begin * region.element_size(), data[i * length : (i + 1) * length])
        wrote(block.nbytes)
    if not on_cpu.all():
        rest = copies.select(~on_cpu), origins[~on_cpu]
        _write_from_device(rest, tensors, folder, ranks, report, wrote)


def region_of(
    tensor: Tensor, dtype: torch.dtype, start: Sequence[int], size: Sequence[int], strides: Sequence[int]
) -> tuple[Tensor, list[int]]:
    """Returns a region of a tensor in another dtype: contiguous on CPU, with its dims in the order of the row-major tensor in the
    file, in which it has ``strides`` (elements); and the strides in that order."""
    region = tensor.detach()[box_slices(start, size)].to(dtype).cpu()
    order = sorted(range(region.ndim), key=lambda dim: (size[dim] > 1, -strides[dim]))
    return region.permute(order).resolve_conj().resolve_neg().contiguous(), [strides[dim] for dim in order]


def _write_from_device(
    plan: WritePlan, tensors: Sequence[Tensor], folder: NewFolder, ranks: int, report: SaveReport, wrote: Wrote
) -> None:
    """Writes regions of tensors on a device straight to the files, through the device's pipe."""
    copies, origins = plan
    device = tensors[int(copies.target[0])].device
    pipe, stream = DevicePipe.of(device, ranks), torch.Stream(device)
    stream.wait_stream(torch.accelerator.current_stream(device))
    report.peak_staging = pipe.footprint
    numbers = torch.arange(len(folder.layout.names))
    used = set(origins[:, 0].tolist())
    descriptors = [folder.open(file) if file in used else -1 for file in numbers.tolist()]
    for rows in batches(copies.nbytes(), CALL_BYTES):
        table = copies.select(rows)
        sources = [tensors[target] for target in table.renumber_targets()]
        with report.timed("write") as block, stream:
            block.nbytes, failed, _, error = ops.write_from_device(
                descriptors, numbers, torch.zeros_like(numbers), origins[rows], sources, table.rows, pipe.native
            )
        if failed >= 0:
            raise OSError(error, os.strerror(error), str(folder.path_of(failed)))
        wrote(block.nbytes)
