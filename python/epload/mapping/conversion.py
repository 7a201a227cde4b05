"""Finds the checkpoint tensors that one conversion takes together, and checks that they are complete."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from epload.errors import ModelMismatch
from epload.mapping.mapping import Convert

_INDEX = "(?P<index>"


class ConversionGroup(NamedTuple):
    """Checkpoint tensors that one conversion turns into the same targets."""

    convert: Convert
    targets: tuple[str, ...]
    """Full names, with ``{index}`` where the output is a list."""
    sources: list[int]
    """Numbers of the checkpoint tensors."""
    inputs: list[tuple[int, int]]
    """The conversion's input that each of them belongs to, and its index there; -1 if the input is not a list."""


def match_conversions(converts: Sequence[Convert], names: Sequence[str]) -> tuple[list[ConversionGroup], list[int]]:
    """Returns the groups of all conversions, and the numbers of the tensors that no conversion takes.

    Raises ModelMismatch: what a conversion takes for an index is no integer."""
    if not converts:
        return [], list(range(len(names)))
    rules = [
        (convert, number, re.compile(convert.sources[number]))
        for convert in converts
        for number in sorted(range(len(convert.sources)), key=lambda number: -len(convert.sources[number]))
    ]
    groups: dict[tuple[int, str], ConversionGroup] = {}
    others = []
    for i, name in enumerate(names):
        for convert, number, pattern in rules:
            scope = next(filter(name.startswith, convert.scopes or ("",)), None)
            rest = name[len(scope or "") :]
            if scope is None or (match := pattern.search(rest)) is None:
                continue
            before, after = scope + rest[: match.start()], rest[match.end() :]
            targets = tuple([f"{before}{match.expand(target)}{after}" for target in convert.targets])
            group = groups.setdefault((id(convert), targets[0]), ConversionGroup(convert, targets, [], []))
            group.sources.append(i)
            group.inputs.append((number, _index(name, match)))
            break
        else:
            others.append(i)
    return list(groups.values()), others


def _index(name: str, match: re.Match[str]) -> int:
    if "index" not in match.re.groupindex:
        return -1
    try:
        index = int(match["index"] or "")
    except ValueError:
        index = -1
    if index < 0:
        raise ModelMismatch(f"expected an integer of 0 or more as the index in {name!r}, got {match['index']!r}")
    return index


def incompleteness(group: ConversionGroup, names: Sequence[str]) -> str:
    """Returns what keeps a group from having each input once, with each index from 0 to the last; empty if nothing does."""
    convert = group.convert
    sources: dict[tuple[int, int], int] = {}
    for source, key in zip(group.sources, group.inputs, strict=True):
        if (other := sources.setdefault(key, source)) != source:
            hint = "" if any(_INDEX in pattern for pattern in convert.sources) else "; to stack them, write (?P<index>\\d+)"
            return f"{names[other]} and {names[source]} are for the same part of it{hint}"
    count = max(index for _, index in sources) + 1
    # Scales, which are all inputs but the first, may be absent.
    scaled = bool(convert.operations) and "Dequantize" in convert.operations[0].name
    required = convert.sources[:1] if scaled else convert.sources
    indices = [range(count) if _INDEX in pattern else range(-1, 0) for pattern in required]
    # Counted, not listed: an index in a malformed checkpoint may have any number of digits.
    total = sum(part.stop - part.start for part in indices)
    missing = total - sum(number < len(required) for number, _ in sources)
    if not missing:
        return ""
    keys = ((number, index) for number, part in enumerate(indices) for index in part)
    number, index = next(key for key in keys if key not in sources)
    first = re.sub(r"\(\?P<index>[^)]*\)", str(index), convert.sources[number])
    first = re.sub(r"\(\?[^)]*\)|[\\^$]", "", first)
    return f"the checkpoint lacks {missing} of {total} sources, the first is {first} (after renames)"
