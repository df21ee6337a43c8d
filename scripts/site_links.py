"""A hook of mkdocs: the README opens the site, and links to files outside docs/ become those files' names.

On a page in the repository such links lead to the files; the site does not have them. Refuses to know: quire.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
_LINK = re.compile(r"\[([^\]\n]*(?:\n[^\]\n]+)?)\]\(([^)\s#]+)(#[^)\s]*)?\)")


def on_files(files: Any, config: Any) -> Any:
    """The README as index.md, its links as seen from docs/."""
    from mkdocs.structure.files import File

    files.append(File.generated(config, "index.md", content=inside((ROOT / "README.md").read_text(), ROOT)))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    return inside(markdown, ROOT / "docs")


def inside(text: str, folder: Path) -> str:
    """A page of `folder` with links that work in the site: to pages beside it, or elsewhere, and no others."""

    def put(match: re.Match[str]) -> str:
        words, link, anchor = match[1], match[2], match[3] or ""
        if re.match(r"[a-z]+:", link):
            return match[0]
        target = (folder / link).resolve()
        if target == ROOT / "README.md":
            return f"[{words}](index.md{anchor})"
        if target.parent == ROOT / "docs":
            return f"[{words.removeprefix('docs/')}]({target.name}{anchor})"
        return words

    return _LINK.sub(put, text)
