"""Handles what the checkpoint does not fill: all ranks agree on it, the model computes it, the caller's hook fills the rest."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from weakref import WeakSet

import torch
from torch import Tensor, nn

from epload.core.attempt import Attempt
from epload.core.buffers import as_memoryview
from epload.core.default_device import callers_default_device
from epload.errors import LoadError, ModelMismatch
from epload.loading.hints import unfilled_error
from epload.loading.inputs import LocalInputs
from epload.loading.request import Request
from epload.model.dtensor import local_tensors, with_memory
from epload.model.initialization import (
    Attributes,
    init_missing_calls,
    is_adapter,
    params_ignoring_meta,
    refresh_token_rows,
    residual_adapters,
    stale_adapters,
)
from epload.model.initialization import compute_missing as compute
from epload.model.memory import has_internal_overlap, is_poisoned, poison
from epload.model.state_dict import storage_filter, tensor_at
from epload.model.targets import Targets
from epload.observe.render import list_first, list_keys
from epload.planning.plan import LoadPlan
from epload.ranks.control import Control
from epload.report import LoadReport

_warned = WeakSet[nn.Module]()
"""Models whose buffers a report has warned of."""
_UNFINISHED = "_epload_unfinished"
"""An attribute of tensors that a load which has failed was to fill or to initialize, and that held no values before: their
state then. They hold none until a load succeeds, or something else writes to them."""
_SAMPLE = 16
"""Number of elements that tell whether a tensor was written to."""


@dataclass(frozen=True)
class Missing:
    """Describes what one rank's model lacks after the data is loaded."""

    computed: dict[str, Tensor]
    """Local tensors that the model computes, on the CPU, by name."""
    attributes: Attributes
    """Other attributes that its initializers set."""
    unfilled: frozenset[str]
    """Names for a hook to fill: neither the checkpoint nor the model itself does."""
    uninitialized: frozenset[str]
    """Names in ``unfilled`` that held no values on this rank before the load, so that a hook must fill them."""
    holders: dict[str, int]
    """Buffers that no checkpoint holds and some rank lacks, each with a rank that has it. Equal on all ranks."""
    unsaved: frozenset[str] = frozenset()
    """Non-persistent buffers with storage that the model cannot compute, so that they keep their values."""


def has_unfinished(targets: Targets) -> bool:
    """Returns True if a load has failed that was to give values to some of the targets."""
    return any(map(_is_unfinished, targets.tensors))


def _is_unfinished(tensor: Tensor) -> bool:
    return _UNFINISHED in tensor.__dict__ and tensor.__dict__[_UNFINISHED] == _state(tensor)


def _state(tensor: Tensor) -> tuple[int, bytes]:
    """Returns what each write to a tensor changes: its version, and on the CPU some elements, for writes through ``.data``. A
    device may not answer any more."""
    local = with_memory(tensor)
    if not local.is_cpu or not local.numel():
        return _version(tensor), b""
    row = (local[(0,) * (local.ndim - 1)][:_SAMPLE] if local.ndim else local).detach().resolve_conj().resolve_neg()
    return _version(tensor), bytes(as_memoryview(row.contiguous()))


def _version(tensor: Tensor) -> int:
    """Returns a number that grows with each write that torch knows of, also with one to a DTensor's local tensor."""
    return sum(0 if part.is_inference() else part._version for part in (tensor, with_memory(tensor)))


def check_held(targets: Targets, only: Collection[tuple[str, str]]) -> None:
    """Raises ModelMismatch if a load that fills ``only`` some of the targets would leave others without values."""
    filled = {targets.index.get(name) for _, name in only}
    pairs = zip(targets.names, targets.tensors, strict=True) if only else ()
    empty = [name for i, (name, t) in enumerate(pairs) if i not in filled and (t.is_meta or _is_unfinished(t))]
    if empty:
        raise ModelMismatch(
            f"only some tensors are to be filled, and others hold no values yet: {list_first(empty)}; load all of the model first"
        )


@contextmanager
def finishing(model: nn.Module, targets: Targets, missing: Missing) -> Iterator[None]:
    """A context in which a load gives targets storage and values. If it fails, the next load knows which of them hold none, and
    what no checkpoint fills is on meta again."""
    unsaved = {id(tensor) for tensor in targets.unsaved_meta.values()}
    tensor_dicts = [owned for module in model.modules() for owned in (module._parameters, module._buffers)] if unsaved else []
    on_meta = [(owned, name, tensor) for owned in tensor_dicts for name, tensor in owned.items() if id(tensor) in unsaved]
    without_values = set[int]()
    if targets.has_meta or has_unfinished(targets):
        without_values = {i for i, tensor in enumerate(targets.tensors) if tensor.is_meta or _is_unfinished(tensor)}
        without_values |= {targets.index[name] for name in missing.computed if name in targets.index}
    try:
        yield
    except BaseException:
        for owned, name, unfilled in on_meta:
            owned[name] = unfilled  # type: ignore[assignment]
        for tensor in (targets.tensors[i] for i in without_values):
            if not tensor.is_meta:
                tensor.__dict__[_UNFINISHED] = _state(tensor)
        raise
    for tensor in targets.tensors:
        tensor.__dict__.pop(_UNFINISHED, None)


