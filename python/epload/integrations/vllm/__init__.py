"""vLLM: its weight transfer over epload, and epload as its model loader. Tried with vLLM 0.33.

vLLM's engines find both through the entry point of its plugins; a trainer finds them because it imports this module.
"""

from __future__ import annotations

from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory, WeightTransferTrainerFactory
from vllm.model_executor import model_loader

from epload.integrations.vllm.loader import LOAD_FORMAT, EploadModelLoader
from epload.integrations.vllm.transfer import (
    BACKEND,
    EploadInitInfo,
    EploadTrainerInitInfo,
    EploadTrainerWeightTransferEngine,
    EploadUpdateInfo,
    EploadWeightTransferEngine,
    VllmModel,
)

__all__ = [
    "EploadInitInfo", "EploadModelLoader", "EploadTrainerInitInfo", "EploadTrainerWeightTransferEngine", "EploadUpdateInfo",
    "EploadWeightTransferEngine", "VllmModel", "register",
]  # fmt: skip


def register() -> None:
    """Called by vLLM in each process of an engine, perhaps several times."""
    for factory, engine in (
        (WeightTransferEngineFactory, EploadWeightTransferEngine),
        (WeightTransferTrainerFactory, EploadTrainerWeightTransferEngine),
    ):
        if BACKEND not in factory._registry:
            factory.register_engine(BACKEND, engine.__module__, engine.__name__)
    if LOAD_FORMAT not in model_loader._LOAD_FORMAT_TO_MODEL_LOADER:
        model_loader.register_model_loader(LOAD_FORMAT)(EploadModelLoader)


register()
