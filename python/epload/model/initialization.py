"""Initializes what no checkpoint fills as the model itself would: rotary frequencies, position tables, a new head.

transformers initializes a module with the ``_init_weights`` of the nearest ``PreTrainedModel`` above it, which may also write to
tensors of the module's descendants. Here these initializers run on a skeleton of the model (see ``skeleton.py``). Every rank
computes the same full tensors, from a seed that the ranks have agreed on, and keeps its own shards of them.
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
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from epload.core.placement import box_slices, owned_regions
from epload.errors import ModelMismatch
from epload.model import dtensor
from epload.model.expert_parallel import ExpertParallelSpec
from epload.model.modules import Modules
from epload.model.poison import poison
from epload.model.skeleton import Skeleton, class_before_fsdp

InitMissing = Callable[[nn.Module, str, tuple[str, ...]], None]
"""Called as ``hook(module, path, names)`` for each module with tensors that nothing has filled; initializes them in place."""


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
    """Runs the model's own initializers for some of its tensors.

    Issues no collective, and changes neither the model nor any random-number generator.

    Args:
        missing: the model's tensors to initialize, plain or DTensors, by name. Only their shapes and layouts are used.
        dtypes: the dtype of each.
        seed: equal on all ranks.
        expert_parallel: sharding that the model does not describe; different shards get different random numbers.
        adapters: whether to initialize what adapters add, too.
        modules: of the model, if they were found already.

    Returns:
        The tensors that the model could compute, which may be none; the others are left out.

    Raises:
        ModelMismatch: an initializer failed.
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
    skeleton = Skeleton(full, _tied_targets(modules))
    with torch.no_grad(), torch.device("cpu"), _transformers_guard(), preserve_generators():
        for step in _steps(model, modules, set(full), adapters):
            _seed_generators(seed, step, expert_parallel)
            try:
                step.run(skeleton)
            except Exception as error:
                raise ModelMismatch(
                    f"{step.initializer} failed to initialize {step.path or 'the model'} "
                    f"({type(error).__name__}: {str(error)[:300]}), which the checkpoint does not fill: "
                    f"{', '.join(list(missing)[:5])}. Pass init_missing=hook(module, path, names) to fill it"
                ) from error
    computed = skeleton.computed()
    fsdp_axes = dtensor.fsdp_shard_axes(modules.fsdp)
    for name, tensor in missing.items():
        value = computed.get(id(tensor))
        if value is not None and value.shape == tensor.shape:
            result.values[name] = _local_shard(name, tensor, value.to(dtypes[name]), fsdp_axes.get(id(tensor)))
    result.attributes = skeleton.changed_attributes() + _rope_lengths(model, result.values)
    return result


def _rope_lengths(model: nn.Module, computed: Collection[str]) -> list[tuple[nn.Module, str, Any]]:
    """Returns the attributes to set on modules whose computed rotary frequencies had been scaled for a longer sequence."""
    owners = {
        path: model.get_submodule(path) for path in {name.rpartition(".")[0] for name in computed if "inv_freq" in name}
    }
    return [
        (module, name, module.original_max_seq_len)
        for module in owners.values()
        for name in vars(module)
        if name.endswith("max_seq_len_cached") and hasattr(module, "original_max_seq_len")
    ]


def params_ignoring_meta(model: nn.Module, names: Collection[str]) -> set[str]:
    """Returns the names of the parameters (all have storage) that would have storage even if the model had been built on meta.

    ``nn.Parameter(torch.Tensor(n))`` ignores the default device and leaves its memory uninitialized. Values that a
    caller has written there cannot be told from garbage, and ``from_pretrained`` initializes such a parameter like any
    other. A parameter that a new model has on meta, on the other hand, has been given its values by the caller.
    """
    found: set[str] = set()
    for path, module in model.named_modules() if names else ():
        prefix = f"{path}." if path else ""
        inside = {name for name in names if name.startswith(prefix)}
        if not inside or not is_pretrained(type(module)):
            continue
        try:
            with torch.device("meta"), preserve_generators():
                new = class_before_fsdp(type(module))(copy.deepcopy(module.config))
        except Exception:  # a class that needs more than its config
            continue
        parameters = dict(new.named_parameters(remove_duplicate=False))
        found |= {n for n in inside if (t := parameters.get(n.removeprefix(prefix))) is not None and not t.is_meta}
        if path == "":
            break
        names = set(names) - inside
    return found


def init_missing_calls(model: nn.Module, names: Collection[str]) -> list[tuple[nn.Module, str, tuple[str, ...]]]:
    """The arguments of an ``InitMissing`` hook for these tensors of the model: one call for each module that owns some."""
    by_path: dict[str, list[str]] = {}
    for name in sorted(names):
        path, _, leaf = name.rpartition(".")
        by_path.setdefault(path, []).append(leaf)
    calls: list[tuple[nn.Module, str, tuple[str, ...]]] = []
    for path, leaves in by_path.items():
        try:
            calls.append((model.get_submodule(path), path, tuple(leaves)))
        except AttributeError:  # a wrapper that leaves itself out of the names of its state_dict
            calls.append((model, "", tuple(f"{path}.{leaf}" for leaf in leaves)))
    return calls


