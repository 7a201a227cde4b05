"""Models of the transformers library are saved as ``save_pretrained`` saves them, and ``from_pretrained`` reads them."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import transformers
from click.testing import CliRunner
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from torch import nn

import epload
from epload.cli.main import main
from support import ranks
from support.checkpoints import assert_same, read_all, read_folder
from support.findings import differing, must_be_refused_by_all
from support.on_ranks import on_ranks
from support.pretrained import build, by_the_library, fsdp, quiet, random, small_llama

FSDP, HSDP = partial(fsdp, shard=4), partial(fsdp, replicate=2, shard=2)
TP, EP = partial(by_the_library, tp_size=2, fsdp_size=2), partial(by_the_library, ep_size=2, fsdp_size=4)
CASES: dict[str, tuple[Callable[[Any], Any], ...]] = {
    "qwen3_moe": (FSDP, HSDP, TP, EP),
    "mixtral": (FSDP, EP), "deepseek_v3": (FSDP, EP), "gpt_oss": (FSDP,), "qwen3_vl_moe": (FSDP,),
    "llama": (FSDP, TP), "bert": (HSDP,),
}  # fmt: skip


def save(rank: int, folder: str) -> None:
    quiet()
    for kind, ways in CASES.items():
        for number, parallelize in enumerate(ways):
            model = parallelize(random(kind, 1))
            epload.save(model, f"{folder}/{kind}-{number}", max_shard_bytes=20_000)
            epload.save(model, f"{folder}/{kind}-{number}-changes", base=f"{folder}/{kind}-base")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    for kind in CASES:
        random(kind, 2).save_pretrained(folder / f"{kind}-base")
    ranks.run(4, save, str(folder), limit=300)
    return folder


def wrapped(how: str) -> Any:
    torch.manual_seed(0)
    vision = {"model_type": "clip_vision_model", "image_size": 8, "patch_size": 4, "projection_dim": 8, "num_hidden_layers": 2}
    small = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2}
    text = small | {"model_type": "qwen3_moe", "moe_intermediate_size": 8, "num_hidden_layers": 1, "num_key_value_heads": 1}
    text |= {"head_dim": 8, "vocab_size": 32, "num_experts": 2, "num_experts_per_tok": 1}
    settings = transformers.LlavaConfig(
        vision_config=vision | small, text_config=text, image_token_index=3, vision_feature_layer=-1
    )
    model = transformers.LlavaForConditionalGeneration(settings)
    inner = model.model
    if how == "compiled":
        inner.language_model = torch.compile(inner.language_model)
    elif how == "adapted":
        lora = LoraConfig(r=2, target_modules=["q_proj"])
        inner.language_model = get_peft_model(inner.language_model, lora)
        inner.language_model.merge_adapter()
    elif how == "copied":
        lora = LoraConfig(r=2, target_modules=r".*vision_tower.*q_proj", modules_to_save=["language_model"])
        model = get_peft_model(model, lora)
        model.merge_adapter()
    return model


@pytest.mark.parametrize("how", ["compiled", "adapted", "copied"])
def test_conversions_reach_a_wrapped_part(how: str, tmp_path: Path) -> None:
    """Experts of a text model inside another are separate in its checkpoints."""
    wrapped("").save_pretrained(tmp_path / "theirs")
    epload.save(wrapped(how), tmp_path / "ours")
    assert_same(load_file(tmp_path / "ours/model.safetensors"), load_file(tmp_path / "theirs/model.safetensors"))


@pytest.mark.parametrize("kind", CASES)
def test_files_are_those_of_save_pretrained(kind: str, saved: Path, tmp_path: Path) -> None:
    quiet()
    model = random(kind, 1)
    model.save_pretrained(tmp_path)
    expected = read_folder(tmp_path)
    ids = torch.arange(12).reshape(2, 6)
    for number in range(len(CASES[kind])):
        folder = saved / f"{kind}-{number}"
        found = read_folder(folder)
        assert_same(read_all(epload.Checkpoint.open(saved / f"{kind}-{number}-changes")), found)
        if parallelized_apart := found.keys() - expected.keys():  # the library's TP makes two tensors of tied ones
            assert (kind, number, parallelized_apart) == ("llama", 1, {"lm_head.weight"})
            assert torch.equal(found.pop("lm_head.weight"), expected["model.embed_tokens.weight"])
        assert differing(found, expected) == []
        assert CliRunner().invoke(main, ["verify", str(folder)]).exit_code == 0
        again = type(model).from_pretrained(folder).eval()
        assert differing(again, model) == []
        with torch.no_grad():
            assert torch.equal(again(ids).logits, model(ids).logits)
        configs = [json.loads((where / "config.json").read_text()) for where in (folder, tmp_path)]
        assert configs[0] == configs[1]
        assert (folder / "generation_config.json").exists() == (tmp_path / "generation_config.json").exists()


CODE = """
from transformers import LlamaConfig, LlamaForCausalLM

from .sizes import HIDDEN


class OwnConfig(LlamaConfig):
    model_type = "own"


class OwnModel(LlamaForCausalLM):
    config_class = OwnConfig

    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        output.logits = output.logits * HIDDEN
        return output
