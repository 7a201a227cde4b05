"""What a recording reports, what it refuses, and which targets it takes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from epload.errors import LoadError, ModelMismatch
from epload.integrations.engine.recording import record
from support.engines import Engine, Loader, Weights, engine_checkpoint, unique
from support.recordings import by_name, check_recording, manifest_of, record_model, tensors_of


def test_regions_that_nothing_writes_are_reported() -> None:
    def load(model: Loader, weights: Weights) -> None:
        for _, tensor in weights:
            model.a.data[1:, :2].copy_(tensor)

    recording = record_model(Loader(load, a=(3, 4), b=(2,)), unique({"w": (2, 2)}))
    assert recording.unwritten == {"a": (((0, 0), (1, 4)), ((1, 2), (2, 2))), "b": (((0,), (2,)),)}


def test_skipped_names_are_reported() -> None:
    recording = check_recording(
        lambda: Loader(lambda model, weights: by_name(model, list(weights)[:1]), a=(3,)), unique({"a": (3,), "x": (2,)})
    )
    assert recording.unused == ("x",)


def test_an_error_of_the_engine_is_an_error_at_once() -> None:
    def load(model: Loader, weights: Weights) -> None:
        for name, tensor in weights:
            if name == "x":
                raise KeyError("no parameter x")
            model.a.data.copy_(tensor)

    with pytest.raises(ModelMismatch, match=r"KeyError after it took x, and nothing was written: 'no parameter x'"):
        record_model(Loader(load, a=(3,)), unique({"a": (3,), "x": (2,)}))


def test_a_shape_that_does_not_fit_is_an_error() -> None:
    with pytest.raises(ModelMismatch, match=r"after it took a, and nothing was written: .*size"):
        record_model(Loader(by_name, a=(3, 4)), unique({"a": (3, 5)}))


@pytest.mark.parametrize("keep", [lambda w: w, lambda w: w[1:], lambda w: w * 2, lambda w: w.clone()])
def test_a_loader_that_keeps_tensors_for_later_is_refused(keep: Callable[[Tensor], Tensor]) -> None:
    def load(model: Loader, weights: Weights) -> None:
        model.pending = {name: keep(tensor) for name, tensor in weights}

    with pytest.raises(LoadError, match=r"keeps 2 of the tensors .*the first is a"):
        record_model(Loader(load, a=(3,), b=(2,)), unique({"a": (3,), "b": (2,)}))


def test_targets_that_share_memory_are_refused() -> None:
    memory = torch.zeros(8)
    with pytest.raises(ModelMismatch, match="a and b share part of their memory"):
        record(list, manifest_of({}), {"a": memory[:5], "b": memory[3:]})


def test_targets_whose_elements_share_memory_are_refused() -> None:
    with pytest.raises(ValueError, match="expected targets that are dense, but a is not"):
        record(list, manifest_of({}), {"a": torch.zeros(1).expand(4)})


def test_targets_may_be_on_meta() -> None:
    weights = engine_checkpoint()
    with torch.device("meta"):
        model = Engine(1)
    assert record(model.load_weights, manifest_of(weights), tensors_of(model)) == record_model(Engine(1), weights)


def test_targets_may_be_regions_of_one_storage() -> None:
    memory = torch.full((6, 8), -1.0)
    targets = {"a": memory[:, :3], "b": memory[:, 4:]}

    def load(weights: Weights) -> None:
        for name, tensor in weights:
            targets[name].copy_(tensor)

    weights = unique({"a": (6, 3), "b": (6, 4)})
    recording = record(load, manifest_of(weights), targets)
    assert [places[0][0] for places in recording.regions] == ["a", "b"]
    assert bool((memory == -1).all())


def test_a_write_beside_a_parameter_is_not_recorded() -> None:
    memory = torch.full((6, 8), -1.0)

    def load(weights: Weights) -> None:
        for _, tensor in weights:
            memory.copy_(tensor)

    weights = unique({"a": (6, 8)})
    recording = record(load, manifest_of(weights), {"a": memory[:, :3]})
    assert "outside" in recording.whole["a"]
    assert bool((memory == -1).all())
