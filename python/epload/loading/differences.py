"""Reports where ranks differ: in what they want to load into what, or in the device meshes that they have built."""

from __future__ import annotations

import hashlib
from collections.abc import Set
from typing import Any

from epload.checkpoint.manifest import Manifest
from epload.core import dtypes
from epload.core.log import logger
from epload.errors import CallOrderError, ManifestMismatch
from epload.model.targets import Targets
from epload.ranks.control import Control

_MAX_VIEWS = 4
"""Whole descriptions of models that are compared to tell where they differ."""
_MAX_LINES = 5
"""Differences that an error shows."""
_MAX_MESHES, _MAX_RANKS = 4, 16
"""Meshes that an error lists at most, and ranks of each."""

Claims = list[list[Any]]
"""Digest of each mesh, and the number of ranks of the topology that have to report the same."""


def distinct(views: dict[int, str]) -> dict[str, int]:
    """Each distinct view with the first rank that has it."""
    return {view: rank for rank, view in reversed(views.items())}


def check_same_loader(numbers: dict[int, int]) -> None:
    """Raises CallOrderError if ranks are in loads of different loaders."""
    if len(set(numbers.values())) > 1:
        logger.info("ranks in loads of different loaders: %s", numbers)
        raise CallOrderError


def check_same_options(options: dict[int, str]) -> None:
    """Raises ManifestMismatch if ranks have loaders with different options."""
    by_text: dict[str, list[int]] = {}
    for rank, text in options.items():
        by_text.setdefault(text, []).append(rank)
    if len(by_text) > 1:
        listed = "; ".join(f"ranks {ranks} have {text}" for text, ranks in by_text.items())
        raise ManifestMismatch(f"the ranks' loaders have different options, nothing was moved: {listed}")


def explain_difference(control: Control, manifest: Manifest, targets: Targets, options: str) -> None:
    """Raises ManifestMismatch on every rank, in rounds, if what the ranks want to load into what differs."""
    view = describe(manifest, targets, options)
    digest = hashlib.blake2b("\n".join(view).encode(errors="backslashreplace"), digest_size=16).hexdigest()
    speakers = sorted(control.settle("planning", None, digest, distinct).values())[:_MAX_VIEWS]
    if len(speakers) == 1:
        return

    def differ(views: dict[int, list[str] | None]) -> None:
        raise difference({r: v for r, v in sorted(views.items()) if v is not None}, min(speakers))

    control.settle("planning", None, view if control.rank in speakers else None, differ)


def describe(manifest: Manifest, targets: Targets, options: str) -> list[str]:
    """A line an entry of everything in the plan's fingerprint."""
    lines = [f"options: {options}"]
    lines += [f"model {line}" for line in targets.describe()]
    lines += [f"checkpoint's quantization: {manifest.quantization}"] * (manifest.quantization is not None)
    lines += [
        f"checkpoint {name}: {dtypes.name(dtype)} {list(shape)}"
        for name, dtype, shape in zip(manifest.names, manifest.dtypes, manifest.shapes, strict=True)
    ]
    return lines


def difference(views: dict[int, list[str]], reference: int) -> ManifestMismatch:
    """The error for ranks whose descriptions (see :func:`describe`) differ from that of rank ``reference``."""
    ours = views[reference]
    lines = []
    for rank, theirs in views.items():
        for a, b in zip(ours, theirs, strict=False):
            if a != b:
                lines.append(f"rank {reference} has {a!r} where rank {rank} has {b!r}")
                if len(lines) >= _MAX_LINES:
                    break
        if len(ours) != len(theirs):
            extra, who = (ours, reference) if len(ours) > len(theirs) else (theirs, rank)
            lines.append(f"only rank {who} has {extra[min(len(ours), len(theirs))]!r}")
    return ManifestMismatch("the ranks disagree, nothing was moved:\n  " + "\n  ".join(lines[: _MAX_LINES + 1]))


# ---- device meshes ----


def mesh_claims(targets: Targets, ranks: Set[int]) -> Claims:
    """Returns what this rank reports of its meshes. Its size does not depend on the number of ranks."""
    return [[digest, len(ranks & set(mesh.ranks))] for digest, mesh in targets.mesh_digests()]


def find_mesh_mismatches(claims: dict[int, Claims]) -> dict[str, list[int]]:
    """Digests of meshes that not all of their ranks have reported, each with the first ranks that have; a few of them."""
    reported: dict[str, list[int]] = {}
    expected: dict[str, int] = {}
    for rank, theirs in claims.items():
        for digest, count in theirs:
            reported.setdefault(digest, []).append(rank)
            expected[digest] = count
    mismatched = [digest for digest, ranks in reported.items() if len(ranks) != expected[digest]]
    return {digest: reported[digest][:_MAX_RANKS] for digest in mismatched[:_MAX_MESHES]}


def raise_mesh_mismatch(control: Control, targets: Targets, mismatches: dict[str, list[int]]) -> None:
    """Raises ManifestMismatch on every rank, in a round. ``mismatches``: as found by :func:`find_mesh_mismatches`."""
    described: dict[str, str] = {}
    for digest, mesh in targets.mesh_digests():
        if control.rank == mismatches.get(digest, [None])[0]:
            number = targets.meshes.index(mesh)
            name = next(
                name
                for i, (name, layout) in enumerate(zip(targets.names, targets.layout, strict=True))
                if i not in targets.local_only and number in targets.layout_meshes[layout]
            )
            described[digest] = f"{mesh}, e.g. for {name}"

    def explain(views: dict[int, dict[str, str]]) -> None:
        texts = {digest: text for view in views.values() for digest, text in view.items()}
        lines = [f"ranks {ranks} have mesh {texts[digest]}" for digest, ranks in mismatches.items()]
        raise ManifestMismatch(
            "the ranks disagree about the device mesh, or about what lies on it, nothing was moved:\n  "
            + "\n  ".join(lines)
            + "\nBuild every DeviceMesh from the same ranks in the same order on all ranks"
        )

    control.settle("planning", None, described, explain)
