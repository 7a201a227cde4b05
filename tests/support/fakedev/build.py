"""Builds the fake accelerator, and epload's native library for it. Kept under ``build/`` by the sources' hash."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sysconfig
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

ROOT = Path(__file__).parents[3]
HERE = Path(__file__).parent
CSRC = ROOT / "csrc"
TORCH = Path(torch.__file__).parent
INCLUDES = [TORCH / "include", TORCH / "include/torch/csrc/api/include", Path(sysconfig.get_paths()["include"])]
COMPILER = os.environ.get("CXX", "g++")
FLAGS = ["-std=c++20", "-O1", "-fPIC", "-fvisibility=hidden", "-DUSE_DISTRIBUTED", "-DUSE_C10D_GLOO"]

CHANGES: dict[str, list[tuple[str, str]]] = {
    "schemas.cpp": [("TORCH_LIBRARY(epload,", "TORCH_LIBRARY(epload_test,")],
    # The CUDA region copy, with tests/support/fakedev/kernels.cpp in the place of libepload_cuda.
    "cuda/region_copy.cpp": [("c10::DeviceType::CUDA", "c10::DeviceType::PrivateUse1")],
    # Each rule of the op can be broken, one at a time, by the environment.
    "comm/stream.h": [
        ("namespace epload {", '#include "../broken.h"\nnamespace epload {'),
        ("      join(*caller_, *ours_);", '      if (!broken("entry_wait")) join(*caller_, *ours_);'),
        ("        join(*ours_, *caller_);", '        if (!broken("exit_wait")) join(*ours_, *caller_);'),
    ],
    "comm/coalesced_bcast.cpp": [
        (
            "        staging = at::empty(",
            '        std::optional<c10::StreamGuard> astray;\n        if (broken("allocation")) '
            "astray.emplace(c10::impl::VirtualGuardImpl(device.type()).getDefaultStream(device));\n"
            "        staging = at::empty(",
        )
    ],
    "device/pipe.cpp": [
        ("namespace epload {", '#include "../broken.h"\nnamespace epload {'),
        ("  piece.done.synchronize();\n  return", '  if (!broken("piece_reuse")) piece.done.synchronize();\n  return'),
        ("    event.block(lane.stream);", '    if (!broken("pipe_entry")) event.block(lane.stream);'),
        ("    event.block(caller_);", '    if (!broken("pipe_exit")) event.block(caller_);'),
    ],
    "device/crossing.cpp": [
        ("namespace epload {", '#include "../broken.h"\nnamespace epload {'),
        ("    behind.second->done", '    if (!broken("piece_write")) behind.second->done'),
    ],
    "comm/collective.cpp": [
        ("namespace epload {", '#include "../broken.h"\nnamespace epload {'),
        ("    work->wait();", '    if (!broken("staging_reuse")) work->wait();'),
    ],
}
"""How the library that is tested here differs from the one that is shipped: in each file, text and what replaces it."""
CHANGES_OF_ALL = [("_IMPL(epload,", "_IMPL(epload_test,"), ('>("epload", ', '>("epload_test", ')]
"""The same, for files that may or may not have such text."""

LEFT_OUT = ("module.cpp", "npu/ascend.cpp", "npu/region_copy.cpp")
"""The Python module; Ascend, whose place the fake accelerator has."""

BROKEN = """#pragma once
#include <cstdlib>
#include <cstring>
inline bool broken(const char* rule) {
  const char* const named = std::getenv("EPLOAD_TEST_BREAK");
  return named != nullptr && std::strcmp(named, rule) == 0;
}
"""


def device() -> Path:
    """The fake accelerator's Python extension; compiled if its sources have changed."""
    sources = sorted(HERE.glob("*.cpp"))
    inputs = [*sources, *HERE.glob("*.h"), *(CSRC / "cuda").glob("*.h"), Path(__file__)]

    def make(folder: Path) -> None:
        compile_all(sources, folder / "_fakedev.so", ["c10", "torch_cpu", "torch", "torch_python"])

    return kept("fakedev", inputs, make) / "_fakedev.so"