"""


def test_a_models_own_code_is_saved_with_it(tmp_path: Path) -> None:
    """``save_pretrained`` copies it, and ``from_pretrained`` of a folder that names code but lacks it fails."""
    random("llama", 1).save_pretrained(tmp_path / "theirs")
    with mock.patch("tempfile.tempdir", str(tmp_path / "absent")):  # which is for such code alone
        epload.save(random("llama", 1), tmp_path / "none")
    (tmp_path / "theirs/own_model.py").write_text(CODE)
    (tmp_path / "theirs/sizes.py").write_text("HIDDEN = 3")
    settings = json.loads((tmp_path / "theirs/config.json").read_text())
    settings |= {"model_type": "own", "auto_map": {"AutoConfig": "own_model.OwnConfig"}}
    settings["auto_map"]["AutoModelForCausalLM"] = "own_model.OwnModel"
    (tmp_path / "theirs/config.json").write_text(json.dumps(settings))
    read = partial(transformers.AutoModelForCausalLM.from_pretrained, trust_remote_code=True)
    model, ids = read(tmp_path / "theirs"), torch.arange(12).reshape(2, 6)
    epload.save(model, tmp_path / "ours")
    model.save_pretrained(tmp_path / "again")
    folders = [{path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} for name in ("ours", "again")]
    assert folders[0].keys() == folders[1].keys() >= {"own_model.py", "sizes.py"}
    assert all(folders[0][name] == folders[1][name] for name in folders[0] if not name.endswith(".safetensors"))
    assert torch.equal(read(tmp_path / "ours")(ids).logits, model(ids).logits)


def test_what_is_of_the_load_or_the_process_is_not_saved(tmp_path: Path) -> None:
    """The name of the file that a model was loaded from, and how generation is compiled."""
    model = random("llama", 1)
    model.config.transformers_weights = "consolidated.safetensors"
    model.generation_config.compile_config = transformers.CompileConfig()
    epload.save(model, tmp_path / "ours")
    again = type(model).from_pretrained(tmp_path / "ours")
    assert differing(again, model) == []
    assert again.generation_config.compile_config is None


def test_a_tie_that_no_class_declares_is_refused(tmp_path: Path) -> None:
    """``save_pretrained`` raises, too; ``from_pretrained`` would initialize one of the two."""
    model = random("llama", 1)
    layers = model.model.layers
    layers[1].mlp.up_proj.weight = layers[0].mlp.up_proj.weight
    with pytest.raises(RuntimeError, match="contained shared tensors"):
        model.save_pretrained(tmp_path / "theirs")
    text = r"model\.layers\.0\.mlp\.up_proj\.weight and model\.layers\.1\.mlp\.up_proj\.weight are one parameter"
    for wrapped in (model, torch.compile(model)):
        with pytest.raises(epload.ModelMismatch, match=text):
            epload.save(wrapped, tmp_path / "ours")
    epload.save(model, tmp_path / "ours", mapping=epload.Mapping())  # for loads that do not depend on the library


def test_a_tie_that_the_configuration_turns_off_is_refused(tmp_path: Path) -> None:
    model = small_llama(tie_word_embeddings=False)
    model.lm_head.weight = model.model.embed_tokens.weight
    with pytest.raises(epload.ModelMismatch, match=r"embed_tokens\.weight and lm_head\.weight are one parameter"):
        epload.save(model, tmp_path / "saved")
    adapted = get_peft_model(model, LoraConfig(target_modules=["q_proj"]))
    adapted.merge_adapter()
    with pytest.raises(epload.ModelMismatch, match=r"are one parameter"):
        epload.save(adapted, tmp_path / "saved")
    model = adapted.unload()
    model.config.tie_word_embeddings = True
    epload.save(model, tmp_path / "saved")


class Around(nn.Module):
    """Has a configuration, as sentence-transformers' CrossEncoder has, and is no model of the library."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model, self.config = model, model.config


Around.__bases__ += (transformers.utils.PushToHubMixin,)


def test_what_is_around_a_model_is_not_saved_with_its_configuration(tmp_path: Path) -> None:
    epload.save(Around(random("llama", 1)), tmp_path / "saved")
    assert [path.name for path in (tmp_path / "saved").iterdir()] == ["model.safetensors"]


@on_ranks(2)
def test_experts_of_one_rank_that_nothing_describes_are_refused(rank: int, tmp_path: Path) -> None:
    """Tools that divide experts by themselves replace parameters by parts of them: they would be taken for replicas."""
    model: Any = build("qwen3_moe")
    for module in model.modules():
        for name, stack in list(module.named_parameters(recurse=False)) if hasattr(module, "gate_up_proj") else ():
            setattr(module, name, torch.nn.Parameter(stack.detach().chunk(2)[rank].clone()))
    texts = "mlp.experts.gate_up_proj has shape", "one rank's part", "LoadOptions.outer_shards"
    must_be_refused_by_all(partial(epload.save, model, tmp_path / "saved"), *texts)
    model.config.num_experts //= 2  # as of a model that was pruned
    epload.save(model, tmp_path / "saved")


class Engine(torch.nn.Module):
    """Has a model as its module, as engines of DeepSpeed and Fabric do."""

    def __init__(self) -> None:
        super().__init__()
        self.module = build("llama")


def test_an_engine_around_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"a Engine has a LlamaForCausalLM as its module, .* pass this module"):
        epload.save(Engine(), tmp_path / "saved")
    epload.save(Engine(), tmp_path / "saved", mapping=epload.Mapping())
    averaged = torch.optim.swa_utils.AveragedModel(build("llama"))  # which counts, too
    epload.save(averaged, tmp_path / "averaged")
