"""Models of the transformers library on a fake asynchronous accelerator, some architectures and all their checkpoint layouts,
sharded by torch. The oracle is the library's own model in one process, sharded the same way on CPU."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from itertools import cycle
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

import epload
from support import fakedev, ranks
from support.accelerator import DEVICE, NODES
from support.checks import all_fine, ties
from support.pretrained import TP_PLAN, build, fsdp_on, prepare, whole

pytestmark = pytest.mark.usefixtures("fake_device")

MESHES: dict[str, dict[str, int]] = {
    "fsdp": {"shard": 4},
    "hsdp": {"replicate": 2, "shard": 2},
    "tp": {"dp": 2, "tp": 2},
}
WAYS = (
    ("one", "auto"),
    ("one", "striped"),
    ("every", "auto"),
    ("partitioned", "two_level"),
    ("partitioned", "striped"),
)


def parallelized(model: nn.Module, axes: dict[str, int], device: str) -> nn.Module:
    mesh: DeviceMesh = init_device_mesh(device, tuple(axes.values()), mesh_dim_names=tuple(axes))
    if "tp" in axes:
        parallelize_module(model, mesh["tp"], TP_PLAN)
    return fsdp_on(model, mesh["dp"] if "tp" in axes else mesh)  # type: ignore[no-any-return]


def local(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def check(kind: str, folder: Path, loaders: Iterator[epload.HierarchicalLoader]) -> Iterator[str]:
    reference = whole(folder, kind)
    layouts = sorted(path.name for path in folder.iterdir() if path.name.split(",")[0] == kind)
    for name, axes in MESHES.items():
        if name == "tp" and kind not in ("gpt_oss", "bert", "llama"):
            continue
        expected = parallelized(deepcopy(reference), axes, "cpu")
        for layout in layouts:
            with torch.device("meta"):
                model = parallelized(build(kind), axes, fakedev.NAME)
            for _ in range(2):  # from meta, and again
                loader = next(loaders)
                report = loader.load(model, folder / layout)
                what = f"{layout}, {name}, {loader.options.readers}/{report.algorithm}"
                if report.missing_keys or report.unexpected_keys:
                    yield f"{what}: missing {report.missing_keys}, unexpected {report.unexpected_keys}"
                wanted = dict(expected.state_dict(keep_vars=True)) | dict(expected.named_buffers())
                found = dict(model.state_dict(keep_vars=True)) | dict(model.named_buffers())
                if set(found) != set(wanted) or ties(found) != ties(wanted):
                    yield f"{what}: names or ties differ: {sorted(set(found) ^ set(wanted))}, {ties(found)}"
                for key in set(found) & set(wanted):
                    got, want = local(found[key]), local(wanted[key])
                    if str(got.device) != DEVICE or got.dtype != want.dtype or not torch.equal(got.cpu(), want):
                        yield f"{what}: {key} on {got.device} differs"


def _on_rank(rank: int, kind: str, folder: Path) -> list[str]:
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()  # plans with rules that match nothing in a small model
    topology = epload.Topology.from_nodes(NODES[4])
    loaders = cycle(
        epload.HierarchicalLoader(topology, readers=readers, algorithm=algorithm, bucket_bytes=16 << 10, progress=False)
        for readers, algorithm in WAYS
    )
    return list(check(kind, folder, loaders))


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    prepare(folder)
    return folder


@pytest.mark.parametrize("kind", ["qwen3_moe", "deepseek_v3", "gpt_oss", "bert"])
def test_a_model_has_the_shards_of_one_process(kind: str, checkpoints: Path) -> None:
    all_fine(ranks.run(4, _on_rank, kind, checkpoints, setup=fakedev.setup))
