"""The native library: its version, what it links, and how a stale build is refused."""

from __future__ import annotations

import importlib
import os
import runpy
import shlex
import shutil
import subprocess
import sys
import venv
from pathlib import Path
from unittest import mock

import pytest
import torch

import epload
from epload import _C
from support.failures import must_raise

ROOT = Path(__file__).parents[2]
PACKAGE = Path(epload.__file__).parent
LIBRARY = PACKAGE / "libepload.so"
SYSTEM_LIBRARIES = ("libstdc++.so", "libgcc_s.so", "libm.so", "libc.so", "libpthread.so", "ld-linux", "libdl.so")


def test_build_info() -> None:
    info = epload.build_info()
    assert info["version"] == _C.version == epload.__version__
    assert info["torch_version"].split(".")[:2] == torch.__version__.split(".")[:2]
    assert info["compiler"]
    assert Path(info["library"]) == LIBRARY
    assert LIBRARY.is_file()
    assert info["cuda"] == (PACKAGE / "libepload_cuda.so").is_file()
    assert info["cuda"] == ("sm_90" in info["cuda_architectures"])
    assert info["cuda_obstacle"] or torch.cuda.is_available()
    assert info["npu"] == (PACKAGE / "libepload_npu.so").is_file()
    assert info["npu"] == bool(info["torch_npu_version"])


IMPORT_WITH = """
import sys
from importlib import util
from pathlib import Path

spec = util.spec_from_file_location("epload._C", {module!r})
module = util.module_from_spec(spec)
spec.loader.exec_module(module)
module.torch_version = {version!r}
sys.modules["epload._C"] = module
import torch
try:
    from epload import load
except ImportError as error:
    print(error)
print("ops:", [name for name in ("coalesced_bcast", "pack", "unpack") if hasattr(torch.ops.epload, name)])
print("mapped:", "libepload.so" in Path("/proc/self/maps").read_text())
"""


def output_of(*command: str) -> list[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=True).stdout.splitlines()


def lacking(message: str, *parts: str) -> list[str]:
    return [f"{part} is not in {message}" for part in parts if part not in message]


def test_stale_build_is_refused_before_it_is_loaded() -> None:
    code = IMPORT_WITH.format(module=_C.__file__, version="2.7.1")
    message = "\n".join(output_of(sys.executable, "-c", code))
    assert lacking(message, "2.7.1", torch.__version__, "pip install", "ops: []", "mapped: False") == []


def run_setup(executable: str, *arguments: str, root: Path = ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
    """Without CUDA kernels, unless ``environment`` asks for them."""
    command = [executable, "setup.py", "-q", *arguments]
    environment = {**os.environ, "EPLOAD_CUDA": "0", **environment}
    return subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=100, check=False)


def refused_build(executable: str, *arguments: str, **environment: str) -> str:
    """Returns the sentence with which a build is refused."""
    done = run_setup(executable, *arguments, **environment)
    assert done.returncode != 0
    message = done.stderr.strip().splitlines()[-1]
    assert message.startswith("epload: "), done.stderr
    return message


@pytest.mark.parametrize(
    ("variable", "wanted", "parts"),
    [
        ("EPLOAD_CUDA", "1", ["EPLOAD_CUDA=1", "nvcc", "CUDA_HOME", "EPLOAD_CUDA=0"]),
        ("EPLOAD_CUDA", "yes", ["auto, 0 or 1", "'yes'"]),
        ("EPLOAD_NPU", "1", ["EPLOAD_NPU=1", "torch_npu", "no CANN", "EPLOAD_NPU=0"]),
        ("EPLOAD_NPU", "auto", ["0 or 1", "'auto'"]),
        ("PATH", "", ["cmake and ninja", "pip install cmake ninja", "--no-build-isolation"]),
    ],
)
def test_a_build_that_cannot_be_is_refused(variable: str, wanted: str, parts: list[str], tmp_path: Path) -> None:
    """The refusal is one sentence, before anything is compiled. The environment of these tests has no torch_npu."""
    wishes = {variable: wanted, "CUDA_HOME": str(tmp_path)}
    message = refused_build(sys.executable, "build_ext", "--build-lib", str(tmp_path), **wishes)
    assert lacking(message, *parts) == []
    assert list(tmp_path.iterdir()) == []


