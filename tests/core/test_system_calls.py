"""System calls without the functions of ``os``."""

from __future__ import annotations

import errno
import os
import select
import subprocess
import sys

import pytest

from epload.core import system_calls


@pytest.mark.parametrize("is_old", [False, True])
def test_calls_of_a_python_that_lacks_them(is_old: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("memfd_create", "pidfd_open") if is_old else ():
        monkeypatch.delattr(os, name)
    memory = system_calls.memfd_create("some")
    assert os.readlink(f"/proc/self/fd/{memory}").startswith("/memfd:some")
    assert not os.get_inheritable(memory)
    os.close(memory)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        watched = system_calls.pidfd_open(process.pid)
        assert select.select([watched], [], [], 0)[0] == []
        process.communicate(b"\n")
        assert select.select([watched], [], [], 60)[0] == [watched]
        os.close(watched)
    with pytest.raises(OSError, match="No such process") as refused:
        system_calls.pidfd_open(process.pid)
    assert refused.value.errno == errno.ESRCH
