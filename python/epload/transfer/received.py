"""Checkpoints that are received rather than read: another job sends them to all ranks of a load together."""

from __future__ import annotations

import secrets
import threading
from abc import abstractmethod
from collections.abc import Sequence
from concurrent.futures import wait

from torch import Tensor

from epload.checkpoint.base import Checkpoint
from epload.core import threads
from epload.core.log import logger
from epload.core.pieces import Piece
from epload.errors import CheckpointError, RemoteFailure
from epload.observe.progress import Progress
from epload.planning.holdings import Holdings
from epload.planning.plan import LoadPlan
from epload.ranks.topology import Topology
from epload.report import TransferReport
from epload.transfer.local import Local

_LOOK_SECONDS = 0.05


class ReceivedCheckpoint(Checkpoint):
    """A checkpoint that all ranks of a load open, and receive together, each what it keeps."""

    verified = True

    @abstractmethod
    def receive(self, holdings: Holdings, tensors: list[Tensor], name: str, topology: Topology) -> tuple[int, str]:
        """Fills this rank's tensors. Collective over the topology's ranks.

        Args:
            holdings: of the manifest's tensors; their targets count in ``tensors``.
            name: identifies the load, on all ranks.

        Returns:
            The bytes that this rank received, and from where they came.

        Raises:
            LoadError: the same on every rank; tensors may be partly written.
        """

    @abstractmethod
    def cancel(self) -> bool:
        """Ends a call of :meth:`receive` in another thread. Returns True as long as it may still fill tensors."""

    def fill(self, bucket: Tensor, pieces: Sequence[Piece]) -> None:
        raise CheckpointError(
            f"{self.manifest.source} is sent to all ranks of a load at once, and cannot be read piece by piece; load it with "
            "epload.load"
        )


class Receiving:
    """Receives a checkpoint. Single use; has the interface of an Engine."""

    def __init__(
        self, checkpoint: ReceivedCheckpoint, plan: LoadPlan, local: Local, topology: Topology, report: TransferReport
    ) -> None:
        self._checkpoint, self._plan, self._local = checkpoint, plan, local
        self._topology, self._report = topology, report
        self._failed = threading.Event()

    def run(self, bar: Progress) -> None:
        """``bar`` counts bytes. Raises LoadError: another rank failed, or the checkpoint was not received."""
        control, plan = self._topology.control, self._plan
        if plan.quantized:
            raise CheckpointError(
                f"{self._checkpoint.manifest.source} cannot be quantized while it is received: pass mapping= without Quantize, "
                "or have the WeightSender quantize"
            )
        name = control.agree("receiving", None, secrets.token_hex(4), lambda views: next(iter(views.values())))

        def receive() -> tuple[int, str]:
            return self._checkpoint.receive(plan.holdings, self._local.tensors, name, self._topology)

        with (
            self._report.timed("read", "receives") as span,
            control.activity(f"receives {self._checkpoint.manifest.source}"),
        ):
            receiving = threads.call("epload-receive", receive)
            try:
                while not receiving.done():
                    wait([receiving], _LOOK_SECONDS)
                    if self._failed.is_set():
                        raise RemoteFailure("another rank failed")
            except BaseException:  # nothing changes the tensors once this has returned
                while self._checkpoint.cancel() and not receiving.done():
                    wait([receiving], _LOOK_SECONDS)
                raise
            span.nbytes, source = receiving.result()
        logger.info("received %s", source)
        control.progress += span.nbytes
        bar.update(plan.nbytes)

    def fail(self) -> None:
        """Another rank cannot go on."""
        self._failed.set()
