"""The simulated models and clusters, and the source of each number. Rates are the manufacturers' stated rates."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from costs import StoreRates
from simulator import Cluster

GBIT = 1e9 / 8


@dataclass(frozen=True)
class Model:
    """Shapes of a checkpoint with one weight per expert and projection, from the model's published config.json."""

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
    """Multi-head latent attention: q_lora, kv_lora, qk_nope, qk_rope and v head dims."""
    dense_layers: int = 0
    dense_size: int = 0
    shared_experts: int = 0
    fp8: bool = False
    """Linear weights are fp8 with a 4-byte scale per 128 x 128 block; other tensors are bf16."""

    def weights(self) -> Iterator[tuple[int, int]]:
        """Rows and columns of each weight; a vector has one row."""
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
        """Number of bytes and of tensors in the checkpoint."""
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
    """A node type with eight accelerators."""

    name: str
    nic: float
    """Bytes/s of one NIC, each way."""
    intra: float
    unpack: float
    """Host to device, a rank."""
    message: float
    hop: float
    hop_inside: float
    header_wait: float


NVLINK = Node("NVLink", nic=400 * GBIT, intra=450e9, unpack=64e9, message=8.4e-6, hop=9.6e-6, hop_inside=3.4e-6, header_wait=0.0)
HCCS = Node("HCCS", nic=200 * GBIT, intra=196e9, unpack=32e9, message=145e-6, hop=9.6e-6, hop_inside=3.4e-6, header_wait=100e-6)
NODES = (NVLINK, HCCS)
INFINITE = float("inf")
STORAGES = {"local": (35e9, 45e9, INFINITE), "shared": (35e9, 40e9, 80e9), "one rank's memory": (INFINITE,) * 3}
"""Bytes/s of one rank, of one node and of all nodes together. In the last, one accelerator holds the weights, as in RL."""

NCCL = "https://github.com/NVIDIA/nccl/blob/01afd20a77b5804e0ecf1042509dd9d20ebf9e93/src/graph/tuning.cc"
DGX = "https://docs.nvidia.com/dgx-basepod/reference-architecture-infrastructure-foundation-enterprise-ai/latest/core-components.html"
SUPERPOD = (
    "https://docs.nvidia.com/dgx-superpod/reference-architecture-scalable-infrastructure-h100/latest/dgx-superpod-components.html"
)
ATLAS = "https://arthurchiao.art/blog/gpu-advanced-notes-2-zh/"
TENSOR = "https://github.com/scitix/InstantTensor/blob/main/docs/benchmark.md"
HYPER = "hyper-parallel, issue 624: 64 KiB and 1 MiB take the same time"
DDN = "https://ddn.com/blog/ddns-ai-storage-optimized-for-nvidia-dgx-b200-platform-handling-ai-at-any-scale-with-nvidia-blackwell"
SOURCES = (
    ("NVLink node: NIC 400 Gbit/s, one for each of 8 accelerators", f"[NVIDIA, DGX H100]({DGX})"),
    ("NVLink: 900 GB/s per accelerator, 450 each way", f"[NVIDIA, DGX SuperPOD]({SUPERPOD})"),
    ("NVLink node: host to device 64 GB/s, PCIe 5.0 x16 each way", f"[NVIDIA, DGX H100]({DGX}): PCIe 5.0"),
    (
        "NCCL: 8.4 us per broadcast, 9.6 us per hop between nodes, 3.4 us over NVLink (ring, Simple)",
        f"[NCCL's cost table]({NCCL})",
    ),
    ("HCCS node: NIC 200 Gbit/s, one for each of 8 accelerators", f"[notes on an 8 x 910B server]({ATLAS})"),
    ("HCCS: 392 GB/s per accelerator over seven links, 196 each way if all are used", f"[the same notes]({ATLAS})"),
    ("HCCS node: host to device 32 GB/s, PCIe 4.0 x16 each way", "Atlas 800T A2: PCIe 4.0 x16 per accelerator"),
    ("HCCL: 145 us per broadcast, measured by others on 4 NPU cards", HYPER),
    ("HCCL: same hop times as NCCL", "no public number found"),
    (
        "a device is idle for 100 us after a bucket whose header the host looks at: on Ascend each, with CUDA kernels none",
        "assumed: two looks at an event, 50 us apart; `make gpu-check` measures the way of a header",
    ),
    (
        "local storage: one accelerator reads 35 GB/s, the eight of a node 45 GB/s together",
        f"[InstantTensor, on H200]({TENSOR})",
    ),
    ("shared storage: 40 GB/s per node", "NVIDIA DGX SuperPOD reference architecture RA-11333-001, GPUDirect Storage"),
    (
        "shared storage: 80 GB/s for all nodes together: one appliance, 10 GB/s for each of 8 GPUs",
        f"[DDN AI400X2-Turbo]({DDN})",
    ),
    ("links and storage run at their stated rates", "an idealization: times are lower bounds for this hardware"),
)


def cluster(node: Node, nodes: int, nics: int, storage: str, fixed: float, rounds: int, store: StoreRates) -> Cluster:
    """``fixed``, ``rounds`` and ``store`` are those of :class:`Cluster`."""
    rank, one, everyones = STORAGES[storage]
    return Cluster(
        nodes=nodes, ranks=8, link=node.nic, links=nics, intra=node.intra, storage=one, storage_all=everyones,
        reader=rank, unpack=node.unpack, message=node.message, hop=node.hop, hop_inside=node.hop_inside,
        fixed=fixed, rounds=rounds, store=store, on_device=True, header_wait=node.header_wait,
    )  # fmt: skip