def library() -> Path:
    """epload's native library with :data:`CHANGES`, as ``torch.ops.epload_test``."""
    extension = device()
    inputs = [path for path in sorted(CSRC.rglob("*")) if path.is_file()] + [extension, Path(__file__)]

    def make(folder: Path) -> None:
        source = folder / "csrc"
        shutil.copytree(CSRC, source)
        (source / "broken.h").write_text(BROKEN)
        for name, changes in CHANGES.items():
            text = (source / name).read_text()
            for old, new in changes:
                if text.count(old) != 1:
                    raise RuntimeError(f"csrc/{name} has {text.count(old)} times {old!r}, expected 1: mend CHANGES in {__file__}")
                text = text.replace(old, new)
            (source / name).write_text(text)
        for path in source.rglob("*.cpp"):
            text = path.read_text()
            for old, new in CHANGES_OF_ALL:
                text = text.replace(old, new)
            path.write_text(text)
        compile_all(by_folder(source), folder / "libepload_test.so", ["c10", "torch_cpu"])
        (folder / "libepload_cuda.so").symlink_to(extension)

    return kept("epload", inputs, make) / "libepload_test.so"


def by_folder(root: Path) -> list[Path]:
    """Writes a source for each folder that includes all sources in it: to read torch's headers takes longer than the rest."""
    groups: dict[str, list[Path]] = {}
    for path in sorted(root.rglob("*.cpp")):
        if str(path.relative_to(root)) not in LEFT_OUT:
            alone = path.name == "schemas.cpp"  # a program without the ops leaves it out, with all that it names
            groups.setdefault(path.stem if alone else path.parent.name, []).append(path)
    sources = []
    for name, paths in groups.items():
        sources.append(root / f"all_of_{name}.cpp")
        sources[-1].write_text("".join(f'#include "{path}"\n' for path in paths))
    return sources


def program(sources: list[Path]) -> Path:
    """A program without Python: these sources, linked with those objects of :func:`library` that they need."""
    objects = sorted(library().parent.glob("*.o"))

    def make(folder: Path) -> None:
        command(["ar", "rcs", str(folder / "objects.a"), *map(str, objects)])
        compile_all(sources, folder / "program", ["c10", "torch_cpu"], [folder / "objects.a"])

    inputs = [*sources, *(path for source in sources for path in source.parent.glob("*.h")), library()]
    return kept("program", inputs, make) / "program"


def kept(name: str, inputs: Iterable[Path], make: Callable[[Path], None]) -> Path:
    """The folder that ``make`` has filled from these inputs, now or earlier; one process makes it, others wait."""
    digest = hashlib.blake2b(f"{torch.__version__} {torch.__file__} {sysconfig.get_config_var('SOABI')}".encode(), digest_size=8)
    for path in sorted(inputs):
        digest.update(str(path).encode() + path.read_bytes())
    base = ROOT / "build"
    base.mkdir(exist_ok=True)
    folder = base / f"test-{name}-{digest.hexdigest()}"
    with open(base / f"test-{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            for old in base.glob(f"test-{name}-*"):
                shutil.rmtree(old)
            partial = base / f"making-test-{name}"
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir()
            make(partial)
            partial.rename(folder)
    return folder


def compile_all(sources: list[Path], output: Path, libraries: list[str], archives: Sequence[Path] = ()) -> None:
    """Compiles one object a source, as many at a time as there are cores, kept beside ``output``. It is a shared library if it is
    a ``.so``, else a program, which is linked with ``archives`` too."""
    includes = [flag for path in INCLUDES for flag in ("-isystem", str(path))]

    def compile_one(source: Path) -> Path:
        target = output.parent / f"{source.stem}.o"
        command([COMPILER, *FLAGS, *includes, "-c", str(source), "-o", str(target)])
        return target

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        linked = [str(path) for path in (*pool.map(compile_one, sources), *archives)]
    kind = ["-shared"] if output.suffix == ".so" else [f"-Wl,-rpath,{TORCH / 'lib'}"]
    links = [f"-L{TORCH / 'lib'}", *(f"-l{name}" for name in libraries), "-lpthread", "-ldl"]
    command([COMPILER, *kind, *linked, "-o", str(output), *links])


def command(words: list[str]) -> None:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(words)}\nfailed:\n{done.stderr[-4000:]}")
