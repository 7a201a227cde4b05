"""Computes what no checkpoint holds as the model itself would: rotary frequencies, position tables, a new head.

transformers initializes a module by the ``_init_weights`` of the nearest ``PreTrainedModel`` above it, and some of these write to
the tensors of their descendants. Here they run on a *skeleton*: copies of the module objects, whose tensors are stand-ins on meta
except for those that are to be initialized, which are whole and on the CPU. So an initializer cannot overwrite a loaded weight,
whatever it does; no DTensor is touched, hence no collective is issued and DTensor's random-number state is neither used nor
changed; and every shard is cut from the same whole tensor, whose seed the ranks have agreed on.
"""

from __future__ import annotations

import copy
import hashlib
import inspect
import random
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Set
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.utils.parametrize import ParametrizationList

from epload.core.placement import OwnedRegion, owned_regions
from epload.errors import ModelMismatch
from epload.model import dtensor, memory_pattern
from epload.model.expert_parallel import Parts
from epload.model.targets import layout_of

InitMissing = Callable[[nn.Module, str, tuple[str, ...]], None]
"""Called as ``hook(module, path, names)`` for each module with tensors that nothing filled; initializes them in place."""

_INITIALIZED = "_is_hf_initialized"
"""The mark by which transformers' initializers know, on a tensor or module, what to leave alone."""


@dataclass
class Initialization:
    """What a model computed, for one rank."""

    values: dict[str, Tensor] = field(default_factory=dict)
    """This rank's part of each tensor, on CPU, by the name that was asked for."""
    attributes: list[tuple[nn.Module, str, Any]] = field(default_factory=list)
    """Other attributes that the initializers set on modules."""

    def apply(self, tensors: Mapping[str, Tensor]) -> None:
        """Writes the values to the model's own tensors, given by name: local tensors, on any device."""
        with torch.no_grad():
            for name, value in self.values.items():
                tensors[name].copy_(value)
        for module, name, value in self.attributes:
            setattr(module, name, value)


def compute(
    model: nn.Module,
    unfilled: Mapping[str, Tensor],
    dtypes: Mapping[str, torch.dtype],
    seed: int,
    parts: Parts | None = None,
    adapters: bool = True,
) -> Initialization:
    """Runs the model's own initializers for some of its tensors. No collective; changes neither the model nor any
    random-number generator.

    Args:
        unfilled: the model's tensors to initialize, plain or DTensors, by name. Only shapes and layouts are looked at.
        dtypes: what each is kept in.
        seed: equal on all ranks.
        parts: what of the model is a part of something larger; such parts are drawn apart.
        adapters: whether to initialize what adapters add, too.

    Returns:
        the tensors that the model could compute, which may be none; the others are left out.

    Raises:
        ModelMismatch: an initializer failed; it names the module.
    """
    found = Initialization()
    if not unfilled:
        return found
    whole: dict[int, Tensor] = {}
    for name, tensor in unfilled.items():
        if id(tensor) not in whole:
            whole[id(tensor)] = torch.empty(tensor.shape, dtype=dtypes[name], device="cpu")
            memory_pattern.mark(whole[id(tensor)])
    skeleton = _Skeleton(whole, _tied(model))
    with torch.no_grad(), torch.device("cpu"), _guard(), _generators_kept():
        for place in _places(model, set(whole), adapters):
            _seed_generators(seed, place, parts)
            try:
                place.initialize(skeleton)
            except Exception as error:
                raise ModelMismatch(
                    f"{place.initializer} failed to initialize {place.path or 'the model'} "
                    f"({type(error).__name__}: {str(error)[:300]}), which the checkpoint does not fill: "
                    f"{', '.join(list(unfilled)[:5])}. Pass init_missing=hook(module, path, names) to fill it"
                ) from error
    computed = skeleton.computed()
    understated = dtensor.understated_axes(model.modules())
    for name, tensor in unfilled.items():
        value = computed.get(id(tensor))
        if value is not None and value.shape == tensor.shape:
            found.values[name] = _own_part(name, tensor, value.to(dtypes[name]), understated.get(id(tensor)))
    found.attributes = skeleton.attributes()
    return found


