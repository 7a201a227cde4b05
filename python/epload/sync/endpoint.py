"""Defines what the sender and the receivers of a sync have in common."""

from __future__ import annotations

import operator
from datetime import timedelta
from typing import Any, Literal, Self, get_args

from torch.distributed.distributed_c10d import Store

from epload.core import log
from epload.errors import LoadError
from epload.ranks.topology import as_timedelta
from epload.sync.generation import Generation
from epload.sync.node_version import NodeVersion
from epload.sync.participants import Start
from epload.sync.report import SyncReport
from epload.verify.digests import check_verify

Snapshots = Literal["none", "host"]
Deltas = Literal["off", "auto", "always"]
Transports = Literal["auto", "host"]
Stages = Literal["host", "device", "none"]


class Endpoint:
    """One rank of either job. As a context manager it closes itself."""

    _store: Store
    """The store of both jobs."""
    _generation: Generation | None = None
    _node_version: NodeVersion | None = None
    """The version in the node's memory when the generation before ended."""
    _closed = False

    def __init__(self, timeout: timedelta | float | None, verify: bool, progress: bool) -> None:
        log.configure()
        check_verify(verify)
        log.check_progress(progress)
        self._timeout = as_timedelta(timeout)
        self._verify = verify
        self._progress = progress

    def _check_open(self) -> None:
        if self._closed:
            name = type(self).__name__
            raise ValueError(f"expected an open {name}, got one that was closed; make a new one")

    def _continues(self, start: Start) -> bool:
        """True if the present generation is that of a version that starts."""
        return self._generation is not None and self._generation.number == start.generation

    def _join(self, start: Start, timeout: timedelta, *args: Any, **options: Any) -> None:
        """Takes the arguments of :class:`Generation` from ``participants`` on. Raises LoadError: the same on every rank."""
        self._drop_generation()
        node_version, self._node_version = self._node_version, None
        self._generation = Generation(self._store, timeout, start.generation, *args, node_version=node_version, **options)

    def _drop_generation(self) -> None:
        if self._generation is not None:
            version = self._generation.node_version
            self._node_version = version if version is not None and version.key else None
            self._generation.close()
            self._generation = None

    def _leave_generation(self, error: BaseException) -> None:
        """Drops the generation after an error. Tells the others if this rank was interrupted before it came to a version."""
        if self._generation is not None and not isinstance(error, Exception):
            control = self._generation.control
            why = f"rank {control.rank} was interrupted before the version ({type(error).__name__})"
            control.refuse(control.next_load(), LoadError(why))
        self._drop_generation()

    def _warn(self, report: SyncReport, warning: str) -> None:
        report.warnings.append(warning)
        log.logger.warning("%s", warning)

    def close(self) -> None:
        """Leaves the sync, and frees memory."""
        self._drop_generation()
        self._node_version = None
        self._closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def as_version(version: Any) -> int:
    """Returns a version as an int, also of numpy's. Raises TypeError unless it is a number that can be sent."""
    if isinstance(version, bool) or not hasattr(version, "__index__") or not 0 <= operator.index(version) < 1 << 63:
        raise TypeError(f"expected version to be an int of at least 0, got {version!r}")
    return int(version)


def check_choice(name: str, value: object, literal: Any) -> None:
    """Raises ValueError unless an option is one of those of a ``Literal``."""
    if value not in (choices := get_args(literal)):
        raise ValueError(f"expected {name} to be one of {', '.join(choices)}, got {value!r}")
