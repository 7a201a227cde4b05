"""Checks the keys and shapes of a checkpoint against a model, and writes the errors, with hints how to fix them, and what packed
weights are. Pure."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from itertools import chain

import torch

from epload.checkpoint.manifest import Manifest
from epload.core import dtypes
from epload.core.pieces import Metadata
from epload.errors import ModelMismatch
from epload.mapping.mapping import Mapping, ignored_keys, rename_keys
from epload.mapping.place import destinations, match_conversions
from epload.model.targets import Targets
from epload.observe.render import count, list_first
from epload.planning.plan import LoadPlan

_SAMPLE = 50
"""Unexpected keys whose prefixes are tried; a prefix that many keys share shows in any sample."""
_LISTED = 10
"""Keys that an error lists of each kind."""
_LAYOUTS = (
    (r"\.(dqweight|forward_hadamard_matrix)$", "packed weights of FP-Quant"),
    (r"\.qweight$", "packed int4 weights of GPTQ or AWQ"),
    (r"\.(weight_packed|bitmask)$", "packed weights of compressed-tensors"),
    (r"_blocks$", "packed mxfp4 weights"),
    (r"\.weight\.(quant_state\.bitsandbytes__(nf4|fp4)|quant_map|absmax)$", "packed 4-bit weights of bitsandbytes"),
    (r"\.SCB$", "8-bit weights of bitsandbytes"),
    (r"\.W_q$", "packed weights of HQQ or SINQ"),
    (r"\.weight\._(data|scale)$", "packed weights of quanto"),
    (r"\.(codes|codebooks)$", "packed weights of AQLM"),
    (r"\.dense_weights$", "packed weights of SpQR"),
    (r"\.(res_)?centroids\.weight$", "packed weights of VPTQ"),
    (r"\.weight_scales$", "packed weights of EETQ"),
    (r"\.tables2$", "packed weights of HIGGS"),
    (r"\.(trellis|q_weight)$", "packed weights of ExLlama"),
    (r"\.Qidxs$", "packed weights of QuIP#"),
    (r"qdata$", "packed weights of torchao"),
    (r"\.(weight_scale_2|weight_global_scale|weight_sf|weight_sf_rowmajor)$", "packed NVFP4 weights"),
)
"""Ends of the names that tensors of packed weights have, and what such weights are. They need not be integers."""
_ANY_LAYOUT = re.compile("|".join(pattern for pattern, _ in _LAYOUTS))
_WAY_OUT = (
    "pass the checkpoint that was quantized, or unpack it once, with transformers (model.dequantize(), or a config such as "
    "Mxfp4Config(dequantize=True)) or the library that quantized it, and pass the folder that save_pretrained writes"
)


def check_match(manifest: Manifest, plan: LoadPlan, mapping: Mapping, *, strict: bool, ignore_mismatched_shapes: bool) -> None:
    """Raises ModelMismatch for missing and unexpected keys (with ``strict``), for mismatched shapes (unless ignored), and if
    no tensor of the checkpoint fits."""
    ignored = {*ignored_keys(mapping, manifest.names, plan.missing, plan.unexpected)}
    missing, unexpected = ([n for n in names if n not in ignored] for names in (plan.missing, plan.unexpected))
    mismatched = plan.mismatched
    options = []
    if strict and (missing or unexpected):
        options.append("strict=False ignores missing and unexpected keys")
    if mismatched and not ignore_mismatched_shapes:
        options.append("ignore_mismatched_shapes=True skips parameters of mismatched shape")
    # Whatever the options allow: all such weights would be missing, and keep the values that they have.
    if packed := find_packed(manifest, mapping, plan.targets, [*plan.missing, *mismatched], plan.unexpected):
        message = f"{manifest.source} has {packed[0]} as {packed[1]}, which epload does not unpack"
    elif options:
        missing, unexpected = (missing, unexpected) if strict else ([], [])
        mismatched = {} if ignore_mismatched_shapes else mismatched
        headline = f"{manifest.source} does not match the model"
        message = _explain(headline, manifest, mapping, missing, unexpected, mismatched, options)
    elif not plan.tensor_count and (plan.missing or mismatched):
        headline = f"nothing to load: {manifest.source} has no tensor that fits the model"
        message = _explain(headline, manifest, mapping, missing, unexpected, mismatched, options)
    else:
        return
    raise ModelMismatch(message, missing_keys=missing, unexpected_keys=unexpected, mismatched_keys=mismatched)


def _explain(
    headline: str,
    manifest: Manifest,
    mapping: Mapping,
    missing: Sequence[str],
    unexpected: Sequence[str],
    mismatched: dict[str, str],
    options: Sequence[str],
) -> str:
    """Returns the message, with a line for each kind of mismatch. ``options``: what each would allow."""
    lines = [f"{headline}:"]
    renamed, unused = rename_keys(mapping, manifest.names)
    if missing:
        lines.append(f"{count(len(missing), 'parameter')} missing from the checkpoint: {list_first(missing, _LISTED)}")
        if others := [name for name in missing if name in manifest.ignored]:
            listed = list_first(others, _LISTED)
            lines.append(f"of these, the checkpoint has values that are no tensors (use torch.from_numpy for arrays): {listed}")
    if unexpected:
        becomes = {key: f" (renamed to {new})" for key, new in zip(manifest.names, renamed, strict=True) if new != key}
        for group in match_conversions(mapping.converts, renamed)[0]:
            targets = f" (converted to {', '.join(group.targets)})"
            becomes |= {manifest.names[number]: targets for number in group.sources}
        becomes |= dict.fromkeys(set(unexpected) - set(manifest.names), " (which a conversion makes)")
        keys = [key + becomes.get(key, "") for key in unexpected]
        lines.append(f"{count(len(unexpected), 'unexpected checkpoint key')}: {list_first(keys, _LISTED)}")
    if mismatched:
        shapes = list_first(list(mismatched.values()), _LISTED, separator="; ")
        lines.append(f"{count(len(mismatched), 'mismatched shape')}: {shapes}")
    if unused and mapping.required:
        lines.append(f"mapping rules that match no checkpoint key: {list_first(list(map(repr, unused)), _LISTED)}")
    hint = _prefix_hint(missing, unexpected, bool(mapping.renames or mapping.converts or mapping.ties))
    is_own = mapping.required and bool(mapping.renames or mapping.converts)
    advice = "Correct the mapping" if is_own else "Pass mapping= if the checkpoint has other names or layouts"
    hint = hint or "; ".join([advice, *options])
    return "\n  ".join(lines) + f"\n{hint}"


def _prefix_hint(missing: Collection[str], unexpected: Sequence[str], has_rules: bool = False) -> str:
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
    if best is None or 2 * (matching := _matches(best, names, unexpected)) < min(len(names), len(unexpected)):
        return ""
    removed, added = best
    rename = f'epload.mapping.Rename(r"^{re.escape(removed)}", "{added}")'
    change = f"without the prefix {removed!r}" if removed else f"with the prefix {added!r}"
    matches = f"{matching} of {count(len(unexpected), 'unexpected key')} match the model {change}: "
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


def find_packed(
    manifest: Metadata, mapping: Mapping, targets: Targets, unfilled: Iterable[str], unexpected: Collection[str]
) -> tuple[str, str] | None:
    """Returns the name of a floating-point tensor of the model that nothing fills because its weight is packed in the checkpoint,
    and what the weight is there; None if there is no such tensor.

    ``unfilled``: first names of targets that nothing fills, or that have another shape in the checkpoint."""
    names = {*unfilled}
    wide = {i for i, name in enumerate(targets.names) if name in names and dtypes.is_wide(targets.dtypes[i])}
    if not wide:
        return None
    candidates = {tensor: _weight_names(tensor) for tensor in _packed_tensors(manifest, {*unexpected})}
    places = destinations(mapping, [key for keys in candidates.values() for key in keys], targets.shapes)
    for tensor, weights in candidates.items():
        own = {targets.index[name] for name in places[tensor]}
        if own and own.isdisjoint(wide):  # a tensor that the model has
            continue
        for name in chain.from_iterable(map(places.__getitem__, weights)):
            if targets.index[name] in wide:
                return name, _describe(manifest, tensor)
    return None


def _packed_tensors(manifest: Metadata, unexpected: set[str]) -> list[str]:
    """Returns the names of tensors that may be parts of packed weights, by dtype, by name, or by the configuration."""
    declared = manifest.quantization is not None and not manifest.quantization.is_fp8
    packed = {*dtypes.INTEGERS} - {torch.int64, torch.uint64}  # indices
    columns = zip(manifest.names, manifest.dtypes, manifest.shapes, strict=True)
    return [
        name
        for name, dtype, shape in columns
        if (dtype in packed and shape) or (name in unexpected and (declared or _ANY_LAYOUT.search(name)))
    ]


def _weight_names(name: str) -> list[str]:
    """Returns the names that a weight may have as a whole if this tensor is all of it (the first name) or a part of it."""
    parent, _, leaf = name.rpartition(".")
    names = [name, f"{parent}.weight" if parent else "weight", parent]
    names.append(re.sub(r"\.weight[.:].*", ".weight", name))  # what bitsandbytes, quanto and torchao add
    names.append(f"{parent.rpartition('.')[0]}.weight" if leaf == "weight" else "")
    names.append(name.rpartition("_")[0] if "_" in leaf else "")
    return list(dict.fromkeys(filter(None, names)))


def _describe(manifest: Metadata, name: str) -> str:
    """Returns what a packed weight is, by the names of the tensors next to it, or else by its dtype."""
    parent = name.rpartition(".")[0]
    siblings = [name, *(other for other in manifest.names if other.startswith(f"{parent}."))]
    what = next((text for pattern, text in _LAYOUTS if any(map(re.compile(pattern).search, siblings))), "")
    if not what:
        dtype = manifest.dtypes[manifest.names.index(name)]
        method = manifest.quantization.method if manifest.quantization is not None else ""
        what = f"a packed weight{f' of {method}' if method else ''} ({name}, {dtypes.name(dtype)})"
    return f"{what}: {_WAY_OUT}"


def unfilled_error(names: Sequence[str], resets: bool) -> ModelMismatch:
    """The error for tensors of the model that neither the checkpoint nor the model fills; if ``resets``, nor its modules."""
    advice = "Pass init_missing='reset_parameters' if their modules have that method, "
    if resets:
        advice = "Their modules have no reset_parameters(), or hold outer shards, whose whole size it cannot know. Pass "
    return ModelMismatch(
        f"neither the checkpoint nor the model's own initialization fills {count(len(names), 'tensor')} on meta: "
        f"{list_first(names, _LISTED)}. {advice}init_missing=hook(module, path, names) to initialize them, or build the "
        "model with values for them, as under accelerate.init_empty_weights(), which leaves only parameters on meta"
    )
