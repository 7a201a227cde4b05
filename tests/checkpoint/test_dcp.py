"""Folders of torch.distributed.checkpoint: any saved world size into any present one, equal to dcp.load bit for bit."""

from __future__ import annotations

import io
import json
import os
import pickle
import shutil
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.filesystem import SerializationFormat
from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper

import epload
from epload import Checkpoint, CheckpointError, HierarchicalLoader, Topology
from support import ranks
from support.checkpoints import assert_same, raw_bytes, read_all, tensor
from support.checks import all_fine, differences, full_values
from support.dcp_checkpoints import FORMATS, MODELS, folder_of, save_all, sharded
from support.failures import must_raise
from support.findings import not_refused
from support.readers import small_waves

WORLDS = (1, 3)
READERS = ("every", "one", "partitioned", "per_node", "auto")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    folders = {}
    for world in WORLDS:
        folders[world] = tmp_path_factory.mktemp(f"saved-by-{world}")
        ranks.run(world, save_all, folders[world])
    return folders


def _load_all(rank: int, folders: dict[int, Path], world: int) -> list[str]:
    small_waves()
    nodes = [[0, 1], [2, 3]] if world == 4 else [list(range(world))]
    problems, topology = [], Topology.from_nodes(nodes)
    for turn, (name, (saved_by, folder), form) in enumerate(product(MODELS, folders.items(), FORMATS)):
        path, expected, model = (
            folder_of(folder, name, form),
            sharded(name, values=True),
            sharded(name, False, on="meta"),
        )
        readers, verify = READERS[turn % len(READERS)], turn % 2 == 1
        what = f"{name} saved by {saved_by} as {form}, {readers}, verify={verify}"
        with HierarchicalLoader(topology, readers=readers, bucket_bytes=300, verify=verify) as loader:
            report = loader.load(model, path)  # what has no elements is not in the safetensors files
            problems += [f"{what}: {text}" for text in differences(expected, model)]
            with torch.no_grad():
                for value in model.state_dict(keep_vars=True).values():
                    value.copy_(torch.zeros_like(value))
            loader.load(model, path)
            problems += [f"{what}, again: {text}" for text in differences(expected, model)]
        if form == "torch" and set(report.ignored_keys) != {"optim", "epoch"}:
            problems.append(f"{what}: reports {report.ignored_keys} as ignored")
    return problems


@pytest.mark.parametrize("world", [1, 4])
def test_any_world_size_into_any_other(world: int, saved: dict[int, Path]) -> None:
    all_fine(ranks.run(world, _load_all, saved, world))


def test_whole_tensors_and_any_pieces(saved: dict[int, Path]) -> None:
    """Reads tensors in boxes that several ranks wrote; pieces begin and end inside elements."""
    generator = Random(1)
    for name, (make, _) in MODELS.items():
        full = full_values(make())
        for (world, folder), form in product(saved.items(), FORMATS):
            checkpoint = Checkpoint.open(folder_of(folder, name, form))
            values = {key: value for key, value in full.items() if value.numel() or form == "torch"}
            assert_same(read_all(checkpoint), values)
            pieces, expected = [], bytearray()
            for number, key in enumerate(checkpoint.manifest.names):
                raw = raw_bytes(values[key])
                for _ in range(3 * bool(raw)):
                    begin = generator.randrange(len(raw))
                    part = raw[begin : generator.randint(begin + 1, len(raw))]
                    pieces.append(epload.Piece(number, begin, len(expected), len(part)))
                    expected += part
            bucket = torch.empty(len(expected), dtype=torch.uint8)
            checkpoint.fill(bucket, pieces)
            assert bytes(bucket.tolist()) == bytes(expected), (name, world, form)


def _save(folder: Path, state: dict[str, Any]) -> Path:
    dcp.save(state, checkpoint_id=folder, no_dist=True)
    return folder


SMALL = {"a.weight": tensor(1, (4, 3)), "b": tensor(2, (5,), torch.bfloat16)}
OTHER = {key: value + 1 for key, value in SMALL.items()}
IN_A_FLAT_DICT = {"model.layer.weight": tensor(1, (3, 2)), "model.norm": tensor(2, (2,))}
"""Here the name of a submodule is part of the names."""
PLACES: dict[str, tuple[dict[str, Any], dict[str, dict[str, Tensor]]]] = {
    "flat": (SMALL, {"": SMALL}),
    "model": ({"model": SMALL, "ema": OTHER, "step": 3}, {"": SMALL, "ema": OTHER}),
    "state_dict": ({"state_dict": SMALL, "optim": {"x": torch.ones(2)}}, {"": SMALL}),
    "app.model": ({"app": {"model": SMALL, "optim": {"x": torch.ones(2)}}}, {"": SMALL}),
    "only key": ({"weights": SMALL}, {"": SMALL}),
    "prefix": ({"ema": SMALL, "model": {"a.weight": torch.zeros(4, 3)}}, {"ema": SMALL}),
    "nested prefix": ({"app": {"ema": SMALL, "model": {"b": torch.zeros(1)}}}, {"app.ema.": SMALL}),
    "submodule": (IN_A_FLAT_DICT, {"": IN_A_FLAT_DICT}),
    "torchtitan": (
        {**IN_A_FLAT_DICT, "optimizer": {"state.model.norm.exp_avg": torch.ones(2)}, "train_state": {"step": torch.ones(1)}},
        {"": IN_A_FLAT_DICT},
    ),
    "two": ({"app": {"model": SMALL, "state_dict": OTHER}}, {"app.model": SMALL, "app.state_dict": OTHER}),
}  # fmt: skip


