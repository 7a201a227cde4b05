"""Initializes what no checkpoint fills as the model itself would: rotary frequencies, position tables, a new head.

transformers initializes a module with the ``_init_weights`` of the nearest ``PreTrainedModel`` above it, which may also write to
tensors of the module's descendants. These initializers run on the model itself while all its tensors are exchanged for others
(:func:`_exchanged`). Every rank computes the same full tensors, from a seed that the ranks have agreed on, and keeps its own
shards of them.
"""

from __future__ import annotations

import copy
import hashlib
import inspect
import random
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.utils.parametrize import ParametrizationList

from epload.core.placement import box_slices, owned_regions
from epload.errors import ModelMismatch
from epload.model import dtensor
from epload.model.expert_parallel import ExpertParallelSpec
from epload.model.memory import is_poisoned, poison
from epload.model.modules import Modules

_INITIALIZED = "_is_hf_initialized"
"""The attribute with which transformers marks tensors and modules that its initializers must leave alone."""
_TENSOR_DICTS = ("_parameters", "_buffers")
InitMissing = Callable[[nn.Module, str, tuple[str, ...]], None]
"""Called as ``hook(module, path, names)`` for each module with tensors that nothing has filled; initializes them in place."""
_Step = tuple[str, tuple[str, ...], str, Callable[[], object]]
"""A module's path, the names of its own tensors to initialize, the class and method that does so, and the call."""
_State = dict[str, Any]
"""The ``__dict__`` of a module."""


@dataclass
class Initialization:
    """The results of a model's initializers, on one rank."""

    values: dict[str, Tensor] = field(default_factory=dict)
    """The local tensors, on the CPU, by the names that were passed in."""
    attributes: list[tuple[nn.Module, str, Any]] = field(default_factory=list)
    """Other attributes that the initializers set on modules."""

    def apply(self, tensors: Mapping[str, Tensor]) -> None:
        """Writes the values to the model's local tensors, given by name, on any device, and sets the attributes."""
        with torch.no_grad():
            for name, value in self.values.items():
                tensors[name].copy_(value)
        for module, name, value in self.attributes:
            setattr(module, name, value)


def compute_missing(
    model: nn.Module,
    missing: Mapping[str, Tensor],
    dtypes: Mapping[str, torch.dtype],
    seed: int,
    expert_parallel: ExpertParallelSpec | None = None,
    adapters: bool = True,
    modules: Modules | None = None,
) -> Initialization:
    """Runs the model's own initializers for some of its tensors. Leaves the model and all random-number generators as they were.

    Args:
        missing: the model's tensors to initialize, plain or DTensors, by name. Only their shapes and layouts are used.
        seed: equal on all ranks.
        expert_parallel: sharding that the model does not describe; different shards get different random numbers.
        adapters: whether to initialize what adapters add, too.

    Returns the tensors that the model could compute, which may be none. Raises ModelMismatch if an initializer failed.
    """
    result = Initialization()
    if not missing:
        return result
    modules = modules or Modules(model)
    full: dict[int, Tensor] = {}
    for name, tensor in missing.items():
        if id(tensor) not in full:
            full[id(tensor)] = torch.empty(tensor.shape, dtype=dtypes[name], device="cpu")
            poison(full[id(tensor)])
    steps = _steps(model, full, adapters)
    with (
        torch.no_grad(),
        torch.device("cpu"),
        _transformers_guard(),
        preserve_generators(),
        _exchanged(modules, full) as states,
    ):
        for step in steps:
            _run(step, list(missing), seed, expert_parallel)
    computed: dict[int, Tensor] = {}
    for module, before, after in states:
        for kind in _TENSOR_DICTS:
            for name, tensor in before[kind].items():
                value = after[kind].get(name)
                if id(tensor) in full and value is not None and not value.is_meta and not is_poisoned(value):
                    computed.setdefault(id(tensor), value.detach())
        changed = [name for name, value in after.items() if value is not before.get(name, full)]
        own_state = (*_TENSOR_DICTS, "_modules", _INITIALIZED)
        result.attributes += [(module, name, after[name]) for name in changed if name not in own_state]
    fsdp_axes = dtensor.fsdp_shard_axes(modules.fsdp)
    for name, tensor in missing.items():
        value = computed.get(id(tensor))
        if value is not None and value.shape == tensor.shape:
            result.values[name] = _local_shard(name, tensor, value.to(dtypes[name]), fsdp_axes.get(id(tensor)))
    result.attributes += _rope_lengths(model, result.values)
    return result


