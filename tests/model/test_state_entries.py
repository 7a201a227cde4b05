"""State-dict entries that are not the model's own storage are loaded as torch loads them, or refused; never counted as loaded."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType, fully_shard

import epload
from epload import Topology
from support import ranks
from support.checks import all_fine
from support.models import on_meta


def loader(**options: Any) -> epload.HierarchicalLoader:
    topology = Topology.from_nodes([[0, 1], [2, 3]])
    return epload.HierarchicalLoader(topology, bucket_bytes=400, progress=False, timeout=60, **options)


class Fused(nn.Module):
    """Keeps one tensor, and shows three of it. The copies are those of ``clone``, or converted ones."""

    def __init__(self, half: bool = False, views: bool = False) -> None:
        super().__init__()
        self.qkv = nn.Parameter(torch.rand(9, 5))
        self.out = nn.Linear(5, 3)
        self.register_buffer("scale", torch.rand(2), persistent=False)
        self.half, self.views = half, views
        self._register_state_dict_hook(_split)
        self.register_load_state_dict_pre_hook(_fuse)


def _split(module: Fused, state: dict[str, Tensor], prefix: str, _: object) -> None:
    fused = state.pop(f"{prefix}qkv")
    for name, part in zip("qkv", fused.chunk(3), strict=True):
        state[f"{prefix}{name}"] = part if module.views else part.bfloat16() if module.half else part.clone()


def _fuse(module: Fused, state: dict[str, Tensor], prefix: str, *_: object) -> None:
    if f"{prefix}q" in state:
        state[f"{prefix}qkv"] = torch.cat([state.pop(f"{prefix}{name}") for name in "qkv"])


class Net(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 5)
        self.layers = nn.ModuleList(Fused(**options) for _ in range(3))
        self.norm = nn.LayerNorm(3)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, Fused):
            nn.init.constant_(module.scale, 0.5)


def _hooked(rank: int) -> list[str]:
    problems = []
    for options in ({}, {"half": True}, {"views": True}):
        torch.manual_seed(0)
        source = Net(**options)
        state = {name: tensor.detach().clone() for name, tensor in source.state_dict().items()}
        torch.manual_seed(0 if options else rank)
        expected = Net(**options)
        expected.load_state_dict(state)
        for readers in ("one", "every"):
            for lost in (False, True):
                model = on_meta(lambda: Net(**options)) if lost else Net(**options)  # noqa: B023  (called at once)
                report = loader(readers=readers, verify=True).load(
                    model, state if rank == 0 or readers == "every" else None
                )
                case = f"{options} {readers} {lost}"
                if report.tensors != len(state) or report.missing_keys or report.unexpected_keys:
                    problems.append(f"{case}: {report}")
                for name, tensor in model.named_parameters():
                    if not torch.equal(tensor, expected.get_parameter(name)):
                        problems.append(f"{case}: {name} differs from what load_state_dict gives")
    return problems


def test_modules_that_show_copies_are_filled_as_torch_fills_them() -> None:
    all_fine(ranks.run(4, _hooked))


def _some_missing(rank: int) -> list[str]:
    """What the checkpoint lacks keeps its value; on meta there is none."""
    torch.manual_seed(0)
    source = Net()
    state = {name: tensor.detach().clone() for name, tensor in source.state_dict().items() if name != "layers.1.k"}
    model = Net()
    before = model.layers[1].qkv.detach().clone()
    report = loader().load(model, state if rank == 0 else None, strict=False)
    expected = source.layers[1].qkv.detach().clone()
    expected[3:6] = before[3:6]
    problems = [] if report.missing_keys == ["layers.1.k"] else [str(report)]
    if not torch.equal(model.layers[1].qkv, expected):
        problems.append(f"layers.1.qkv is {model.layers[1].qkv}")
    for hook in (None, lambda *_: None):
        try:
            loader().load(on_meta(Net), state if rank == 0 else None, strict=False, init_missing=hook)
            problems.append("loaded a copy that nothing fills")
        except epload.ModelMismatch as error:
            if "fills 1 tensor on meta: layers.1.k" not in str(error):
                problems.append(str(error))
    return problems


def test_copies_that_the_checkpoint_lacks() -> None:
    all_fine(ranks.run(4, _some_missing))


class Ignores(Fused):
    """Its load_state_dict takes the entries and drops them."""

    def _load_from_state_dict(self, state: dict[str, Tensor], prefix: str, *rest: Any) -> None:
        state.setdefault(f"{prefix}qkv", self.qkv.detach().clone())
        for name in "qkv":
            state.pop(f"{prefix}{name}", None)


class NoCounterpart(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.rand(3))
        self._register_state_dict_hook(lambda module, state, prefix, _: state.update({f"{prefix}twice": module.w * 2}))


def test_a_module_that_does_not_take_what_it_shows_is_an_error() -> None:
    source = nn.Sequential(NoCounterpart())
    with pytest.raises(epload.LoadError, match=r"(?s)0 \(NoCounterpart\).load_state_dict rejected .*twice"):
        epload.load(nn.Sequential(NoCounterpart()), dict(source.state_dict()), progress=False)
    torch.manual_seed(0)
    state = {name: tensor.clone() for name, tensor in Ignores().state_dict().items()}
    with pytest.raises(epload.LoadError, match="shards differ"):
        epload.load(Ignores(), state, verify=True, progress=False)
    hollow = on_meta(lambda: nn.Sequential(Ignores()))
    with pytest.raises(epload.LoadError, match="left parameters uninitialized"):
        epload.load(
            hollow, {f"0.{name}": t for name, t in state.items()}, progress=False,
            init_missing=lambda module, path, names: module.scale.zero_(),
        )  # fmt: skip


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


def _sharded(rank: int) -> list[str]:
    problems = []
    for make, text in ((NoCounterpart, "is a copy of a DTensor"), (Net, "layers.0 (Fused) has a load_state_dict hook")):
        state = {name: tensor.detach().clone() for name, tensor in make().state_dict().items()}
        model = nn.Sequential(make())
        fully_shard(model)
        try:
            loader().load(model, {f"0.{name}": tensor for name, tensor in state.items()} if rank == 0 else None)
            problems.append("loaded copies of DTensors")
        except epload.ModelMismatch as error:
            if text not in str(error):
                problems.append(str(error))
    return problems


def test_copies_of_dtensors_are_refused() -> None:
    all_fine(ranks.run(4, _sharded))


def _fsdp1(rank: int) -> list[str]:
    problems = []
    kinds = (StateDictType.FULL_STATE_DICT, StateDictType.SHARDED_STATE_DICT, StateDictType.LOCAL_STATE_DICT)
    for original in (True, False):
        for kind in kinds:
            model = FullyShardedDataParallel(
                nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4)), use_orig_params=original, device_id=torch.device("cpu")
            )
            before = [p.detach().clone() for p in model.parameters()]
            state = {"0.weight": torch.ones(8, 8), "0.bias": torch.ones(8)}
            state |= {"1.weight": torch.ones(4, 8), "1.bias": torch.ones(4)}
            try:
                with FullyShardedDataParallel.state_dict_type(model, kind):
                    loader().load(model, state if rank == 0 else None, strict=False)
                problems.append(f"{original} {kind}: loaded")
            except epload.ModelMismatch as error:
                if "FSDP1" not in str(error) or "fully_shard" not in str(error):
                    problems.append(str(error))
            if not all(map(torch.equal, before, model.parameters())):
                problems.append("parameters have changed")
    return problems


def test_fsdp1_is_refused_by_name() -> None:
    all_fine(ranks.run(4, _fsdp1))


def test_lazy_modules_are_refused_by_name() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.LazyLinear(3))
    with pytest.raises(epload.ModelMismatch, match="1 is a LazyLinear, whose parameters have no shape yet"):
        epload.load(model, {"0.weight": torch.ones(3, 2), "0.bias": torch.ones(3)}, strict=False, progress=False)


def test_extra_state_stays_as_it_is() -> None:
    class Extra(nn.Linear):
        kept = "mine"

        def get_extra_state(self) -> str:
            return self.kept

        def set_extra_state(self, state: str) -> None:
            self.kept = state

    model = Extra(2, 3)
    report = epload.load(model, {"weight": torch.ones(3, 2), "bias": torch.ones(3)}, progress=False)
    assert report.tensors == 2
    assert torch.equal(model.weight, torch.ones(3, 2))
    assert model.kept == "mine"


class Halved(nn.Module):
    """Loads itself: a checkpoint holds twice what it keeps."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(5, 3))
        self.register_buffer("table", torch.ones(5, 3))
        if how == "before":
            self.register_load_state_dict_pre_hook(_halve)
        else:
            self.register_load_state_dict_post_hook(_refresh)


