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
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.utils.parametrize import ParametrizationList
from torch.utils._pytree import tree_leaves

from epload.core.placement import box_slices, owned_regions
from epload.errors import ModelMismatch
from epload.model import dtensor
from epload.model.expert_parallel import Parts, global_name, outer_shard
from epload.model.memory import is_poisoned, poison
from epload.model.modules import Modules
from epload.observe.render import list_first

_INITIALIZED = "_is_hf_initialized"
"""The attribute with which transformers marks tensors and modules that its initializers must leave alone."""
_TENSOR_DICTS = ("_parameters", "_buffers")
_ModuleState = tuple[nn.Module, type, dict[str, Any], dict[str, Any]]
"""A module, its class, its ``__dict__``, and the one that it has while its tensors are exchanged."""
InitMissing = Callable[[nn.Module, str, tuple[str, ...]], None] | Literal["reset_parameters"]
"""Called as ``hook(module, path, names)`` for each module with unfilled tensors, to fill them in place; or a method's name."""


Attributes = list[tuple[nn.Module, str, Any]]
"""Attributes to set on modules."""


def compute_missing(
    model: nn.Module,
    missing: Mapping[str, Tensor],
    dtypes: Mapping[str, torch.dtype],
    seed: int,
    expert_parallel: Parts = (),
    adapters: bool = True,
    modules: Modules | None = None,
    resets: Collection[str] = (),
) -> tuple[dict[str, Tensor], Attributes]:
    """Runs the model's own initializers for some of its tensors. Leaves the model and all random-number generators as they were.

    Args:
        missing: the model's tensors to initialize, plain or DTensors, by name. Only their shapes and layouts are used.
        seed: equal on all ranks.
        expert_parallel: sharding that the model does not describe; different shards get different random numbers.
        adapters: whether to initialize what adapters add, too.
        resets: names in ``missing`` of tensors that a module's ``reset_parameters()`` initializes where nothing else does.

    Returns:
        The tensors that the model could compute, which may be none: the local ones, on the CPU, by name. And the other attributes
        that the initializers set.

    Raises:
        ModelMismatch: an initializer failed.
    """
    values, attributes = dict[str, Tensor](), list[tuple[nn.Module, str, Any]]()
    if not missing:
        return values, attributes
    modules = modules or Modules(model)
    full: dict[int, Tensor] = {}
    for name, tensor in missing.items():
        empty = torch.empty(tensor.shape, dtype=dtypes[name], device="cpu")
        poison(empty)
        full[id(tensor)] = nn.Parameter(empty, False) if isinstance(tensor, nn.Parameter) else empty
    initializer = _Initializer({*map(id, full.values())}, list(missing), seed, expert_parallel, adapters)
    initializer.resets = {id(full[id(missing[name])]) for name in resets}
    transformers: Any = sys.modules.get("transformers.initialization")
    # Under this guard, torch's own initializers leave alone what is marked as initialized.
    guard = transformers.guard_torch_init_functions() if transformers is not None else nullcontext()
    with torch.no_grad(), torch.device("cpu"), guard, preserve_generators(), _exchanged(modules, full) as states:
        initializer.visit("", model)
    computed: dict[int, Tensor] = {}
    for module, _, own, exchanged in states:
        for kind in _TENSOR_DICTS:
            for name, tensor in own[kind].items():
                value = exchanged[kind].get(name)
                if id(tensor) in full and value is not None and not value.is_meta and not is_poisoned(value):
                    computed.setdefault(id(tensor), value.detach())
        for name, attribute in exchanged.items():
            is_new = name not in (*_TENSOR_DICTS, "_modules", _INITIALIZED) and attribute is not own.get(name, full)
            if is_new and not any(isinstance(leaf, Tensor) and leaf.is_meta for leaf in tree_leaves(attribute)):
                attributes.append((module, name, attribute))
    fsdp_axes = dtensor.fsdp_shard_axes(modules.fsdp)
    for name, tensor in missing.items():
        value = computed.get(id(tensor))
        if value is not None and value.shape == tensor.shape:
            values[name] = _local_shard(name, tensor, value.to(dtypes[name]), fsdp_axes.get(id(tensor)))
    return values, attributes + _rope_lengths(model, values)