def _rope_lengths(model: nn.Module, computed: Collection[str]) -> list[tuple[nn.Module, str, Any]]:
    """Returns the attributes to set on modules whose computed rotary frequencies had been scaled for a longer sequence."""
    paths = {name.rpartition(".")[0] for name in computed if "inv_freq" in name}
    return [
        (module, name, module.original_max_seq_len)
        for module in map(model.get_submodule, paths)
        for name in vars(module)
        if name.endswith("max_seq_len_cached") and hasattr(module, "original_max_seq_len")
    ]


def new_on_meta(pretrained: Any, **options: Any) -> nn.Module | None:
    """Returns a new model on meta of the class and the config of a transformers model; None if the class needs more than that."""
    try:
        with torch.device("meta"), preserve_generators():
            new: nn.Module = class_before_fsdp(type(pretrained))._from_config(
                copy.deepcopy(pretrained.config), **options
            )
            return new
    except Exception:
        return None


def params_ignoring_meta(model: nn.Module, names: Collection[str]) -> set[str]:
    """Returns the names of the parameters (all have storage) that would have storage even if the model had been built on meta:
    ``nn.Parameter(torch.Tensor(n))`` ignores the default device.

    Values that a caller has written there cannot be told from uninitialized memory, and ``from_pretrained`` initializes them.
    """
    ignoring: set[str] = set()
    for prefix, module in Modules(model).named if names else ():
        inside = {name for name in names if name.startswith(prefix)}
        if inside and is_pretrained(type(module)) and (new := new_on_meta(module)) is not None:
            parameters = dict(new.named_parameters(remove_duplicate=False))
            with_storage = {prefix + name for name, parameter in parameters.items() if not parameter.is_meta}
            ignoring |= inside & with_storage
            names = set(names) - inside
    return ignoring


def init_missing_calls(model: nn.Module, names: Collection[str]) -> list[tuple[nn.Module, str, tuple[str, ...]]]:
    """Returns the arguments of an ``InitMissing`` hook for these tensors: one call for each module that owns some."""
    calls: list[tuple[nn.Module, str, tuple[str, ...]]] = []
    parts = sorted(name.rpartition(".") for name in names)
    for path, group in groupby(parts, lambda part: part[0]):
        leaves = tuple(leaf for *_, leaf in group)
        try:
            calls.append((model.get_submodule(path), path, leaves))
        except AttributeError:  # a wrapper that leaves itself out of the names of its state_dict
            calls.append((model, "", tuple(f"{path}.{leaf}" for leaf in leaves)))
    return calls


# ---- choosing initializers ----


def _steps(model: nn.Module, missing: Collection[int], adapters: bool) -> list[_Step]:
    """Returns how to initialize the modules that own tensors with one of these ids, and the modules above them; children before
    parents.

    What an adapter adds to a layer does not belong to the adapted model: initializing it like the model's own layers would change
    what the model computes. With ``adapters``, the adapted layer initializes it; otherwise nothing does.
    """
    steps: list[_Step] = []

    def visit(path: str, module: nn.Module, owner: Any, configs: Mapping[str, Any]) -> bool:
        """Returns True if a tensor of the module or of one below it is missing."""
        if is_pretrained(type(module)) or (owner is None and module is model and _has_init_weights(module)):
            owner = module
        configs = module.__dict__.get("peft_config", configs)
        below = added = False
        for name, child in module._modules.items():
            if child is not None:
                is_added = name != "base_layer" and is_adapter(module)
                has_missing = visit(f"{path}.{name}" if path else name, child, None if is_added else owner, configs)
                below |= has_missing and not is_added
                added |= has_missing and is_added
        tensors = (*module._parameters.items(), *module._buffers.items())
        own = tuple(name for name, tensor in tensors if tensor is not None and id(tensor) in missing)
        if (own or below) and owner is not None:
            initializer = f"{class_before_fsdp(type(owner)).__name__}._init_weights"
            steps.append((path, own, initializer, lambda: owner._init_weights(module)))
        if added and adapters:
            initializer = f"{type(module).__name__}.reset_lora_parameters"
            steps.append((path, (), initializer, lambda: _reset_adapters(module, configs)))
        return below or added or bool(own)

    visit("", model, None, {})
    return steps


