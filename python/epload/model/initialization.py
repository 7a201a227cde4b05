"""Initializes what no checkpoint fills as the model itself would: rotary frequencies, position tables, a new head.

transformers initializes a module with the ``_init_weights`` of the nearest ``PreTrainedModel`` above it, which may also write to
tensors of the module's descendants. Here these initializers run on a :class:`Skeleton` of the model. Every rank
computes the same full tensors, from a seed that the ranks have agreed on, and keeps its own shards of them.
"""

from __future__ import annotations

import copy
import hashlib
import inspect
import random
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from collections.abc import Set as AbstractSet
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, NamedTuple

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
    """Runs the model's own initializers for some of its tensors, without changing the model or any random-number generator.

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
    skeleton = Skeleton(full, _tied_targets(modules))
    with torch.no_grad(), torch.device("cpu"), _transformers_guard(), preserve_generators():
        for step in _steps(model, set(full), adapters):
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
    paths = {name.rpartition(".")[0] for name in computed if "inv_freq" in name}
    return [
        (module, name, module.original_max_seq_len)
        for module in map(model.get_submodule, paths)
        for name in vars(module)
        if name.endswith("max_seq_len_cached") and hasattr(module, "original_max_seq_len")
    ]


def params_ignoring_meta(model: nn.Module, names: Collection[str]) -> set[str]:
    """Returns the names of the parameters (all have storage) that would have storage even if the model had been built on meta:
    ``nn.Parameter(torch.Tensor(n))`` ignores the default device.

    Values that a caller has written there cannot be told from uninitialized memory, and ``from_pretrained`` initializes them.
    """
    ignoring: set[str] = set()
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
        ignoring |= {n for n in inside if (t := parameters.get(n.removeprefix(prefix))) is not None and not t.is_meta}
        names = set(names) - inside
    return ignoring


def init_missing_calls(model: nn.Module, names: Collection[str]) -> list[tuple[nn.Module, str, tuple[str, ...]]]:
    """Returns the arguments of an ``InitMissing`` hook for these tensors: one call for each module that owns some."""
    calls: list[tuple[nn.Module, str, tuple[str, ...]]] = []
    for path, group in groupby(
        sorted(names, key=lambda name: name.rpartition(".")), lambda name: name.rpartition(".")[0]
    ):
        leaves = tuple(name.removeprefix(f"{path}.") for name in group)
        try:
            calls.append((model.get_submodule(path), path, leaves))
        except AttributeError:  # a wrapper that leaves itself out of the names of its state_dict
            calls.append((model, "", tuple(f"{path}.{leaf}" for leaf in leaves)))
    return calls


# ---- choosing initializers ----


class _Step(NamedTuple):
    """A module to initialize, under one of its paths."""

    path: str
    tensors: tuple[str, ...]
    """Names of the module's own tensors that are to be initialized."""
    initializer: str
    """Class and method, for messages."""
    run: Callable[[Any], object]
    """Takes the skeleton."""


def _reset_adapters(layer: Any, configs: Mapping[str, Any]) -> None:
    """Lets a layer initialize its adapters. ``configs``: PEFT's config of each; empty for other libraries."""
    for name in layer.lora_A if hasattr(layer, "reset_lora_parameters") else ():
        method = getattr(configs.get(name), "init_lora_weights", True)
        if method is True or method == "gaussian":
            layer.reset_lora_parameters(name, method)  # other methods need the base weights


def _steps(model: nn.Module, missing: set[int], adapters: bool) -> list[_Step]:
    """Returns the modules that own tensors with one of these ids, and the modules above them; children before parents.

    What an adapter adds to a layer does not belong to the adapted model: initializing it like the model's own layers would change
    what the model computes. With ``adapters``, the adapted layer initializes it; otherwise nothing does.
    """
    steps: list[_Step] = []

    def visit(path: str, module: nn.Module, owner: Any, configs: Mapping[str, Any]) -> bool:
        if is_pretrained(type(module)) or (owner is None and module is model and _has_init_weights(module)):
            owner = module
        configs = module.__dict__.get("peft_config", configs)
        adds = is_adapter(module)
        below = added = False
        for name, child in module._modules.items():
            if child is not None:
                is_added = adds and name != "base_layer"
                has_missing = visit(f"{path}.{name}" if path else name, child, None if is_added else owner, configs)
                below |= has_missing and not is_added
                added |= has_missing and is_added
        tensors = (*module._parameters.items(), *module._buffers.items())
        own = tuple(name for name, tensor in tensors if tensor is not None and id(tensor) in missing)
        if (own or below) and owner is not None:
            initializer = f"{class_before_fsdp(type(owner)).__name__}._init_weights"
            steps.append(_Step(path, own, initializer, lambda s: s.module(owner)._init_weights(s.module(module))))
        if added and adapters:
            initializer = f"{type(module).__name__}.reset_lora_parameters"
            steps.append(_Step(path, (), initializer, lambda s: _reset_adapters(s.module(module), configs)))
        return below or added or bool(own)

    visit("", model, None, {})
    return steps


