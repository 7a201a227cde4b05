"""The rules of a mapping: :class:`Rename` for checkpoint keys, :class:`Convert` for layouts."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache

from epload.mapping.operations import Operation


@dataclass(frozen=True)
class Rename:
    """Replaces the first match of the regular expression ``source`` in a checkpoint key by ``target``, as re.sub does."""

    source: str
    target: str
    scopes: tuple[str, ...] = ()
    """Prefixes of keys. Unless empty, the rule applies only to keys that start with one, and to the rest of such a key."""
    when: str = ""
    """Regular expression. Unless empty, the rule applies only if it matches some key of the checkpoint (within ``scopes``)."""
    shift: int = 0
    """Added to the integer that the first group of ``source`` matches."""
    divide: int = 1
    """Divides that integer, after the shift, rounding down."""

    def __post_init__(self) -> None:
        """Raises ValueError if a pattern is not a regular expression, ``target`` refers to a group that it lacks, or
        ``divide`` is less than 1, and TypeError if ``scopes`` is not a tuple of strings."""
        check_tuples(self, scopes=str)
        if self.divide < 1:
            raise ValueError(f"expected divide to be at least 1, got {self}")
        _check(self, (self.source,), (self.target,))
        _check(self, (self.when,), ())

    def apply(self, names: list[str]) -> list[str]:
        """All names; those that match are renamed."""
        search = re.compile(self.source).search
        parts = [split_scope(name, self.scopes) for name in names] if self.scopes else [("", name) for name in names]
        if self.when and not any(prefix is not None and re.search(self.when, rest) for prefix, rest in parts):
            return names
        return [
            prefix + self._replace(rest, match) if prefix is not None and (match := search(rest)) else name
            for name, (prefix, rest) in zip(names, parts, strict=True)
        ]

    def matches_any(self, names: Iterable[str]) -> bool:
        """Returns True if :meth:`apply` may change any of these names."""
        search = re.compile(self.source).search
        parts = (split_scope(name, self.scopes) if self.scopes else ("", name) for name in names)
        return any(prefix is not None and search(rest) for prefix, rest in parts)

    def _replace(self, name: str, match: re.Match[str]) -> str:
        target = self.target
        if self.shift or self.divide > 1:
            target = target.replace(r"\1", str((int(match[1]) + self.shift) // self.divide))
        return name[: match.start()] + expand(match, target) + name[match.end() :]


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
    """

    sources: tuple[str, ...]
    targets: tuple[str, ...]
    operations: tuple[Operation, ...] = ()
    scopes: tuple[str, ...] = ()
    """Prefixes of keys. Unless empty, the rule applies only to keys that start with one, and to the rest of such a key."""

    def __post_init__(self) -> None:
        """Raises ValueError if there are no sources or targets, a source is not a regular expression, or a target refers to
        a group that a source lacks, and TypeError if a field is not a tuple of what it should hold."""
        check_tuples(self, sources=str, targets=str, operations=Operation, scopes=str)
        if not self.sources or not self.targets:
            raise ValueError(f"expected at least one source and one target, got {self}")
        _check(self, self.sources, self.targets)


def apply_renames(renames: Iterable[Rename], names: Sequence[str]) -> list[str]:
    """The names after all renames, in order."""
    renamed = list(names)
    examples: list[str] = []
    """One of ``renamed`` for all that differ only in digits; empty if not known."""
    for rename in renames:
        if ignores_digits(rename.source, *rename.scopes):
            examples = examples or [renamed[first] for first in number_by_digits(renamed)[1]]
            if not rename.matches_any(examples):
                continue
        renamed, examples = rename.apply(renamed), []
    return renamed


_ALL_ZERO = str.maketrans("123456789", "0" * 9)


def number_by_digits(names: Iterable[str]) -> tuple[list[int], list[int]]:
    """Numbers names so that those that differ only in ASCII digits have one number.

    Returns:
        The number of each name, and for each number the index of its first name.
    """
    numbers: dict[str, int] = {}
    kinds = [numbers.setdefault(name.translate(_ALL_ZERO), len(numbers)) for name in names]
    firsts = dict(zip(reversed(kinds), reversed(range(len(kinds))), strict=True))
    return kinds, [firsts[number] for number in range(len(numbers))]


@cache
def ignores_digits(*patterns: str) -> bool:
    """Returns True if regular expressions treat all digits alike: names that differ only in digits match at the same places.

    False if a pattern has a digit, but for names of groups, or refers to what a group has matched.
    """
    return not any(re.search(r"[0-9]|\(\?P=|\\N", re.sub(r"\(\?P<\w+>", "", pattern)) for pattern in patterns)


def expand(match: re.Match[str], target: str) -> str:
    """``match.expand(target)``, without parsing a target that has no references."""
    return match.expand(target) if "\\" in target else target


def split_scope(name: str, scopes: Iterable[str]) -> tuple[str | None, str]:
    """The first of ``scopes`` that the name starts with, and the rest of the name; (None, name) if there is none."""
    for scope in scopes:
        if name.startswith(scope):
            return scope, name[len(scope) :]
    return None, name


def check_tuples(rule: object, **kinds: type) -> None:
    """Raises TypeError if a field of a rule is not a tuple (or a list) of a type. A string would be taken for many."""
    for field, kind in kinds.items():
        value = getattr(rule, field)
        if not isinstance(value, tuple | list) or not all(isinstance(each, kind) for each in value):
            hint = f"; write ({value!r},)" if isinstance(value, kind) else ""
            raise TypeError(
                f"expected {field} of a {type(rule).__name__} to be a tuple of {kind.__name__}, got {value!r}{hint}"
            )


def _check(rule: Rename | Convert, sources: tuple[str, ...], targets: tuple[str, ...]) -> None:
    for source in sources:
        for target in ("", *targets):
            try:
                re.compile(source).sub(target, "")  # parses the target even if nothing matches
            except (re.error, IndexError) as error:
                raise ValueError(
                    f"expected valid regular expressions, and targets that refer to groups they define, got {rule}: {error}"
                ) from error
