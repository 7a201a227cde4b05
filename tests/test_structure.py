"""The structure of the repository: no test imports another, and files and functions stay small."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

from support import house, ranks

TESTS = Path(__file__).parent
PACKAGE = TESTS.parent / "python" / "epload"
CSRC = TESTS.parent / "csrc"
LINES_PER_FILE, LINES_PER_FUNCTION = 500, 60


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def imported(module: ast.Module) -> Iterator[str]:
    for node in ast.walk(module):
        if isinstance(node, ast.ImportFrom):
            yield node.module or ""
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def docstring_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    first = function.body[0]
    if ast.get_docstring(function) is None or first.end_lineno is None:
        return 0
    return first.end_lineno - first.lineno + 1


def functions(node: ast.AST, prefix: str = "") -> Iterator[tuple[str, int]]:
    """The qualified name of each function and its lines, from ``def`` to the last, but for the docstring."""
    for child in ast.iter_child_nodes(node):
        name = prefix
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            name = f"{prefix}{child.name}."
            if not isinstance(child, ast.ClassDef):
                assert child.end_lineno is not None
                yield name[:-1], child.end_lineno - child.lineno + 1 - docstring_lines(child)
        yield from functions(child, name)


def test_no_test_module_imports_another() -> None:
    modules = {path.stem: path for path in TESTS.rglob("test_*.py")}
    found = {
        str(path.relative_to(TESTS)): names
        for path in TESTS.rglob("*.py")
        if (names := sorted({name for name in imported(parse(path)) if name.rpartition(".")[2] in modules}))
    }
    assert found == {}, "move what is shared to tests/support"


def test_names_of_test_modules_are_unique() -> None:
    """pytest imports them by file name alone, as ranks do that unpickle their functions."""
    names = sorted(path.stem for path in TESTS.rglob("test_*.py"))
    assert names == sorted(set(names))


def test_shared_test_code_is_in_small_files() -> None:
    lines = {path.name: len(path.read_text().splitlines()) for path in (TESTS / "support").glob("*.py")}
    assert {name: count for name, count in lines.items() if count > LINES_PER_FILE} == {}


def test_files_and_functions_are_short() -> None:
    found = set()
    for path in PACKAGE.rglob("*.py"):
        file = path.relative_to(PACKAGE).as_posix()
        if len(path.read_text().splitlines()) > LINES_PER_FILE:
            found.add(file)
        found |= {f"{file}: {name}" for name, lines in functions(parse(path)) if lines > LINES_PER_FUNCTION}
    assert sorted(found) == []


def native_functions(lines: list[str]) -> Iterator[tuple[str, int]]:
    """The first line of each function, class or other block that clang-format indents by at most 2, and its lines, but for
    comments. Classes and namespaces at the outermost level are left out."""
    for end, line in enumerate(lines):
        if line not in ("}", "  }"):
            continue
        indent = len(line) - 1
        start = next(
            i for i in range(end - 1, -1, -1) if lines[i].strip() and len(lines[i]) - len(lines[i].lstrip()) == indent
        )
        yield lines[start].strip(), sum(not text.lstrip().startswith("//") for text in lines[start : end + 1])


def test_native_files_and_functions_are_short() -> None:
    found, counted = set(), 0
    for path in (path for path in CSRC.rglob("*") if path.suffix in (".cpp", ".h", ".cu")):
        lines = path.read_text().splitlines()
        if len(lines) > LINES_PER_FILE:
            found.add(path.name)
        for name, count in native_functions(lines):
            counted += 1
            if count > LINES_PER_FUNCTION:
                found.add(f"{path.name}: {name}")
    assert sorted(found) == []
    assert counted > 300


def what_tests_import(rank: int) -> list[str]:
    return [name for name in ("epload", "torch._dynamo", "transformers.modeling_utils") if name in sys.modules]


def test_ranks_start_with_what_tests_import() -> None:
    """A module that sets another list for the server of all ranks would make each import it again, a second each time."""
    [found] = ranks.run(1, what_tests_import)
    assert found == ["epload", "torch._dynamo", "transformers.modeling_utils"]


def test_class_names_are_unique() -> None:
    assert {name: places for name, places in house.class_names().items() if len(places) > 1} == {}


def test_docstrings_are_sentences() -> None:
    assert house.fragments(house.PACKAGE) == []
