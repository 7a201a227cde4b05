"""The models and clusters that are simulated, with where each number comes from. Rates are what a link's maker states."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from epload.planning.simulator import Cluster

GBIT = 1e9 / 8


@dataclass(frozen=True)
class Model:
    """Shapes of a checkpoint, one weight an expert and projection, as published in the model's config.json."""

    name: str
    source: str
    hidden: int
    layers: int
    experts: int
    expert_size: int
    vocabulary: int
    heads: int
    kv_heads: int = 0
    head_dim: int = 0
    low_rank: tuple[int, int, int, int, int] | None = None
    """Of multi-head latent attention: q_lora, kv_lora, qk_nope, qk_rope and v head dims."""
    dense_layers: int = 0
    dense_size: int = 0
    shared_experts: int = 0
    fp8: bool = False
    """Linear weights in fp8 with a scale of 4 bytes for each 128 x 128 block; the rest in bf16."""

    def weights(self) -> Iterator[tuple[int, int]]:
        """Rows and columns of each; a vector has one row."""
        h = self.hidden
        yield from [(self.vocabulary, h), (self.vocabulary, h), (1, h)]
        for layer in range(self.layers):
            yield from [(1, h), (1, h)]
            yield from self._attention()
            if layer < self.dense_layers:
                yield from [(self.dense_size, h), (self.dense_size, h), (h, self.dense_size)]
                continue
            yield from [(self.experts, h), *([(1, self.experts)] if self.low_rank else [])]
            count = self.experts + (1 if self.shared_experts else 0)
            for expert in range(count):
                size = self.expert_size * (self.shared_experts if expert == self.experts else 1)
                yield from [(size, h), (size, h), (h, size)]

    def _attention(self) -> Iterator[tuple[int, int]]:
        h = self.hidden
        if self.low_rank is None:
            query, key = self.heads * self.head_dim, self.kv_heads * self.head_dim
            yield from [(query, h), (key, h), (key, h), (h, query), (1, self.head_dim), (1, self.head_dim)]
            return
        q, kv, nope, rope, v = self.low_rank
        yield from [(q, h), (1, q), (self.heads * (nope + rope), q), (kv + rope, h), (1, kv)]
        yield from [(self.heads * (nope + v), kv), (h, self.heads * v)]

    def size(self) -> tuple[int, int]:
        """Bytes and tensors of the checkpoint."""
        nbytes = tensors = 0
        plain = {(self.vocabulary, self.hidden), (self.experts, self.hidden)}
        for rows, columns in self.weights():
            tensors += 1
            if not self.fp8 or rows == 1 or (rows, columns) in plain:
                nbytes += 2 * rows * columns
            else:
                tensors += 1
                nbytes += rows * columns + 4 * -(-rows // 128) * -(-columns // 128)
        return nbytes, tensors


def _config(name: str) -> str:
    return f"https://huggingface.co/{name}/blob/main/config.json"


MODELS = (
    Model("Qwen3-30B-A3B", _config("Qwen/Qwen3-30B-A3B"), 2048, 48, 128, 768, 151936, 32, 4, 128),
    Model("Qwen3-235B-A22B", _config("Qwen/Qwen3-235B-A22B"), 4096, 94, 128, 1536, 151936, 64, 4, 128),
    Model(
        "DeepSeek-V3", _config("deepseek-ai/DeepSeek-V3"), 7168, 61, 256, 2048, 129280, 128,
        low_rank=(1536, 512, 128, 64, 128), dense_layers=3, dense_size=18432, shared_experts=1, fp8=True,
    ),
    Model(
        "Kimi-K2", _config("moonshotai/Kimi-K2-Instruct"), 7168, 61, 384, 2048, 163840, 64,
        low_rank=(1536, 512, 128, 64, 128), dense_layers=1, dense_size=18432, shared_experts=1, fp8=True,
    ),
)  # fmt: skip


@dataclass(frozen=True)
class Node:
    """A kind of node with eight accelerators."""

    name: str
    card: float
    """Bytes/s of one network card, each way."""
    intra: float
    unpack: float
    """Host to device, a rank."""
    message: float
    hop: float
    hop_inside: float


NVLINK = Node("NVLink", card=400 * GBIT, intra=450e9, unpack=64e9, message=8.4e-6, hop=9.6e-6, hop_inside=3.4e-6)
HCCS = Node("HCCS", card=200 * GBIT, intra=196e9, unpack=32e9, message=145e-6, hop=9.6e-6, hop_inside=3.4e-6)
NODES = (NVLINK, HCCS)
INFINITE = float("inf")
STORAGES = {"local": (35e9, 45e9, INFINITE), "shared": (35e9, 40e9, 80e9), "one rank's memory": (INFINITE,) * 3}
"""Bytes/s of one rank, of one node and of all nodes together. The last: the weights are on one accelerator, as in RL."""

NCCL = "https://github.com/NVIDIA/nccl/blob/01afd20a77b5804e0ecf1042509dd9d20ebf9e93/src/graph/tuning.cc"
DGX = "https://docs.nvidia.com/dgx-basepod/reference-architecture-infrastructure-foundation-enterprise-ai/latest/core-components.html"
SUPERPOD = "https://docs.nvidia.com/dgx-superpod/reference-architecture-scalable-infrastructure-h100/latest/dgx-superpod-components.html"
ATLAS = "https://arthurchiao.art/blog/gpu-advanced-notes-2-zh/"
TENSOR = "https://github.com/scitix/InstantTensor/blob/main/docs/benchmark.md"
HYPER = "hyper-parallel, issue 624: 64 KiB and 1 MiB take the same"
DDN = "https://ddn.com/blog/ddns-ai-storage-optimized-for-nvidia-dgx-b200-platform-handling-ai-at-any-scale-with-nvidia-blackwell"
SOURCES = (
    ("NVLink node: card 400 Gbit/s, one each for 8 accelerators", f"[NVIDIA, DGX H100]({DGX})"),
    ("NVLink 900 GB/s an accelerator, 450 each way", f"[NVIDIA, DGX SuperPOD]({SUPERPOD})"),
    ("NVLink node: host to device 64 GB/s, PCIe 5.0 x16 each way", f"[NVIDIA, DGX H100]({DGX}): PCIe 5.0"),
    (
        "NCCL: 8.4 us a broadcast, 9.6 us a hop between nodes, 3.4 us over NVLink (ring, Simple)",
        f"[NCCL's own cost table]({NCCL})",
    ),
    ("HCCS node: card 200 Gbit/s, one each for 8 accelerators", f"[notes on an 8 x 910B server]({ATLAS})"),
    ("HCCS 392 GB/s an accelerator over seven links, 196 each way if all are used", f"[the same notes]({ATLAS})"),
    ("HCCS node: host to device 32 GB/s, PCIe 4.0 x16 each way", "Atlas 800T A2: PCIe 4.0 x16 an accelerator"),
    ("HCCL: 145 us a broadcast, measured by others on 4 cards", HYPER),
    ("HCCL: hops as NCCL's", "no public number found"),
    ("one accelerator reads 35 GB/s, a node's eight 45 GB/s from local storage", f"[InstantTensor, on H200]({TENSOR})"),
    ("shared storage: 40 GB/s a node", "NVIDIA DGX SuperPOD reference architecture RA-11333-001, GPUDirect Storage"),
    (
        "shared storage: 80 GB/s for all nodes together, one appliance at 10 GB/s for each of 8 GPUs",
        f"[DDN AI400X2-Turbo]({DDN})",
    ),
    ("links and storage give all that is stated", "none does: times are the least that this hardware allows"),
)


def cluster(node: Node, nodes: int, cards: int, storage: str, fixed: float, per_rank: float) -> Cluster:
    """``fixed`` and ``per_rank``: seconds, as in :class:`Cluster`."""
    rank, one, everyones = STORAGES[storage]
    return Cluster(
        nodes=nodes, ranks=8, link=node.card, links=cards, intra=node.intra, storage=one, storage_all=everyones,
        reader=rank, unpack=node.unpack, message=node.message, hop=node.hop, hop_inside=node.hop_inside,
        fixed=fixed, per_rank=per_rank,
    )  # fmt: skip
