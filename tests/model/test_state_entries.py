"""State-dict entries that are not the model's own storage are refused by name, and so are modules that load themselves."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import torch
from accelerate import cpu_offload
from accelerate.hooks import remove_hook_from_submodules
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType, fully_shard

import epload
from epload import Mapping, Topology
from epload.checkpoint.manifest import Manifest
from epload.mapping import Concatenate, Convert
from epload.saving.model_reader import ModelReader
from epload.sync.targets import ModelTarget
from support.checks import full_tensor, local_of
from support.failures import error_of
from support.findings import differing, must_be_refused, not_refused
from support.models import on_meta
from support.on_ranks import on_ranks


def loader(**options: Any) -> epload.HierarchicalLoader:
    topology = Topology.from_nodes([[0, 1], [2, 3]])
    return epload.HierarchicalLoader(topology, bucket_bytes=400, progress=False, timeout=60, **options)


class Fused(nn.Module):
    """Keeps one tensor, and shows three of it: copies, or views."""

    def __init__(self, views: bool = False, loads: bool = False) -> None:
        super().__init__()
        self.qkv = nn.Parameter(torch.rand(9, 5))
        self.out = nn.Linear(5, 3)
        self.views = views
        self.split = self._register_state_dict_hook(_split)
        if loads:
            self.register_load_state_dict_pre_hook(_fuse)


def _split(module: Fused, state: dict[str, Tensor], prefix: str, _: object) -> None:
    fused = state.pop(f"{prefix}qkv")
    for name, part in zip("qkv", fused.chunk(3), strict=True):
        state[f"{prefix}{name}"] = part if module.views else part.clone()


def _fuse(module: Fused, state: dict[str, Tensor], prefix: str, *_: object) -> None:
    if f"{prefix}q" in state:
        state[f"{prefix}qkv"] = torch.cat([state.pop(f"{prefix}{name}") for name in "qkv"])


class Net(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 5)
        self.layers = nn.ModuleList([nn.Linear(5, 5), Fused(**options)])


class Derived(nn.Module):
    """Shows a tensor that it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.rand(3))

    def _save_to_state_dict(self, destination: dict[str, Tensor], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}twice"] = self.w * 2


def values_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: torch.full_like(tensor, i + 1) for i, (name, tensor) in enumerate(model.state_dict().items())}


COPIES = "returns copies in its state dict, and filling a copy would not fill the model"
HOOK = "has a load_state_dict hook (_fuse), which does not run when tensors are filled in place"
REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "hook": (Net, f"layers.1 (Fused) {COPIES}: layers.1.q, layers.1.k, layers.1.v. Replace the module by"),
    "method": (lambda: nn.Sequential(Derived()), f"0 (Derived) {COPIES}: 0.twice. Replace the module by"),
    "the model itself": (Derived, f"the model (Derived) {COPIES}: twice. Call its own load_state_dict"),
    "load hook": (
        lambda: Net(views=True, loads=True),
        f"layers.1 (Fused) {HOOK}: layers.1.out.weight, layers.1.out.bias, ",
    ),
}


@on_ranks(4)
def test_a_module_that_cannot_be_filled_in_place_is_refused_by_name(rank: int) -> list[str]:
    return [f"{case}, {text}" for case in REFUSED for text in _refused_case(rank, *REFUSED[case])]


def _refused_case(rank: int, make: Callable[[], nn.Module], text: str) -> list[str]:
    problems = []
    for kind in ("with storage", "on meta", "sharded"):
        model = on_meta(make) if kind == "on meta" else make()
        if kind == "sharded":
            fully_shard(model)
        before = [local_of(p).detach().clone() for p in model.parameters()]
        state = values_of(make())
        for readers in ("one", "every"):
            given = state if rank == 0 or readers == "every" else None
            options = {"strict": False, "init_missing": lambda *_: None}
            error = error_of(lambda: loader(readers=readers).load(model, given, **options))  # noqa: B023
            if not error.startswith("ModelMismatch") or text not in error.replace("(FSDP", "("):
                problems.append(f"{kind}, {readers}: {error}")
        after = [local_of(p).detach() for p in model.parameters()]
        if any(
            p.is_meta != b.is_meta or (not p.is_meta and not p.equal(b)) for p, b in zip(after, before, strict=True)
        ):
            problems.append(f"{kind}: parameters have changed")
    return problems


