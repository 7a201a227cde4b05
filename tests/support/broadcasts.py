"""The contract of the coalesced broadcast, for CPU and for devices: what arrives, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from itertools import product
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from epload import Topology, coalesced_bcast
from epload.native import ops
from support.failures import raised

Nodes = list[list[int]]
DTYPES = [
    torch.float32, torch.int64, torch.bfloat16, torch.bool, torch.float8_e4m3fn, torch.complex64, torch.uint8, torch.float64,
    torch.float8_e5m2, torch.int16,
]  # fmt: skip
SHAPES: list[tuple[int, ...]] = [(), (1,), (7,), (0,), (3, 5), (2, 0, 4), (2, 3, 4), (13, 1), (1, 1, 1, 1), (33,)]
LARGE: list[tuple[int, ...]] = [(5, 300), (3, 7, 50), (1200,), (40, 2, 2, 3)]
LAYOUTS = ["contiguous", "reversed dims", "every second", "turned"]


def values(index: int, shape: tuple[int, ...], dtype: torch.dtype, salt: int) -> Tensor:
    """No two elements of a call are equal where the dtype has room for it, else as varied as it allows."""
    at = torch.arange(prod(shape)) + 10_000 * index + 1_000_000 * salt
    if dtype is torch.bool:
        return ((at * 2654435761 >> 13) % 2 == 1).view(shape)
    if dtype.is_complex:
        return torch.complex(at.float(), -at.float()).to(dtype).view(shape)
    if dtype in (torch.float32, torch.float64, torch.int64):
        return at.to(dtype).view(shape)
    raw = at * 40503 + (at >> 8) * 1013
    if dtype.itemsize == 2:
        return raw.to(torch.int16).view(dtype).view(shape)
    return (raw % 251).to(torch.uint8).view(dtype).view(shape)


class Guarded:
    """A tensor of some layout inside memory of its own, which is compared too."""

    def __init__(
        self, shape: tuple[int, ...], dtype: torch.dtype, layout: str, content: Tensor | None, device: str = "cpu"
    ) -> None:
        order = list(range(len(shape)))[::-1]  # innermost dim first
        if layout == "reversed dims":
            order = order[::-1]
        elif layout == "turned":
            order = order[1:] + order[:1]
        step = 2 if layout == "every second" else 1
        strides, inner = [0] * len(shape), step
        for dim in order:
            strides[dim] = inner
            inner *= max(1, shape[dim])
        self.base = torch.full(((inner + 8) * dtype.itemsize,), 1, dtype=torch.uint8).to(device).view(dtype)
        self.geometry = (shape, tuple(strides), 3)
        self.tensor = self.base.as_strided(*self.geometry)
        if content is not None:
            self.tensor.copy_(content)

    def wrong(self, content: Tensor) -> str:
        """Empty if the tensor holds ``content`` bit for bit and the rest is as it was made."""
        got = self.base.cpu()
        expected = torch.ones_like(got.view(torch.uint8)).view(got.dtype)
        expected.as_strided(*self.geometry).copy_(content)
        if torch.equal(got.view(torch.uint8), expected.view(torch.uint8)):
            return ""
        return f"{self.tensor.dtype} {self.geometry}: {self.tensor.flatten()[:4]}, expected {content.flatten()[:4]}"


def exchange(
    rank: int, src: int, topo: Topology, shapes: list[tuple[int, ...]], salt: int, device: str = "cpu", **options: Any
) -> list[str]:
    """One call with every shape; each rank has layouts of its own, so senders and receivers differ in strides."""
    kinds = [(shape, DTYPES[(i + salt) % len(DTYPES)]) for i, shape in enumerate(shapes)]
    contents = [values(i, shape, dtype, salt) for i, (shape, dtype) in enumerate(kinds)]
    guarded = [
        Guarded(shape, dtype, LAYOUTS[(i + rank + salt) % 4], content if rank == src else None, device)
        for i, ((shape, dtype), content) in enumerate(zip(kinds, contents, strict=True))
    ]
    coalesced_bcast([g.tensor for g in guarded], src=src, topology=topo, **options)
    case = f"src {src} {options} tensor"
    problems = [(i, g.wrong(content)) for i, (g, content) in enumerate(zip(guarded, contents, strict=True))]
    return [f"{case} {i}: {text}" for i, text in problems if text]


def matrix(rank: int, shapes_of_nodes: list[Nodes], device: str = "cpu") -> list[str]:
    wrong: list[str] = []
    salt = 0
    for nodes in shapes_of_nodes:
        topo = Topology.from_nodes(nodes)
        for src, algorithm in product(topo.ranks, ("two_level", "striped")):
            for bucket_bytes in (1000, 1 << 20):
                salt += 1
                options = {"bucket_bytes": bucket_bytes, "algorithm": algorithm}
                wrong += exchange(rank, src, topo, SHAPES + LARGE, salt, device, **options)
            wrong += exchange(rank, src, topo, SHAPES, salt, device, bucket_bytes=100, algorithm=algorithm)
        wrong += exchange(rank, topo.ranks[-1], topo, SHAPES, salt, device, bucket_bytes=16)
        wrong += exchange(rank, topo.ranks[0], topo, SHAPES, salt + 1, device, bucket_bytes=17)
    return wrong


MATRIX: dict[int, list[Nodes]] = {
    1: [[[0]]],
    2: [[[0, 1]], [[0], [1]]],
    3: [[[0, 1], [2]], [[2], [1, 0]]],
    4: [[[0, 1], [2, 3]], [[0, 1, 2], [3]], [[0, 2], [1, 3]]],
    7: [[[0, 1, 2], [3, 4], [5, 6]]],
}


def single_tensors(rank: int, device: str = "cpu") -> list[str]:
    """What is sent in place: one contiguous tensor, smaller or larger than a bucket; and receivers that are not."""
    wrong = []
    topo = Topology.from_nodes([[0, 1], [2]])
    contents = [
        values(1, (64,), torch.float32, 1),
        values(2, (50, 9), torch.bfloat16, 2),
        values(3, (), torch.int64, 3),
    ]
    for content, layout, bucket_bytes in product(contents, LAYOUTS, (64, 1 << 20)):
        plain = "contiguous" if rank == 1 else layout
        one = Guarded(tuple(content.shape), content.dtype, plain, content if rank == 1 else None, device)
        pointer = one.tensor.data_ptr()
        coalesced_bcast([one.tensor], src=1, topology=topo, bucket_bytes=bucket_bytes)
        if (text := one.wrong(content)) or one.tensor.data_ptr() != pointer:
            wrong.append(f"{tuple(content.shape)} {layout} {bucket_bytes}: {text}")
    coalesced_bcast([], src=1, topology=topo)
    coalesced_bcast([torch.empty(0, 3, device=device), torch.empty(0, device=device)], src=1, topology=topo)
    coalesced_bcast(iter([contents[0].to(device, copy=True)]), src=1, topology=topo)
    return wrong


def parameters(rank: int, device: str = "cpu") -> list[str]:
    torch.manual_seed(rank)
    wrong = []
    topo = Topology.from_nodes([[0, 1], [2]])
    model = nn.Sequential(nn.Linear(20, 30), nn.BatchNorm1d(30)).to(device)
    loss = (model[0].weight * model[0].weight).sum()
    before = dict(model.named_parameters())
    torch.manual_seed(0)
    want = nn.Sequential(nn.Linear(20, 30), nn.BatchNorm1d(30)).state_dict()
    coalesced_bcast([*model.parameters(), *model.buffers()], topology=topo, bucket_bytes=256)
    for name, parameter in model.named_parameters():
        if parameter is not before[name] or not parameter.requires_grad or not parameter.is_leaf or parameter.grad_fn:
            wrong.append(f"{name} is no longer a plain leaf")
    wrong += [f"{name} differs" for name, value in model.state_dict().items() if not torch.equal(value.cpu(), want[name])]
    model(torch.ones(4, 20, device=device)).sum().backward()
    try:
        loss.backward()
        wrong.append("autograd did not learn of the write")
    except RuntimeError as error:
        if "inplace" not in str(error):
            wrong.append(str(error))
    return wrong


def in_place_and_parameters(rank: int, device: str = "cpu") -> list[str]:
    return single_tensors(rank, device) + parameters(rank, device)


def raw_op(rank: int, device: str = "cpu") -> list[str]:
    made = {members: dist.new_group(list(members)) for members in ((0, 1), (2, 3), (0, 2), (1, 3), (0, 1, 2, 3))}
    op = torch.ops.epload.coalesced_bcast

    def name(*members: int) -> str:
        return str(made[members].group_name) if rank in members else ""

    node = name(0, 1) if rank < 2 else name(2, 3)
    wrong = []

    def check(what: str, src: int, call: Callable[[list[Tensor]], object]) -> None:
        got = [Guarded((40, 5), torch.float32, LAYOUTS[(rank + i) % 4], None, device) for i in range(3)]
        contents = [values(i, (40, 5), torch.float32, src) for i in range(3)]
        for g, content in zip(got, contents, strict=True):
            if rank == src:
                g.tensor.copy_(content)
        call([g.tensor for g in got])
        wrong.extend(f"{what}: {text}" for g, c in zip(got, contents, strict=True) if (text := g.wrong(c)))

    rail, first, everyone, leader = name(0, 2) or name(1, 3), rank % 2, name(0, 1, 2, 3), 1 + rank // 2 * 2
    check("two_level", 0, lambda t: op(t, 0, name(0, 2), node, 1000, "two_level"))
    check("default", 0, lambda t: op.default(t, 0, name(0, 2), node, 1 << 20, "two_level", None))
    check("rail 1", 1, lambda t: op(t, 1, name(1, 3), node, 1000, "two_level", leader=leader))
    check("wrapper", 3, lambda t: ops.coalesced_bcast(t, 3, name(1, 3), node, 100, "two_level", leader=leader))
    check("one node", 2, lambda t: op(t, 2, "", everyone, 1000, "two_level"))
    check("no node", 3, lambda t: op(t, 3, everyone, "", 1000, "two_level"))
    check("striped", 0, lambda t: op(t, 0, rail, node, 1000, "striped", leader=first))
    check("striped, second node", 3, lambda t: op(t, 3, rail, node, 100, "striped", leader=2 + first))
    check("striped, one node", 2, lambda t: op(t, 2, "", everyone, 100, "striped"))

    def refused(what: str, text: str, *args: Any, **options: Any) -> None:
        tensors = [torch.full((3,), float(rank), device=device)]
        kind, message = raised(lambda: op(tensors, *args, **options))
        if kind != "ValueError" or text not in message or tensors[0].tolist() != [rank] * 3:
            wrong.append(f"{what}: {kind} {message} {tensors}")

    refused("unknown inter", "no such name", 0, "no such name", node, 100, "two_level")
    refused("unknown intra", "no such name", 0, name(0, 2), "no such name", 100, "two_level")
    refused("algorithm", "'ring'", 0, name(0, 2), node, 100, "ring")
    refused("bucket", "got 15", 0, name(0, 2), node, 15, "two_level")
    refused("bucket", "got -1", 0, name(0, 2), node, -1, "two_level")
    refused("huge bucket", "bucket", 0, name(0, 2), node, 2**63 - 1, "two_level")
    refused("src", "src 9", 9, name(0, 1, 2, 3), "", 100, "two_level")
    refused("src of one node", "src 9", 9, "", name(0, 1, 2, 3), 100, "striped")
    if rank == 1:
        refused("leader of the source's own rail", "takes as leader", 0, rail, node, 100, "striped", leader=3)
    if rank == 3:
        refused("leader on another node than the source", "takes as leader", 0, rail, node, 100, "striped", leader=3)
    if rank == 0:
        refused("leader of the source's node", "leads it", 0, name(0, 2), node, 100, "two_level", leader=1)
        refused("leader elsewhere", "leader 2", 0, name(0, 2), node, 100, "two_level", leader=2)
    if rank > 1:
        refused("rail without leader=", "leader", 1, name(1, 3), node, 100, "two_level")
    check("after", 0, lambda t: op(t, 0, name(0, 2), node, 1000, "two_level"))
    return wrong


class Refusals:
    """Calls that every rank must refuse alike, each followed by one that succeeds."""

    def __init__(self, rank: int, nodes: Nodes, device: str = "cpu") -> None:
        self.rank = rank
        self.device = device
        self.topo = Topology.from_nodes(nodes)
        self.topo.control.timeout = timedelta(seconds=8)  # so that a rank left alone says so soon
        self.wrong: list[str] = []
        self.texts: dict[str, str] = {}

    def check(self, what: str, kind: str, parts: list[str], tensors: list[Any], **options: Any) -> None:
        plain = [
            t
            for t in tensors
            if type(t) is Tensor and t.layout is torch.strided and not t.is_meta and t.untyped_storage().nbytes()
        ]
        before = [t.clone() for t in plain]
        got, text = raised(lambda: coalesced_bcast(tensors, **{"topology": self.topo, **options}))
        self.texts[what] = f"{got}: {text}"
        if got != kind or any(part not in text for part in parts):
            self.wrong.append(f"{what}: expected {kind} with {parts}, got {got}: {text}")
        if not all(map(torch.equal, plain, before)):
            self.wrong.append(f"{what}: something has moved")
        after = exchange(self.rank, 1, self.topo, SHAPES[:5], len(self.texts), self.device)
        self.wrong += [f"after {what}: {text}" for text in after]

    def answer(self) -> tuple[list[str], dict[str, str]]:
        return self.wrong, self.texts


def agree(answers: list[tuple[list[str], dict[str, str]]]) -> None:
    assert [wrong for wrong, _ in answers] == [[]] * len(answers)
    for what, text in answers[0][1].items():
        assert [texts[what] for _, texts in answers] == [text] * len(answers), what
