"""What no checkpoint holds is what the model computes itself: on every rank, in every layout, without a collective."""

from __future__ import annotations

import math
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import epload
from epload import LocalModules, OuterShard
from support import pretrained, ranks
from support.checks import bits, full_tensor
from support.drop_ins import everywhere
from support.findings import differing, must_be_refused
from support.models import Rotary, on_meta
from support.on_ranks import on_ranks
from support.pretrained import small_llama
from support.recordings import tensors_of
from support.small_model import loader


def llava() -> Any:
    sizes = {"hidden_size": 24, "intermediate_size": 36, "num_hidden_layers": 2, "num_attention_heads": 4}
    vision = transformers.CLIPVisionConfig(image_size=16, patch_size=8, **sizes)
    text = transformers.MistralConfig(num_key_value_heads=2, vocab_size=37, head_dim=6, **sizes)
    config = transformers.LlavaConfig(vision_config=vision, text_config=text)
    return transformers.LlavaForConditionalGeneration(config)


# ---- non-persistent buffers ----


def save_llava(folder: Path) -> None:
    torch.manual_seed(0)
    llava().save_pretrained(folder)


@on_ranks(4, save_llava)
def test_buffers_of_composite_models_are_what_from_pretrained_computes(rank: int, tmp_path: Path) -> None:
    """Alone, and with a hook for one layer's weights, which is not asked for buffers that the model computes."""
    expected = tensors_of(transformers.LlavaForConditionalGeneration.from_pretrained(tmp_path))
    model = on_meta(llava)
    fully_shard(model.model.language_model.layers[0])
    fully_shard(model)
    report = loader().load(model, tmp_path)
    assert sorted(n.rpartition(".")[2] for n in report.initialized) == ["inv_freq", "original_inv_freq", "position_ids"]
    assert differing(tensors_of(model), expected) == []

    model, calls = on_meta(llava), []
    model.lm_head.extra = nn.Parameter(torch.empty(7, 3, device="meta"))
    fully_shard(model)

    def hook(module: Any, path: str, names: tuple[str, ...]) -> None:
        calls.append((path, names))
        module.extra.to_local().detach().fill_(5.0)

    loader().load(model, tmp_path, strict=False, init_missing=hook)
    assert calls == [("lm_head", ("extra",))]
    assert differing(tensors_of(model), expected | {"lm_head.extra": torch.full((7, 3), 5.0)}) == []


@on_ranks(4)
def test_skyrl_1709_lmms_engine_185_inv_freq(rank: int) -> None:
    """Only some ranks made their model for real; the others get what they cannot compute from the lowest of these."""
    expected, source = Rotary().inv_freq, {"w": bits("w", (6, 4), torch.bfloat16)} if rank == 0 else None
    for makers in ((0,), (2, 3)):
        model: Any = Rotary() if rank in makers else on_meta(Rotary)
        if rank == 3 and rank in makers:
            model.inv_freq.zero_()  # not the lowest rank: its own values are replaced too
        report = loader().load(fully_shard(model), source)
        assert model.inv_freq.dtype == torch.float32
        assert torch.equal(model.inv_freq, expected), makers
        assert not report.initialized
    text = "the model's own initialization fills 1 tensor on meta: inv_freq"
    model = fully_shard(on_meta(Rotary))
    must_be_refused(partial(loader().load, model, source), "ModelMismatch", text)
    assert model.w.is_meta
    model = fully_shard(Rotary() if rank == 1 else on_meta(lambda: Rotary().bfloat16()))
    text = "expected buffer inv_freq to be the same on every rank"
    must_be_refused(partial(loader().load, model, source), "ManifestMismatch", text)
    assert model.w.is_meta is (rank != 1)


# ---- parameters ----


def without_head() -> dict[str, Tensor]:
    return {name: tensor for name, tensor in small_llama().state_dict().items() if name != HEAD}


HEAD = "lm_head.weight"
DROPPED = (HEAD, "model.embed_tokens.weight", "model.layers.1.self_attn.o_proj.weight", "model.norm.weight")
LAYOUTS = (
    partial(pretrained.fsdp, shard=4), partial(pretrained.fsdp, replicate=2, shard=2), partial(pretrained.by_torch, tp=2, dp=2),
    lambda model: None,
)  # fmt: skip