def _rope_lengths(model: nn.Module, computed: Collection[str]) -> Attributes:
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
            new: nn.Module = class_before_fsdp(type(pretrained))._from_config(copy.deepcopy(pretrained.config), **options)
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
            parameters = new.named_parameters(remove_duplicate=False)
            ignoring |= inside & {prefix + name for name, parameter in parameters if not parameter.is_meta}
            names = {*names} - inside
    return ignoring


def init_missing_calls(model: nn.Module, names: Collection[str]) -> list[tuple[nn.Module, str, tuple[str, ...]]]:
    """Returns the arguments of an ``InitMissing`` hook for these tensors: one call for each module that owns some."""
    by_path: dict[str, list[str]] = {}
    for name in sorted(names):
        path, _, leaf = name.rpartition(".")
        by_path.setdefault(path, []).append(leaf)
    calls = []
    for path, leaves in by_path.items():
        try:
            calls.append((model.get_submodule(path), path, tuple(leaves)))
        except AttributeError:  # a wrapper that leaves itself out of the names of its state_dict
            calls.append((model, "", tuple(f"{path}.{leaf}" for leaf in leaves)))
    return calls


def is_pretrained(kind: type[nn.Module]) -> bool:
    """Returns True if the class is a model of transformers."""
    transformers = sys.modules.get("transformers.modeling_utils")
    return transformers is not None and issubclass(kind, transformers.PreTrainedModel)


def is_diffusers(kind: type[nn.Module]) -> bool:
    """Returns True if the class is a model of diffusers."""
    diffusers = sys.modules.get("diffusers.models.modeling_utils")
    return diffusers is not None and issubclass(kind, diffusers.ModelMixin)


def diffusers_class(config: Mapping[str, Any]) -> Any:
    """Returns the class of diffusers whose configuration this is; None if it is of another library.

    Raises ImportError, or ValueError if the installed diffusers has no such model: the name in a configuration is not trusted."""
    if (name := config.get("_class_name")) is None:
        return None
    import diffusers

    kind = getattr(diffusers, name, None) if isinstance(name, str) else None
    if not (isinstance(kind, type) and is_diffusers(kind)):
        raise ValueError(f"diffusers {diffusers.__version__} has no model {name!r}")
    return kind


def is_adapter(module: nn.Module) -> bool:
    """Returns True if a module is a layer of PEFT, or of another library (VeOmni) that follows PEFT's LoRA."""
    tuners = sys.modules.get("peft.tuners.tuners_utils")
    is_peft = tuners is not None and isinstance(module, tuners.BaseTunerLayer)
    return is_peft or (callable(getattr(type(module), "reset_lora_parameters", None)) and hasattr(module, "lora_A"))


_COMPUTED_ADAPTERS = (
    "CPT", "DEFT", "DELORA", "FROD", "LN_TUNING", "OSF", "PSOFT", "SUPERTUNING", "TINYLORA", "TRAINABLE_TOKENS",
)  # fmt: skip
"""The methods of PEFT 0.21 whose adapters have tensors that depend on the base weights."""


def stale_adapters(model: nn.Module, kept: Collection[str]) -> list[str]:
    """Returns the adapters of PEFT that were computed from other base weights than those that a load has filled.

    Args:
        kept: names of tensors that keep the values that they had.
    """
    stale = []
    for adapter, config in getattr(model, "peft_config", {}).items():
        of_weights = getattr(config, "init_lora_weights", True) == "eva"
        of_weights |= getattr(config, "peft_type", None) in _COMPUTED_ADAPTERS
        of_weights |= any(getattr(config, name, None) for name in ("use_dora", "trainable_token_indices"))
        if of_weights and any(adapter in name.split(".") for name in kept):
            stale.append(adapter)
    return stale


