"""An engine's model and its draft have each version together, or neither has it."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import epload
from support.checks import all_fine, fill, full_tensor
from support.jobs import Job, Meeting, run
from support.small_syncs import outcome, receiving
from support.sync_jobs import send_model


class Trainer(nn.Module):
    """A model with the layer of its draft."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 3)
        self.layer = nn.Linear(3, 5)
        self.mtp = nn.Linear(3, 5)
        self.norm = nn.LayerNorm(3)


class Model(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 3, dtype=dtype)
        self.layer = nn.Linear(3, 5, dtype=dtype)
        self.norm = nn.LayerNorm(3, dtype=dtype)


class Draft(nn.Module):
    """Shares a name with the model, and has a tensor of another dtype."""

    def __init__(self, rows: int = 5) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 3, dtype=torch.float64)
        self.mtp = nn.Linear(3, rows)


class LoadedDraft(nn.Module):
    """A model like an engine's, with the names and the fused layout of its own ``load_weights``."""

    def __init__(self) -> None:
        super().__init__()
        self.fused = nn.Parameter(torch.zeros(5, 4))
        self.table = nn.Parameter(torch.zeros(7, 3))
        self.fails = False

    def load_weights(self, weights: Any) -> None:
        for name, tensor in weights:
            if name == "mtp.weight":
                self.fused.data[:, :3].copy_(tensor)
            elif name == "mtp.bias":
                self.fused.data[:, 3].copy_(tensor * 2)
                if self.fails:
                    raise RuntimeError("a broken draft")
            elif name == "embed.weight":
                self.table.data.copy_(tensor)


def values(version: int) -> dict[str, Tensor]:
    """Values that are not exact in bfloat16, which one of the models has."""
    return {
        name: torch.arange(tensor.numel()).reshape(tensor.shape) / 7 + version + i
        for i, (name, tensor) in enumerate(Trainer().state_dict().items())
    }


def make_trainer() -> nn.Module:
    return fully_shard(Trainer())


def change(model: nn.Module, version: int) -> None:
    fill(model, values(version))


def check(models: list[Any], version: int) -> list[str]:
    full, problems = values(version), []
    for model in models:
        if isinstance(model, LoadedDraft):
            expected = LoadedDraft()
            expected.load_weights(full.items())
            full = expected.state_dict()
        for name, tensor in model.state_dict().items():
            whole = full_tensor(tensor)
            if not torch.equal(whole, full[name].to(whole.dtype)):
                problems.append(f"{type(model).__name__}.{name} of version {version}")
    return problems


def receive(rank: int, meeting: Meeting, kind: str, stage: str) -> list[str]:
    if kind == "sharded":
        models: list[Any] = [fully_shard(Model(torch.bfloat16)), fully_shard(Draft())]
        targets: list[Any] = models
    else:
        models = [Model(), LoadedDraft()]
        targets = [models[0], epload.EngineModel(models[1])]
    problems = []
    with receiving(meeting, targets, stage=stage, verify=True) as receiver:
        for version in (1, 2):
            receiver.receive_weights(version)
            if stage != "none" and version == 2:
                problems += check(models, 1)
            receiver.commit()
            problems += check(models, version)
            assert (receiver.version, receiver.partially_updated) == (version, False)
    return problems


@pytest.mark.parametrize(("kind", "stage"), [("sharded", "host"), ("engine", "device"), ("sharded", "none")])
def test_both_have_each_version(kind: str, stage: str) -> None:
    sender = partial(send_model, change=change, versions=2, receivers=2, verify=True, delta="always")
    sent, received = run([Job(2, sender, (make_trainer,)), Job(2, receive, (kind, stage))])
    assert sent == [["", ""]] * 2
    all_fine(received)


def fail(rank: int, meeting: Meeting) -> list[str]:
    """A draft fails before, between and in the commit of versions; returns what is wrong."""
    model, draft, problems = Model(), Draft(rows=6), []
    before = [{name: tensor.clone() for name, tensor in part.state_dict().items()} for part in (model, draft)]

    def unchanged() -> bool:
        states = [part.state_dict() for part in (model, draft)]
        return all(
            torch.equal(old[name], state[name]) for old, state in zip(before, states, strict=True) for name in old
        )

    for other, expected in (
        (draft, "mtp.weight has shape [5, 3], but [6, 3]"),
        (nn.Linear(3, 5), "only the receiver has 2 tensors: weight, bias"),
        (nn.ModuleDict({"embed": nn.Embedding(7, 3)}), "only the sender has 2 tensors: mtp.weight, mtp.bias"),
    ):
        with receiving(meeting, [model, other]) as receiver:
            text = outcome(receiver.receive_weights)
            problems += [] if expected in text and unchanged() else [text]
    draft = Draft()
    before[1] = {name: tensor.clone() for name, tensor in draft.state_dict().items()}
    with receiving(meeting, [model, draft]) as receiver:
        receiver.receive_weights()
        whole, draft.mtp = draft.mtp, nn.Linear(3, 6)
        text = outcome(receiver.commit)
        draft.mtp = whole
        problems += [] if "other tensors or layouts" in text and unchanged() else [text]
        assert (receiver.version, receiver.partially_updated, receiver.staged) == (None, False, 4)
        receiver.commit()
        problems += check([model, draft], 4)
    broken = LoadedDraft()
    with receiving(meeting, [model, epload.EngineModel(broken)]) as receiver:
        receiver.receive_weights()
        broken.fails = True
        text = outcome(receiver.commit)
        assert (receiver.version, receiver.partially_updated) == (None, True), text
        broken.fails = False
        receiver.commit()
        assert (receiver.version, receiver.partially_updated) == (5, False)
        problems += check([model, broken], 5)
    return problems


def test_a_draft_that_fails_leaves_both_as_they_were_or_both_partially_updated() -> None:
    sender = partial(send_model, change=change, versions=5)
    (outcomes,), received = run([Job(1, sender, (make_trainer,)), Job(1, fail)])
    assert [bool(text) for text in outcomes] == [True, True, True, False, False]
    all_fine(received)
