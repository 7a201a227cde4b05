"""The rules of a mapping: what becomes of a checkpoint's names, and of its tensors. See ``mapping``."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from epload.mapping.operations import Operation


@dataclass(frozen=True)
class Rename:
    """Where the regular expression ``source`` is first found in a checkpoint name, it becomes ``target`` (as in re.sub)."""

    source: str
    target: str
    scopes: tuple[str, ...] = ()
    """If given, the rule is for names that start with one of these; the first that fits is set aside before the search."""
    when: str = ""
    """If given, the rule is for checkpoints in which this regular expression is found in some name (within ``scopes``)."""
    shift: int = 0
    """Added to the number that the first group of ``source`` matches."""

    def __post_init__(self) -> None:
        """Raises ValueError if ``source`` or ``when`` is no regular expression, or ``target`` names a group that it lacks."""
        _check(self, (self.source,), (self.target,))
        _check(self, (self.when,), ())

    def apply(self, names: list[str]) -> list[str]:
        """All names, those that match renamed."""
        search = re.compile(self.source).search
        if self.when and not any(re.search(self.when, rest) for _, rest in _in_scope(names, self.scopes)):
            return names
        if not self.scopes:
            return [self._replaced(name, match) if (match := search(name)) else name for name in names]
        return [
            prefix + self._replaced(rest, match) if prefix is not None and (match := search(rest)) else name
            for name, (prefix, rest) in zip(names, (scoped(name, self.scopes) for name in names), strict=True)
        ]

    def _replaced(self, name: str, match: re.Match[str]) -> str:
        target = self.target.replace(r"\1", str(int(match[1]) + self.shift)) if self.shift else self.target
        return name[: match.start()] + expanded(match, target) + name[match.end() :]


@dataclass(frozen=True)
class Convert:
    """Checkpoint tensors become targets by operations on whole tensors, of which each only moves elements.

    Each of ``sources``, a regular expression found in a name, is one part; a group named ``index`` in it (an expert's number)
    makes the part a list of tensors. What is found becomes each of ``targets`` (as in re.sub), where ``{index}`` stands for
    the number of a tensor in a list. ``operations`` take the parts to the targets::

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
    """If given, the rule is for names that start with one of these; the first that fits is set aside before the search."""

    def __post_init__(self) -> None:
        """Raises ValueError if there are no sources or targets, a source is no regular expression, or a target names a group
        that a source lacks."""
        if not self.sources or not self.targets:
            raise ValueError(f"expected {self} to have at least one source and one target")
        _check(self, self.sources, self.targets)


def _check(rule: Rename | Convert, sources: tuple[str, ...], targets: tuple[str, ...]) -> None:
    for source in sources:
        for target in ("", *targets):
            try:
                re.compile(source).sub(target, "")  # which parses the target even where nothing matches
            except (re.error, IndexError) as error:
                raise ValueError(
                    f"expected regular expressions, and in targets groups they have, got {rule}: {error}"
                ) from error


def expanded(match: re.Match[str], target: str) -> str:
    """``match.expand``, which parses its template anew each time."""
    return match.expand(target) if "\\" in target else target


def scoped(name: str, scopes: Iterable[str]) -> tuple[str | None, str]:
    """The first of ``scopes`` that the name starts with, and the rest; (None, name) if there is none."""
    for scope in scopes:
        if name.startswith(scope):
            return scope, name[len(scope) :]
    return None, name


def _in_scope(names: Iterable[str], scopes: tuple[str, ...]) -> list[tuple[str | None, str]]:
    if not scopes:
        return [("", name) for name in names]
    return [found for name in names if (found := scoped(name, scopes))[0] is not None]
