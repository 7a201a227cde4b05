"""The classes: all that an Auto class of the installed transformers can make."""

from __future__ import annotations

from pathlib import Path
from typing import Any

LIST = Path(__file__).with_name("classes.txt")
"""Names of those that build, sorted, one on each line."""

ALWAYS = (
    "LlavaForConditionalGeneration", "FalconH1ForCausalLM", "Gemma3nForCausalLM",
    "Qwen2_5_VLForConditionalGeneration", "FunnelForMaskedLM", "GroundingDinoModel", "EncodecModel",
    "DeepseekV3ForCausalLM", "MarianMTModel", "CLIPModel", "Mamba2ForCausalLM", "BertForMaskedLM", "T5ForConditionalGeneration",
    "Dots3NoteForCausalLM",
)  # fmt: skip
"""Composite models, and those with initializers of their own, which are in every sample."""


def listed() -> list[str]:
    return LIST.read_text().split()


def sample(count: int) -> list[str]:
    """Returns so many of the list, spread evenly over it, with :data:`ALWAYS` among them."""
    names = listed()
    chosen = [name for name in ALWAYS if name in names]
    others = [name for name in names if name not in chosen]
    number = max(0, count - len(chosen))
    return sorted([*chosen, *(others[i * len(others) // number] for i in range(number))])


def auto_classes() -> dict[str, list[tuple[str, str]]]:
    """Returns the tables that name each class: pairs of a table's name and a model type."""
    from transformers.models.auto import modeling_auto

    found: dict[str, list[tuple[str, str]]] = {}
    for table in sorted(vars(modeling_auto)):
        mapping = getattr(modeling_auto, table)
        if not table.startswith("MODEL_") or not table.endswith("_MAPPING") or not hasattr(mapping, "_model_mapping"):
            continue
        for model_type, names in mapping._model_mapping.items():
            for name in names if isinstance(names, tuple | list) else (names,):
                found.setdefault(name, []).append((table, model_type))
    return found


def resolve(places: list[tuple[str, str]], name: str) -> tuple[type[Any], list[type[Any]]]:
    """A class, and the classes of its configurations: its own, then those that a table pairs it with."""
    from transformers.models.auto import modeling_auto
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    model_class, configs = None, []
    for table, model_type in places:
        model_class = getattr(modeling_auto, table)._load_attr_from_module(model_type, name)
        configs.append(CONFIG_MAPPING[model_type])
    if model_class is None:
        raise ImportError(f"no Auto class of the installed transformers makes a {name}")
    own = getattr(model_class, "config_class", None)
    return model_class, list(dict.fromkeys([*([own] if own is not None else []), *configs]))
