"""VeOmni's drop-in where a model converts its checkpoint's tensors, renames them, or ties its embeddings."""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import epload
from epload.checkpoint.base import Checkpoint
from epload.compat import veomni
from epload.compat.converted import ConvertedCheckpoint
from epload.core.pieces import Piece
from epload.errors import CheckpointError
from support import ranks
from support.gather import full_state

LAYERS, EXPERTS, WIDTH, INNER, VOCAB = 3, 5, 7, 3, 11


def numbers(*shape: int, start: int = 0) -> Tensor:
    """Every element unique."""
    count = torch.Size(shape).numel()
    return (torch.arange(count, dtype=torch.float32) + 1 + 1000 * start).reshape(shape)


class FuseExperts:
    """Stacks experts that come one by one, and puts gates and ups beside each other; keeps what it waits for."""

    pattern = re.compile(r"^(.*\.experts)\.(\d+)\.(gate|up|down)\.weight$")

    def __init__(self, count: int) -> None:
        self.count = count
        self.waiting: dict[tuple[str, str], dict[int, Tensor]] = {}
        self.stacked: dict[str, dict[str, Tensor]] = {}
        self.given: list[weakref.ref[Tensor]] = []
        self.most = 0

    def can_handle(self, name: str) -> bool:
        return bool(self.pattern.match(name))

    def convert(self, name: str, tensor: Tensor) -> Any:
        match = self.pattern.match(name)
        assert match is not None
        path, kind = match[1], match[3]
        found = self.waiting.setdefault((path, kind), {})
        found[int(match[2])] = tensor
        if len(found) < self.count:
            return None
        whole = torch.stack([found[i] for i in range(self.count)])
        del self.waiting[path, kind]
        if kind == "down":
            return self.result(f"{path}.down", whole)
        parts = self.stacked.setdefault(path, {})
        parts[kind] = whole
        if len(parts) < 2:
            return None
        del self.stacked[path]
        return self.result(f"{path}.gate_up", torch.cat([parts["gate"], parts["up"]], dim=1))

    def result(self, name: str, tensor: Tensor) -> Any:
        self.given.append(weakref.ref(tensor))
        self.most = max(self.most, sum(made() is not None for made in self.given))
        return SimpleNamespace(name=name, tensor=tensor)

    def finalize(self) -> list[Any]:
        if self.waiting or self.stacked:
            raise RuntimeError(f"incomplete: {sorted(self.waiting)} {sorted(self.stacked)}")
        return []


class Scaled(FuseExperts):
    """Also multiplies int8 weights by their scales, which come in any order; emits what is left over at the end."""

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self.pairs: dict[str, dict[str, Tensor]] = {}

    def can_handle(self, name: str) -> bool:
        return super().can_handle(name) or name.endswith(".scale")

    def can_handle_tensor(self, name: str, tensor: Tensor) -> bool:
        return tensor.dtype == torch.int8

    def convert(self, name: str, tensor: Tensor) -> Any:
        if not name.endswith(".scale") and tensor.dtype != torch.int8:
            return super().convert(name, tensor)
        path, _, leaf = name.rpartition(".")
        pair = self.pairs.setdefault(path, {})
        pair[leaf] = tensor
        if len(pair) < 2:
            return None
        del self.pairs[path]
        return SimpleNamespace(name=f"{path}.weight", tensor=pair["weight"].float() * pair["scale"])

    def finalize(self) -> list[Any]:
        return [
            *super().finalize(),
            *(
                SimpleNamespace(name=f"{path}.{leaf}", tensor=t)
                for path, p in self.pairs.items()
                for leaf, t in p.items()
            ),
        ]


class NeedsData(FuseExperts):
    """Looks at values, which meta tensors do not have."""

    def convert(self, name: str, tensor: Tensor) -> Any:
        assert float(tensor.sum()) > 0
        return super().convert(name, tensor)


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_up = nn.Parameter(torch.zeros(EXPERTS, 2 * INNER, WIDTH))
        self.down = nn.Parameter(torch.zeros(EXPERTS, WIDTH, INNER))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.Linear(WIDTH, WIDTH, bias=False)
        self.experts = Experts()


class Model(nn.Module):
    """With an initialization, as VeOmni's models have: what is not loaded would be filled by it."""

    converter: type[FuseExperts] = FuseExperts

    def __init__(self, tie: bool | None = None) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.config = SimpleNamespace() if tie is None else SimpleNamespace(tie_word_embeddings=tie)

    @staticmethod
    def _create_checkpoint_tensor_converter(model: Model) -> FuseExperts:
        return model.converter(EXPERTS)

    def get_input_embeddings(self) -> nn.Module:
        return self.embed

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def _init_weights(self, module: nn.Module) -> None:
        for parameter in module.parameters(recurse=False):
            nn.init.constant_(parameter, -1)


