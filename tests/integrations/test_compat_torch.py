"""torch's ``set_model_state_dict`` and ours, called alike: what each option and each kind of model and dict does."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as torchs
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import epload
from epload.integrations import skyrl, verl
from epload.integrations import torch as ours
from epload.integrations.full_state import find_custom_loading
from support import ranks
from support.checks import all_fine

BROADCAST = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
LENIENT = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=False)


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
    """Of every tensor of a model, each element unique."""
    made = {}
    for name, tensor in model.state_dict().items():
        if isinstance(tensor, Tensor):
            made[name] = (torch.arange(tensor.numel()) + 1.0 + start).reshape(tensor.shape)
            start += tensor.numel()
    return made


def sharded(make: Callable[[], nn.Module] = Net) -> Any:
    with torch.device("meta"):
        model = make()
    return fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))


def full_tensors(model: nn.Module) -> dict[str, Tensor]:
    return {
        n: t.full_tensor() if isinstance(t, DTensor) else t
        for n, t in model.state_dict().items()
        if isinstance(t, Tensor)
    }


def differ(model: nn.Module, wanted: dict[str, Tensor]) -> list[str]:
    state = full_tensors(model)
    return [name for name, value in wanted.items() if name not in state or not torch.equal(state[name], value)]


def on_rank_0(state: dict[Any, Any]) -> dict[Any, Any]:
    return dict(state) if dist.get_rank() == 0 else {}


def error_of(action: Callable[[], Any]) -> tuple[str, str]:
    try:
        action()
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


def everywhere(value: Any) -> list[Any]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


# ---- without broadcast_from_rank0, each rank loads its own ----


def _local(rank: int) -> list[str]:
    problems = []
    options = StateDictOptions(full_state_dict=True)
    pairs = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "shard"))
    stage = rank // 2
    for function in (torchs.set_model_state_dict, ours.set_model_state_dict):
        model: Any = Net().to("meta").to_empty(device="cpu")
        fully_shard(model, mesh=pairs["shard"])
        mine = values(Net(), start=100 * stage)  # pipeline stages, each with values of its own
        function(model, dict(mine), options=options)
        problems += [f"{function.__module__}: {name} is another stage's" for name in differ(model, mine)]
        if stage == 1:  # only this stage reloads
            again = values(Net(), start=500)
            function(model, dict(again), options=options)
            problems += [f"{function.__module__}: {name} after the second load" for name in differ(model, again)]
        plain = Net()  # and a rank may be alone
        if rank == 3:
            function(plain, values(Net(), start=7), options=options)
            problems += differ(plain, values(Net(), start=7))
        dist.barrier()
    return problems


def test_without_broadcast_each_rank_loads_its_own() -> None:
    all_fine(ranks.run(4, _local, limit=60))


# ---- texts ----


def _texts(rank: int) -> list[str]:
    problems = []
    whole = values(Net())
    missing = {name: value for name, value in whole.items() if name != "second.bias"}
    odd = {**missing, "stray": torch.ones(2), "first.weight": torch.ones(4, 4)}
    expected = error_of(lambda: Net().load_state_dict(odd))[1].split("\n\t")  # what torch says of a plain model
    model = sharded()
    kind, text = error_of(lambda: ours.set_model_state_dict(model, on_rank_0(odd), options=BROADCAST))
    lines = text.split("\n\t")
    if lines[0] != expected[0].replace("Net", "FSDPNet") or lines[1:3] != expected[1:3]:
        problems.append(f"{lines} for {expected}")
    if not lines[3].startswith("size mismatch for first.weight: ") or kind != "ModelMismatch":
        problems.append(text)
    if not issubclass(epload.ModelMismatch, RuntimeError):
        problems.append("not torch's kind of error")
    if any(not p.is_meta for p in model.parameters()) or len(set(everywhere(text))) > 1:
        problems.append(f"something was moved, or ranks differ: {everywhere(text)}")
    _, text = error_of(
        lambda: ours.set_model_state_dict(sharded(), on_rank_0({**missing, "stray": 5}), options=BROADCAST)
    )
    if '"second.bias"' not in text or 'Unexpected key(s) in state_dict: "stray"' not in text:
        problems.append(f"what is no tensor: {text}")
    return problems


def test_keys_that_do_not_fit_are_reported_as_torch_does() -> None:
    all_fine(ranks.run(3, _texts))


def test_the_keys_are_on_the_error() -> None:
    state = {"first.weight": torch.ones(5, 3), "first.bias": torch.ones(4), "stray": torch.ones(1)}
    with pytest.raises(epload.ModelMismatch) as caught:
        epload.load(Net(), state, progress=False)
    assert caught.value.missing_keys == ["second.weight", "second.bias"]
    assert caught.value.unexpected_keys == ["stray"]
    assert list(caught.value.mismatched_keys) == ["first.bias"]


# ---- what torch takes ----


def _extra_state(rank: int) -> list[str]:
    problems = []
    for state in ({"step": 3, "names": ["a"]}, None, 7):
        whole = {**values(Net(Counting)), "second._extra_state": state}
        models = []
        for function in (torchs.set_model_state_dict, ours.set_model_state_dict):
            model = sharded(lambda: Net(Counting))
            model.to_empty(device="cpu")
            model.second.seen = "old"
            function(model, on_rank_0(whole), options=BROADCAST)
            models.append(model)
            problems += [f"{function.__module__}: {name}" for name in differ(model, values(Net(Counting)))]
        if [model.second.seen for model in models] != [state, state]:
            problems.append(f"{[model.second.seen for model in models]}, not {state}")
    whole = values(Net(Counting))
    model = sharded(lambda: Net(Counting))
    _, text = error_of(lambda: ours.set_model_state_dict(model, on_rank_0(whole), options=BROADCAST))
    if 'Missing key(s) in state_dict: "second._extra_state"' not in text or len(set(everywhere(text))) > 1:
        problems.append(text)
    model.second.seen = "old"
    ours.set_model_state_dict(model, on_rank_0(whole), options=LENIENT)
    return problems + differ(model, whole) + ([] if model.second.seen == "old" else ["extra state was changed"])


def test_extra_state() -> None:
    all_fine(ranks.run(2, _extra_state))


def _wrapped(rank: int) -> list[str]:
    problems = []
    whole = values(Net())
    wrappers: dict[str, Callable[[nn.Module], Any]] = {
        "DDP": DistributedDataParallel,
        "DDP of compiled": lambda model: DistributedDataParallel(torch.compile(model)),
        "compiled DDP": lambda model: torch.compile(DistributedDataParallel(model)),
    }
    for name, wrap in wrappers.items():
        for function in (torchs.set_model_state_dict, ours.set_model_state_dict):
            plain = Net()
            function(wrap(plain), on_rank_0(whole), options=BROADCAST)
            problems += [f"{name}, {function.__module__}: {text}" for text in differ(plain, whole)]
    inside = Net(lambda: DistributedDataParallel(nn.Linear(5, 2)))  # a module of the model
    ours.set_model_state_dict(inside, on_rank_0(whole), options=BROADCAST)
    wanted = {name.replace("second.", "second.module."): value for name, value in whole.items()}
    return problems + [f"inside: {text}" for text in differ(inside, wanted)]


def test_a_ddp_model() -> None:
    all_fine(ranks.run(2, _wrapped))


def _by_module(rank: int) -> list[str]:
    problems = []
    whole = values(Net())
    for function in (torchs.set_model_state_dict, ours.set_model_state_dict):
        model = sharded()
        model.to_empty(device="cpu")
        parts = {
            module: {name.split(".")[1]: value for name, value in whole.items() if name.startswith(path)}
            for path, module in (("first", model.first), ("second", model.second))
        }
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            function(model, on_rank_0(parts), options=BROADCAST)
        problems += [f"{function.__module__}: {name}" for name in differ(model, whole)]
    model = sharded()
    stranger = {nn.ReLU(): {"weight": torch.ones(1)}, model.first: {"bias": torch.ones(5)}}
    _, text = error_of(lambda: ours.set_model_state_dict(model, on_rank_0(stranger), options=BROADCAST))
    if "<ReLU, which is not a module of the model>.weight" not in text or '"second.bias"' not in text:
        problems.append(text)
    return problems + ([] if len(set(everywhere(text))) == 1 else ["ranks differ"])


def test_a_dict_by_module() -> None:
    all_fine(ranks.run(2, _by_module))


# ---- options ----


def _options(rank: int) -> list[str]:
    """Those that say nothing of loading a model's state change nothing, in torch's function and in ours."""
    problems = []
    whole = values(Net())
    short = {name: value for name, value in whole.items() if name != "first.bias"}
    for option in (
        {"ignore_frozen_params": True},
        {"flatten_optimizer_state_dict": True},
        {"keep_submodule_prefixes": False},
    ):
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, **option)
        kinds = []
        for function in (torchs.set_model_state_dict, ours.set_model_state_dict):
            model = sharded().to_empty(device="cpu")
            model.first.bias.requires_grad_(False)
            function(model, on_rank_0(whole), options=options)
            problems += [f"{option}, {function.__module__}: {name}" for name in differ(model, whole)]
            errors = everywhere(error_of(lambda f=function, m=model, o=options: f(m, on_rank_0(short), options=o)))
            kinds.append("first.bias" in errors[0][1])
        if kinds != [True, True]:
            problems.append(f"{option}: a frozen parameter that is missing: {kinds}")
    return problems


def test_options_that_say_nothing_of_the_model() -> None:
    all_fine(ranks.run(2, _options))


class Outer(nn.Module):
    """Leaves the name of its module out of the keys, and says so to torch."""

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
    """Keeps its weight in another form than checkpoints do."""

    def __init__(self) -> None:
        super().__init__(5, 5)
        self._register_load_state_dict_pre_hook(self._turn)

    def _turn(self, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        state[f"{prefix}weight"] = state[f"{prefix}weight"].t().contiguous()


class Derived(nn.Linear):
    """Keeps something that it computes from its weight."""

    def __init__(self) -> None:
        super().__init__(5, 5)
        self.sum = 0.0
        self.register_load_state_dict_post_hook(self._add_up)

    @staticmethod
    def _add_up(module: Any, keys: Any) -> None:
        module.sum = float(module.weight.sum())


def refused(kind: type[nn.Linear], whole: dict[str, Tensor]) -> list[str]:
    """By functions that have no original to go to."""
    problems = []
    for load in (verl.fsdp2_load_full_state_dict, skyrl.fsdp2_load_full_state_dict):
        model = sharded(lambda: Net(kind))
        name, text = error_of(lambda load=load, model=model: load(model, on_rank_0(whole)))
        if f"second ({kind.__name__}) has a load_state_dict hook" not in text or name != "ModelMismatch":
            problems.append(text)
    return problems


def _loads_itself(rank: int) -> list[str]:
    problems = []
    for kind in (Turned, Derived):
        whole = values(Net(kind))
        models: list[Any] = [Net(kind), Net(kind)]
        for function, model in zip((torchs.set_model_state_dict, ours.set_model_state_dict), models, strict=True):
            function(model, on_rank_0(whole), options=BROADCAST)
        problems += [f"{kind.__name__}: {name}" for name in differ(models[1], full_tensors(models[0]))]
        if kind is Derived and models[1].second.sum != float(whole["second.weight"].sum()):
            problems.append("the hook has not run")
        problems += refused(kind, whole)
    return problems


def test_modules_that_load_in_a_way_of_their_own() -> None:
    all_fine(ranks.run(2, _loads_itself))


def test_hooks_that_only_rename_are_let_pass() -> None:
    from transformers import MambaConfig, MambaModel

    assert find_custom_loading(MambaModel(MambaConfig(vocab_size=8, hidden_size=4, num_hidden_layers=1))) == ""
    assert (
        find_custom_loading(nn.Sequential(nn.BatchNorm1d(3), nn.utils.parametrizations.weight_norm(nn.Linear(3, 3))))
        == ""
    )


def _torchs_own(rank: int) -> list[str]:
    problems = []
    whole = {"outer.weight": torch.arange(15.0).reshape(5, 3), "outer.bias": torch.arange(5.0)}
    for function in (torchs.set_model_state_dict, ours.set_model_state_dict):
        model = nn.Module()
        model.outer = Outer()
        function(model, on_rank_0(whole), options=BROADCAST)
        if not torch.equal(model.outer.wrapped.weight, whole["outer.weight"]):
            problems.append(f"modifiers: {function.__module__}")
    flat = FullyShardedDataParallel(Net(), device_id=torch.device("cpu"), use_orig_params=True)
    state = values(Net())
    ours.set_model_state_dict(flat, on_rank_0(state), options=BROADCAST)
    with FullyShardedDataParallel.summon_full_params(flat):
        problems += [
            f"FSDP1: {name}" for name, value in state.items() if not torch.equal(flat.get_parameter(name), value)
        ]
    return problems


def test_what_only_torch_knows_the_names_of_is_left_to_it() -> None:
    all_fine(ranks.run(2, _torchs_own))


def _stays_on_meta(rank: int) -> list[str]:
    """As torch's: what a dict lacks keeps its value, and where there is none, the parameter is on meta still."""
    problems = []
    whole = values(Net())
    short = {name: value for name, value in whole.items() if name != "first.weight"}
    model = sharded()
    keys = ours.set_model_state_dict(model, on_rank_0(short), options=LENIENT)
    if not model.first.weight.is_meta or keys.missing_keys != ["first.weight"]:
        problems.append(f"first.weight holds what nobody wrote: {model.first.weight}, {keys}")
    problems += differ_but(model, short)
    ours.set_model_state_dict(model, on_rank_0(whole), options=BROADCAST)  # and can be filled later
    problems += [f"later: {name}" for name in differ(model, whole)]
    again = values(Net(), start=50)
    del again["first.weight"]
    ours.set_model_state_dict(model, on_rank_0(again), options=LENIENT)
    return problems + [f"again: {name}" for name in differ(model, {**again, "first.weight": whole["first.weight"]})]