@pytest.mark.parametrize("case", PLACES)
def test_where_the_model_is(case: str, tmp_path: Path) -> None:
    """Also for a loader that knows the folder by another prefix."""
    state, expected = PLACES[case]
    _save(tmp_path, state)
    known = None
    for prefix, tensors in expected.items():
        checkpoint = Checkpoint.open(tmp_path, known, prefix)
        assert_same(read_all(checkpoint), tensors)
        known = checkpoint.manifest
    if case == "two":
        text = r"each of state_dict and model: pass prefix='app\.state_dict' or prefix='app\.m"
        must_raise(CheckpointError, text, Checkpoint.open, tmp_path)


def test_prefixes_that_select_nothing(tmp_path: Path) -> None:
    _save(tmp_path / "saved", SMALL)
    text = r"no tensor is under prefix='ema'; there are a\.weight, b"
    must_raise(CheckpointError, text, Checkpoint.open, tmp_path / "saved", prefix="ema")
    torch.save(SMALL, tmp_path / "a.pt")
    for source in (tmp_path / "a.pt", tmp_path, SMALL, Checkpoint.open(SMALL)):
        must_raise(ValueError, r"prefix='ema' is .* or renames= to epload\.convert\(\)", Checkpoint.open, source, prefix="ema")


def _in_metadata(change: Any) -> Any:
    def make(folder: Path) -> None:
        path = folder / ".metadata"
        metadata = pickle.loads(path.read_bytes())
        change(metadata)
        path.write_bytes(pickle.dumps(metadata))

    return make


def _replace_item(folder: Path, name: str, value: Any) -> None:
    """Puts another item of ``torch.save`` in place of a tensor's."""
    stream = io.BytesIO()
    torch.save(value, stream)
    with (folder / "__0_0.distcp").open("ab") as file:
        at = file.tell()
        file.write(stream.getvalue())

    def change(metadata: Any) -> None:
        item = next(info for index, info in metadata.storage_data.items() if index.fqn == name)
        item.offset, item.length = at, len(stream.getvalue())

    _in_metadata(change)(folder)


def test_items_of_one_shape_may_lie_differently(tmp_path: Path) -> None:
    """An item with another archive than the first of its shape is read for itself."""
    _save(tmp_path, {"a": tensor(1, (6,)), "b": tensor(2, (6,))})
    _replace_item(tmp_path, "b", tensor(3, (9,))[3:].requires_grad_())  # a view, and the same length with padding
    assert_same(read_all(Checkpoint.open(tmp_path)), {"a": tensor(1, (6,)), "b": tensor(3, (9,))[3:]})


class _Call:
    def __init__(self, function: Any, *args: Any) -> None:
        self._call = function, args

    def __reduce__(self) -> Any:
        return self._call


def _info(metadata: Any) -> Any:
    return next(iter(metadata.storage_data.values()))


WRONG: dict[str, tuple[Any, str]] = {
    "calls a function": (
        lambda folder: (folder / ".metadata").write_bytes(pickle.dumps(_Call(os.mkdir, str(folder / "executed")))),
        r"\.metadata: not the metadata .* the pickle names posix\.mkdir, which no checkpoint needs",
    ),
    "payload calls a function": (
        lambda folder: _replace_item(folder, "b", _Call(os.mkdir, str(folder / "executed"))),
        r"distcp \(b, at byte \d+\): expected a tensor as torch\.save writes it",
    ),
    "chosen hashes": (
        lambda folder: (folder / ".metadata").write_bytes(pickle.dumps({n * (2**61 - 1): None for n in range(9)})),
        "has a dict whose keys are neither strings nor objects",
    ),
    "not a pickle": (lambda folder: (folder / ".metadata").write_bytes(b"hello"), "not the metadata of a DCP checkpoint"),
    "file outside": (
        _in_metadata(lambda m: setattr(_info(m), "relative_path", "../../etc/passwd")),
        r"expected a plain file name in the checkpoint's own folder, got '\.\./\.\./etc/passwd'",
    ),
    "file missing": (lambda folder: (folder / "__0_0.distcp").unlink(), r"cannot read .*__0_0\.distcp"),
    "file truncated": (
        lambda folder: os.truncate(folder / "__0_0.distcp", 200), "has 200 bytes, but .* is to end at byte .*copy it again"
    ),
    "no chunks": (
        _in_metadata(lambda m: m.state_dict_metadata["a.weight"].chunks.clear()), r"a\.weight of shape \[4, 3\] has no chunks"
    ),
    "outside": (
        _in_metadata(lambda m: setattr(m.state_dict_metadata["a.weight"], "size", torch.Size([2, 3]))),
        r"a\.weight of shape \[2, 3\] has a chunk at \[0, 0\] of \[4, 3\], which reaches outside",
    ),
    "no such chunk": (
        _in_metadata(lambda m: setattr(m.state_dict_metadata["a.weight"].chunks[0], "offsets", torch.Size([1, 0]))),
        r"no file has the chunk of a\.weight at",
    ),
    "another dtype": (
        _in_metadata(lambda m: setattr(m.state_dict_metadata["a.weight"].properties, "dtype", torch.int32)),
        r"expected torch\.int32 \[4, 3\] by the metadata, got torch\.float32 \[4, 3\]",
    ),
    "compressed": (
        _in_metadata(lambda m: setattr(_info(m), "transform_descriptors", ["zstd"])), "saved through an extension .*zstd"
    ),
    "not contiguous": (
        lambda folder: _save(folder, {"model": nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last).state_dict()}),
        r"model\.weight, .*not in row-major order, .* save it contiguous",
    ),
    "negative offset": (_in_metadata(lambda m: setattr(_info(m), "offset", -4)), "expected non-negative integers, got"),
}  # fmt: skip


