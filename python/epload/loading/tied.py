"""Tied weights that a checkpoint has under several names: only one of them is loaded, so their values must be equal.

A config can declare a tie that the weights do not have. transformers then unties them. Here a tied parameter is one tensor, which
may be sharded already and can no longer be untied, so the load fails.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from epload.checkpoint.base import Checkpoint, read_in_chunks
from epload.checkpoint.manifest import Manifest
from epload.core import dtypes
from epload.core.attempt import Attempt
from epload.core.copy_table import byte_view
from epload.errors import ModelMismatch
from epload.loading.inputs import LocalInputs
from epload.mapping.mapping import Mapping
from epload.model.targets import Targets
from epload.observe.render import list_first
from epload.planning.selection import TiedPair
from epload.ranks.control import Control
from epload.report import LoadReport

_CHUNK = 4 << 20
"""Elements compared at a time."""


def compare_tied(control: Control, src: int, inputs: LocalInputs, manifest: Manifest, pairs: Sequence[TiedPair]) -> None:
    """Compares tied weights on rank ``src``, which reads each pair once, in bounded memory, unless it lies in the same place.
    Collective. Where ranks hold different modules, rank ``src`` need not have the tie itself.

    Raises:
        ModelMismatch: the values of a pair differ; names both.
        CheckpointError: a tensor cannot be read.
    """
    if inputs.local_modules:
        own = [[*pair[:2], dtypes.name(pair.dtype), *pair.names] for pair in pairs]
        union: list[list[Any]] = control.agree("comparing tied weights", None, own, _distinct)
        pairs = [TiedPair(a, b, dtypes.from_name(dtype), (x, y)) for a, b, dtype, x, y in union]

    def compare() -> None:
        for pair in pairs if control.rank == src else ():
            assert inputs.checkpoint is not None
            control.doing = "comparing tied weights"
            for nbytes in _compare(inputs.checkpoint, manifest, pair):
                control.progress += nbytes

    if pairs:
        failure = Attempt(compare).failure
        if failure is not None:  # a file that was replaced meanwhile is why values differ
            failure = Attempt(inputs.check_unchanged).failure or failure
        control.agree("comparing tied weights", failure, patience=2)


def warn_of_broken_ties(mapping: Mapping, targets: Targets, manifest: Manifest, report: LoadReport) -> None:
    """Warns of weights that the class ties, the checkpoint has once, and the model has twice; from_pretrained ties them."""
    index = targets.index
    apart = [(a, b) for a, b in mapping.ties if a in index and b in index and index[a] != index[b]]
    names = {*manifest.names} if apart else set()
    if broken := [f"{a} and {b}" for a, b in apart if not names >= {a, b}]:
        report.warnings.append(
            f"the model's class ties {list_first(broken)}, but here they are tensors of their own, as after distributing a model "
            "on meta; both are filled, and training will change them apart: call model.tie_weights() after the load if they are "
            "to be one"
        )


def _distinct(views: dict[int, list[list[Any]]]) -> list[list[Any]]:
    return list({tuple(pair[:3]): pair for view in views.values() for pair in view}.values())


def _compare(checkpoint: Checkpoint, manifest: Manifest, pair: TiedPair) -> Iterator[int]:
    """Compares a pair of tensors; yields the bytes that are compared at a time."""
    numbers = pair.loaded, pair.skipped
    first_key, second_key = (manifest.names[number] for number in numbers)
    first_name, second_name = pair.names
    tie = f"the model ties {first_name} and {second_name}, but in {manifest.source} {first_key} and {second_key} have"
    fix = "Set tie_word_embeddings=False in the model's config before building it, or remove one of them from the checkpoint"
    if manifest.shapes[numbers[0]] != manifest.shapes[numbers[1]]:
        raise ModelMismatch(f"{tie} different shapes. {fix}")
    locations = manifest.locations
    if locations is not None and len({(locations.of_tensor(n), manifest.dtypes[n]) for n in numbers}) == 1:
        return
    first, second = (checkpoint.tensor(number) for number in numbers)
    if (
        first is not None
        and second is not None
        and (first.data_ptr(), first.stride(), first.dtype) == (second.data_ptr(), second.stride(), second.dtype)
    ):
        return
    for a, b in zip(*(read_in_chunks(checkpoint, number, _CHUNK) for number in numbers), strict=True):
        yield a.nbytes + b.nbytes
        a, b = a.to(pair.dtype), b.to(pair.dtype)
        if not (torch.equal(a, b) or torch.equal(byte_view(a), byte_view(b))):
            raise ModelMismatch(f"{tie} different values. {fix}")
