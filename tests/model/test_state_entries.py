"""State-dict entries that are not the model's own storage are refused by name, and so are modules that load themselves."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import MethodType, SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import cpu_offload
from accelerate.hooks import remove_hook_from_submodules
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType, fully_shard
from torch.distributed.tensor.debug import CommDebugMode

import epload
from epload import Mapping, Topology
from epload.checkpoint.manifest import Manifest
from epload.mapping import Concatenate, Convert
from epload.saving.model_reader import ModelReader
from epload.sync.targets import ModelTarget
from support.checks import full_tensor, local_of
from support.failures import error_of
from support.findings import differing, must_be_refused, must_be_refused_by_all
from support.models import on_meta
from support.on_ranks import on_ranks

load = partial(epload.load, progress=False)


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
def test_a_module_that_cannot_be_filled_in_place_is_refused_by_name(rank: int) -> None:
    for case, (make, text) in REFUSED.items():
        for kind in ("with storage", "on meta", "sharded"):
            model = on_meta(make) if kind == "on meta" else make()
            if kind == "sharded":
                fully_shard(model)
            before = [local_of(p).detach().clone() for p in model.parameters()]
            state = values_of(make())
            for readers in ("one", "every"):
                given = state if rank == 0 or readers == "every" else None
                options = {"strict": False, "init_missing": lambda *_: None}
                error = error_of(partial(loader(readers=readers).load, model, given, **options))
                assert error.startswith("ModelMismatch"), f"{case}, {kind}, {readers}: {error}"
                assert text in error.replace("(FSDP", "("), f"{case}, {kind}, {readers}: {error}"
            for parameter, old in zip(model.parameters(), before, strict=True):
                now = local_of(parameter).detach()
                assert now.is_meta if old.is_meta else now.equal(old), f"{case}, {kind}: parameters have changed"


@on_ranks(2)
def test_on_one_rank_only(rank: int) -> None:
    """The other rank's model has no hook, and it raises the same."""
    model = Net()
    if rank == 0:
        model.layers[1].split.remove()
    call = partial(load, model, values_of(Net()) if rank == 0 else None, timeout=60)
    must_be_refused_by_all(call, "ModelMismatch", f"layers.1 (Fused) {COPIES}")


def test_entries_that_are_the_models_own_under_other_names_are_filled() -> None:
    state = values_of(Net())
    for model in (on_meta(lambda: Net(views=True)), Net(views=True)):
        assert load(model, state, verify=True).tensors == len(state)
        assert model.layers[1].qkv.equal(torch.cat([state[f"layers.1.{name}"] for name in "qkv"]))


def test_saves_and_senders_read_copies_and_receivers_refuse_them(tmp_path: Path) -> None:
    model = Net(loads=True)
    epload.save(model, tmp_path / "c")
    assert differing(load_file(tmp_path / "c" / "model.safetensors"), model) == []
    ModelReader(model).read()
    target = ModelTarget(model, "auto", strict=True)
    must_be_refused(lambda: target.holdings(Manifest((), (), (), "")), "ModelMismatch", HOOK)


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


FUSE = Convert(tuple(rf"1\.{name}\.weight" for name in "qkv"), ("1.inner.weight",), (Concatenate(0),))
PARTS = Mapping(converts=(FUSE,))


@on_ranks(2)
def test_a_mapping_may_name_the_tensors_that_a_module_has_itself(rank: int, tmp_path: Path) -> None:
    state, reference = values_of(translated()), translated()
    reference.load_state_dict(state)
    for kind in ("with storage", "on meta", "sharded", "checkpointed"):
        model = on_meta(translated) if kind == "on meta" else translated()
        if kind == "checkpointed":  # wrappers that do not show in names
            model = nn.Sequential(*map(checkpoint_wrapper, model))
        if kind in ("sharded", "checkpointed"):
            fully_shard(model)
        for mapping, text in (("auto", "has a load_state_dict hook"), (Mapping(), "1 parameter missing")):
            must_be_refused(partial(load, model, state, mapping=mapping), "ModelMismatch", text)
        load(model, state, mapping=PARTS)
        own = {n.replace("_checkpoint_wrapped_module.", ""): p for n, p in model.named_parameters()}
        assert differing(own, dict(reference.named_parameters())) == [], kind
        epload.save(model, tmp_path / kind, mapping=PARTS, names_from=state)
        assert differing(load_file(tmp_path / kind / "model.safetensors"), state) == [], kind
        with CommDebugMode() as gathered:
            ModelReader(model, own_names=True).read()
        assert gathered.get_total_counts() == 0, "names need no elements"
    linear = nn.Sequential(checkpoint_wrapper(nn.Linear(5, 5)))
    epload.save(linear, tmp_path / "own names", mapping=Mapping())
    assert {*load_file(tmp_path / "own names" / "model.safetensors")} == {"0.weight", "0.bias"}


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
    state = {"w": torch.zeros(3)}
    must_be_refused(partial(load, on_meta(Secretive), state), "ModelMismatch", "fills 1 tensor on meta: secret")
    model = Secretive()
    load(model, state)
    assert torch.equal(model.secret, torch.ones(2))
    model = on_meta(Secretive)
    load(model, state, init_missing=lambda m, _, names: m.secret.data.fill_(4))
    assert torch.equal(model.secret, torch.full((2,), 4.0))


