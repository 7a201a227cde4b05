"""Determines where a checkpoint's tensors go in a model, by the rules of a mapping, and which of them one conversion takes.

Pure: names and shapes in, regions out.
"""

from __future__ import annotations

import fnmatch
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from collections.abc import Mapping as MappingType
from typing import NamedTuple

from epload.core.views import Assembly, Shape, View
from epload.errors import ModelMismatch
from epload.mapping.mapping import Convert, Mapping, apply_renames, rename_keys
from epload.mapping.operations import TensorLists
from epload.observe.render import list_first

Place = tuple[str, View]
"""The name of a target (a tensor of the model), and the view of a checkpoint tensor that fills a box of it. Equal views of one
rule are one object."""


Mismatch = tuple[str, tuple[int, ...], str]
"""A target that has another shape in the checkpoint, so that nothing is placed in it; the checkpoint tensors for it, by number;
and a message with their names and both shapes."""


Leftover = tuple[str, tuple[int, ...]]
"""The name of what a conversion makes besides tensors of the model, and the checkpoint tensors that it is made of, by number."""
_INDEX = "(?P<index>"


def place(
    mapping: Mapping,
    names: Sequence[str],
    shapes: Sequence[Shape],
    targets: MappingType[str, Shape],
    mismatches: list[Mismatch] | None = None,
    leftovers: list[Leftover] | None = None,
) -> list[tuple[Place, ...]]:
    """Returns the places that each checkpoint tensor fills; empty if the model has no place for it.

    Args:
        names, shapes: of the checkpoint's tensors.
        targets: global shapes of the model's tensors by name.
        mismatches: if given, targets of mismatched shape are appended to it and left out, instead of raising.
        leftovers: if given, what conversions make and the model lacks is appended to it.

    Raises ModelMismatch: mismatched shapes (without ``mismatches``), two tensors for one region, an incomplete set of tensors,
    rules that match nothing. Names the keys."""
    if mapping.places is not None:
        return list(mapping.places)
    placer = _Placer(mapping, names, shapes, targets)
    placer.run()
    placed = placer.placed
    if mapping.aliases:
        placed = [tuple([(placer.model_name[name], view) for name, view in places]) for places in placed]
    if leftovers is not None:
        leftovers += placer.leftovers
    mismatched = [(placer.model_name[target], sources, text) for target, sources, text in placer.mismatches]
    if mismatches is not None:
        mismatches += mismatched
    elif mismatched:
        raise ModelMismatch("; ".join(text for *_, text in mismatched))
    return placed


def destinations(mapping: Mapping, names: Sequence[str], targets: MappingType[str, Shape]) -> dict[str, list[str]]:
    """Returns the names of the model that tensors of each of these names would fill, whatever their shapes."""
    if mapping.places is not None:
        return {name: [] for name in names}
    placer = _Placer(mapping, names, [()] * len(names), targets)
    groups, others, renamed = placer.match()
    filled: dict[str, list[str]] = {}
    for source in others:
        target = placer.find(renamed[source]) or placer.find(names[source])
        filled[names[source]] = [target] if target is not None else []
    for group in groups:
        patterns = [placer.find(name) or name.replace("{index}", "*") for name in group.targets]
        matching = [name for pattern in patterns for name in fnmatch.filter(placer.targets, pattern)]
        filled |= {names[source]: matching for source in group.sources}
    return {name: [placer.model_name[target] for target in inner] for name, inner in filled.items()}