def test_a_pickle_that_changes_classes_does_not_outlive_its_load(tmp_path: Path) -> None:
    _save(tmp_path / "good", SMALL)
    names = [b"Metadata", b"TensorProperties"]
    state = b"N}X\x10\0\0\0__getattribute__K\1s\x86b"
    classes = [b"ctorch.distributed.checkpoint.metadata\n" + name + b"\n" for name in names]
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / ".metadata").write_bytes(b"\x80\2(" + b"".join(name + state for name in classes) + b"t.")
    must_raise(CheckpointError, "adds to something that has no items", Checkpoint.open, tmp_path / "bad")
    assert_same(read_all(Checkpoint.open(tmp_path / "good")), SMALL)


@pytest.mark.parametrize("what", WRONG)
def test_what_is_wrong_is_named(what: str, tmp_path: Path) -> None:
    make, message = WRONG[what]
    make(_save(tmp_path / "saved", SMALL))
    caught = must_raise(CheckpointError, message, Checkpoint.open, tmp_path / "saved")
    assert len(str(caught).splitlines()) == 1
    assert not (tmp_path / "saved" / "executed").exists()


def test_two_chunks_of_a_rank_in_one_file(tmp_path: Path) -> None:
    """Torch writes the last one alone if the file is of safetensors."""
    wrapper = LocalShardsWrapper([tensor(1, (2, 2)), tensor(2, (2, 2))], [(0, 0), (0, 2)])
    for format in (SerializationFormat.TORCH_SAVE, SerializationFormat.SAFETENSORS):
        writer = FileSystemWriter(tmp_path / format.name, serialization_format=format)
        dcp.save({"w": wrapper}, storage_writer=writer, no_dist=True)
    whole = {"w": torch.zeros(2, 4)}
    epload.load_state(whole, tmp_path / "TORCH_SAVE", progress=False)
    assert torch.equal(whole["w"], torch.cat([tensor(1, (2, 2)), tensor(2, (2, 2))], 1))
    text = r"has one of a rank's several chunks, as torch writes them; save the checkpoint again, without"
    must_raise(CheckpointError, text, epload.load_state, whole, tmp_path / "SAFETENSORS", progress=False)


def test_chunks_that_overlap(tmp_path: Path) -> None:
    for rank in (1, 2):
        info = json.dumps({"w": {"saved_offsets": [rank - 1, 0]}})
        path = tmp_path / f"shard-0000{rank}-model-00001-of-00001.safetensors"
        save_file({"w": tensor(rank, (2, 3))}, path, metadata={"DCP_SHARDING_INFO": info})
    text = r"w of shape \[3, 3\] has chunks at \[0, 0\] and \[1, 0\] that overlap"
    must_raise(CheckpointError, text, Checkpoint.open, tmp_path)


def _replaced(rank: int, folder: Path) -> list[str]:
    path = folder / ("other" if rank == 1 else "saved")
    model = nn.ParameterDict({"b": nn.Parameter(torch.zeros(5, dtype=torch.bfloat16), requires_grad=False)})
    model["a"] = nn.ParameterDict({"weight": nn.Parameter(torch.zeros(4, 3))})
    loader = HierarchicalLoader(readers="every", progress=False)
    text = "__0_0.distcp is not the file that the source rank has"
    return not_refused(lambda: loader.load(model, path), "CheckpointError", text)


def test_a_rank_with_another_checkpoint(tmp_path: Path) -> None:
    _save(tmp_path / "saved", SMALL)
    shutil.copytree(tmp_path / "saved", tmp_path / "other")
    path = tmp_path / "other" / "__0_0.distcp"
    path.write_bytes(path.read_bytes().replace(raw_bytes(SMALL["a.weight"]), bytes(48)))
    all_fine(ranks.run(2, _replaced, tmp_path))
