"""From checkpoint names and layouts to regions of the model's tensors. Pure: names and shapes in, regions out.

A checkpoint tensor lands in one or several places; each is a box of a target that a strided region of the tensor fills. Rules
say which: renaming changes the target, converting puts the target together from several tensors, or takes one apart.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from collections.abc import Mapping as MappingType
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from torch import nn

from epload.core.views import Shape
from epload.errors import ModelMismatch
from epload.mapping.adapters import adapter_file
from epload.mapping.place import Misfit, Place, Placing
from epload.mapping.rules import Convert, Rename
from epload.mapping.wrappers import comes_from, unwrap


@dataclass(frozen=True)
class Mapping:
    """Rules that are applied in order: all renames, then the first conversion that matches.

    A name that the model has, but not under what the rules make of it, stays as it is.
    """

    renames: tuple[Rename, ...] = ()
    converts: tuple[Convert, ...] = ()
    base: str = ""
    """Name of the module that holds the model proper below its head. Names in the checkpoint may have or lack it."""
    ties: tuple[tuple[str, str], ...] = ()
    """Pairs of names of the model that have one value. What fills one fills the other, where the checkpoint does not; also
    when parallelizing the model has made two tensors of them."""
    aliases: tuple[Rename, ...] = ()
    """Renames of the model's names to those that rules and checkpoints speak of, where a wrapper has given it others."""
    required: bool = True
    """Whether rules of which none matches a name are a mistake; they are none in a mapping declared for any checkpoint."""
    ignore_unexpected: tuple[str, ...] = ()
    """Regular expressions. A checkpoint key in which one is found, as it is or renamed, may lack a place in the model."""
    ignore_missing: tuple[str, ...] = ()
    """Regular expressions. A name of the model in which one is found may be missing from the checkpoint."""
    only: tuple[tuple[str, str], ...] = ()
    """If given, the names of the checkpoint that are known, each with the model's name for it. Other tensors of the model are
    not expected in the checkpoint and keep their values. A pair without a checkpoint name is a tensor that is missing."""

    def __post_init__(self) -> None:
        """Raises ValueError if a pattern of keys to ignore is no regular expression."""
        for pattern in (*self.ignore_unexpected, *self.ignore_missing):
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(f"expected regular expressions of keys to ignore, got {pattern!r}: {error}") from error

    @classmethod
    def identity(cls) -> Mapping:
        """Names and shapes as they are."""
        return cls()

    @classmethod
    def from_transformers(cls, model: Any) -> Mapping:
        """The conversion that the transformers library (5.x) declares for ``model``, whatever its architecture.

        An operation that does more than move elements is an error once a checkpoint tensor would need it.
        """
        from epload.mapping.transformers import declared

        return declared(model)

    def ignored(self, names: Sequence[str], missing: Iterable[str], unexpected: Iterable[str]) -> list[str]:
        """Which of the missing and unexpected keys are no mistake in a strict load.

        Args:
            names: all keys of the checkpoint.
            missing: names of the model that the checkpoint does not fill.
            unexpected: keys of the checkpoint that the model has no place for.
        """
        found = []
        if self.ignore_missing and (missing := list(missing)):
            called = missing
            for alias in self.aliases:
                called = alias.apply(called)
            search = _any_of(self.ignore_missing).search
            found += [name for name, within in zip(missing, called, strict=True) if search(within)]
        if self.ignore_unexpected and (unexpected := set(unexpected)):
            renamed = list(names)
            for rename in (*self.aliases, *self.renames):
                renamed = rename.apply(renamed)
            search = _any_of(self.ignore_unexpected).search
            found += [a for a, b in zip(names, renamed, strict=True) if a in unexpected and (search(a) or search(b))]
        return found

    def place(
        self,
        names: Sequence[str],
        shapes: Sequence[Shape],
        targets: MappingType[str, Shape],
        misfits: list[Misfit] | None = None,
    ) -> list[tuple[Place, ...]]:
        """For each checkpoint tensor the places that it fills; none if the model has no place for it.

        Args:
            misfits: where given, targets that the checkpoint has in another shape are added to it, and left out.

        Raises:
            ModelMismatch: a shape that does not fit (without ``misfits``), two sources for one region, an incomplete set,
                rules that match nothing; names the keys.
        """
        placed, found = self._placed(names, shapes, targets)
        if misfits is not None:
            misfits += found
        elif found:
            raise ModelMismatch(spell_misfits([misfit.text for misfit in found]))
        return placed

    def _placed(
        self, names: Sequence[str], shapes: Sequence[Shape], targets: MappingType[str, Shape]
    ) -> tuple[list[tuple[Place, ...]], list[Misfit]]:
        if not self.aliases:
            placing = Placing(self, names, shapes, targets)
            return placing.run(), placing.misfits
        called = list(targets)
        for alias in self.aliases:
            called = alias.apply(called)
        wrapped: dict[str, str] = {}
        for name, target in zip(called, targets, strict=True):
            if (other := wrapped.setdefault(name, target)) != target:
                raise ModelMismatch(f"the model's {other} and {target} would both be called {name}")
        placing = Placing(self, names, shapes, {name: targets[target] for name, target in wrapped.items()})
        placed = [tuple((wrapped[target], view) for target, view in places) for places in placing.run()]
        return placed, [misfit._replace(target=wrapped[misfit.target]) for misfit in placing.misfits]

    def renamed(self, names: Sequence[str]) -> tuple[list[str], list[str]]:
        """What the renames make of checkpoint names, and the patterns of rules that match none of them. For messages."""
        made, unused = list(names), []
        for rename in self.renames:
            before, made = made, rename.apply(made)
            if made == before:
                unused.append(rename.source)
        for convert in self.converts:
            unused += [source for source in convert.sources if not any(map(re.compile(source).search, made))]
        return made, unused

    def reverse(
        self, names: Sequence[str], shapes: Sequence[Shape], targets: MappingType[str, Shape]
    ) -> dict[str, tuple[Place, ...]]:
        """The direction of saving: for each checkpoint tensor the regions of the model's tensors that make it up.

        Raises:
            ModelMismatch: elements of a checkpoint tensor are in the model not at all or more than once; names it.
        """
        found = {}
        for name, shape, places in zip(names, shapes, self.place(names, shapes, targets), strict=True):
            held = sum(prod(view.size) for _, view in places)
            if held != prod(shape) and places:
                raise ModelMismatch(
                    f"{name} cannot be made from the model, which holds {held} of its {prod(shape)} elements"
                )
            if places:
                found[name] = places
        return found


