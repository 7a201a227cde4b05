"""Checks the keys and shapes of a checkpoint against a model, and writes the errors, with hints how to fix them. Pure."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Sequence

from epload.checkpoint.manifest import Manifest
from epload.errors import ModelMismatch
from epload.mapping.mapping import Mapping, ignored_keys, rename_keys
from epload.mapping.packed import find_packed
from epload.planning.plan import LoadPlan

_SAMPLE = 50
"""Unexpected keys whose prefixes are tried; a prefix that many keys share shows in any sample."""
_LISTED = 10
"""Keys that an error lists of each kind."""


def check_match(
    manifest: Manifest, plan: LoadPlan, mapping: Mapping, *, strict: bool, ignore_mismatched_shapes: bool
) -> None:
    """Raises ModelMismatch for missing and unexpected keys (with ``strict``), for mismatched shapes (unless ignored), and if
    no tensor of the checkpoint fits."""
    ignored = set(ignored_keys(mapping, manifest.names, plan.missing, plan.unexpected))
    missing = [name for name in plan.missing if name not in ignored]
    unexpected = [name for name in plan.unexpected if name not in ignored]
    mismatched = plan.mismatched
    # Whatever the options allow: all such weights would be missing, and keep the values that they have.
    if packed := find_packed(manifest, mapping, plan.targets, [*plan.missing, *mismatched], plan.unexpected):
        name, what = packed
        raise ModelMismatch(
            f"{manifest.source} has {name} as {what}, which epload does not unpack",
            missing_keys=missing, unexpected_keys=unexpected, mismatched_keys=mismatched,
        )  # fmt: skip
    nothing_fits = not plan.tensor_count and bool(plan.missing or plan.mismatched)
    wrong_keys, wrong_shapes = strict and bool(missing or unexpected), bool(mismatched) and not ignore_mismatched_shapes
    if not (wrong_keys or wrong_shapes or nothing_fits):
        return
    options = []
    if wrong_keys or wrong_shapes:
        headline = f"{manifest.source} does not match the model"
        missing, unexpected = (missing, unexpected) if strict else ([], [])
        mismatched = {} if ignore_mismatched_shapes else mismatched
        options += ["strict=False ignores missing and unexpected keys"] * wrong_keys
        options += ["ignore_mismatched_shapes=True skips parameters of mismatched shape"] * wrong_shapes
    else:
        headline = f"nothing to load: {manifest.source} has no tensor that fits the model"
    lines = [headline + ":", *_describe(manifest, mapping, missing, unexpected, mismatched)]
    has_rules = bool(mapping.renames or mapping.converts or mapping.ties)
    hint = prefix_hint(missing, unexpected, has_rules)
    lines.append(hint or "; ".join(["Pass mapping= if the checkpoint has other names or layouts", *options]))
    raise ModelMismatch(
        "\n  ".join(lines[:-1]) + "\n" + lines[-1],
        missing_keys=missing,
        unexpected_keys=unexpected,
        mismatched_keys=mismatched,
    )


def _describe(
    manifest: Manifest,
    mapping: Mapping,
    missing: Sequence[str],
    unexpected: Sequence[str],
    mismatched: dict[str, str],
) -> list[str]:
    """A line for each kind of mismatch."""
    lines = []
    renamed, unused = rename_keys(mapping, manifest.names)
    if missing:
        lines.append(f"{_count(missing, 'parameter')} missing from the checkpoint: {_list(missing)}")
    if unexpected:
        new_name = dict(zip(manifest.names, renamed, strict=True))
        keys = [key if new_name[key] == key else f"{key} (renamed to {new_name[key]})" for key in unexpected[:_LISTED]]
        lines.append(f"{_count(unexpected, 'unexpected checkpoint key')}: {_list(keys, len(unexpected))}")
    if mismatched:
        lines.append(f"{_count(mismatched, 'mismatched shape')}: {_list(list(mismatched.values()), separator='; ')}")
    if unused and mapping.required:
        lines.append(f"mapping rules that match no checkpoint key: {_list(list(map(repr, unused)))}")
    return lines


def _count(items: Collection[str], noun: str) -> str:
    return f"{len(items)} {noun}{'' if len(items) == 1 else 's'}"


def _list(items: Sequence[str], count: int | None = None, separator: str = ", ") -> str:
    """The first items of ``count``, which defaults to all that are given."""
    more = (len(items) if count is None else count) - _LISTED
    return separator.join(items[:_LISTED]) + (f"{separator}... ({more} more)" if more > 0 else "")


def prefix_hint(missing: Collection[str], unexpected: Sequence[str], has_rules: bool = False) -> str:
    """A mapping that makes most keys match by adding or removing a prefix; empty if no prefix does.

    Args:
        missing: names of the model that the checkpoint lacks.
        unexpected: keys of the checkpoint that the model lacks.
        has_rules: whether the present mapping has rules, which the new one has to keep.
    """
    names = set(missing)
    candidates: Counter[tuple[str, str]] = Counter()
    by_leaf: dict[str, list[str]] = {}
    for name in sorted(names):
        by_leaf.setdefault(name.rpartition(".")[2], []).append(name)
    for key in unexpected[:_SAMPLE]:
        for name in by_leaf.get(key.rpartition(".")[2], ()):
            if key.endswith(f".{name}"):
                candidates[key[: -len(name)], ""] += 1
            elif name.endswith(f".{key}"):
                candidates["", name[: -len(key)]] += 1
    best = max(candidates, key=lambda pair: (_matches(pair, names, unexpected), -len(pair[0] + pair[1])), default=None)
    if best is None or 2 * (count := _matches(best, names, unexpected)) < min(len(names), len(unexpected)):
        return ""
    removed, added = best
    rename = f'epload.mapping.Rename(r"^{re.escape(removed)}", "{added}")'
    change = f"without the prefix {removed!r}" if removed else f"with the prefix {added!r}"
    matches = f"{count} of {_count(unexpected, 'unexpected key')} match the model {change}: "
    if has_rules:
        return (
            f"{matches}rules = epload.mapping.from_model(model), then "
            f"pass mapping=dataclasses.replace(rules, renames=({rename}, *rules.renames))"
        )
    return f"{matches}pass mapping=epload.Mapping(renames=({rename},))"


def _matches(pair: tuple[str, str], names: set[str], unexpected: Sequence[str]) -> int:
    """Returns the number of unexpected keys that a change of prefix makes match."""
    removed, added = pair
    return sum(key.startswith(removed) and added + key[len(removed) :] in names for key in unexpected)


def unfilled_error(names: Sequence[str]) -> ModelMismatch:
    """The error for tensors of the model that neither the checkpoint nor the model fills."""
    return ModelMismatch(
        f"neither the checkpoint nor the model's own initialization fills {_count(names, 'tensor')} on meta: {_list(names)}. "
        "Pass init_missing=hook(module, path, names) to initialize them, or build the model with values for them"
    )