def store(folder: Path, **left_out: bool) -> dict[str, Tensor]:
    """Experts one by one, in two files, so that those of a layer are in both; returns what is stored."""
    tensors = {"embed.weight": numbers(VOCAB, WIDTH), "head.weight": numbers(VOCAB, WIDTH, start=1)}
    for layer in range(LAYERS):
        at = f"layers.{layer}"
        tensors[f"{at}.norm.weight"] = numbers(WIDTH, WIDTH, start=10 + layer)
        for expert in range(EXPERTS):
            for i, (kind, shape) in enumerate(
                {"gate": (INNER, WIDTH), "up": (INNER, WIDTH), "down": (WIDTH, INNER)}.items()
            ):
                start = 100 * (layer + 1) + 10 * expert + i
                tensors[f"{at}.experts.{expert}.{kind}.weight"] = numbers(*shape, start=start)
    tensors = {name: tensor for name, tensor in tensors.items() if not left_out.get(name.replace(".", "_"))}
    write(folder, tensors)
    return tensors


def write(folder: Path, tensors: dict[str, Tensor]) -> None:
    names = list(tensors)
    for number in range(2):
        part = {name: tensors[name].contiguous() for name in names[number::2]}
        save_file(part, folder / f"model-{number}.safetensors")


def expected(stored: dict[str, Tensor]) -> dict[str, Tensor]:
    """The model's tensors, put together by hand."""
    made = {name: tensor for name, tensor in stored.items() if ".experts." not in name}
    for layer in range(LAYERS):
        at = f"layers.{layer}.experts"

        def of(kind: str, at: str = at) -> list[Tensor]:
            return [stored[f"{at}.{expert}.{kind}.weight"] for expert in range(EXPERTS)]

        made[f"{at}.gate_up"] = torch.stack([torch.cat([g, u]) for g, u in zip(of("gate"), of("up"), strict=True)])
        made[f"{at}.down"] = torch.stack(of("down"))
    return made


def on_meta(make: Callable[[], nn.Module]) -> Any:
    with torch.device("meta"):
        return make()


def sharded(model: Any) -> Any:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def differ(state: dict[str, Tensor], values: dict[str, Tensor]) -> list[str]:
    """Names of the model's tensors that are not what they should be, bit for bit."""
    return [
        name
        for name, tensor in state.items()
        if tensor.dtype != values[name].dtype or not torch.equal(tensor, values[name])
    ]


def error_of(action: Callable[[], Any]) -> str:
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def fine(by_rank: Sequence[list[str]]) -> None:
    assert by_rank == [[]] * len(by_rank), by_rank


# ---- converters ----


def _fused(rank: int, folder: Path, options: dict[str, Any]) -> list[str]:
    model = sharded(on_meta(Model))
    path = folder if rank == 0 or options.get("readers", "one") != "one" else folder / "only rank 0 has it"
    veomni.rank0_load_and_broadcast_weights(model, str(path), "cpu", **options)
    return differ(full_state(model), expected(torch.load(folder / "stored.pt")))


@pytest.mark.parametrize(
    "options", [{}, {"verify": "full"}, {"readers": "partitioned"}, {"bucket_bytes": 4096}], ids=str
)
def test_a_models_converter_makes_what_is_loaded(tmp_path: Path, options: dict[str, Any]) -> None:
    torch.save(store(tmp_path), tmp_path / "stored.pt")
    fine(ranks.run(3, _fused, tmp_path, options))


def _incomplete(rank: int, folder: Path) -> list[str]:
    said = []
    model = sharded(on_meta(Model))
    errors: list[Any] = [None] * dist.get_world_size()
    mine = error_of(lambda: veomni.rank0_load_and_broadcast_weights(model, str(folder), "cpu"))
    dist.all_gather_object(errors, mine)
    if (
        len(set(errors)) > 1
        or "converter FuseExperts failed after the last tensor: RuntimeError: incomplete" not in mine
    ):
        said.append(str(errors))
    if not mine.startswith("CheckpointError") or any(not p.is_meta for p in model.parameters()):
        said.append("something was moved")
    return said


def test_a_checkpoint_that_lacks_an_expert_is_an_error_on_every_rank(tmp_path: Path) -> None:
    store(tmp_path, layers_1_experts_3_up_weight=True)
    fine(ranks.run(2, _incomplete, tmp_path))