def _any_of(patterns: Iterable[str]) -> re.Pattern[str]:
    return re.compile("|".join(f"({pattern})" for pattern in patterns))


def spell_misfits(texts: Sequence[str]) -> str:
    more = f"; {len(texts) - 10} more" if len(texts) > 10 else ""
    return "; ".join(texts[:10]) + more


def resolve(
    mapping: Mapping | str, model: nn.Module, names: Collection[str], checkpoint: Sequence[str] = ()
) -> Mapping:
    """What ``mapping=`` means for this model: ``"auto"`` is what a transformers model declares, else names as they are; for an
    adapter's own file, the adapter that is active.

    Args:
        names: of the model's tensors.
        checkpoint: names of the checkpoint's tensors.

    Raises:
        ValueError: neither a Mapping nor ``"auto"``.
        ModelMismatch: an adapter's file that cannot be loaded into this model.
    """
    if isinstance(mapping, Mapping):
        return mapping
    if mapping != "auto":
        raise ValueError(f"expected mapping to be 'auto' or an epload.Mapping, got {mapping!r}")
    if only := adapter_file(model, names, checkpoint):
        return Mapping(only=only)
    inner, aliases, copies = unwrap(model, names)
    made = Mapping.from_transformers(inner) if comes_from(inner, "transformers") else Mapping.identity()
    return replace(made, aliases=aliases, ties=made.ties + copies)
