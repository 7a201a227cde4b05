"""Plans a load for ranks that do not run: a model on meta, parallelized as one rank of a job would be, in one process."""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from epload.checkpoint import hub
from epload.checkpoint.finding import read_config
from epload.checkpoint.manifest import Manifest
from epload.core.attempt import Attempt
from epload.core.placement import owned_shape
from epload.errors import CheckpointError, ModelMismatch
from epload.loading.hints import check_match, unfilled_error
from epload.mapping.mapping import AnyMapping, Mapping, ignored_keys
from epload.mapping.precision import left_in_fp32, set_dtypes
from epload.mapping.resolve import resolve_mapping, with_quantization_of
from epload.model.initialization import compute_missing, diffusers_class
from epload.model.modules import Modules
from epload.model.targets import Targets, collect
from epload.planning.choose import choose_readers
from epload.planning.plan import LoadPlan, make_plan
from epload.planning.schedule import READERS, WAVE_BYTES, buckets_per_wave, wave_limit
from epload.planning.traffic import traffic
from epload.planning.waves import wave_bytes

_EAGER = {"attn_implementation": "eager"}
"""Options of models whose configuration may name a kernel, which would be downloaded."""
_MAX_RANKS = 8
"""Largest number of ranks that are planned. They are spread evenly; others are taken to keep as much as the one before them."""
AXES = ("replicate", "fsdp", "tp")
"""The axes of a mesh over which a model is parallelized here; a factory that takes the mesh may use others."""
Sizes = dict[str, int]
Factory = Callable[[DeviceMesh], nn.Module]