def _odd_converters(rank: int, folder: Path) -> list[str]:
    said = []
    for converter, text in (
        (lambda model: SimpleNamespace(convert=1), "expected a converter with can_handle, got SimpleNamespace"),
        ("name", "_create_checkpoint_tensor_converter to be a function, got 'name'"),
    ):
        model = sharded(on_meta(Model))
        model._create_checkpoint_tensor_converter = converter
        error = error_of(lambda model=model: veomni.rank0_load_and_broadcast_weights(model, str(folder), "cpu"))
        if text not in error or not error.startswith("TypeError"):
            said.append(error)
    return said


def test_what_is_no_converter_is_refused_on_every_rank(tmp_path: Path) -> None:
    store(tmp_path)
    fine(ranks.run(2, _odd_converters, tmp_path))


def _renamed(rank: int, folder: Path) -> list[str]:
    """As the original: the first pattern that is found, and groups in what replaces it are left out."""
    model = sharded(on_meta(Model))
    model._checkpoint_conversion_mapping = {r"^wrapped\.": "^(?!layers)", "embed": "never"}
    veomni.rank0_load_and_broadcast_weights(model, str(folder), "cpu")
    return differ(full_state(model), expected(torch.load(folder / "stored.pt")))


def test_names_are_renamed_before_they_are_converted(tmp_path: Path) -> None:
    stored = store(tmp_path)
    write(tmp_path, {f"wrapped.{name}": tensor for name, tensor in stored.items()})
    torch.save(stored, tmp_path / "stored.pt")
    fine(ranks.run(2, _renamed, tmp_path))


# ---- the source by itself ----


def converted(folder: Path, kind: type[FuseExperts] = FuseExperts) -> tuple[ConvertedCheckpoint, list[FuseExperts]]:
    made: list[FuseExperts] = []

    def make() -> FuseExperts:
        made.append(kind(EXPERTS))
        return made[-1]

    return ConvertedCheckpoint(folder, make, lambda name: name), made


def read(source: Checkpoint, name: str) -> Tensor:
    """In two pieces, of which the second starts within an element."""
    manifest = source.manifest
    number = manifest.names.index(name)
    nbytes = manifest.nbytes_of()[number]
    raw = torch.zeros(nbytes + 3, dtype=torch.uint8)
    source.fill(raw, [Piece(number, 0, 3, 2)])
    source.fill(raw, [Piece(number, 2, 5, nbytes - 2)])
    return raw[3:].clone().view(manifest.dtypes[number]).reshape(manifest.shapes[number])


def test_one_pass_and_one_tensor_at_a_time(tmp_path: Path) -> None:
    values = expected(store(tmp_path))
    source, made = converted(tmp_path)
    assert set(source.manifest.names) == set(values)
    assert (len(made), source.passes) == (1, 0)  # the first of meta tensors
    assert all(torch.equal(read(source, name), values[name]) for name in source.manifest.names)
    assert (len(made), source.passes) == (2, 1)
    assert made[1].most <= 2  # the one that is read, and the next
    first = next(name for name in source.manifest.names if name.endswith("gate_up"))
    assert torch.equal(read(source, first), values[first])
    assert source.passes == 2  # back at the start
    source.close()
    assert torch.equal(read(source, first), values[first])


def test_a_converter_that_computes_values_and_emits_at_the_end(tmp_path: Path) -> None:
    stored = store(tmp_path)
    weight, scale = torch.arange(-50, 49, dtype=torch.int8).reshape(9, 11), torch.linspace(0.1, 0.9, 9).reshape(9, 1)
    alone = torch.arange(6, dtype=torch.float32)
    write(tmp_path, {"z.scale": scale, **stored, "z.weight": weight, "left.scale": alone})
    source, _ = converted(tmp_path, Scaled)
    values = expected(stored) | {"z.weight": weight.float() * scale, "left.scale": alone}
    assert set(source.manifest.names) == set(values)
    assert all(torch.equal(read(source, name), value) for name, value in values.items())


def test_a_converter_that_needs_data_is_run_at_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    values = expected(store(tmp_path))
    source, _ = converted(tmp_path, NeedsData)
    assert all(torch.equal(read(source, name), value) for name, value in values.items())
    assert "NeedsData cannot work on meta tensors" in caplog.text
    assert source.passes == 1


def test_what_a_converter_does_wrong_is_told(tmp_path: Path) -> None:
    store(tmp_path)

    class Same(FuseExperts):
        def result(self, name: str, tensor: Tensor) -> Any:
            return super().result("embed.weight", tensor)

    with pytest.raises(CheckpointError, match=r"both embed.weight and .* are converted to embed.weight"):
        converted(tmp_path, Same)[0].prepare()

    class Fickle(FuseExperts):
        def result(self, name: str, tensor: Tensor) -> Any:
            return super().result(name, tensor if tensor.is_meta else tensor.double())

    source, _ = converted(tmp_path, Fickle)
    with pytest.raises(CheckpointError, match=r"float32 in its first pass, but .* torch.float64 in a later one"):
        read(source, "layers.0.experts.down")
    with pytest.raises(CheckpointError, match="no checkpoint at"):
        converted(tmp_path / "absent")[0].prepare()


