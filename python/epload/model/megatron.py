"""Megatron-Core's models: one rank has a module, or several for interleaved pipeline stages, perhaps inside wrappers."""

from __future__ import annotations

from collections.abc import Sequence
from types import CellType
from typing import Any

from torch import nn

from epload.errors import ModelMismatch

Model = nn.Module | Sequence[nn.Module]
"""The models that callers may pass: a module, or the list of Megatron-Core modules that one rank of a trainer has."""


class MegatronChunks(nn.ModuleList):
    """The modules of Megatron-Core that one rank has, without their wrappers: one for each of its pipeline stages."""

    def __init__(self, chunks: Sequence[nn.Module], wrappers: Sequence[Any] = ()) -> None:
        """Puts the biases of routers back into float32, as Megatron does before it loads or saves: a wrapper casts them.

        Args:
            wrappers: the modules around them.
        """
        super().__init__(chunks)
        self._wrappers = wrappers
        for module in self.modules():
            if callable(restore := getattr(module, "_maintain_float32_expert_bias", None)):
                restore()

    @property
    def config(self) -> Any:
        """Megatron's ``TransformerConfig``, the same for all modules."""
        return self[0].config

    @property
    def ties_embeddings(self) -> bool:
        """True if the head of the model is its embedding."""
        return any(chunk.share_embeddings_and_output_weights for chunk in self)

    def check_gathered(self, filled: bool) -> None:
        """Checks that no all-gather of the parameters is outstanding, or, if ``filled``, running.

        With ``overlap_param_gather``, a step of Megatron's distributed optimizer leaves each data-parallel rank with new values
        in its own part of the parameters only, and the next forward pass gathers the others.

        Raises ModelMismatch if one is.
        """
        # The hooks through which the wrapper waits before a forward pass know it where callers pass what is inside.
        hooks = [hook for chunk in self for hook in chunk._forward_pre_hooks.values()]
        owners = [cell.cell_contents for hook in hooks for cell in getattr(hook, "__closure__", None) or () if cell != CellType()]
        for wrapper in (*self._wrappers, *(owner for owner in owners if hasattr(owner, "bucket_groups"))):
            if not getattr(getattr(wrapper, "ddp_config", None), "overlap_param_gather", False):
                continue
            for group in (*wrapper.bucket_groups, *wrapper.expert_parallel_bucket_groups):
                is_whole = getattr(group, "intra_distributed_optimizer_instance_size", None) == 1
                is_gathered = group.param_gather_dispatched or filled
                if not is_whole and not (is_gathered and group.param_gather_handle is None):
                    raise ModelMismatch(
                        "Megatron has not gathered the parameters since the last optimizer step (overlap_param_gather): each "
                        "data-parallel rank has new values in its own part only. Call start_param_sync(force_sync=True) on each "
                        f"{type(wrapper).__name__} of all ranks first"
                    )

    def tied_names(self) -> dict[str, str]:
        """Returns a second name, that of the head, for each tied embedding of this rank, with its name in these modules."""
        names = dict(self.named_parameters()) if self.ties_embeddings else {}
        weights = ("output_layer.weight", "embedding.word_embeddings.weight")
        return {f"{i}.lm_head.weight": f"{i}.{name}" for i in range(len(self)) for name in weights if f"{i}.{name}" in names}


def as_module(model: Model) -> nn.Module:
    """Returns the module that holds all tensors of a model: :class:`MegatronChunks` for what is of Megatron-Core, else the model.

    Looks through Megatron's ``DistributedDataParallel`` and ``Float16Module``, and wrappers of trainers that keep what they wrap
    as ``module``.

    Raises:
        TypeError: no module, or a list with anything but modules of Megatron-Core.
        ValueError: Megatron's FSDP, whose shards are in flat buffers.
    """
    is_list = isinstance(model, list | tuple)
    wrappers: list[nn.Module] = []
    chunks = [_unwrap(chunk, wrappers) for chunk in (model if is_list else [model])]  # type: ignore[union-attr]
    if chunks and all(map(_is_megatron, chunks)):
        return MegatronChunks(chunks, wrappers)
    if is_list:
        kinds = ", ".join(dict.fromkeys(type(chunk).__name__ for chunk in chunks)) or "nothing"
        raise TypeError(f"expected a torch.nn.Module, or a list of Megatron-Core modules, got a list of {kinds}")
    if not isinstance(model, nn.Module):
        kind = f"the class {model.__name__}" if isinstance(model, type) else f"a {type(model).__name__}"
        raise TypeError(f"expected model to be a torch.nn.Module, got {kind}")
    return model


def _unwrap(module: Any, wrappers: list[nn.Module]) -> Any:
    """Returns the module of Megatron-Core inside a module, if there is one, and appends what is around it to ``wrappers``."""
    inner = module
    while isinstance(inner, nn.Module) and not _is_megatron(inner):
        if "FullyShardedDataParallel" in type(inner).__name__ and _of_megatron(inner):
            raise ValueError(
                f"{type(inner).__name__} keeps shards of flat buffers, which epload cannot address by name; use Megatron's "
                "DistributedDataParallel, or torch's fully_shard on a transformers model"
            )
        if not isinstance(wrapped := getattr(inner, "module", None), nn.Module):
            break
        wrappers.append(inner)
        inner = wrapped
    return inner if _is_megatron(inner) else module


def _is_megatron(module: object) -> bool:
    """Returns True for a language model of Megatron-Core, which embeds, decodes and puts out logits in its stages."""
    return _of_megatron(module) and all(hasattr(module, name) for name in ("sharded_state_dict", "decoder", "config"))


def _of_megatron(module: object) -> bool:
    return any(cls.__module__.partition(".")[0] == "megatron" for cls in type(module).__mro__)
