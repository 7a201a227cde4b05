"""Builds epload's native parts with CMake and Ninja against the torch that is installed. Everything else is in pyproject.toml."""

import importlib.util
import os
import re
import shutil
import site
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent.resolve()
VERSION = "0.3.0.dev0"
SUPPORTED_TORCH = ">=2.11,<2.16"
REQUIREMENTS = ["click>=8.1", "tqdm"]
OPS_LIBRARY = "libepload.so"
CUDA_LIBRARY = "libepload_cuda.so"
NPU_LIBRARY = "libepload_npu.so"
FIRST_MINOR, LAST_MINOR = 11, 15


def find_torch(name: str = "torch") -> Path | None:
    """The installed torch, also from inside pip's build isolation, which hides site-packages from import only."""
    places = [sysconfig.get_path("platlib"), sysconfig.get_path("purelib"), *site.getsitepackages()]
    if sys.prefix == sys.base_prefix:  # outside of a virtual environment, where the user's packages come first
        places.insert(0, site.getusersitepackages())
    spec = importlib.util.find_spec(name)
    found = [Path(spec.origin).parent] if spec and spec.origin else []
    found += [Path(place) / name for place in places if place]
    return next((path for path in found if (path / "version.py").is_file() and (path / "lib").is_dir()), None)


def require_torch() -> Path:
    torch_dir = find_torch()
    if torch_dir is None:
        raise SystemExit(
            "epload: a build is for the torch that it will run with, and none is installed for "
            f"{sys.executable}. First: pip install 'torch{SUPPORTED_TORCH}'; if it is installed, the build is isolated from it: "
            "install cmake, ninja, pybind11 and setuptools beside it, and build with --no-build-isolation"
        )
    return torch_dir


def require_tools() -> None:
    """Ends the build if what it needs is missing. pip brings it, unless it was told not to."""
    missing = [tool for tool in ("cmake", "ninja") if shutil.which(tool) is None]
    missing += [] if importlib.util.find_spec("pybind11") else ["pybind11"]
    if missing:
        raise SystemExit(
            f"epload: a build needs {' and '.join(missing)}, which {sys.executable} does not find. Install with: pip install "
            f"{' '.join(missing)}; or leave out --no-build-isolation, so that pip does"
        )


def version_of(package: Path) -> str:
    match = re.search(r"^__version__ = '([^']+)'", (package / "version.py").read_text(), re.M)
    if match is None:
        raise SystemExit(f"epload: no version in {package / 'version.py'}")
    return match.group(1)


def minor_of(version: str) -> str:
    """E.g. "2.13"."""
    return ".".join(version.split(".")[:2])


def torch_version(torch_dir: Path) -> str:
    version = version_of(torch_dir)
    major, minor = map(int, minor_of(version).split("."))
    if major != 2 or not FIRST_MINOR <= minor <= LAST_MINOR:
        raise SystemExit(f"epload builds with torch{SUPPORTED_TORCH}, found {version} in {torch_dir}")
    return version


def wish(variable: str, *allowed: str) -> str:
    """Returns the value of an environment variable; the first of those allowed if it is not set."""
    value = os.environ.get(variable) or allowed[0]
    if value not in allowed:
        raise SystemExit(f"epload: expected {variable} to be {', '.join(allowed[:-1])} or {allowed[-1]}, got {value!r}")
    return value


def find_nvcc() -> Path | None:
    """Returns the CUDA compiler, as EPLOAD_CUDA says: 0 none, 1 it must be there, auto (or unset) if it is there and torch has
    CUDA."""
    wanted, torch_dir = wish("EPLOAD_CUDA", "auto", "0", "1"), find_torch()
    without_cuda = torch_dir and re.search(r"^cuda\b.*= *None$", (torch_dir / "version.py").read_text(), re.M)
    if wanted == "0" or (wanted == "auto" and without_cuda):
        return None
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    places = [f"{home}/bin"] if home else [os.environ.get("PATH", ""), "/usr/local/cuda/bin"]
    nvcc = shutil.which("nvcc", path=os.pathsep.join(places))
    if nvcc is None and wanted == "1":
        raise SystemExit(
            f"epload: EPLOAD_CUDA=1 needs nvcc, and there is none in {' or '.join(places)}. Install the CUDA toolkit, or "
            "set CUDA_HOME to where it is; EPLOAD_CUDA=0 builds without CUDA kernels"
        )
    return Path(nvcc) if nvcc else None