def plan_job(
    manifest: Manifest,
    factory: Factory,
    sizes: Sizes,
    nodes: Sequence[range],
    rules: AnyMapping = "auto",
    resets: bool = False,
) -> dict[str, Any]:
    """Plans a load by all ranks of a job into the model that a factory makes. Returns what is printed as JSON.

    Args:
        nodes: the ranks of each.
        rules: the mapping.
        resets: whether the load has ``init_missing="reset_parameters"``.

    Raises:
        ModelMismatch: the checkpoint does not fit the model, by other than missing, unexpected or mismatched keys.
    """
    last = nodes[-1][-1]
    ranks = sorted({i * last // (_MAX_RANKS - 1) for i in range(_MAX_RANKS)})
    with first_rank(sizes) as mesh:
        model = factory(mesh)
        targets = collect(model, own_names=isinstance(rules, Mapping))
        dtypes = Attempt(lambda: set_dtypes(model, Modules(model), targets, None))
        mapping = resolve_mapping(rules, model, targets.index, manifest.names)
        targets.check_filled(rules, mapping.only)
        manifest = with_quantization_of(model, manifest)
        unfilled, mixed = _unfilled(model, targets, resets), str(dtypes.failure or "")
        targets_of = {rank: as_seen_by(targets, sizes, rank) for rank in ranks}
    wave = wave_limit(manifest.nbytes, WAVE_BYTES)
    per_wave = {readers: buckets_per_wave(nodes, readers, wave) for readers in READERS}
    plans = {rank: make_plan(manifest, targets_of[rank], mapping, wave // per_wave["every"]) for rank in ranks}
    objects, payload = manifest.in_object_storage, plans[0].payload
    read_by = {rank: plan.spanned if objects else plan.owned for rank, plan in plans.items()}
    by_node = [[read_by[max(rank for rank in ranks if rank <= member)] for member in node] for node in nodes]
    read = {"per_node": len(nodes) * payload, "every": sum(map(sum, by_node))}
    modes = []
    for readers in READERS:
        of_mode = make_plan(manifest, targets, mapping, wave // per_wave[readers])
        received, sent = traffic(of_mode.sizes, per_wave[readers], nodes, readers)
        modes.append(
            {
                "readers": readers,
                "buckets": len(of_mode.buckets),
                "bucket_bytes": of_mode.largest,
                "staging": 0 if readers == "every" else 2 * wave_bytes(of_mode.sizes, per_wave[readers]),  # of a node
                "read": read.get(readers, payload),  # by all ranks together
                "received": received,  # by each node from other nodes
                "sent": sent,
            }
        )
    all_read = manifest.locations is not None or last == 0
    choice, reason = choose_readers(payload, by_node, all_read=all_read, objects=objects, src=0)
    fit = _fit(manifest, plans[0], mapping)
    return {
        "fit": fit | {"initialized": sorted(targets.unsaved_meta), "error": fit["error"] or unfilled or mixed},
        "nbytes": payload,
        "tensors": plans[0].tensor_count,
        "owned": {rank: _local_bytes(of_rank) for rank, of_rank in targets_of.items()},
        "modes": modes,
        "choice": choice,  # the readers of "auto", if every rank sees the checkpoint
        "reason": reason,
    }


def _local_bytes(targets: Targets) -> int:
    """Returns the bytes of a rank's shards in the dtypes that they have after the load."""
    shards = [owned_shape(*of_layout) for of_layout in zip(targets.layouts, targets.coordinates, strict=True)]
    return sum(prod(shards[layout]) * dtype.itemsize for layout, dtype in zip(targets.layout, targets.dtypes, strict=True))


def _unfilled(model: nn.Module, targets: Targets, resets: bool) -> str:
    """Returns the error that a load would raise for tensors on meta that are in no checkpoint and that neither the model nor,
    with ``resets``, its modules can compute; empty if there are none."""
    unsaved = targets.unsaved_meta
    dtypes = {name: tensor.dtype for name, tensor in unsaved.items()}
    try:
        computed, _ = compute_missing(model, unsaved, dtypes, 0, resets=unsaved if resets else ())
    except ModelMismatch as mismatch:
        return str(mismatch)
    unfilled = sorted(targets.unsaved_meta.keys() - computed.keys())
    return str(unfilled_error(unfilled, resets)) if unfilled else ""


def _fit(manifest: Manifest, plan: LoadPlan, mapping: Mapping) -> dict[str, Any]:
    """Describes how the keys of the checkpoint and the model fit, and the error that a load with ``strict=True`` would raise."""
    ignored, error = set(ignored_keys(mapping, manifest.names, plan.missing, plan.unexpected)), ""
    try:
        check_match(manifest, plan, mapping, strict=True, ignore_mismatched_shapes=False)
    except ModelMismatch as mismatch:
        error = str(mismatch)
    return {
        "matched": plan.tensor_count,
        "missing": [name for name in plan.missing if name not in ignored],
        "unexpected": [name for name in plan.unexpected if name not in ignored],
        "mismatched": plan.mismatched,
        "error": error,
    }


def parse_mesh(text: str) -> Sizes:
    """Returns the sizes of ``"fsdp=8,tp=2"`` by name, in this order. Raises ValueError."""
    try:
        pairs = [part.split("=") for part in text.replace(" ", "").split(",")]
        sizes = {name: int(size) for name, size in pairs}
    except ValueError:
        sizes = {}
    if len(sizes) < text.count("=") or min(sizes.values(), default=0) < 1:
        raise ValueError(f"expected a mesh such as fsdp=8,tp=2, got {text!r}")
    return sizes


@contextmanager
def first_rank(sizes: Sizes) -> Iterator[DeviceMesh]:
    """Yields the mesh of a job, as its first rank sees it, without the others: collectives do nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=prod(sizes.values()), store=FakeStore())
    try:
        yield init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    finally:
        dist.destroy_process_group()


def as_seen_by(targets: Targets, sizes: Sizes, rank: int) -> Targets:
    """Returns the first rank's targets, as another rank would have them: at its coordinates of the same meshes.

    Raises ValueError if a tensor is on a mesh with other axes.
    """
    index = {}
    for name, size in reversed(sizes.items()):
        rank, index[name] = divmod(rank, size)
    coordinates = list(targets.coordinates)
    for tensor, layout in zip(targets.tensors, targets.layout, strict=True):
        if isinstance(tensor, DTensor):
            axes = tensor.device_mesh.mesh_dim_names or ()
            if not axes or any(axis not in index for axis in axes):
                raise ValueError(f"expected models on axes of the mesh {', '.join(sizes)}, got a tensor on {axes}")
            coordinates[layout] = tuple(index[axis] for axis in axes)
    return replace(targets, coordinates=coordinates)


def _find(name: str, option: str) -> Any:
    """Returns what ``package.module:name`` names, for an option. Raises ImportError."""
    module, _, attribute = name.partition(":")
    sys.path.insert(0, str(Path.cwd()))
    try:
        return getattr(importlib.import_module(module), attribute)
    except AttributeError:
        raise ImportError(f"{module} has no {attribute!r}, which {option} {name} names") from None
    finally:
        sys.path.pop(0)


def find_mapping(name: str | None) -> Mapping | str:
    """Returns the mapping that ``package.module:name`` names; ``"auto"`` without a name. Raises ImportError, ValueError."""
    if name is None:
        return "auto"
    mapping = _find(name, "--mapping") if ":" in name else None
    if not isinstance(mapping, Mapping):
        raise ValueError(f"expected --mapping to be package.module:name of an epload.Mapping, got {name}")
    return mapping


def find_factory(model: str) -> Factory:
    """Returns a function that makes the model on the meta device, for the mesh of a rank.

    Args:
        model: a folder with a config.json, of transformers or diffusers, or a model of transformers on the Hugging Face Hub; or
            ``package.module:name``, a function or class. It is called with the mesh if it takes an argument, and parallelizes the
            model itself; else the result is sharded over the axes of AXES.

    Raises ImportError or ValueError if there is no such function or configuration.
    """
    expected = "expected --model to be a folder with a config.json, a Hub id or package.module:function"
    if ":" not in model or "//" in model or Path(model).exists():
        model = str(Path(model).expanduser()) if model.startswith("~") else model
        if on_hub := hub.parse(model):
            return lambda mesh: _parallelize(_model_of(*on_hub), mesh)
        if Path(model).exists() and not (Path(model) / "config.json").is_file():
            raise ValueError(f"{expected}, but {model} has no config.json")
        if not Path(model).exists():
            raise ValueError(f"{expected}, but there is no folder {model}")
        return lambda mesh: _parallelize(_model_of(model), mesh)
    make = _find(model, "--model")
    if not callable(make):
        raise ValueError(f"{expected}, but {model} is a {type(make).__name__}, which cannot be called")

    def factory(mesh: DeviceMesh) -> nn.Module:
        with torch.device("meta"):
            positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
            parameters = inspect.signature(make).parameters.values()
            takes_mesh = any(p.default is p.empty and p.kind in positional for p in parameters)
            made = make(mesh) if takes_mesh else make()
        if not isinstance(made, nn.Module):
            raise ValueError(f"expected {model}() to return a module, got a {type(made).__name__}")
        if takes_mesh:
            return made
        if any(isinstance(module, FSDPModule) for module in made.modules()):
            raise ValueError(
                f"expected {model}() to return a model that is not sharded yet: --mesh shards it; or let it take the mesh "
                "as an argument, and shard the model over it"
            )
        with torch.device("meta"):
            return _parallelize(made, mesh)

    return factory


def _model_of(model: str, revision: str = "") -> Any:
    try:
        return _from_config(model, revision)
    except (ImportError, OSError, CheckpointError):
        raise
    except Exception as error:
        raise ValueError(
            f"the config.json of {model} names no model that can be built: {type(error).__name__}: {str(error)[:300]}"
        ) from error


def _from_config(model: str, revision: str) -> Any:
    local = read_config(model) if Path(model).exists() else {}
    if (kind := diffusers_class(local)) is not None:
        import accelerate  # type: ignore[import-untyped]

        with accelerate.init_empty_weights():  # which leaves buffers their values
            return kind.from_config(local)
    import transformers

    if "auto_map" in local and local.get("model_type") not in transformers.CONFIG_MAPPING:
        raise ValueError(f"{model} has code of its own, which is not run; pass --model package.module:function")
    config = transformers.AutoConfig.from_pretrained(model, revision=revision or None, trust_remote_code=False)
    names = [name for name in config.architectures or () if hasattr(transformers, name)]
    with torch.device("meta"):
        if names:
            return getattr(transformers, names[0])._from_config(config, **_EAGER)
        return transformers.AutoModelForCausalLM.from_config(config, **_EAGER)  # type: ignore[no-untyped-call]


def _parallelize(model: Any, mesh: DeviceMesh) -> nn.Module:
    """Applies tensor parallelism by the model's own plan, then FSDP2 to every layer and to the whole."""
    axes = mesh.mesh_dim_names or ()
    if others := [axis for axis in axes if axis not in AXES]:
        raise ValueError(
            f"expected mesh axes among {', '.join(AXES)}, got {', '.join(others)}: for others pass --model "
            "package.module:function, a function that takes the mesh and returns the parallelized model"
        )
    if {"fsdp", "replicate"} <= {*axes} and axes.index("replicate") > axes.index("fsdp"):
        raise ValueError(
            "expected replicate before fsdp: FSDP2 replicates over the first axis of a mesh, and shards over the next"
        )
    if "tp" in axes and mesh["tp"].size() > 1:
        _apply_tensor_parallelism(model, mesh["tp"])
    if "fsdp" in axes:
        sharded, names = mesh[tuple(axis for axis in axes if axis != "tp")], [n for n, _ in model.named_parameters()]
        kept = left_in_fp32(model, names, model.get_parameter(names[0]).dtype) if names else ()  # a group of FSDP2 has one dtype
        paths = sorted({name.rpartition(".")[0] for name in kept} - {""}, key=len, reverse=True)  # inner modules first
        for module in dict.fromkeys((*map(model.get_submodule, paths), *_layers(model), model)):
            fully_shard(module, mesh=sharded)
    return model  # type: ignore[no-any-return]


def _apply_tensor_parallelism(model: Any, mesh: DeviceMesh) -> None:
    plan: dict[str, str] = getattr(model, "tp_plan", None) or {}
    if not plan:
        raise ValueError(
            f"{type(model).__name__} declares no plan for tensor parallelism (tp_plan): pass --model package.module:function, a "
            "function that takes the mesh and returns the parallelized model"
        )
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    styles: dict[str, str] = {}
    for pattern, style in plan.items():
        expression = re.escape(pattern).replace(r"\*", r"\d+") + r"(\.[^.]+)?"
        for name, _ in model.named_parameters():
            if re.fullmatch(expression, name):
                styles.setdefault(name, style)
    apply_tensor_parallelism(model, mesh, styles)


def _layers(model: nn.Module) -> Iterator[nn.Module]:
    """Yields the items of every module list that is in no other."""
    for child in model.children():
        if isinstance(child, nn.ModuleList):
            yield from child
        else:
            yield from _layers(child)
