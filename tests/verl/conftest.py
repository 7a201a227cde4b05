"""A local Ray cluster, whose workers find epload and the tests' support."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray

TESTS = Path(__file__).parents[1]


@pytest.fixture(scope="session")
def cluster() -> Iterator[str]:
    """The cluster's address."""
    paths = os.pathsep.join(map(str, [TESTS, TESTS.parent / "python", Path(__file__).parent]))
    os.environ["RAY_AUTH_MODE"] = "disabled"
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        object_store_memory=100 << 20,
        runtime_env={"env_vars": {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}},
        _node_ip_address="127.0.0.1",
    )
    yield ray.get_runtime_context().gcs_address
    ray.shutdown()