def _reset_adapters(layer: Any, configs: Mapping[str, Any]) -> None:
    """Lets a layer initialize its adapters. ``configs``: PEFT's config of each; empty for other libraries."""
    for name in layer.lora_A if hasattr(layer, "reset_lora_parameters") else ():
        method = getattr(configs.get(name), "init_lora_weights", True)
        if method is True or method == "gaussian":
            layer.reset_lora_parameters(name, method)  # other methods need the base weights


def is_pretrained(kind: type[nn.Module]) -> bool:
    """Returns True if the class is a model of transformers."""
    transformers = sys.modules.get("transformers.modeling_utils")
    return transformers is not None and issubclass(kind, transformers.PreTrainedModel)


def _has_init_weights(module: nn.Module) -> bool:
    """Returns True if a model of another library has an ``_init_weights(module)`` like that of transformers."""
    initializer = getattr(type(module), "_init_weights", None)
    return callable(initializer) and len(inspect.signature(initializer).parameters) == 2


def is_adapter(module: nn.Module) -> bool:
    """Returns True if a module is a layer of PEFT, or of another library (VeOmni) that follows PEFT's LoRA."""
    tuners = sys.modules.get("peft.tuners.tuners_utils")
    is_peft = tuners is not None and isinstance(module, tuners.BaseTunerLayer)
    return is_peft or (callable(getattr(type(module), "reset_lora_parameters", None)) and hasattr(module, "lora_A"))


def class_before_fsdp(cls: type) -> Any:
    """Returns the class of a module before ``fully_shard`` replaced it by a subclass of its own."""
    return next(base for base in cls.__mro__ if not issubclass(base, FSDPModule))


# ---- running them ----


def _run(step: _Step, missing: list[str], seed: int, expert_parallel: ExpertParallelSpec | None) -> None:
    """Raises ModelMismatch if the initializer fails."""
    path, tensors, initializer, run = step
    _seed_generators(seed, path, tensors, expert_parallel)
    try:
        run()
    except Exception as error:
        raise ModelMismatch(
            f"{initializer} failed to initialize {path or 'the model'} ({type(error).__name__}: {str(error)[:300]}), which the "
            f"checkpoint does not fill: {', '.join(missing[:5])}. Pass init_missing=hook(module, path, names) to fill it"
        ) from error


@contextmanager
def _exchanged(modules: Modules, full: Mapping[int, Tensor]) -> Iterator[list[tuple[nn.Module, _State, _State]]]:
    """Gives each module another ``__dict__``, with the same attributes but other tensors, and its class from before
    ``fully_shard``; restores both on exit. Yields the modules, each with its own state and the one that it has meanwhile.

    The other tensors are on meta, except ``full``: those to be initialized, by the id of the model's own tensor. So an
    initializer cannot overwrite a loaded weight, whatever it does, and touches no DTensor: no collective is issued, and
    DTensor's random-number state is neither used nor changed."""
    tied = _tied_targets(modules)
    stand_ins: dict[object, Tensor] = {}
    unique = [module for module in modules.unique if not isinstance(module, torch.jit.ScriptModule)]
    states: list[tuple[nn.Module, _State, _State]] = []
    classes = [type(module) for module in unique]
    for module in unique:
        state = {name: value for name, value in module.__dict__.items() if name != _INITIALIZED}
        state["_modules"] = dict(module._modules)
        siblings = module._parameters.values() if isinstance(module, ParametrizationList) else ()
        computes = any(id(tensor) in full for tensor in siblings)
        for kind in _TENSOR_DICTS:
            state[kind] = {
                name: tensor
                if tensor is None
                else _stand_in(tensor, {} if (id(module), name) in tied else full, computes, stand_ins)
                for name, tensor in module.__dict__[kind].items()
            }
        states.append((module, module.__dict__, state))
    try:
        for (module, _, state), cls in zip(states, classes, strict=True):
            object.__setattr__(module, "__dict__", state)
            object.__setattr__(module, "__class__", class_before_fsdp(cls))
        yield states
    finally:
        for (module, state, _), cls in zip(states, classes, strict=True):
            object.__setattr__(module, "__dict__", state)
            object.__setattr__(module, "__class__", cls)


