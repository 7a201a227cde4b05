"""What to tell a user whose checkpoint and model do not fit. Pure."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Literal

from epload.checkpoint.manifest import Manifest
from epload.errors import ModelMismatch
from epload.mapping.mapping import Mapping, spell_misfits
from epload.planning.plan import LoadPlan

Strict = bool | Literal["shapes"]

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


def misfit(manifest: Manifest, plan: LoadPlan, mapping: Mapping, strict: Strict, before: str = "") -> ModelMismatch:
    """The error for a plan that ``strict`` does not allow. ``before``: what the text begins with."""
    ignored = set(mapping.ignored(manifest.names, plan.missing, plan.unexpected))
    plan = replace(
        plan,
        missing=tuple(name for name in plan.missing if name not in ignored),
        unexpected=tuple(name for name in plan.unexpected if name not in ignored),
    )
    return ModelMismatch(
        before + _spell_keys(manifest, plan, strict, mapping, lenient=not before),
        missing_keys=plan.missing if strict is True else (),
        unexpected_keys=plan.unexpected if strict is True else (),
        mismatched_keys=plan.mismatched,
    )


def _spell_keys(manifest: Manifest, plan: LoadPlan, strict: Strict, mapping: Mapping, lenient: bool) -> str:
    """``lenient``: whether strict=False would help."""
    renamed, unused = mapping.renamed(manifest.names)
    became = dict(zip(manifest.names, renamed, strict=True))
    said = [f"{manifest.source} does not fit the model"]
    for title, keys in (("missing from it", plan.missing), ("unexpected in it", plan.unexpected)):
        if keys and strict is True:
            spelled = list(keys[:10])
            if keys is plan.unexpected:
                spelled = [n if became[n] == n else f"{n} (renamed to {became[n]})" for n in spelled]
            said.append(f"{len(keys)} {title}: {', '.join(spelled)}{', ...' if len(keys) > 10 else ''}")
    if plan.mismatched:
        said.append(f"{len(plan.mismatched)} of another shape: {spell_misfits(list(plan.mismatched.values()))}")
    if unused and mapping.required:
        said.append(f"rules of the mapping that match none of its names: {', '.join(map(repr, unused[:5]))}")
    has_rules = bool(mapping.renames or mapping.converts or mapping.ties)
    if strict is True and (hint := prefix_hint(plan.missing, plan.unexpected, has_rules)):
        return f"{'; '.join(said)}. {hint}"
    way_out = ". Pass mapping= if names or layouts differ" + (", strict=False to load what fits" if lenient else "")
    return "; ".join(said) + way_out


def spell_unfilled(names: list[str]) -> str:
    """The error for tensors of the model that nobody can fill."""
    more = f" and {len(names) - 10} more" if len(names) > 10 else ""
    return (
        f"{', '.join(names[:10])}{more}: {len(names)} of the model's tensors are on meta, no checkpoint tensor fills them, and "
        "the model does not initialize them itself; pass init_missing=hook(module, path, names) to fill them, or build the model "
        "with values for them"
    )