# ---- ties ----


def _tied(rank: int, folder: Path, both: bool) -> list[str]:
    said = []
    values = expected(torch.load(folder / "stored.pt"))
    tied = values | {"head.weight": values["embed.weight"]}
    for tie in (True, False, None):
        if tie is not True and not both:
            continue  # the head would be initialized
        model = sharded(on_meta(partial(Model, tie)))
        veomni.rank0_load_and_broadcast_weights(model, str(folder), "cpu")
        said += [f"tie={tie}, two of FSDP's: {name}" for name in differ(full_state(model), tied if tie else values)]
        model = on_meta(partial(Model, tie))
        veomni.rank0_load_and_broadcast_weights(model, str(folder), "cpu")
        said += [f"tie={tie}, plain: {name}" for name in differ(full_state(model), tied if tie else values)]
        if (model.head.weight is model.embed.weight) != bool(tie):
            said.append(f"tie={tie}: not what the config asks for")
    return said


@pytest.mark.parametrize("both", [True, False])
def test_the_embeddings_are_tied_if_the_config_says_so(tmp_path: Path, both: bool) -> None:
    """``both``: the checkpoint has an output embedding too, of other values."""
    stored = store(tmp_path, head_weight=not both)
    torch.save(stored, tmp_path / "stored.pt")
    fine(ranks.run(3, _tied, tmp_path, both))


def _text_config(rank: int, folder: Path) -> list[str]:
    """Either side may deny it, and one has to say it; a model that has no head has nothing to tie."""
    said = []
    for outer, inner, wanted in ((True, None, True), (None, True, True), (True, False, False), (False, True, False)):
        model = on_meta(Model)
        text = SimpleNamespace() if inner is None else SimpleNamespace(tie_word_embeddings=inner)
        model.config = SimpleNamespace(get_text_config=lambda decoder, text=text: text)
        if outer is not None:
            model.config.tie_word_embeddings = outer
        veomni.rank0_load_and_broadcast_weights(model, str(folder), "cpu")
        if (model.head.weight is model.embed.weight) != wanted:
            said.append(f"outer {outer}, inner {inner}")
    model = on_meta(partial(Model, True))
    model.get_output_embeddings = lambda: None
    veomni.rank0_load_and_broadcast_weights(model, str(folder), "cpu")
    model = on_meta(partial(Model, True))
    del model.head.weight
    error = error_of(lambda: veomni.rank0_load_and_broadcast_weights(model, str(folder), "cpu"))
    if "but its output embedding cannot be found" not in error or any(not p.is_meta for p in model.parameters()):
        said.append(error)
    return said


def test_whether_a_composite_config_ties(tmp_path: Path) -> None:
    store(tmp_path)
    fine(ranks.run(1, _text_config, tmp_path))


# ---- VeOmni's own LoRA: the names of PEFT, and classes of its own ----


class Adapted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base_layer = nn.Linear(WIDTH, WIDTH, bias=False)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(WIDTH, 2, bias=False)})

    def reset_lora_parameters(self, name: str, init: bool) -> None:
        nn.init.constant_(self.lora_A[name].weight, 5)


def _own_lora(rank: int, folder: Path) -> list[str]:
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
    veomni.rank0_load_and_broadcast_weights(model, str(folder), "cpu", is_peft_model=True)
    values = expected(torch.load(folder / "stored.pt"))
    wanted = {}
    for name, value in values.items():
        if name.endswith("norm.weight"):
            name = name.replace(".weight", ".base_layer.weight")
            wanted[f"base_model.model.{name.replace('base_layer', 'lora_A.default')}"] = torch.full((2, WIDTH), 5.0)
        if ".experts." in name:
            name += ".base_layer.weight"
        wanted[f"base_model.model.{name}"] = value
    return differ(full_state(model), wanted)


def test_a_base_checkpoint_into_veomnis_own_lora(tmp_path: Path) -> None:
    stored = store(tmp_path)
    torch.save(stored, tmp_path / "stored.pt")
    fine(ranks.run(2, _own_lora, tmp_path))


def test_a_converter_is_one_for_epload_too(tmp_path: Path) -> None:
    """The same source, given to ``load`` itself."""
    values = expected(store(tmp_path))
    model = on_meta(Model)
    source, _ = converted(tmp_path)
    epload.load(model, source, progress=False)
    assert differ(full_state_alone(model), values) == []


def full_state_alone(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach() for name, tensor in model.state_dict().items()}
