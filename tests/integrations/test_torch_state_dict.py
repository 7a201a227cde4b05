"""torch's ``set_model_state_dict`` and ours, called alike: what each option and each kind of model and dict does."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as torchs
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Partial
from torch.distributed.tensor.placement_types import _StridedShard
from torch.nn.parallel import DistributedDataParallel

import epload
from epload.integrations import skyrl, verl
from epload.integrations import torch as ours
from epload.integrations.full_state import find_custom_loading
from support.checks import full_values, local_of
from support.drop_ins import everywhere, on_rank_0, sharded
from support.failures import error_of
from support.findings import differing, must_be_refused_by_all
from support.models import Block, Mlp, Rotary, Stack, Tied, mesh, on_meta, place
from support.on_ranks import on_ranks
from support.recordings import tensors_of

BROADCAST = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
LENIENT = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=False)
BOTH = (torchs.set_model_state_dict, ours.set_model_state_dict)


class Counting(nn.Module):
    """Has a state that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(5, 3))
        self.seen: Any = None

    def get_extra_state(self) -> Any:
        return self.seen

    def set_extra_state(self, state: Any) -> None:
        self.seen = state


class Net(nn.Module):
    def __init__(self, inner: Callable[[], nn.Module] = lambda: nn.Linear(5, 2)) -> None:
        super().__init__()
        self.first = nn.Linear(3, 5)
        self.second = inner()


def values(model: nn.Module, start: int = 0) -> dict[str, Tensor]:
    """Values for every tensor of a model, each element unique."""
    tensors = {}
    for name, tensor in model.state_dict().items():
        if isinstance(tensor, Tensor):
            tensors[name] = (torch.arange(tensor.numel()) + 1.0 + start).reshape(tensor.shape)
            start += tensor.numel()
    return tensors


def sharded_net(make: Callable[[], nn.Module] = Net) -> Any:
    return fully_shard(on_meta(make), mesh=init_device_mesh("cpu", (dist.get_world_size(),)))


# ---- keys that do not fit ----


def load(model: Any, state: dict[Any, Any], options: StateDictOptions = BROADCAST) -> Any:
    return ours.set_model_state_dict(model, on_rank_0(state), options=options)


@on_ranks(3)
def test_keys_that_do_not_fit_are_reported_as_torch_does(rank: int) -> None:
    full = values(Net())
    short = {name: value for name, value in full.items() if name != "second.bias"}
    odd = {**short, "stray": torch.ones(2), "first.weight": torch.ones(4, 4)}
    expected = error_of(lambda: Net().load_state_dict(odd)).split("\n\t")  # what torch reports for a plain model
    model = sharded_net()
    text = error_of(partial(load, model, odd))
    lines = text.split("\n\t")
    assert {*everywhere(text)} == {text}
    assert lines[0].startswith("ModelMismatch: Error(s) in loading state_dict for ")
    assert lines[1:3] == expected[1:3]
    assert lines[3].startswith("size mismatch for first.weight: ")
    assert issubclass(epload.ModelMismatch, RuntimeError), "not torch's kind of error"
    assert all(p.is_meta for p in model.parameters())
    for stray, name in (
        ({"stray": 5}, "stray"),
        ({nn.ReLU(): {"weight": torch.ones(1)}}, "<ReLU, which is a module and not a name>"),
    ):
        call = partial(load, sharded_net(), {**short, **stray})
        must_be_refused_by_all(call, '"second.bias"', f'Unexpected key(s) in state_dict: "{name}"')
    keys = load(sharded_net(), short | {"stray": torch.ones(1)}, LENIENT)
    assert (keys.missing_keys, keys.unexpected_keys) == (["second.bias"], ["stray"])
    # torch's strict=False is for keys, too
    must_be_refused_by_all(partial(load, sharded_net(), odd, LENIENT), "size mismatch for first.weight")


# ---- kinds of models ----


