"""Network namespaces, for tests that need them."""

from __future__ import annotations

import os

import pytest

from netbed import available


def require(what: str) -> None:
    """Skips, or fails where that is asked for, if there can be no test-bed. ``what`` is then not checked."""
    if why := available():
        if os.environ.get("EPLOAD_FAIL_WITHOUT_NETBED") == "1":
            pytest.fail(f"EPLOAD_FAIL_WITHOUT_NETBED=1, and there can be no test-bed: {why}")
        pytest.skip(f"NOT CHECKED: {what}; {why}")
