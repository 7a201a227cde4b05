"""The notebook runs from the first cell to the last, and shows what its text announces."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient
from traitlets.config import Config

PATH = Path(__file__).parents[2] / "examples" / "one_process.ipynb"


def code_cells(notebook: Any) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def text(outputs: list[Any]) -> str:
    return "".join(each.get("text") or each.get("data", {}).get("text/plain", "") for each in outputs)


def shown(outputs: dict[str, list[Any]], source: str) -> list[Any]:
    (found,) = [of_cell for cell, of_cell in outputs.items() if source in cell]
    return found


def test_it_is_kept_without_outputs() -> None:
    cells = code_cells(nbformat.read(PATH, as_version=4))
    assert cells
    assert [cell for cell in cells if cell.outputs or cell.execution_count is not None] == []


def test_it_shows_what_it_announces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    notebook = nbformat.read(PATH, as_version=4)
    monkeypatch.chdir(tmp_path)  # sockets of the kernel are here: another process could take ports before it listens
    config = Config({"KernelManager": {"transport": "ipc"}})
    NotebookClient(notebook, timeout=300, kernel_name="python3", config=config).execute()
    outputs = {cell.source: cell.outputs for cell in code_cells(notebook)}
    (report,) = [each.data["text/html"] for each in shown(outputs, "report = epload.load") if "data" in each]
    assert "readers=every" in report
    assert text(shown(outputs, "full_tensor")) == "True"
    assert "every | auto -> every" in text(shown(outputs, "report.reason"))
    assert "auto -> every" in text(shown(outputs, "epload plan"))
    assert any("image/png" in each.get("data", {}) for each in shown(outputs, "report.plot"))
    assert "epload/seconds" in text(shown(outputs, "scalars"))
    assert "readers=one" in text(shown(outputs, "HierarchicalLoader"))
