"""VeOmni's drop-in: its expert shards, converters, renames, ties and LoRA."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import epload
from epload import Checkpoint, CheckpointError, LoadOptions
from epload.core.pieces import Piece
from epload.integrations import veomni
from epload.integrations.veomni.converted import ConvertedCheckpoint
from support import veomni_models
from support.checks import as_bytes, full_tensor, local_of
from support.findings import differing, must_be_refused_by_all
from support.models import Mlp, mesh, on_meta
from support.on_ranks import on_ranks
from support.pretrained import build, small_llama
from support.shards import torch_chunk
from support.veomni_models import WIDTH, FuseExperts, Model, expected, sharded, store, write


def load(model: Any, path: Path, **options: Any) -> None:
    veomni.rank0_load_and_broadcast_weights(model, str(path), "cpu", **options)


# ---- VeOmni's plan has sharded the experts before FSDP ----


def planned(model: Any, on: DeviceMesh, names: Sequence[str]) -> Any:
    """Stands for VeOmni's ParallelPlan: the named parameters are this rank's experts, and FSDP cuts their next dim."""
    size = on["ep"].size()
    model._fqn2spec_info = {}
    for name, parameter in list(model.named_parameters()):
        cut = name in names
        model._fqn2spec_info[name] = SimpleNamespace(placement=Shard(0) if cut else Replicate(), para_mesh=on["ep"])
        if cut:
            path, _, leaf = name.rpartition(".")
            part = parameter.new_empty(parameter.shape[0] // size, *parameter.shape[1:])
            model.get_submodule(path).register_parameter(leaf, nn.Parameter(part))
    for path in dict.fromkeys(name.rpartition(".")[0] for name in names):
        fully_shard(model.get_submodule(path), mesh=on["fsdp"], shard_placement_fn=lambda parameter: Shard(1))
    return fully_shard(model, mesh=mesh(("all", 4)))


def save_qwen(folder: Path) -> None:
    torch.manual_seed(0)
    model = build("qwen3_moe")
    model.save_pretrained(folder / "model")
    torch.save(model.state_dict(), folder / "whole.pt")


@on_ranks(4, save_qwen)
def test_veomni_rank0_load_and_broadcast_weights(rank: int, tmp_path: Path) -> None:
    on, whole = mesh(("fsdp", 2), ("ep", 2)), build("qwen3_moe")
    whole.load_state_dict(torch.load(tmp_path / "whole.pt"))
    names = [n for n, _ in whole.named_parameters() if n.endswith(("experts.gate_up_proj", "experts.down_proj"))]
    path = str(tmp_path / "model" if rank == 0 else tmp_path / "not" / "here")
    model = planned(on_meta(lambda: build("qwen3_moe")), on, names)
    function, options = veomni.rank0_load_and_broadcast_weights, {"fqn_to_index_mapping": {}, "is_peft_model": False}
    function(model, path, "cpu", distribute_tensor, names, 20.0, adapter_path=None, **options)
    for name, tensor in whole.state_dict().items():
        if name in names:
            part = tensor.chunk(2)[rank % 2].chunk(2, 1)[rank // 2]
        else:
            part = torch_chunk(tensor, 4, 0)[rank]
        assert torch.equal(as_bytes(local_of(model.state_dict()[name])), as_bytes(part.contiguous())), name
    assert torch.equal(model.model.rotary_emb.inv_freq, whole.model.rotary_emb.inv_freq)
    again = partial(function, model, path, "cpu", adapter_path="x")
    must_be_refused_by_all(again, "expected adapter_path=None, got 'x'")


def save_without_up(folder: Path) -> None:
    torch.manual_seed(0)
    state = {n: t.clone() for n, t in small_llama().state_dict().items() if not n.endswith("up_proj.weight")}
    save_file(state | {"stray": torch.ones(1)}, folder / "odd.safetensors")


@on_ranks(4, save_without_up)
def test_veomni_what_the_checkpoint_lacks_is_initialized(rank: int, tmp_path: Path) -> None:
    """The original initializes what is missing and leaves out what is unexpected; a plain model cannot initialize."""
    config = peft.LoraConfig(r=2, target_modules=["q_proj"])
    model: Any = fully_shard(on_meta(lambda: peft.get_peft_model(small_llama(), config)), mesh=mesh(("all", 4)))
    load(model, tmp_path / "odd.safetensors", is_peft_model=True)
    state = {name: full_tensor(tensor) for name, tensor in model.state_dict().items()}
    file = load_file(tmp_path / "odd.safetensors")
    for name, value in state.items():
        source = name.removeprefix("base_model.model.").replace(".base_layer", "")
        assert torch.equal(value, file.get(source, value)), f"{name} is not the file's"
    layer = "base_model.model.model.layers.0"
    lora = f"{layer}.self_attn.q_proj.lora_"
    assert not state[f"{lora}B.default.weight"].any()
    for name in (f"{layer}.mlp.up_proj.weight", f"{lora}A.default.weight"):
        assert 0 < float(state[name].std()) < 1, f"{name} was not initialized"
    plain = fully_shard(on_meta(lambda: Mlp(7, 5, 3)), mesh=mesh(("all", 4)))
    text = "missing from the checkpoint: embed.weight"
    must_be_refused_by_all(lambda: load(plain, tmp_path / "odd.safetensors"), "ModelMismatch", text)


# ---- converters ----


def store_wrapped_too(folder: Path) -> None:
    (folder / "wrapped").mkdir()
    stored = store(folder)
    write(folder / "wrapped", {f"wrapped.{name}": tensor for name, tensor in stored.items()})


@on_ranks(3, store_wrapped_too)
def test_a_models_converter_makes_what_is_loaded(rank: int, tmp_path: Path) -> None:
    """Names are renamed before, like in the original: the first pattern that is found, and groups in what replaces it are
    left out."""
    values = expected(torch.load(tmp_path / "stored.tensors"))
    cases: list[tuple[str, dict[str, Any], dict[str, str]]] = [
        ("", {}, {}),
        ("", {"verify": True}, {}),
        ("", {"readers": "partitioned"}, {}),
        ("", {"options": LoadOptions(bucket_bytes=4096)}, {}),
        ("wrapped", {}, {r"^wrapped\.": "^(?!layers)", "embed": "never"}),
    ]
    for folder, options, renames in cases:
        model = sharded(on_meta(Model))
        model._checkpoint_conversion_mapping = renames
        reads = rank == 0 or options.get("readers", "one") != "one"
        load(model, tmp_path / folder if reads else tmp_path / "only rank 0 has it", **options)
        assert differing(model, values) == [], (options, renames)


def store_without_an_expert(folder: Path) -> None:
    store(folder, layers_1_experts_3_up_weight=True)


@on_ranks(2, store_without_an_expert)
def test_what_cannot_be_converted_is_refused_on_every_rank(rank: int, tmp_path: Path) -> None:
    for converter, *texts in (
        (None, "CheckpointError", "converter FuseExperts failed after the last tensor: RuntimeError: incomplete"),
        (
            lambda model: SimpleNamespace(convert=1),
            "TypeError", "expected a converter with can_handle, got SimpleNamespace",
        ),
        ("name", "TypeError", "_create_checkpoint_tensor_converter to be a function, got 'name'"),
    ):  # fmt: skip
        model = sharded(on_meta(Model))
        if converter is not None:
            model._create_checkpoint_tensor_converter = converter
        must_be_refused_by_all(partial(load, model, tmp_path), *texts)
        assert all(parameter.is_meta for parameter in model.parameters())


# ---- ties ----


def store_twice(folder: Path) -> None:
    for name, without_head in (("both", False), ("one", True)):
        (folder / name).mkdir()
        store(folder / name, head_weight=without_head)


@on_ranks(3, store_twice)
def test_the_embeddings_are_tied_if_the_config_says_so(rank: int, tmp_path: Path) -> None:
    """Also where the checkpoint has an output embedding too, of other values. Where it has none, it would be initialized."""
    for name, tie in (("both", True), ("both", False), ("both", None), ("one", True)):
        values = expected(torch.load(tmp_path / name / "stored.tensors"))
        if tie:
            values["head.weight"] = values["embed.weight"]
        of_two = sharded(on_meta(partial(Model, tie)))
        load(of_two, tmp_path / name)
        assert differing(of_two, values) == [], f"{name}, tie={tie}, two of FSDP's"
        model = on_meta(partial(Model, tie))
        load(model, tmp_path / name)
        assert differing(model, values) == [], f"{name}, tie={tie}, plain"
        assert (model.head.weight is model.embed.weight) == bool(tie), f"{name}, tie={tie}"


@on_ranks(1, store)
def test_whether_a_composite_config_ties(rank: int, tmp_path: Path) -> None:
    """Either side may deny it, and one has to say it; a model that has no head has nothing to tie."""
    for outer, inner, wanted in ((True, None, True), (None, True, True), (True, False, False), (False, True, False)):
        model = on_meta(Model)
        text = SimpleNamespace() if inner is None else SimpleNamespace(tie_word_embeddings=inner)
        model.config = SimpleNamespace(get_text_config=lambda decoder, text=text: text)
        if outer is not None:
            model.config.tie_word_embeddings = outer
        load(model, tmp_path)
        assert (model.head.weight is model.embed.weight) == wanted, f"outer {outer}, inner {inner}"
    model = on_meta(partial(Model, True))
    model.get_output_embeddings = lambda: None
    load(model, tmp_path)
    model = on_meta(partial(Model, True))
    del model.head.weight
    must_be_refused_by_all(lambda: load(model, tmp_path), "but its output embedding cannot be found")
    assert [name for name, parameter in model.named_parameters() if not parameter.is_meta] == []


# ---- VeOmni's own LoRA: the names of PEFT, and classes of its own ----


class Adapted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base_layer = nn.Linear(WIDTH, WIDTH, bias=False)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(WIDTH, 2, bias=False)})

    def reset_lora_parameters(self, name: str, init: bool) -> None:
        nn.init.constant_(self.lora_A[name].weight, 5)


@on_ranks(2, store)
def test_a_base_checkpoint_into_veomnis_own_lora(rank: int, tmp_path: Path) -> list[str]:
    def make() -> nn.Module:
        model = nn.Module()
        model.base_model = nn.Module()
        model.base_model.model = Model()
        for layer in model.base_model.model.layers:
            layer.norm = Adapted()
            for name in ("gate_up", "down"):
                holder = nn.Module()
                holder.base_layer = nn.Module()
                holder.base_layer._is_bare_param_holder = True
                holder.base_layer.weight = getattr(layer.experts, name)
                delattr(layer.experts, name)
                setattr(layer.experts, name, holder)
        model.get_base_model = lambda: model.base_model.model
        model._init_weights = Model._init_weights.__get__(model)
        return model

    model: Any = fully_shard(on_meta(make))
    load(model, tmp_path, is_peft_model=True)
    values = expected(torch.load(tmp_path / "stored.tensors"))
    wanted = {}
    for name, value in values.items():
        if name.endswith("norm.weight"):
            name = name.replace(".weight", ".base_layer.weight")
            wanted[f"base_model.model.{name.replace('base_layer', 'lora_A.default')}"] = torch.full((2, WIDTH), 5.0)
        if ".experts." in name:
            name += ".base_layer.weight"
        wanted[f"base_model.model.{name}"] = value
    return differing(model, wanted)


# ---- the checkpoint that a converter makes: one pass over the files, one tensor at a time ----


def converted(folder: Path, kind: type[FuseExperts] = FuseExperts) -> ConvertedCheckpoint:
    return ConvertedCheckpoint(folder, partial(kind, veomni_models.EXPERTS), lambda name: name)


def read(source: Checkpoint, name: str) -> Tensor:
    """Reads two pieces, of which the second starts within an element."""
    manifest = source.manifest
    number = manifest.names.index(name)
    nbytes = manifest.nbytes_of()[number]
    raw = torch.zeros(nbytes + 3, dtype=torch.uint8)
    source.fill(raw, [Piece(number, 0, 3, 2)])
    source.fill(raw, [Piece(number, 2, 5, nbytes - 2)])
    return raw[3:].clone().view(manifest.dtypes[number]).reshape(manifest.shapes[number])


def wrong_tensors(source: ConvertedCheckpoint, values: dict[str, Tensor]) -> list[str]:
    names = source.manifest.names
    return [*({*names} ^ {*values}), *(name for name in names if not torch.equal(read(source, name), values[name]))]


def test_one_pass_and_one_tensor_at_a_time(tmp_path: Path) -> None:
    values, made = expected(store(tmp_path)), list[FuseExperts]()

    class Counted(FuseExperts):
        def __init__(self, count: int) -> None:
            super().__init__(count)
            made.append(self)

    source = converted(tmp_path, Counted)
    source.prepare()
    passes = len(made)
    assert wrong_tensors(source, values) == []
    assert len(made) == passes + 1
    assert made[-1].most <= 2  # the one that is read, and the next
    first = next(name for name in source.manifest.names if name.endswith("gate_up"))
    assert torch.equal(read(source, first), values[first])
    source.close()
    assert torch.equal(read(source, first), values[first])


def test_a_converter_that_computes_values_and_emits_at_the_end(tmp_path: Path) -> None:
    stored = store(tmp_path)
    weight, scale = torch.arange(-50, 49, dtype=torch.int8).reshape(9, 11), torch.linspace(0.1, 0.9, 9).reshape(9, 1)
    alone = torch.arange(6, dtype=torch.float32)
    write(tmp_path, {"z.scale": scale, **stored, "z.weight": weight, "left.scale": alone})
    values = expected(stored) | {"z.weight": weight.float() * scale, "left.scale": alone}
    assert wrong_tensors(converted(tmp_path, veomni_models.Scaled), values) == []


def test_a_converter_may_look_at_values(tmp_path: Path) -> None:
    values = expected(store(tmp_path))
    assert wrong_tensors(converted(tmp_path, veomni_models.NeedsData), values) == []


def test_what_a_converter_does_wrong_is_named(tmp_path: Path) -> None:
    store(tmp_path)

    class Same(FuseExperts):
        def result(self, name: str, tensor: Tensor) -> Any:
            return super().result("embed.weight", tensor)

    with pytest.raises(CheckpointError, match=r"both embed.weight and .* are converted to embed.weight"):
        converted(tmp_path, Same).prepare()

    class Fickle(FuseExperts):
        def result(self, name: str, tensor: Tensor) -> Any:
            return super().result(name, tensor if tensor.is_meta else tensor.double())

    with pytest.raises(CheckpointError, match=r"float32 in its first pass, but .* torch.float64 in a later one"):
        read(converted(tmp_path, Fickle), "layers.0.experts.down")
    with pytest.raises(CheckpointError, match="no checkpoint at"):
        converted(tmp_path / "absent").prepare()


def test_a_converter_is_one_for_epload_too(tmp_path: Path) -> None:
    """The same source, given to ``load`` itself."""
    values = expected(store(tmp_path))
    model = on_meta(Model)
    epload.load(model, converted(tmp_path), progress=False)
    assert differing(model, values) == []


def test_what_is_logged_has_no_credentials(caplog: pytest.LogCaptureFixture) -> None:
    report = epload.LoadReport(missing_keys=["a"], unexpected_keys=["b"])
    with mock.patch.object(epload, "load", return_value=report):
        load(nn.Linear(2, 2), Path("s3://me:hunter2@bucket/a"))
    assert [text.partition(": ")[2] for text in caplog.messages] == ["1 missing keys, initialized: a", "1 unexpected keys: b"]
    assert "hunter2" not in caplog.text
