"""Defines what a caller asks for: the options of a loader, and the arguments of one load."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn

from epload.checkpoint.checksums import AnyChecksums as AnyChecksums
from epload.mapping.mapping import AnyMapping
from epload.mapping.precision import AnyDTypes, DTypes, requested_dtypes
from epload.mapping.wrappers import unwrap
from epload.model.devices import requested_device
from epload.model.expert_parallel import LocalModules, OuterShard, Parts, planned_shards
from epload.model.initialization import InitMissing
from epload.model.megatron import MegatronChunks, Model, as_module
from epload.planning.buckets import HEADER_BYTES
from epload.planning.schedule import ALGORITHMS, READERS, WAVE_BYTES, Algorithms
from epload.verify.digests import check_verify


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """The options of :func:`epload.load` that are rarely needed.

    :class:`epload.HierarchicalLoader` and its ``load`` have arguments of the same names.
    """

    src: int | None = None
    """The global rank that reads (``readers="one"``); the topology's first if None. The leaders of the nodes are on its rail."""
    algorithm: Algorithms = "auto"
    """The way of buckets between nodes: ``"two_level"`` through one rank of each, ``"striped"`` in as many stripes as a node has
    ranks. ``"auto"`` is ``"striped"`` for a model on a device if node sizes are equal, else ``"two_level"``. With ``"auto"``,
    buckets that do not cross nodes go through memory that a node's ranks share; each rank copies what it keeps out of it."""
    bucket_bytes: int = WAVE_BYTES
    """The size of a bucket, 64 MiB by default. Each rank has two, with ``"every"`` none. A rank that copies bytes from
    the host to a device has up to 64 MiB of pinned memory for them, and as much on the device. If a node's ranks
    share staging buffers, this is the size of the buckets that move together, and the node has twice that (each rank, if they
    cannot share memory)."""
    direct_io: bool = True
    """True to read files on local disks that are not in the page cache past it (``O_DIRECT``), which takes a small part of the
    CPU time and leaves the cache as it is. If False, they are in the cache afterwards, as far as there is memory, and the next
    load finds them there. Has no effect where bytes are read again: with ``verify=True``, and with ``"every"`` if ranks of a node
    keep the same ones."""
    stream: torch.Stream | None = None
    """A stream of the model's device, for all device work except the copies from host memory. It first waits for the caller's
    current stream, which afterwards waits for it. If None, the loader creates a stream. Must be None for models on CPU."""
    outer_shards: Sequence[OuterShard] = ()
    """Tensors of the model that are this rank's part of larger ones, though they do not say so."""
    local_modules: Sequence[LocalModules] = ()
    """Modules whose tensors other ranks need not have."""
    prefix: str = ""
    """The place of the model in the state dict that torch.distributed.checkpoint (DCP) saved in a folder, e.g. ``"app.model"``;
    by default under a top-level key "model" or "state_dict", or under the only key."""
    trace: bool = False
    """True to record what each rank does and when, for :meth:`~epload.LoadReport.trace` and :meth:`~epload.LoadReport.plot` of
    the report. All ranks record if any rank passes True. Their events go to the first rank at the end of the load, in one more
    agreement round. If the environment variable ``EPLOAD_TRACE`` names a folder, every load is traced, and the first rank writes
    the trace to a file in that folder."""


@dataclass(frozen=True)
class Options:
    """The options of one loader, equal on all its ranks. See ``HierarchicalLoader``."""

    readers: str
    """One of READERS, or "auto"."""
    algorithm: str
    """One of ALGORITHMS, or "auto"."""
    src: int
    bucket_bytes: int
    verify: bool
    direct_io: bool = True

    def __post_init__(self) -> None:
        """Raises ValueError, TypeError."""
        check_verify(self.verify)
        for name, allowed in (("readers", ("auto", *READERS)), ("algorithm", ("auto", *ALGORITHMS))):
            if getattr(self, name) not in allowed:
                raise ValueError(f"expected {name} to be one of {', '.join(allowed)}, got {getattr(self, name)!r}")
        if not isinstance(self.bucket_bytes, int) or isinstance(self.bucket_bytes, bool):
            raise TypeError(
                f"expected bucket_bytes to be a number of bytes as an int, such as 500 * 10**6, got {self.bucket_bytes!r}"
            )
        if self.bucket_bytes < HEADER_BYTES + 16:
            raise ValueError(f"expected bucket_bytes of at least {HEADER_BYTES + 16}, got {self.bucket_bytes}")


