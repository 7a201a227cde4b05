"""Tables that are shown on a terminal and written into the docs, from the same rows."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass
class Table:
    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    """A row that is shorter than the columns has its last text over the rest."""

    def show(self) -> None:
        from rich.console import Console  # tests import this file where there is no rich
        from rich.table import Table as RichTable

        table = RichTable(title=self.title, title_justify="left")
        for i, column in enumerate(self.columns):
            table.add_column(column, justify="left" if i == 0 else "right", overflow="fold")
        for row in self.rows:
            table.add_row(*(text.replace("**", "") for text in row))
        Console(width=150).print(table)

    def markdown(self) -> str:
        lines = [self.columns, ["---", *["---:"] * (len(self.columns) - 1)]]
        lines += [[*row, *[""] * (len(self.columns) - len(row))] for row in self.rows]
        body = "\n".join("| " + " | ".join(text.replace("|", "/") for text in line) + " |" for line in lines)
        return f"**{self.title}**\n\n{body}\n"


def write(page: Path, mark: str, texts: Sequence[str]) -> None:
    """Puts texts between ``<!-- begin MARK -->`` and ``<!-- end MARK -->`` of a page. ValueError if it has no such place."""
    begin, end = f"<!-- begin {mark} -->", f"<!-- end {mark} -->"
    old = page.read_text()
    if not re.search(f"{re.escape(begin)}.*{re.escape(end)}", old, re.S):
        raise ValueError(f"{page} has no {begin} ... {end}")
    new = f"{begin}\n" + "\n".join(texts).strip() + f"\n{end}"
    page.write_text(re.sub(f"{re.escape(begin)}.*{re.escape(end)}", lambda _: new, old, flags=re.S))


def provenance(facts: dict[str, object]) -> str:
    """The line under which numbers stand."""
    took = f", in {facts['minutes']:.0f} minutes" if "minutes" in facts else ""
    return (
        f"`{facts['command']}`, {facts['date']}, {facts['hardware']}, {facts['software']}{took}. "
        "Made by this command, not by hand.\n"
    )


def seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}" if value < 100 else f"{value:.0f}"


def megabytes(value: float | None) -> str:
    return "" if value is None else f"{value / 1e6:.0f}"


def times(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}" if value < 10 else f"{value:.0f}"