def made_off_meta(model: nn.Module, names: Collection[str]) -> set[str]:
    """Which of a model's parameters, though they have storage, would have it in any model of its class that is made on meta.

    ``nn.Parameter(torch.Tensor(n))`` allocates memory whatever the default device is, and leaves it uninitialized: what a caller
    has put into such a parameter cannot be told from garbage, and ``from_pretrained`` initializes it like any other. A parameter
    that a fresh model has on meta has been given its values by the caller.
    """
    found: set[str] = set()
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        inside = {name for name in names if name.startswith(prefix)}
        if not inside or not _initializes(module):
            continue
        try:
            with torch.device("meta"), _generators_kept():
                fresh = own_class(type(module))(copy.deepcopy(module.config))
        except Exception:  # a class that needs more than its config
            continue
        made = dict(fresh.named_parameters(remove_duplicate=False))
        found |= {n for n in inside if (t := made.get(n.removeprefix(prefix))) is not None and not t.is_meta}
        if path == "":
            break
        names = set(names) - inside
    return found


# ---- which modules initialize what ----


@dataclass(frozen=True)
class _Place:
    """A module to initialize, under one of its paths."""

    path: str
    module: nn.Module
    owner: nn.Module
    """Whose ``_init_weights`` does it."""
    tensors: tuple[str, ...]
    """Names of its own tensors that are to be initialized."""

    @property
    def initializer(self) -> str:
        return f"{own_class(type(self.owner)).__name__}._init_weights"

    def initialize(self, skeleton: _Skeleton) -> None:
        owner: Any = skeleton.module(self.owner)
        owner._init_weights(skeleton.module(self.module))


@dataclass(frozen=True)
class _Adapter(_Place):
    """A layer with adapters whose parameters are to be initialized, by the layer itself."""

    configs: Mapping[str, Any]
    """PEFT's, of each adapter; other libraries have none."""

    @property
    def initializer(self) -> str:
        return f"{type(self.module).__name__}.reset_lora_parameters"

    def initialize(self, skeleton: _Skeleton) -> None:
        layer: Any = skeleton.module(self.module)
        if not hasattr(layer, "reset_lora_parameters"):
            return
        for name in layer.lora_A:
            how = getattr(self.configs.get(name), "init_lora_weights", True)
            if how is True or how == "gaussian":
                layer.reset_lora_parameters(name, how)  # other ways need the base weights


def _places(model: nn.Module, wanted: set[int], adapters: bool) -> list[_Place]:
    """The modules that hold tensors with one of these ids, and those above them; children before parents.

    What an adapter adds to a layer is not its model's: drawing it like the model's own layers would change what the model
    computes. With ``adapters`` the adapted layer initializes it, else nobody does.
    """
    places: list[_Place] = []

    def visit(path: str, module: nn.Module, owner: nn.Module | None, configs: Mapping[str, Any]) -> bool:
        if _initializes(module) or (owner is None and module is model and _takes_modules(module)):
            owner = module
        configs = module.__dict__.get("peft_config", configs)
        is_adapter = _is_adapter(module)
        below = added = False
        for name, child in module._modules.items():
            if child is None:
                continue
            extra = is_adapter and name != "base_layer"
            found = visit(f"{path}.{name}" if path else name, child, None if extra else owner, configs)
            below |= found and not extra
            added |= found and extra
        owned = (*module._parameters.items(), *module._buffers.items())
        mine = tuple(name for name, tensor in owned if tensor is not None and id(tensor) in wanted)
        if (mine or below) and owner is not None:
            places.append(_Place(path, module, owner, mine))
        if added and adapters:
            places.append(_Adapter(path, module, module, (), configs))
        return below or added or bool(mine)

    visit("", model, None, {})
    return places


def _tied(model: nn.Module) -> set[tuple[int, str]]:
    """Places where a tied tensor is not initialized, by module and name: transformers initializes the embedding, and the head
    that is tied to it gets what that has."""
    found = set()
    for module in model.modules():
        if not _initializes(module):
            continue
        for target, source in (getattr(module, "all_tied_weights_keys", None) or {}).items():
            (ours, name), (theirs, other) = _place_of(module, target), _place_of(module, source)
            if ours is None or theirs is None or ours is theirs:
                continue
            tensor = ours._parameters.get(name)
            if tensor is not None and tensor is theirs._parameters.get(other):
                found.add((id(ours), name))
    return found


def _place_of(module: nn.Module, name: str) -> tuple[nn.Module | None, str]:
    path, _, leaf = name.rpartition(".")
    try:
        return module.get_submodule(path), leaf
    except AttributeError:
        return None, leaf


def _initializes(module: nn.Module) -> bool:
    transformers = sys.modules.get("transformers.modeling_utils")
    return transformers is not None and isinstance(module, transformers.PreTrainedModel)


