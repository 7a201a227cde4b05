"""What no checkpoint holds is what the model computes itself: on every rank, in every layout, without a collective."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import LlamaConfig, LlamaForCausalLM

import epload
from epload import LocalModules, OuterShard
from support import ranks
from support.checks import all_fine, full_tensor
from support.findings import differing
from support.initialized_models import HEAD, llama, loader
from support.models import on_meta
from support.recordings import tensors_of


def llava() -> Any:
    from transformers import CLIPVisionConfig, LlavaConfig, LlavaForConditionalGeneration, MistralConfig

    vision = CLIPVisionConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, image_size=16, patch_size=8
    )
    text = MistralConfig(
        hidden_size=24, intermediate_size=36, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=37, head_dim=6,
    )  # fmt: skip
    return LlavaForConditionalGeneration(LlavaConfig(vision_config=vision, text_config=text))


# ---- non-persistent buffers ----


def _composite(rank: int, folder: Path) -> None:
    """Alone, and with a hook for one layer's weights, which is not asked for buffers that the model computes."""
    from transformers import LlavaForConditionalGeneration

    expected = tensors_of(LlavaForConditionalGeneration.from_pretrained(folder))
    model = on_meta(llava)
    fully_shard(model.model.language_model.layers[0])
    fully_shard(model)
    report = loader().load(model, folder)
    lost = ["inv_freq", "original_inv_freq", "position_ids"]
    assert sorted(n.rpartition(".")[2] for n in report.initialized) == lost, str(report)
    assert differing(tensors_of(model), expected) == []

    model, calls = on_meta(llava), []
    model.lm_head.extra = nn.Parameter(torch.empty(7, 3, device="meta"))
    fully_shard(model)

    def hook(module: Any, path: str, names: tuple[str, ...]) -> None:
        calls.append((path, names))
        module.extra.to_local().detach().fill_(5.0)

    loader().load(model, folder, strict=False, init_missing=hook)
    assert calls == [("lm_head", ("extra",))], str(calls)
    assert differing(tensors_of(model), expected | {"lm_head.extra": torch.full((7, 3), 5.0)}) == []


def test_buffers_of_composite_models_are_what_from_pretrained_computes(tmp_path: Path) -> None:
    torch.manual_seed(0)
    llava().save_pretrained(tmp_path)
    ranks.run(4, _composite, tmp_path)


# ---- parameters ----


def _fsdp(model: Any) -> None:
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)


def _hsdp(model: Any) -> None:
    fully_shard(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))


def _tp_then_fsdp(model: Any) -> None:
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for layer in model.model.layers:
        plan = {"gate_proj": ColwiseParallel(), "up_proj": ColwiseParallel(), "down_proj": RowwiseParallel()}
        parallelize_module(layer.mlp, grid["tp"], plan)
    parallelize_module(model, grid["tp"], {"lm_head": ColwiseParallel(output_layouts=Shard(-1))})
    for layer in model.model.layers:
        fully_shard(layer, mesh=grid["dp"])
    fully_shard(model, mesh=grid["dp"])


def _plain(model: Any) -> None:
    """Replicated on all ranks."""


DROPPED = (HEAD, "model.embed_tokens.weight", "model.layers.1.mlp.down_proj.weight", "model.norm.weight")


def _missing(rank: int, state: dict[str, Tensor]) -> list[Any]:
    """What each layout was given, as lists: tensors would travel as shared memory, which must outlive the rank."""
    problems = []
    values = []
    for parallelize in (_fsdp, _hsdp, _tp_then_fsdp, _plain):
        model = on_meta(llama)
        parallelize(model)
        torch.manual_seed(rank)  # what ranks draw may not depend on it, nor change it
        before = torch.get_rng_state()
        with CommDebugMode() as collectives:
            report = loader().load(model, state if rank == 0 else None, strict=False)
        if collectives.get_total_counts() or not torch.equal(before, torch.get_rng_state()):
            problems.append(f"{parallelize.__name__}: {collectives.get_comm_counts()} or the generator has moved")
        if sorted(report.missing_keys) != sorted(DROPPED) or not set(DROPPED) <= set(report.initialized):
            problems.append(str(report))
        found = {name: full_tensor(tensor.detach()) for name, tensor in model.named_parameters()}
        problems += [f"{name} differs" for name, t in state.items() if not torch.equal(found[name], t)]
        values.append([found[name] for name in DROPPED])
        for name, tensor in zip(DROPPED, values[-1], strict=True):
            rows = tensor[tensor.abs().sum(1) > 0] if tensor.ndim > 1 else tensor
            if tensor.ndim > 1 and len(torch.unique(rows, dim=0)) != len(rows):
                problems.append(f"{parallelize.__name__}: rows of {name} repeat one another")
    return problems or [[tensor.tolist() for tensor in tensors] for tensors in values]


def test_missing_parameters_are_initialized_as_from_pretrained_does(tmp_path: Path) -> None:
    torch.manual_seed(0)
    state = {name: tensor for name, tensor in llama().state_dict().items() if name not in DROPPED}
    by_rank: Any = ranks.run(4, _missing, state)
    assert all(not isinstance(value, str) for values in by_rank for value in values), by_rank
    first = by_rank[0][0]
    for values in by_rank:  # of each rank, in each layout: the same whole tensors
        for tensors in values:
            assert tensors == first
    head, embed, down, norm = map(torch.tensor, first)
    for drawn in (head, embed, down):
        assert 0.015 < float(drawn.std()) < 0.025  # initializer_range is 0.02
        assert abs(float(drawn.mean())) < 0.003
    assert not bool(embed[3].any())  # the padding token's
    assert torch.equal(norm, torch.ones(24))
    assert not torch.equal(head, embed)