@on_ranks(4)
def test_missing_parameters_are_initialized_as_from_pretrained_does(rank: int) -> None:
    """The same whole tensors on each rank, and in each layout."""
    torch.manual_seed(0)
    state, values = {name: t for name, t in small_llama().state_dict().items() if name not in DROPPED}, []
    for parallelize in LAYOUTS:
        model = on_meta(small_llama)
        parallelize(model)
        torch.manual_seed(rank)  # what ranks draw may not depend on it, nor change it
        before = torch.get_rng_state()
        with CommDebugMode() as collectives:
            report = loader().load(model, state if rank == 0 else None, strict=False)
        assert not collectives.get_total_counts()
        assert torch.equal(before, torch.get_rng_state()), "the generator has moved"
        assert sorted(report.missing_keys) == sorted(DROPPED)
        assert {*DROPPED} <= {*report.initialized}
        found = {name: full_tensor(tensor.detach()) for name, tensor in model.named_parameters()}
        assert differing({name: found[name] for name in state}, state) == []
        values.append([found[name].tolist() for name in DROPPED])
    assert all(each == values[0] for each in (*values, *everywhere(values[0])))
    head, embed, out, norm = map(torch.tensor, values[0])
    for drawn in (head, embed, out):
        assert 0.015 < float(drawn.std()) < 0.025  # initializer_range is 0.02
        assert abs(float(drawn.mean())) < 0.003
        rows = drawn[drawn.abs().sum(1) > 0]
        assert len(torch.unique(rows, dim=0)) == len(rows), "rows repeat one another"
    assert not bool(embed[3].any())  # the padding token's
    assert torch.equal(norm, torch.ones(24))
    assert not torch.equal(head, embed)


def test_the_seed_is_the_callers() -> None:
    """As with from_pretrained, torch.manual_seed decides what is drawn."""
    state, drawn = without_head(), []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        model = on_meta(small_llama)
        epload.load(model, state, strict=False, progress=False)
        drawn.append(model.lm_head.weight)
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])


@on_ranks(4)
def test_a_head_that_some_ranks_lack_is_equal_on_all(rank: int) -> None:
    """Only rank 0 built its model for real: what it drew is not what the others have, so that all initialize alike."""
    model = small_llama() if rank == 0 else on_meta(small_llama)
    assert HEAD in loader().load(model, without_head() if rank == 0 else None, strict=False).initialized
    heads = [torch.empty_like(model.lm_head.weight) for _ in range(4)]
    dist.all_gather(heads, model.lm_head.weight.detach())
    assert bool(heads[0].isfinite().all())
    assert all(torch.equal(head, heads[0]) for head in heads)


def test_values_from_before_the_load_are_kept() -> None:
    model = small_llama()
    before, state = model.lm_head.weight.detach().clone(), without_head()
    report = epload.load(model, state, strict=False, progress=False)
    assert torch.equal(model.lm_head.weight, before)
    assert report.missing_keys == [HEAD]
    assert all(name.startswith("model.rotary_emb.") for name in report.initialized)  # in no checkpoint, and computed
    assert torch.equal(model.model.norm.weight, state["model.norm.weight"])


# ---- parts of larger tensors ----


class Experts(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.empty(count, 6, 5))