@on_ranks(2)
def test_on_one_rank_only(rank: int) -> list[str]:
    """The other rank's model has no hook, and it raises the same."""
    model = Net()
    if rank == 0:
        model.layers[1].split.remove()
    state = values_of(Net()) if rank == 0 else None
    return not_refused(
        lambda: epload.load(model, state, progress=False, timeout=60), "ModelMismatch", f"layers.1 (Fused) {COPIES}"
    )


def test_entries_that_are_the_models_own_under_other_names_are_filled() -> None:
    for lost in (False, True):
        model: Any = on_meta(lambda: Net(views=True)) if lost else Net(views=True)
        state = values_of(Net())
        report = epload.load(model, state, progress=False, verify=True)
        assert report.tensors == len(state)
        assert model.layers[1].qkv.equal(torch.cat([state[f"layers.1.{name}"] for name in "qkv"]))


def test_saves_and_senders_read_copies_and_receivers_refuse_them(tmp_path: Path) -> None:
    model = Net(loads=True)
    epload.save(model, tmp_path / "c")
    assert differing(load_file(tmp_path / "c" / "model.safetensors"), model) == []
    ModelReader(model).read()
    with pytest.raises(epload.ModelMismatch, match=re.escape(HOOK)):
        ModelTarget(model, "auto", strict=True).holdings(Manifest((), (), (), ""))


class Translated(nn.Module):
    """Its state dict has other tensors than it has, as those of torchtitan's fused projections."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(5, 9, bias=False)
        self.register_state_dict_post_hook(_show_parts)
        self.register_load_state_dict_pre_hook(_take_parts)


def _show_parts(module: Translated, state: dict[str, Tensor], prefix: str, _: object) -> None:
    fused = state.pop(f"{prefix}inner.weight")
    parts = zip("qkv", full_tensor(fused).chunk(3), strict=True)
    state |= {f"{prefix}{name}.weight": part.clone() for name, part in parts}


def _take_parts(module: Translated, state: dict[str, Tensor], prefix: str, *_: object) -> None:
    state[f"{prefix}inner.weight"] = torch.cat([state.pop(f"{prefix}{name}.weight") for name in "qkv"])


def translated() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 5), Translated())


PARTS = Mapping(
    converts=(Convert(tuple(rf"1\.{name}\.weight" for name in "qkv"), ("1.inner.weight",), (Concatenate(0),)),)
)


@on_ranks(2)
def test_a_mapping_may_name_the_tensors_that_a_module_has_itself(rank: int, tmp_path: Path) -> list[str]:
    problems = []
    state = values_of(translated())
    reference = translated()
    reference.load_state_dict(state)
    for kind in ("with storage", "on meta", "sharded", "checkpointed"):
        model = on_meta(translated) if kind == "on meta" else translated()
        if kind == "checkpointed":  # wrappers that do not show in names
            model = nn.Sequential(*map(checkpoint_wrapper, model))
        if kind in ("sharded", "checkpointed"):
            fully_shard(model)
        for mapping, text in (("auto", "has a load_state_dict hook"), (Mapping(), "1 parameter missing")):
            load = partial(epload.load, model, state, mapping=mapping, progress=False)
            problems += not_refused(load, "ModelMismatch", text)
        epload.load(model, state, mapping=PARTS, progress=False)
        for name, parameter in model.named_parameters():
            name = name.replace("_checkpoint_wrapped_module.", "")
            if not torch.equal(full_tensor(parameter), reference.get_parameter(name)):
                problems.append(f"{kind}: {name} is {full_tensor(parameter)}")
        epload.save(model, tmp_path / kind, mapping=PARTS, names_from=state)
        saved = load_file(tmp_path / kind / "model.safetensors")
        problems += [f"{kind}: saved {name}" for name in differing(saved, state)]
    linear = nn.Sequential(checkpoint_wrapper(nn.Linear(5, 5)))
    epload.save(linear, tmp_path / "own names", mapping=Mapping())
    problems += set(load_file(tmp_path / "own names" / "model.safetensors")) ^ {"0.weight", "0.bias"}
    return problems


class Secretive(nn.Module):
    """A parameter that its state dict does not show."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(3))
        self.secret = nn.Parameter(torch.ones(2))

    def _save_to_state_dict(self, destination: dict[str, Tensor], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        del destination[f"{prefix}secret"]


def test_a_parameter_that_no_state_dict_shows_is_not_left_as_garbage() -> None:
    with pytest.raises(epload.ModelMismatch, match="fills 1 tensor on meta: secret"):
        epload.load(on_meta(Secretive), {"w": torch.zeros(3)}, progress=False)
    model = Secretive()
    epload.load(model, {"w": torch.zeros(3)}, progress=False)
    assert torch.equal(model.secret, torch.ones(2))
    model = on_meta(Secretive)
    epload.load(model, {"w": torch.zeros(3)}, progress=False, init_missing=lambda m, _, names: m.secret.data.fill_(4))
    assert torch.equal(model.secret, torch.full((2,), 4.0))


@on_ranks(4)
def test_fsdp1_is_refused_by_name(rank: int) -> None:
    for kind in (StateDictType.FULL_STATE_DICT, StateDictType.SHARDED_STATE_DICT):
        model = FullyShardedDataParallel(nn.Sequential(nn.Linear(8, 8)), device_id=torch.device("cpu"))
        before = [p.detach().clone() for p in model.parameters()]
        state = {"0.weight": torch.ones(8, 8), "0.bias": torch.ones(8)}
        source = state if rank == 0 else None
        with FullyShardedDataParallel.state_dict_type(model, kind):
            load = partial(loader().load, model, source, strict=False)
            must_be_refused(load, "ModelMismatch", "FSDP1", "fully_shard")
        assert all(map(torch.equal, before, model.parameters())), "parameters have changed"


def test_lazy_modules_are_refused_by_name() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.LazyLinear(3))
    with pytest.raises(epload.ModelMismatch, match="1 is a LazyLinear, whose parameters have no shape yet"):
        epload.load(model, {"0.weight": torch.ones(3, 2), "0.bias": torch.ones(3)}, strict=False, progress=False)