def unfilled_anywhere(control: Control, inputs: LocalInputs, plan: LoadPlan) -> list[list[str]]:
    """Returns the missing and the mismatched names of the model, on any rank."""
    if not inputs.local_modules:
        return [list(plan.missing), list(plan.mismatched)]
    shared = _shared_names(inputs)
    own = [[shared[name] for name in plan.missing], list(plan.mismatched)]
    unfilled: list[list[str]] = control.agree("the report", None, own, _union)
    return unfilled


def _union(views: dict[int, list[list[str]]]) -> list[list[str]]:
    """Returns the union of the ranks' first lists, of their second lists, and so on."""
    return [list(dict.fromkeys(chain.from_iterable(lists))) for lists in zip(*views.values(), strict=True)]


def _shared_names(inputs: LocalInputs) -> dict[str, str]:
    """Maps a name of each target to the one that all ranks know."""
    return {inputs.targets.names[i]: name for name, i in reversed(inputs.targets.index.items())}


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
    """Computes what the model can of what no checkpoint tensor fills.

    Tensors that hold values keep them, unless another rank has them on meta: then all ranks initialize them alike. So do those
    that a model on meta holds only because its class cannot make them on meta, and non-persistent buffers, which after
    ``to_empty()`` hold nothing. With ``init_missing="reset_parameters"``, all that the checkpoint does not fill is initialized,
    as a hook would be called for it.

    Collective where a model is on meta, or with that option: in rounds, out of which all ranks raise what any does.

    Args:
        anywhere: names of tensors that are missing or mismatched on some rank, as all ranks know them.
        meta: True if any rank has tensors on meta.
        seed: for tensors that are initialized; equal on all ranks.

    Raises:
        ModelMismatch: nobody will fill a tensor that was on meta.
    """
    targets, model, unfilled = inputs.targets, request.model, {*plan.unfilled}
    shared = _shared_names(inputs) if unfilled else {}
    tensor_of = {shared[name]: targets.tensors[targets.index[shared[name]]] for name in unfilled}
    on_meta = {name for name, tensor in tensor_of.items() if tensor.is_meta or _is_unfinished(tensor)}
    if targets.has_meta:
        with_values = [name for name in unfilled if shared[name] not in on_meta]
        on_meta |= {shared[name] for name in params_ignoring_meta(model, with_values)}
    without_values = {name for name in unfilled if shared[name] in on_meta}
    if meta and anywhere:
        (names,) = control.agree("comparing what is missing", None, [sorted(on_meta)], _union)
        on_meta = set(names)
    tensors = {name: tensor for name, tensor in targets.unsaved_meta.items() if name not in holders}
    tensors |= {name: tensor_of[shared[name]] for name in unfilled if shared[name] in on_meta}
    uninitialized = {*tensors}
    hooked, resets = callable(request.init_missing), uninitialized | unfilled if request.resets else set()
    if resets:
        tensors |= {name: tensor_of[shared[name]] for name in unfilled}
    unsaved = _unsaved_buffers(request, inputs)
    tensors |= unsaved
    dtypes = {name: tensor.dtype for name, tensor in tensors.items()}
    dtypes |= {name: targets.dtypes[targets.index[shared[name]]] for name in unfilled}

    def initialize() -> tuple[dict[str, Tensor], Attributes]:
        adapters = meta and not hooked
        values, attributes = compute(model, tensors, dtypes, seed, request.parts, adapters, inputs.modules, resets)
        if (nobody := uninitialized - values.keys()) and not hooked:
            raise unfilled_error(sorted(nobody), request.resets)
        return values, attributes

    initialized = Attempt(initialize)
    if meta or request.resets:
        control.agree("initializing what the checkpoint lacks", initialized.failure)
    # Otherwise an initializer that fails leaves everything as it is.
    computed, attributes = initialized.value if initialized.failure is None else ({}, [])
    computed = inputs.recomputed | computed
    filled = computed.keys()
    return Missing(
        computed,
        attributes,
        frozenset((uninitialized | unfilled) - filled),
        frozenset((without_values | targets.unsaved_meta.keys()) & uninitialized - filled),
        holders,
        frozenset(unsaved.keys() - filled - holders.keys() - uninitialized),
    )