def _tied_targets(modules: Modules) -> set[tuple[int, str]]:
    """Returns tied parameters that are not initialized where they are, by the id of the owning module and the name there:
    transformers initializes the embedding, and the head that is tied to it gets its value."""
    tied = set()
    for module in modules.unique:
        keys = getattr(module, "all_tied_weights_keys", None) if is_pretrained(type(module)) else None
        for target, source in (keys or {}).items():
            (target_owner, name), (source_owner, source_name) = _owner_of(module, target), _owner_of(module, source)
            tensor = target_owner._parameters.get(name)
            is_same = tensor is not None and tensor is source_owner._parameters.get(source_name)
            if is_same and target_owner is not source_owner:
                tied.add((id(target_owner), name))
    return tied


def _owner_of(module: nn.Module, name: str) -> tuple[nn.Module, str]:
    """Returns the module that has a parameter, or an empty one, and the parameter's name there."""
    path, _, leaf = name.rpartition(".")
    try:
        return module.get_submodule(path), leaf
    except AttributeError:
        return nn.Module(), leaf


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


# ---- the skeleton ----


def class_before_fsdp(cls: type) -> type:
    """Returns the class of a module before ``fully_shard`` replaced it by a subclass of its own."""
    return next(base for base in cls.__mro__ if not issubclass(base, FSDPModule))