def _takes_modules(module: nn.Module) -> bool:
    """Whether another library's model has an initializer of the same kind."""
    initializer = getattr(type(module), "_init_weights", None)
    return callable(initializer) and len(inspect.signature(initializer).parameters) == 2


def _is_adapter(module: nn.Module) -> bool:
    """Whether it is a layer of PEFT, or of another library (VeOmni) that follows PEFT's LoRA."""
    tuners = sys.modules.get("peft.tuners.tuners_utils")
    of_peft = tuners is not None and isinstance(module, tuners.BaseTunerLayer)
    return of_peft or (callable(getattr(type(module), "reset_lora_parameters", None)) and hasattr(module, "lora_A"))


def own_class(kind: type) -> type:
    """The class of a module before ``fully_shard`` put one of its own in its place."""
    return next(cls for cls in kind.__mro__ if not issubclass(cls, FSDPModule))


# ---- the skeleton ----


class _Skeleton:
    """Stand-ins for a model's modules, made when somebody looks at one. One for each module, so that identity is kept."""

    def __init__(self, whole: Mapping[int, Tensor], tied: Set[tuple[int, str]]) -> None:
        """
        Args:
            whole: the tensors to be initialized, by the id of the model's own.
            tied: places of tensors that are initialized elsewhere; see :func:`_tied`.
        """
        self._whole = whole
        self._tied = tied
        self._made: dict[int, nn.Module] = {}
        """By the id of the original."""
        self._originals: dict[int, tuple[nn.Module, dict[str, Any]]] = {}
        """By the id of the stand-in: the original, and the attributes that the stand-in began with."""
        self._tensors: dict[int, Tensor] = {}
        self._on_meta: dict[tuple[Any, ...], Tensor] = {}

    def module(self, original: nn.Module) -> nn.Module:
        """The stand-in of a module; a stand-in stands for itself."""
        if id(original) in self._originals or isinstance(original, torch.jit.ScriptModule):
            return original
        made = self._made.get(id(original))
        if made is None:
            made = self._made[id(original)] = object.__new__(own_class(type(original)))
            attributes = {name: value for name, value in original.__dict__.items() if name != _INITIALIZED}
            attributes["_modules"] = _Children(self, original._modules)
            for kind in ("_parameters", "_buffers"):
                owned = getattr(original, kind).items()
                attributes[kind] = {n: t if t is None else self._tensor_of(original, n, t) for n, t in owned}
            made.__dict__.update(attributes)
            self._originals[id(made)] = original, attributes
            for name, value in attributes.items():
                if name not in ("_modules", "_parameters", "_buffers"):
                    attributes[name] = made.__dict__[name] = self._of(value)
        return made

    def _of(self, value: Any) -> Any:
        """An attribute with modules, also those in a list, a tuple or a dict, replaced by their stand-ins."""
        if isinstance(value, nn.Module):
            return self.module(value)
        if type(value) in (list, tuple) and any(isinstance(item, nn.Module) for item in value):
            return type(value)(map(self._of, value))
        if type(value) is dict and any(isinstance(item, nn.Module) for item in value.values()):
            return {key: self._of(item) for key, item in value.items()}
        return value

    def _tensor_of(self, module: nn.Module, name: str, original: Tensor) -> Tensor:
        if (id(module), name) in self._tied:
            return self._protected(original)
        if id(original) in self._whole or not isinstance(module, ParametrizationList):
            return self._tensor(original)
        if not any(id(tensor) in self._whole for tensor in module.parameters(recurse=False)):
            return self._tensor(original)
        # A parametrization computes with all its tensors as soon as one of them is asked for.
        made = torch.zeros(original.shape, dtype=original.dtype)
        setattr(made, _INITIALIZED, True)
        return nn.Parameter(made, requires_grad=False) if isinstance(original, nn.Parameter) else made

    def _tensor(self, original: Tensor) -> Tensor:
        made = self._tensors.get(id(original))
        if made is None:
            made = self._tensors[id(original)] = self._made_for(original)
        return made

    def _made_for(self, original: Tensor) -> Tensor:
        is_parameter = isinstance(original, nn.Parameter)
        whole = self._whole.get(id(original))
        if whole is not None:
            return nn.Parameter(whole, requires_grad=False) if is_parameter else whole
        if is_parameter or original.is_meta or isinstance(original, DTensor):
            return self._protected(original)
        made = original.detach().cpu().clone()  # a buffer that others may be computed from
        setattr(made, _INITIALIZED, True)
        return made

    def _protected(self, original: Tensor) -> Tensor:
        """A stand-in on meta. Nobody can write to it, so that all of a shape share one."""
        is_parameter = isinstance(original, nn.Parameter)
        key = (is_parameter, original.shape, original.dtype)
        if key not in self._on_meta:
            made = torch.empty(original.shape, dtype=original.dtype, device="meta")
            self._on_meta[key] = nn.Parameter(made, requires_grad=False) if is_parameter else made
            setattr(self._on_meta[key], _INITIALIZED, True)
        return self._on_meta[key]

    def computed(self) -> dict[int, Tensor]:
        """What has been written of the tensors to be initialized, by id; also what another object has replaced."""
        found: dict[int, Tensor] = {}
        for original in list(self._made.values()):
            source, _ = self._originals[id(original)]
            for kept, now in ((source._parameters, original._parameters), (source._buffers, original._buffers)):
                for name, tensor in kept.items():
                    value = now.get(name)
                    known = tensor is None or id(tensor) not in self._whole or id(tensor) in found
                    if not known and value is not None and not value.is_meta and not memory_pattern.is_marked(value):
                        found[id(tensor)] = value.detach()
        return found

    def attributes(self) -> list[tuple[nn.Module, str, Any]]:
        """What the initializers have set on modules besides parameters, buffers and children."""
        found = []
        for made in self._made.values():
            original, before = self._originals[id(made)]
            for name, value in made.__dict__.items():
                if value is not before.get(name, self) and name != _INITIALIZED and not _refers_to_modules(value):
                    found.append((original, name, value))
        return found