@on_ranks(2)
def test_extra_state(rank: int) -> None:
    for state in ({"step": 3, "names": ["a"]}, None, 7):
        full = {**values(Net(Counting)), "second._extra_state": state}
        models = []
        for function in BOTH:
            model = sharded_net(lambda: Net(Counting))
            model.to_empty(device="cpu")
            model.second.seen = "old"
            function(model, on_rank_0(full), options=BROADCAST)
            models.append(model)
            assert differing(model, values(Net(Counting))) == [], function.__module__
        assert [model.second.seen for model in models] == [state, state]
    full = values(Net(Counting))
    model = sharded_net(lambda: Net(Counting))
    must_be_refused_by_all(partial(load, model, full), 'Missing key(s) in state_dict: "second._extra_state"')
    model.second.seen = "old"
    load(model, full, LENIENT)
    assert differing(model, full) == []
    assert model.second.seen == "old", "extra state was changed"


@on_ranks(2)
def test_wrapped_models(rank: int) -> None:
    full = values(Net())
    wrappers: dict[str, Callable[[nn.Module], Any]] = {
        "DDP": DistributedDataParallel,
        "DDP of compiled": lambda model: DistributedDataParallel(torch.compile(model)),
        "compiled DDP": lambda model: torch.compile(DistributedDataParallel(model)),
    }
    for name, wrap in wrappers.items():
        for function in BOTH:
            plain = Net()
            function(wrap(plain), on_rank_0(full), options=BROADCAST)
            assert differing(plain, full) == [], f"{name}, {function.__module__}"
    inside = Net(lambda: DistributedDataParallel(nn.Linear(5, 2)))  # a module of the model
    load(inside, full)
    expected = {name.replace("second.", "second.module."): value for name, value in full.items()}
    assert differing(inside, expected) == [], "inside"

    make = partial(Stack, [{"w": (5, 3)}, {"w": (2, 3)}])
    stack: Any = on_meta(make)
    stack.layers[1] = torch.compile(stack.layers[1])
    for layer in stack.layers:
        fully_shard(layer, mesh=mesh(("all", 2)))
    compiled: Any = torch.compile(fully_shard(stack, mesh=mesh(("all", 2))))
    full = full_values(on_meta(make))
    load(compiled, full)
    state = {name.replace("_orig_mod.", ""): tensor for name, tensor in compiled.state_dict().items()}
    assert differing(state, full) == [], "compiled"


class Outer(nn.Module):
    """Leaves the name of its module out of the keys, and names it to torch."""

    def __init__(self) -> None:
        super().__init__()
        self.wrapped = nn.Linear(3, 5)
        self.register_state_dict_post_hook(lambda module, state, prefix, local: self._strip(state, prefix))
        self.register_load_state_dict_pre_hook(lambda module, state, prefix, *rest: self._add(state, prefix))

    def _fqn_modifiers(self) -> dict[str, str]:
        return {"weight": "wrapped", "bias": "wrapped"}

    @staticmethod
    def _strip(state: dict[str, Any], prefix: str) -> None:
        for name in list(state):
            if name.startswith(f"{prefix}wrapped."):
                state[prefix + name.removeprefix(f"{prefix}wrapped.")] = state.pop(name)

    @staticmethod
    def _add(state: dict[str, Any], prefix: str) -> None:
        for name in list(state):
            if name.startswith(prefix):
                state[f"{prefix}wrapped.{name.removeprefix(prefix)}"] = state.pop(name)


