"""All classes of transformers that SGLang serves and that build on CPU: filled by epload, and by SGLang's own loader."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from engine import differences, make_model, make_rank, set_arguments

from support import ranks
from support.pretrained import published
from support.recordings import tensors_of
from support.served import check, judge_all, served, unwritten, verdict_on


def judge(rank: int, names: list[str], folder: Path) -> dict[str, str]:
    import torch
    from sglang.srt.configs.device_config import DeviceConfig
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.distributed import bootstrap
    from sglang.srt.model_loader.loader import DefaultModelLoader, get_model_loader

    from epload.integrations.sglang import register

    register()
    started: list[Any] = []

    def compare(path: Path) -> str:
        if started:
            config = set_arguments(path, 1)
            bootstrap.init_layer_runtime(model_config=config)
        else:
            config = make_rank(path, 1)
            started.append(config)
        expected = make_model(config)
        DefaultModelLoader.load_weights_and_postprocess(expected, iter(published(path).items()), torch.device("cpu"))
        loader = get_model_loader(LoadConfig(load_format="private"), config)
        try:
            found = loader.load_model(model_config=config, device_config=DeviceConfig("cpu"))
            return ", ".join(differences(expected, found)) or "equal"
        except Exception as error:
            return verdict_on(error, unwritten(tensors_of(expected)))

    return judge_all(rank, names, folder, compare)


def test_every_class_is_as_sglang_loads_it(tmp_path: Path) -> None:
    from sglang.srt.models.registry import ModelRegistry

    names = served(ModelRegistry.get_supported_archs())
    (verdicts,) = ranks.run(1, judge, names, tmp_path, limit=900)
    check(verdicts, equal=45)
