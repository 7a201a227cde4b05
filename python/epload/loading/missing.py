"""Handles what the checkpoint does not fill: all ranks agree on it, the model computes it, the caller's hook fills the rest."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from epload.core.attempt import Attempt
from epload.core.default_device import callers_default_device
from epload.errors import LoadError
from epload.loading.hints import unfilled_error
from epload.loading.inputs import LocalInputs
from epload.loading.request import Request
from epload.model.dtensor import local_tensors
from epload.model.initialization import Initialization, init_missing_calls, params_ignoring_meta
from epload.model.initialization import compute_missing as compute
from epload.model.memory import has_internal_overlap, is_poisoned, poison
from epload.model.state_dict import storage_filter, tensor_at
from epload.observe.render import list_keys
from epload.planning.plan import LoadPlan
from epload.ranks.control import Control
from epload.report import LoadReport


@dataclass(frozen=True)
class Missing:
    """Describes what one rank's model lacks after the data is loaded."""

    initialization: Initialization
    """Values that the model computes."""
    unfilled: frozenset[str]
    """Names for a hook to fill: neither the checkpoint nor the model itself does."""
    garbage: frozenset[str]
    """Names in ``unfilled`` that had no storage before the load, so that a hook must fill them."""
    holders: dict[str, int]
    """Buffers that no checkpoint holds and some rank lacks, each with a rank that has it. Equal on all ranks."""
    unsaved: frozenset[str] = frozenset()
    """Non-persistent buffers with storage that the model cannot compute, so that they keep their values."""


def unfilled_anywhere(control: Control, inputs: LocalInputs, plan: LoadPlan) -> list[list[str]]:
    """Missing and mismatched names of the model, on whichever rank."""
    kinds = [list(plan.missing), list(plan.mismatched)]
    if not inputs.local_modules:
        return kinds
    shared = _shared_names(inputs)

    def union(views: dict[int, list[list[str]]]) -> list[list[str]]:
        return [list(dict.fromkeys(name for view in views.values() for name in view[kind])) for kind in (0, 1)]

    mine = [[shared[name] for name in names] for names in kinds]
    unfilled: list[list[str]] = control.settle("the report", None, mine, union)
    return unfilled


def compute_missing(
    control: Control,
    request: Request,
    inputs: LocalInputs,
    plan: LoadPlan,
    anywhere: list[str],
    holders: dict[str, int],
    meta: bool,
    seed: int,
) -> Missing:
    """Tensors that hold values keep them, unless another rank has them on meta: then all ranks initialize them alike. So do
    those that a model on meta holds only because its class cannot make them on meta, and non-persistent buffers, which after
    ``to_empty()`` hold nothing.

    Collective where a model is on meta: in rounds, out of which all ranks raise what :meth:`initialize` raises on any.

    Args:
        anywhere: names of tensors that no checkpoint tensor fills on some rank, as all ranks know them.
        meta: whether any rank has tensors on meta.
        seed: for tensors that are initialized; equal on all ranks.
    """
    if not meta:
        initialization, unsaved = _compute_unsaved(request, inputs, seed)
        return Missing(initialization, frozenset(_unfilled(plan)), frozenset(), holders, unsaved)
    on_meta = _on_meta(request, inputs, plan)
    if anywhere:
        on_meta = set(control.settle("comparing what is missing", None, sorted(on_meta), _union))
    missing = Attempt(lambda: initialize(request, inputs, plan, on_meta, holders, seed))
    control.settle("initializing what the checkpoint lacks", missing.failure)
    return missing.value


def _unfilled(plan: LoadPlan) -> set[str]:
    return {*plan.missing, *plan.mismatched}


def _shared_names(inputs: LocalInputs) -> dict[str, str]:
    """A name of each tensor's, by the name that all ranks know."""
    return {inputs.targets.names[i]: name for name, i in reversed(inputs.targets.index.items())}


def _on_meta(request: Request, inputs: LocalInputs, plan: LoadPlan) -> set[str]:
    targets, shared, left = inputs.targets, _shared_names(inputs), _unfilled(plan)
    on_meta = {shared[name] for name in left if targets.tensors[targets.index[shared[name]]].is_meta}
    if inputs.devices.has_meta:
        with_values = [name for name in left if shared[name] not in on_meta]
        on_meta |= {shared[name] for name in params_ignoring_meta(request.model, with_values)}
    return on_meta