def _stand_in(tensor: Tensor, full: Mapping[int, Tensor], computes: bool, stand_ins: dict[object, Tensor]) -> Tensor:
    """Returns the tensor that takes the place of a model's own. One on meta, which cannot be written to, stands for all of the
    same shape.

    ``computes``: reading a tensor to be initialized computes with this one, as in a parametrization."""
    is_parameter = isinstance(tensor, nn.Parameter)
    key: object = id(tensor)
    if key not in full and not computes and (is_parameter or tensor.is_meta or isinstance(tensor, DTensor)):
        key = (is_parameter, tensor.shape, tensor.dtype)
    if key not in stand_ins:
        if key in full:
            new = full[id(tensor)]
        elif key != id(tensor):
            new = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        elif computes:
            new = torch.zeros(tensor.shape, dtype=tensor.dtype)
        else:  # a buffer, from which others may be computed
            new = tensor.detach().cpu().clone()
        stand_ins[key] = nn.Parameter(new, requires_grad=False) if is_parameter else new
        if key not in full:
            setattr(stand_ins[key], _INITIALIZED, True)
    return stand_ins[key]


def _tied_targets(modules: Modules) -> set[tuple[int, str]]:
    """Returns tied parameters that are not initialized where they are, by the id of the owning module and the name there:
    transformers initializes the embedding, and the head that is tied to it gets its value."""
    tied = set()
    module_at = dict(modules.named)

    def owner_of(name: str) -> tuple[nn.Module | None, str]:
        path, dot, leaf = name.rpartition(".")
        return module_at.get(path + dot), leaf

    for prefix, module in modules.named:
        keys = getattr(module, "all_tied_weights_keys", None) if is_pretrained(type(module)) else None
        for target, source in (keys or {}).items():
            (owner, name), (other, other_name) = owner_of(prefix + target), owner_of(prefix + source)
            if owner is None or other is None or owner is other:
                continue
            if (tensor := owner._parameters.get(name)) is not None and tensor is other._parameters.get(other_name):
                tied.add((id(owner), name))
    return tied


def _transformers_guard() -> Any:
    """Returns transformers' guard, under which torch's own initializers leave alone what is marked as initialized."""
    initialization = sys.modules.get("transformers.initialization")
    return initialization.guard_torch_init_functions() if initialization is not None else nullcontext()


def _local_shard(name: str, tensor: Tensor, full: Tensor, fsdp_axis: int | None) -> Tensor:
    """Returns the part of a full tensor that the local tensor of ``tensor`` holds."""
    if not isinstance(tensor, DTensor):
        return full
    layout, coordinate = dtensor.layout_of(name, tensor, fsdp_axis)
    shard = torch.empty(tensor.to_local().shape, dtype=full.dtype)
    for region in owned_regions(layout, coordinate):
        shard[box_slices(region.local_start, region.size)] = full[box_slices(region.start, region.size)]
    return shard


def _seed_generators(
    seed: int, path: str, tensors: tuple[str, ...], expert_parallel: ExpertParallelSpec | None
) -> None:
    """Seeds the CPU's generators for one module: equally on ranks that hold the same tensors, differently for different modules
    and for different shards of one that the model does not describe."""
    shard = ""
    if expert_parallel is not None and tensors:
        leaf = tensors[0]
        name = f"{path}.{leaf}" if path else leaf
        if (global_name := expert_parallel.global_name(name)) is not None:
            path = global_name.removesuffix(leaf).removesuffix(".")
        if (outer := expert_parallel.outer_shard(name)) is not None:
            shard = str(outer.mesh.get_local_rank())
    digest = hashlib.blake2b(f"{seed}/{path}/{shard}".encode(), digest_size=8).digest()
    number = int.from_bytes(digest, "little") >> 1
    torch.default_generator.manual_seed(number)
    random.seed(number)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(number & 0xFFFFFFFF)


@contextmanager
def preserve_generators() -> Iterator[None]:
    """Restores the CPU's random-number generators on exit. Those of devices are not used."""
    numpy = sys.modules.get("numpy")
    state = torch.default_generator.get_state(), random.getstate(), numpy and numpy.random.get_state()
    try:
        yield
    finally:
        torch.default_generator.set_state(state[0])
        random.setstate(state[1])
        if numpy:
            numpy.random.set_state(state[2])