@pytest.mark.parametrize("kept", ["mine", torch.ones(4)], ids=["text", "a tensor"])
def test_extra_state_stays_as_it_is_and_is_not_saved(kept: Any, tmp_path: Path) -> None:
    class Extra(nn.Linear):
        def get_extra_state(self) -> Any:
            return kept

        def set_extra_state(self, state: Any) -> None:
            raise AssertionError

    model: Any = nn.Sequential(Extra(2, 3))
    report = epload.load(model, {"0.weight": torch.ones(3, 2), "0.bias": torch.ones(3)}, progress=False)
    assert report.tensors == 2
    assert torch.equal(model[0].weight, torch.ones(3, 2))
    epload.save(model, tmp_path / "saved")
    assert list(epload.Checkpoint.open(tmp_path / "saved").manifest.names) == ["0.weight", "0.bias"]
    report = epload.load(model, model.state_dict(), progress=False)
    assert report.ignored_keys == ["0._extra_state"]


def test_packed_weights_are_refused_by_name(tmp_path: Path) -> None:
    class Packed(nn.Linear):
        """Its weights are one entry of the state dict that is not a tensor, as those of dynamically quantized layers."""

        def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
            super()._save_to_state_dict(destination, prefix, keep_vars)
            destination[f"{prefix}packed"] = (destination.pop(f"{prefix}weight"), None)

    model = nn.Sequential(nn.Linear(2, 2), Packed(2, 3))
    text = re.escape("1.packed is a tuple in the state dict and not a tensor")
    with pytest.raises(epload.ModelMismatch, match=text):
        epload.load(model, model.state_dict(), progress=False)
    with pytest.raises(epload.ModelMismatch, match=text):
        epload.save(model, tmp_path / "c")


