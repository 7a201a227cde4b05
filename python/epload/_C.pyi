from collections.abc import Sequence, Set

torch_version: str
version: str
compiler: str
cuda_architectures: str
torch_npu_version: str
OP_ALIGNMENT: int

def plan_buckets(
    extents: list[tuple[int, int, int]], capacity: int, alignment: int, header: int, kind_of: bytes
) -> tuple[list[bytearray], list[int]]: ...
def extent_of(shape: list[int] | tuple[int, ...], itemsize: int, room: int) -> tuple[int, int, int]: ...
def leaders(nodes: Sequence[Sequence[int]], src: int) -> list[int]: ...
def rails(nodes: Sequence[Sequence[int]]) -> list[list[int]]: ...
def wave_steps(
    nodes: Sequence[Sequence[int]],
    src: int,
    rank: int,
    algorithm: str,
    shared: bool,
    crosses: bool,
    buckets: Sequence[tuple[int, int, int]],
    alignment: int,
) -> list[tuple[int, int, int, int, int, int]]: ...
def check_pickle(pickle: bytes, begin: int, allowed: Set[str] | None) -> int: ...