def test_the_seed_is_the_callers() -> None:
    """As with from_pretrained, torch.manual_seed decides what is drawn."""
    state = llama().state_dict()
    del state[HEAD]
    drawn = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        model = on_meta(llama)
        epload.load(model, state, strict=False, progress=False)
        drawn.append(model.lm_head.weight)
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])


def _uneven(rank: int, state: dict[str, Tensor]) -> list[str]:
    """Only rank 0 built its model for real: what it drew is not what the others have, so that all initialize alike."""
    model = llama() if rank == 0 else on_meta(llama)
    report = loader().load(model, state if rank == 0 else None, strict=False)
    heads = [torch.empty_like(model.lm_head.weight) for _ in range(4)]
    dist.all_gather(heads, model.lm_head.weight.detach())
    same = all(torch.equal(head, heads[0]) for head in heads)
    return [] if same and HEAD in report.initialized and bool(heads[0].isfinite().all()) else [str(heads), str(report)]


def test_a_head_that_some_ranks_lack_is_equal_on_all() -> None:
    state = llama().state_dict()
    del state[HEAD]
    all_fine(ranks.run(4, _uneven, state))


def test_values_from_before_the_load_are_kept() -> None:
    model = llama()
    before = model.lm_head.weight.detach().clone()
    state = llama().state_dict()
    del state[HEAD]
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
    """Of another library, with an initializer of the same kind."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.gate = nn.Linear(5, 4)
        self.experts = Experts(count)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, Experts):
            nn.init.normal_(module.up, std=0.5)


def _experts(rank: int) -> list[Any]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep", "fsdp"))
    model = on_meta(lambda: Mixture(2))
    fully_shard(model.experts, mesh=mesh["fsdp"])
    state = {"gate.weight": torch.arange(20.0).reshape(4, 5), "gate.bias": torch.arange(4.0)}
    loader().load(model, state if rank == 0 else None, strict=False, outer_shards=[OuterShard("experts", mesh["ep"])])
    return list(full_tensor(model.experts.up).tolist())


def test_experts_of_one_rank_are_no_repeat_of_anothers() -> None:
    first, again, second, again2 = map(torch.tensor, ranks.run(4, _experts))  # ep is the first axis
    assert torch.equal(first, again)
    assert torch.equal(second, again2)
    every = torch.cat([first, second])
    assert len(torch.unique(every)) == every.numel()


class Listed(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(5)
        self.experts = nn.ModuleList(nn.Linear(5, 6, bias=False) for _ in range(count))

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight)


def _local_modules(rank: int) -> list[Any]:
    model = on_meta(lambda: Listed(1))
    state = {"norm.weight": torch.ones(5), "norm.bias": torch.ones(5)}
    parts = [LocalModules(r"experts\.(\d+)\.", first=rank // 2)]
    loader().load(model, state if rank == 0 else None, strict=False, local_modules=parts)
    return list(model.experts[0].weight.tolist())


def test_local_modules_are_known_by_their_number() -> None:
    first, again, second, again2 = ranks.run(4, _local_modules)
    assert first == again  # ranks 0 and 1 have expert 0
    assert second == again2
    assert first != second


def test_a_tied_head_is_not_drawn(tmp_path: Path) -> None:
    torch.manual_seed(0)
    source = llama(tie_word_embeddings=True)
    source.save_pretrained(tmp_path)
    assert HEAD not in load_file(tmp_path / "model.safetensors")
    model = on_meta(lambda: llama(tie_word_embeddings=True))
    report = epload.load(model, tmp_path, progress=False)
    assert HEAD not in report.initialized
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert torch.equal(model.lm_head.weight, source.lm_head.weight)


# ---- non-persistent buffers with storage, which hold garbage after to_empty() ----


IDS = torch.arange(9)[None]


def saved(folder: Path, **options: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    model = llama(**options).eval()
    model.save_pretrained(folder)
    return model


def emptied(folder: str) -> Any:
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig.from_pretrained(folder)).eval()
    model.to_empty(device="cpu")
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            tensor.fill_(123.0)
    return model


def test_they_are_computed_if_the_model_can(tmp_path: Path) -> None:
    expected = saved(tmp_path)
    model = emptied(str(tmp_path))
    report = epload.load(model, tmp_path, progress=False)
    assert torch.equal(model(IDS).logits, expected(IDS).logits)
    for name, buffer in expected.named_buffers():
        assert torch.equal(model.get_buffer(name), buffer), name
    assert "model.rotary_emb.inv_freq" in report.initialized
    assert not report.warnings


def mixed(rank: int, folder: str) -> list[Any]:
    """Rank 0 has garbage, rank 1 has the model on meta."""
    model = emptied(folder)
    if rank == 1:
        with torch.device("meta"):
            model = LlamaForCausalLM(LlamaConfig.from_pretrained(folder)).eval()
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    with epload.HierarchicalLoader(progress=False, timeout=60) as loader:
        loader.load(model, folder)
        first = model(IDS).logits.tolist()
        loader.load(model, folder)
    # In this process, since the number of threads changes the last bit.
    expected = LlamaForCausalLM.from_pretrained(folder).eval()(IDS).logits.tolist()
    return [expected, first, model(IDS).logits.tolist()]


def test_ranks_with_and_without_storage(tmp_path: Path) -> None:
    saved(tmp_path)
    for expected, first, second in ranks.run(2, mixed, str(tmp_path)):
        assert first == expected
        assert second == expected


def test_frequencies_that_had_grown_start_anew(tmp_path: Path) -> None:
    """Dynamic scaling replaces the buffer as sequences grow, and remembers for which length."""
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    expected = saved(tmp_path, rope_parameters=rope, max_position_embeddings=64)
    model = LlamaForCausalLM.from_pretrained(tmp_path).eval()
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
