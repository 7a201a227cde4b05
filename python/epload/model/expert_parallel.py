"""What a model does not say of itself: that what one rank holds is a part of something larger.

An expert-parallel model may hold plain tensors, or ones that FSDP shards further, whose own shape is already that of this
rank's experts; or modules for this rank's experts only. Both are said with the load.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from torch.distributed.device_mesh import DeviceMesh

from epload.core.placement import Layout, Sharded


@dataclass(frozen=True)
class OuterShard:
    """Tensors that are one rank's equal part, along ``dim``, of a tensor cut along ``mesh``, whatever they seem to be.

    A parameter of shape [E / ep, ...], plain or sharded further on another mesh, is filled from one of shape [E, ...].
    """

    pattern: str
    """Regular expression found in their names."""
    mesh: DeviceMesh
    """One axis."""
    dim: int = 0

    def around(self, name: str, layout: Layout, coordinate: tuple[int, ...]) -> tuple[Layout, tuple[int, ...]]:
        """The layout of the larger tensor, which this axis cuts first, and this rank's place in it.

        Raises:
            ValueError: the mesh has several axes or not this rank, or the tensor has no such dim.
        """
        here = self.mesh.get_coordinate()
        if self.mesh.ndim != 1 or here is None:
            raise ValueError(
                f"expected {self} to have a mesh of one axis with this rank on it; take one axis of yours: mesh['ep']"
            )
        ndim = len(layout.shape)
        if not -ndim <= self.dim < ndim:
            raise ValueError(f"{self} does not apply to {name}, which has shape {list(layout.shape)}")
        dim, size = self.dim % ndim, self.mesh.size()
        larger = Layout(
            (*layout.shape[:dim], layout.shape[dim] * size, *layout.shape[dim + 1 :]),
            (size, *layout.mesh_shape),
            (Sharded(dim), *layout.placements),
        )
        return larger, (here[0], *coordinate)

    def __str__(self) -> str:
        return f"OuterShard({self.pattern!r}, dim={self.dim})"


@dataclass(frozen=True)
class LocalModules:
    """Modules that this rank has and other ranks need not have: a list that holds this rank's experts only.

    What they hold is left out of what ranks must agree on; every checkpoint tensor that some rank has a place for is sent.
    """

    pattern: str
    """Regular expression found in the names of their tensors. Its first group, if any, is the module's number here."""
    first: int = 0
    """Added to that number to give the number in the checkpoint: 0 if modules keep their own, else of this rank's first."""

    def called(self, name: str) -> str | None:
        """The name by which all ranks know a tensor, None for one of another module."""
        match = re.search(self.pattern, name)
        if match is None or not match.re.groups or not self.first:
            return match and name
        return f"{name[: match.start(1)]}{int(match[1]) + self.first}{name[match.end(1) :]}"


@dataclass(frozen=True)
class Parts:
    """All that is said about one model."""

    outer_shards: tuple[OuterShard, ...] = ()
    local_modules: tuple[LocalModules, ...] = ()

    def check(self, names: Sequence[str]) -> None:
        """Raises ValueError naming a pattern that is found in none of the model's names."""
        for part in (*self.outer_shards, *self.local_modules):
            # A rank may have none of the local modules, more ranks than experts for one.
            if isinstance(part, OuterShard) and not any(re.search(part.pattern, name) for name in names):
                raise ValueError(f"{part} matches no tensor of the model, which has {', '.join(names[:5])}, ...")

    def outer(self, name: str) -> OuterShard | None:
        return next((part for part in self.outer_shards if re.search(part.pattern, name)), None)

    def called(self, name: str) -> str | None:
        """See :meth:`LocalModules.called`."""
        return next((called for part in self.local_modules if (called := part.called(name)) is not None), None)
