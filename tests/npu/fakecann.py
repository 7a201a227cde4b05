"""Builds the fake CANN: libraries of the names that torch_npu links, one with ``cann.cpp`` and, for every other of CANN,
one that does nothing and returns 0."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterable
from importlib import util
from pathlib import Path

HERE = Path(__file__).parent
MAIN = "libascendcl.so"
OTHERS = (
    "libhccl.so", "libacl_op_compiler.so", "libge_runner.so", "libgraph.so", "libopapi.so", "libruntime.so",
    "libacl_tdt_channel.so",
)  # fmt: skip
OF_CANN = re.compile(r"^(acl|Hccl|Msprof|rt[A-Z])")
BY_NAME = ("aclrtSetDeviceSatMode", "aclSetCompileopt", "aclrtSetOpExecuteTimeOut", "aclrtSetOpWaitTimeout")
"""What torch_npu looks up while it runs, and wants to find."""


def make(folder: Path) -> Path:
    """The folder, to be put on LD_LIBRARY_PATH before torch_npu is loaded."""
    run("g++", "-std=c++17", "-O1", "-fPIC", "-c", str(HERE / "cann.cpp"), "-o", str(folder / "cann.o"))
    have = set(symbols(folder / "cann.o", "--defined-only", "-g"))
    spec = util.find_spec("torch_npu")
    assert spec is not None
    assert spec.origin is not None
    library = Path(spec.origin).parent / "lib"
    wanted = {*BY_NAME, *(name for one in library.glob("*.so") for name in symbols(one, "--undefined-only", "-D"))}
    rest = [f".globl {n}\n.type {n},@function\n{n}: xorl %eax,%eax\nret" for n in wanted - have if OF_CANN.match(n)]
    (folder / "rest.s").write_text("\n".join([".text", *rest, '.section .note.GNU-stack,"",@progbits', ""]))
    link(folder, MAIN, ["cann.o", "rest.s", "-lpthread", "-lrt"])
    for name in OTHERS:
        link(folder, name, ["-Wl,--no-as-needed", "-L.", "-lascendcl"])
    return folder


def symbols(file: Path, *options: str) -> Iterable[str]:
    return [line.split()[-1].partition("@")[0] for line in run("nm", *options, str(file)).splitlines() if line.strip()]


def link(folder: Path, name: str, what: list[str]) -> None:
    run("gcc", "-shared", "-o", name, f"-Wl,-soname,{name}", *what, folder=folder)


def run(*words: str, folder: Path | None = None) -> str:
    return subprocess.run(words, cwd=folder, capture_output=True, text=True, check=True).stdout