def _unsaved_buffers(request: Request, inputs: LocalInputs) -> dict[str, Tensor]:
    """Returns the non-persistent buffers by name, except those that share storage with what is loaded and those that cannot be
    written to element by element; none of a model that has not changed since the load before, whose values are known."""
    targets = inputs.targets
    if inputs.modules is None:
        return {}
    names = sorted(targets.unsaved_buffers) if request.as_pretrained else []
    loaded = storage_filter([tensor for tensor in targets.tensors if not tensor.is_meta] if names else [])
    buffers = dict(targets.unsaved_meta)
    for name in names:
        tensor = tensor_at(request.model, name)
        if tensor.layout == torch.strided and not has_internal_overlap(tensor) and not loaded(tensor):
            buffers[name] = tensor
    return buffers


def warn_of_attributes(inputs: LocalInputs, report: LoadReport) -> None:
    """Warns of tensors on meta that modules hold in other ways than as parameters and buffers."""
    if inputs.modules is not None and (paths := inputs.modules.attributes_on_meta()):
        report.warnings.append(
            f"attributes that are neither parameters nor buffers are still on meta, and no load fills them: {list_keys(paths)}. "
            "Set them, or build the model under accelerate.init_empty_weights(), which leaves them on CPU"
        )


def fill_missing(request: Request, inputs: LocalInputs, missing: Missing, rank: int, report: LoadReport) -> None:
    """Fills what the checkpoint does not: with what the model has computed, then by the caller's hook.

    Raises:
        LoadError: the hook leaves a tensor unfilled that held no values.
    """
    targets, model = inputs.targets, request.model
    if missing.unsaved and model not in _warned:
        _warned.add(model)
        report.warnings.append(
            f"non-persistent buffers are in no checkpoint, and the model cannot compute {list_keys(sorted(missing.unsaved))}: "
            "they keep their values. If the model comes from to_empty(), they are uninitialized memory: set them, or leave the "
            "model on meta, so that the load initializes them or says that it cannot"
        )
    adapters = filter(is_adapter, model.modules()) if getattr(model, "peft_config", None) else ()
    if merged := sorted({name for module in adapters for name in getattr(module, "merged_adapters", ())}):
        report.warnings.append(
            f"adapter {', '.join(merged)} is merged into base weights: those that were loaded are without it, and "
            "unmerge_adapter() would subtract it from them; adapter weights that were loaded have no effect. Call "
            "unmerge_adapter() before the load"
        )
    refresh_token_rows(model)
    computed = missing.computed
    if not computed and not missing.unfilled:
        return
    report.warnings += _unfit_adapters(model, missing)
    tensors = dict(zip(targets.names, targets.tensors, strict=True))
    tensors |= {name: tensor_at(model, name) for name in {*targets.unsaved_meta, *targets.unsaved_buffers}}

    def local(names: Collection[str]) -> dict[str, Tensor]:
        return dict(zip(names, local_tensors([tensors[name] for name in names]), strict=True))

    with torch.no_grad():
        for name, tensor in local(computed).items():
            tensor.copy_(computed[name])
    for module, name, value in missing.attributes:
        setattr(module, name, value)
    report.initialized += sorted(computed)
    if (hook := request.init_missing) is None or isinstance(hook, str):
        return
    for tensor in local(missing.uninitialized).values():
        poison(tensor)
    for module, path, leaves in init_missing_calls(model, missing.unfilled):
        with callers_default_device():
            hook(module, path, leaves)
        report.initialized += [f"{path}.{leaf}" if path else leaf for leaf in leaves]
    tensors |= {name: tensor_at(model, name) for name in targets.unsaved_meta}  # a hook may replace a tensor
    present = {*map(id, chain(model.parameters(), model.buffers()))}
    present_names = [name for name in missing.uninitialized if id(tensors[name]) in present]
    unwritten = sorted(name for name, t in local(present_names).items() if not t.is_meta and is_poisoned(t))
    if unwritten:
        raise LoadError(
            f"rank {rank}: init_missing left {list_first(unwritten, 10)} unfilled; it is called as "
            "hook(module, path, names) and must write to each of these names of the module, in place"
        )


def _unfit_adapters(model: nn.Module, missing: Missing) -> Iterator[str]:
    """Yields warnings of adapters that do not fit the base weights that were loaded."""
    if stale := stale_adapters(model, missing.unfilled - missing.uninitialized):
        yield (
            f"adapter {', '.join(stale)} keeps values that PEFT has computed from the base weights of before: load its "
            "checkpoint next or, as those of FRoD, OSF and PSOFT lack some of these values, make a new adapter now that the base "
            "weights are loaded"
        )
    if residual := residual_adapters(model, missing.unfilled):
        yield (
            f"adapter {', '.join(residual)} has changed the base weights when it was made (init_lora_weights), and this load has "
            "replaced them, so that the adapter does not fit: call get_peft_model after the base weights are loaded, then load "
            "the adapter's checkpoint"
        )
