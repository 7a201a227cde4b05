"""Loads, saves and syncs of Megatron-Core's models, against what each rank has to hold and against transformers."""

from __future__ import annotations

import json
from importlib import metadata
from pathlib import Path
from typing import Any

import megatron_models as models
import pytest
import safetensors.torch
import torch
import transformers
from megatron_models import Layout

import epload
from epload.mapping.megatron import names
from epload.saving import megatron, model_reader
from support import pretrained, ranks
from support.jobs import Job, Meeting, run
from support.small_syncs import receiving, sending, take

IDS = torch.tensor([[5, 9, 100, 322, 7, 1, 2, 3]])
LAYOUTS = [
    ("llama", 2, Layout(tp=2)),
    ("llama", 4, Layout(pp=4)),
    ("qwen2", 4, Layout(tp=2, pp=2)),
    ("qwen3", 2, Layout(tp=2)),
    ("qwen3", 8, Layout(tp=8)),
    ("qwen3", 2, Layout(pp=2, vp=2)),
    ("qwen3_moe", 4, Layout(tp=2, pp=2, ep=2)),
    ("qwen3_moe", 4, Layout(tp=2, ep=2, etp=2)),
    ("mixtral", 4, Layout(tp=2, ep=4)),
    ("deepseek_v3", 4, Layout(tp=2, pp=2, ep=2)),
]
NAMES = [f"{family} {layout}" for family, _, layout in LAYOUTS]


FORWARD = [
    ("llama", 2, Layout(tp=2)),
    ("qwen2", 4, Layout(tp=4)),
    ("qwen3", 2, Layout(tp=2)),
    ("qwen3", 8, Layout(tp=8)),
]
"""Layouts whose forward pass runs on CPU; those of experts need megatron-core 0.19."""
if metadata.version("megatron-core") >= "0.19":
    FORWARD += [
        ("qwen3_moe", 4, Layout(tp=2, ep=2, etp=2)),
        ("mixtral", 2, Layout(tp=2, ep=2)),
        ("deepseek_v3", 2, Layout(ep=2)),
    ]


def load_and_save(rank: int, family: str, layout: Layout, folder: Path, source: str = "") -> list[str]:
    """``source``: the folder in ``folder`` that is loaded; empty for that which has the expected values."""
    chunks = models.build(family, layout)
    epload.load(chunks, folder / source, timeout=60, progress=False)
    epload.save(chunks, folder / "saved", names_from=folder / source, timeout=60)
    return models.differences(chunks, family, models.read_checkpoint(folder))


@pytest.mark.parametrize(("family", "world", "layout"), LAYOUTS, ids=NAMES)
def test_each_rank_has_its_part_and_a_save_is_the_checkpoint_again(
    family: str, world: int, layout: Layout, tmp_path: Path
) -> None:
    state = models.write_checkpoint(family, tmp_path)
    for wrong in ranks.run(world, load_and_save, family, layout, tmp_path):
        assert wrong == []
    saved = models.read_checkpoint(tmp_path / "saved")
    assert saved.keys() == state.keys()
    assert [name for name in saved if not torch.equal(saved[name], state[name])] == []
    reference, again = (load_transformers(path) for path in (tmp_path, tmp_path / "saved"))
    assert torch.equal(reference(IDS).logits, again(IDS).logits)


def load_transformers(path: Path) -> Any:
    model, info = transformers.AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["mismatched_keys"]
    assert next(model.parameters()).dtype == torch.float32
    return model.eval()


def load_and_run(rank: int, family: str, layout: Layout, folder: Path) -> Any:
    chunks = models.build(family, layout)
    epload.load(chunks[0], folder, timeout=60, progress=False)
    return models.logits(chunks[0], IDS).numpy()


@pytest.mark.parametrize(("family", "world", "layout"), FORWARD)
def test_megatron_computes_the_logits_of_transformers(family: str, world: int, layout: Layout, tmp_path: Path) -> None:
    """The layout of fused weights is that of Megatron's own forward pass, whatever the tests and epload believe."""
    models.write_checkpoint(family, tmp_path)
    wanted = load_transformers(tmp_path)(IDS).logits
    for logits in ranks.run(world, load_and_run, family, layout, tmp_path):
        assert (torch.from_numpy(logits) - wanted).abs().max() <= 1e-5 * wanted.abs().max()


