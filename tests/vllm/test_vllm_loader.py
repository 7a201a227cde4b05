"""vLLM's models through ``--load-format epload``, against vLLM's own loader."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from engine import CONFIGS, make_checkpoint, make_engine

from support import ranks
from support.memory import bytes_read
from support.recordings import poison, same_bits, tensors_of
from support.small_syncs import outcome


def load(rank: int, folder: Path, extra: dict[str, Any]) -> dict[str, Any]:
    from vllm.config import set_current_vllm_config
    from vllm.config.load import LoadConfig
    from vllm.model_executor.model_loader import get_model_loader
    from vllm.model_executor.model_loader.reload.inplace import reload_weights

    from epload.integrations.vllm import EploadModelLoader, register

    register()
    register()
    model, config = make_engine(folder, 2)
    found: dict[str, Any] = {}
    loader = get_model_loader(LoadConfig(load_format="epload", model_loader_extra_config=extra))
    assert isinstance(loader, EploadModelLoader)
    with set_current_vllm_config(config):
        nbytes = []
        for _ in range(5):  # the first reads modules, too; where the machine is busy, one takes the store for slow
            poison(model)
            before = bytes_read()
            loader.load_weights(model, config.model_config)
            nbytes.append(bytes_read() - before)
        found["read"] = min(nbytes)
        loaded = {name: tensor.detach().clone() for name, tensor in tensors_of(model).items()}
        poison(model)
        get_model_loader(LoadConfig(load_format="safetensors")).load_weights(model, config.model_config)
        found["wrong"] = [name for name, tensor in tensors_of(model).items() if not same_bits(tensor, loaded[name])]
        poison(model)
        config.load_config = LoadConfig(load_format="epload")
        reload_weights(config, model, None, str(folder), True)
        reloaded = tensors_of(model)
        found["wrong"] += [name for name, tensor in loaded.items() if not same_bits(tensor, reloaded[name])]
        model.secondary_weights = ["another"]
        found["error"] = outcome(partial(loader.load_weights, model, config.model_config))
    loader.download_model(config.model_config)
    dist.barrier()
    return found


@pytest.mark.parametrize("extra", [{}, {"verify": True}], ids=["plain", "proven"])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_model_is_as_vllm_loads_it(name: str, extra: dict[str, Any], tmp_path: Path) -> None:
    """2 tensor- and expert-parallel ranks."""
    make_checkpoint(tmp_path, CONFIGS[name])
    found = ranks.run(2, load, tmp_path, extra)
    for rank in found:
        assert rank["wrong"] == []
        assert "weights in a second checkpoint" in rank["error"]
    if not extra:
        size = os.path.getsize(tmp_path / "model.safetensors")
        # Besides the shards: the header, what both ranks keep (norms, routers), gaps in narrow rows that are read along, and the
        # eight short reads with which each rank times the store, which are much of so small a file.
        assert sum(rank["read"] for rank in found) <= 1.6 * size, (size, found)


def refused(rank: int, folder: Path) -> str:
    from vllm.config.load import LoadConfig
    from vllm.model_executor.model_loader import get_model_loader

    from epload.integrations.vllm import register

    register()
    with pytest.raises(ValueError, match="verify and strict only") as error:
        get_model_loader(LoadConfig(load_format="epload", model_loader_extra_config={"verfy": "full"}))
    return str(error.value)


def in_both_formats(rank: int, folder: Path) -> str:
    from vllm.config.load import LoadConfig

    from epload.integrations.vllm import EploadModelLoader

    config = SimpleNamespace(model=str(folder), revision=None, config_format="hf")
    loader = EploadModelLoader(LoadConfig(load_format="epload"))
    loader.download_model(config)
    config.config_format = "auto"
    return outcome(partial(loader.download_model, config))


def test_weights_in_another_format_than_the_configuration_are_refused(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, CONFIGS["qwen3_moe"])
    for name in ("consolidated.safetensors", "params.json"):
        (tmp_path / name).write_text("{}")
    assert "pass --config-format hf" in ranks.run(1, in_both_formats, tmp_path)[0]


def test_options_that_it_does_not_have(tmp_path: Path) -> None:
    assert "verfy" in ranks.run(1, refused, tmp_path)[0]
