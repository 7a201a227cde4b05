"""Defines what ranks tell each other before data moves, and what they have agreed on in the end."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from epload.checkpoint.manifest import Manifest
from epload.loading.inputs import LocalInputs
from epload.loading.missing import Missing
from epload.mapping.mapping import Mapping
from epload.planning.plan import LoadPlan
from epload.planning.waves import wave_bytes


@dataclass(frozen=True)
class OpeningMessage:
    """A rank's message once it has read its model, and opened the checkpoint if it is the source or has its own."""

    loader: int
    """The number of the loader among those of its topology."""
    options: str
    groups: int
    """The number of process groups that the topology has made."""
    meta: bool
    """True if the rank has tensors on meta."""
    lacks_buffers: bool
    """True if non-persistent buffers are on meta."""
    trace: bool
    seed: int
    cached: str
    """Identity of the manifest of the rank's previous load; empty if there is none."""
    identity: str = ""
    """Identity of the source's manifest; the following fields are the source's as well."""
    provenance: list[Any] = field(default_factory=list)
    content: str = ""
    """The manifest's compact form in base64."""


@dataclass(frozen=True)
class Opening:
    """The decision on all opening messages."""

    identity: str
    provenance: list[Any]
    """The source's, as in its message."""
    content: str
    """The source's; empty if all ranks have the manifest from the load before."""
    uneven: bool
    """True if some ranks have buffers that others lack."""
    meta: bool
    """True if any rank has tensors on meta."""
    seed: int
    """Seed for tensors that are initialized."""
    groups: int
    trace: bool
    """True if any rank asks for events."""


@dataclass(frozen=True)
class PlanMessage:
    """A rank's message once it has planned."""

    fingerprint: str
    """The plan's; empty if there is none."""
    reads: bool
    """True if the rank has opened the checkpoint."""
    nbytes: int
    """Bytes that the rank reads if all read what they keep."""
    meshes: list[list[Any]]
    """See :func:`~epload.loading.differences.mesh_claims`."""


@dataclass(frozen=True)
class PlanDecision:
    """The decision on all plan messages."""

    fingerprints: dict[str, int]
    """Each distinct one with the first rank that has it."""
    all_read: bool
    nbytes: list[int]
    """The bytes of each rank, in the order of the ranks."""
    mismatched_meshes: dict[str, list[int]]


@dataclass(frozen=True)
class Draft:
    """Everything that a plan follows from, besides the model."""

    manifest: Manifest
    mapping: Mapping
    per_wave: int
    bucket_bytes: int
    options: str


@dataclass(frozen=True)
class AgreedLoad:
    """One load, as all ranks have agreed on it. Equal on all but for ``inputs``, ``missing`` and the plan's copies."""

    inputs: LocalInputs
    manifest: Manifest
    plan: LoadPlan
    per_wave: int
    readers: str
    """The readers of this load; never ``"auto"``."""
    reason: str
    """The reason in words, with ``"auto"``; else empty."""
    all_read: bool
    """True if every rank has opened the checkpoint."""
    owned: list[int]
    """Bytes that each rank reads if all read what they keep, in the order of the ranks."""
    missing_keys: list[str]
    mismatched_keys: list[str]
    """Names of the model, on whichever rank."""
    ignored_keys: list[str]
    """Missing and unexpected keys that the mapping says to ignore."""
    missing: Missing
    meta: bool
    """True if any rank has tensors on meta."""

    @property
    def wave_bytes(self) -> int:
        """Bytes of the largest wave."""
        return wave_bytes(self.plan, self.per_wave)

    @property
    def device(self) -> torch.device:
        """The device that the load works on."""
        return self.inputs.device