def residual_adapters(model: nn.Module, unfilled: Collection[str]) -> list[str]:
    """Returns the adapters of PEFT that have changed the base weights when they were made, which a load has replaced.

    Args:
        unfilled: names of tensors that the load has not filled.
    """
    residual = []
    for adapter, config in getattr(model, "peft_config", {}).items():
        method = getattr(config, "init_lora_weights", True)
        changes_base = isinstance(method, str) and method not in ("gaussian", "orthogonal", "eva")
        base = {name for name, _ in model.named_parameters() if ".base_layer." in name} if changes_base else set()
        if base - set(unfilled) and any(adapter in name.split(".") for name in unfilled):
            residual.append(adapter)
    return residual


def refresh_token_rows(model: nn.Module) -> None:
    """Copies the rows of base weights that PEFT keeps of trained tokens, and puts back when it unmerges them, from the weights
    that a load has filled. Not those of DTensors, which other ranks have."""
    modules: Iterable[Any] = model.modules() if hasattr(model, "peft_config") else ()
    for module in modules:
        rows = getattr(module, "trainable_tokens_original", None)
        if rows is not None and not module.merged_adapters:
            weight = module.get_base_layer().weight.detach()
            for adapter, row in rows.items() if not isinstance(weight, DTensor) and not weight.is_meta else ():
                row.copy_(weight[module.token_indices[adapter]])


def class_before_fsdp(cls: type) -> Any:
    """Returns the class of a module before ``fully_shard`` replaced it by a subclass of its own."""
    return next(base for base in cls.__mro__ if not issubclass(base, FSDPModule))


@dataclass
class _Initializer:
    """Initializes the modules of a model whose tensors are exchanged, children before parents."""

    missing: Collection[int]
    """Ids of the tensors to initialize."""
    names: list[str]
    """Their names in the model, for messages."""
    seed: int
    expert_parallel: Parts
    adapters: bool
    """True to initialize what adapters add, which only the adapted layer may do: it does not belong to the adapted model."""

    resets: Collection[int] = ()
    """Ids of those that ``reset_parameters()`` may initialize. Not where adapters add modules: LoRA's B starts as zeros."""

    def visit(
        self,
        path: str,
        module: nn.Module,
        owner: Any = None,
        configs: Mapping[str, Any] | None = None,
        in_adapter: bool = False,
    ) -> bool:
        """Initializes a module that owns missing tensors, or is above one that does; returns True if so.

        Args:
            owner: the model whose ``_init_weights`` applies.
            configs: PEFT's config of each adapter; empty for other libraries.
            in_adapter: whether an adapter has added the module.
        """
        # A model of another library may have an initializer like that of transformers.
        method = getattr(type(module), "_init_weights", None) if not path else None
        if is_pretrained(type(module)) or (callable(method) and len(inspect.signature(method).parameters) == 2):
            owner = module
        configs = module.__dict__.get("peft_config", configs or {})
        below = added = False
        for name, child in module._modules.items():
            if child is not None:
                is_added = name != "base_layer" and is_adapter(module)
                child_path, child_owner = f"{path}.{name}" if path else name, None if is_added else owner
                is_missing = self.visit(child_path, child, child_owner, configs, in_adapter or is_added)
                below |= is_missing and not is_added
                added |= is_missing and is_added
        tensors = {**module._parameters, **module._buffers}
        own = [name for name, tensor in tensors.items() if id(tensor) in self.missing]
        if (own or below) and owner is not None:
            self._run(path, own, f"{type(owner).__name__}._init_weights", lambda: owner._init_weights(module))
        if self.resets and not in_adapter:
            self._reset(path, module, own)
        if added and self.adapters:
            name = f"{type(module).__name__}.reset_lora_parameters"
            self._run(path, [], name, lambda: _reset_adapters(module, configs))
        return below or added or bool(own)

    def _reset(self, path: str, module: Any, own: list[str]) -> None:
        """Calls ``reset_parameters()`` of a module with missing tensors that are not initialized yet; others keep their values.
        Not of one that has a shard of a larger tensor, of which the method cannot know the size."""
        tensors = {**module._parameters, **module._buffers}
        unwritten = [name for name in own if id(tensors[name]) in self.resets and is_poisoned(tensors[name])]
        names = [f"{path}.{name}" if path else name for name in own]
        is_shard = any(outer_shard(self.expert_parallel, name) is not None for name in names)
        if not unwritten or is_shard or not callable(getattr(type(module), "reset_parameters", None)):
            return
        others = {name: tensors[name].clone() for name in own if name not in unwritten}
        self._run(path, own, f"{type(module).__name__}.reset_parameters", module.reset_parameters)
        for name, value in others.items():
            tensors[name].copy_(value)

    def _run(self, path: str, own: list[str], name: str, initialize: Callable[[], object]) -> None:
        """Raises ModelMismatch if the initializer fails."""
        self._seed_generators(path, own)
        try:
            initialize()
        except Exception as error:
            raise ModelMismatch(
                f"{name} failed to initialize {path or 'the model'} ({type(error).__name__}: {str(error)[:300]}), which the "
                f"checkpoint does not fill: {list_first(self.names)}. Pass init_missing=hook(module, path, names) to fill it"
            ) from error

    def _seed_generators(self, path: str, own: list[str]) -> None:
        """Seeds the CPU's generators for one module: equally on ranks that hold the same tensors, differently for different
        modules and for different shards of one that the model does not describe."""
        shard = ""
        if self.expert_parallel and own:
            name = f"{path}.{own[0]}" if path else own[0]
            path = (global_name(self.expert_parallel, name) or name).removesuffix(own[0]).removesuffix(".")
            if (outer := outer_shard(self.expert_parallel, name)) is not None:
                shard = str(outer.mesh.get_local_rank())
        digest = hashlib.blake2b(f"{self.seed}/{path}/{shard}".encode(), digest_size=8).digest()
        number = int.from_bytes(digest, "little") >> 1
        torch.default_generator.manual_seed(number)
        random.seed(number)
        if (numpy := sys.modules.get("numpy")) is not None:
            numpy.random.seed(number & 0xFFFFFFFF)