def initialize(
    request: Request, inputs: LocalInputs, plan: LoadPlan, on_meta: set[str], holders: dict[str, int], seed: int
) -> Missing:
    """Computes what the model can of what was on meta and no checkpoint tensor fills.

    Args:
        on_meta: names of parameters and persistent buffers; others that were on meta come on top.

    Raises:
        ModelMismatch: nobody will fill a tensor that was on meta.
    """
    targets, shared, left = inputs.targets, _shared_names(inputs), _unfilled(plan)
    garbage: dict[str, Tensor] = {n: t for n, t in targets.unsaved_meta.items() if n not in holders}
    garbage |= {n: targets.tensors[targets.index[shared[n]]] for n in left if shared[n] in on_meta}
    dtypes = {name: tensor.dtype for name, tensor in garbage.items()}
    dtypes |= {name: targets.dtypes[targets.index[shared[name]]] for name in left}
    unsaved = _unsaved_buffers(request, inputs)
    dtypes |= {name: tensor.dtype for name, tensor in unsaved.items()}
    hooked = request.init_missing is not None
    initialization = compute(request.model, garbage | unsaved, dtypes, seed, request.parts, not hooked, inputs.modules)
    nobody = sorted(garbage.keys() - initialization.values.keys())
    if nobody and not hooked:
        raise unfilled_error(nobody)
    filled = {*initialization.values}
    return Missing(
        initialization,
        frozenset({*garbage, *left} - filled),
        frozenset({*garbage} - filled),
        holders,
        frozenset(unsaved.keys() - filled - holders.keys()),
    )


def _unsaved_buffers(request: Request, inputs: LocalInputs) -> dict[str, Tensor]:
    """Returns the non-persistent buffers by name, except those that share storage with what is loaded and those that cannot be
    written to element by element; none of a model that has not changed since the load before."""
    targets, model = inputs.targets, request.model
    if inputs.modules is None or not (targets.unsaved_buffers or targets.unsaved_meta):
        return {}
    with_storage = {n: tensor_at(model, n) for n in sorted(targets.unsaved_buffers) if request.as_pretrained}
    loaded = storage_filter([tensor for tensor in targets.tensors if not tensor.is_meta] if with_storage else [])
    writable = {n: t for n, t in with_storage.items() if t.layout == torch.strided and not has_internal_overlap(t)}
    return targets.unsaved_meta | {name: tensor for name, tensor in writable.items() if not loaded(tensor)}


def _compute_unsaved(request: Request, inputs: LocalInputs, seed: int) -> tuple[Initialization, frozenset[str]]:
    """Returns the non-persistent buffers that a model with storage can compute, and the names of the others. Not collective."""
    unsaved = _unsaved_buffers(request, inputs)
    dtypes = {name: tensor.dtype for name, tensor in unsaved.items()}
    # An initializer that fails leaves them as they are.
    computed = Attempt(lambda: compute(request.model, unsaved, dtypes, seed, request.parts, False, inputs.modules))
    initialization = computed.value if computed.failure is None else Initialization()
    return initialization, frozenset(unsaved.keys() - initialization.values.keys())


def fill_missing(request: Request, inputs: LocalInputs, missing: Missing, rank: int, report: LoadReport) -> None:
    """Fills what the checkpoint does not: with what the model has computed, then by the caller's hook.

    Raises:
        LoadError: the hook leaves a tensor unfilled that held no values.
    """
    targets, model = inputs.targets, request.model
    if missing.unsaved:
        report.warnings.append(
            f"no checkpoint has non-persistent buffers, and the model cannot compute {list_keys(sorted(missing.unsaved))}; they "
            "keep their values, which after to_empty() are those of uninitialized memory"
        )
    if not missing.initialization.values and not missing.unfilled:
        return
    tensors = dict(zip(targets.names, targets.tensors, strict=True))
    tensors |= {name: tensor_at(model, name) for name in {*targets.unsaved_meta, *targets.unsaved_buffers}}

    def local(names: Collection[str]) -> dict[str, Tensor]:
        return dict(zip(names, local_tensors([tensors[name] for name in names]), strict=True))

    missing.initialization.apply(local(missing.initialization.values))
    report.initialized += sorted(missing.initialization.values)
    if request.init_missing is None:
        return
    for tensor in local(missing.garbage).values():
        poison(tensor)
    for module, path, leaves in init_missing_calls(model, missing.unfilled):
        with callers_default_device():
            request.init_missing(module, path, leaves)
        report.initialized += [f"{path}.{leaf}" if path else leaf for leaf in leaves]
    tensors |= {name: tensor_at(model, name) for name in targets.unsaved_meta}  # a hook may replace a tensor
    present = {id(tensor) for tensor in chain(model.parameters(), model.buffers())}
    present_names = [name for name in missing.garbage if id(tensors[name]) in present]
    left = [name for name, t in local(present_names).items() if not t.is_meta and is_poisoned(t)]
    if left:
        raise LoadError(
            f"rank {rank}: init_missing left {', '.join(sorted(left)[:10])} unfilled; it is called as "
            "hook(module, path, names) and must write to each of these names of the module, in place"
        )


def _union(views: dict[int, list[str]]) -> list[str]:
    return sorted({name for names in views.values() for name in names})