def load_in_modes(rank: int, layout: Layout, folder: Path) -> list[str]:
    """Loads with each kind of readers, and proves it; then saves in the background, in another dtype and as changes."""
    chunks, wrong = models.build("deepseek_v3", layout), []
    with torch.no_grad():
        for readers in ("one", "per_node", "partitioned", "every"):
            for chunk in chunks:
                for tensor in [*chunk.parameters(), *(b for name, b in chunk.named_buffers() if "expert_bias" in name)]:
                    tensor.fill_(-7.5)
            epload.load(chunks, folder, readers=readers, verify=True, timeout=60, progress=False)
            wrong += models.differences(chunks, "deepseek_v3", models.read_checkpoint(folder))
        pending = epload.save_async(chunks, folder / "narrow", names_from=folder, dtype=torch.bfloat16, timeout=60)
        for chunk in chunks:
            for parameter in chunk.parameters():
                parameter.mul_(2)
        pending.wait()
        epload.save(chunks, folder / "changes", names_from=folder, base=folder, timeout=60)
    return wrong


def test_all_readers_background_saves_dtypes_and_changes(tmp_path: Path) -> None:
    state = models.write_checkpoint("deepseek_v3", tmp_path)
    assert ranks.run(4, load_in_modes, Layout(tp=2, pp=2, ep=2), tmp_path) == [[]] * 4
    narrow = models.read_checkpoint(tmp_path / "narrow")
    for name, tensor in state.items():
        assert torch.equal(narrow[name], tensor if "e_score" in name else tensor.bfloat16()), name
    changed = {name: torch.empty_like(tensor) for name, tensor in state.items()}
    epload.load_state(changed, tmp_path / "changes", progress=False)
    for name, tensor in state.items():
        assert torch.equal(changed[name], tensor if "e_score" in name else tensor * 2), name


def load_one_by_one(rank: int, layout: Layout, folder: Path) -> list[str]:
    models.SIZES["num_hidden_layers"] = 8
    chunks = models.build("llama", layout)
    with epload.HierarchicalLoader(timeout=60, progress=False) as loader:
        for chunk in chunks:
            loader.load(chunk, folder, strict=False)
    return models.differences(chunks, "llama", models.read_checkpoint(folder))


