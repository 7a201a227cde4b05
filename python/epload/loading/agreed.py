"""Defines what ranks tell each other before data moves, and what they have agreed on in the end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from epload.checkpoint.manifest import Manifest
from epload.errors import redact
from epload.loading.inputs import LocalInputs
from epload.loading.missing import Missing
from epload.mapping.mapping import Mapping
from epload.mapping.precision import below_fp32_warning
from epload.native.info import __version__
from epload.planning.plan import LoadPlan
from epload.report import LoadReport


class Opening(NamedTuple):
    """A rank's message once it has read its model, and opened the checkpoint if it is the source or has its own.

    The decision on all messages is that of the source, but for what any rank needs."""

    loader: int
    """The number of the loader among those of its topology."""
    options: str
    groups: int
    """Number of process groups that the topology has made; in the decision, the maximum."""
    meta: bool
    """True if the rank, or any rank, has tensors on meta."""
    lacks_buffers: bool
    """True if non-persistent buffers are on meta; in the decision, if they are on some ranks and not on others."""
    trace: bool
    """True if the rank, or any rank, asks for events."""
    seed: int
    """Seed for tensors that are initialized."""
    cached: str
    """Identity of the manifest of the rank's previous load; empty if there is none."""
    identity: str = ""
    """Identity of the source's manifest; the following fields are the source's as well."""
    provenance: Sequence[Any] = ()
    content: str = ""
    """The manifest's compact form in base64; in the decision, empty if all ranks have the manifest from their previous load."""
    verified: bool = False
    """See :attr:`Checkpoint.verified`."""


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
    verified: bool
    """True if the checkpoint verifies what it gives by itself."""

    def describe(self, report: LoadReport) -> None:
        """Writes to the report what was loaded, and what was not."""
        plan, targets, ignored = self.plan, self.inputs.targets, {*self.ignored_keys}
        report.missing_keys = [key for key in self.missing_keys if key not in ignored]
        report.unexpected_keys = [key for key in plan.unexpected if key not in ignored]
        report.mismatched_keys = self.mismatched_keys
        report.ignored_keys = [*self.ignored_keys, *self.manifest.ignored]
        report.tied_keys, report.casts = list(plan.tied), plan.casts
        report.tensors, report.nbytes, report.buckets = plan.tensor_count, plan.payload, len(plan.buckets)
        report.epload_version = __version__
        report.source = redact(self.manifest.source)
        report.kept_in_fp32 = list(targets.kept_in_fp32)
        if warning := below_fp32_warning(targets):
            report.warnings.append(warning)
