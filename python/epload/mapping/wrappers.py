"""Models inside wrappers: torch.compile, DistributedDataParallel, PEFT.

Checkpoints lack the part of a parameter's name that a wrapper adds, so aliases remove it before names are compared. PEFT also has
files of its own, whose keys lack the adapter's name, and its modules hold what no checkpoint of the base model has.
"""

from __future__ import annotations

import json
import re
import sys
import warnings
from collections.abc import Collection, Iterable, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from epload.errors import ModelMismatch
from epload.mapping.mapping import Rename, apply_renames
from epload.model.initialization import is_adapter
from epload.model.modules import Modules
from epload.model.state_dict import tensor_entries
from epload.observe.render import list_first

_PREFIX = "base_model."
BASE_LAYER = Rename(r"\.(?:base_layer\.)+(?!lora_)", ".")
"""An adapter moves the layer that it wraps one module deeper; several parameters of a layer, each with an adapter, several."""
TOKEN_LAYER = Rename(r"\.token_adapter\.base_layer\.", ".")
"""An adapter of single tokens moves the embedding two modules deeper."""
PEFT_ALIASES = (Rename(r"^base_model\.model\.", ""), TOKEN_LAYER, BASE_LAYER)
"""PEFT moves the whole model two modules deeper."""
TRAINED_COPY = Rename(r"\.modules_to_save\.[^.]+\.", ".")
"""PEFT trains a copy of each module in ``modules_to_save``, one for each adapter."""
_ORIGINAL = "original_module"
NamePairs = tuple[tuple[str, str], ...]
_IN_PLACE = tuple(f"peft.tuners.{name}." for name in ("lora", "adalora", "loha", "lokr", "hira", "ln_tuning"))
"""Packages of PEFT's tuners whose ``merge_adapter()`` changes base weights in place (PEFT 0.21)."""
_DATA_PARALLEL = (DistributedDataParallel, nn.DataParallel)
_SCALES = ("peft_type", "r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "use_dora", "fan_in_fan_out")
"""Fields of an adapter's configuration on which it depends what is computed with its tensors."""
_OTHER_SCALES = (
    "alpha", "scaling", "random_loc_seed", "randlora_alpha", "apply_GS", "use_cayley_neumann", "num_cayley_neumann_terms",
    "group_size", "projection_prng_key", "alora_invocation_tokens", "trainable_token_indices", "token_indices", "coft",
    "act_fn", "wavelet_family", "use_idwt", "psoft_alpha", "shadow_alpha", "projection_seed", "proj_seed",
)  # fmt: skip
"""Fields that files of older versions, or those of other methods, may lack."""
_SEEDS = {"projection_prng_key": "save_projection", "projection_seed": "save_projection", "proj_seed": "save_indices"}
"""Fields from which follows what files may have, with the field that is true if they do."""


def unwrap(model: nn.Module, names: Collection[str]) -> tuple[nn.Module, tuple[Rename, ...], NamePairs]:
    """Returns the model inside all wrappers, the renames from the wrapped model's names to its own, and the tensors of it of
    which a wrapper has made copies, each with its copy, by their names without wrappers.

    ``names``: of the wrapped model's tensors.
    """
    inner: Any = model
    aliases, adapted = [*wrapper_aliases(model, names)], False
    while (is_peft := is_from_package(inner, "peft")) or hasattr(inner, "_orig_mod") or isinstance(inner, _DATA_PARALLEL):
        if not is_peft:
            inner = inner.module if isinstance(inner, _DATA_PARALLEL) else inner._orig_mod
            continue
        (depth, inner), adapted = _base_model(inner), True
        aliases += [Rename(f"^{re.escape(depth)}", ""), *PEFT_ALIASES[1:]]
    text = "\n".join(names)  # searched at once
    for path, module in inner.named_modules() if "base_model." in text else ():
        if _is_peft_model(module):
            prefix = strip_wrappers(f"{path}.", aliases)
            aliases.append(Rename(f"^{re.escape(prefix + _base_model(module)[0])}", prefix))
    if not adapted and (".base_layer." in text or ".modules_to_save." in text):
        # Added by transformers, or a PEFT model without its outer modules.
        adapted = any(is_adapter(module) or is_from_package(module, "peft") for module in inner.modules())
        aliases += [TOKEN_LAYER, BASE_LAYER] if adapted else []
    ties: list[tuple[str, str]] = []
    if adapted:
        original_module = Rename(r"\.original_module\.", ".")
        originals = set(original_module.apply([name for name in names if ".original_module." in name]))
        copies = [name for name in names if ".modules_to_save." in name]
        # A copy starts from the weights of the original.
        pairs = [pair for pair in zip(TRAINED_COPY.apply(copies), copies, strict=True) if pair[0] in originals]
        ties = [(strip_wrappers(a, aliases), strip_wrappers(b, aliases)) for a, b in pairs]
        aliases.append(original_module)
    return inner, tuple(aliases), tuple(ties)


def _is_peft_model(module: nn.Module) -> bool:
    """Returns True for what ``get_peft_model`` returns."""
    classes = (cls for cls in type(module).__mro__ if cls.__module__.startswith("peft."))
    return any(cls.__name__ in ("PeftModel", "PeftMixedModel") for cls in classes)


def _base_model(wrapper: Any) -> tuple[str, nn.Module]:
    """Returns the prefix of the names in the model inside a PEFT model, and the model. Prompt tuning changes no layer, and moves
    it one module deeper; others two."""
    inner = wrapper.base_model
    if is_from_package(inner, "peft"):
        return f"{_PREFIX}model.", inner.model
    return _PREFIX, inner


def wrapper_aliases(model: nn.Module, names: Collection[str]) -> tuple[Rename, ...]:
    """Returns aliases for torch.compile and data parallelism, around the model or around modules of it."""
    aliases = [*_compile_aliases(names)]
    for path, module in model.named_modules() if "module." in "\n".join(names) else ():
        if isinstance(module, _DATA_PARALLEL):
            prefix = strip_wrappers(f"{path}." if path else "", aliases)
            aliases.append(Rename(f"^{re.escape(prefix)}module\\.", prefix))
    return tuple(aliases)


def _compile_aliases(names: Collection[str]) -> tuple[Rename, ...]:
    # A rename removes one occurrence, and compiled modules may be nested.
    depth = max(name.count("_orig_mod.") for name in names) if "_orig_mod." in "\n".join(names) else 0
    return (Rename(r"(^|\.)_orig_mod\.", r"\1"),) * depth


def strip_wrappers(name: str, aliases: Iterable[Rename]) -> str:
    """Returns one name without its wrappers."""
    return apply_renames(aliases, [name])[0]


def is_from_package(model: object, package: str) -> bool:
    """Returns True if the class of ``model``, or one of its bases, is defined in ``package``."""
    return any(cls.__module__.split(".")[0] == package for cls in type(model).__mro__)


# ---- the file of an adapter ----


def is_adapter_file(model: nn.Module, checkpoint: Collection[str]) -> bool:
    """Returns True if the names of a checkpoint's tensors may be those in the file of an adapter, and the model has adapters."""
    of_peft = bool(checkpoint) and all(name.startswith(_PREFIX) for name in checkpoint)
    return of_peft and _find_peft_model(model)[1] is not None


def adapter_pairs(model: nn.Module, names: Collection[str], checkpoint: Sequence[str]) -> NamePairs:
    """Returns each key of an adapter file with its model name, of which the last key counts; nothing if the checkpoint is not
    one, or the model has no adapter.

    The tensors are those of the active adapter. PEFT says under which key each is saved. Raises ModelMismatch if several adapters
    are active, or base weights are still on meta."""
    if not is_adapter_file(model, checkpoint):
        return ()
    prefix, adapted = _find_peft_model(model)
    inner = {name[len(prefix) :]: name for name in names if name.startswith(prefix)}
    active, aliases = _active(adapted), _compile_aliases(inner)
    saved: dict[str, str] = {}
    """Name inside the PEFT model of each key of an adapter file."""
    for adapter in active:
        saved |= {key: name for key, name in _saved_keys(adapted, inner, adapter).items() if name}
    keys = dict(zip(checkpoint, apply_renames(aliases, checkpoint), strict=True))
    # The file of a whole PEFT model has the model's own names, which include the adapter's.
    if not any(key in saved and key not in inner for key in keys.values()):
        return ()
    if len(active) > 1:
        raise ModelMismatch(
            f"the checkpoint is a file of one adapter, but {len(active)} adapters of the model are active "
            f"({', '.join(active)}); select one with model.set_adapter(name)"
        )
    pairs = [(name, inner[target]) for name, key in keys.items() if (target := saved.pop(key, key)) in inner]
    # Tensors that the file lacks: no checkpoint key is empty, so they are reported as missing.
    pairs = [("", inner[target]) for target in saved.values()] + pairs
    filled = {target for _, target in pairs}
    if on_meta := [name for name, tensor in tensor_entries(model) if tensor.is_meta and name not in filled]:
        raise ModelMismatch(
            f"the checkpoint is an adapter file without base weights, but {len(on_meta)} base weights of the model are on meta "
            f"({list_first(on_meta, 3)}); load the base checkpoint first, then the adapter"
        )
    return tuple(pairs)


class AdapterFile(NamedTuple):
    """The file of a model's active adapter, as PEFT would save it."""

    config: dict[str, Any]
    """Content of ``adapter_config.json``."""
    names: dict[str, str]
    """Names of the model's tensors, by key."""


def adapter_file(model: nn.Module, names: Collection[str]) -> AdapterFile:
    """Returns the file of the active adapter.

    Raises ModelMismatch: there is no PEFT model with one active adapter, an adapter is merged into the base weights, or PEFT
    computes what it saves."""
    prefix, adapted = _find_peft_model(model)
    if adapted is None:
        raise ModelMismatch(
            f"expected a PeftModel to send an adapter of, got a {type(model).__name__} that has none; get_peft_model() makes one"
        )
    active = _active(adapted)
    if len(active) != 1:
        raise ModelMismatch(
            f"expected one active adapter, got {len(active)} ({', '.join(active)}); select one with model.set_adapter(name)"
        )
    if _is_prompt_tuned(adapted):
        raise ModelMismatch(f"adapter {active[0]} is a prompt that is trained, whose saved tensors PEFT computes")
    check_unmerged(model)
    inner = {name[len(prefix) :]: name for name in names if name.startswith(prefix)}
    keys = _saved_keys(adapted, inner, active[0], embeddings="auto")
    if computed := [key for key, name in keys.items() if not name]:
        raise ModelMismatch(f"PEFT computes {computed[0]} when it saves adapter {active[0]}: no tensor of the model has it")
    fields = adapted.peft_config[active[0]].to_dict()
    config = json.loads(json.dumps(fields, default=sorted))  # which PEFT has as sets, too
    return AdapterFile(config, {key: inner[name] for key, name in keys.items()})


def active_adapter(model: nn.Module) -> str:
    """Returns the names of the active adapters; empty if the model has none."""
    return ", ".join(_active(_find_peft_model(model)[1]))


def check_unmerged(model: nn.Module) -> None:
    """Raises ModelMismatch if an adapter is merged into the base weights."""
    for prefix, module in Modules(model).named:
        if is_adapter(module) and (merged := list(getattr(module, "merged_adapters", ()))):
            raise ModelMismatch(
                f"the base weights of {prefix[:-1]} have an adapter merged into them ({', '.join(merged)}), and merged weights "
                "do not mix with those of adapters apart; call unmerge_adapter() first"
            )


def check_same_scale(model: nn.Module, config: dict[str, Any], whose: str, own_whose: str) -> None:
    """Raises ModelMismatch if the model's active adapter would compute something else with the tensors of another of this
    configuration. ``whose``, ``own_whose``: whose the other and its own are, for the message."""
    _, adapted = _find_peft_model(model)
    own = adapted.peft_config[_active(adapted)[0]] if adapted is not None else None
    fields = [*_SCALES, *(field for field in _OTHER_SCALES if field in config and hasattr(own, field))]
    fields = [field for field in fields if field not in _SEEDS or not config.get(_SEEDS[field], True)]
    for field in fields if own is not None else ():
        value = json.loads(json.dumps(getattr(own, field, None), default=str))  # as the file has it
        if value != (other := config.get(field)) and (value or other):
            raise ModelMismatch(
                f"{whose} adapter has {field}={other!r} and {own_whose} {value!r}, so that it would compute something "
                "else with the same tensors; make both from one configuration"
            )


def _find_peft_model(model: nn.Module) -> tuple[str, Any]:
    """Returns the prefix of the outermost PEFT model's names and the PEFT model; None if there is none. Raises ModelMismatch if
    there are two side by side."""
    is_peft = (pair for pair in Modules(model).named if is_from_package(pair[1], "peft"))
    found: list[tuple[str, Any]] = [pair for pair in is_peft if hasattr(pair[1], "peft_config")] or [("", None)]
    prefix = found[0][0]
    if other := next((path for path, _ in found if not path.startswith(prefix)), ""):
        raise ModelMismatch(
            f"the model has several PEFT models, {prefix[:-1]} and {other[:-1]}, and it is not known whose adapter is meant; "
            "pass the one that has it"
        )
    return found[0]


def _active(module: Any) -> list[str]:
    active = getattr(module, "active_adapters", None) or getattr(module, "active_adapter", [])
    return [active] if isinstance(active, str) else list(active)


def _saved_keys(adapted: Any, names: Collection[str], adapter: str, embeddings: bool | Literal["auto"] = False) -> dict[str, str]:
    """Returns the model's names of the tensors that PEFT saves for an adapter, by their keys in the file; empty names for tensors
    that it computes.

    ``embeddings``: PEFT's ``save_embedding_layers``. With "auto", embeddings are saved if the adapter has matrices for them, but
    not because the vocabulary has another size than that of the base model, for which PEFT may ask the hub."""
    from peft import get_peft_model_state_dict

    config = adapted.peft_config[adapter]
    if config.is_prompt_learning:  # saved tensors are computed, and not in the model
        return {}
    # PEFT renames the state dict that it is given; placeholders show which key each name becomes.
    # Of a model that transformers has divided, it returns copies without gradients, which have the same memory.
    placeholders = {name: torch.empty(1, device="cpu") for name in names}
    base, config.base_model_name_or_path = config.base_model_name_or_path, None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            saved = get_peft_model_state_dict(
                adapted, state_dict=placeholders, adapter_name=adapter, save_embedding_layers=embeddings
            )
    finally:
        config.base_model_name_or_path = base
    name_of, aliases = {tensor.data_ptr(): name for name, tensor in placeholders.items()}, _compile_aliases(names)
    return {strip_wrappers(key, aliases): name_of.get(tensor.data_ptr(), "") for key, tensor in saved.items()}


# ---- a checkpoint of an adapted model ----


def names_added_by_adapters(model: nn.Module, names: Collection[str], computes: bool = True) -> frozenset[str]:
    """Returns which of a model's tensors a checkpoint of it lacks: those of adapters, and of modules in ``modules_to_save`` all
    but what the model computes with, which is the copy of the active adapter.

    ``computes``: False for base weights that adapters have not changed, whatever is active: all copies are then added.

    Raises ModelMismatch, if ``computes``: an active adapter is not merged, so that the base weights are not what the model
    computes with."""
    tuners = sys.modules.get("peft.tuners.tuners_utils")
    base_part: dict[str, str] = {}
    """Prefix of the tensors that a checkpoint has, by the prefix of the module that adds others."""
    for prefix, module in Modules(model).named:
        path = prefix[:-1]
        if is_adapter(module):
            if computes:
                _check_merged(path, module)
            base_part[prefix] = f"{prefix}base_layer."
        elif not is_from_package(module, "peft"):
            if computes and (part := _own_lora(module)):
                raise ModelMismatch(
                    f"{path or 'the model'} applies an adapter, {part}, next to its base weights, which are not what the model "
                    "computes with, and epload cannot merge it; pass a model in which it is merged, or save model.state_dict(), "
                    "which has both as they are"
                )
        elif computes and _is_prompt_tuned(module):
            raise ModelMismatch(
                f"{path or 'the model'} has a prompt that is trained, which its base weights lack; save it with "
                "save_pretrained(), and pass get_base_model() for the base weights"
            )
        elif isinstance(getattr(module, "modules_to_save", None), nn.ModuleDict):
            base_part[prefix] = f"{prefix}{_active_copy(path, module) if computes else _ORIGINAL}."
        elif tuners is not None and isinstance(module, tuners.BaseTuner):  # may have tensors that its layers share
            base_part[prefix] = f"{prefix}model."

    def is_added(name: str) -> bool:
        prefixes = (name[: match.end()] for match in re.finditer(r"^|\.", name))
        return any(prefix in base_part and not name.startswith(base_part[prefix]) for prefix in prefixes)

    return frozenset(filter(is_added, names)) if base_part else frozenset()


def _is_prompt_tuned(module: Any) -> bool:
    configs = [getattr(module, "peft_config", {}).get(adapter) for adapter in _active(module)]
    return any(config and (config.is_prompt_learning or getattr(config, "is_adaption_prompt", False)) for config in configs)


def _own_lora(module: nn.Module) -> str:
    """Returns the name of the first matrix of LoRA that a layer of NeMo Automodel, torchtune or torchtitan applies next to base
    weights of its own; empty if there is none. Layers of loralib may be merged, those of torchtune disabled."""
    has_base = not all(name.startswith("lora_") for name in module._parameters)
    is_applied = has_base and not any(vars(module).get(flag) for flag in ("merged", "disabled"))
    names = (*module._parameters, *module._modules) if is_applied else ()
    return next((name for name in names if re.fullmatch(r"lora_(\w+_)?[Aa]", name)), "")


def _check_merged(path: str, layer: Any) -> None:
    """Raises ModelMismatch unless a layer computes with its base weights as they are."""
    merged = list(getattr(layer, "merged_adapters", ()))
    is_sharded = any(isinstance(parameter, DTensor) for parameter in layer.parameters())
    if merged and is_sharded and not _merges_in_place(layer, merged):
        raise ModelMismatch(
            f"{path} has adapters merged into DTensors ({', '.join(sorted(merged))}): PEFT merges them with weight.data = ..., "
            "which does not change a DTensor, so that the base weights may be those from before; call merge_and_unload() before "
            "the model is sharded"
        )
    if merged and getattr(layer, "disable_adapters", False):
        raise ModelMismatch(
            f"the adapters of {path} are merged into its base weights and disabled at once ({', '.join(sorted(merged))}); call "
            "unmerge_adapter() or enable them"
        )
    if unmerged := _unmerged(layer):
        raise ModelMismatch(
            f"{path} has an active adapter that is not merged ({', '.join(unmerged)}), so that its base weights are not what the "
            "model computes with; call merge_adapter() before and unmerge_adapter() after, or disable the adapters to get the "
            "base model; save_pretrained() saves the adapter itself"
        )


def _merges_in_place(layer: Any, adapters: Iterable[str]) -> bool:
    """Returns True if PEFT's ``merge_adapter()`` changes the base weights of a layer in place, as long as it is not called with
    ``safe_merge=True``."""
    variants = getattr(layer, "lora_variant", {})
    package = next((cls.__module__ for cls in type(layer).__mro__ if cls.__module__.startswith("peft.tuners.")), "")
    return package.startswith(_IN_PLACE) and not any(adapter in variants for adapter in adapters)


def _unmerged(layer: Any) -> list[str]:
    """Returns the adapters that a layer applies next to its base weights."""
    parts = [getattr(layer, name, None) for name in getattr(layer, "adapter_layer_names", ("lora_A",))]
    own = {name for part in parts if isinstance(part, nn.ModuleDict | nn.ParameterDict) for name in part}
    if getattr(layer, "disable_adapters", False):
        return []
    return [name for name in _active(layer) if name in own - set(getattr(layer, "merged_adapters", ()))]


def _active_copy(path: str, wrapper: Any) -> str:
    """Returns where in a wrapper the module is that it computes with."""
    copies = [name for name in _active(wrapper) if name in wrapper.modules_to_save]
    if wrapper.disable_adapters or not copies:
        return _ORIGINAL
    if len(copies) > 1:
        raise ModelMismatch(f"{path} has several active copies ({', '.join(copies)}); select one with set_adapter(name)")
    return f"modules_to_save.{copies[0]}"


def adapters_in_base(model: nn.Module) -> tuple[str, str]:
    """Returns the path of a module whose base weights have an adapter merged into them, or that computes with a trained copy, and
    that of a module that applies an adapter next to its base weights; empty if there is none."""
    merged = applied = ""
    for prefix, module in Modules(model).named:
        path = prefix[:-1]
        if is_adapter(module):
            merged = merged or (path if getattr(module, "merged_adapters", ()) else "")
            applied = applied or (path if _unmerged(module) else "")
        elif isinstance(getattr(module, "modules_to_save", None), nn.ModuleDict) and is_from_package(module, "peft"):
            copied = path if _active_copy(path, module) != _ORIGINAL else ""
            merged, applied = merged or copied, applied or copied
    return merged, applied