def test_a_build_without_torch_is_refused(tmp_path: Path) -> None:
    """Before pip would download one of its own choice."""
    venv.create(tmp_path / "empty", with_pip=False)
    packages = tmp_path / "packages"
    packages.mkdir()
    for name in ("setuptools", "_distutils_hack"):
        (packages / name).symlink_to(Path(str(importlib.import_module(name).__file__)).parent)
    message = refused_build(str(tmp_path / "empty/bin/python"), "dist_info", PYTHONPATH=str(packages))
    assert lacking(message, str(tmp_path / "empty"), "pip install 'torch>=2.11,<2.16'", "--no-build-isolation") == []


def add_files(folder: Path, files: dict[str, str]) -> None:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content)
        (folder / name).chmod(0o755)


def add_torch(folder: Path, cuda: str) -> None:
    """Adds a torch without its libraries to a folder."""
    version = f"__version__ = '2.14.1+test'\ncuda: Optional[str] = {cuda}\n"
    add_files(folder / "torch", {"lib/empty": "", "__init__.py": "", "version.py": version})


@pytest.mark.parametrize(
    ("cuda", "option", "built"),
    [("'13.0'", "auto", True), ("None", "auto", False), ("None", "1", True), ("'13.0'", "0", False)],
)
def test_kernels_are_built_for_a_torch_with_cuda_or_if_asked(cuda: str, option: str, built: bool, tmp_path: Path) -> None:
    add_torch(tmp_path, cuda)
    programs, cmake = tmp_path / "bin", f'#!/bin/sh\necho "$@" > {tmp_path / "configured"}; exit 1\n'
    add_files(programs, {"nvcc": "#!/bin/sh\n", "ninja": "#!/bin/sh\n", "cmake": cmake})
    done = run_setup(
        sys.executable, "build_ext", "--build-lib", str(tmp_path / "built"), PYTHONPATH=str(tmp_path), EPLOAD_CUDA=option,
        CUDA_HOME=str(tmp_path), PATH=f"{programs}:{os.environ['PATH']}",
    )  # fmt: skip
    assert done.returncode != 0
    assert f" -DEPLOAD_NVCC={programs / 'nvcc' if built else ''} " in (tmp_path / "configured").read_text(), done.stderr


def test_a_wheel_names_its_torch(tmp_path: Path) -> None:
    """Its requirements name it always, its version if asked."""
    add_torch(tmp_path, "None")
    plain = epload.__version__.partition("+")[0]
    for options, version in (({}, plain), ({"EPLOAD_LOCAL_VERSION": "1"}, f"{plain}+torch2.14")):
        done = run_setup(sys.executable, "egg_info", "--egg-base", str(tmp_path), PYTHONPATH=str(tmp_path), **options)
        assert done.returncode == 0, done.stderr
        metadata = (tmp_path / "epload.egg-info/PKG-INFO").read_text().splitlines()
        assert {f"Version: {version}", "Requires-Dist: torch==2.14.*"} <= {*metadata}


