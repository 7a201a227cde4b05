"""Supported versions of torch and Python: one answer everywhere."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import torch

from epload.mapping.transformers import SUPPORTED

ROOT = Path(__file__).parents[2]


def minors(text: str, pattern: str) -> list[str]:
    found = re.search(pattern, text)
    assert found is not None, f"nothing like {pattern}"
    return list(found.groups())


def test_the_supported_versions_are_those_that_are_tested() -> None:
    setup, makefile = (ROOT / "setup.py").read_text(), (ROOT / "Makefile").read_text()
    readme, project = (ROOT / "README.md").read_text(), (ROOT / "pyproject.toml").read_text()
    oldest, newest = minors(setup, r"FIRST_MINOR, LAST_MINOR = (\d+), (\d+)")
    assert minors(setup, r'SUPPORTED_TORCH = ">=2\.(\d+),<2\.(\d+)"') == [oldest, str(int(newest) + 1)]
    assert minors(makefile, r"OLDEST \?= torch==2\.(\d+)\.") == [oldest]
    assert minors(makefile, r"NEWEST \?= torch==2\.(\d+)\.") == [newest]
    wheels = " ".join(f"2.{minor}" for minor in range(int(oldest), int(newest) + 1))
    assert minors(makefile, r"WHEEL_TORCH \?= (.*)") == [wheels]
    assert minors(readme, r"\(2\.(\d+) to 2\.(\d+)\)") == [oldest, newest]
    first, last = minors(readme, r"Python 3\.(\d+) to 3\.(\d+)")
    assert minors(project, r'requires-python = ">=3\.(\d+),<3\.(\d+)"') == [first, str(int(last) + 1)]
    assert int(oldest) <= int(torch.__version__.split(".")[1]) <= int(newest)
    assert int(first) <= sys.version_info.minor <= int(last)
    assert minors(project, r'target-version = "py3(\d+)"') == [first]
    assert minors(project, r'python_version = "3\.(\d+)"') == [first]
    classified = re.findall(r'"Programming Language :: Python :: 3\.(\d+)"', project)
    assert classified == [str(minor) for minor in range(int(first), int(last) + 1)]


def test_the_supported_transformers_are_those_that_are_tested() -> None:
    oldest, newest = (int(version.partition(".")[2]) for version in SUPPORTED)
    requirements = (ROOT / "requirements-dev.txt").read_text()
    assert minors(requirements, r"transformers>=5\.(\d+),<5\.(\d+) ") == [str(oldest), str(newest + 1)]
    assert minors((ROOT / "Makefile").read_text(), r"TRANSFORMERS_OLDEST \?= transformers==5\.(\d+)\.") == [str(oldest)]
    for page in ("README.md", "CHANGELOG.md", "docs/models.md"):
        found = minors((ROOT / page).read_text(), r"transformers,? \(?(?:versions )?5\.(\d+) to 5\.(\d+)")
        assert found == [str(oldest), str(newest)], page
    files = (ROOT / "tests/transformers.txt").read_text().split()
    assert [file for file in files if not (ROOT / file.partition("::")[0]).exists()] == []