def find_torch_npu(torch: str) -> tuple[Path, str] | None:
    """Returns the installed torch_npu and its version, if EPLOAD_NPU asks for the Ascend part: 0 (or unset) no, 1 yes."""
    if wish("EPLOAD_NPU", "0", "1") == "0":
        return None
    package = find_torch("torch_npu")
    version = version_of(package) if package else ""
    if package is None:
        obstacle = f"and none is installed for {sys.executable}. Install the one for torch {torch} (its wheel is enough, no CANN)"
    elif minor_of(version) != minor_of(torch):
        obstacle = f"and {version} in {package} is not for torch {torch}. Install the matching one"
    else:
        return package, version
    raise SystemExit(f"epload: EPLOAD_NPU=1 needs torch_npu, {obstacle}; EPLOAD_NPU=0 builds without the Ascend part")


class CMakeBuild(build_ext):
    def build_extension(self, ext: Extension) -> None:
        torch_dir = require_torch()
        require_tools()
        nvcc = find_nvcc()
        npu = find_torch_npu(torch_version(torch_dir))
        output = Path(self.get_ext_fullpath(ext.name)).parent.resolve()
        if nvcc is None:
            (output / CUDA_LIBRARY).unlink(missing_ok=True)  # of an earlier build
        if npu is None:
            (output / NPU_LIBRARY).unlink(missing_ok=True)
        configuration = f"{sysconfig.get_config_var('SOABI')}-torch{minor_of(torch_version(torch_dir))}{'-npu' if npu else ''}"
        build = ROOT / "build" / f"cmake-{configuration}"
        # A torch, a Python or an isolated build environment that has gone would leave a stale cache.
        (build / "CMakeCache.txt").unlink(missing_ok=True)
        # Ninja does not see that another compiler took the place of the one at the same path.
        (build / "out" / CUDA_LIBRARY).unlink(missing_ok=True)
        configure = [
            "cmake", "-S", str(ROOT), "-B", str(build), "-G", "Ninja",
            f"-DCMAKE_BUILD_TYPE={'Debug' if self.debug else 'Release'}",
            f"-DPython_EXECUTABLE={sys.executable}",
            f"-Dpybind11_DIR={pybind11_dir()}",
            f"-DEPLOAD_TORCH_DIR={torch_dir}",
            f"-DEPLOAD_TORCH_VERSION={torch_version(torch_dir)}",
            f"-DEPLOAD_VERSION={self.distribution.get_version()}",
            f"-DEPLOAD_OUTPUT_DIR={build / 'out'}",
            f"-DEPLOAD_NVCC={nvcc or ''}",
            f"-DEPLOAD_TORCH_NPU_DIR={npu[0] if npu else ''}",
            f"-DEPLOAD_TORCH_NPU_VERSION={npu[1] if npu else ''}",
        ]  # fmt: skip
        jobs = os.environ.get("MAX_JOBS")
        if subprocess.run(configure, check=False).returncode != 0:
            raise SystemExit("epload: the build failed; CMake's own words are above")
        built = subprocess.run(["cmake", "--build", str(build), *(["-j", jobs] if jobs else [])], check=False)
        if built.returncode != 0:
            without = f" If it was {nvcc} that failed, EPLOAD_CUDA=0 builds without CUDA kernels." if nvcc else ""
            raise SystemExit(f"epload: the build failed; the compiler's own words are above.{without}")
        check_exceptions(build / "out" / OPS_LIBRARY, torch_dir)
        output.mkdir(parents=True, exist_ok=True)
        # Out of a folder of this configuration's own: what another one has left in `output` may be newer.
        for library in [Path(self.get_ext_fullpath(ext.name)).name, OPS_LIBRARY, *self.optional_libraries()]:
            shutil.copy(build / "out" / library, output / library)

    def copy_extensions_to_source(self) -> None:
        """`pip install -e` and `build_ext --inplace`: setuptools knows of _C only, the other libraries go beside it."""
        super().copy_extensions_to_source()
        package = ROOT / "python" / "epload"
        for library in (CUDA_LIBRARY, NPU_LIBRARY):
            (package / library).unlink(missing_ok=True)
        for library in self.libraries_beside():
            self.copy_file(str(library), str(package / library.name))

    def libraries_beside(self) -> list[Path]:
        return [Path(self.build_lib).resolve() / "epload" / name for name in (OPS_LIBRARY, *self.optional_libraries())]

    def optional_libraries(self) -> list[str]:
        libraries = [CUDA_LIBRARY] if find_nvcc() else []
        return libraries + [NPU_LIBRARY] * (os.environ.get("EPLOAD_NPU") == "1")

    def get_outputs(self) -> list[str]:
        return [*super().get_outputs(), *map(str, self.libraries_beside())]


