"""The README: short, and the same as the pages that it takes its parts from."""

from __future__ import annotations

import re
from pathlib import Path

from epload.mapping.transformers import SUPPORTED

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
START = (ROOT / "docs" / "index.md").read_text()
MAKEFILE = (ROOT / "Makefile").read_text()


def section(page: str, heading: str) -> str:
    match = re.search(rf"^## {heading}\n(.*?)(?=^## |\Z)", page, re.MULTILINE | re.DOTALL)
    assert match is not None, f"no section {heading}"
    return match[1].strip()


def test_it_is_short() -> None:
    words = [word for word in README.split() if re.search(r"\w", word)]  # no rules of tables
    assert len(words) <= 600


def test_it_has_its_other_parts() -> None:
    assert all(section(README, heading) for heading in ("Status", "Limits", "Documentation"))


def test_there_is_one_quickstart() -> None:
    quickstart = section(README, "Quickstart").replace("](docs/", "](")
    assert section(START, "Quickstart").startswith(quickstart)
    assert "Linux" in quickstart


def test_the_quickstart_pins_what_is_tested() -> None:
    pins = dict(re.findall(r"(\w+)==([\d.]+)", section(README, "Quickstart")))
    tested = re.search(r"^TORCH \?= torch==(.*)$", MAKEFILE, re.MULTILINE)
    assert tested is not None
    assert pins.keys() == {"torch", "transformers"}
    assert pins["torch"] == tested[1]
    assert pins["transformers"].rpartition(".")[0] == SUPPORTED[1]  # that of the whole test suite


def test_its_results_are_those_of_the_page_on_performance() -> None:
    def rows(text: str) -> list[str]:
        return [line for line in text.splitlines() if line.startswith("| ") and re.search(r"\d", line)]

    quoted = rows(section(README, "Results"))
    measured = section((ROOT / "docs" / "performance.md").read_text(), "On a GPU")
    assert len(quoted) >= 5
    assert set(quoted) <= set(rows(measured))
    hardware = re.search(r"epload of commit .* in\s+[\d,]+", section(README, "Results").replace("\n", " "))
    assert hardware is not None
    assert hardware[0] in measured.replace("\n", " ")