@on_ranks(4)
def test_fsdp1_is_refused_by_name(rank: int) -> None:
    source = {"0.weight": torch.ones(8, 8), "0.bias": torch.ones(8)} if rank == 0 else None
    for kind in (StateDictType.FULL_STATE_DICT, StateDictType.SHARDED_STATE_DICT):
        model = FullyShardedDataParallel(nn.Sequential(nn.Linear(8, 8)), device_id=torch.device("cpu"))
        before = [p.detach().clone() for p in model.parameters()]
        with FullyShardedDataParallel.state_dict_type(model, kind):
            call = partial(loader().load, model, source, strict=False)
            must_be_refused(call, "ModelMismatch", "FSDP1", "fully_shard")
        assert all(map(torch.equal, before, model.parameters())), "parameters have changed"


def test_lazy_modules_are_refused_by_name() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.LazyLinear(3))
    call = partial(load, model, {"0.weight": torch.ones(3, 2), "0.bias": torch.ones(3)}, strict=False)
    must_be_refused(call, "ModelMismatch", "1 is a LazyLinear, whose parameters have no shape yet")


@pytest.mark.parametrize("kept", ["mine", torch.ones(4)], ids=["text", "a tensor"])
def test_extra_state_stays_as_it_is_and_is_not_saved(kept: Any, tmp_path: Path) -> None:
    class Extra(nn.Linear):
        def get_extra_state(self) -> Any:
            return kept

        def set_extra_state(self, state: Any) -> None:
            raise AssertionError

    model: Any = nn.Sequential(Extra(2, 3))
    assert load(model, {"0.weight": torch.ones(3, 2), "0.bias": torch.ones(3)}).tensors == 2
    assert torch.equal(model[0].weight, torch.ones(3, 2))
    epload.save(model, tmp_path / "saved")
    assert list(epload.Checkpoint.open(tmp_path / "saved").manifest.names) == ["0.weight", "0.bias"]
    assert load(model, model.state_dict()).ignored_keys == ["0._extra_state"]


def test_packed_weights_are_refused_by_name(tmp_path: Path) -> None:
    class Packed(nn.Linear):
        """Its weights are one entry of the state dict that is not a tensor, as those of dynamically quantized layers."""

        def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
            super()._save_to_state_dict(destination, prefix, keep_vars)
            destination[f"{prefix}packed"] = (destination.pop(f"{prefix}weight"), None)

    model = nn.Sequential(nn.Linear(2, 2), Packed(2, 3))
    for call in (partial(load, model, model.state_dict()), partial(epload.save, model, tmp_path / "c")):
        must_be_refused(call, "ModelMismatch", "1.packed is a tuple in the state dict and not a tensor")


def linear() -> Any:
    return nn.Sequential(nn.Linear(2, 3, bias=False))


WEIGHT = {"0.weight": torch.ones(3, 2)}


