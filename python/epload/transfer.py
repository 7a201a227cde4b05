"""Moves the buckets of one plan, on one rank: read -> inter-node -> intra-node -> unpack, overlapping."""

from __future__ import annotations

import torch
from torch import Tensor

from epload import ops, pipeline
from epload.checkpoint import Checkpoint
from epload.control import HEADER_BYTES, STATUS_ABORT, STATUS_OK, BucketHeader
from epload.errors import LoadError, Told, text_of
from epload.plan import LoadPlan
from epload.report import LoadReport, progress_bar
from epload.topology import Route


class Transfer:
    """One use: make it, run it. ``buffers`` are uint8, each as large as the plan's largest bucket."""

    def __init__(
        self,
        plan: LoadPlan,
        route: Route,
        local: list[Tensor],
        checkpoint: Checkpoint | None,
        report: LoadReport,
        buffers: list[Tensor],
        rank: int,
        readers: str,
        algorithm: str,
    ) -> None:
        """``local`` are the targets' local tensors; ``checkpoint`` is None on a rank that does not read."""
        self._plan = plan
        self._route = route
        self._local = local
        self._checkpoint = checkpoint
        self._report = report
        self._buffers = buffers
        self._rank = rank
        self._readers = readers
        self._algorithm = algorithm
        self._fingerprint = plan.fingerprint[:16]
        self._failure: LoadError | None = None
        """What went wrong on this rank, or what a reader said in the bucket that ended the transfer."""
        self.broken = False
        """Whether a broadcast failed, so that the buffers may still be in use."""

    def run(self, shown: bool) -> None:
        """Raises LoadError if a reader gave up, or what went wrong here. ``shown``: with a progress bar."""
        buckets = self._plan.buckets
        with progress_bar(self._plan.nbytes, shown) as self._bar:
            stages = self._stages()
            if buckets:
                try:
                    pipeline.run(stages, len(buckets), self._buffers)
                except Exception:
                    self.broken = True
                    raise
            for stage in stages:
                self._report.phases[stage.name].seconds += stage.seconds
        if self._failure is not None:
            raise self._failure

    def _stages(self) -> list[pipeline.Stage]:
        stages = []
        if self._checkpoint is not None:
            stages.append(pipeline.Stage("read", self._read))
        if self._route.inter_group and self._readers == "one":
            stages.append(pipeline.Stage("inter_node", self._inter))
        if self._route.intra_group:
            stages.append(pipeline.Stage("intra_node", self._intra))
        stages.append(pipeline.Stage("unpack", self._unpack))
        return stages

    def _read(self, index: int, buffer: Tensor) -> bool:
        """Fills a bucket, or makes it one that tells everybody why there will be no more."""
        assert self._checkpoint is not None
        bucket = self._plan.buckets[index]
        status, nbytes = STATUS_OK, bucket.nbytes - HEADER_BYTES
        try:
            self._checkpoint.fill(buffer, self._plan.pieces(bucket))
        except Exception as error:
            self._failure = LoadError(f"rank {self._rank} could not read bucket {index}: {text_of(error)}")
            text = str(self._failure).encode(errors="backslashreplace")[:nbytes]
            buffer[HEADER_BYTES : HEADER_BYTES + len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
            status, nbytes = STATUS_ABORT, len(text)
        header = BucketHeader(index, status, nbytes, 0, self._fingerprint).pack()
        buffer[:HEADER_BYTES] = torch.frombuffer(bytearray(header), dtype=torch.uint8)
        self._report.phases["read"].nbytes += nbytes
        return status == STATUS_ABORT

    def _inter(self, index: int, buffer: Tensor) -> bool:
        bucket = buffer[: self._plan.buckets[index].nbytes]
        algorithm = self._algorithm
        ops.coalesced_bcast([bucket], self._route.src, self._route.inter_group, "", bucket.nbytes, algorithm)
        self._count("inter_node", bucket)
        return self._is_last(index, bucket)

    def _intra(self, index: int, buffer: Tensor) -> bool:
        bucket = buffer[: self._plan.buckets[index].nbytes]
        leader = self._route.leader
        ops.coalesced_bcast([bucket], leader, "", self._route.intra_group, bucket.nbytes, "two_level", leader=leader)
        self._count("intra_node", bucket)
        return self._is_last(index, bucket)

    def _count(self, phase: str, bucket: Tensor) -> None:
        self._report.phases[phase].nbytes += bucket.nbytes
        self._report.transport_steps += 1

    def _is_last(self, index: int, bucket: Tensor) -> bool:
        """Checks the header of a bucket that has arrived. True if its reader gave up."""
        header = BucketHeader.unpack(bytes(bucket[:HEADER_BYTES].tolist()))
        if (header.index, header.fingerprint) != (index, self._fingerprint):
            raise LoadError(
                f"rank {self._rank} expected bucket {index} of plan {self._fingerprint.hex()}, "
                f"got bucket {header.index} of plan {header.fingerprint.hex()}: the ranks are out of step"
            )
        if header.status == STATUS_ABORT:
            said = bytes(bucket[HEADER_BYTES : HEADER_BYTES + header.nbytes].tolist()).decode(errors="replace")
            self._failure = self._failure or Told(said)
            return True
        return False

    def _unpack(self, index: int, buffer: Tensor) -> bool:
        bucket = self._plan.buckets[index]
        if self._is_last(index, buffer[: bucket.nbytes]):
            return True
        if self._failure is None and bucket.targets:
            try:
                ops.unpack(buffer[: bucket.nbytes], [self._local[t] for t in bucket.targets], bucket.copies)
            except Exception as error:  # keep receiving, so that no other rank is left waiting; told at the end
                self._failure = LoadError(f"rank {self._rank} could not unpack bucket {index}: {text_of(error)}")
        self._report.phases["unpack"].nbytes += bucket.nbytes - HEADER_BYTES
        self._bar.update(bucket.nbytes)
        return False