class Skeleton:
    """Stand-ins for a model's modules, on which initializers run without touching the model; created on first access, one per
    module.

    A stand-in has the class and the attributes of its module, but its tensors are on meta, except the ones to be initialized,
    which are full tensors on the CPU. So an initializer cannot overwrite a loaded weight, whatever it does, and touches no
    DTensor: no collective is issued, and DTensor's random-number state is neither used nor changed.
    """

    def __init__(self, full: Mapping[int, Tensor], tied: AbstractSet[tuple[int, str]]) -> None:
        """
        Args:
            full: the poisoned full tensors to be initialized, by the id of the model's own tensor.
            tied: tensors not to be initialized where they are, by the id of the owning module and the name there, because they
                are tied to others that are.
        """
        self._full = full
        self._tied = tied
        self._stand_ins: dict[int, nn.Module] = {}
        """Stand-ins, by the id of the original."""
        self._originals: dict[int, tuple[nn.Module, dict[str, Any]]] = {}
        """Originals, by the id of the stand-in, each with the attributes that the stand-in started with."""
        self._tensors: dict[int, Tensor] = {}
        self._meta_tensors: dict[tuple[Any, ...], Tensor] = {}

    def module(self, original: nn.Module) -> nn.Module:
        """Returns the stand-in for a module. A stand-in is its own."""
        if id(original) in self._originals or isinstance(original, torch.jit.ScriptModule):
            return original
        stand_in = self._stand_ins.get(id(original))
        if stand_in is None:
            stand_in = self._stand_ins[id(original)] = object.__new__(class_before_fsdp(type(original)))
            attributes = {name: value for name, value in original.__dict__.items() if name != _INITIALIZED}
            attributes["_modules"] = _Children(self, original._modules)
            for kind in ("_parameters", "_buffers"):
                owned = getattr(original, kind).items()
                attributes[kind] = {n: t if t is None else self._owned_tensor(original, n, t) for n, t in owned}
            stand_in.__dict__.update(attributes)
            self._originals[id(stand_in)] = original, attributes
            for name, value in attributes.items():
                if name not in ("_modules", "_parameters", "_buffers"):
                    attributes[name] = stand_in.__dict__[name] = self._with_stand_ins(value)
        return stand_in

    def computed(self) -> dict[int, Tensor]:
        """Returns the tensors that were initialized, in place or by assigning others, by the id of the model's own tensor."""
        computed: dict[int, Tensor] = {}
        for stand_in in list(self._stand_ins.values()):
            original, _ = self._originals[id(stand_in)]
            for before, after in ((original._parameters, stand_in._parameters), (original._buffers, stand_in._buffers)):
                for name, tensor in before.items():
                    value = after.get(name)
                    if id(tensor) in self._full and value is not None and not value.is_meta and not is_poisoned(value):
                        computed.setdefault(id(tensor), value.detach())
        return computed

    def changed_attributes(self) -> list[tuple[nn.Module, str, Any]]:
        """Returns what initializers set on modules, except parameters, buffers and children: original module, name, value."""
        originals = [(stand_in, *self._originals[id(stand_in)]) for stand_in in self._stand_ins.values()]
        return [
            (original, name, value)
            for stand_in, original, before in originals
            for name, value in stand_in.__dict__.items()
            if value is not before.get(name, self) and name != _INITIALIZED and not _has_modules(value)
        ]

    def _with_stand_ins(self, value: Any) -> Any:
        """Returns an attribute's value with its modules replaced by stand-ins, also those in a list, a tuple or a dict."""
        if isinstance(value, nn.Module):
            return self.module(value)
        if type(value) in (list, tuple) and _has_modules(value):
            return type(value)(map(self._with_stand_ins, value))
        if type(value) is dict and _has_modules(value):
            return {key: self._with_stand_ins(item) for key, item in value.items()}
        return value

    def _owned_tensor(self, module: nn.Module, name: str, original: Tensor) -> Tensor:
        if (id(module), name) in self._tied:
            return self._on_meta(original)
        siblings = module.parameters(recurse=False) if isinstance(module, ParametrizationList) else ()
        if id(original) in self._full or not any(id(tensor) in self._full for tensor in siblings):
            return self._tensor(original)
        # Reading one tensor of a parametrization computes with all of them.
        zeros = torch.zeros(original.shape, dtype=original.dtype)
        setattr(zeros, _INITIALIZED, True)
        return nn.Parameter(zeros, requires_grad=False) if isinstance(original, nn.Parameter) else zeros

    def _tensor(self, original: Tensor) -> Tensor:
        if id(original) not in self._tensors:
            self._tensors[id(original)] = self._create_tensor(original)
        return self._tensors[id(original)]

    def _create_tensor(self, original: Tensor) -> Tensor:
        is_parameter = isinstance(original, nn.Parameter)
        if (full := self._full.get(id(original))) is not None:
            return nn.Parameter(full, requires_grad=False) if is_parameter else full
        if is_parameter or original.is_meta or isinstance(original, DTensor):
            return self._on_meta(original)
        clone = original.detach().cpu().clone()  # a buffer, from which others may be computed
        setattr(clone, _INITIALIZED, True)
        return clone

    def _on_meta(self, original: Tensor) -> Tensor:
        """Returns a stand-in on meta. It cannot be written to, so that tensors of the same shape share one."""
        is_parameter = isinstance(original, nn.Parameter)
        key = (is_parameter, original.shape, original.dtype)
        if key not in self._meta_tensors:
            meta = torch.empty(original.shape, dtype=original.dtype, device="meta")
            self._meta_tensors[key] = nn.Parameter(meta, requires_grad=False) if is_parameter else meta
            setattr(self._meta_tensors[key], _INITIALIZED, True)
        return self._meta_tensors[key]


class _Children(dict[str, Any]):
    """The ``_modules`` of a stand-in: stand-ins for the children, created on first access."""

    def __init__(self, skeleton: Skeleton, children: Mapping[str, nn.Module | None]) -> None:
        super().__init__(children)
        self._skeleton = skeleton

    def __getitem__(self, name: str) -> nn.Module | None:
        child = super().__getitem__(name)
        return None if child is None else self._skeleton.module(child)

    def get(self, name: str, default: Any = None) -> Any:
        return self[name] if name in self else default  # noqa: SIM401  (that would be this method)

    def values(self) -> Any:
        return [self[name] for name in self]

    def items(self) -> Any:
        return [(name, self[name]) for name in self]


def _has_modules(value: Any) -> bool:
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else (value,)
    return any(isinstance(item, nn.Module) for item in items)
