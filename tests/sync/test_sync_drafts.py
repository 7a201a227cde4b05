"""An engine's model and its draft have each version together, or neither has it."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import epload
from support.checkpoints import assert_same
from support.checks import fill, full_tensor
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
        places = {
            "mtp.weight": self.fused.data[:, :3],
            "mtp.bias": self.fused.data[:, 3],
            "embed.weight": self.table.data,
        }
        for name, tensor in weights:
            if name in places:
                places[name].copy_(tensor * 2 if name == "mtp.bias" else tensor)
            if name == "mtp.bias" and self.fails:
                raise RuntimeError("a broken draft")


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


def check(models: list[Any], version: int) -> None:
    full = values(version)
    for model in models:
        if isinstance(model, LoadedDraft):
            expected = LoadedDraft()
            expected.load_weights(full.items())
            full = expected.state_dict()
        found = {name: full_tensor(tensor) for name, tensor in model.state_dict().items()}
        assert_same(found, {name: full[name].to(tensor.dtype) for name, tensor in found.items()})


def receive(rank: int, meeting: Meeting, kind: str, stage: str) -> None:
    models: list[Any] = [Model(), LoadedDraft()]
    targets: list[Any] = [models[0], epload.EngineModel(models[1])]
    if kind == "sharded":
        models = targets = [fully_shard(Model(torch.bfloat16)), fully_shard(Draft())]
    with receiving(meeting, targets, stage=stage, verify=True) as receiver:
        for version in (1, 2):
            receiver.receive_weights(version)
            if stage != "none" and version == 2:
                check(models, 1)
            receiver.commit()
            check(models, version)
            assert (receiver.version, receiver.partially_updated) == (version, False)


@pytest.mark.parametrize(("kind", "stage"), [("sharded", "host"), ("engine", "device"), ("sharded", "none")])
def test_both_have_each_version(kind: str, stage: str) -> None:
    sender = partial(send_model, change=change, versions=2, receivers=2, verify=True, delta="always")
    assert run([Job(2, sender, (make_trainer,)), Job(2, receive, (kind, stage))])[0] == [["", ""]] * 2


def clones(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def fail(rank: int, meeting: Meeting) -> None:
    """A draft fails before, between and in the commit of versions."""
    model, draft = Model(), Draft(rows=6)
    before = clones(model), clones(draft)
    shared = nn.ModuleDict({"mtp": model.layer})

    for other, expected in (
        (draft, "mtp.weight has shape [5, 3], but [6, 3]"),
        (nn.Linear(3, 5), "only the receiver has 2 tensors: weight, bias"),
        (nn.ModuleDict({"embed": nn.Embedding(7, 3)}), "only the sender has 2 tensors: mtp.weight, mtp.bias"),
        (shared, "2 tensors: layer.weight, mtp.weight, whose values may differ, but a model and its draft have one tensor"),
    ):
        with receiving(meeting, [model, other]) as receiver:
            assert expected in outcome(receiver.receive_weights)
            assert_same(model.state_dict(), before[0])
            assert_same(draft.state_dict(), before[1])
    draft = Draft()
    before = clones(model), clones(draft)
    with receiving(meeting, [model, draft]) as receiver:
        receiver.receive_weights()
        whole, draft.mtp = draft.mtp, nn.Linear(3, 6)
        assert "other tensors or layouts" in outcome(receiver.commit)
        draft.mtp = whole
        assert_same(model.state_dict(), before[0])
        assert_same(draft.state_dict(), before[1])
        assert (receiver.version, receiver.partially_updated, receiver.staged) == (None, False, 5)
        receiver.commit()
        check([model, draft], 5)
    broken = LoadedDraft()
    with receiving(meeting, [model, epload.EngineModel(broken)]) as receiver:
        receiver.receive_weights()
        broken.fails = True
        text = outcome(receiver.commit)
        assert (receiver.version, receiver.partially_updated) == (None, True), text
        broken.fails = False
        receiver.commit()
        assert (receiver.version, receiver.partially_updated) == (6, False)
        check([model, broken], 6)


def test_a_draft_that_fails_leaves_both_as_they_were_or_both_partially_updated() -> None:
    sender = partial(send_model, change=change, versions=6)
    ((outcomes,), _) = run([Job(1, sender, (make_trainer,)), Job(1, fail)])
    assert [bool(text) for text in outcomes] == [True, True, True, True, False, False]
