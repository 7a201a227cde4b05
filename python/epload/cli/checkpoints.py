"""``epload inspect``, ``verify`` and ``diff``: what a checkpoint contains, whether it can be read, how two of them differ."""

from __future__ import annotations

import re
from collections.abc import Hashable, Mapping, Sequence
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any, TypeVar

import click

from epload.cli.output import existing_file, facts, json_option, not_read, prefix_option, print_json, show, table, variant_option
from epload.core.attempt import Attempt
from epload.observe.progress import Progress
from epload.observe.render import count, list_first, show_bytes

if TYPE_CHECKING:
    from epload.checkpoint.base import Checkpoint
    from epload.checkpoint.manifest import Manifest

_SHOWN = 20
"""Differences of each kind that ``diff`` shows without ``--all``."""
_NUMBER = re.compile(r"(?<![0-9])(?:0|[1-9][0-9]{0,17})(?![0-9])")
"""A number without leading zeros, which would be lost, as in ``layers.3`` or ``block3``."""
Numbers = tuple[int, ...]
Value = TypeVar("Value", bound=Hashable)


def _compiled(context: click.Context, parameter: click.Parameter, value: str) -> re.Pattern[str]:
    try:
        return re.compile(value)
    except re.error as error:
        raise click.BadParameter(f"expected a regular expression, got {value!r}: {error}") from None


filter_option = click.option(
    "--filter", "pattern", default="", metavar="RE", callback=_compiled,
    help="Take only tensors with names in which this regular expression matches. Exits with 1 if there are none.",
)  # fmt: skip
_tolerance = click.FloatRange(min=0)


def _open(checkpoint: str, prefix: str, variant: str) -> Checkpoint:
    from epload.checkpoint.base import Checkpoint

    return Checkpoint.open(checkpoint, prefix=prefix, variant=variant)


def _open_both(first: str, second: str, prefix: str, variant: str) -> list[Checkpoint]:
    """Opens two checkpoints. The prefix may be for one of them, as for a DCP folder and what it was converted to."""
    paths = first, second
    opened = [Attempt(partial(_open, path, prefix, variant)) for path in paths]
    refused = [isinstance(each.failure, ValueError) for each in opened]
    if prefix and sum(refused) == 1:
        number = refused.index(True)
        opened[number] = Attempt(partial(_open, paths[number], "", variant))
    return [each.value for each in opened]


def _check_filter(pattern: re.Pattern[str], *of: Manifest) -> None:
    """Raises ValueError if the expression matches no name."""
    names = [name for manifest in of for name in manifest.names]
    if pattern.pattern and not any(map(pattern.search, names)):
        sources = " and ".join(manifest.source for manifest in of)
        raise ValueError(f"--filter {pattern.pattern!r} matches no tensor of {sources}; there are {list_first(names) or 'none'}")


# ---- inspect ----


@click.command()
@click.argument("checkpoint")
@filter_option
@prefix_option
@variant_option
@json_option
def inspect(checkpoint: str, pattern: re.Pattern[str], prefix: str, variant: str, as_json: bool) -> None:
    """Check a checkpoint's headers, and show what it contains.

    CHECKPOINT is a file (safetensors, .pt, .bin), a folder, also one of torch.distributed.checkpoint, a model on the Hugging Face
    Hub (org/name) or a URL (s3://, gs://, az://, https://). Only headers are read. Tensors whose names differ in numbers only
    are one line.
    """
    opened = _open(checkpoint, prefix, variant)
    opened.close()
    manifest = opened.manifest
    _check_filter(pattern, manifest)
    summary = _summarize(manifest, pattern)
    if as_json:
        print_json(summary)
        return
    files, matching, total = summary["files"].values(), summary["count"], len(manifest.names)
    of = f" of {total:,}" if matching < total else ""
    dtypes = (f"{name}: {count(n['tensors'], 'tensor')}, {show_bytes(n['nbytes'])}" for name, n in summary["dtypes"].items())
    show(
        facts(
            ("checkpoint", manifest.source),
            ("files", f"{len(files):,} ({show_bytes(sum(files))})" if files else ""),
            ("tensors", f"{matching:,}{of} ({summary['elements']:,} elements, {show_bytes(summary['nbytes'])})"),
            ("dtypes", "; ".join(dtypes)),
            ("not shown", f"{', '.join(manifest.ignored)}: no tensors of the model" if manifest.ignored else ""),
        )
    )
    folded = fold({tensor["name"]: (tensor["dtype"], str(tensor["shape"])) for tensor in summary["tensors"]})
    if folded:
        show()
        rows = [(f"{n:,}", dtype, shape, name) for name, (dtype, shape), n in folded]
        show(table([("tensors", "dtype", "shape", "name"), *rows], right=(0,)))