def test_a_plan_for_one_chunk_is_not_taken_for_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Most chunks of a rank have the same names and shapes, and other layers."""
    monkeypatch.setitem(models.SIZES, "num_hidden_layers", 8)
    models.write_checkpoint("llama", tmp_path)
    assert ranks.run(2, load_one_by_one, Layout(pp=2, vp=4), tmp_path) == [[], []]


@pytest.mark.parametrize("layout", [Layout(tp=2, pp=2), Layout(pp=2, vp=2), Layout(tp=4)], ids=str)
def test_a_head_that_is_the_embedding_may_be_in_the_checkpoint(layout: Layout, tmp_path: Path) -> None:
    """Published checkpoints of some small models have both. A save has one."""
    state = models.write_checkpoint("qwen2", tmp_path)
    both = state | {"lm_head.weight": state["model.embed_tokens.weight"].clone()}
    safetensors.torch.save_file(both, tmp_path / "model.safetensors", {"format": "pt"})
    assert ranks.run(4, load_and_save, "qwen2", layout, tmp_path) == [[]] * 4
    assert models.read_checkpoint(tmp_path / "saved").keys() == state.keys()


def test_fp8_checkpoints_are_dequantized_and_saved_wide(tmp_path: Path) -> None:
    """Published checkpoints of DeepSeek-V3 have fp8 weights with a scale for each block; here blocks are 16 x 16."""
    models.write_checkpoint("deepseek_v3", tmp_path)
    wide = models.quantize_checkpoint(tmp_path, tmp_path / "fp8", block=16)
    layout = Layout(tp=2, pp=2, ep=2)
    assert ranks.run(4, load_and_save, "deepseek_v3", layout, tmp_path, "fp8") == [[]] * 4
    saved = models.read_checkpoint(tmp_path / "saved")
    assert [name for name in saved if not torch.equal(saved[name], wide[name])] == []
    assert "quantization_config" not in json.loads((tmp_path / "saved" / "config.json").read_text())


def load_with_names(rank: int, folder: Path) -> list[str]:
    names.MODEL["decoder.final_layernorm.weight"] += (("model.last_norm.weight",),)
    chunks = models.build("llama", Layout())
    state = models.read_checkpoint(folder)
    renamed = state | {"model.last_norm.weight": state["model.norm.weight"]}
    del renamed["model.norm.weight"]
    epload.load(chunks, renamed, timeout=60, progress=False)
    return models.differences(chunks, "llama", state)


def test_names_can_be_added(tmp_path: Path) -> None:
    models.write_checkpoint("llama", tmp_path)
    assert ranks.run(1, load_with_names, tmp_path) == [[]]


# ---- ranks send versions to other jobs: to a plain model of transformers, and to one that FSDP2 shards ----


VERSIONS = 3


def send(rank: int, meeting: Meeting, family: str, layout: Layout, folder: Path, delta: str) -> tuple[int, list[int]]:
    """Returns how often the model was walked and Megatron was asked for its shards, and the bytes that each rank sent."""
    chunks, nbytes, calls = models.build(family, layout), [], []
    for module, name in ((model_reader, "collect"), (megatron, "read_shards")):
        count_calls(module, name, calls)
    with sending(meeting, chunks, 2, names_from=folder / "1", delta=delta, only=without_prediction) as sender:
        for version in range(1, VERSIONS + 1):
            epload.load(chunks, folder / str(version), timeout=60, progress=False)
            nbytes.append(sender.send_weights(version).phases["read"].nbytes)
    return len(calls), nbytes


def count_calls(module: Any, name: str, calls: list[str]) -> None:
    function = getattr(module, name)

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(name)
        return function(*args, **kwargs)

    setattr(module, name, counted)


def without_prediction(name: str) -> bool:
    """Leaves out DeepSeek's layer for multi-token prediction, for which transformers has no place."""
    return not name.startswith("model.layers.4.")


def receive(rank: int, meeting: Meeting, folder: Path, fsdp: bool) -> None:
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder / "1")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    if fsdp:
        pretrained.fsdp(model, shard=2)
    with receiving(meeting, model) as receiver:
        for version in range(1, VERSIONS + 1):
            take(receiver, version)
            wanted = transformers.AutoModelForCausalLM.from_pretrained(folder / str(version)).state_dict()
            for name, tensor in model.state_dict().items():
                full = tensor.full_tensor() if fsdp else tensor
                assert torch.equal(full, wanted[name]), f"{name} of version {version}"


@pytest.mark.parametrize(
    ("family", "world", "layout", "fsdp", "delta"),
    [
        ("qwen3", 4, Layout(tp=2), False, "auto"),
        ("qwen2", 4, Layout(tp=2, pp=2), True, "off"),
        ("qwen3_moe", 4, Layout(tp=2, pp=2, ep=2), True, "off"),
        ("mixtral", 4, Layout(tp=2, ep=2, etp=2), False, "off"),
        ("deepseek_v3", 4, Layout(tp=2, pp=2, ep=2), False, "off"),
    ],
    ids=["dense, two replicas", "tied, stages", "experts, stages", "experts over all ranks", "latent attention"],
)
def test_versions_arrive(family: str, world: int, layout: Layout, fsdp: bool, delta: str, tmp_path: Path) -> None:
    for version in range(1, VERSIONS + 1):
        state = models.write_checkpoint(family, tmp_path / str(version), seed=version)
    receivers = [Job(2, receive, (tmp_path, True))] if fsdp else [Job(1, receive, (tmp_path, False)) for _ in range(2)]
    sent, *_ = run([Job(world, send, (family, layout, tmp_path, delta)), *receivers])
    assert [calls for calls, _ in sent] == [2] * world  # later versions cost no more planning than an FSDP2 model's
    whole = sum(tensor.nbytes for name, tensor in state.items() if without_prediction(name))
    assert whole <= sum(nbytes[0] for _, nbytes in sent) < 1.05 * whole  # each element by one of the ranks that have it
    if layout.pp == 1:
        assert max(nbytes[0] for _, nbytes in sent) < 1.2 * whole / world
