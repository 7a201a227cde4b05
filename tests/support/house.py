"""Measures the size and the structure of the repository: ``python tests/support/house.py`` (``make measure``)."""

from __future__ import annotations

import ast
import subprocess
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "python" / "epload"
SOURCES = (".py", ".pyi", ".cpp", ".h", ".cu")
FRAGMENTS = (
    "Of", "What", "Whether", "How", "That", "Those", "By", "In", "On", "At", "With", "To", "From", "For", "Which", "Who", "Whose",
    "Where", "When", "As", "If", "So", "Not",
)  # fmt: skip
"""No docstring begins with one of these words: it is a sentence, which begins with a verb or its subject."""


def files(*folders: str) -> list[Path]:
    """Returns the files in git below some folders of the repository."""
    listed = subprocess.run(["git", "ls-files", "-z", *folders], cwd=ROOT, capture_output=True, check=True).stdout
    return [path for name in listed.decode().split("\0") if name and (path := ROOT / name).exists()]


@cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def modules() -> dict[str, Path]:
    """Returns the modules of the package by name."""
    found = {}
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(name: str) -> set[str]:
    """Returns the modules of the package that a module imports, wherever it does."""
    known = modules()
    found = set()
    for node in ast.walk(parse(known[name])):
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    named = found & known.keys()
    # "from epload.core import log" imports epload.core.log, not all of epload.core.
    return {one for one in named if not any(other.startswith(f"{one}.") for other in named)} - {name}


def class_names() -> dict[str, list[str]]:
    """Returns the files in which a class of each name is defined."""
    found: dict[str, list[str]] = defaultdict(list)
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(parse(path)):
            if isinstance(node, ast.ClassDef):
                found[node.name].append(path.relative_to(PACKAGE).as_posix())
    return found


def docstrings(path: Path) -> Iterator[tuple[int, str]]:
    """Yields the line and the text of each docstring, those under attributes included."""
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value


def fragments(*folders: Path) -> list[str]:
    """Returns where a docstring begins with one of :data:`FRAGMENTS`."""
    return [
        f"{path.relative_to(ROOT)}:{line}: {text.strip().splitlines()[0][:80]}"
        for folder in folders
        for path in sorted(folder.rglob("*.py"))
        for line, text in docstrings(path)
        if text.strip() and text.split()[0].rstrip(",.:;") in FRAGMENTS
    ]


def floors() -> int:
    """Returns the number of packages on the longest path of the import graph."""
    graph: dict[str, set[str]] = defaultdict(set)

    def package(name: str) -> str:
        return ".".join(name.split(".")[:2])

    for name in modules():
        if name != "epload":
            graph[package(name)] |= {package(other) for other in imports(name)} - {package(name), "epload"}

    @cache
    def depth(name: str) -> int:
        return 1 + max(map(depth, graph[name]), default=0)

    return max(map(depth, list(graph)))


def lines(paths: list[Path], suffixes: tuple[str, ...]) -> int:
    return sum(len(path.read_text().splitlines()) for path in paths if path.suffix in suffixes)


def table() -> dict[str, tuple[int, int]]:
    """Returns each measure with its limit, by what it measures."""
    fan_out = {name: len(imports(name)) for name in modules() if name != "epload"}
    names = [len(places) for places in class_names().values()]
    nodes = sum(1 for path in PACKAGE.rglob("*.py") for _ in ast.walk(parse(path)))
    words = sum(len(path.read_text().split()) for path in files("docs") if path.suffix == ".md")
    return {
        "lines in python/ and csrc/": (lines(files("python", "csrc"), SOURCES), 29_000),
        "syntax nodes of python/epload": (nodes, 150_000),
        "classes": (sum(names), 210),
        "class names used twice": (sum(count > 1 for count in names), 0),
        "floors of the import graph": (floors(), 10),
        "largest fan-out of a module": (max(fan_out.values()), 20),
        "lines of tests": (lines(files("tests"), (".py",)), 27_000),
        "docstrings that begin with a fragment": (len(fragments(PACKAGE)), 0),
        "words in docs/": (words, 22_000),
    }


def main() -> None:
    print(f"{'':40}{'now':>10}{'limit':>10}")
    for what, (now, limit) in table().items():
        print(f"{what:40}{now:>10,}{limit:>10,}")


if __name__ == "__main__":
    main()