def test_methods_of_one_module_count_as_those_of_a_class(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def load_twice(self: Any, state: dict[str, Tensor], prefix: str, *_: Any) -> None:
        self.weight.data.copy_(state[f"{prefix}weight"] * 2)

    def save_half(self: Any, destination: dict[str, Tensor], prefix: str, keep_vars: bool) -> None:
        destination[f"{prefix}weight"] = self.weight.detach() / 2

    for method in ("load_state_dict", "_load_from_state_dict"):
        model = linear()
        setattr(model[0], method, MethodType(load_twice, model[0]))
        must_be_refused(partial(load, model, WEIGHT), "ModelMismatch", f"0 (Linear) has a {method} of its own")
    model = linear()
    model[0]._save_to_state_dict = MethodType(save_half, model[0])
    epload.save(model, tmp_path / "c")
    assert torch.equal(load_file(tmp_path / "c" / "model.safetensors")["0.weight"], model[0].weight / 2)
    monkeypatch.setattr(nn.Bilinear, "_load_from_state_dict", load_twice)
    call = partial(load, nn.Sequential(nn.Bilinear(1, 1, 1)), {"0.weight": torch.ones(1, 1, 1)}, strict=False)
    must_be_refused(call, "ModelMismatch", "0 (Bilinear) has a _load_from_state_dict of its own")


def custom(*args: object) -> None:
    raise AssertionError("a load fills in place")


class Custom(nn.Linear):
    _load_from_state_dict = custom  # type: ignore[assignment]


def change_class(module: nn.Module) -> None:
    module.__class__ = Custom


@pytest.mark.parametrize("change", [lambda module: setattr(module, "_load_from_state_dict", custom), change_class])
def test_custom_loading_that_comes_between_two_loads_is_seen(change: Callable[[nn.Module], None]) -> None:
    model = linear()
    with epload.HierarchicalLoader(progress=False) as runs:
        for _ in range(2):
            runs.load(model, WEIGHT)
        change(model[0])
        must_be_refused(partial(runs.load, model, WEIGHT), "ModelMismatch", "_load_from_state_dict of its own")


def test_old_names_that_litgpt_renames_are_unexpected() -> None:
    """A load by torch renames and reorders them; this one must not leave the weights as they are with success."""

    def load_old(self: Any, state: dict[str, Tensor], prefix: str, *args: Any) -> None:
        if f"{prefix}old" in state:
            state[f"{prefix}weight"] = state.pop(f"{prefix}old").flip(0)
        nn.Linear._load_from_state_dict(self, state, prefix, *args)

    load_old.__module__ = "litgpt.model"
    model = nn.Sequential(type("Attention", (nn.Linear,), {"_load_from_state_dict": load_old})(2, 3, bias=False))
    values = torch.arange(6.0).view(3, 2)
    load(model, {"0.weight": values})
    assert torch.equal(model[0].weight, values)
    must_be_refused(partial(load, model, {"0.old": values}), "ModelMismatch", "0.old")


def test_weights_that_accelerate_keeps_elsewhere_are_refused(tmp_path: Path) -> None:
    """It would put the old weights back in the next forward pass."""
    model = cpu_offload(linear(), execution_device="cpu")
    for call in (partial(load, model, WEIGHT), partial(epload.save, model, tmp_path / "c")):
        must_be_refused(call, "ModelMismatch", "0 is offloaded by accelerate or diffusers: ")
    remove_hook_from_submodules(model)
    load(model, WEIGHT)
    assert torch.equal(model(torch.ones(1, 2)), torch.full((1, 3), 2.0))


def test_partitions_of_zero_3_are_refused(tmp_path: Path) -> None:
    """DeepSpeed leaves parameters without elements, which would be saved so, and keeps the whole shape in an attribute."""
    model = linear()
    whole, model[0].weight.ds_shape = model[0].weight.data, torch.Size((3, 2))
    model[0].weight.data = torch.empty(0)
    save, at = partial(epload.save, model, tmp_path / "c"), "0.weight, of shape [3, 2], is partitioned "
    must_be_refused(save, "ModelMismatch", at, "GatheredParameters")
    save_state = partial(epload.save, model.state_dict(), tmp_path / "c")
    must_be_refused(save_state, "ModelMismatch", "0.weight has no elements", "GatheredParameters")
    model[0].weight.data = whole  # gathered
    save()
    assert torch.equal(load_file(tmp_path / "c" / "model.safetensors")["0.weight"], whole)
    must_be_refused(partial(load, model, WEIGHT), "ModelMismatch", "0.weight, ", " is partitioned ", "load_checkpoint")


def test_what_is_marked_as_a_part_is_not_saved_as_a_replica(tmp_path: Path) -> None:
    """DeepSpeed keeps one rank's experts, or rows, in plain tensors with attributes, of which others have some, too."""
    wide = {"tensor_model_parallel": True}  # as TransformerEngine marks all weights
    parts = wide | {"ds_is_replaced_module": True}
    infos = [SimpleNamespace(unsharded_shape=shape) for shape in ((6, 2), (3, 2))]  # as of nanotron
    sharded, alone = ({"is_sharded": True, "get_sharded_info": lambda info=info: info} for info in infos)
    for marks, whole in (
        (parts, wide),
        ({"group_name": "ep_size_4"}, {"group_name": "ep_size_1"}),
        ({"expert_model_parallel": True}, {"expert_model_parallel": False}),
        (sharded, alone),
    ):
        model = linear()
        vars(model[0].weight).update(marks)
        must_be_refused(partial(epload.save, model, tmp_path / "c"), "ModelMismatch", "0.weight is marked as one rank's part")
        vars(model[0].weight).clear()
        vars(model[0].weight).update(whole)
        epload.save(model, tmp_path / next(iter(whole)))


class Transposing(nn.Linear):
    def _load_from_state_dict(self, state: Any, prefix: str, *args: Any) -> None:
        state[f"{prefix}weight"] = state[f"{prefix}weight"].t()
        super()._load_from_state_dict(state, prefix, *args)


def test_a_mapping_for_some_tensors_lets_no_others_be_filled() -> None:
    model = nn.Sequential(Transposing(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    state = {name: torch.ones_like(tensor) for name, tensor in model.state_dict().items()}
    for mapping in ("auto", Mapping(), Mapping(only=(("1.weight", "1.weight"),))):
        must_be_refused(partial(load, model, state, mapping=mapping), "ModelMismatch", "Transposing", "_load_from_state_dict")


def test_layers_that_say_how_many_ranks_divide_them_are_not_saved_as_replicas(tmp_path: Path) -> None:
    model: Any = linear()
    model[0].tp_size = 2
    must_be_refused(partial(epload.save, model, tmp_path / "c"), "ModelMismatch", "0.weight is in a Linear of 2 ranks")
    model[0].tp_size = 1
    epload.save(model, tmp_path / "c")


def test_flat_parameters_that_were_unwrapped_are_refused(tmp_path: Path) -> None:
    model = nn.ParameterDict({"_flat_param": torch.ones(4)})
    must_be_refused(partial(epload.save, model, tmp_path / "c"), "ModelMismatch", "_flat_param is a flat parameter of FSDP1")


def test_a_sparse_buffer_beside_modules_with_a_say_in_their_state(tmp_path: Path) -> None:
    """One that is not persistent is left alone."""
    for persistent in (False, True):
        model = nn.Sequential(Derived())
        model.register_buffer("sparse", torch.eye(2).to_sparse(), persistent)
        save = partial(epload.save, model, tmp_path / "c")
        must_be_refused(save, "ModelMismatch", "sparse is torch.sparse_coo") if persistent else save()


def test_weights_without_memory_are_not_saved(tmp_path: Path) -> None:
    """A trainer frees the storage of what it has copied elsewhere."""
    model = linear()
    storage, save = model[0].weight.untyped_storage(), partial(epload.save, model, tmp_path / "c")
    storage.resize_(0)
    must_be_refused(save, "ModelMismatch", "0.weight has no memory: its storage was freed")
    assert not (tmp_path / "c").exists()
    storage.resize_(24)
    save()


# ---- a say in the state that a walk over parameters does not see ----


class Pending(nn.Linear):
    """Writes what is pending before its state is read."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.register_state_dict_pre_hook(self.write)

    @staticmethod
    def write(module: nn.Module, prefix: str, keep_vars: bool) -> None:
        nn.init.constant_(module.weight, 5)


def test_a_hook_before_the_state_is_read_runs(tmp_path: Path) -> None:
    epload.save(nn.Sequential(Pending()), tmp_path / "new")
    assert load_file(tmp_path / "new" / "model.safetensors")["0.weight"].tolist() == [[5, 5], [5, 5]]


class KeepsList(nn.Module):
    """Keeps tensors in a list, which its initializer makes."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(3))
        self.register_buffer("inv", torch.ones(3), persistent=False)
        self.tensors = [self.w]

    def _init_weights(self, module: nn.Module) -> None:
        module.inv.fill_(1)
        module.tensors = [module.w]


def test_an_initializer_does_not_leave_stand_ins_in_attributes() -> None:
    model = KeepsList()
    load(model, {"w": torch.full((3,), 2.0)})
    assert model.tensors[0] is model.w
    assert model.w.tolist() == [2, 2, 2]


class Weight(nn.Parameter):
    """A parameter of a library, without a dispatch of its own."""


def test_parameters_of_a_subclass_that_overlap_are_refused() -> None:
    memory, model = torch.zeros(6), nn.Module()
    model.a, model.b = Weight(memory[:4]), Weight(memory[2:])
    call = partial(load, model, {"a": torch.ones(4), "b": torch.full((4,), 2.0)})
    must_be_refused(call, "ModelMismatch", "share part of their memory")
