"""Applies recordings with plain torch, as the reference for what moves their regions."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

import epload
from epload.core.placement import box_slices
from epload.integrations.engine.recording import Recording, record
from support.checks import same_bits
from support.engines import Loader, Weights


def manifest_of(weights: Mapping[str, Tensor]) -> epload.Manifest:
    shapes = tuple(tuple(tensor.shape) for tensor in weights.values())
    return epload.Manifest(tuple(weights), shapes, tuple(tensor.dtype for tensor in weights.values()), "test")


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    return {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers(remove_duplicate=False))}


def poison(model: nn.Module) -> None:
    """Fills parameters with NaN, so that those that nobody writes show."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(torch.nan if parameter.is_floating_point() else 0)


def record_model(model: nn.Module, weights: Mapping[str, Tensor]) -> Recording:
    """Records the model's ``load_weights``, which must write nothing."""
    before = {name: tensor.detach().clone() for name, tensor in tensors_of(model).items()}
    pointers = {name: tensor.data_ptr() for name, tensor in tensors_of(model).items()}
    recording = record(model.load_weights, manifest_of(weights), tensors_of(model))
    after = tensors_of(model)
    assert pointers == {name: tensor.data_ptr() for name, tensor in after.items()}
    assert [name for name in before if not same_bits(before[name], after[name])] == []
    return recording


def apply(recording: Recording, model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Does what a receiver does with full tensors: fills, copies, then the engine's own loader for the others."""
    targets = tensors_of(model)
    recording.fill_constants(targets)
    copy_regions(recording, targets, weights)
    if recording.passed_through:
        with torch.no_grad():
            model.load_weights((name, weights[name].clone()) for name in recording.passed_through)


def copy_regions(recording: Recording, targets: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> None:
    for tensor, places in zip(weights.values(), recording.regions, strict=True):
        flat = tensor.flatten().clone()
        for name, view in places:
            region = flat.as_strided(view.size, view.strides, view.offset)
            targets[name].detach()[box_slices(view.start, view.size)] = region


def check_recording(make: Callable[[], nn.Module], weights: Mapping[str, Tensor]) -> Recording:
    """Records and applies; the result must be what the engine's own ``load_weights`` gives, bit for bit."""
    expected, model = make(), make()
    expected.load_weights((name, tensor.clone()) for name, tensor in weights.items())
    recording = record_model(model, weights)
    apply(recording, model, weights)
    theirs = tensors_of(model)
    wrong = [name for name, tensor in tensors_of(expected).items() if not same_bits(tensor, theirs[name])]
    assert wrong == [], f"{wrong} differ from what load_weights gives; {recording}"
    return recording


def by_name(model: Loader, weights: Weights) -> None:
    for name, tensor in weights:
        target = model.get_parameter(name[0])
        target.data.copy_(tensor)