@dataclass(frozen=True)
class Request:
    """The arguments of one load, as one rank's caller passes them. See ``HierarchicalLoader.load``."""

    model: nn.Module
    checkpoint: Any
    mapping: AnyMapping
    strict: bool
    ignore_mismatched_shapes: bool
    dtype: AnyDTypes
    parts: Parts
    init_missing: InitMissing | None
    prefix: str = ""
    variant: str = ""
    trace: bool = False
    device: torch.device | str | None = None
    checksums: AnyChecksums = False
    as_pretrained: bool = True
    """False to do no more for a transformers model than for others: no dtypes of ``from_pretrained``, no non-persistent buffers
    that have storage."""

    @cached_property
    def dtypes(self) -> DTypes:
        """The dtypes that ``dtype`` asks for. Raises ValueError or TypeError if one is none."""
        return requested_dtypes(self.dtype)

    @cached_property
    def place(self) -> torch.device | None:
        """The device that ``device`` asks for, with its index. Raises as :func:`requested_device`."""
        return requested_device(self.device)

    @property
    def resets(self) -> bool:
        """True if modules initialize with their ``reset_parameters()`` what neither the checkpoint nor the model fills."""
        return isinstance(self.init_missing, str) and self.init_missing == "reset_parameters"

    def check(self) -> None:
        """Raises TypeError for what could not even be looked at, ValueError for a wrapper or a dtype that is not supported."""
        model = as_module(self.model)
        if isinstance(model, MegatronChunks) and len(self.parts) > 1:
            raise ValueError(
                "expected no outer_shards and local_modules for a Megatron-Core model, which itself says what each rank has"
            )
        kinds = {"strict": bool, "ignore_mismatched_shapes": bool, "trace": bool, "prefix": str, "variant": str}
        for option, of_type in kinds.items():
            if not isinstance(value := getattr(self, option), of_type):
                noun = "string" if of_type is str else "bool"
                raise TypeError(f"expected {option} to be a {noun}, got {value!r}")
        self.dtypes, self.place  # noqa: B018 raise if one is none
        if self.resets and isinstance(model, MegatronChunks):
            raise ValueError(
                "expected init_missing to be a function for a Megatron-Core model, whose modules hold shards and do not know the "
                "size of the whole tensors"
            )
        if not (self.init_missing is None or self.resets or callable(self.init_missing)):
            raise TypeError(f"expected init_missing to be a function, or 'reset_parameters', got {self.init_missing!r}")


def parts_of(outer_shards: Sequence[OuterShard], local_modules: Sequence[LocalModules]) -> Parts:
    """Returns all that a caller says of one model. Raises TypeError if it is of another type."""
    for option, parts, kind in (("outer_shards", outer_shards, OuterShard), ("local_modules", local_modules, LocalModules)):
        if not isinstance(parts, list | tuple) or not all(isinstance(part, kind) for part in parts):
            raise TypeError(f"expected {option} to be a list of epload.{kind.__name__}, got {parts!r}")
    return (*outer_shards, *local_modules)


def describe_model(model: Model, parts: Parts) -> tuple[Any, Parts]:
    """Returns the module that is loaded, and what is said of its parts: ranks of Megatron-Core have modules of their own. What is
    no model is returned as it is, and refused by :meth:`Request.check`."""
    with suppress(TypeError, ValueError):
        model = as_module(model)
    if isinstance(model, MegatronChunks):
        return model, (*parts, LocalModules(""))
    return model, (*parts, *planned_shards(model, unwrap(model, ())[0])) if isinstance(model, nn.Module) else parts