def test_methods_of_one_module_count_as_those_of_a_class(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(self: Any, state: dict[str, Tensor], prefix: str, *_: Any) -> None:
        self.weight.data.copy_(state[f"{prefix}weight"] * 2)

    def save(self: Any, destination: dict[str, Tensor], prefix: str, keep_vars: bool) -> None:
        destination[f"{prefix}weight"] = self.weight.detach() / 2

    values = {"0.weight": torch.ones(3, 2)}
    for method in ("load_state_dict", "_load_from_state_dict"):
        model: Any = nn.Sequential(nn.Linear(2, 3, bias=False))
        setattr(model[0], method, MethodType(load, model[0]))
        with pytest.raises(epload.ModelMismatch, match=re.escape(f"0 (Linear) has a {method} of its own")):
            epload.load(model, values, progress=False)
    model = nn.Sequential(nn.Linear(2, 3, bias=False))
    model[0]._save_to_state_dict = MethodType(save, model[0])
    epload.save(model, tmp_path / "c")
    assert torch.equal(load_file(tmp_path / "c" / "model.safetensors")["0.weight"], model[0].weight / 2)
    monkeypatch.setattr(nn.Bilinear, "_load_from_state_dict", load)
    with pytest.raises(epload.ModelMismatch, match=r"0 \(Bilinear\) has a _load_from_state_dict of its own"):
        epload.load(
            nn.Sequential(nn.Bilinear(1, 1, 1)), {"0.weight": torch.ones(1, 1, 1)}, strict=False, progress=False
        )


def test_old_names_that_litgpt_renames_are_unexpected() -> None:
    """A load by torch renames and reorders them; this one must not leave the weights as they are with success."""

    def load(self: Any, state: dict[str, Tensor], prefix: str, *args: Any) -> None:
        if f"{prefix}old" in state:
            state[f"{prefix}weight"] = state.pop(f"{prefix}old").flip(0)
        nn.Linear._load_from_state_dict(self, state, prefix, *args)

    load.__module__ = "litgpt.model"
    model = nn.Sequential(type("Attention", (nn.Linear,), {"_load_from_state_dict": load})(2, 3, bias=False))
    values = torch.arange(6.0).view(3, 2)
    epload.load(model, {"0.weight": values}, progress=False)
    assert torch.equal(model[0].weight, values)
    with pytest.raises(epload.ModelMismatch, match=r"0\.old"):
        epload.load(model, {"0.old": values}, progress=False)


def test_weights_that_accelerate_keeps_elsewhere_are_refused(tmp_path: Path) -> None:
    """It would put the old weights back in the next forward pass."""
    values = {"0.weight": torch.ones(3, 2)}
    model = cpu_offload(nn.Sequential(nn.Linear(2, 3, bias=False)), execution_device="cpu")
    for call in (lambda: epload.load(model, values, progress=False), lambda: epload.save(model, tmp_path / "c")):
        with pytest.raises(epload.ModelMismatch, match="0 is offloaded by accelerate or diffusers: "):
            call()
    remove_hook_from_submodules(model)
    epload.load(model, values, progress=False)
    assert torch.equal(model(torch.ones(1, 2)), torch.full((1, 3), 2.0))


def test_partitions_of_zero_3_are_refused(tmp_path: Path) -> None:
    """DeepSpeed leaves parameters without elements, which would be saved so, and keeps the whole shape in an attribute."""
    model: Any = nn.Sequential(nn.Linear(2, 3, bias=False))
    whole, model[0].weight.ds_shape = model[0].weight.data, torch.Size((3, 2))
    model[0].weight.data = torch.empty(0)
    with pytest.raises(
        epload.ModelMismatch, match=r"0\.weight, of shape \[3, 2\], is partitioned .*GatheredParameters"
    ):
        epload.save(model, tmp_path / "c")
    model[0].weight.data = whole  # gathered
    epload.save(model, tmp_path / "c")
    assert torch.equal(load_file(tmp_path / "c" / "model.safetensors")["0.weight"], whole)
    with pytest.raises(epload.ModelMismatch, match=r"0\.weight, .* is partitioned .*load_checkpoint"):
        epload.load(model, {"0.weight": torch.ones(3, 2)}, progress=False)


def test_weights_without_memory_are_not_saved(tmp_path: Path) -> None:
    """A trainer frees the storage of what it has copied elsewhere."""
    model = nn.Sequential(nn.Linear(2, 3, bias=False))
    storage = model[0].weight.untyped_storage()
    storage.resize_(0)
    with pytest.raises(epload.ModelMismatch, match=r"0\.weight has no memory: its storage was freed"):
        epload.save(model, tmp_path / "c")
    assert not (tmp_path / "c").exists()
    storage.resize_(24)
    epload.save(model, tmp_path / "c")
