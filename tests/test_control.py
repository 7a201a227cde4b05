"""Agreement rounds, bucket headers, and the pipeline that runs buckets through stages."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import ranks
from epload import pipeline
from epload.control import HEADER_BYTES, STATUS_ABORT, STATUS_OK, BucketHeader, Control
from epload.errors import CheckpointError, LoadError, ManifestMismatch, ModelMismatch
from epload.pipeline import Stage

U32 = st.integers(0, 2**32 - 1)
U64 = st.integers(0, 2**64 - 1)


@given(U32, st.sampled_from([STATUS_OK, STATUS_ABORT]), U64, U64, st.binary(min_size=16, max_size=16))
def test_header_round_trip(index: int, status: int, nbytes: int, checksum: int, fingerprint: bytes) -> None:
    header = BucketHeader(index, status, nbytes, checksum, fingerprint)
    raw = header.pack()
    assert len(raw) == HEADER_BYTES
    assert BucketHeader.unpack(raw) == header
    assert BucketHeader.unpack(memoryview(bytearray(raw))) == header


@given(st.binary(min_size=HEADER_BYTES, max_size=HEADER_BYTES))
def test_garbage_is_no_header(raw: bytes) -> None:
    with pytest.raises(LoadError, match="out of step"):
        BucketHeader.unpack(raw)


def test_damaged_header() -> None:
    raw = BucketHeader(3, STATUS_OK, 100, 0, b"f" * 16).pack()
    for wrong in (bytes(HEADER_BYTES), raw[1:] + raw[:1], b"E" + raw[1:]):
        with pytest.raises(LoadError, match="epload01"):
            BucketHeader.unpack(wrong)


def test_one_rank_needs_no_store() -> None:
    control = Control(None, (0,), 0)
    assert control.settle("alone", None, [1], lambda views: views[0]) == [1]
    with pytest.raises(CheckpointError, match="broken"):
        control.settle("alone", CheckpointError("broken"))
    with pytest.raises(ValueError, match="init_process_group"):
        Control(None, (0, 1), 0)


def make_control(rank: int, members: tuple[int, ...]) -> Control:
    assert dist.group.WORLD is not None
    return Control(dist.group.WORLD.get_group_store(), members, rank)


def raised(call: Callable[[], object]) -> tuple[str, str]:
    """Class and text of what a call raises."""
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error)
    return "", "raised nothing"


def settle_errors(rank: int) -> list[tuple[str, str]]:
    control = make_control(rank, (0, 1, 2))
    assert control.settle("first", None, rank, lambda views: sum(views.values())) == 3
    cases: list[dict[int, Exception]] = [
        {1: CheckpointError("file x is short")},
        {0: ValueError("bad src")},
        {2: TypeError("a DTensor")},
        {0: ModelMismatch("no such key"), 2: ModelMismatch("no such key")},
        {1: ManifestMismatch("one"), 2: ManifestMismatch("two")},
        {1: MemoryError("no room")},
        {2: OSError(2, "gone", "model.bin")},
        {1: KeyError("lost")},
        {0: LoadError("a"), 1: LoadError("b"), 2: LoadError("a")},
        {2: CheckpointError('text with "quotes", \n a line break and ünïcode')},
    ]
    seen = [raised(lambda case=case: control.settle("check", case.get(rank))) for case in cases]  # type: ignore[misc]

    def broken(views: dict[int, object]) -> object:
        raise ManifestMismatch(f"ranks {sorted(views)} differ")

    seen.append(raised(lambda: control.settle("decide", None, rank, broken)))
    assert control.settle("after", None, {"rank": rank}, lambda views: views[2]["rank"]) == 2
    return seen


def test_errors_of_some_reach_all() -> None:
    views = ranks.run(3, settle_errors)
    assert views[0] == views[1] == views[2]
    assert [kind for kind, _ in views[0]] == [
        "CheckpointError",
        "ValueError",
        "TypeError",
        "ModelMismatch",
        "ManifestMismatch",
        "MemoryError",
        "LoadError",
        "LoadError",
        "LoadError",
        "CheckpointError",
        "ManifestMismatch",
    ]
    texts = [text for _, text in views[0]]
    assert texts[0] == "file x is short [rank 1]"
    assert texts[1] == "bad src [rank 0]"
    assert texts[3] == "no such key [ranks 0, 2]"
    assert texts[4] == "one [rank 1]\ntwo [rank 2]"
    assert "no room" in texts[5]
    assert "FileNotFoundError" in texts[6]
    assert "model.bin" in texts[6]
    assert "KeyError" in texts[7]
    assert texts[8] == "a [ranks 0, 2]\nb [rank 1]"
    assert "ünïcode" in texts[9]
    assert texts[10] == "ranks [0, 1, 2] differ"


def absent_rank(rank: int, absent: int) -> tuple[str, str]:
    """The absent rank looks on until the others have finished, then arrives late."""
    assert dist.group.WORLD is not None
    control = make_control(rank, (0, 1, 2))
    control.deadline = timedelta(seconds=2)
    control.settle("all here", None)
    store = dist.group.WORLD.get_group_store()
    if rank == absent:
        store.wait([f"test/done/{other}" for other in range(3) if other != absent], timedelta(seconds=60))
        return raised(lambda: control.settle("the manifest", None)) if absent != control.coordinator else ("", "")
    result = raised(lambda: control.settle("the manifest", None))
    store.set(f"test/done/{rank}", "")
    return result


def test_absent_rank_is_named_on_all_others() -> None:
    said = ranks.run(3, absent_rank, 2)
    assert said == [("LoadError", "the manifest: rank 2 did not arrive within 2 s")] * 3, "the late one hears it too"


def test_absent_coordinator_is_named_on_all_others() -> None:
    said = ranks.run(3, absent_rank, 0)
    for rank in (1, 2):
        kind, text = said[rank]
        assert kind == "LoadError"
        assert text.startswith("the manifest: rank 0, which coordinates, gave no verdict within ")
        assert f"seen by rank {rank}" in text


def left_keys(rank: int) -> tuple[int, list[str]]:
    """How much the store grew over many rounds, and what is left of rounds that are over."""
    assert dist.group.WORLD is not None
    store = dist.group.WORLD.get_group_store()
    control = make_control(rank, (0, 1, 2))
    control.settle("warm", None)
    dist.barrier()
    before = store.num_keys()
    for turn in range(20):
        if turn % 5 == 4:
            raised(lambda: control.settle("fail", ValueError("no") if rank == 1 else None))
        else:
            control.settle("turn", None, turn)
    dist.barrier()
    after = store.num_keys()
    assert control._store is not None
    names = ("0", "1", "2", "verdict")
    left = [f"{turn}/{name}" for turn in range(1, 21) for name in names if control._store.check([f"{turn}/{name}"])]
    dist.barrier()
    return after - before, left


def test_finished_rounds_leave_no_keys() -> None:
    for grown, left in ranks.run(3, left_keys):
        assert left == []
        assert grown <= 4, "no more than the last round's keys and the barriers' own"


def controls_do_not_meet(rank: int) -> list[int]:
    """Two controls over the same ranks, and one over some of them, on one store."""
    first, second = make_control(rank, (0, 1, 2)), make_control(rank, (0, 1, 2))
    seen = [second.settle("b", None, rank, lambda views: 10 * sum(views.values()))]
    if rank != 1:
        part = make_control(rank, (0, 2))
        seen.append(part.settle("c", None, rank, lambda views: 100 * sum(views.values())))
    seen.append(first.settle("a", None, rank, lambda views: sum(views.values())))
    return seen


def test_controls_share_a_store() -> None:
    assert ranks.run(3, controls_do_not_meet) == [[30, 200, 3], [30, 3], [30, 200, 3]]


class Log:
    """What the stages saw, and how many buckets were under way at most."""

    def __init__(self, stages: int, last: int | None = None, stop_in: int = -1, fail_in: int = -1, fail_at: int = 3):
        self.seen: list[list[int]] = [[] for _ in range(stages)]
        self.most = 0
        self.held: dict[int, int] = {}
        self._under_way: set[int] = set()
        self._lock = threading.Lock()
        self.stages = [
            Stage(f"s{i}", self._work(i, stages, last if i == stop_in else None, fail_at if i == fail_in else None))
            for i in range(stages)
        ]

    def _work(self, stage: int, stages: int, last: int | None, fail_at: int | None) -> Callable[[int, Tensor], bool]:
        def work(index: int, buffer: Tensor) -> bool:
            with self._lock:
                self.seen[stage].append(index)
                if stage == 0:
                    self._under_way.add(index)
                    self.most = max(self.most, len(self._under_way))
                    buffer.fill_(index)
                assert buffer[0] == index, "a bucket keeps its buffer and no other writes to it"
                if index == fail_at:
                    raise KeyError(f"stage {stage}")
                if stage + 1 == stages:
                    self._under_way.discard(index)
            return index == last

        return work


def buffers(count: int) -> list[Tensor]:
    return [torch.zeros(1, dtype=torch.int64) for _ in range(count)]


def left_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("epload-")]


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
@pytest.mark.parametrize("count", [0, 1, 2, 50])
@pytest.mark.parametrize("held", [1, 2, 3])
def test_pipeline_keeps_order_and_bounds(stages: int, count: int, held: int) -> None:
    log = Log(stages)
    pipeline.run(log.stages, count, buffers(held))
    assert log.seen == [list(range(count))] * stages
    assert log.most <= held
    assert all(stage.seconds >= 0 for stage in log.stages)
    assert left_threads() == []


def test_pipeline_stages_overlap() -> None:
    """Bucket 1 is in the first stage while bucket 0 is still in the second: each waits for the other there."""
    meet = threading.Barrier(2, timeout=20)

    def first(index: int, buffer: Tensor) -> bool:
        if index == 1:
            meet.wait()
        return False

    def second(index: int, buffer: Tensor) -> bool:
        if index == 0:
            meet.wait()
        return False

    pipeline.run([Stage("first", first), Stage("second", second)], 3, buffers(2))


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
@pytest.mark.parametrize("position", ["first", "middle", "last"])
@pytest.mark.parametrize("fail_at", [0, 3, 19])
@pytest.mark.parametrize("held", [1, 2])
def test_pipeline_raises_what_a_stage_raises(stages: int, position: str, fail_at: int, held: int) -> None:
    failing = {"first": 0, "middle": stages // 2, "last": stages - 1}[position]
    log = Log(stages, fail_in=failing, fail_at=fail_at)
    with pytest.raises(KeyError, match=f"stage {failing}"):
        pipeline.run(log.stages, 20, buffers(held))
    assert left_threads() == []
    assert log.seen[failing] == list(range(fail_at + 1)), "the failing stage sees nothing more"
    for after in log.seen[failing + 1 :]:
        assert after == list(range(fail_at)), "what was before the failure is finished, nothing behind it"
    assert log.most <= held


@pytest.mark.parametrize("stages", [1, 2, 3])
@pytest.mark.parametrize("stop_in", ["first", "last"])
@pytest.mark.parametrize("last", [0, 4, 29])
def test_pipeline_stops_early(stages: int, stop_in: str, last: int) -> None:
    log = Log(stages, last=last, stop_in=0 if stop_in == "first" else stages - 1)
    pipeline.run(log.stages, 30, buffers(2))
    assert left_threads() == []
    assert log.seen[-1] == list(range(last + 1)), "the last bucket passes all stages, none behind it does"
    if stop_in == "first":
        assert log.seen == [list(range(last + 1))] * stages


def test_pipeline_raises_the_first_of_two_failures() -> None:
    """The second stage fails while the first works on the next bucket, which then fails too."""
    failed = threading.Event()

    def first(index: int, buffer: Tensor) -> bool:
        if index == 1:
            assert failed.wait(20)
            raise ValueError("after it")
        return False

    def second(index: int, buffer: Tensor) -> bool:
        try:
            raise KeyError("before")
        finally:
            # The pipeline notes a failure once work has returned; the other thread is held until then.
            threading.Timer(0.05, failed.set).start()

    with pytest.raises(KeyError, match="before"):
        pipeline.run([Stage("first", first), Stage("second", second)], 3, buffers(2))
    assert left_threads() == []
