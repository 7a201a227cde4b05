"""Loads after one that has failed: what that was to fill holds no values, whatever is loaded next."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForSequenceClassification

import epload
from epload import Checkpoint, CheckpointError, LoadError, Manifest, ModelMismatch, Pieces
from support.checks import local_of
from support.on_ranks import on_ranks

CONFIG = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 131,
}  # fmt: skip
POISON = 777.0


class Failing(Checkpoint):
    """Cannot be read, but for its headers."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self._inner = Checkpoint.from_state_dict(tensors)

    @property
    def manifest(self) -> Manifest:
        return self._inner.manifest

    def fill(self, bucket: Tensor, pieces: Sequence[Any] | Pieces) -> None:
        raise CheckpointError("no more bytes")


def on_meta() -> nn.Module:
    with torch.device("meta"):
        return LlamaForSequenceClassification(LlamaConfig(**CONFIG))


def body() -> dict[str, Tensor]:
    """A checkpoint without the head."""
    state = LlamaForSequenceClassification(LlamaConfig(**CONFIG)).state_dict()
    return {name: tensor.clone() for name, tensor in state.items() if not name.startswith("score")}


def fail(model: nn.Module, state: dict[str, Tensor], **options: Any) -> None:
    """Fails once the model has storage; what this holds then is not zero, which would look like values."""
    with pytest.raises(LoadError, match="no more bytes"):
        epload.load(model, Failing(state), progress=False, **options)
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if not name.startswith("written"):
                local_of(tensor).detach().numpy().fill(
                    POISON
                )  # past the versions of tensors, as memory that nobody wrote


@on_ranks(2)
def test_a_retry_initializes_what_the_first_load_was_to(rank: int) -> None:
    for shard in (False, True):
        model, state = on_meta(), body()
        if shard:
            fully_shard(model.model.layers[0])
            fully_shard(model)
        fail(model, state, strict=False)
        report = epload.load(model, state, strict=False, progress=False)
        head = local_of(model.score.weight)
        assert not (head == POISON).any(), f"sharded {shard}: {head}, initialized {report.initialized}"
        assert "score.weight" in report.initialized, f"sharded {shard}: {head}, initialized {report.initialized}"
        again = epload.load(model, state, strict=False, progress=False)
        assert not again.initialized.count("score.weight"), "a head that has values was initialized"
        assert torch.equal(head, local_of(model.score.weight)), "a head that has values was initialized"


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(2, 2, bias=False)
        self.written = nn.Linear(2, 2, bias=False)


def two_on_meta() -> nn.Module:
    with torch.device("meta"):
        return Two()


def test_another_checkpoint_does_not_leave_what_the_first_was_to_fill() -> None:
    weights = {"a.weight": torch.ones(2, 2), "written.weight": torch.ones(2, 2)}
    model = two_on_meta()
    fail(model, weights)
    with pytest.raises(ModelMismatch, match=r"fills 1 tensor .*: a\.weight"):
        epload.load(model, {"written.weight": torch.ones(2, 2)}, strict=False, progress=False)
    epload.load(model, weights, progress=False)
    epload.load(model, {"a.weight": torch.zeros(2, 2)}, strict=False, progress=False)
    assert model.written.weight.tolist() == [[1, 1], [1, 1]]


def test_what_a_caller_has_written_after_the_failure_is_a_value() -> None:
    model = two_on_meta()
    fail(model, {"a.weight": torch.ones(2, 2), "written.weight": torch.ones(2, 2)})
    nn.init.constant_(model.written.weight, 3)
    report = epload.load(model, {"a.weight": torch.ones(2, 2)}, strict=False, progress=False)
    assert report.missing_keys == ["written.weight"]
    assert model.written.weight.tolist() == [[3, 3], [3, 3]]


@pytest.mark.parametrize("hook", [lambda module, path, names: None, None])
def test_a_hook_that_leaves_tensors_unfilled_is_not_right_the_second_time(hook: Callable[..., None] | None) -> None:
    model, weights = two_on_meta(), {"a.weight": torch.ones(2, 2)}
    with pytest.raises(LoadError, match=r"init_missing left written\.weight unfilled"):
        epload.load(model, weights, strict=False, init_missing=lambda *_: None, progress=False)
    with pytest.raises(LoadError, match=r"written\.weight"):
        epload.load(model, weights, strict=False, init_missing=hook, progress=False)
