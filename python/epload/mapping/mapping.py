"""A mapping and its rules: :class:`Rename` for checkpoint keys, :class:`Convert` for layouts. ``place`` applies them."""

from __future__ import annotations

import collections.abc
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from epload.core.patterns import check_expressions
from epload.core.pieces import is_extra_state
from epload.core.views import View
from epload.errors import ModelMismatch
from epload.mapping.operations import Operation
from epload.mapping.quantize import Quantize
from epload.observe.render import list_first


@dataclass(frozen=True)
class Rename:
    """Replaces the first match of the regular expression ``source`` in a checkpoint key by ``target``, as re.sub does."""

    source: str
    target: str
    shift: int = 0
    """Added to the integer that the first group of ``source`` matches."""
    divide: int = 1
    """Divides that integer, after the shift, rounding down."""
    function: Callable[[Sequence[str]], list[str]] | None = field(default=None, compare=False, repr=False)
    """A function that renames in place of the patterns, which then only identify the rule. None for rules of your own."""

    def __post_init__(self) -> None:
        """Raises ValueError if ``source`` is not a regular expression, ``target`` refers to a group that it lacks, or
        ``divide`` is less than 1."""
        if self.function is not None:
            return
        if self.divide < 1:
            raise ValueError(f"expected divide to be at least 1, got {self}")
        _check(self, (self.source,), (self.target,))
        if (self.shift or self.divide > 1) and not re.search(_first_group(self.source), self.target):
            raise ValueError(rf"expected the target to have \1, the number to which shift and divide apply, got {self}")

    def apply(self, names: Sequence[str]) -> list[str]:
        """Returns all names; those that match are renamed."""
        if self.function is not None:
            return self.function(names)
        search = re.compile(self.source).search
        return [self._replace(name, match) if (match := search(name)) else name for name in names]

    def _replace(self, name: str, match: re.Match[str]) -> str:
        target = self.target
        if self.shift or self.divide > 1:
            if not re.fullmatch(r"-?\d+", match[1] or ""):
                raise ModelMismatch(f"{self} needs a number in its first group, which matches {match[1]!r} in {name}")
            number = str((int(match[1]) + self.shift) // self.divide)
            target = re.sub(_first_group(self.source), lambda _: number, target)
        return name[: match.start()] + match.expand(target) + name[match.end() :]


def _first_group(source: str) -> str:
    """Returns a pattern of what refers to the first group of a regular expression in what replaces it."""
    names = [re.escape(name) for name, number in re.compile(source).groupindex.items() if number == 1]
    return rf"\\1(?!\d)|\\g<(?:{'|'.join(['0*1', *names])})>"


Renames = Sequence[Rename] | collections.abc.Mapping[str, str]
"""Renames in order, or a dict from regular expressions to what replaces their first match."""


@dataclass(frozen=True)
class Convert:
    """Makes tensors of the model from checkpoint tensors by operations that move elements and compute no values.

    Each pattern in ``sources`` is one input. A group named ``index`` in it (an expert's number) makes that input a list of
    tensors. Each entry of ``targets`` replaces the match, as in re.sub, and gives the name of one output; ``{index}`` in it
    makes that output a list. ``operations`` turn inputs into outputs::

        Convert(
            (r"experts\\.(?P<index>\\d+)\\.gate\\.weight$", r"experts\\.(?P<index>\\d+)\\.up\\.weight$"),
            ("experts.gate_up",),
            (Stack(0), Concatenate(1)),
        )
        Convert((r"qkv\\.weight$",), ("q.weight", "k.weight", "v.weight"), (Split(0, "targets"),))

    Keys that differ in other groups are converted apart, so that one rule can serve weights and biases::

        Convert((r"q\\.(weight|bias)$", r"k\\.(weight|bias)$"), (r"qk.\\1",), (Concatenate(0),))

    ``scopes`` are prefixes of keys. If there are any, the rule applies only to keys that start with one, and to what follows it.
    """

    sources: tuple[str, ...]
    targets: tuple[str, ...]
    operations: tuple[Operation, ...] = ()
    scopes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Raises ValueError if there are no sources or targets, a source is not a regular expression, or a target refers to
        a group that a source lacks, and TypeError if a field is not a tuple of what it should hold."""
        check_tuples(self, sources=str, targets=str, operations=Operation, scopes=str)
        if not self.sources or not self.targets:
            raise ValueError(f"expected at least one source and one target, got {self}")
        _check(self, self.sources, self.targets)


@dataclass(frozen=True)
class Mapping:
    """Describes how checkpoint tensors become model tensors: all renames are applied in order, then the first matching
    conversion.

    ``renames`` and ``aliases`` may be passed as dicts, from regular expressions to what replaces their first match, and any
    tuple as a list.

    A key keeps its own name if that is in the model and the new name is not. Mappings are plain values: they are equal if their
    rules are equal, and have the same text on every rank.
    """

    renames: tuple[Rename, ...] = ()
    converts: tuple[Convert, ...] = ()
    base_model_prefix: str = ""
    """Path of the base model inside a model with a head. Checkpoint keys may have or lack this prefix."""
    ties: tuple[tuple[str, str], ...] = ()
    """Pairs of model names that share one value, the one under which it is saved first. A checkpoint tensor for one of them also
    fills the other, unless the checkpoint has a tensor for the other. Applies even if parallelizing the model has made two
    tensors of them."""
    aliases: tuple[Rename, ...] = ()
    """Renames of the model's names, for wrappers (torch.compile, DDP, PEFT) that add to them. Rules apply to the result."""
    required: bool = True
    """True if it is an error that no rule matches. False for rules that are declared for many checkpoints."""
    ignore_unexpected: tuple[str, ...] = ()
    """Regular expressions. An unexpected checkpoint key that matches one, before or after renaming, is not an error."""
    ignore_missing: tuple[str, ...] = ()
    """Regular expressions. A missing model name that matches one is not an error."""
    only: tuple[tuple[str, str], ...] = ()
    """Pairs of checkpoint key and model name. Unless empty, tensors of the model that are not listed are not expected in the
    checkpoint and keep their values. A pair with an empty key is a tensor that is missing from the checkpoint."""
    quantize: Quantize | None = None
    """Quantizes weights after all other rules."""
    places: tuple[tuple[tuple[str, View], ...], ...] | None = field(default=None, compare=False, repr=False)
    """Places of each checkpoint tensor in one rank's model, as :func:`epload.mapping.place.place` returns them, if they are
    known. The rules are then not used."""

    def __post_init__(self) -> None:
        """Raises ValueError if a pattern of keys to ignore is not a regular expression, and TypeError if a field is not a tuple
        of what it should hold."""
        for field_name in ("renames", "aliases"):
            object.__setattr__(self, field_name, renames_of(getattr(self, field_name)))
        check_tuples(self, renames=Rename, converts=Convert, ties=tuple, aliases=Rename, only=tuple)
        check_tuples(self, ignore_unexpected=str, ignore_missing=str)
        if not isinstance(self.quantize, Quantize | None):
            raise TypeError(f"expected quantize to be a Quantize, got {self.quantize!r}")
        check_expressions("keys to ignore", (*self.ignore_unexpected, *self.ignore_missing))


def ignored_keys(mapping: Mapping, names: Sequence[str], missing: Iterable[str], unexpected: Iterable[str]) -> list[str]:
    """Returns the ignored ones of the model's missing names and the checkpoint's unexpected keys, among all its ``names``."""
    missing, unexpected = list(missing), set(unexpected)
    ignored = sorted(filter(is_extra_state, unexpected))
    if mapping.ignore_missing and missing:
        search = _any_of(mapping.ignore_missing)
        unwrapped = apply_renames(mapping.aliases, missing)
        ignored += [name for name, inner in zip(missing, unwrapped, strict=True) if search(inner)]
    if mapping.ignore_unexpected and unexpected:
        search = _any_of(mapping.ignore_unexpected)
        renamed = apply_renames((*mapping.aliases, *mapping.renames), names)
        ignored += [a for a, b in zip(names, renamed, strict=True) if a in unexpected and (search(a) or search(b))]
        ignored += sorted(filter(search, unexpected.difference(names)))
    return ignored


def rename_keys(mapping: Mapping, names: Sequence[str]) -> tuple[list[str], list[str]]:
    """Returns the checkpoint keys after all renames, and the patterns of rules that match no key. For error messages."""
    renamed, unused = list(names), []
    for rename in mapping.renames:
        before, renamed = renamed, rename.apply(renamed)
        if renamed == before and (rename.function is not None or not any(map(re.compile(rename.source).search, before))):
            unused.append(rename.source)
    for convert in mapping.converts:
        unused += [source for source in convert.sources if not any(map(re.compile(source).search, renamed))]
    return renamed, unused


def find_unused(mapping: AnyMapping, names: Sequence[str]) -> list[str]:
    """Returns a text about a caller's own rules that match no key of a checkpoint, if there are any."""
    unused = rename_keys(mapping, names)[1] if isinstance(mapping, Mapping) and mapping.required else []
    shown = list_first(list(map(repr, unused)))
    return [f"rules match no key of the checkpoint: {shown}; there are {list_first(names) or 'none'}"] if unused else []


def _any_of(patterns: Iterable[str]) -> Callable[[str], bool]:
    """Returns a predicate: True if one of the regular expressions matches in a name. Joined, they would share their groups."""
    searches = [re.compile(pattern).search for pattern in patterns]
    return lambda name: any(search(name) for search in searches)


def renames_of(passed: Renames) -> Any:
    """Returns the renames that a dict of patterns and replacements describes; anything else as it is."""
    if not isinstance(passed, collections.abc.Mapping):
        return passed
    if odd := [item for item in passed.items() if not all(isinstance(text, str) for text in item)]:
        raise TypeError(f"expected renames from regular expressions to strings, got {odd[0][0]!r}: {odd[0][1]!r}")
    return tuple(Rename(source, target) for source, target in passed.items())


def apply_renames(renames: Iterable[Rename], names: Iterable[str]) -> list[str]:
    """Returns the names after all renames, in order."""
    renamed = list(names)
    for rename in renames:
        renamed = rename.apply(renamed)
    return renamed


def check_tuples(rule: object, **kinds: type) -> None:
    """Turns lists into tuples, so that equivalent rules are equal. Raises TypeError if a field of a rule is not a tuple or a list
    of a type, such as a string, which would be taken for many strings."""
    for name, kind in kinds.items():
        value = getattr(rule, name)
        if isinstance(value, tuple | list):
            value = tuple(tuple(item) if kind is tuple and isinstance(item, list) else item for item in value)
            object.__setattr__(rule, name, value)
        if not isinstance(value, tuple) or not all(isinstance(item, kind) for item in value):
            hint = f"; write ({value!r},)" if isinstance(value, kind) else ""
            raise TypeError(f"expected {name} of a {type(rule).__name__} to be a tuple of {kind.__name__}, got {value!r}{hint}")


def _check(rule: Rename | Convert, sources: tuple[str, ...], targets: tuple[str, ...]) -> None:
    for source in sources:
        for target in ("", *targets):
            try:
                re.compile(source).sub(target, "")  # parses the target even if nothing matches
            except (re.error, IndexError) as error:
                raise ValueError(
                    f"expected valid regular expressions, and targets that refer to groups they define, got {rule}: {error}"
                ) from error


AnyMapping = Mapping | Quantize | str
"""The mappings that callers may pass: rules; a Quantize, which is added to ``"auto"``; or ``"auto"``."""


def quantize_rule(mapping: AnyMapping) -> Quantize | None:
    """Returns the rule by which a mapping quantizes weights; None if it quantizes none."""
    return mapping if isinstance(mapping, Quantize) else mapping.quantize if isinstance(mapping, Mapping) else None
