"""Docstrings as Markdown: their roles (``:class:`Mapping```) become links, and what ``::`` introduces becomes code."""

import re
from pathlib import Path
from typing import Any

import griffe

PACKAGE = Path(__file__).parents[1] / "python" / "epload"

_ROLE = re.compile(r":(?:class|func|meth|attr|mod):`(~?)([\w.]+)`")
_LITERAL_BLOCK = re.compile(r"::$", re.MULTILINE)
_EXAMPLE = re.compile(r"^Example::?\n(?=\n)", re.MULTILINE)


class Docstrings(griffe.Extension):
    """Griffe calls :meth:`on_object` with each object that it has collected."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        obj.labels -= {"class-attribute", "instance-attribute"}
        if obj.docstring is None:
            return

        def link(role: re.Match[str]) -> str:
            name = role[2]
            shown = name.rsplit(".", 1)[-1] if role[1] else name
            return f'<autoref identifier="{_identifier(name, obj)}" optional><code>{shown}</code></autoref>'

        text = _ROLE.sub(link, obj.docstring.value)
        text = _EXAMPLE.sub("**Example**\n", text)
        obj.docstring.value = _LITERAL_BLOCK.sub(":", text)


def _identifier(name: str, obj: griffe.Object) -> str:
    """The full name of what a docstring of ``obj`` calls ``name``."""
    scope = obj if obj.is_class or obj.is_module else obj.parent
    if scope is not None and name in scope.members:
        name = f"{scope.path}.{name}"
    elif not name.startswith("epload."):
        name = f"epload.{name}"
    last = name.rsplit(".", 1)[-1]
    # A function such as epload.save, whose module has the same name.
    return f"{name}.{last}" if name == f"epload.{last}" and _is_module(last) else name


def _is_module(name: str) -> bool:
    return (PACKAGE / f"{name}.py").is_file()
