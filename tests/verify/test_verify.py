"""Verified loads, and the comparison of checkpoints."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from itertools import product
from math import inf, nan
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import epload
from epload import Checkpoint, CheckpointError, HierarchicalLoader, Topology, WeightSender
from epload.checkpoint.file_checkpoint import FileCheckpoint
from epload.checkpoint.state_dict import StateDictCheckpoint
from epload.loading import run
from epload.native import ops
from epload.planning.buckets import HEADER_BYTES
from epload.transfer.local import Local
from epload.verify import compare
from epload.verify.compare import compare_values
from support import ranks
from support.checks import all_fine
from support.failures import error_of, must_raise
from support.on_ranks import on_ranks
from support.small_model import BUCKET, NODES, Net, State, meta_net, only_readers, state_for, wrong

WAYS = (("one", "two_level"), ("one", "striped"), ("partitioned", "striped"), ("every", "two_level"))


def loader_for(way: tuple[str, str], verify: bool = True, bucket_bytes: int = BUCKET) -> HierarchicalLoader:
    nodes = Topology.from_nodes(NODES)
    return HierarchicalLoader(nodes, readers=way[0], algorithm=way[1], bucket_bytes=bucket_bytes, verify=verify, timeout=30)


Victim = Callable[..., Tensor | None]
"""The bytes to change, if any, of what a function was called with."""


@contextmanager
def flips(active: bool, victim: Victim, *functions: tuple[Any, str]) -> Iterator[None]:
    """The lowest bit of the first victim changes, after the call."""
    done = not active

    def then_flip(inner: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            nonlocal done
            result = inner(*args, **options)
            if not done and (data := victim(*args)) is not None:
                data.view(torch.uint8).view(-1)[0] ^= 1
                done = True
            return result

        return call

    with ExitStack() as stack:
        for owner, name in functions:
            stack.enter_context(mock.patch.object(owner, name, then_flip(getattr(owner, name))))
        yield
    assert done or not active, "nothing was flipped"


def flips_in_shard(active: bool, is_victim: Callable[[Tensor], bool]) -> AbstractContextManager[None]:
    """A shard changes after it was unpacked or read."""

    def victim(local: Local, of: int | range, *_: Any) -> Tensor | None:
        parts = local.regions(range(of, of + 1) if isinstance(of, int) else of)
        targets = (target for regions in parts for target in regions.targets)
        return next((t.detach() for t in targets if t.numel() and t.is_contiguous() and is_victim(t)), None)

    return flips(active, victim, (Local, "unpack"), (Local, "read"))


def on_the_way(buffer: Tensor | list[Tensor], *_: Any) -> Tensor | None:
    """The payload of a bucket that a relay or a broadcast brings to this rank. Striped, buckets have to be so large that each
    rank of a node has a stripe of one."""
    data = buffer[0] if isinstance(buffer, list) else buffer
    return data[HEADER_BYTES:] if bytes(data[:8].tolist()) == b"epload01" else None


def just_read(_: FileCheckpoint, bucket: Tensor, pieces: Any) -> Tensor:
    return bucket[pieces[0].bucket_offset :]


def flipped_in_shard(rank: int, path: Path, state: State, dtype: torch.dtype, verifiers: int) -> list[str]:
    with mock.patch("epload.loading.run._MOST_VERIFIERS", verifiers):
        return flipped_in_shard_by(rank, path, state, dtype)


def flipped_in_shard_by(rank: int, path: Path, state: State, dtype: torch.dtype) -> list[str]:
    problems = []
    # Where each rank reads a dict, nothing is there yet after "read".
    for way, source in [*product(WAYS, [path]), *product(WAYS[:-1], [state])]:
        model, loader = meta_net(), loader_for(way)
        source = only_readers(source, way[0]) if source is state else path
        with flips_in_shard(rank == 3, lambda target: target.ndim == 2 and target.shape[1] == 6 and len(target) <= 4):
            text = error_of(lambda m=model, each=loader, s=source: each.load(m, s, dtype=dtype))
        if not re.search(r"after the load, shards differ from .* as rank \d reads it: embed.weight on rank 3;", text):
            problems.append(f"{way}: {text}")
        loader.load(model, source, dtype=dtype)
        problems += [f"{way}, after that: {text}" for text in wrong(model, state, dtype)]
    return problems


@pytest.mark.parametrize(("dtype", "verifiers"), [(torch.float32, 64), (torch.bfloat16, 3)])
def test_a_bit_that_flips_in_a_shard_is_found_and_named(dtype: torch.dtype, verifiers: int, tmp_path: Path) -> None:
    """bfloat16 is converted when it is read again."""
    save_file(state_for(1), tmp_path / "model.safetensors")
    all_fine(ranks.run(4, flipped_in_shard, tmp_path / "model.safetensors", state_for(1), dtype, verifiers))


TWO_LEVEL, STRIPED = [("one", "two_level"), ("per_node", "two_level")], [("one", "striped"), ("partitioned", "striped")]
FLIPS: dict[str, tuple[int, list[tuple[str, str]], int, Victim, list[tuple[Any, str]]]] = {
    "on the way": (2, TWO_LEVEL[:1] + STRIPED, 4 * BUCKET, on_the_way, [(ops, "relay"), (ops, "coalesced_bcast")]),
    "while it is read": (0, TWO_LEVEL + STRIPED[1:], BUCKET, just_read, [(FileCheckpoint, "fill")]),
}
"""Rank, ways, bytes of a bucket, and what is flipped."""


def flipped(rank: int, path: Path, case: str) -> list[str]:
    where, ways, bucket_bytes, victim, functions = FLIPS[case]
    texts = []
    for way in ways:
        loader = loader_for(way, bucket_bytes=bucket_bytes)
        with flips(rank == where, victim, *functions):
            texts.append(error_of(lambda loader=loader: loader.load(meta_net(), path)))
        loader.load(meta_net(), path)
    return texts


@pytest.mark.parametrize("case", FLIPS)
def test_a_bit_that_flips_is_found(case: str, tmp_path: Path) -> None:
    save_file(state_for(1), tmp_path / "model.safetensors")
    for texts in zip(*ranks.run(4, flipped, tmp_path / "model.safetensors", case), strict=True):
        assert len(set(texts)) == 1, texts
        assert re.search(r"after the load, shards differ from .* on rank", texts[0]), texts


def test_a_file_that_ends_before_it_is_proven_is_named(tmp_path: Path) -> None:
    """The first of two; of both, the tensors have been read for the load."""
    model = nn.ParameterList([nn.Parameter(torch.full((50,), float(i))) for i in range(20)])
    for number in range(2):
        part = {str(i): torch.full((50,), float(i)) for i in range(number, 20, 2)}
        save_file(part, tmp_path / f"model-{number}.safetensors")
    prove = run._prove

    def truncate_first(*arguments: Any) -> None:
        os.truncate(tmp_path / "model-0.safetensors", 1500)
        prove(*arguments)

    with mock.patch.object(run, "_prove", truncate_first):
        must_raise(CheckpointError, r"model-0\.safetensors", HierarchicalLoader(verify=True).load, model, tmp_path)


NARROW = (torch.bfloat16, torch.float16, torch.float64)


def nan_places(rank: int, folder: Path, state: State) -> list[str]:
    """Loads that convert NaN, into tensors of rows and of columns, out of a file and of a dict."""
    problems = []
    for wanted, turned, source in product(NARROW, (False, True), (folder, state)):
        shape = state["w"].shape
        place = torch.empty(shape[::-1], dtype=wanted).T if turned else torch.empty(shape, dtype=wanted)
        model = torch.nn.ParameterDict({"w": torch.nn.Parameter(place)})
        loader = loader_for(("one", "two_level"))
        for _ in range(2):
            text = error_of(lambda loader=loader, model=model, source=source: loader.load(model, only_readers(source)))
            problems += [f"{wanted} {turned}: {text}"] if text else []
        with flips_in_shard(rank == 1 and not turned, lambda _: True):
            text = error_of(lambda loader=loader, model=model: loader.load(model, folder))
        if (" w on rank 1;" in text) == turned:
            problems.append(f"{wanted} {turned}: {text}")
    return problems


def test_which_nan_something_is_converted_to_is_not_doubted(tmp_path: Path) -> None:
    """It depends on where it lies."""
    values = torch.randn(40, 33)
    values[::3, 1::5] = torch.nan
    values[1::3, ::7] = -torch.nan
    save_file({"w": values}, tmp_path / "model.safetensors")
    all_fine(ranks.run(4, nan_places, tmp_path, {"w": values}))


def test_the_report_says_what_was_verified() -> None:
    for verify in (True, False):
        report = epload.load(Net(), state_for(), verify=verify)
        assert (report.verified, "verified" in report.summary, "\n  verified " in str(report)) == (verify,) * 3
    with mock.patch.object(StateDictCheckpoint, "verified", True):  # which means that it is not compared here
        assert not epload.load(Net(), state_for(), verify=True).verified


@pytest.mark.parametrize(("verify", "advice"), [("full", "True to"), ("off", "False not to"), (1, "True to")])
def test_verify_is_a_bool(verify: Any, advice: str) -> None:
    for make in (HierarchicalLoader, partial(WeightSender, nn.Linear(2, 2), "127.0.0.1:0", receivers=1)):
        text = f"expected verify to be a bool, got {verify!r}; pass verify={advice} prove"
        must_raise(TypeError, text, make, verify=verify)


def difference(a: Tensor, b: Tensor, **tolerances: float) -> tuple[int, float, float] | None:
    """Returns the number of elements that differ, and their largest and mean distance."""
    pair = [Checkpoint.open({"t": each}) for each in (a, b)]
    seen: list[int] = []
    found = list(compare_values(pair[0], pair[1], ["t"], seen.append, **tolerances))
    assert sum(seen) == a.nbytes
    return (found[0]["differing"], found[0]["largest"], found[0]["mean"]) if found else None


@pytest.mark.parametrize("chunk", [1, 7, 1 << 20])
def test_counts_and_distances(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare, "_CHUNK_ELEMENTS", chunk)
    for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.int32, torch.uint8):
        a = torch.arange(3 * 11).reshape(3, 11).to(dtype)
        b = a.clone()
        b[0, 0], b[2, 10] = 5, 24
        assert difference(a, a) is None
        assert difference(a, b) == (2, 8.0, pytest.approx(13 / 33))
    for dtype in (torch.complex64, torch.float8_e4m3fn, torch.float8_e5m2, torch.bool):
        a, b = torch.tensor([0.0, 1.0, 0.0, 1.0]).to(dtype), torch.tensor([0.0, 1.0, 1.0, 1.0]).to(dtype)
        assert difference(a, a.clone()) is None
        assert difference(a, b) == (1, 1.0, 0.25)


def test_values_are_compared_and_neither_bytes_nor_float64() -> None:
    exact, rounded = torch.tensor([1.0, 2.0, 3.140625]), torch.tensor([1.001])
    odd, large = torch.tensor([nan, inf, -inf, nan, inf, 0.0]), torch.tensor([2**60, 2**60 + 1, -1])
    unsigned = torch.tensor([2**60, 2**60 + 1, 2**64 - 1], dtype=torch.uint64)
    for a, b, differing in (
        (exact, exact.bfloat16(), 0), (rounded, rounded.bfloat16(), 1), (odd, odd.clone(), 0), (odd, odd.double(), 0),
        (large, torch.tensor([2**60, 2**60, -1]), 1), (large, unsigned, 1), (large[:2], unsigned[:2], 0),
    ):  # fmt: skip
        found = difference(a, b)
        assert (found[0] if found else 0) == differing
    assert difference(odd, torch.tensor([nan, inf, inf, 1.0, 2.0, -0.0]), rtol=0.5, atol=1.0) == (3, inf, inf)


def test_tolerances_are_those_of_isclose() -> None:
    generator = torch.Generator().manual_seed(0)
    a = torch.rand(1000, generator=generator, dtype=torch.float64)
    b = a + torch.rand(1000, generator=generator, dtype=torch.float64) * 0.1
    expected = int((~torch.isclose(a, b, rtol=0.05, atol=0.02)).sum())
    assert 0 < expected < 1000
    found = difference(a, b, rtol=0.05, atol=0.02)
    assert found is not None
    assert found[0] == expected


@pytest.mark.parametrize("from_file", [True, False])
def test_what_differs_is_named_and_nothing_else(from_file: bool, tmp_path: Path) -> None:
    model = nn.ParameterList([nn.Parameter(torch.full((1 + i * 7 % 90,), float(i))) for i in range(50)])
    state = {name: value.detach().clone() for name, value in model.state_dict().items()}
    save_file(state, tmp_path / "model.safetensors")
    prove = run._prove

    def after_a_change(*arguments: Any) -> None:
        for value in list(model.parameters())[::10]:
            value.data[-1] += 1
        prove(*arguments)

    loader = HierarchicalLoader(verify=True, bucket_bytes=512, progress=False)
    with mock.patch.object(run, "_prove", after_a_change):
        text = str(must_raise(epload.LoadError, "reads it", loader.load, model, tmp_path if from_file else state))
    listed = re.search("reads it: (.*); the memory", text)
    assert listed is not None
    assert {*listed[1].split(", ")} == {f"{i} on rank 0" for i in range(0, 50, 10)}


@on_ranks(2)
def test_ranks_without_the_checkpoint_do_not_verify_what_verifies_itself(rank: int) -> list[str]:
    """Ranks without the checkpoint do as the one that has it."""
    with mock.patch.object(StateDictCheckpoint, "verified", True):
        model = Net()
        report = epload.load(model, only_readers(state_for(1), "one"), readers="one", verify=True, progress=False)
    return wrong(model, state_for(1)) + ["verified"] * report.verified
