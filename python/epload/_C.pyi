from collections.abc import Sized
from typing import Any

torch_version: str
version: str
compiler: str
cuda_architectures: str
torch_npu_version: str

def plan_buckets(
    extents: list[tuple[int, int, int]], capacity: int, alignment: int, header: int
) -> tuple[list[list[int]], list[int]]: ...
def extent_of(shape: list[int] | tuple[int, ...], itemsize: int, room: int) -> tuple[int, int, int]: ...
def contents(dicts: list[dict[str, Any]]) -> bytes: ...
def all_empty(containers: list[Sized]) -> bool: ...