def test_a_wheel_has_no_modules_of_an_earlier_build(tmp_path: Path) -> None:
    """A package that became a module would shadow it."""
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path / name)
    left = tmp_path / "build/lib.of_an_earlier_build"
    add_files(left, {"epload/dcp/__init__.py": ""})
    add_files(tmp_path, {"python/epload/dcp.py": "", "bin/cmake": "#!/bin/sh\nexit 1\n"})
    done = run_setup(sys.executable, "bdist_wheel", root=tmp_path, PATH=f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    assert done.stderr.strip().splitlines()[-1] == "epload: the build failed; CMake's own words are above", done.stderr
    assert not left.exists()


def needed(library: Path) -> set[str]:
    lines = output_of("readelf", "-d", "-W", str(library))
    return {line.split("[")[1].rstrip("]") for line in lines if "(NEEDED)" in line}


def test_library_needs_only_torch_core() -> None:
    """And nothing of Python: it would otherwise be bound to one version."""
    undefined = [line.split()[-1] for line in output_of("nm", "-D", "--undefined-only", str(LIBRARY))]
    assert undefined
    assert [symbol for symbol in undefined if symbol.lstrip("_").startswith("Py")] == []
    assert {name for name in needed(LIBRARY) if not name.startswith(SYSTEM_LIBRARIES)} == {
        "libc10.so",
        "libtorch_cpu.so",
    }


CUDA_LIBRARY = PACKAGE / "libepload_cuda.so"


@pytest.mark.skipif(not epload.build_info()["cuda"], reason="this build has no CUDA kernels (EPLOAD_CUDA)")
def test_cuda_library_needs_neither_torch_nor_a_driver() -> None:
    """A build with kernels has to run where there is no CUDA."""
    assert [name for name in needed(CUDA_LIBRARY) if not name.startswith((*SYSTEM_LIBRARIES, "librt.so"))] == []
    symbols = {line.split()[-1] for line in output_of("nm", "-D", "--defined-only", str(CUDA_LIBRARY))}
    functions = ("interface", "ready", "region_copy", "pin", "unpin", "share", "open", "close", "error")
    assert symbols == {f"epload_cuda_{name}" for name in functions}


MODULES = {path.relative_to(PACKAGE).as_posix(): path for path in sorted(PACKAGE.rglob("*.py"))}


def holding(*texts: str) -> list[str]:
    return [module for module, path in MODULES.items() if any(text in path.read_text() for text in texts)]


def test_few_files_name_the_native_ops_or_private_state_of_dtensors() -> None:
    assert holding("torch.ops.epload") == ["native/ops.py"]
    assert sorted(holding("._spec", "._local_tensor")) == ["model/dtensor.py", "model/materialize.py"]


def link_command(output: Path, *flags: str, shared_runtime: bool) -> list[str]:
    """Returns that of libepload as it was built last, with flags for the compiler and another output."""
    minor = ".".join(torch.__version__.split(".")[:2])
    folders = [each.parent for each in (ROOT / "build").glob(f"cmake-*torch{minor}/build.ninja")]
    if not folders:
        pytest.skip("epload was built elsewhere: build/ has no folder of CMake for this torch")
    (folder,) = folders
    commands = output_of("ninja", "-C", str(folder), "-t", "commands", "out/libepload.so")
    line = next(line for line in reversed(commands) if "-shared" in line)
    words = shlex.split(line.partition("&&")[2].rpartition("&&")[0] or line)
    words[words.index("-o") + 1] = str(output)
    assert "-l:libstdc++.so.6" in words, "this toolchain has no shared runtime"
    if not shared_runtime:
        words.remove("-l:libstdc++.so.6")
    return ["env", "-C", str(folder), words[0], *flags, *words[1:]]


@pytest.mark.parametrize("shared_runtime", [True, False])
def test_a_compiler_that_links_its_runtime_statically(shared_runtime: bool, tmp_path: Path) -> None:
    """The build links torch's runtime first. Where it could not, it stops with one sentence."""
    with mock.patch("setuptools.setup"):
        check = runpy.run_path(str(ROOT / "setup.py"), run_name="epload_setup")["check_exceptions"]
    library = tmp_path / "libepload.so"
    subprocess.run(link_command(library, "-static-libstdc++", shared_runtime=shared_runtime), check=True)
    torch_dir = Path(torch.__file__).parent
    if shared_runtime:
        check(library, torch_dir)
    elif torch.__version__ >= (2, 15):
        pytest.skip("with torch 2.15, errors get across although the library has a runtime of its own")
    else:
        must_raise(SystemExit, r"links its runtime into libepload\.so", check, library, torch_dir)