class Turned(nn.Linear):
    """Keeps its weight in another form than checkpoints do, and something that it computes from its weight."""

    def __init__(self) -> None:
        super().__init__(5, 5)
        self.sum = 0.0
        self._register_load_state_dict_pre_hook(self._turn)
        self.register_load_state_dict_post_hook(self._add_up)

    def _turn(self, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        state[f"{prefix}weight"] = state[f"{prefix}weight"].t().contiguous()

    @staticmethod
    def _add_up(module: Any, keys: Any) -> None:
        module.sum = float(module.weight.sum())


@on_ranks(2)
def test_what_only_torch_can_load_is_left_to_it(rank: int) -> None:
    full = values(Net(Turned))
    models: list[Any] = [Net(Turned), Net(Turned)]
    for function, model in zip(BOTH, models, strict=True):
        function(model, on_rank_0(full), options=BROADCAST)
    assert differing(models[1], models[0]) == [], "hooks"
    assert models[1].second.sum == float(full["second.weight"].sum()), "the hook has not run"
    for other in (verl.fsdp2_load_full_state_dict, skyrl.fsdp2_load_full_state_dict):  # which have no original to call
        text = "ModelMismatch: second (Turned) has a load_state_dict hook"
        must_be_refused_by_all(partial(other, sharded_net(lambda: Net(Turned)), on_rank_0(full)), text)

    full = {"outer.weight": torch.arange(15.0).reshape(5, 3), "outer.bias": torch.arange(5.0)}
    model = nn.Module()
    model.outer = Outer()
    load(model, full)
    assert torch.equal(model.outer.wrapped.weight, full["outer.weight"]), "modifiers"

    flat = FullyShardedDataParallel(Net(), device_id=torch.device("cpu"), use_orig_params=True)
    state = values(Net())
    load(flat, state)
    with FullyShardedDataParallel.summon_full_params(flat):
        assert [f"FSDP1: {n}" for n, value in state.items() if not torch.equal(flat.get_parameter(n), value)] == []


def test_hooks_that_only_rename_are_accepted() -> None:
    from transformers import MambaConfig, MambaModel

    normalized = nn.utils.parametrizations.weight_norm(nn.Linear(3, 3))
    assert find_custom_loading(MambaModel(MambaConfig(vocab_size=8, hidden_size=4, num_hidden_layers=1))) == ""
    assert find_custom_loading(nn.Sequential(nn.BatchNorm1d(3), normalized)) == ""


# ---- where torch's function is wrong ----


@on_ranks(4)
def test_where_torchs_function_is_wrong(rank: int) -> None:
    def loaded(model: Any, state: dict[str, Tensor]) -> Any:
        load(model, state)
        return model

    state = full_values(on_meta(lambda: Mlp(7, 5, 3)))  # torch adopts the checkpoint's dtype
    narrow = {name: value.bfloat16() for name, value in state.items()}
    assert differing(loaded(sharded(torch.bfloat16), state), narrow) == []

    state = full_values(on_meta(Tied))  # it breaks ties
    model = loaded(fully_shard(on_meta(Tied), mesh=mesh(("all", 4))), state)
    assert differing(model, state) == []
    assert model.head.weight is model.embed.weight, "the tie is broken"

    state = full_values(on_meta(Rotary))  # it leaves buffers on meta that rank 0 has
    model = loaded(fully_shard(Rotary() if rank == 0 else on_meta(Rotary), mesh=mesh(("all", 4))), state)
    assert differing(model, state) == []
    assert torch.equal(model.inv_freq, Rotary().inv_freq), str(model.inv_freq)
    model = loaded(fully_shard(on_meta(Rotary), mesh=mesh(("all", 4))), state)  # as torch's, if no rank has them
    assert model.inv_freq.is_meta
    assert not model.w.is_meta

    model = nn.Module()  # rows of a _StridedShard that is not one of FSDP's over another
    model.inner = on_meta(lambda: Block({"w": (16, 3)}))
    place(model.inner, mesh(("tp", 4)), [_StridedShard(0, split_factor=2)])
    w = torch.arange(48.0).reshape(16, 3)
    rows = torch.cat([w[2 * rank : 2 * rank + 2], w[8 + 2 * rank : 10 + 2 * rank]])
    assert torch.equal(local_of(loaded(model, {"inner.w": w}).inner.w), rows), f"strided: {model.inner.w}"

    model = nn.Module()  # it multiplies a Partial by the number of ranks
    model.w = nn.Parameter(DTensor.from_local(torch.zeros(3), mesh(("all", 4)), [Partial()], run_check=False))
    text = "w has placement P(sum), which cannot be loaded into"
    must_be_refused_by_all(partial(load, model, {"w": torch.ones(3)}), text)


# ---- what stays as it is ----


@on_ranks(2)
def test_what_nobody_has_stays_on_meta(rank: int) -> None:
    """Like torch's: what a dict lacks keeps its value, and where there is none, the parameter is on meta still."""
    full = values(Net())
    short = {name: value for name, value in full.items() if name != "first.weight"}
    model = sharded_net()
    keys = load(model, short, LENIENT)
    assert model.first.weight.is_meta, f"first.weight holds what nobody wrote: {model.first.weight}, {keys}"
    assert keys.missing_keys == ["first.weight"], f"first.weight holds what nobody wrote: {model.first.weight}, {keys}"
    state = model.state_dict()
    assert [name for name, value in short.items() if not torch.equal(state[name].full_tensor(), value)] == []
    load(model, full)  # and can be filled later
    assert differing(model, full) == [], "later"
    again = values(Net(), start=50)
    del again["first.weight"]
    load(model, again, LENIENT)
    assert differing(model, {**again, "first.weight": full["first.weight"]}) == [], "again"


class Shares(nn.Module):
    """Two modules have one weight and one buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(3, 3) for _ in range(3))
        self.second.weight = self.first.weight
        for module in (self.first, self.second):
            module.register_buffer("scale", torch.full((3,), 7.0))
            module.scale = self.first.scale


MISSING = {
    "first.weight second.weight": ["first.weight"],
    "first.scale second.scale": ["first.scale"],
    "third.bias": ["third.bias"],
    "first.weight": [],  # which the dict has under its other name
}
"""Names that a dict lacks, and those of them that ours reports; torch's reports none."""


@pytest.mark.parametrize("missing", MISSING)
@on_ranks(2)
def test_what_a_dict_lacks_stays_as_torch_leaves_it(rank: int, missing: str) -> None:
    """Rank 0 has the model, the others have it on meta; or all have it there."""
    full = {name: torch.full_like(value, i) for i, (name, value) in enumerate(Shares().state_dict().items())}
    full |= {f"second.{name}": full[f"first.{name}"] for name in ("weight", "scale")}
    short = {name: value for name, value in full.items() if name not in missing.split()}
    for all_on_meta in (False, True):
        held = []
        for function in BOTH:
            torch.manual_seed(0)
            with torch.device("meta" if rank or all_on_meta else "cpu"):
                model = Shares()
            keys = function(model, on_rank_0(short), options=LENIENT)
            held.append({n: None if value.is_meta else value.tolist() for n, value in model.state_dict().items()})
        if not MISSING[missing]:
            held[0][missing] = full[missing].tolist()  # torch's leaves it on meta
        assert held[0] == held[1], all_on_meta
        assert keys.missing_keys == MISSING[missing]
        assert model.first.weight is model.second.weight
        assert model.first.scale is model.second.scale


@on_ranks(2)
def test_what_from_pretrained_would_do_is_not_done(rank: int) -> list[str]:
    """A transformers model of bfloat16, whose routers ``from_pretrained`` would keep in float32, and a changed buffer."""
    from transformers import Ernie4_5_MoeForCausalLM

    from support.families import FAMILIES

    config = FAMILIES["ernie4_5_moe"].config()
    torch.manual_seed(3)
    state = Ernie4_5_MoeForCausalLM(config).to(torch.bfloat16).state_dict()
    states = []
    for function in BOTH:
        model = Ernie4_5_MoeForCausalLM(config).to(torch.bfloat16)
        model.model.rotary_emb.inv_freq.fill_(0.25)
        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
        function(model, on_rank_0(dict(state)), options=BROADCAST)
        states.append(tensors_of(model))
    return differing(*states)
