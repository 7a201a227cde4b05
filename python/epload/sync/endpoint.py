"""Defines what the sender and the receivers of a sync have in common."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from types import TracebackType
from typing import Any, Self

from torch.distributed.distributed_c10d import Store

from epload.core import log
from epload.ranks.topology import as_timedelta
from epload.sync.epoch import Epoch
from epload.sync.formation import form_epoch
from epload.sync.lobby import Participants
from epload.verify.digests import check_verify


class Endpoint:
    """One rank of either job. As a context manager it closes itself."""

    _store: Store
    """The store of both jobs."""

    def __init__(self, timeout: timedelta | float | None, verify: bool, progress: bool) -> None:
        log.configure()
        check_verify(verify)
        self._timeout = as_timedelta(timeout)
        self._verify = verify
        self._progress = progress
        self._epoch: Epoch | None = None
        self._closed = False

    def _check_open(self) -> None:
        if self._closed:
            name = type(self).__name__
            raise ValueError(f"expected an open {name}, got one that was closed; make a new one")

    def _takes_part(self, participants: Participants) -> bool:
        """True if the present epoch is that of the participants."""
        return self._epoch is not None and self._epoch.number == participants.epoch

    def _form_epoch(self, *args: Any) -> None:
        """Takes the arguments of :func:`form_epoch` from ``participants`` on. Raises LoadError: the same on every rank."""
        self._drop_epoch()
        self._epoch = form_epoch(self._store, self._timeout, *args)

    def _drop_epoch(self) -> None:
        if self._epoch is not None:
            self._epoch.close()
            self._epoch = None

    def close(self) -> None:
        """Leaves the sync, and frees memory."""
        self._drop_epoch()
        self._closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def check_choice(name: str, value: str, choices: Sequence[str]) -> None:
    """Raises ValueError unless an option is one of some."""
    if value not in choices:
        raise ValueError(f"expected {name} to be one of {', '.join(choices)}, got {value!r}")