def _summarize(manifest: Manifest, pattern: re.Pattern[str]) -> dict[str, Any]:
    """Returns what is printed as JSON about the tensors whose names match."""
    from epload.core.dtypes import name as dtype_name

    tensors: list[dict[str, Any]] = []
    dtypes: dict[str, dict[str, int]] = {}
    columns = zip(manifest.names, map(dtype_name, manifest.dtypes), manifest.shapes, manifest.nbytes_of(), strict=True)
    for name, dtype, shape, nbytes in columns:
        if pattern.search(name):
            tensors.append({"name": name, "dtype": dtype, "shape": list(shape), "nbytes": nbytes})
            total = dtypes.setdefault(dtype, {"tensors": 0, "nbytes": 0})
            total["tensors"] += 1
            total["nbytes"] += nbytes
    return {
        "source": manifest.source,
        "files": {file.name: file.nbytes for file in manifest.locations.files} if manifest.locations else {},
        "count": len(tensors),
        "elements": sum(prod(tensor["shape"]) for tensor in tensors),
        "nbytes": sum(total["nbytes"] for total in dtypes.values()),
        "dtypes": dtypes,
        "ignored": list(manifest.ignored),
        "tensors": tensors,
    }


def fold(names: Mapping[str, Value]) -> list[tuple[str, Value, int]]:
    """Folds names that differ in their numbers only, and have equal values, where they are all combinations of some numbers.

    Args:
        names: a value by name, such as a dtype and a shape.

    Returns:
        Folded name, value and how many names it stands for, in the order of the first of them.
    """
    groups: dict[tuple[str, Value], list[Numbers]] = {}
    for name, value in names.items():
        pattern = _NUMBER.sub("{}", name.replace("{", "{{").replace("}", "}}"))
        groups.setdefault((pattern, value), []).append(tuple(map(int, _NUMBER.findall(name))))
    return [
        (pattern.format(*map(_braces, sets)), value, prod(map(len, sets)))
        for (pattern, value), numbers in groups.items()
        for sets in _boxes(numbers)
    ]


def _boxes(tuples: Sequence[Numbers]) -> list[tuple[Numbers, ...]]:
    """Returns the tuples as products of sets, one ascending set for each position."""
    boxes: list[tuple[Numbers, ...]] = [tuple((number,) for number in numbers) for numbers in tuples]
    for position in reversed(range(len(tuples[0]))):
        merged: dict[tuple[tuple[Numbers, ...], tuple[Numbers, ...]], list[int]] = {}
        for box in boxes:
            merged.setdefault((box[:position], box[position + 1 :]), []).extend(box[position])
        boxes = [(*before, tuple(sorted(values)), *after) for (before, after), values in merged.items()]
    return boxes


def _braces(values: Sequence[int]) -> str:
    """Returns ``5`` for one value, else ``{0..3,7}``. Values ascend."""
    runs: list[list[int]] = []
    for value in values:
        if runs and runs[-1][1] == value - 1:
            runs[-1][1] = value
        else:
            runs.append([value, value])
    texts = [str(first) if first == last else f"{first}..{last}" for first, last in runs]
    return texts[0] if len(values) == 1 else "{" + ",".join(texts) + "}"


# ---- verify ----


@click.command()
@click.argument("checkpoint")
@click.option(
    "--checksums", metavar="LIST",
    help="First compare all files with a list of digests: the path of one in the format of sha256sum, sha256:HEX for the "
    "checksums.json in the folder that has this digest, or \"published\" for what is next to the files.",
)  # fmt: skip
@click.option(
    "--signature", type=existing_file, metavar="BUNDLE",
    help="First verify the signature of the folder, a bundle of OpenSSF model signing. Needs --public-key, or --identity and "
    "--identity-provider.",
)  # fmt: skip
@click.option("--public-key", type=existing_file, metavar="PEM", help="Take this public key of the signer.")
@click.option("--identity", metavar="NAME", help="Expect this identity of the signer with Sigstore, such as an e-mail address.")
@click.option("--identity-provider", metavar="URL", help="Expect this OpenID Connect provider to have confirmed the identity.")
@prefix_option
@variant_option
@json_option
def verify(
    checkpoint: str, checksums: str | None, signature: str | None, public_key: str | None, identity: str | None,
    identity_provider: str | None, prefix: str, variant: str, as_json: bool,
) -> int:  # fmt: skip
    """Read all of a checkpoint, and list the tensors with NaN or Inf.

    CHECKPOINT is as for inspect. Headers are checked for overlaps and holes. Exits with 1 if a tensor has NaN or Inf, or if a
    file or a signature is not what was expected.
    """
    from epload.cli.authenticity import compare_files, verify_signature
    from epload.verify.compare import find_non_finite

    authenticity = {}
    if signature is not None:
        authenticity["signature"] = verify_signature(checkpoint, signature, public_key, identity, identity_provider)
    elif public_key or identity or identity_provider:
        raise click.BadParameter("expected --signature with it", param_hint="--public-key or --identity")
    opened = _open(checkpoint, prefix, variant)
    if checksums is not None:
        authenticity["checksums"] = compare_files(opened, checksums)
    manifest = opened.manifest
    number = len(manifest.names)
    with Progress(manifest.nbytes, not as_json) as bar:
        bad = list(find_non_finite(opened, bar.update))
    if as_json:
        facts_of = {"source": manifest.source, "tensors": number, "nbytes": manifest.nbytes, "non_finite": bad}
        facts_of["ignored"] = list(manifest.ignored)
        print_json(facts_of | authenticity)
        return int(bool(bad))
    for text in authenticity.values():
        show(text)
    for tensor in bad:
        show(f"{tensor['name']}: {tensor['nans']} NaN and {tensor['infs']} Inf in {tensor['count']} elements")
    show(
        f"{count(number, 'tensor')}, {show_bytes(manifest.nbytes)}: headers without overlaps or holes, "
        f"every byte read, {count(len(bad), 'tensor') if bad else 'no tensor'} with NaN or Inf{not_read(manifest)}"
    )
    return int(bool(bad))


