"""The structure of the repository: no test imports another, and files and functions stay small."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import epload
from support import house, ranks

TESTS = Path(__file__).parent
CSRC = TESTS.parent / "csrc"
LINES_PER_FILE, LINES_PER_FUNCTION = 500, 60


def imported(module: ast.Module) -> Iterator[str]:
    for node in ast.walk(module):
        if isinstance(node, ast.ImportFrom):
            yield node.module or ""
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def functions(module: ast.Module) -> Iterator[tuple[str, int]]:
    """The name of each function and its lines, from ``def`` to the last, but for the docstring."""
    for node in ast.walk(module):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0]
            docstring = (first.end_lineno or 0) - first.lineno + 1 if ast.get_docstring(node) is not None else 0
            yield node.name, (node.end_lineno or 0) - node.lineno + 1 - docstring


def native_functions(lines: list[str]) -> Iterator[tuple[str, int]]:
    """The first line of each function, class or other block that clang-format indents by at most 2, and its lines, but for
    comments. Classes and namespaces at the outermost level are left out."""
    for end, line in enumerate(lines):
        if line in ("}", "  }"):
            indented = [i for i in range(end) if lines[i].strip() and len(lines[i]) - len(lines[i].lstrip()) == len(line) - 1]
            start = indented[-1]
            yield lines[start].strip(), sum(not text.lstrip().startswith("//") for text in lines[start : end + 1])


def test_no_test_module_imports_another() -> None:
    """Their names are unique, as pytest imports them by file name alone, and so do ranks that unpickle their functions."""
    modules = sorted(path.stem for path in TESTS.rglob("test_*.py"))
    assert modules == sorted(set(modules))
    importing = [
        f"{path.relative_to(TESTS)}: {name}"
        for path in TESTS.rglob("*.py")
        for name in imported(house.parse(path))
        if name.rpartition(".")[2] in modules
    ]
    assert importing == [], "move what is shared to tests/support"


def test_files_and_functions_are_short() -> None:
    too_long = [path for path in (TESTS / "support").glob("*.py") if len(path.read_text().splitlines()) > LINES_PER_FILE]
    native = [path for path in CSRC.rglob("*") if path.suffix in (".cpp", ".h", ".cu")]
    counted = 0
    for path in (*house.PACKAGE.rglob("*.py"), *native):
        lines = path.read_text().splitlines()
        if len(lines) > LINES_PER_FILE:
            too_long.append(path)
        for name, count in native_functions(lines) if path in native else functions(house.parse(path)):
            counted += 1
            if count > LINES_PER_FUNCTION:
                too_long.append(path / name)
    assert too_long == []
    assert counted > 1000


def what_tests_import(rank: int) -> list[str]:
    return [name for name in ("epload", "torch._dynamo", "transformers.modeling_utils") if name in sys.modules]


def test_ranks_start_with_what_tests_import() -> None:
    """A module that sets another list for the server of all ranks would make each import it again, a second each time."""
    assert ranks.run(1, what_tests_import) == [["epload", "torch._dynamo", "transformers.modeling_utils"]]


def test_class_names_are_unique() -> None:
    assert {name: places for name, places in house.class_names().items() if len(places) > 1} == {}


def test_public_names_are_typed_where_they_are_imported_from() -> None:
    typed = {
        alias.name: node.module
        for node in ast.walk(house.parse(house.PACKAGE / "__init__.py"))
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("epload.")
        for alias in node.names
    }
    assert typed == epload._MODULES
    assert {*typed} == {*epload.__all__}
    assert {name for name in typed if getattr(epload, name) is None} == set()


def test_the_package_imports_nothing_until_a_name_is_used() -> None:
    code = """
import sys, epload
assert "torch" not in sys.modules and "load" in dir(epload) and not hasattr(epload, "absent")
assert epload.mapping.Quantize and epload.integrations.engine.load_engine
import epload.save
assert epload.load.__module__ == "epload.load" and epload.save.__name__ == "save"
"""
    subprocess.run([sys.executable, "-c", code], timeout=300, check=True)


def test_no_module_imports_too_many() -> None:
    """Except for the package itself, which has all public names."""
    numbers = {name: len(house.imports(name)) for name in house.modules() if name != "epload"}
    assert {name: number for name, number in numbers.items() if number > 20} == {}


def test_docstrings_are_sentences() -> None:
    assert house.fragments(house.PACKAGE) == []
