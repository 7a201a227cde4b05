"""All classes of transformers that vLLM serves and that build on CPU: filled by epload, and by vLLM's own loader."""

from __future__ import annotations

from pathlib import Path

import pytest
from engine import make_engine

from support import ranks
from support.recordings import poison, same_bits, tensors_of
from support.served import check, judge_all, served, unwritten, verdict_on


def judge(rank: int, names: list[str], folder: Path, tensor_parallel: int) -> dict[str, str]:
    from vllm.config import set_current_vllm_config
    from vllm.config.load import LoadConfig
    from vllm.model_executor.model_loader import get_model_loader
    from vllm.model_executor.models import registry

    from epload.integrations.vllm import register

    register()
    registry._run_in_subprocess = lambda function: function()  # which imports vLLM for each class

    def compare(path: Path) -> str:
        model, config = make_engine(path, tensor_parallel, expert_parallel=False)
        with set_current_vllm_config(config):
            poison(model)
            get_model_loader(LoadConfig(load_format="safetensors")).load_weights(model, config.model_config)
            expected = {name: tensor.detach().clone() for name, tensor in tensors_of(model).items()}
            poison(model)
            try:
                get_model_loader(LoadConfig(load_format="epload")).load_weights(model, config.model_config)
            except Exception as error:
                return verdict_on(error, unwritten(expected))
        differing = [name for name, tensor in expected.items() if not same_bits(tensors_of(model)[name], tensor)]
        return ", ".join(differing) or "equal"

    return judge_all(rank, names, folder, compare)


@pytest.mark.parametrize("tensor_parallel", [1, 2])
def test_every_class_is_as_vllm_loads_it(tensor_parallel: int, tmp_path: Path) -> None:
    from vllm import ModelRegistry

    names = served(ModelRegistry.get_supported_archs())
    for verdicts in ranks.run(tensor_parallel, judge, names, tmp_path, tensor_parallel, limit=900):
        check(verdicts, equal=70)
