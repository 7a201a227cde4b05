"""Reports where ranks differ: in what they want to load into what, or in the device meshes that they have built."""

from __future__ import annotations

import hashlib
from typing import Any

from epload.checkpoint.manifest import Manifest
from epload.core import dtypes
from epload.core.log import logger
from epload.errors import ManifestMismatch, call_order_error
from epload.model.dtensor import describe_mesh
from epload.model.targets import Targets
from epload.observe.render import list_first
from epload.ranks.control import Control
from epload.ranks.membership import group_equal

_MAX_VIEWS = 4
"""Whole descriptions of models that are compared to tell where they differ."""
_MAX_LINES = 5
"""Differences that an error shows."""
_AROUND = 80
"""Characters that it shows before the place where two texts differ, and a third of those behind it."""
_MAX_MESHES, _MAX_RANKS = 4, 16
"""Meshes that an error lists at most, and ranks of each."""

Claims = list[list[Any]]
"""Digest of each mesh, and the number of ranks of the topology that have to report the same: what a rank reports of its meshes.
Its size does not depend on the number of ranks."""


def check_same_loader(numbers: dict[int, int]) -> None:
    """Raises LoadError if ranks are in loads of different loaders."""
    if len(set(numbers.values())) > 1:
        logger.info("ranks in loads of different loaders: %s", numbers)
        raise call_order_error()


def check_same_options(options: dict[int, str]) -> None:
    """Raises ManifestMismatch if ranks have loaders with different options."""
    groups = group_equal(options)
    if len(groups) > 1:
        listed = "; ".join(f"ranks {ranks} have {options[ranks[0]]}" for ranks in groups)
        raise ManifestMismatch(f"the ranks' loaders have different options, nothing was moved: {listed}")


def explain_difference(control: Control, manifest: Manifest, targets: Targets, options: str) -> None:
    """Raises ManifestMismatch on every rank, in rounds, if what the ranks want to load into what differs."""
    view = _describe(manifest, targets, options)
    text = "\n".join(f"{subject}: {value}" for subject, value in view.items())
    digest = hashlib.blake2b(text.encode(errors="backslashreplace"), digest_size=16).hexdigest()
    speakers = control.agree("planning", None, digest, _first_of_each)
    if len(speakers) > 1:
        control.agree("planning", None, view if control.rank in speakers else None, _raise_difference)


def _first_of_each(digests: dict[int, str]) -> list[int]:
    """Returns the first rank with each distinct digest, a few of them."""
    return [ranks[0] for ranks in group_equal(digests)][:_MAX_VIEWS]


def _describe(manifest: Manifest, targets: Targets, options: str) -> dict[str, str]:
    """Returns everything in the plan's fingerprint: a description of each tensor, by its name."""
    view = {"options": options}
    view |= {f"model {name}": text for name, text in targets.describe().items()}
    if manifest.quantization is not None:
        view["checkpoint's quantization"] = str(manifest.quantization)
    for name, dtype, shape in zip(manifest.names, manifest.dtypes, manifest.shapes, strict=True):
        view[f"checkpoint {name}"] = f"{dtypes.name(dtype)} {list(shape)}"
    return view


def _raise_difference(views: dict[int, dict[str, str] | None]) -> None:
    """``views``: of ranks whose descriptions differ; None of others."""
    (reference, first), *others = sorted((rank, view) for rank, view in views.items() if view is not None)
    lines: list[str] = []
    for rank, view in others:
        for owner, other, own, remote in ((reference, rank, first, view), (rank, reference, view, first)):
            if extra := [f"{name!r}" for name in own if name not in remote]:
                lines.append(f"rank {owner} has {list_first(extra, 10)}, which rank {other} lacks")
        if first.keys() == view.keys() and list(first) != list(view):
            a, b = next((a, b) for a, b in zip(first, view, strict=True) if a != b)
            lines.append(f"rank {reference} has the same names in another order than rank {rank}: {a!r} where it has {b!r}")
    for rank, view in others:
        for name in first:
            if name in view and first[name] != view[name]:
                a, b = _around_difference(first[name], view[name])
                lines.append(f"rank {reference} has {name + ': ' + a!r} where rank {rank} has {name + ': ' + b!r}")
    listed = "\n  ".join(lines[:_MAX_LINES])
    raise ManifestMismatch(f"the ranks disagree, nothing was moved:\n  {listed}")


def _around_difference(*texts: str) -> list[str]:
    """Returns of each text what is around the first place where they differ, or all of it if it is short."""
    same = next((i for i, letters in enumerate(zip(*texts, strict=False)) if len({*letters}) > 1), min(map(len, texts)))
    begin = max(same - _AROUND, 0)
    shown = [("..." if begin else "") + text[begin : begin + 4 * _AROUND] for text in texts]
    return [part + "..." * (len(text) > begin + 4 * _AROUND) for part, text in zip(shown, texts, strict=True)]


# ---- device meshes ----


def find_mesh_mismatches(claims: dict[int, Claims]) -> dict[str, list[int]]:
    """Digests of meshes that not all of their ranks have reported, each with the first ranks that have; a few of them."""
    reported: dict[str, list[int]] = {}
    expected: dict[str, int] = {}
    for rank, of_rank in claims.items():
        for digest, count in of_rank:
            reported.setdefault(digest, []).append(rank)
            expected[digest] = count
    mismatched = [digest for digest, ranks in reported.items() if len(ranks) != expected[digest]]
    return {digest: reported[digest][:_MAX_RANKS] for digest in mismatched[:_MAX_MESHES]}


def raise_mesh_mismatch(control: Control, targets: Targets, mismatches: dict[str, list[int]]) -> None:
    """Raises ManifestMismatch on every rank, in a round. ``mismatches``: as found by :func:`find_mesh_mismatches`."""
    described: dict[str, str] = {}
    for digest, mesh in targets.mesh_digests:
        if control.rank == mismatches.get(digest, [None])[0]:
            number = targets.meshes.index(mesh)
            names = (
                name
                for i, (name, layout) in enumerate(zip(targets.names, targets.layout, strict=True))
                if i not in targets.local_only and number in targets.layout_meshes[layout]
            )
            described[digest] = f"ranks {mismatches[digest]} have mesh {describe_mesh(mesh)}, e.g. for {next(names)}"

    def explain(views: dict[int, dict[str, str]]) -> None:
        texts = {digest: text for view in views.values() for digest, text in view.items()}
        listed = "\n  ".join(texts[digest] for digest in mismatches)
        raise ManifestMismatch(
            f"the ranks disagree about the device mesh, or about what lies on it, nothing was moved:\n  {listed}\n"
            "Build every DeviceMesh from the same ranks in the same order on all ranks"
        )

    control.agree("planning", None, described, explain)
