"""Engines whose tensors have other names and shapes than the trainer's, and weights that are tied in one job alone."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import epload
from epload.mapping import Concatenate, Convert, Mapping, Rename
from epload.model.targets import collect
from epload.saving.catalog import catalog
from support.checkpoints import assert_same
from support.checks import full_tensor
from support.failures import error_of, must_raise
from support.jobs import Job, Meeting, run
from support.small_syncs import outcome, receiving, sending, take
from support.sync_jobs import send_model


class Trainer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(6, 8, bias=False)
        self.k = nn.Linear(6, 4, bias=False)
        self.norm = nn.LayerNorm(6)


class Engine(nn.Module):
    """Has another dtype, fused projections and another name for the norm."""

    def __init__(self) -> None:
        super().__init__()
        self.qk = nn.Parameter(torch.zeros(12, 6, dtype=torch.bfloat16))
        self.ln = nn.LayerNorm(6)


def mapping(prefix: str = "") -> Mapping:
    fused = Convert((r"^q\.weight$", r"^k\.weight$"), (f"{prefix}qk",), (Concatenate(0),))
    return Mapping(renames=(Rename(r"^norm\.", f"{prefix}ln."),), converts=(fused,))


def weights() -> dict[str, Tensor]:
    """No two tensors have an equal element, in bfloat16 neither."""
    state = Trainer().state_dict().items()
    return {name: torch.arange(t.numel()).reshape(t.shape) / 7 + 8 * number for number, (name, t) in enumerate(state)}


def make_trainer() -> nn.Module:
    model = Trainer()
    model.load_state_dict(weights())
    return fully_shard(model)


def serve(rank: int, meeting: Meeting) -> None:
    model, full = Engine(), weights()
    with receiving(meeting, model, mapping=mapping()) as receiver:
        take(receiver)
    fused = torch.cat([full["q.weight"], full["k.weight"]]).to(torch.bfloat16)
    assert_same(model.state_dict(), {"qk": fused, "ln.weight": full["norm.weight"], "ln.bias": full["norm.bias"]})


def test_a_mapping_fuses_and_renames() -> None:
    run([Job(2, partial(send_model, receivers=2), (make_trainer,)), Job(2, serve)])


class Hidden(nn.Module):
    """An engine's tensors, which its state dict shows as the trainer's: collectives in hooks make copies of them."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Engine()
        self.register_state_dict_post_hook(_show_parts)
        self.register_load_state_dict_pre_hook(lambda *_: None)


def _show_parts(module: Hidden, state: dict[str, Tensor], prefix: str, _: object) -> None:
    names = [name for name in state if name.startswith(prefix)]
    full = {name.removeprefix(f"{prefix}inner."): full_tensor(state.pop(name)) for name in names}
    q, k = full.pop("qk").split([8, 4])
    state |= {f"{prefix}q.weight": q.clone(), f"{prefix}k.weight": k.clone()}
    state |= {prefix + name.replace("ln", "norm"): value for name, value in full.items()}


def make_hidden(number: int = 0) -> nn.Module:
    model = Hidden().bfloat16()
    with torch.no_grad():
        for i, parameter in enumerate(model.parameters()):
            parameter.copy_(torch.arange(parameter.numel()).reshape(parameter.shape) + 100 * i + number)
    return fully_shard(model)


def receive_hidden(rank: int, meeting: Meeting) -> None:
    model, expected = make_hidden(7), make_hidden()
    with receiving(meeting, model, mapping=mapping("inner.")) as receiver:
        take(receiver)
    found, wanted = ({n: full_tensor(p.detach()) for n, p in m.named_parameters()} for m in (model, expected))
    assert_same(found, wanted)


def test_a_mapping_names_what_hooks_hide_in_both_jobs() -> None:
    names = {name: torch.zeros(t.shape) for name, t in Trainer().state_dict().items()}
    send = partial(send_model, receivers=2, mapping=mapping("inner."), names_from=names)
    run([Job(2, send, (make_hidden,)), Job(2, receive_hidden)])


class Embedding(nn.Module):
    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 3)
        self.head = nn.Linear(3, 7, bias=False)
        if tied:
            self.head.weight = self.embed.weight


def receive_tied(rank: int, meeting: Meeting) -> list[str]:
    model = Embedding(tied=True)
    before = model.embed.weight.detach().clone()
    with receiving(meeting, model) as receiver:
        text = outcome(receiver.receive_weights)
        assert torch.equal(model.embed.weight, before)
        return [text]


