"""A cluster as a TOML file, for ``epload simulate`` and ``epload plan --cluster``."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from epload.files import read_regular
from epload.planning.costs import StoreRates
from epload.planning.simulator import Cluster


@dataclass(frozen=True)
class ClusterFile:
    """What the file says."""

    cluster: Cluster
    checkpoint: dict[str, Any]
    """``path``, ``model``, or ``bytes`` and ``tensors``; empty without this table."""

    @classmethod
    def read(cls, path: Path) -> ClusterFile:
        """Raises ValueError, OSError."""
        try:
            content = tomllib.loads(read_regular(path).decode())
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"{path}: expected a TOML file: {error}") from error
        _check_keys(path, "", content, ("cluster", "checkpoint", "store"))
        known = {each.name: each for each in fields(Cluster) if each.name != "store"}
        values = content.get("cluster", {})
        _check_keys(path, "[cluster]", values, tuple(known))
        if absent := [name for name in ("nodes", "ranks", "link") if name not in values]:
            raise ValueError(f"{path}: expected {', '.join(absent)} in [cluster]")
        for name, value in values.items():
            expected = {"int": (int,), "float": (int, float), "bool": (bool,)}[str(known[name].type)]
            if type(value) not in expected or value < 0 or (name in ("nodes", "ranks", "link") and value <= 0):
                raise ValueError(
                    f"{path}: expected {name} in [cluster] to be a positive {known[name].type}, got {value!r}"
                )
        store = content.get("store", {})
        _check_keys(path, "[store]", store, tuple(each.name for each in fields(StoreRates)))
        checkpoint = content.get("checkpoint", {})
        _check_keys(path, "[checkpoint]", checkpoint, ("path", "model", "bytes", "tensors"))
        return cls(Cluster(**values, store=StoreRates(**store)), checkpoint)


def _check_keys(path: Path, where: str, values: Any, known: tuple[str, ...]) -> None:
    if not isinstance(values, dict):
        raise ValueError(f"{path}: expected {where} to be a table")
    if others := [name for name in values if name not in known]:
        raise ValueError(
            f"{path}: expected keys among {', '.join(known)} {f'in {where}' if where else ''}, got {others[0]!r}"
        )