def _halve(module: Halved, state: dict[str, Tensor], prefix: str, *_: object) -> None:
    state[f"{prefix}w"] = state[f"{prefix}w"] / 2


def _refresh(module: Halved, _: object) -> None:
    module.table.copy_(module.w.detach() * 3)


def _self_loading(rank: int) -> list[str]:
    problems = []
    for how in ("before", "after"):
        expected = nn.Sequential(Halved(how), nn.Linear(3, 2))
        state = {
            name: torch.arange(float(t.numel())).reshape(t.shape) + i
            for i, (name, t) in enumerate(expected.state_dict().items())
        }
        expected.load_state_dict(state)
        run = loader()
        for _ in range(3):
            model: Any = nn.Sequential(Halved(how), nn.Linear(3, 2))
            run.load(model, state if rank == 0 else None)
            for name, tensor in model.state_dict().items():
                if not torch.equal(tensor, expected.state_dict()[name]):
                    problems.append(f"{how}: {name} is {tensor}")
        model = nn.Sequential(Halved(how), nn.Linear(3, 2))
        fully_shard(model)
        try:
            run.load(model, state if rank == 0 else None)
            problems.append("loaded without the hook")
        except epload.ModelMismatch as error:
            if "0 (Halved) has a load_state_dict hook (_" not in str(error):
                problems.append(str(error))
    return problems


def test_modules_that_load_themselves_do() -> None:
    all_fine(ranks.run(4, _self_loading))