def _reset_adapters(layer: Any, configs: Mapping[str, Any]) -> None:
    """Lets a layer initialize its adapters."""
    if not hasattr(layer, "reset_lora_parameters"):
        return
    takes_method = len(inspect.signature(layer.reset_lora_parameters).parameters) > 1  # not that of AdaLoRA
    for name in (*layer.lora_A, *getattr(layer, "lora_embedding_A", ())):
        method = getattr(configs.get(name), "init_lora_weights", True)
        if method is True or method == "gaussian":  # others need the base weights
            layer.reset_lora_parameters(*((name, method) if takes_method else (name,)))
    for name, rank in getattr(layer, "ranknum", {}).items():  # AdaLoRA's, which its method leaves as it is
        rank.data.fill_(layer.r[name])


def shown_names(model: nn.Module, modules: Modules) -> list[str] | None:
    """Returns the names in a model's state dict, whose hooks see tensors on meta; None if one of them cannot work with these.

    The model itself is not touched: another thread may compute with it.
    """
    stand_ins: dict[object, Tensor] = {}
    try:
        shells = {id(module): object.__new__(class_before_fsdp(type(module))) for module in modules.unique}
        for module in modules.unique:
            state = _exchange(module, {}, {}, stand_ins)
            state["_modules"] = {name: shells.get(id(child)) for name, child in module._modules.items()}
            object.__setattr__(shells[id(module)], "__dict__", state)
        return list(shells[id(model)].state_dict())
    except Exception:
        return None


