"""Makes a site of docs/, whose pages are also read in the repository.

A link out of docs/ that is alone on its line and leads to a script becomes the script. One to a file in ``PAGES`` becomes a link
to its page, and any other becomes text, the path within the repository.
"""

import json
import os
import re
from pathlib import Path
from typing import Any

PAGES = {
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "examples/one_process.ipynb": "notebook.md",
}
"""Files outside docs/ that are pages of the site, by their paths within the repository."""
BOOST = {"troubleshooting.md": 5, "api/epload.md": 2}
"""Pages that a search lists before others, as they have the text of errors and the names of arguments."""
_ROOT = Path(__file__).parents[1]
_LINK = re.compile(r"(?<!!)\[([^\]]+)\]\((?!\w+:|#)([^)#\s]+)(#[^)\s]*)?\)")
_SCRIPT = re.compile(rf"^{_LINK.pattern}$", re.MULTILINE)


def on_files(files: Any, config: Any, **_: Any) -> Any:
    from mkdocs.structure.files import File

    for path, uri in PAGES.items():
        text = (_ROOT / path).read_text()
        files.append(File.generated(config, uri, content=_cells(text) if path.endswith(".ipynb") else text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    uri = page.file.src_uri
    if uri in BOOST:
        page.meta["search"] = {"boost": BOOST[uri]}
    source = next((path for path, generated in PAGES.items() if generated == uri), f"docs/{uri}")

    def script(link: re.Match[str]) -> str:
        path = _target(source, link[2])
        return f'```python title="{path}"\n{(_ROOT / path).read_text()}```' if path.endswith(".py") else link[0]

    def text(link: re.Match[str]) -> str:
        path = _target(source, link[2])
        if path in PAGES or path.startswith("docs/"):
            to = PAGES.get(path, path.removeprefix("docs/"))
            return f"[{link[1]}]({os.path.relpath(to, Path(uri).parent)}{link[3] or ''})"
        return f"`{path}`" if link[1].strip("`") in path else f"{link[1]} (`{path}`)"

    # Code stays as it is, that of included scripts, too.
    parts = re.split(r"(^```.*?^```$)", _SCRIPT.sub(script, markdown), flags=re.MULTILINE | re.DOTALL)
    return "".join(part if part.startswith("```") else _LINK.sub(text, part) for part in parts)


def _target(source: str, link: str) -> str:
    """Returns the path within the repository of what a link in the file ``source`` leads to."""
    path = os.path.normpath(Path(source).parent / link)
    if not (_ROOT / path).exists():
        raise FileNotFoundError(f"{source} links to {link}, which does not exist")
    return path


def _cells(notebook: str) -> str:
    parts = []
    for cell in json.loads(notebook)["cells"]:
        text = "".join(cell["source"])
        parts.append(text if cell["cell_type"] == "markdown" else f"```python\n{text}\n```")
    return "\n\n".join(parts) + "\n"
