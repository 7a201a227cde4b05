"""Makes links out of docs/, which work in the repository, text on the site: the path within the repository."""

import re
from pathlib import Path
from typing import Any

_OUTSIDE = re.compile(r"\[([^\]]+)\]\((\.\./[^)#]+)(?:#[^)]*)?\)")


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    folder = Path(config.docs_dir) / Path(page.file.src_uri).parent

    def text(link: re.Match[str]) -> str:
        target = (folder / link[2]).resolve()
        if target.is_relative_to(Path(config.docs_dir).resolve()):
            return link[0]
        if not target.exists():
            raise FileNotFoundError(f"{page.file.src_uri} links to {link[2]}, which does not exist")
        path = target.relative_to(Path(config.docs_dir).resolve().parent)
        return f"`{path}`" if link[1] in str(path) else f"{link[1]} (`{path}`)"

    return _OUTSIDE.sub(text, markdown)
