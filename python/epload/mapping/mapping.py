"""A mapping: the rules that map checkpoint keys and layouts to a model, and what they make of keys. See ``place`` for layouts."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from epload.core.views import View
from epload.mapping.rules import Convert, Rename, apply_renames, check_tuples


@dataclass(frozen=True)
class Mapping:
    """Rules that are applied in order: all renames, then the first conversion that matches.

    A key whose new name is not in the model, but whose own name is, keeps its own name. Mappings are plain values: equal if
    their rules are equal, and equal text on every rank.
    """

    renames: tuple[Rename, ...] = ()
    converts: tuple[Convert, ...] = ()
    base_model_prefix: str = ""
    """Path of the base model inside a model with a head. Checkpoint keys may have or lack this prefix."""
    ties: tuple[tuple[str, str], ...] = ()
    """Pairs of model names that share one value. A checkpoint tensor for one of them also fills the other, unless the
    checkpoint has a tensor for the other. Applies even if parallelizing the model has made two tensors of them."""
    aliases: tuple[Rename, ...] = ()
    """Renames of the model's names, for wrappers (torch.compile, DDP, PEFT) that add to them. Rules apply to the result."""
    required: bool = True
    """True if a mapping of which no rule matches is an error. False for rules that are declared for many checkpoints."""
    ignore_unexpected: tuple[str, ...] = ()
    """Regular expressions. An unexpected checkpoint key that matches one, before or after renaming, is no error."""
    ignore_missing: tuple[str, ...] = ()
    """Regular expressions. A missing model name that matches one is no error."""
    only: tuple[tuple[str, str], ...] = ()
    """Pairs of checkpoint key and model name. Unless empty, tensors of the model that are not listed are not expected in the
    checkpoint and keep their values. A pair with an empty key is a tensor that is missing from the checkpoint."""

    def __post_init__(self) -> None:
        """Raises ValueError if a pattern of keys to ignore is not a regular expression, and TypeError if a field is not a tuple
        of what it should hold."""
        check_tuples(self, renames=Rename, converts=Convert, ties=tuple, aliases=Rename, only=tuple)
        check_tuples(self, ignore_unexpected=str, ignore_missing=str)
        for pattern in (*self.ignore_unexpected, *self.ignore_missing):
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(f"expected regular expressions of keys to ignore, got {pattern!r}: {error}") from error


@dataclass(frozen=True, eq=False, repr=False)
class Placed(Mapping):
    """A mapping whose result is known for one checkpoint and one rank's model."""

    places: tuple[tuple[tuple[str, View], ...], ...] = ()
    """Places of each checkpoint tensor, as :func:`epload.mapping.place.place` returns them."""


def ignored_keys(
    mapping: Mapping, names: Sequence[str], missing: Iterable[str], unexpected: Iterable[str]
) -> list[str]:
    """The missing and unexpected keys that the mapping ignores.

    Args:
        names: all keys of the checkpoint.
        missing: names of the model that the checkpoint does not fill.
        unexpected: keys of the checkpoint that the model has no place for.
    """
    found = []
    if mapping.ignore_missing and (missing := list(missing)):
        unwrapped = apply_renames(mapping.aliases, missing)
        search = _any_of(mapping.ignore_missing).search
        found += [name for name, inner in zip(missing, unwrapped, strict=True) if search(inner)]
    if mapping.ignore_unexpected and (unexpected := set(unexpected)):
        renamed = apply_renames((*mapping.aliases, *mapping.renames), names)
        search = _any_of(mapping.ignore_unexpected).search
        found += [a for a, b in zip(names, renamed, strict=True) if a in unexpected and (search(a) or search(b))]
    return found


def rename_keys(mapping: Mapping, names: Sequence[str]) -> tuple[list[str], list[str]]:
    """The checkpoint keys after all renames, and the patterns of rules that match no key. For error messages."""
    renamed, unused = list(names), []
    for rename in mapping.renames:
        before, renamed = renamed, rename.apply(renamed)
        if renamed == before:
            unused.append(rename.source)
    for convert in mapping.converts:
        unused += [source for source in convert.sources if not any(map(re.compile(source).search, renamed))]
    return renamed, unused


def _any_of(patterns: Iterable[str]) -> re.Pattern[str]:
    return re.compile("|".join(f"({pattern})" for pattern in patterns))