# ---- choosing initializers ----


@dataclass(frozen=True)
class _Step:
    """A module to initialize, under one of its paths."""

    path: str
    tensors: tuple[str, ...]
    """Names of the module's own tensors that are to be initialized."""
    initializer: str
    """Class and method, for messages."""
    run: Callable[[Skeleton], None]


def _init_weights(owner: nn.Module, module: nn.Module, skeleton: Skeleton) -> None:
    """Initializes a module by the ``_init_weights`` of ``owner``."""
    initializer: Any = skeleton.module(owner)
    initializer._init_weights(skeleton.module(module))


def _reset_adapters(module: nn.Module, configs: Mapping[str, Any], skeleton: Skeleton) -> None:
    """Lets a layer initialize its adapters. ``configs``: PEFT's config of each; empty for other libraries."""
    layer: Any = skeleton.module(module)
    if not hasattr(layer, "reset_lora_parameters"):
        return
    for name in layer.lora_A:
        method = getattr(configs.get(name), "init_lora_weights", True)
        if method is True or method == "gaussian":
            layer.reset_lora_parameters(name, method)  # other methods need the base weights


def _steps(model: nn.Module, modules: Modules, wanted: set[int], adapters: bool) -> list[_Step]:
    """The modules that own tensors with one of these ids, and the modules above them; children before parents.

    What an adapter adds to a layer does not belong to the adapted model: initializing it like the model's own layers would change
    what the model computes. With ``adapters``, the adapted layer initializes it; otherwise nothing does.
    """
    steps: list[_Step] = []
    pretrained = set(filter(is_pretrained, modules.classes))

    def visit(path: str, module: nn.Module, owner: nn.Module | None, configs: Mapping[str, Any]) -> bool:
        if type(module) in pretrained or (owner is None and module is model and _has_init_weights(module)):
            owner = module
        configs = module.__dict__.get("peft_config", configs)
        adds = is_adapter(module)
        below = added = False
        for name, child in module._modules.items():
            if child is None:
                continue
            is_added = adds and name != "base_layer"
            found = visit(f"{path}.{name}" if path else name, child, None if is_added else owner, configs)
            below |= found and not is_added
            added |= found and is_added
        tensors = (*module._parameters.items(), *module._buffers.items())
        own = tuple(name for name, tensor in tensors if tensor is not None and id(tensor) in wanted)
        if (own or below) and owner is not None:
            initializer = f"{class_before_fsdp(type(owner)).__name__}._init_weights"
            steps.append(_Step(path, own, initializer, partial(_init_weights, owner, module)))
        if added and adapters:
            initializer = f"{type(module).__name__}.reset_lora_parameters"
            steps.append(_Step(path, (), initializer, partial(_reset_adapters, module, configs)))
        return below or added or bool(own)

    visit("", model, None, {})
    return steps


def _tied_targets(modules: Modules) -> set[tuple[int, str]]:
    """Tied parameters that are not initialized where they are, by the id of the owning module and the name there: transformers
    initializes the embedding, and the head that is tied to it gets its value."""
    found = set()
    pretrained = set(filter(is_pretrained, modules.classes))
    for module in [module for module in modules.unique if type(module) in pretrained]:
        for target, source in (getattr(module, "all_tied_weights_keys", None) or {}).items():
            (target_owner, name), (source_owner, source_name) = _owner_of(module, target), _owner_of(module, source)
            if target_owner is None or source_owner is None or target_owner is source_owner:
                continue
            tensor = target_owner._parameters.get(name)
            if tensor is not None and tensor is source_owner._parameters.get(source_name):
                found.add((id(target_owner), name))
    return found


def _owner_of(module: nn.Module, name: str) -> tuple[nn.Module | None, str]:
    path, _, leaf = name.rpartition(".")
    try:
        return module.get_submodule(path), leaf
    except AttributeError:
        return None, leaf


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


def _transformers_guard() -> Any:
    """transformers' guard, under which torch's own initializers leave alone what is marked as initialized."""
    initialization = sys.modules.get("transformers.initialization")
    return initialization.guard_torch_init_functions() if initialization is not None else nullcontext()


# ---- this rank's shards ----


def _local_shard(name: str, tensor: Tensor, full: Tensor, fsdp_axis: int | None) -> Tensor:
    """The part of a full tensor that the local tensor of ``tensor`` holds."""
    if not isinstance(tensor, DTensor):
        return full
    layout, coordinate = dtensor.layout_of(name, tensor, fsdp_axis)
    shard = torch.empty(tensor.to_local().shape, dtype=full.dtype)
    for region in owned_regions(layout, coordinate):
        shard[box_slices(region.local_start, region.size)] = full[box_slices(region.start, region.size)]
    return shard


# ---- random numbers ----


def _seed_generators(seed: int, step: _Step, expert_parallel: ExpertParallelSpec | None) -> None:
    """Seeds the CPU's generators for one module: equally on ranks that hold the same tensors, differently for different modules
    and for different shards of one that the model does not describe."""
    path, shard = step.path, ""
    if expert_parallel is not None and step.tensors:
        leaf = step.tensors[0]
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