class _Children(dict[str, Any]):
    """The children of a stand-in, themselves stand-ins, each made when it is looked at."""

    def __init__(self, skeleton: _Skeleton, children: Mapping[str, nn.Module | None]) -> None:
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


def _refers_to_modules(value: Any) -> bool:
    items: Iterable[Any] = (
        value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else (value,)
    )
    return any(isinstance(item, nn.Module) for item in items)


# ---- this rank's part ----


def _own_part(name: str, tensor: Tensor, whole: Tensor, fsdp_axis: int | None) -> Tensor:
    """Of a whole tensor what the local tensor of ``tensor`` holds."""
    if not isinstance(tensor, DTensor):
        return whole
    layout, coordinate = layout_of(name, tensor, fsdp_axis)
    part = torch.empty(tensor.to_local().shape, dtype=whole.dtype)
    for region in owned_regions(layout, coordinate):
        part[_slices(region.local_start, region)] = whole[_slices(region.start, region)]
    return part


def _slices(start: tuple[int, ...], region: OwnedRegion) -> tuple[slice, ...]:
    return tuple(slice(at, at + size) for at, size in zip(start, region.size, strict=True))


# ---- random numbers ----


def _seed_generators(seed: int, place: _Place, parts: Parts | None) -> None:
    """For one module: equal on the ranks that hold the same, different for modules and for what ranks hold of their own."""
    path, cut = place.path, ""
    for leaf in place.tensors if parts is not None else ():
        assert parts is not None
        name = f"{path}.{leaf}" if path else leaf
        if (called := parts.called(name)) is not None:
            path = called.removesuffix(leaf).removesuffix(".")
        if (outer := parts.outer(name)) is not None:
            cut = str(outer.mesh.get_local_rank())
        break
    digest = hashlib.blake2b(f"{seed}/{path}/{cut}".encode(), digest_size=8).digest()
    number = int.from_bytes(digest, "little") >> 1
    torch.default_generator.manual_seed(number)
    random.seed(number)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(number & 0xFFFFFFFF)


@contextmanager
def _generators_kept() -> Iterator[None]:
    """Gives the CPU's generators back as they were. Those of devices are not used."""
    numpy = sys.modules.get("numpy")
    state = torch.default_generator.get_state(), random.getstate(), numpy and numpy.random.get_state()
    try:
        yield
    finally:
        torch.default_generator.set_state(state[0])
        random.setstate(state[1])
        if numpy:
            numpy.random.set_state(state[2])


def _guard() -> Any:
    """transformers' guard: torch's own initializers leave alone what is marked as initialized."""
    initialization = sys.modules.get("transformers.initialization")
    return initialization.guard_torch_init_functions() if initialization is not None else nullcontext()