def test_two_tensors_for_tied_weights_are_refused() -> None:
    jobs = [Job(1, send_model, (partial(Embedding, tied=False),)), Job(1, receive_tied)]
    for ((text,),) in run(jobs):
        assert "the sender has embed.weight and head.weight, whose values may differ" in text


def test_names_from_a_checkpoint_may_lack_tensors_that_are_ignored_or_tied(tmp_path: Path) -> None:
    save_file({"embed.weight": torch.zeros(7, 3)}, tmp_path / "m.safetensors")
    ignoring = Mapping(ignore_missing=(r"^head\.",))
    for model, rules in ((Embedding(tied=False), ignoring), (Embedding(tied=True), Mapping())):
        offered, placed, *_ = catalog(model, collect(model), rules, tmp_path)
        assert list(offered.names) == ["embed.weight"]
        assert [[name for name, _ in places] for places in placed] == [["embed.weight"]]


def test_names_that_do_not_suffice_are_refused_before_anything_is_sent() -> None:
    model = nn.ParameterDict({"qk": nn.Parameter(torch.zeros(12, 6))})
    splits = Mapping(converts=(Convert((r"^w$",), ("qk", "v"), (epload.mapping.Split(0),)),))
    with pytest.raises(epload.ModelMismatch, match=r"w has 144 elements, and the model has 72 for it, in qk"):
        catalog(model, collect(model), splits, {"w": torch.zeros(24, 6)})
    with pytest.raises(ValueError, match="cannot be derived from a mapping of your own: pass names_from="):
        epload.WeightSender(Trainer(), ("127.0.0.1", 0), receivers=1, mapping=mapping())


LINEAR: Any = nn.Linear(2, 2)
MISTAKES: dict[str, tuple[type[Exception], str, Callable[[], Any]]] = {
    "no mapping": (ValueError, "expected mapping to be 'auto' or an epload.Mapping, got None", lambda: receive(mapping=None)),
    "another mapping": (ValueError, "or an epload.Mapping, got 'atuo'", lambda: receive(mapping="atuo")),
    "strict": (TypeError, "expected strict to be a bool, got 'no'", lambda: receive(strict="no")),
    "a name of an engine": (TypeError, "expected engine to be an epload.EngineRank, got 'a'", lambda: receive(engine="a")),
    "a rank of numpy": (TypeError, "a rank and a size that are ints, got", lambda: epload.EngineRank("a", np.int64(0))),  # type: ignore[arg-type]
    "an engine without a name": (TypeError, "expected a name that is a str, ", lambda: epload.EngineRank(5)),  # type: ignore[arg-type]
    "a state dict": (TypeError, "expected model to be a torch.nn.Module, got a OrderedDict", lambda: send(LINEAR.state_dict())),
    "a class": (TypeError, "expected model to be a torch.nn.Module, got the class Linear", lambda: send(nn.Linear)),
}


def receive(**options: Any) -> None:
    epload.WeightReceiver(LINEAR, "127.0.0.1:1", timeout=1, **options)


def send(model: Any) -> None:
    epload.WeightSender(model, ("127.0.0.1", 0), receivers=1).close()


@pytest.mark.parametrize("case", MISTAKES)
def test_mistakes_are_refused_before_anything_waits(case: str) -> None:
    kind, text, call = MISTAKES[case]
    must_raise(kind, text, call)


def send_by_two_mappings(rank: int, meeting: Meeting) -> list[str]:
    """One of the ranks exchanges two tensors of one shape; and one passes no version."""
    state = {name: torch.full((2, 2), float(i)) for i, name in enumerate("qk")}
    model = nn.ParameterDict({name: nn.Parameter(value) for name, value in state.items()})
    exchange = Rename(r"^q$", "x"), Rename(r"^k$", "q"), Rename(r"^x$", "k")
    options = {"mapping": Mapping(renames=exchange if rank else ()), "names_from": state}
    with sending(meeting, model, **options) as sender:
        return [error_of(partial(sender.send_weights, version)) for version in (1, "2" if rank else 2, 3)]


def test_ranks_that_send_by_different_mappings_send_nothing() -> None:
    ((here, there),) = run([Job(2, send_by_two_mappings)])
    assert here[::2] == there[::2]
    assert all("models with different tensors, or different mappings" in text for text in here[::2])
    assert here[1] == there[1] == "TypeError: expected version to be an int of at least 0, got '2' [rank 1]"
