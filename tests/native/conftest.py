"""Fixtures of the tests of native code."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from support.region_reads import Files


@pytest.fixture
def files(tmp_path: Path) -> Iterator[Files]:
    made = Files(tmp_path)
    yield made
    made.close()
