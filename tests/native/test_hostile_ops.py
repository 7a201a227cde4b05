"""Hostile arguments for every op of torch.ops.epload: refused, or harmless, but never the end of the process.

Each op is called many times in a process of its own, so that a crash is a failure here and not the end of pytest. What calls it
is ``hostile_ops.py``.
"""

from __future__ import annotations

import pytest
import torch

from campaigns import hostile_ops
from support import ranks

LIMIT = 300.0
"""Seconds."""


def run_script(*words: str) -> str:
    status, output = ranks.run_alone(hostile_ops.main, *words, limit=LIMIT)
    lines = output.splitlines()
    assert status == 0, f"ended with {status} after:\n" + "\n".join(lines[-12:])
    return lines[-1]


def test_every_op_is_covered() -> None:
    names = {schema.name.partition("::")[2] for schema in torch._C._jit_get_all_schemas() if "epload::" in schema.name}
    assert set(hostile_ops.CALLS) == names


@pytest.mark.usefixtures("fake_device")
@pytest.mark.parametrize("op", sorted({*hostile_ops.CALLS} - {"dtypes"}))  # which takes none
def test_no_argument_ends_the_process(op: str) -> None:
    calls, refused = map(int, run_script(op).split())
    assert calls >= 10
    assert 0 < refused <= calls
