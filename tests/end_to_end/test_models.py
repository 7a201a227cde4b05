"""Real models, as the transformers library makes, saves and parallelizes them: architectures x checkpoint layouts x meshes.

Each is loaded from meta by epload, its readers taking turns. The oracle is the library's own single-process
``from_pretrained``, parallelized the same way: each rank's tensors bit for bit, and on CPU the logits of the whole model.
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import epload
from support import fp8
from support.accelerator import run_on
from support.checks import all_fine, differences, full_tensor
from support.models import use_device
from support.pretrained import DENSE, MATRIX, TORCH_TP, build, prepare, quiet, whole
from support.small_model import wrong

READERS = [
    ("one", "auto"), ("every", "auto"), ("partitioned", "two_level"), ("one", "striped"), ("partitioned", "striped"),
]  # fmt: skip
PROMPT = torch.arange(22).reshape(2, 11) * 37 % 60 + 2


def check(world: int, kind: str, folder: Path, device: str, loaders: Iterator[Any]) -> Iterator[str]:
    reference = whole(folder, kind)
    buffers = dict(reference.named_buffers())
    with torch.no_grad():
        logits = reference(PROMPT).logits
    layouts = sorted(path.name for path in folder.iterdir() if path.name.split(",")[0] == kind)
    tables = [table for table in MATRIX[kind] if device == "cpu" or table in (DENSE, TORCH_TP)]
    for number, (name, way) in enumerate((name, way) for table in tables for name, way in table[world].items()):
        expected = deepcopy(reference).to(device)
        if device != "cpu":
            expected.tie_weights()  # which are tensors of their own on another device
        expected = way.parallelize(expected)
        # Mappings do not depend on the number of ranks, so that with 6 the layouts take turns.
        for layout in layouts if world == 4 else [layouts[number % len(layouts)]]:
            with torch.device("meta"):
                model = build(kind)
            model = way.parallelize(model)
            for turn in range(2 if device != "cpu" else 1):  # from meta, and again
                loader = next(loaders)
                report = loader.load(model, folder / layout)
                what = f"{layout}, {name} on {world}, readers={loader.options.readers}, turn {turn}"
                if report.missing_keys or report.unexpected_keys:
                    yield f"{what}: missing {report.missing_keys}, unexpected {report.unexpected_keys}"
                yield from (f"{what}: {wrong}" for wrong in differences(expected, model))
            for buffer, value in model.named_buffers():
                if not torch.equal(value.cpu(), buffers[buffer]) or value.dtype != buffers[buffer].dtype:
                    yield f"{what}: buffer {buffer} differs"
            if device != "cpu":
                continue
            with torch.no_grad():
                got = full_tensor(model(PROMPT).logits)
            off = (got - logits).abs().max().item()
            if not off <= way.tolerance:
                yield f"{what}: logits are off by {off}"


def _on_rank(rank: int, device: str, world: int, kind: str, folder: Path) -> list[str]:
    quiet()
    use_device(device)
    topology = epload.Topology.from_nodes([list(range(world // 2)), list(range(world // 2, world))])
    stream = None if device == "cpu" else torch.Stream(device)
    options = {"bucket_bytes": 16 << 10, "progress": False, "stream": stream}
    loaders = [epload.HierarchicalLoader(topology, readers=way, algorithm=how, **options) for way, how in READERS]
    return list(check(world, kind, folder, device, cycle(loaders)))


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)  # as on the ranks: the order of a sum's terms depends on it
    folder = tmp_path_factory.mktemp("models")
    prepare(folder)
    others = {path.name for path in folder.iterdir()} - set(MATRIX)
    fused = {f"{kind}, fused" for kind in ("qwen3_moe", "mixtral", "deepseek_v3")}
    assert others == fused | {"qwen3_vl_moe, transposed"}
    return folder


@pytest.mark.parametrize(("world", "kind"), [*((4, kind) for kind in MATRIX), (6, "qwen3_moe")])
def test_models_are_those_of_one_process(world: int, kind: str, checkpoints: Path) -> None:
    all_fine(run_on("cpu", world, _on_rank, world, kind, checkpoints))


@pytest.mark.parametrize(("kind", "place"), [("qwen3_moe", "hccl"), ("gpt_oss", "nccl"), ("bert", "nccl")])
def test_models_on_a_device_are_those_of_one_process(kind: str, place: str, checkpoints: Path) -> None:
    all_fine(run_on(place, 4, _on_rank, 4, kind, checkpoints))


def _dequantized(rank: int, device: str, folder: Path) -> list[str]:
    """Scales travel to the device, and the weights there are what the reference computes."""
    problems = []
    values = fp8.expected(fp8.checkpoint(), torch.bfloat16)
    mesh = init_device_mesh(torch.device(device).type, (2,))
    for nodes, readers in (([[0], [1]], "one"), ([[0, 1]], "one"), ([[0, 1]], "every")):
        loader = epload.HierarchicalLoader(epload.Topology.from_nodes(nodes), readers=readers, bucket_bytes=20000)
        model = fully_shard(fp8.Tree(values), mesh=mesh)
        loader.load(model, folder, mapping=fp8.MAPPING)
        problems += [f"{readers} on {nodes}: {text}" for text in wrong(model, values, where=device)]
    return problems


@pytest.mark.parametrize("place", ["cpu", "nccl", "hccl"])
def test_fp8_weights_are_dequantized(place: str, tmp_path: Path) -> None:
    fp8.store(tmp_path)
    all_fine(run_on(place, 2, _dequantized, tmp_path))
