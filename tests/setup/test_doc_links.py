"""Links of the pages lead to files and headings that are there."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "examples").glob("*.md")])


@cache
def prose(page: Path) -> str:
    return re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)


@cache
def anchors(page: Path) -> set[str]:
    """Of headings, as GitHub and mkdocs make them."""
    titles = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_resolve(page: Path) -> None:
    text = re.sub(r"`[^`]*`(?!\])", "", prose(page))
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", link):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.exists(), f"{page.name}: {link}"
        assert not anchor or anchor in anchors(target), f"{page.name}: {link} has no such heading"


def test_every_page_can_be_found_from_the_readme() -> None:
    seen, left = set[Path](), [ROOT / "README.md"]
    while left:
        page = left.pop()
        if page not in seen:
            seen.add(page)
            links = re.findall(r"\]\(([^)\s#:]+\.md)", prose(page))
            left += [target for link in links if (target := (page.parent / link).resolve()).is_file()]
    assert not set(PAGES) - seen
