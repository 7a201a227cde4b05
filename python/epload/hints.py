"""What to tell a user whose checkpoint and model do not fit. Pure."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Sequence

_LOOKED_AT = 50
"""Names that are compared with all others; a prefix that many names share shows in any few of them."""


def prefix_hint(missing: Collection[str], unexpected: Sequence[str], has_rules: bool = False) -> str:
    """A mapping that makes most of the keys match by adding or removing a prefix; empty if no prefix does.

    Args:
        missing: names of the model that the checkpoint lacks.
        unexpected: names of the checkpoint that the model lacks.
        has_rules: whether the mapping in use has rules of its own, which a new one would have to keep.
    """
    wanted = set(missing)
    found: Counter[tuple[str, str]] = Counter()
    by_leaf: dict[str, list[str]] = {}
    for name in sorted(wanted):
        by_leaf.setdefault(name.rpartition(".")[2], []).append(name)
    for name in unexpected[:_LOOKED_AT]:
        for other in by_leaf.get(name.rpartition(".")[2], ()):
            if name.endswith(f".{other}"):
                found[name[: -len(other)], ""] += 1
            elif other.endswith(f".{name}"):
                found["", other[: -len(name)]] += 1
    best = max(found, key=lambda pair: (_matches(pair, wanted, unexpected), -len(pair[0] + pair[1])), default=None)
    if best is None or 2 * (count := _matches(best, wanted, unexpected)) < min(len(wanted), len(unexpected)):
        return ""
    removed, added = best
    pattern = rf"^{re.escape(removed)}" if removed else "^"
    rename = f'epload.Rename(r"{pattern}", "{added}")'
    what = f"without the prefix {removed!r}" if removed else f"with the prefix {added!r}"
    said = f"{count} of the unexpected keys match {what}: "
    if has_rules:
        return (
            f"{said}rules = epload.Mapping.from_transformers(model), then "
            f"mapping=dataclasses.replace(rules, renames=({rename}, *rules.renames))"
        )
    return f"{said}pass mapping=epload.Mapping(renames=({rename},))"


def _matches(pair: tuple[str, str], wanted: set[str], unexpected: Sequence[str]) -> int:
    removed, added = pair
    return sum(name.startswith(removed) and added + name[len(removed) :] in wanted for name in unexpected)
