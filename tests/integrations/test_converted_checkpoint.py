"""A checkpoint whose tensors a converter of VeOmni's kind makes: one pass over the files, one tensor at a time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import epload
from epload.checkpoint.base import Checkpoint
from epload.core.pieces import Piece
from epload.errors import CheckpointError
from epload.integrations.veomni.converted import ConvertedCheckpoint
from support.models import on_meta
from support.veomni_models import EXPERTS, FuseExperts, Model, NeedsData, Scaled, differ, expected, store, write


def converted(folder: Path, kind: type[FuseExperts] = FuseExperts) -> tuple[ConvertedCheckpoint, list[FuseExperts]]:
    made: list[FuseExperts] = []

    def make() -> FuseExperts:
        made.append(kind(EXPERTS))
        return made[-1]

    return ConvertedCheckpoint(folder, make, lambda name: name), made


def read(source: Checkpoint, name: str) -> Tensor:
    """Reads two pieces, of which the second starts within an element."""
    manifest = source.manifest
    number = manifest.names.index(name)
    nbytes = manifest.nbytes_of()[number]
    raw = torch.zeros(nbytes + 3, dtype=torch.uint8)
    source.fill(raw, [Piece(number, 0, 3, 2)])
    source.fill(raw, [Piece(number, 2, 5, nbytes - 2)])
    return raw[3:].clone().view(manifest.dtypes[number]).reshape(manifest.shapes[number])


def test_one_pass_and_one_tensor_at_a_time(tmp_path: Path) -> None:
    values = expected(store(tmp_path))
    source, made = converted(tmp_path)
    assert set(source.manifest.names) == set(values)
    passes = len(made)
    assert all(torch.equal(read(source, name), values[name]) for name in source.manifest.names)
    assert len(made) == passes + 1
    assert made[-1].most <= 2  # the one that is read, and the next
    first = next(name for name in source.manifest.names if name.endswith("gate_up"))
    assert torch.equal(read(source, first), values[first])
    source.close()
    assert torch.equal(read(source, first), values[first])


def test_a_converter_that_computes_values_and_emits_at_the_end(tmp_path: Path) -> None:
    stored = store(tmp_path)
    weight, scale = torch.arange(-50, 49, dtype=torch.int8).reshape(9, 11), torch.linspace(0.1, 0.9, 9).reshape(9, 1)
    alone = torch.arange(6, dtype=torch.float32)
    write(tmp_path, {"z.scale": scale, **stored, "z.weight": weight, "left.scale": alone})
    source, _ = converted(tmp_path, Scaled)
    values = expected(stored) | {"z.weight": weight.float() * scale, "left.scale": alone}
    assert set(source.manifest.names) == set(values)
    assert all(torch.equal(read(source, name), value) for name, value in values.items())


def test_a_converter_may_look_at_values(tmp_path: Path) -> None:
    values = expected(store(tmp_path))
    source, _ = converted(tmp_path, NeedsData)
    assert all(torch.equal(read(source, name), value) for name, value in values.items())


def test_what_a_converter_does_wrong_is_named(tmp_path: Path) -> None:
    store(tmp_path)

    class Same(FuseExperts):
        def result(self, name: str, tensor: Tensor) -> Any:
            return super().result("embed.weight", tensor)

    with pytest.raises(CheckpointError, match=r"both embed.weight and .* are converted to embed.weight"):
        converted(tmp_path, Same)[0].prepare()

    class Fickle(FuseExperts):
        def result(self, name: str, tensor: Tensor) -> Any:
            return super().result(name, tensor if tensor.is_meta else tensor.double())

    source, _ = converted(tmp_path, Fickle)
    with pytest.raises(CheckpointError, match=r"float32 in its first pass, but .* torch.float64 in a later one"):
        read(source, "layers.0.experts.down")
    with pytest.raises(CheckpointError, match="no checkpoint at"):
        converted(tmp_path / "absent")[0].prepare()


def test_a_converter_is_one_for_epload_too(tmp_path: Path) -> None:
    """The same source, given to ``load`` itself."""
    values = expected(store(tmp_path))
    model = on_meta(Model)
    source, _ = converted(tmp_path)
    epload.load(model, source, progress=False)
    assert differ({name: tensor.detach() for name, tensor in model.state_dict().items()}, values) == []
