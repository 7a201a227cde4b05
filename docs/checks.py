"""Checks the built site: one entry for each public name, nothing internal, no line of code too long for 1280 px, and a search
that finds words inside identifiers and the page of each quoted error."""

import ast
import html
import json
import re
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

WIDTH = 99
"""Characters of code in a line that fit into a window of 1280 px, measured with the style sheet images/site.css."""
INTERNAL = ("copy_keys", "number_loader", "__post_init__")
WORDS = {"qkv": "mapping.html", "gate_proj": "recipes.html", "LOCAL_RANK": "launchers.html"}
"""Words, most of them inside identifiers, and a page that a search for them finds."""
_DOCS = Path(__file__).parent
_PACKAGE = _DOCS.parent / "python" / "epload"


class _Page(HTMLParser):
    """Collects a page's lines of code and the identifiers of its API entries."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.code: list[str] = []
        self.entries: list[str] = []
        self._in_code = False
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        values = dict(attributes)
        if tag == "pre":
            self._in_code = True
            self.code.append("")
        if tag in ("h2", "h3", "h4") and "doc-heading" in (values.get("class") or ""):
            self.entries.append(values.get("id") or "")

    def handle_endtag(self, tag: str) -> None:
        self._in_code = self._in_code and tag != "pre"

    def handle_data(self, data: str) -> None:
        if self._in_code:
            self.code[-1] += data


def on_post_build(config: Any, **_: Any) -> None:
    """Raises PluginError with all that is wrong."""
    from mkdocs.exceptions import PluginError

    site = Path(config.site_dir)
    pages = {path.relative_to(site).as_posix(): path.read_text() for path in site.rglob("*.html")}
    index = json.loads((site / "search" / "search_index.json").read_text())
    problems = [*_problems_of_pages(pages), *_problems_of_search(index)]
    if problems:
        raise PluginError("\n".join(["the site is built, but", *problems]))


def _problems_of_pages(pages: dict[str, str]) -> list[str]:
    problems = []
    entries: Counter[str] = Counter()
    for name, text in pages.items():
        page = _Page(text)
        entries.update(page.entries)
        for line in (line for code in page.code for line in code.splitlines()):
            if len(line) > WIDTH:
                problems.append(f"{name} has {len(line)} characters of code in a line, expected {WIDTH} at most: {line}")
        problems += [f"{name} shows {internal}, which is internal" for internal in INTERNAL if internal in text]
    for name in _public_names():
        count = sum(entries[f"epload.{module}{name}"] for module in ("", "load.", "save.", "mapping."))
        if count != 1:
            problems.append(f"{name} has {count} entries, expected one")
    return problems


def _public_names() -> set[str]:
    """Returns the names that ``epload`` and ``epload.mapping`` export, read from their sources."""
    names: set[str] = set()
    for path in (_PACKAGE / "__init__.py", _PACKAGE / "mapping" / "__init__.py"):
        for node in ast.parse(path.read_text()).body:
            is_list = isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict | ast.List)
            if is_list and ast.unparse(node.targets[0]) in ("_MODULES", "__all__"):
                names |= set(ast.literal_eval(node.value))
    return names - {"__version__"}


def _problems_of_search(index: dict[str, Any]) -> list[str]:
    """Searches for each word of ``WORDS``, and for each message that docs/troubleshooting.md quotes."""
    separator = re.compile(index["config"]["separator"])
    sections = [
        (section["location"], _words(separator, section["title"]), _words(separator, section["text"]))
        for section in index["docs"]
    ]
    problems = []
    for word, page in WORDS.items():
        words = _words(separator, word)
        found = {location.partition("#")[0] for location, title, text in sections if words <= title | text}
        if page not in found:
            problems.append(f"a search for {word} finds {sorted(found)}, expected {page}, too")
    page_text = (_DOCS / "troubleshooting.md").read_text()
    for message in re.findall(r"^### `(.+)`$", page_text, re.MULTILINE):
        words = _words(separator, message)
        # As in the theme's search, words in titles come first.
        best, title, _ = max(sections, key=lambda section: (len(words & section[1]), len(words & section[2])))
        if not (best.startswith("troubleshooting.html#") and words <= title):
            problems.append(f"a search for {message} finds {best} first, expected its section of troubleshooting.html")
    return problems


def _words(separator: re.Pattern[str], text: str) -> set[str]:
    plain = html.unescape(re.sub(r"<[^>]+>", " ", text))
    return {word.lower() for word in separator.split(plain) if word}