# ---- diff ----


@click.command()
@click.argument("first")
@click.argument("second")
@click.option("--rtol", type=_tolerance, help="Allow differences up to this factor of SECOND's value, and other dtypes.")
@click.option("--atol", type=_tolerance, help="Allow differences up to this value, and other dtypes.")
@click.option("--headers", "headers_only", is_flag=True, help="Compare names, shapes and dtypes only.")
@click.option("--all", "show_all", is_flag=True, help=f"Show all differences, not only the first {_SHOWN} of each kind.")
@filter_option
@prefix_option
@variant_option
@json_option
def diff(
    first: str, second: str, rtol: float | None, atol: float | None, headers_only: bool, show_all: bool, pattern: re.Pattern[str],
    prefix: str, variant: str, as_json: bool,
) -> int:  # fmt: skip
    """Compare two checkpoints: names, shapes, dtypes and values.

    FIRST and SECOND are as for inspect, and may have different formats. Values are compared across dtypes. Tensors with other
    values are sorted by their largest difference.

    Exits with 1 if the checkpoints differ, in values by more than the tolerances. A different dtype counts unless a tolerance
    is given, which may be 0.
    """
    from epload.verify.compare import compare_headers, compare_values

    one, two = _open_both(first, second, prefix, variant)
    _check_filter(pattern, one.manifest, two.manifest)
    headers = compare_headers(one.manifest, two.manifest, pattern)
    common = headers.pop("common")
    values: list[dict[str, Any]] = []
    if common and not headers_only:
        size_of = dict(zip(one.manifest.names, one.manifest.nbytes_of(), strict=True))
        with Progress(sum(map(size_of.__getitem__, common)), not as_json) as bar:
            values = list(compare_values(one, two, common, bar.update, rtol or 0.0, atol or 0.0))
        values.sort(key=lambda value: value["largest"], reverse=True)
    dtypes_may_differ = rtol is not None or atol is not None
    if as_json:
        ignored = [list(manifest.ignored) for manifest in (one.manifest, two.manifest)]
        print_json({**headers, "common": len(common), "values": values, "ignored": ignored})
    else:
        _print_differences(headers, values, None if show_all else _SHOWN, dtypes_may_differ)
        equal = "in both, values not compared" if headers_only else "with equal values"
        others = f", {count(len(values), 'tensor')} with other values" if values else ""
        left_out = not_read(one.manifest, two.manifest)
        show(f"{count(len(common) - len(values), 'tensor')} {equal}{others}{left_out}")
    counted = {**headers, "dtypes": None} if dtypes_may_differ else headers
    return int(any(counted.values()) or bool(values))


def _print_differences(headers: dict[str, Any], values: list[dict[str, Any]], limit: int | None, dtypes_may_differ: bool) -> None:
    """``limit``: how many lines of each kind are shown; None for all."""
    lines = {
        kind: [f"{name}{pair}" + (f" ({n:,} tensors)" if n > 1 else "") for name, pair, n in fold(details)]
        for kind, details in (
            ("only in FIRST", dict.fromkeys(headers["only_first"], "")),
            ("only in SECOND", dict.fromkeys(headers["only_second"], "")),
            ("shape", {name: f" {a[1]} / {b[1]}" for name, (a, b) in headers["shapes"].items()}),
            (
                "dtype (allowed)" if dtypes_may_differ else "dtype",
                {name: f" {a[0]} / {b[0]}" for name, (a, b) in headers["dtypes"].items()},
            ),
        )
    }
    lines["values"] = [
        f"{value['name']}: {value['differing']:,} of {value['count']:,} elements, max {value['largest']:.4g}, "
        f"mean {value['mean']:.4g}"
        for value in values
    ]
    for kind, of_kind in lines.items():
        for line in of_kind[:limit]:
            show(f"{kind}: {line}")
        if limit is not None and len(of_kind) > limit:
            show(f"{kind}: {len(of_kind) - limit:,} more, which --all shows")
