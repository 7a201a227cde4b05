"""The values of an agreement: what a rank proposes, what the ranks have agreed on after each round, and in the end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from epload.checkpoint.manifest import Manifest
from epload.loading.inputs import LocalInputs
from epload.loading.missing import Missing
from epload.mapping.mapping import Mapping
from epload.planning.plan import LoadPlan


@dataclass(frozen=True)
class Draft:
    """Everything that a plan follows from, besides the model."""

    manifest: Manifest
    mapping: Mapping
    readers: str
    """The readers for which buckets are sized."""
    per_wave: int
    bucket_bytes: int
    options: str


class Proposal(NamedTuple):
    """A plan made before the ranks have agreed on anything: of the checkpoint and the model of the load before."""

    draft: Draft
    plan: LoadPlan
    joined: bool
    """True if this rank has opened the checkpoint for it."""


class Announcement(NamedTuple):
    """Describes the source rank's manifest before it is sent."""

    nbytes: int
    """Size of the compact form in bytes; 0 if every rank has it from the previous load."""
    identity: str
    about: list[Any]


class Opening(NamedTuple):
    """The result that the ranks agree on once all have opened."""

    manifest: Announcement
    content: str
    """The manifest's compact form in base64, if it comes with this round and some rank lacks it; else empty."""
    holders: dict[str, int]
    meta: bool
    """True if any rank has tensors on meta."""
    seed: int
    """Seed for tensors that are initialized."""
    planned: list[Any] | None
    """The decision that the planning round would make, if all ranks have proposed the same plan; else None."""
    traced: bool
    """True if any rank asks for events."""


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
    kept: list[int]
    """Bytes that each rank reads if all read what they keep, in the order of the ranks."""
    missing_keys: list[str]
    mismatched_keys: list[str]
    """Names of the model, on whichever rank."""
    ignored_keys: list[str]
    """Missing and unexpected keys that the mapping says to ignore."""
    missing: Missing
    prepared: bool
    """True if nothing has to be made for the model, so that no rank can fail before data moves."""
    offers: dict[str, Any]
    """Offers of memory that the ranks of a node share, by the rank that made it; see ``NodeSharing``."""

    @property
    def device(self) -> torch.device:
        """The device that the load works on."""
        return self.inputs.device
