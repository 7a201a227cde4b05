"""The system call without the function of ``os``."""

from __future__ import annotations

import os

import pytest

from epload.core import system_calls


@pytest.mark.parametrize("is_old", [False, True])
def test_memory_in_a_python_that_lacks_the_call(is_old: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if is_old:
        monkeypatch.delattr(os, "memfd_create")
    memory = system_calls.memfd_create("some")
    assert os.readlink(f"/proc/self/fd/{memory}").startswith("/memfd:some")
    assert not os.get_inheritable(memory)
    os.close(memory)