class _Placer:
    """Places the tensors of one checkpoint in one model, whose names lack wrappers here. Runs once."""

    def __init__(self, mapping: Mapping, names: Sequence[str], shapes: Sequence[Shape], targets: MappingType[str, Shape]) -> None:
        if mapping.only:
            listed = {name for _, name in mapping.only}
            targets = {name: shape for name, shape in targets.items() if name in listed}
        self.mapping, self.names, self.shapes, self.targets = mapping, names, shapes, targets
        inner = apply_renames(mapping.aliases, targets)
        self.model_name = dict(zip(inner, targets, strict=True))
        """The model's names by their names without wrappers."""
        if len(self.model_name) < len(targets):
            name = Counter(inner).most_common(1)[0][0]
            both = " and ".join(target for target, other in zip(targets, inner, strict=True) if other == name)
            raise ModelMismatch(f"the model's {both} have the same name without their wrappers: {name}")
        if mapping.aliases:
            self.targets = {name: targets[self.model_name[name]] for name in inner}
        self.placed: list[tuple[Place, ...]] = [()] * len(names)
        self.filled: dict[str, int] = {}
        """Target to one of the checkpoint tensors that fill it."""
        self.mismatches: list[Mismatch] = []
        self.leftovers: list[Leftover] = []
        self._whole = {shape: View.whole(shape) for shape in dict.fromkeys(shapes)}
        self._outputs: dict[object, TensorLists] = {}
        """Results of conversions; groups that differ only in names share them."""

    def run(self) -> None:
        groups, others, renamed = self.match()
        self._place_whole(others, renamed)
        if self.mapping.required and (self.mapping.renames or self.mapping.converts):
            self._check_used(renamed, groups)
        for group in groups:
            self._convert(group)
        self._tie()

    def match(self) -> tuple[list[ConversionGroup], list[int], list[str]]:
        """Returns what conversions take together, the numbers of all other tensors, and the renamed names."""
        only = dict(self.mapping.only)
        renamed = [only.get(name, name) for name in self.names] if only else list(self.names)
        for alias in self.mapping.aliases:
            # A name that the model has does not contain a wrapper.
            pairs = zip(renamed, alias.apply(renamed), strict=True)
            renamed = [name if name in self.targets else other for name, other in pairs]
        renamed = apply_renames(self.mapping.renames, renamed)
        return *match_conversions(self.mapping.converts, renamed), renamed

    def find(self, name: str) -> str | None:
        """Returns the target for ``name``, with or without the base model's prefix."""
        targets = self.targets
        if not self.mapping.base_model_prefix:
            return name if name in targets else None
        prefix = f"{self.mapping.base_model_prefix}."
        inner = name.removeprefix(prefix)
        forms = (prefix + name, name) if inner == name else (inner, prefix + name, name)
        return next((form for form in forms if form in targets), None)

    def _check_used(self, renamed: list[str], groups: list[ConversionGroup]) -> None:
        mismatched = {source for _, sources, _ in self.mismatches for source in sources}
        lost = [name for i, name in enumerate(self.names) if not self.placed[i] and i not in mismatched]
        if groups or renamed != list(self.names) or not lost:
            return
        _, rules = rename_keys(self.mapping, self.names)
        raise ModelMismatch(
            f"no rule of the mapping matches any checkpoint key, and the model lacks {len(lost)} of the {len(self.names)} keys "
            f"({list_first(lost, 3)}); the patterns are {list_first(list(map(repr, rules)))}"
        )

    def _place_whole(self, sources: Iterable[int], renamed: Sequence[str]) -> None:
        """Places tensors that are not converted, each in one target."""
        for source in sources:
            name, shape = self.names[source], self.shapes[source]
            target = self.find(renamed[source]) or self.find(name) or self._tied_to(renamed[source], shape, renamed)
            if target is None:
                continue
            if shape == self.targets[target]:
                self._fill(target, source)
                self.placed[source] = ((target, self._whole[shape]),)
            else:
                other = "" if target == name else f"{target} has shape "
                text = f"{list(shape)}, but {other}{list(self.targets[target])} in the model"
                self.mismatches.append((target, (source,), f"{name} has shape {text}"))

    def _tied_to(self, name: str, shape: Shape, renamed: Sequence[str]) -> str | None:
        """Returns the tensor of the model that is tied to one that the model lacks, as a stage of a pipeline may, and that the
        checkpoint has under the other's name alone."""
        others = [other for a, b in self.mapping.ties for one, other in ((a, b), (b, a)) if one == name]
        return next((o for o in others if self.targets.get(o) == shape and o not in self.filled and o not in renamed), None)

    def _fill(self, target: str, source: int) -> None:
        if (other := self.filled.setdefault(target, source)) != source:
            raise ModelMismatch(
                f"checkpoint tensors {self.names[other]} and {self.names[source]} both map to the model's {target}; "
                "change the mapping so that only one does"
            )

    def _convert(self, group: ConversionGroup) -> None:
        targets = [self.find(name) for name in group.targets]
        is_list = any("{index}" in name for name in group.targets)
        outputs = self._run_operations(group, targets) if is_list or any(targets) else [[]]
        places: dict[int, list[Place]] = defaultdict(list)
        has_target, absent = False, list[Leftover]()
        for pattern, assemblies in zip(group.targets, outputs, strict=False):
            for index, assembly in enumerate(assemblies):
                name = self.find(pattern.replace("{index}", str(index)))
                if name is None:
                    absent.append((pattern.replace("{index}", str(index)), tuple(group.sources)))
                    continue
                has_target = True
                if assembly.shape != self.targets[name]:
                    text = self._problem(group, name, f"the result has shape {list(assembly.shape)}")
                    self.mismatches.append((name, tuple(group.sources), text))
                    continue
                self._fill(name, group.sources[0])
                for position, view in assembly.parts:
                    places[group.sources[position]].append((name, view))
        for source, views in places.items():
            self.placed[source] = tuple(views)
        if has_target:
            self.leftovers += absent
        else:
            self._place_whole(group.sources, self.names)

    def _run_operations(self, group: ConversionGroup, targets: Sequence[str | None]) -> TensorLists:
        """Returns a list of tensors for each target, whose name in the model is None if it lacks it; sources are numbered within
        the group. Raises ModelMismatch for tensors that are missing or duplicate, or an operation that cannot be applied."""
        shapes = [self.shapes[source] for source in group.sources]
        target_shapes = [None if name is None else self.targets[name] for name in targets]
        key = (id(group.convert), tuple(group.inputs), tuple(shapes), tuple(target_shapes))
        if key in self._outputs:
            return self._outputs[key]
        patterns = group.convert.targets
        problem = incompleteness(group, self.names)
        tensors: TensorLists = [[] for _ in group.convert.sources]
        for i in sorted(range(len(shapes)), key=group.inputs.__getitem__):
            tensors[group.inputs[i][0]].append(Assembly.of(i, shapes[i]))
        try:
            for operation in group.convert.operations if not problem else ():
                tensors = operation(tensors, dict(zip(patterns, target_shapes, strict=True)))
        except ValueError as error:
            problem = str(error)
        if not problem and (
            len(tensors) != len(patterns)
            or any(len(a) != 1 and "{index}" not in b for a, b in zip(tensors, patterns, strict=True))
        ):
            count = sum(map(len, tensors))
            problem = f"expected one tensor for each target, but the operations make {count}; add Stack or Concatenate"
        if problem:
            raise ModelMismatch(self._problem(group, next(filter(None, targets), group.targets[0]), problem))
        self._outputs[key] = tensors
        return tensors

    def _problem(self, group: ConversionGroup, target: str, problem: str) -> str:
        """Returns the message for a target that a group cannot fill."""
        names = [self.names[source] for source in group.sources]
        listed = ", ".join(names if len(names) <= 3 else [*names[:2], "...", names[-1]])
        of_shape = f" of shape {list(self.targets[target])}" if target in self.targets else ""
        distinct = dict.fromkeys(self.shapes[source] for source in group.sources)
        shapes = "shapes " * (len(distinct) > 1) + ", ".join(str(list(shape)) for shape in distinct)
        count = "1 checkpoint tensor" if len(names) == 1 else f"{len(names)} checkpoint tensors"
        return f"cannot make {target}{of_shape} from {count} ({listed}; {shapes}): {problem}"

    def _tie(self) -> None:
        """Fills tied targets that no checkpoint tensor fills from those that one does."""
        pairs = [pair for a, b in self.mapping.ties for pair in ((a, b), (b, a))]
        places: dict[str, list[tuple[int, View]]] = defaultdict(list)
        for number, own in enumerate(self.placed) if pairs else ():
            for name, view in own:
                places[name].append((number, view))
        # One value may have any number of names, in pairs of any order.
        for _ in self.mapping.ties:
            for filled, empty in pairs:
                if filled in places and empty not in places and self.targets[filled] == self.targets.get(empty):
                    places[empty] = places[filled]
                    for number, view in places[filled]:
                        self.placed[number] += ((empty, view),)


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