class Mixture(nn.Module):
    """Belongs to another library, with an initializer of the same kind; experts are one tensor, and modules."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(5, 4)
        self.experts = Experts(2)
        self.each = nn.ModuleList([nn.Linear(5, 6, bias=False)])

    def _init_weights(self, module: nn.Module) -> None:
        for parameter in module.parameters(recurse=False):
            nn.init.normal_(parameter, std=0.5)


def _experts(rank: int) -> list[Any]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep", "fsdp"))
    model = on_meta(Mixture)
    fully_shard(model.experts, mesh=mesh["fsdp"])
    state = {"gate.weight": torch.arange(20.0).reshape(4, 5), "gate.bias": torch.arange(4.0)}
    parts: dict[str, Any] = {"outer_shards": [OuterShard("experts", mesh["ep"])]}
    parts["local_modules"] = [LocalModules(r"each\.(\d+)\.", first=rank // 2)]
    loader().load(model, state if rank == 0 else None, strict=False, **parts)
    return [full_tensor(model.experts.up).tolist(), model.each[0].weight.tolist()]


def test_experts_of_one_rank_are_no_repeat_of_anothers() -> None:
    by_rank = ranks.run(4, _experts)  # ep is the first axis, and modules are known by their number
    assert by_rank[0] == by_rank[1]
    assert by_rank[2] == by_rank[3]
    for first, second in zip(by_rank[0], by_rank[2], strict=True):
        every = torch.tensor([first, second])
        assert len(torch.unique(every)) == every.numel()


def test_a_tied_head_is_not_drawn(tmp_path: Path) -> None:
    torch.manual_seed(0)
    source = small_llama(tie_word_embeddings=True)
    source.save_pretrained(tmp_path)
    assert HEAD not in load_file(tmp_path / "model.safetensors")
    model = on_meta(lambda: small_llama(tie_word_embeddings=True))
    report = epload.load(model, tmp_path, progress=False)
    assert HEAD not in report.initialized
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert torch.equal(model.lm_head.weight, source.lm_head.weight)


# ---- non-persistent buffers with storage, which hold garbage after to_empty() ----


IDS = torch.arange(9)[None]


def saved(folder: Path, **options: Any) -> Any:
    torch.manual_seed(0)
    model = small_llama(**options).eval()
    model.save_pretrained(folder)
    return model


def empty(folder: Path) -> Any:
    return on_meta(lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig.from_pretrained(folder))).eval()


def emptied(folder: Path) -> Any:
    model = empty(folder).to_empty(device="cpu")
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            tensor.fill_(123.0)
    return model


def test_they_are_computed_if_the_model_can(tmp_path: Path) -> None:
    expected = saved(tmp_path)
    model = emptied(tmp_path)
    report = epload.load(model, tmp_path, progress=False)
    assert torch.equal(model(IDS).logits, expected(IDS).logits)
    for name, buffer in expected.named_buffers():
        assert torch.equal(model.get_buffer(name), buffer), name
    assert "model.rotary_emb.inv_freq" in report.initialized
    assert not report.warnings


@on_ranks(2, saved)
def test_ranks_with_and_without_storage(rank: int, tmp_path: Path) -> None:
    """Rank 0 has garbage, rank 1 has the model on meta."""
    # In this process, since the number of threads changes the last bit.
    expected = transformers.LlamaForCausalLM.from_pretrained(tmp_path).eval()(IDS).logits
    model = emptied(tmp_path) if rank == 0 else empty(tmp_path)
    pretrained.fsdp(model, shard=2)
    with epload.HierarchicalLoader(progress=False, timeout=60) as runs:
        for _ in range(2):
            runs.load(model, tmp_path)
            assert torch.equal(model(IDS).logits, expected)


def test_frequencies_that_had_grown_start_anew(tmp_path: Path) -> None:
    """Dynamic scaling replaces the buffer as sequences grow, and remembers for which length."""
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    expected = saved(tmp_path, rope_parameters=rope, max_position_embeddings=64)
    model = transformers.LlamaForCausalLM.from_pretrained(tmp_path).eval()
    model(torch.zeros(1, 200, dtype=torch.int64))
    epload.load(model, tmp_path, progress=False)
    longer = torch.arange(100)[None] % 32
    assert torch.equal(model(longer).logits, expected(longer).logits)


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(3))
        self.register_buffer("mask", torch.ones(3), persistent=False)
        self.register_buffer("window", self.w.detach()[1:], persistent=False)


def test_what_the_model_cannot_compute_keeps_its_values_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    model = Masked()
    with epload.HierarchicalLoader(progress=False) as loader:
        report = loader.load(model, {"w": torch.arange(3.0)})
        assert torch.equal(model.mask, torch.ones(3))
        assert torch.equal(model.window, torch.tensor([1.0, 2.0]))  # part of what was loaded
        [warning] = [warning for warning in report.warnings if "non-persistent" in warning]
        assert "mask" in warning
        assert "window" not in warning
        loader.load(model, {"w": torch.arange(3.0) + 1})
        assert torch.equal(model.window, torch.tensor([2.0, 3.0]))
    assert not epload.load(model, {"w": torch.arange(3.0)}, progress=False).warnings, "said once of a model"


# ---- modules initialize with reset_parameters() what the checkpoint lacks, equally on all ranks, and nothing else ----


FILLED = ("0.weight", "4.bias")
load = partial(epload.load, strict=False, init_missing="reset_parameters", progress=False)


class OddModule(nn.Module):
    """Its method would overwrite everything: the loaded weight, and a buffer that no checkpoint has."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(5))
        self.scale = nn.Parameter(torch.empty(5))
        self.register_buffer("table", torch.arange(5.0), persistent=False)

    def reset_parameters(self) -> None:
        for tensor in (self.weight, self.scale, self.table):
            tensor.fill_(7.0)


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5), nn.Embedding(7, 6, padding_idx=2), nn.Linear(7, 9), nn.Linear(301, 4))


def state() -> dict[str, Tensor]:
    full = net().state_dict()
    return {name: torch.arange(full[name].numel()).reshape(full[name].shape) + 0.5 for name in FILLED}


def check(model: nn.Module, report: epload.LoadReport) -> None:
    values = {name: full_tensor(parameter) for name, parameter in model.named_parameters()}
    assert [name for name, value in state().items() if not torch.equal(values[name], value)] == []
    assert sorted(report.initialized) == sorted(values.keys() - {*FILLED})
    assert bool((values["1.weight"] == 1).all())
    assert not values["1.bias"].any()
    assert not values["2.weight"][2].any(), "the row for padding"
    bounds = {"0.bias": 6, "3.weight": 7, "3.bias": 7, "4.weight": 301}
    for name, fan_in in bounds.items():  # torch's: uniform in +-1 / sqrt(fan_in) of the whole weight
        bound = 1 / math.sqrt(fan_in)
        assert bound / 3 < values[name].abs().max() <= bound, name
        assert values[name].unique().numel() >= values[name].numel() - 3, name


