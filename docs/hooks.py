"""Links out of docs/, which work in the repository, are text on the site."""

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
        return f"`{link[1]}`"

    return _OUTSIDE.sub(text, markdown)
