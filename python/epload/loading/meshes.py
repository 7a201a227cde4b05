"""Whether all ranks of each device mesh have built the same mesh, with the same tensors on it."""

from __future__ import annotations

from typing import Any

from epload.control.control import Control
from epload.errors import ManifestMismatch
from epload.model.targets import Targets

_MAX_MESHES, _MAX_RANKS = 4, 16
"""That an error lists."""

Claims = list[list[Any]]
"""Of each mesh its digest, and how many ranks of the topology have to report the same."""


class MeshClaims:
    """What this rank reports of its meshes; kept while the model's meshes are the same."""

    def __init__(self, ranks: tuple[int, ...]) -> None:
        self._ranks = frozenset(ranks)
        self._known: tuple[object, Claims] | None = None

    def of(self, targets: Targets) -> Claims:
        """Their size does not depend on the number of ranks."""
        claims = targets.mesh_digests()
        if self._known is None or self._known[0] is not claims:
            self._known = claims, [[digest, sum(rank in self._ranks for rank in mesh.ranks)] for digest, mesh in claims]
        return self._known[1]


def find_mismatches(claims: dict[int, Claims]) -> dict[str, list[int]]:
    """Digests of meshes that not all of their ranks have reported, each with the first ranks that have; a few of them."""
    reported: dict[str, list[int]] = {}
    expected: dict[str, int] = {}
    for rank, theirs in claims.items():
        for digest, count in theirs:
            reported.setdefault(digest, []).append(rank)
            expected[digest] = count
    mismatched = [digest for digest, ranks in reported.items() if len(ranks) != expected[digest]]
    return {digest: reported[digest][:_MAX_RANKS] for digest in mismatched[:_MAX_MESHES]}


def raise_mismatch(control: Control, targets: Targets, mismatches: dict[str, list[int]]) -> None:
    """Raises ManifestMismatch on every rank, in a round. ``mismatches``: as found by :func:`find_mismatches`."""
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
        known = {digest: text for view in views.values() for digest, text in view.items()}
        lines = [f"ranks {ranks} have mesh {known[digest]}" for digest, ranks in mismatches.items()]
        raise ManifestMismatch(
            "the ranks disagree about the device mesh, or about what lies on it, nothing was moved:\n  "
            + "\n  ".join(lines)
            + "\nBuild every DeviceMesh from the same ranks in the same order on all ranks"
        )

    control.settle("planning", None, described, explain)