def tensor_parallel(model: Any) -> None:
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    parallelize_module(model, grid["tp"], {"0": ColwiseParallel(), "3": RowwiseParallel(), "4": RowwiseParallel()})
    fully_shard(model, mesh=grid["dp"])


@on_ranks(4)
def test_missing_tensors_are_those_of_torch_in_every_layout(rank: int) -> None:
    values, source = [], state()
    for parallelize, has_storage in product((fully_shard, tensor_parallel, lambda model: None), (False, True)):
        model = on_meta(net)
        parallelize(model)
        if has_storage:
            model.to_empty(device="cpu")
        torch.manual_seed(3)
        before = torch.get_rng_state()
        with CommDebugMode() as collectives:
            report = load(model, source)
        assert not collectives.get_total_counts()
        assert torch.equal(before, torch.get_rng_state()), "random numbers of the caller"
        check(model, report)
        values.append([full_tensor(parameter).flatten().tolist() for parameter in model.parameters()])
    assert all(each == values[0] for each in values), "layouts differ"
    assert all(each == values[0] for each in everywhere(values[0])), "ranks differ"


def test_what_is_filled_or_not_missing_is_kept() -> None:
    model = OddModule()
    load(model, {"weight": torch.arange(5.0)})
    assert differing(model, {"weight": torch.arange(5.0), "scale": torch.full((5,), 7.0)}) == []
    assert torch.equal(model.table, torch.arange(5.0)), "no checkpoint has it, and it is not missing"


def test_a_loader_initializes_what_each_checkpoint_lacks() -> None:
    model = on_meta(lambda: nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5)))
    source = {"0.weight": state()["0.weight"]}
    with epload.HierarchicalLoader(progress=False) as loader:
        for _ in range(2):
            report = loader.load(model, source, strict=False, init_missing="reset_parameters")
            assert sorted(report.initialized) == ["0.bias", "1.bias", "1.weight"]
            assert torch.equal(model[0].weight, source["0.weight"])
            assert 0 < model[0].bias.abs().max() <= 6**-0.5
            assert torch.equal(model[1].weight, torch.ones(5))
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.fill_(9.0)


class Plain(nn.Module):
    """Has no method of this name."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(3))


class FailingModule(Plain):
    def reset_parameters(self) -> None:
        raise RuntimeError("cannot")


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Plain, r"neither the checkpoint nor .* fills 1 tensor on meta: 1\.weight\. Their modules have no reset_para"),
        (FailingModule, r"FailingModule\.reset_parameters failed to initialize 1 \(RuntimeError: cannot\)"),
    ],
)
def test_what_no_method_fills_is_refused(kind: type[nn.Module], message: str) -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(2, 2), kind())
    state = {"0.weight": torch.ones(2, 2), "0.bias": torch.ones(2)}
    with pytest.raises(epload.ModelMismatch, match=message):
        load(model, state)
    assert model[0].weight.is_meta, "nothing has moved"


@on_ranks(2)
def test_shards_of_unknown_size_and_different_options_are_refused(rank: int) -> None:
    model, state = on_meta(lambda: nn.Sequential(nn.Linear(4, 3))), {"0.bias": torch.arange(6.0)}
    shards = epload.LoadOptions(outer_shards=[epload.OuterShard(r"0\.", init_device_mesh("cpu", (2,)))])
    hint = "Pass init_missing='reset_parameters' if their modules have that method"
    for options, *texts in (
        ({"options": shards}, "ModelMismatch", "0.weight. Their modules"),
        ({"options": shards, "init_missing": None}, "ModelMismatch", hint),
        (
            {"init_missing": "reset_parameters" if rank else None},
            "ManifestMismatch", "init_missing=reset_parameters",
        ),
    ):  # fmt: skip
        must_be_refused(partial(load, model, state, timeout=20, **options), *texts)


def test_an_adapter_starts_as_peft_has_it() -> None:
    from peft import LoraConfig, get_peft_model

    with torch.device("meta"):
        model: Any = get_peft_model(nn.Sequential(nn.Linear(4, 3)), LoraConfig(target_modules=["0"], r=2))
    load(model, {"0.weight": torch.ones(3, 4)})
    weights = {name.split(".")[-3]: bool(p.any()) for name, p in model.named_parameters() if "lora" in name}
    assert weights == {"lora_A": True, "lora_B": False}
    assert model.base_model.model[0].base_layer.bias.any()
