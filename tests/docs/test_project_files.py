"""The files that a project is adopted with: they exist, and what they cite exists."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.version import Version

ROOT = Path(__file__).parents[2]
PAGES = ["README.md", "SECURITY.md", "CODE_OF_CONDUCT.md", "CONTRIBUTING.md", ".github/pull_request_template.md"]
EXAMPLES = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "examples").rglob("*.py"))
FORMS = [".github/ISSUE_TEMPLATE/bug.yml", ".github/ISSUE_TEMPLATE/feature.yml"]
CITED_FILE = re.compile(r"(?<![\w/.])(?:[\w.-]+/)*[\w-]+\.(?:md|py|txt|toml|yml|yaml|cff)\b(?!\()")
COMMAND = re.compile(r"\bmake ([a-z-]+)|\bepload ([a-z]+)`")


def slug(heading: str) -> str:
    """GitHub's and mkdocs' anchor of a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")


def missing_citations(text: str, commands: set[str], folder: Path = ROOT) -> list[str]:
    """Links, anchors, files and commands that the text of a file in ``folder`` cites and that do not exist."""
    missing = []
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        path, _, anchor = target.partition("#")
        file = ROOT / path
        if not file.is_file() or (
            anchor and anchor not in {slug(line.lstrip("# ")) for line in file.read_text().splitlines() if line[:1] == "#"}
        ):
            missing.append(target)
    for cited in CITED_FILE.findall(text):
        if not any((place / cited).exists() for place in (ROOT, ROOT / "python" / "epload", folder)):
            missing += [cited] if not any((ROOT / "tests").rglob(Path(cited).name)) else []
    missing += [a or b for a, b in COMMAND.findall(text) if (a or b) not in commands]
    return missing


@pytest.fixture(scope="module")
def commands() -> set[str]:
    from epload.cli.main import main

    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    return {*targets, *main.commands}


def test_what_is_missing_is_found(commands: set[str]) -> None:
    text = "[a](docs/none.md) [b](docs/sync.md#none) [c](docs/sync.md#memory) none.py `make none` `epload nothing` `epload info`"
    assert missing_citations(text, commands) == [
        "docs/none.md",
        "docs/sync.md#none",
        "docs/none.md",
        "none.py",
        "none",
        "nothing",
    ]


@pytest.mark.parametrize("name", [*PAGES, *FORMS, *EXAMPLES])
def test_what_a_file_cites_exists(name: str, commands: set[str]) -> None:
    assert missing_citations((ROOT / name).read_text(), commands, (ROOT / name).parent) == []


@pytest.mark.parametrize("name", FORMS)
def test_a_form_is_one_that_github_shows(name: str) -> None:
    form: dict[str, Any] = yaml.safe_load((ROOT / name).read_text())
    assert form.keys() == {"name", "description", "labels", "body"}
    fields = [field for field in form["body"] if field["type"] != "markdown"]
    assert {field["type"] for field in fields} == {"textarea"}
    assert len({field["id"] for field in fields}) == len(fields) > 0
    assert all(field["attributes"]["label"] for field in fields)


def test_the_citation_is_of_the_last_release() -> None:
    citation: dict[str, Any] = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    version = re.search(r'^VERSION = "(.+)"$', (ROOT / "setup.py").read_text(), re.MULTILINE)
    released = re.search(r"^## (\d\S+) \(", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert version is not None
    assert released is not None
    assert (citation["title"], citation["version"]) == (project["name"], released[1])
    assert version[1] == released[1] or (".dev" in version[1] and Version(version[1]) > Version(released[1]))
    assert citation["license"] == project["license"]
    assert [author.keys() for author in citation["authors"]] == [{"name"}], "an entity, no persons"
    assert citation["cff-version"] == "1.2.0"
    assert citation["message"]


def test_hooks_are_the_linters_of_make_lint() -> None:
    (repo,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    recipe = re.search(r"^lint:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert recipe is not None
    linters = [re.sub(r"\s*\$\(\w+\)/?\s*", " ", line).strip() for line in recipe[1].splitlines()]
    entries = [hook["entry"].removeprefix("env ") for hook in repo["hooks"]]
    assert [" ".join(linter.split()) for linter in linters] == entries
    assert {hook["language"] for hook in repo["hooks"]} == {"system"}


def test_all_has_every_extra() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    (everything,) = extras.pop("all")
    assert everything == f"epload[{','.join(extras)}]"
    described = re.findall(r"`\.\[(\w+)\]`", (ROOT / "docs" / "install.md").read_text())
    assert sorted(described) == sorted([*extras, "all"])
    assert project["keywords"]
