"""The documentation: what its pages say is checked against the program."""

from __future__ import annotations

import ast
import re
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import epload
import epload.mapping
from support.mappings import assemble

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
HOLE = "\0"


def strings_of(path: Path) -> list[str]:
    """The string literals of a module; what an f-string inserts is ``HOLE``."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.JoinedStr):
            parts = [str(part.value) if isinstance(part, ast.Constant) else HOLE for part in node.values]
            found.append("".join(parts))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.append(node.value)
    return [text.replace("`", "'") for text in found]


MESSAGES = re.findall(r"^### `(.+)`$", (DOCS / "troubleshooting.md").read_text(), re.MULTILINE)
SOURCES = [text for path in [ROOT / "setup.py", *(ROOT / "python").rglob("*.py")] for text in strings_of(path)]


def is_raised(message: str) -> bool:
    """Whether a string of the source has the parts of a quoted message, with something in between, in this order."""
    parts = [re.escape(part.strip()) for part in message.split("...") if part.strip(" :;,.()")]
    pattern = re.compile(r"[\s\S]*?".join(parts))
    return any(pattern.search(text) for text in SOURCES)


def test_there_are_messages() -> None:
    assert len(MESSAGES) > 20
    assert not is_raised("rank ... has exited (process ...): it was bored")


@pytest.mark.parametrize("message", MESSAGES)
def test_a_quoted_message_is_in_the_source(message: str) -> None:
    assert is_raised(message)


EXAMPLES = list(re.findall(r"^```python\n(.*?)^```$", (DOCS / "mapping.md").read_text(), re.M | re.S))


@pytest.mark.parametrize("example", EXAMPLES)
def test_the_mappings_do_what_the_page_says(example: str) -> None:
    """Every element of the model comes from the checkpoint, once (``assemble`` checks that)."""
    names = {name: getattr(epload.mapping, name) for name in epload.mapping.__all__}
    exec(compile(example, "mapping.md", "exec"), names)
    numbers = iter(torch.arange(10_000.0))
    sources = {
        name: torch.tensor([float(next(numbers)) for _ in range(torch.Size(shape).numel())]).reshape(shape)
        for name, shape in names["checkpoint"].items()
    }
    made = assemble(names["mapping"], sources, names["model"])
    assert made.keys() == names["model"].keys()
    expected = sorted(x for name, value in sources.items() if not name.startswith("mtp") for x in value.flatten().tolist())
    assert sorted(x for value in made.values() for x in value.flatten().tolist()) == expected


def test_the_pictures_are_those_that_are_drawn() -> None:
    pictures = runpy.run_path(str(DOCS / "diagrams.py"))
    drawn = {name: pictures["svg"](parts) for name, parts in pictures["pictures"]().items()}
    assert drawn == {path.stem: path.read_text() for path in (DOCS / "images").glob("*.svg")}


def table_rows(path: Path) -> list[list[str]]:
    lines = path.read_text().splitlines()
    return [[cell.strip() for cell in line.strip("| ").split("|")] for line in lines if line.startswith("| ")]


def test_the_quoted_numbers_are_those_of_the_results() -> None:
    """Each row of the page is part of rows of the results that have the same label."""
    results: dict[str, set[str]] = {}
    for label, *cells in table_rows(ROOT / "benchmarks" / "results.md"):
        results.setdefault(label, set()).update(cells)
    quoted = [row for row in table_rows(DOCS / "performance.md") if re.search(r"\d", "".join(row[1:]))]
    assert len(quoted) > 30
    assert [row for row in quoted if not {*row[1:]} <= results.get(row[0], set()) | {""}] == []


def documented(page: str) -> list[str]:
    return re.findall(r"^::: ([\w.]+)$", (DOCS / "api" / page).read_text(), re.MULTILINE)


def last_parts(names: list[str]) -> list[str]:
    return [name.rsplit(".", 1)[-1] for name in names]


def test_every_public_name_is_documented() -> None:
    assert sorted([*last_parts(documented("epload.md")), "Mapping", "__version__"]) == sorted(epload.__all__)
    assert sorted(last_parts(documented("mapping.md"))) == sorted(["mapping", *epload.mapping.__all__])


def test_every_replacement_is_documented() -> None:
    """Modules of ``epload.integrations`` that a user imports; the others have what these share."""
    text = (DOCS / "models.md").read_text() + (DOCS / "sync.md").read_text()
    public = set(re.findall(r"epload\.integrations\.(?:verl\.(?=checkpoint))?(\w+)", text))
    assert public == {module.rpartition(".")[0].rsplit(".", 1)[-1] for module in documented("integrations.md")}


HOOKS = runpy.run_path(str(DOCS / "hooks.py"))


def on_the_site(markdown: str, uri: str) -> str:
    """Returns the text of a page of the site as the hook makes it of what is in the repository."""
    page = SimpleNamespace(file=SimpleNamespace(src_uri=uri), meta={})
    made = HOOKS["on_page_markdown"](markdown, page)
    assert isinstance(made, str)
    return made


def test_recipes_show_their_code() -> None:
    page = on_the_site((DOCS / "recipes.md").read_text(), "recipes.md")
    scripts = [path for path in (ROOT / "examples").glob("*.py") if path.stem != "tiny"]
    assert len(scripts) > 10
    for script in scripts:
        assert page.count(f'```python title="examples/{script.name}"\n{script.read_text()}```') == 1


@pytest.mark.parametrize(
    ("uri", "link", "on_site"),
    [
        ("sync.md", "[a](cli.md#plan)", "[a](cli.md#plan)"),
        ("sync.md", "see [the script](../examples/save.py).", "see the script (`examples/save.py`)."),
        ("sync.md", "[save.py](../examples/save.py) saves", "`examples/save.py` saves"),
        ("sync.md", "[a](../examples/one_process.ipynb)", "[a](notebook.md)"),
        ("api/epload.md", "[a](../cli.md)", "[a](../cli.md)"),
        ("contributing.md", "[a](docs/sync.md#memory) [b](LICENSE) [c](https://x.y)", "[a](sync.md#memory) b (`LICENSE`) [c](https://x.y)"),
        ("sync.md", "```python\nx[0](../none.md)\n```", "```python\nx[0](../none.md)\n```"),
    ],
)  # fmt: skip
def test_links_out_of_a_page_lead_somewhere_on_the_site(uri: str, link: str, on_site: str) -> None:
    assert on_the_site(link, uri) == on_site


def test_a_link_to_nothing_is_an_error() -> None:
    with pytest.raises(FileNotFoundError, match=r"docs/sync\.md links to \.\./none\.md, which does not exist"):
        on_the_site("[a](../none.md)", "sync.md")


def test_a_notebook_is_text_and_code() -> None:
    text = HOOKS["_cells"]((ROOT / "examples" / "one_process.ipynb").read_text())
    assert text.startswith("# A load in one process\n")
    assert "```python\nreport.scalars()\n```\n" in text


CHECKS = runpy.run_path(str(DOCS / "checks.py"))
"""The checks of ``make docs``, on pages and an index with and without what they look for."""
CODE = "<pre><code><span>{}</span>b</code></pre>"
ENTRY = '<h3 id="{}" class="doc doc-heading"></h3>'


def entries_of_all_names() -> str:
    return "".join(ENTRY.format(f"epload.{name}") for name in CHECKS["_public_names"]())


@pytest.mark.parametrize(
    ("added", "problem"),
    [
        ("", ""),
        (CODE.format("a" * (CHECKS["WIDTH"] - 1)), ""),
        (CODE.format("a" * CHECKS["WIDTH"]), "has 100 characters of code in a line"),
        ("Topology.number_loader", "shows number_loader, which is internal"),
        (ENTRY.format("epload.mapping.Mapping"), "Mapping has 2 entries, expected one"),
        (ENTRY.format("epload.HierarchicalLoader.load"), ""),
    ],
)
def test_the_checks_of_pages_find_it(added: str, problem: str) -> None:
    problems = CHECKS["_problems_of_pages"]({"page.html": entries_of_all_names() + added})
    assert len(problems) == bool(problem)
    assert problem in "".join(problems)


@pytest.mark.parametrize(("separator", "found"), [("[\\s.]+", False), ("[\\s._]+", True)])
def test_the_check_of_the_search_finds_words_inside_identifiers(separator: str, found: bool) -> None:
    text = "attn.qkv_proj.weight gate_proj LOCAL_RANK"
    sections = [{"location": page, "title": "", "text": text} for page in CHECKS["WORDS"].values()]
    sections += [{"location": "troubleshooting.html#x", "title": message, "text": ""} for message in MESSAGES]
    problems = CHECKS["_problems_of_search"]({"config": {"separator": separator}, "docs": sections})
    assert problems == ([] if found else ["a search for qkv finds [], expected mapping.html, too"])


def test_the_navigation_has_every_page() -> None:
    pages = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}
    navigation = re.search(r"^nav:\n((?:  .*\n)+)", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert navigation is not None
    assert re.findall(r"^  - (\w+):$", navigation[1], re.MULTILINE) == ["Start", "Guides", "Reference", "Internals"]
    listed = re.findall(r"^ +- [^#\n]*?: ([\w/]+\.md)$", navigation[1], re.MULTILINE)
    assert sorted(listed) == sorted({*pages, *HOOKS["PAGES"].values()})


def test_the_first_page_works_as_it_says(tmp_path: Path) -> None:
    """Runs the script with the lines that trace it; tests/examples run ``tiny.py`` and what else the page prints."""
    pattern = r'^```python(?: title="load.py")?\n(.*?)^```$'
    script, traced = re.findall(pattern, (DOCS / "index.md").read_text(), re.MULTILINE | re.DOTALL)
    script, replaced = re.subn(r"^report = .*\n", lambda _: traced, script, flags=re.MULTILINE)
    assert replaced == 1
    (tmp_path / "load.py").write_text(script)
    tiny = [sys.executable, str(ROOT / "examples" / "tiny.py"), "tiny"]
    subprocess.run(tiny, cwd=tmp_path, check=True, timeout=300, capture_output=True)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [sys.executable, *launcher, "load.py"],
        cwd=tmp_path,
        check=True,
        timeout=300,
        capture_output=True,
        text=True,
    )
    for part in ("loaded ", "readers=every", "why ", "initialized  2 tensors"):
        assert done.stdout.count(part) == 1, done.stdout
    assert (tmp_path / "load.json").stat().st_size > 0
    assert (tmp_path / "load.png").stat().st_size > 0