def _exchange(
    module: nn.Module, full: Mapping[int, Tensor], pending: dict[int, Tensor], stand_ins: dict[object, Tensor]
) -> dict[str, Any]:
    """Returns another ``__dict__`` for a module, see :func:`_exchanged`. ``pending``: what no module has yet of ``full``."""
    own = module.__dict__
    state = {name: value for name, value in own.items() if name != _INITIALIZED}
    state["_modules"] = dict(module._modules)
    # Reading a tensor of a parametrization computes with the others.
    computes = isinstance(module, ParametrizationList) and any(id(t) in full for t in own["_parameters"].values())
    for kind in _TENSOR_DICTS:
        state[kind] = {
            name: pending.pop(id(t)) if id(t) in pending else _stand_in(t, computes, bool(full), stand_ins)
            for name, t in own[kind].items()
        }
    return state


@contextmanager
def _exchanged(modules: Modules, full: Mapping[int, Tensor]) -> Iterator[list[_ModuleState]]:
    """Gives each module another ``__dict__``, with the same attributes but other tensors, and its class from before
    ``fully_shard``; restores both on exit.

    The other tensors are on meta, except ``full``: those to be initialized, by the id of the model's own tensor. So an
    initializer cannot overwrite a loaded weight, whatever it does, and touches no DTensor: no collective is issued, and
    DTensor's random-number state is neither used nor changed."""
    stand_ins: dict[object, Tensor] = {}
    pending = dict(full)
    """Tied tensors are initialized where they come first, as transformers ties a head to the embedding."""
    states: list[_ModuleState] = []
    for module in modules.unique:
        if isinstance(module, torch.jit.ScriptModule):
            continue
        states.append((module, type(module), module.__dict__, _exchange(module, full, pending, stand_ins)))
    try:
        for module, cls, _, state in states:
            object.__setattr__(module, "__dict__", state)
            object.__setattr__(module, "__class__", class_before_fsdp(cls))
        yield states
    finally:
        for module, cls, own, _ in states:
            object.__setattr__(module, "__dict__", own)
            object.__setattr__(module, "__class__", cls)


def _stand_in(tensor: Tensor | None, computes: bool, copies: bool, on_meta: dict[object, Tensor]) -> Tensor | None:
    """Returns the tensor that takes the place of a model's own, marked as initialized. One ``on_meta``, which cannot be written
    to, stands for all of the same shape.

    Args:
        computes: whether others are computed with it.
        copies: whether a buffer keeps its values, from which others may be computed.
    """
    if tensor is None:
        return None
    is_parameter = isinstance(tensor, nn.Parameter)
    key = (is_parameter, tensor.shape, tensor.dtype)
    if computes:
        new = torch.zeros(tensor.shape, dtype=tensor.dtype)
    elif copies and not (is_parameter or tensor.is_meta or isinstance(tensor, DTensor)):
        new = tensor.detach().cpu().clone()
    elif key in on_meta:
        return on_meta[key]
    else:
        new = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    new = nn.Parameter(new, requires_grad=False) if is_parameter else new
    setattr(new, _INITIALIZED, True)
    return on_meta.setdefault(key, new) if new.is_meta else new


def _local_shard(name: str, tensor: Tensor, full: Tensor, fsdp_axis: int | None) -> Tensor:
    """Returns the part of a full tensor that the local tensor of ``tensor`` holds."""
    if not isinstance(tensor, DTensor):
        return full
    layout, coordinate = dtensor.layout_of(name, tensor, fsdp_axis)
    shard = torch.empty(tensor.to_local().shape, dtype=full.dtype)
    for region in owned_regions(layout, coordinate):
        shard[box_slices(region.local_start, region.size)] = full[box_slices(region.start, region.size)]
    return shard


@contextmanager
def preserve_generators() -> Iterator[None]:
    """Restores the CPU's random-number generators on exit. Those of devices are not used."""
    numpy = sys.modules.get("numpy")
    python_state, numpy_state = random.getstate(), numpy and numpy.random.get_state()
    try:
        with torch.random.fork_rng(devices=()):
            yield
    finally:
        random.setstate(python_state)
        if numpy:
            numpy.random.set_state(numpy_state)