def differ_but(model: nn.Module, wanted: dict[str, Tensor]) -> list[str]:
    """As :func:`differ`, of a model of which a part is on meta."""
    state = model.state_dict()
    return [name for name, value in wanted.items() if not torch.equal(state[name].full_tensor(), value)]


def test_what_nobody_has_stays_on_meta() -> None:
    all_fine(ranks.run(2, _stays_on_meta))


def _as_torch(rank: int) -> list[str]:
    """A transformers model of bfloat16, whose routers ``from_pretrained`` would keep in float32, and a changed buffer."""
    from transformers import Ernie4_5_MoeConfig, Ernie4_5_MoeForCausalLM

    config = Ernie4_5_MoeConfig(
        hidden_size=16, intermediate_size=24, moe_intermediate_size=8, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, vocab_size=32, moe_num_experts=2, moe_k=1, moe_layer_start_index=0,
    )  # fmt: skip
    torch.manual_seed(3)
    values = Ernie4_5_MoeForCausalLM(config).to(torch.bfloat16).state_dict()
    states = []
    for set_state in (torchs.set_model_state_dict, ours.set_model_state_dict):
        model = Ernie4_5_MoeForCausalLM(config).to(torch.bfloat16)
        model.model.rotary_emb.inv_freq.fill_(0.25)
        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
        set_state(model, dict(values) if rank == 0 else {}, options=BROADCAST)
        tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        states.append({n: t.full_tensor() if isinstance(t, DTensor) else t for n, t in tensors.items()})
    expected, loaded = states
    return [n for n, t in expected.items() if t.dtype != loaded[n].dtype or not torch.equal(t, loaded[n])]


def test_what_from_pretrained_would_do_is_not_done() -> None:
    all_fine(ranks.run(2, _as_torch))