THROW = """
import sys
try:
    import torch
except Exception:
    sys.exit("no torch")
torch.ops.load_library(sys.argv[1])
try:
    torch.ops.epload.checksum(torch.zeros(2, 3).t())
except ValueError as error:
    print(error)
"""


def check_exceptions(library: Path, torch_dir: Path) -> None:
    """Ends the build unless an exception gets from the library to Python, with its whole text: it does not if the library has a
    C++ runtime of its own."""
    environment = {**os.environ, "PYTHONPATH": str(torch_dir.parent)}
    command = [sys.executable, "-c", THROW, str(library)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    thrown = "checksum: expected a contiguous tensor, got strides [1, 3]" in done.stdout
    # Without torch, e.g. a build for another machine.
    if "no torch" in done.stderr or (done.returncode == 0 and thrown):
        return
    if done.returncode == 1:
        raise SystemExit(f"epload: {library.name} was built, but cannot be loaded: {done.stderr.strip()[-500:]}")
    raise SystemExit(
        f"epload: the C++ compiler links its runtime into {library.name} (-static-libstdc++), beside that of torch, so that "
        "errors would end the process; build with a compiler that has a shared libstdc++.so.6, such as CXX=/usr/bin/g++ "
        f"(exit status {done.returncode}, {(done.stdout + done.stderr).strip()[-200:]!r})"
    )


def pybind11_dir() -> str:
    import pybind11

    return str(pybind11.get_cmake_dir())


def requirements() -> list[str]:
    """A build is for one torch minor and says so; a source distribution is for all that are supported."""
    torch_dir = None if "sdist" in sys.argv else find_torch()
    return [f"torch=={minor_of(torch_version(torch_dir))}.*" if torch_dir else f"torch{SUPPORTED_TORCH}", *REQUIREMENTS]


def version() -> str:
    """With EPLOAD_LOCAL_VERSION=1 (`make wheels`) it names the torch minor: wheels for several can lie in one folder."""
    return (
        f"{VERSION}+torch{minor_of(torch_version(require_torch()))}" if os.environ.get("EPLOAD_LOCAL_VERSION") == "1" else VERSION
    )


# Early, before anything is compiled or downloaded: a wheel that pip would build for a torch of its own choice, which is
# the one with CUDA, takes minutes and gigabytes.
if {"dist_info", "bdist_wheel", "editable_wheel", "build_ext"}.intersection(sys.argv):
    require_torch()
if "bdist_wheel" in sys.argv:  # setuptools packs all that is there, also modules that the source no longer has
    for left in (ROOT / "build").glob("lib.*"):
        shutil.rmtree(left)
setup(
    version=version(),
    ext_modules=[Extension("epload._C", sources=[])],
    cmdclass={"build_ext": CMakeBuild},
    install_requires=requirements(),
)
